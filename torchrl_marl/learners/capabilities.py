"""Features of a run and the settings that they exclude, for error messages and a doc page.

A :class:`Feature` is an option of a run, such as a population. Each of its :class:`Limit` objects
describes a setting that the feature excludes, and the reason. ``docs/capabilities.md`` lists all
features and limits.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable
from typing import Any

from torchrl_marl.errors import ConfigError
from torchrl_marl.learners.algorithms import ALGORITHMS
from torchrl_marl.learners.off_policy_config import ReplayLearnerConfig
from torchrl_marl.modules.registry import BODIES
from torchrl_marl.settings.formatting import listed, shown

__all__ = [
    "FEATURES",
    "OF_DATA",
    "POPULATION",
    "RANKS",
    "STAGES",
    "VARYING",
    "Feature",
    "Limit",
    "check_members",
    "varying_of",
]


@dataclasses.dataclass(frozen=True)
class Limit:
    """A setting that a feature excludes.

    Args:
        key (str): name of the setting; if it is a setting of a learner, without the prefix
            ``learner.``.
        why (str): reason, which follows the value in the error message; ``{}`` is replaced by the
            result of ``when``.
        goes (tuple, optional): allowed values, besides null and ``none``. If it is None, the
            message suggests no value.
        when (callable): function of the settings. It returns whether values other than the allowed
            ones are refused.
    """

    key: str
    why: str
    goes: tuple[Any, ...] | None = ()
    when: Callable[[Any], Any] = lambda settings: True

    def check(self, settings: Any, at: str, otherwise: str = "") -> None:
        """Refuses values that the feature excludes.

        Args:
            settings (dataclass): settings of a learner, or of a whole run.
            at (str): prefix of the setting's name in messages.
            otherwise (str): another fix to suggest in the message.

        Raises:
            ConfigError: an excluded value; the message names the setting, the reason and the fix.
        """
        value = _value_of(settings, self.key)
        if value in (None, "none", *(self.goes or ())) or not (found := self.when(settings)):
            return
        given = f"{value:g}" if isinstance(value, float) else shown(value)
        given = "given" if dataclasses.is_dataclass(value) else given
        use = "" if self.goes is None else f"use {at}{self.key}={self.instead}"
        fix = ", or ".join(filter(None, [use, otherwise])).replace(", or use ", ", or ")
        raise ConfigError(f"{at}{self.key} is {given}, {self.why.format(found)}; {fix}.")

    @property
    def instead(self) -> str:
        """Allowed values, as text."""
        return listed(str(value).lower() for value in self.goes or ("null",))


def _value_of(settings: Any, key: str) -> Any:
    """Returns a setting by its dotted name, or None if these settings do not have it."""
    for name in key.split("."):
        settings = getattr(settings, name, None)
    return settings


@dataclasses.dataclass(frozen=True)
class Feature:
    """An option of a run, and the settings that it excludes.

    Args:
        name (str): name for messages and pages.
        asked (callable): function that returns whether the run has the feature. Its arguments are
            the settings, and whether the caller passes an environment.
        run (tuple of Limit): excluded settings of the run.
        learner (tuple of Limit): excluded settings of each learner.
        otherwise (str): fix, for the message, that turns the feature off.
    """

    name: str
    asked: Callable[[Any, bool], Any]
    run: tuple[Limit, ...] = ()
    learner: tuple[Limit, ...] = ()
    otherwise: str = ""

    def check(self, run: Any) -> None:
        """Refuses settings of a run that this feature excludes, if the run has the feature.

        Args:
            run (TrainConfig): settings of the run.

        Raises:
            ConfigError: an excluded value; the message names the setting and the fix.
        """
        self._check(self.run, run, "")
        for at, learner in run.learners().items():
            self.check_learner(learner, at)

    def check_learner(self, learner: Any, at: str = "learner.") -> None:
        """Refuses settings of a learner that this feature excludes."""
        self._check(self.learner, learner, at)

    def _check(self, limits: Iterable[Limit], settings: Any, at: str) -> None:
        for limit in limits:
            limit.check(settings, at, self.otherwise)


# ------------------------------------------- settings in which members of a population may differ

_EPSILON = ("exploration.epsilon", "exploration.epsilon_end")
_COEFFICIENTS = ("entropy_coeff", "critic_coeff", "clip_epsilon")
_ON_POLICY = ("lr", *_COEFFICIENTS, "gamma", "lmbda", "max_grad_norm")
_VALUES = ("lr", "gamma", "max_grad_norm", *_EPSILON)
_OFF_POLICY = ("actor_lr", "critic_lr", "gamma", "max_grad_norm", *_EPSILON)
_OF_ALGORITHM: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(("mappo", "ippo"), _ON_POLICY),
    "pqn": ("lr", "gamma", "lmbda", "max_grad_norm"),
    **dict.fromkeys(("qmix", "vdn", "iql"), _VALUES),
    "bc": ("lr", "max_grad_norm"),
    **dict.fromkeys(("maddpg", "iddpg", "matd3", "itd3", "td3_bc", "iql_offline"), _OFF_POLICY),
    **dict.fromkeys(("masac", "isac"), (*_OFF_POLICY, "alpha_lr")),
}

_SEQUENTIAL = ("happo", "haddpg", "hatd3", "hasac")

VARYING = tuple(dict.fromkeys(name for names in _OF_ALGORITHM.values() for name in names))
"""Settings of a learner that may differ between members of a population, of any algorithm."""


def varying_of(config: Any) -> tuple[str, ...]:
    """Returns the settings that may differ between members of a population.

    Args:
        config (LearnerConfig): settings of the learner.

    Examples:
        >>> from torchrl_marl.learners.off_policy_config import ValueConfig
        >>> varying_of(ValueConfig())[:2]
        ('lr', 'gamma')
    """
    return _OF_ALGORITHM.get(config.algorithm, ())


def check_members(config: Any, at: str = "learner.") -> None:
    """Refuses settings with which members of a population would not learn independently.

    Args:
        config (LearnerConfig): settings of the learner.
        at (str): prefix of the settings' names in messages.

    Raises:
        ConfigError: an excluded value; the message names the setting and the fix.
    """
    POPULATION.check_learner(config, at)


# ------------------------------------------------------------------------------------- the table


def _of_networks(key: str, why: str, *goes: str, stored: bool = False) -> list[Limit]:
    """Returns two limits for a setting of networks: one for the actor, and one for the critic."""

    def when(learner: Any) -> bool:
        return isinstance(learner, ReplayLearnerConfig) or not stored

    return [Limit(f"{part}.{key}", why, goes or ("none",), when) for part in ("actor", "critic")]


def _of_body(part: str) -> Limit:
    """Returns a limit for bodies over all agents; networks of single agents are allowed."""

    def when(learner: Any) -> bool:
        found = BODIES.find(getattr(learner, part).body)
        return found is not None and found.body is not None

    return Limit(f"{part}.body", _READS_ALL, ("mlp", "cnn", "simba"), when)


def _why_no_league(learner: Any) -> str:
    algorithm = ALGORITHMS.find(learner.algorithm)
    return "" if algorithm is None else algorithm.no_league


def _has_league(run: Any) -> bool:
    return run.league.enabled


def _has_clients(run: Any) -> bool:
    return run.env.has_clients


def _has_no_replay(learner: Any) -> bool:
    return not isinstance(learner, ReplayLearnerConfig) and learner.algorithm != "random"


OF_DATA = ("bc", "td3_bc", "iql_offline")
"""Algorithms for datasets, which do not learn from their own steps."""
_NEEDS_REPLAY = "which learns from its own steps only, but a dataset is given"
_NO_HIDDEN = "but a dataset has no hidden states"
_OWN_ENV = "but an environment of your own cannot be split "
_NO_GIF = (
    "but a population renders no animations; run `torchrl-marl evaluate FOLDER/seed0 --gif` for one"
)
_NO_EVALUATION = (
    "but an external simulator plays for training only; returns of training are in metrics.csv"
)
_ONE_SIMULATOR = "but an external simulator does not support it: its clients serve a single run"
_NOT_IN_POPULATIONS = "but a population does not support it"
_NOT_IN_RANKS = "but several processes of torchrun do not support it"
_APART = ("group", "none", "agent_id")
_ONE_CHANNEL = "but its parameters are shared by all agents, so members would not be independent"
_ONE_POLICY = "but distributed.collectors is {}, and shards play a single policy"
_READS_ALL = "but it reads all agents, also those of other members"
_TOGETHER = (
    f"expected one of {', '.join(name for name in _OF_ALGORITHM if name not in OF_DATA)} for a "
    "population (or separate runs: --seeds without --together)"
)
_IN_ORDER = f"which updates agents in a different order for each member, {_TOGETHER}"

EXTERNAL = Feature(
    "an external simulator",
    lambda run, own_env: run.env.has_clients and not own_env,
    (
        Limit("evaluation.episodes", _NO_EVALUATION, (0,)),
        Limit("population.size", _ONE_SIMULATOR, (1,)),
        Limit("league", _ONE_SIMULATOR, ("none",), lambda run: run.league.enabled),
        Limit("distributed.collectors", _ONE_SIMULATOR),
        Limit("evaluation.gif", _NO_EVALUATION, (False,)),
        Limit("evaluation.animate_every", _NO_EVALUATION),
    ),
)
OWN_ENV = Feature(
    "an environment of your own",
    lambda run, own_env: own_env or run.env.library == "own",
    (
        Limit("distributed.collectors", _OWN_ENV + "into shards"),
        Limit(
            "league.opponents",
            "but it needs a second copy of the environment for games between stored players",
            ("pfsp",),
            lambda run: run.league.opponents == "nash",
        ),
        Limit("population.size", _OWN_ENV + "among members", (1,)),
    ),
    otherwise="name an environment (env.name, or env.library=module:Class)",
)
SHARDS = Feature(
    "shards",
    lambda run, own_env: run.distributed.enabled,
    (
        Limit("population.size", _ONE_POLICY, (1,), lambda run: run.distributed.collectors),
        Limit(
            "league",
            _ONE_POLICY,
            ("none",),
            lambda run: run.league.enabled and run.distributed.collectors,
        ),
    ),
    otherwise="use distributed.collectors=null",
)
AHEAD = Feature(
    "shards on Ray, or overlap",
    lambda run, own_env: (
        run.distributed.enabled and (run.distributed.backend == "ray" or run.distributed.overlap)
    ),
    learner=(
        Limit("unshare_at", "but the networks of shards on Ray or with overlap cannot change"),
    ),
)
RANKS = Feature(
    "several processes of torchrun",
    lambda run, own_env: False,  # torchrun starts this feature, not a setting
    (
        Limit("population.size", _NOT_IN_RANKS, (1,)),
        Limit("league", _NOT_IN_RANKS, ("none",), lambda run: run.league.enabled),
        Limit(
            "env.library",
            "but external simulators connect to a single process",
            None,
            lambda run: run.env.has_clients,
        ),
        Limit(
            "distributed.backend", "but the processes of torchrun collect without Ray", ("none",)
        ),
        Limit("distributed.asynchronous", _NOT_IN_RANKS, (False,)),
        Limit("distributed.overlap", _NOT_IN_RANKS, (0,)),
        Limit("until", _NOT_IN_RANKS, ({},)),
        Limit("stages", _NOT_IN_RANKS, ({},)),
    ),
    (
        Limit(
            "algorithm",
            "which trains in a single process",
            ("mappo", "ippo"),
            lambda own: not ALGORITHMS.learner(own.algorithm).over_ranks,
        ),
        Limit("unshare_at", _NOT_IN_RANKS),
    ),
    otherwise="start one process",
)
_ONE_BY_ONE = "but stages are runs of one policy, one after the other"
STAGES = Feature(
    "stages",
    lambda run, own_env: run.stages,
    (
        Limit("population.size", _ONE_BY_ONE, (1,)),
        Limit("league", _ONE_BY_ONE, ("none",), lambda run: run.league.enabled),
        Limit("distributed.backend", _ONE_BY_ONE, ("none",)),
    ),
    otherwise="use stages={}",
)
_NOT_FROM_DATA = "but a dataset's steps are read in this process"
DATASET = Feature(
    "a dataset",
    lambda run, own_env: run.data.folder,
    (
        Limit("population.size", "but a dataset is read by one learner", (1,)),
        Limit("league", "but stored players cannot act in recorded steps", ("none",), _has_league),
        Limit("distributed.collectors", _NOT_FROM_DATA),
        Limit("env.library", "but external simulators collect new steps", None, _has_clients),
    ),
    (
        Limit("algorithm", _NEEDS_REPLAY, OF_DATA, _has_no_replay),
        *(Limit(f"{part}.memory.kind", _NO_HIDDEN, ("none",)) for part in ("actor", "critic")),
    ),
    otherwise="use data.folder=null",
)
EXPERT = Feature(
    "an expert",
    lambda run, own_env: run.data.expert,
    (
        Limit("league", "but an expert cannot act beside stored players", ("none",), _has_league),
        Limit("distributed.collectors", "but an expert acts in one process"),
        Limit("env.library", "but external simulators have no expert", None, _has_clients),
    ),
    (
        Limit(
            "algorithm",
            "but an expert is given, whose actions only bc copies",
            ("bc",),
            lambda own: own.algorithm != "bc",
        ),
    ),
    otherwise="use data.expert=null",
)
LEAGUE = Feature(
    "a league",
    lambda run, own_env: run.league.enabled,
    (Limit("population.size", "but a league does not support it", (1,)),),
    (
        Limit("algorithm", "but a league is given, {}", ("mappo", "ippo", "happo"), _why_no_league),
        Limit("unshare_at", "but the networks of a league's stored players cannot change"),
    ),
)
POPULATION = Feature(
    "a population",
    lambda run, own_env: run.population.size > 1,
    (
        Limit("stop_at_return", "but members of a population stop together"),
        Limit("until", "but members of a population stop together", ({},)),
        Limit("evaluation.gif", _NO_GIF, (False,)),
        Limit("evaluation.animate_every", _NO_GIF),
    ),
    (
        Limit("algorithm", _IN_ORDER, None, lambda own: own.algorithm in _SEQUENTIAL),
        Limit("algorithm", _TOGETHER, None, lambda own: own.algorithm not in _OF_ALGORITHM),
        *_of_networks("memory.kind", f"{_NOT_IN_POPULATIONS} with a replay buffer", stored=True),
        Limit("replay.alpha", "but a population samples its replay buffer uniformly", (0,)),
        Limit("mixer.over", _NOT_IN_POPULATIONS, ("group",), lambda own: own.mixes_team),
        Limit("unshare_at", _NOT_IN_POPULATIONS),
        Limit("lr_schedule", _NOT_IN_POPULATIONS, ("constant", "linear")),
        *_of_networks("sharing", "but it would link members of a population", *_APART),
        *_of_networks("communication.kind", _ONE_CHANNEL),
        Limit("critic.architecture", _READS_ALL, ("mlp",)),
        _of_body("actor"),
        _of_body("critic"),
    ),
    otherwise="use population.size=1",
)

FEATURES = (EXTERNAL, OWN_ENV, SHARDS, AHEAD, STAGES, DATASET, EXPERT, LEAGUE, POPULATION)
"""Features that the settings of a run may ask for, in the order of the checks."""
