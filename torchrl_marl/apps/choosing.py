"""Finds the algorithms that fit an environment, from properties such as turns and deaths."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from tensordict import TensorDictBase
from torch import Tensor
from torchrl.envs import EnvBase

from torchrl_marl.collectors import RolloutCollector, TeamPolicy
from torchrl_marl.envs.config import EnvConfig
from torchrl_marl.envs.libraries import LIBRARIES
from torchrl_marl.envs.make import make_env, named_config
from torchrl_marl.envs.transforms import with_dense_groups
from torchrl_marl.errors import ConfigError, MissingExtraError, UserError, closest, quoted
from torchrl_marl.functional import masked_mean
from torchrl_marl.learners.algorithms import ALGORITHMS
from torchrl_marl.learners.build import build_learners
from torchrl_marl.learners.capabilities import OF_DATA
from torchrl_marl.learners.team_checks import acts_in_turns, rivals_among
from torchrl_marl.modules import RandomActor
from torchrl_marl.recipes import load_config, recipe_names
from torchrl_marl.runtime.random_state import RandomState
from torchrl_marl.settings import check, read, settings_of, shown, unread
from torchrl_marl.specs import GroupSpec, TeamSpec
from torchrl_marl.training.config import TrainConfig

__all__ = ["Fit", "Fits", "Traits", "algorithms_for", "traits_of"]


@dataclass(frozen=True)
class Traits:
    """Properties of an environment, seen in random play, that decide which algorithms fit it.

    Args:
        agents (dict): group -> number of agents.
        actions (dict): group -> description of the actions.
        shared (bool or None): True if all agents of a group get the same reward; None if all
            rewards in the batch were 0.
        rivals (tuple of str): two agents or groups with opposed rewards; empty without rivals.
        in_turns (bool): True if agents wait while others act.
        deaths (bool): True if agents terminate before their episode ends.
        state (str): description of the state that a central critic reads; empty without a state.
    """

    agents: dict[str, int]
    actions: dict[str, str]
    shared: bool | None
    rivals: tuple[str, ...]
    in_turns: bool
    deaths: bool
    state: str

    def rows(self) -> list[tuple[str, str]]:
        """Returns the rows of a table, each a name and a text."""
        several = any(n > 1 for n in self.agents.values())
        rewards = "each agent's own"
        if self.shared:
            rewards = "one for all agents of a group" if several else "each group's own"
        if self.shared is None:
            rewards = "none with random actions"
        if self.rivals:
            rewards += f"; {self.rivals[0]} and {self.rivals[1]} compete"
        differ = len(set(self.actions.values())) > 1
        actions = self.actions.items() if differ else list(self.actions.items())[:1]
        return [
            ("agents", ", ".join(f"{name}: {n}" for name, n in self.agents.items())),
            ("actions", "; ".join(f"{name}: {x}" if differ else x for name, x in actions)),
            ("rewards", rewards),
            ("turns", "in turns, or at their own pace" if self.in_turns else "all act at once"),
            ("deaths", "before the episode ends" if self.deaths else "none with random actions"),
            ("state", self.state or "none; critics see the agents' observations"),
        ]


def traits_of(team: TeamSpec, batch: TensorDictBase) -> Traits:
    """Returns the properties of an environment, from its specs and a batch of random actions.

    Args:
        team (TeamSpec): groups of agents.
        batch (TensorDictBase): rollout with dense groups, ``[E, T]``.

    Examples:
        >>> from torchrl_marl.collectors import RolloutCollector
        >>> from torchrl_marl.envs.toy import MatrixGame
        >>> env = MatrixGame(4, seed=0)
        >>> batch = RolloutCollector(env, frames_per_batch=40).next()
        >>> traits_of(TeamSpec.from_env(env), batch).shared
        True
    """
    groups = list(team.groups.values())
    return Traits(
        agents={group.name: group.n_agents for group in groups},
        actions={group.name: _describe_actions(group) for group in groups},
        shared=_reward_is_shared(groups, batch),
        rivals=rivals_among(groups, batch),
        in_turns=any(group.in_turns or bool(acts_in_turns(group, batch)) for group in groups),
        deaths=any(_has_agent_deaths(group, batch) for group in groups),
        state=_describe_state(groups),
    )


def _describe_actions(group: GroupSpec) -> str:
    if group.branches:
        text = f"{group.choices}{'' if group.hybrid else ' to choose from'}"
        return text if group.action_mask_key is None else f"{text}, with a mask of legal ones"
    sizes = "/".join(str(n) for n in sorted(set(group.action_dims)))
    if not group.discrete:
        return f"continuous, {sizes} number{'s' * (sizes != '1')}"
    masked = "" if group.action_mask_key is None else ", with a mask of legal ones"
    return f"discrete, {sizes} choices{masked}"


def _reward_is_shared(groups: Iterable[GroupSpec], batch: TensorDictBase) -> bool | None:
    """Returns whether all living agents of a group get the same reward; None if all are 0."""
    shared, has_reward = True, False
    for group in groups:
        reward, alive = _agent_rewards(group, batch)
        if reward is None:  # a team reward
            root = batch.get(("next", "reward"), None)
            has_reward |= root is not None and bool((root != 0).any())
            continue
        mean = masked_mean(reward, alive, dim=-1).unsqueeze(-1)
        deviation = torch.where(alive, reward - mean, 0.0).abs().amax()
        has_reward |= bool((torch.where(alive, reward, 0.0) != 0).any())
        shared &= bool(deviation <= 1e-4 * reward.abs().amax().clamp_min(1e-6))
    return shared if has_reward else None


def _agent_rewards(group: GroupSpec, batch: TensorDictBase) -> tuple[Tensor | None, Tensor]:
    """Returns the agents' rewards (None for a team reward) and the mask of living agents."""
    reward = group.data(batch.get("next")).get("reward", None)
    alive = group.living(batch)
    if reward is not None and alive is None:
        alive = torch.ones_like(reward[..., 0], dtype=torch.bool)
    return (None if reward is None else reward.squeeze(-1)), alive  # type: ignore[return-value]


