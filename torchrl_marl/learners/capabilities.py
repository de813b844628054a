"""What goes together in a run: one table, from which the refusals and a page are made.

A :class:`Feature` is something that a run may have, such as a population; each :class:`Limit` of it
is a setting that does not go with it, and why. ``docs/capabilities.md`` shows them all.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable
from typing import Any

from torchrl_marl.errors import ConfigError
from torchrl_marl.learners.algorithms import ALGORITHMS
from torchrl_marl.learners.off_policy_config import ReplayLearnerConfig
from torchrl_marl.settings.formatting import listed, shown

__all__ = [
    "FEATURES",
    "POPULATION",
    "RANKS",
    "VARYING",
    "Feature",
    "Limit",
    "check_members",
    "varying_of",
]


@dataclasses.dataclass(frozen=True)
class Limit:
    """A setting that does not go with a feature.

    Args:
        key (str): the setting; of a learner without ``learner.``.
        why (str): how the sentence goes on behind its value; ``{}`` is what ``when`` found.
        goes (tuple, optional): values that do go, beside null and ``none``; None: nothing else is
            offered.
        when (callable): of the settings, whether other values are refused.
    """

    key: str
    why: str
    goes: tuple[Any, ...] | None = ()
    when: Callable[[Any], Any] = lambda settings: True

    def check(self, settings: Any, at: str, otherwise: str = "") -> None:
        """Refuses a value that does not go.

        Args:
            settings (dataclass): of a learner, or of a whole run.
            at (str): what stands before the names in messages.
            otherwise (str): what else helps.

        Raises:
            ConfigError: naming the setting, the reason and the fix.
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
        """What to give instead, in words."""
        return listed(str(value).lower() for value in self.goes or ("null",))


def _value_of(settings: Any, key: str) -> Any:
    """Returns a setting by its dotted name; None where these settings have none such."""
    for name in key.split("."):
        settings = getattr(settings, name, None)
    return settings


@dataclasses.dataclass(frozen=True)
class Feature:
    """Something that a run may have, and what does not go with it.

    Args:
        name (str): in words.
        asked (callable): of a run's settings, and of whether the caller brings an environment:
            whether the run has the feature.
        run (tuple of Limit): settings of the run that do not go with it.
        learner (tuple of Limit): likewise of each learner.
        otherwise (str): how to do without the feature.
    """

    name: str
    asked: Callable[[Any, bool], Any]
    run: tuple[Limit, ...] = ()
    learner: tuple[Limit, ...] = ()
    otherwise: str = ""

    def check(self, run: Any) -> None:
        """Refuses what does not go with this feature.

        Args:
            run (TrainConfig): the settings of the run, which has it.

        Raises:
            ConfigError: naming the setting and the fix.
        """
        self._check(self.run, run, "")
        for at, learner in run.learners().items():
            self.check_learner(learner, at)

    def check_learner(self, learner: Any, at: str = "learner.") -> None:
        """Refuses settings of a learner that do not go with this feature."""
        self._check(self.learner, learner, at)

    def _check(self, limits: Iterable[Limit], settings: Any, at: str) -> None:
        for limit in limits:
            limit.check(settings, at, self.otherwise)


# ----------------------------------------------------- what members of a population can differ in

_EPSILON = ("exploration.epsilon", "exploration.epsilon_end")
_COEFFICIENTS = ("entropy_coeff", "critic_coeff", "clip_epsilon")
_ON_POLICY = ("lr", *_COEFFICIENTS, "gamma", "lmbda", "max_grad_norm")
_VALUES = ("lr", "gamma", "max_grad_norm", *_EPSILON)
_OFF_POLICY = ("actor_lr", "critic_lr", "gamma", "max_grad_norm", *_EPSILON)
_OF_ALGORITHM: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(("mappo", "ippo"), _ON_POLICY),
    "pqn": ("lr", "gamma", "lmbda", "max_grad_norm"),
    **dict.fromkeys(("qmix", "vdn", "iql"), _VALUES),
    **dict.fromkeys(("maddpg", "iddpg", "matd3", "itd3"), _OFF_POLICY),
    **dict.fromkeys(("masac", "isac"), (*_OFF_POLICY, "alpha_lr")),
}

VARYING = tuple(dict.fromkeys(name for names in _OF_ALGORITHM.values() for name in names))
"""Settings of a learner that may differ from member to member, of any algorithm."""


def varying_of(config: Any) -> tuple[str, ...]:
    """Returns the settings that may differ from member to member.

    Args:
        config (LearnerConfig): how they learn.

    Examples:
        >>> from torchrl_marl.learners.off_policy_config import ValueConfig
        >>> varying_of(ValueConfig())[:2]
        ('lr', 'gamma')
    """
    return _OF_ALGORITHM.get(config.algorithm, ())


def check_members(config: Any, at: str = "learner.") -> None:
    """Refuses settings with which members of a population would not learn by themselves.

    Args:
        config (LearnerConfig): how they learn.
        at (str): what stands before the names in messages.

    Raises:
        ConfigError: naming the setting and the fix.
    """
    POPULATION.check_learner(config, at)


# ------------------------------------------------------------------------------------- the table


def _of_networks(key: str, why: str, *goes: str, stored: bool = False) -> list[Limit]:
    """Returns a limit of the actor, and of the critic where there is one."""

    def when(learner: Any) -> bool:
        return isinstance(learner, ReplayLearnerConfig) or not stored

    return [Limit(f"{part}.{key}", why, goes or ("none",), when) for part in ("actor", "critic")]