def _has_agent_deaths(group: GroupSpec, batch: TensorDictBase) -> bool:
    """Returns whether an agent terminates before its episode ends."""
    if not group.agent_done:
        return False
    following = batch.get("next")
    terminated = group.data(following).get("terminated", None)
    if terminated is None:
        return False
    running = ~following.get("done")
    return bool((terminated.squeeze(-1) & running).any())


def _describe_state(groups: Iterable[GroupSpec]) -> str:
    for group in groups:
        if group.state_spec is not None:
            shape = tuple(group.state_spec.shape)
            return f"{' x '.join(map(str, shape))} numbers (learner.central_input=state)"
        if group.agent_state_key is not None:
            sizes = sorted(set(group.of_states.observation_dims))
            return f"{' or '.join(map(str, sizes))} numbers an agent (learner.central_input=state)"
    return ""


_NUM_RANDOM_STEPS = 100
_NUM_ENVS = 16
_NUM_SLOW_ENVS = 4  # of environments that are stepped in Python
_IN_TURNS = "agents act in turns"
_WITH_DEATHS = "agents die, and rewards are individual"
_MEAN_REWARD_NOTE = "learns from the mean of the agents' individual rewards"


@dataclass(frozen=True)
class Fit:
    """Verdict on whether an algorithm fits an environment.

    Args:
        algorithm (str): name of the algorithm.
        fits (bool): True if it fits, with the defaults or with ``settings``.
        settings (dict): further settings that the run needs.
        reason (str): why the settings are needed, or why the algorithm does not fit; may be empty.

    Examples:
        >>> print(Fit("qmix", True, {"env.continuous_actions": False}).words)
        fits with env.continuous_actions=false
    """

    algorithm: str
    fits: bool
    settings: dict[str, Any] = field(default_factory=dict)
    reason: str = ""

    @property
    def words(self) -> str:
        """The verdict as a text."""
        if not self.fits:
            return "does not fit"
        values = {k: x if isinstance(x, str) else shown(x) for k, x in self.settings.items()}
        given = " ".join(f"{key}={value}" for key, value in values.items())
        return f"fits with {given}" if given else "fits"


@dataclass(frozen=True)
class Fits:
    """Verdicts on all algorithms for an environment, and the properties of the environment.

    Args:
        environment (str): name of the environment.
        traits (Traits): properties seen in a batch of random actions.
        algorithms (dict): name -> :class:`Fit`.
    """

    environment: str
    traits: Traits
    algorithms: dict[str, Fit]

    def text(self) -> str:
        """Returns the text that the command line prints."""
        from torchrl_marl.apps.console import table

        fits = self.algorithms.values()
        width = max(len(fit.words) for fit in fits)
        rows = [(one.algorithm, f"{one.words:<{width}}  {one.reason}".rstrip()) for one in fits]
        return f"{self.environment}:\n{table(self.traits.rows())}\nalgorithms:\n{table(rows)}"