def _why_no_league(learner: Any) -> str:
    algorithm = ALGORITHMS.find(learner.algorithm)
    return "" if algorithm is None else algorithm.no_league


_ALONE = "but the environment is one of your own, "
_DRAWS_NONE = (
    "but a population draws none of its members; `torchrl-marl evaluate FOLDER/seed0 --gif` does"
)
_FOR_TRAINING = (
    "but an external simulator plays for training alone, whose returns are in metrics.csv"
)
_NO_CLIENTS = "expected none on an external simulator, whose clients are where they are"
_NOT_IN_POPULATIONS = "which a population does not have"
_NOT_IN_RANKS = "which several processes that learn as one do not have"
_ONE_CHANNEL = "whose channel has one set of parameters for all agents, not one for each member"
_ONE_POLICY = "but distributed.collectors is {}, and shards have one policy"
_READS_ALL = "which reads all agents, those of other members too"
_TOGETHER = (
    f"expected one of {', '.join(_OF_ALGORITHM)} for a population (members of others train one "
    "after the other: --seeds without --together)"
)
_IN_ORDER = f"which updates agents in an order of each member; {_TOGETHER}"

EXTERNAL = Feature(
    "an external simulator",
    lambda run, own_env: run.env.has_clients and not own_env,
    (
        Limit("evaluation.episodes", _FOR_TRAINING, (0,)),
        Limit("population.size", _NO_CLIENTS, (1,)),
        Limit("league", _NO_CLIENTS, ("none",), lambda run: run.league.enabled),
        Limit("distributed.collectors", _NO_CLIENTS),
        Limit("evaluation.gif", _NO_CLIENTS, (False,)),
        Limit("evaluation.animate_every", _NO_CLIENTS),
    ),
)
OWN_ENV = Feature(
    "an environment of your own",
    lambda run, own_env: own_env or run.env.library == "own",
    (
        Limit("distributed.collectors", _ALONE + "which cannot be split into shards"),
        Limit(
            "league.opponents",
            _ALONE + "on which stored players cannot meet beside the training",
            ("pfsp",),
            lambda run: run.league.opponents == "nash",
        ),
        Limit("population.size", _ALONE + "of which members cannot each have some", (1,)),
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
    "shards on Ray, or that play ahead",
    lambda run, own_env: (
        run.distributed.enabled and (run.distributed.backend == "ray" or run.distributed.overlap)
    ),
    learner=(
        Limit("unshare_at", "but the networks of shards elsewhere or ahead keep their shapes"),
    ),
)
RANKS = Feature(
    "several processes of torchrun",
    lambda run, own_env: False,  # nothing in the settings asks for them
    (
        Limit(
            "env.library",
            "whose clients come to one process",
            None,
            lambda run: run.env.has_clients,
        ),
        Limit(
            "distributed.backend",
            "but torchrun has started processes, which collect for themselves",
            ("none",),
        ),
        Limit("distributed.asynchronous", "but several processes learn from one batch", (False,)),
        Limit("distributed.overlap", _NOT_IN_RANKS, (0,)),
    ),
    (
        Limit(
            "algorithm",
            "which one process learns alone",
            ("mappo", "ippo"),
            lambda own: not ALGORITHMS.learner(own.algorithm).over_ranks,
        ),
        Limit("unshare_at", _NOT_IN_RANKS),
    ),
    otherwise="start one process",
)
LEAGUE = Feature(
    "a league",
    lambda run, own_env: run.league.enabled,
    (Limit("population.size", "but a league is given, which one run has", (1,)),),
    (
        Limit("algorithm", "but a league is given, {}", ("mappo", "ippo", "happo"), _why_no_league),
        Limit("unshare_at", "but a league's stored players keep their networks' shapes"),
    ),
)
POPULATION = Feature(
    "a population",
    lambda run, own_env: run.population.size > 1,
    (
        Limit("stop_at_return", "but a population's members end together"),
        Limit("evaluation.gif", _DRAWS_NONE, (False,)),
        Limit("evaluation.animate_every", _DRAWS_NONE),
    ),
    (
        Limit("algorithm", _IN_ORDER, None, lambda own: own.algorithm == "happo"),
        Limit("algorithm", _TOGETHER, None, lambda own: own.algorithm not in _OF_ALGORITHM),
        *_of_networks("memory.kind", f"{_NOT_IN_POPULATIONS} where steps are stored", stored=True),
        Limit("replay.alpha", "but a population samples its replay buffer uniformly", (0,)),
        Limit("mixer.over", _NOT_IN_POPULATIONS, ("group",), lambda own: own.mixes_team),
        Limit(
            "central_input",
            "which all members of a population would see",
            ("observations", "team"),
            lambda own: own.central,
        ),
        Limit("unshare_at", _NOT_IN_POPULATIONS),
        *_of_networks("sharing", "which links members of a population", "group", "none"),
        *_of_networks("communication.kind", _ONE_CHANNEL),
        Limit("critic.architecture", _READS_ALL, ("mlp",)),
        *_of_networks("body", _READS_ALL, "mlp", "cnn"),
    ),
    otherwise="use population.size=1",
)

FEATURES = (EXTERNAL, OWN_ENV, SHARDS, AHEAD, LEAGUE, POPULATION)
"""What the settings of a run may ask for, in the order in which it is checked."""