@dataclass(frozen=True)
class _Sample:
    """Groups of an environment, a batch of random actions, and the properties seen in it."""

    team: TeamSpec
    batch: TensorDictBase
    traits: Traits


def algorithms_for(environment: Any) -> Fits:
    """Returns which algorithms fit an environment, with which settings, and why.

    Every learner is built for the environment and checks a batch of 100 random steps in 16 copies
    (4 copies of an environment stepped in Python). Nothing is trained. Algorithms for datasets are
    left out. Properties that random
    actions do not reveal remain unknown. For example, agents may die only late in an episode, which
    random play ends early.

    Args:
        environment (str, Path, TrainConfig, EnvConfig or EnvBase): ``"library/environment"`` or
            ``"module:Class"``; name or file of a recipe; settings; or an environment, which is
            reset and stepped.

    Raises:
        ConfigError: the environment is unknown, or its specs are known only after the first client
            connects.
        MissingExtraError: the environment's library is not installed.

    Examples:
        >>> found = algorithms_for("toy/nim")
        >>> found.algorithms["mappo"].words, found.algorithms["vdn"].fits
        ('fits with learner.bootstrap=agent', False)
    """
    name, given = _resolve_environment(environment)
    state = RandomState(0)
    with state.active():
        sample = _collect_sample(given)
        discrete = functools.cache(functools.partial(_collect_discrete_sample, given))
        names = [name for name in ALGORITHMS.names() if name not in OF_DATA]
        found = {name: _check_fit(name, sample, discrete) for name in names}
    return Fits(name, sample.traits, found)


def _resolve_environment(environment: Any) -> tuple[str, EnvConfig | EnvBase]:
    """Returns an environment's name, and its settings or instance."""
    if isinstance(environment, TrainConfig):
        environment = environment.env
    if isinstance(environment, EnvBase):
        return type(environment).__name__, environment
    config = environment if isinstance(environment, EnvConfig) else _env_config(str(environment))
    if config.has_clients:
        raise ConfigError(
            f"{config.library}/{config.name} gets its agents from its first client, so they are "
            "unknown now; use an environment that is simulated here, or start the training, "
            "which checks the same."
        )
    return config.name if ":" in config.library else f"{config.library}/{config.name}", config


def _env_config(text: str) -> EnvConfig:
    if text in recipe_names() or text.endswith((".yaml", ".yml")):
        return load_config(Path(text) if text not in recipe_names() else text).env
    if "/" in text.strip("/") or ":" in text:
        return named_config(text)
    environments = {name.rpartition("/")[2]: name for name in _environment_names()}
    near = closest(text, [*environments, *recipe_names()])
    hint = "" if near is None else f"did you mean {environments.get(near, near)!r}? "
    raise ConfigError(
        f"unknown environment {quoted(text)}; {hint}expected 'library/environment', such as "
        "'vmas/balance', a recipe's name or a YAML file."
    )


def _environment_names() -> Iterator[str]:
    for library, record in LIBRARIES.items():
        try:
            yield from (f"{library}/{name}" for name in (record.environments or list)())
        except MissingExtraError:
            continue


def _collect_sample(environment: EnvConfig | EnvBase) -> _Sample:
    """Collects a batch of random actions from an environment."""
    env = environment
    if isinstance(environment, EnvConfig):
        in_python = environment.record is None or "workers" in environment.record.settings
        max_envs = _NUM_SLOW_ENVS if in_python else _NUM_ENVS
        config = dataclasses.replace(
            environment, num_envs=min(environment.num_envs, max_envs), workers=0
        )
        env = make_env(config, seed=0)
    env = with_dense_groups(make_env(env))
    team = TeamSpec.from_env(env)
    policy = TeamPolicy([RandomActor(group) for group in team.groups.values()], team)
    frames = _NUM_RANDOM_STEPS * env.batch_size.numel()
    try:
        batch = RolloutCollector(env, policy, frames_per_batch=frames).next()
    finally:
        if isinstance(environment, EnvConfig):
            env.close()
    return _Sample(team, batch, traits_of(team, batch))


def _collect_discrete_sample(environment: EnvConfig | EnvBase) -> _Sample | None:
    """Collects a batch with discrete actions; returns None if the environment has none."""
    if isinstance(environment, EnvConfig) and environment.continuous_actions:
        with contextlib.suppress(UserError):  # it has continuous ones only
            return _collect_sample(dataclasses.replace(environment, continuous_actions=False))
    return None


def _check_fit(algorithm: str, sample: _Sample, discrete: Callable[[], _Sample | None]) -> Fit:
    """Checks an algorithm on the environment; if it does not fit, tries discrete actions."""
    fit = _check_fit_on_sample(algorithm, sample)
    continuous = not all(group.discrete for group in sample.team.groups.values())
    other = discrete() if continuous and not fit.fits else None
    if other is None:
        return fit if fit.fits else _with_fitting_groups(fit, sample)
    with_discrete = _check_fit_on_sample(algorithm, other)
    if not with_discrete.fits:
        return _with_fitting_groups(fit, sample)
    settings = {"env.continuous_actions": False, **with_discrete.settings}
    why = "; ".join(text for text in (fit.reason, with_discrete.reason) if text)
    return Fit(algorithm, True, settings, why)


def _check_fit_on_sample(algorithm: str, sample: _Sample) -> Fit:
    first = ""
    for settings, why in _candidate_settings(sample.traits):
        try:
            config = _learner_config(algorithm, settings)
        except UserError as error:
            return Fit(algorithm, False, reason=_shorten_error(str(error)))
        if config is None:
            continue
        reason = _rejection(config, sample)
        if reason is None:
            return Fit(algorithm, True, settings, why or _mean_reward_note(config, sample.traits))
        first = first or reason
    return Fit(algorithm, False, reason=first)


def _with_fitting_groups(fit: Fit, sample: _Sample) -> Fit:
    """Adds a sentence to the reason if the algorithm fits only some of the groups."""
    alone = {"algorithm": fit.algorithm}
    random = _learner_config("random", {})
    fitting = [x for x in sample.team.groups if _rejection(random, sample, {x: alone}) is None]
    others = [x for x in sample.team.groups if x not in fitting]
    if not fitting or not others:
        return fit
    hint = f"for {', '.join(fitting)} groups.{fitting[0]}.algorithm={fit.algorithm} fits"
    return dataclasses.replace(fit, reason=f"{fit.reason} (of {', '.join(others)}); {hint}")


def _candidate_settings(traits: Traits) -> Iterator[tuple[dict[str, Any], str]]:
    """Yields settings to try, in order, each with the reason for it."""
    why = (
        _IN_TURNS
        if traits.in_turns
        else _WITH_DEATHS
        if traits.deaths and not traits.shared
        else ""
    )
    if why and (traits.in_turns or traits.shared is not None):
        own = {"learner.bootstrap": "agent"}
        yield own, why
        yield {**own, "learner.mixer.kind": "none"}, why
    yield {}, ""
    if traits.rivals:
        yield {"learner.mixer.kind": "none"}, f"{traits.rivals[0]} and {traits.rivals[1]} compete"


def _learner_config(algorithm: str, settings: Mapping[str, Any]) -> Any:
    """Returns a learner's config; None if the algorithm lacks one of the given settings."""
    schema: Any = ALGORITHMS.schema(algorithm)
    own = {key.removeprefix("learner."): value for key, value in settings.items()}
    if not own.keys() <= settings_of(schema(algorithm)).keys():
        return None
    config = read(schema, {"algorithm": algorithm, **own})
    return None if unread(config) else config


def _rejection(
    config: Any, sample: _Sample, groups: Mapping[str, Mapping[str, Any]] | None = None
) -> str | None:
    """Returns a learner's shortened error or warning on a sample; None if the learner fits."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            check(config, at="learner.")
            for learner in build_learners(sample.team, config, groups):
                inspect = getattr(learner, "inspect_first_batch", None)
                if inspect is not None:
                    inspect(sample.batch)
        except (UserError, ValueError) as error:
            return _shorten_error(str(error))
    warned = [str(one.message) for one in caught if issubclass(one.category, UserWarning)]
    return _shorten_error(warned[0]) if warned else None


def _shorten_error(text: str) -> str:
    """Shortens an error message to its cause, without the group's name and the suggested fix."""
    text = text.partition(": ")[2] if text.startswith("group ") else text
    for end in ("; ", ", expected ", ": "):
        text = text.partition(end)[0]
    return text


def _mean_reward_note(config: Any, traits: Traits) -> str:
    mixes = getattr(config, "mixes", "none") != "none"
    several = any(n > 1 for n in traits.agents.values())
    return _MEAN_REWARD_NOTE if mixes and several and traits.shared is False else ""
