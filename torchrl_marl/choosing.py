"""Which algorithms fit a world: the learners themselves are asked, on steps at random.

What a learner refuses or warns of stands in the learner alone. Here each one is built for the
world, as a run would build it, and shown a batch; where it refuses, settings are tried that
such a world takes.
"""

from __future__ import annotations

import contextlib
import dataclasses
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tensordict import TensorDictBase
from torchrl.envs import EnvBase

from torchrl_marl.collectors import RolloutCollector, TeamPolicy
from torchrl_marl.envs.config import EnvConfig
from torchrl_marl.envs.libraries import LIBRARIES
from torchrl_marl.envs.make import make_env, named_config
from torchrl_marl.envs.transforms import with_dense_groups
from torchrl_marl.errors import ConfigError, MissingExtraError, UserError, closest, quoted
from torchrl_marl.learners.algorithms import ALGORITHMS
from torchrl_marl.learners.build import build_learners
from torchrl_marl.modules import RandomActor
from torchrl_marl.random_state import RandomState
from torchrl_marl.recipes import load_config, recipe_names
from torchrl_marl.settings import check, read, settings_of, shown, unread
from torchrl_marl.specs import TeamSpec
from torchrl_marl.training.config import TrainConfig
from torchrl_marl.traits import Traits, traits_of

__all__ = ["Fit", "Fits", "algorithms_for"]

_STEPS = 100
_COPIES = 16
_SLOW_COPIES = 4  # of worlds that are stepped one by one
_TURNS = "agents act in turns"
_DEATHS = "agents die, and rewards are their own"
_MEAN = "learns from the mean of rewards that are each agent's own"


@dataclass(frozen=True)
class Fit:
    """Whether an algorithm fits a world.

    Args:
        algorithm (str): its name.
        fits (bool): as it is, or with ``settings``.
        settings (dict): settings of a run that it takes beside its name.
        reason (str): why it takes them, or why it does not fit; may be empty.

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
        """The answer in words."""
        if not self.fits:
            return "does not fit"
        values = {k: x if isinstance(x, str) else shown(x) for k, x in self.settings.items()}
        given = " ".join(f"{key}={value}" for key, value in values.items())
        return f"fits with {given}" if given else "fits"


@dataclass(frozen=True)
class Fits:
    """Which algorithms fit a world, and what it is like.

    Args:
        world (str): its name.
        traits (Traits): what steps at random have shown.
        algorithms (dict): name -> :class:`Fit`.
    """

    world: str
    traits: Traits
    algorithms: dict[str, Fit]

    def text(self) -> str:
        """Returns what the command line prints."""
        from torchrl_marl.console import table

        fits = self.algorithms.values()
        width = max(len(fit.words) for fit in fits)
        rows = [(one.algorithm, f"{one.words:<{width}}  {one.reason}".rstrip()) for one in fits]
        return f"{self.world}:\n{table(self.traits.rows())}\nalgorithms:\n{table(rows)}"


@dataclass(frozen=True)
class _Seen:
    """A world as an algorithm meets it: its groups, a batch at random, and what that shows."""

    team: TeamSpec
    batch: TensorDictBase
    traits: Traits


def algorithms_for(world: Any) -> Fits:
    """Returns which algorithms fit a world, with which settings, and why others do not.

    Each learner is built for the world and shown a hundred steps at random, of 16 copies of it
    (of 4, where a world is stepped in Python); nothing is trained. What such steps do not show,
    such as deaths that take a better policy, is not known.

    Args:
        world (str, Path, TrainConfig, EnvConfig or EnvBase): ``"library/world"`` or
            ``"module:Class"``; a recipe, by its name or file; settings; or an environment, which
            is played, so that its episodes begin anew.

    Raises:
        ConfigError: an unknown world, or one that says only later what it is.
        MissingExtraError: its library is not installed.

    Examples:
        >>> found = algorithms_for("toy/nim")
        >>> found.algorithms["mappo"].words, found.algorithms["vdn"].fits
        ('fits with learner.bootstrap=agent', False)
    """
    name, given = _world_of(world)
    state = RandomState(0)
    with state.active():
        seen = _look(given)
        discrete = _Discrete(given)
        found = {a: _fit(a, seen, discrete) for a in ALGORITHMS.names()}
    return Fits(name, seen.traits, found)


def _world_of(world: Any) -> tuple[str, EnvConfig | EnvBase]:
    """Returns a world's name, and what it is built from."""
    if isinstance(world, TrainConfig):
        world = world.env
    if isinstance(world, EnvBase):
        return type(world).__name__, world
    config = world if isinstance(world, EnvConfig) else _named(str(world))
    if config.library == "external":
        raise ConfigError(
            f"external/{config.name} says what its agents are when its first client comes, so that "
            "nothing is known of it before; use a world that is simulated here, or train it: the "
            "learner refuses what does not fit."
        )
    return config.name if ":" in config.library else f"{config.library}/{config.name}", config


def _named(text: str) -> EnvConfig:
    if text in recipe_names() or text.endswith((".yaml", ".yml")):
        return load_config(Path(text) if text not in recipe_names() else text).env
    if "/" in text.strip("/") or ":" in text:
        return named_config(text)
    worlds = {name.rpartition("/")[2]: name for name in _world_names()}
    near = closest(text, [*worlds, *recipe_names()])
    hint = "" if near is None else f"did you mean {worlds.get(near, near)!r}? "
    raise ConfigError(
        f"unknown world {quoted(text)}; {hint}expected 'library/world', such as "
        "'vmas/balance', a recipe's name or a YAML file."
    )


def _world_names() -> Iterator[str]:
    for library, record in LIBRARIES.items():
        try:
            yield from (f"{library}/{name}" for name in (record.worlds or list)())
        except MissingExtraError:
            continue


def _look(world: EnvConfig | EnvBase) -> _Seen:
    """Plays a world at random."""
    env = world
    if isinstance(world, EnvConfig):
        in_python = world.library == "pettingzoo" or ":" in world.library
        most = _SLOW_COPIES if in_python else _COPIES
        config = dataclasses.replace(world, num_envs=min(world.num_envs, most), workers=0)
        env = make_env(config, seed=0)
    env = with_dense_groups(make_env(env))
    team = TeamSpec.from_env(env)
    policy = TeamPolicy([RandomActor(group) for group in team.groups.values()], team)
    frames = _STEPS * env.batch_size.numel()
    try:
        batch = RolloutCollector(env, policy, frames_per_batch=frames).next()
    finally:
        if isinstance(world, EnvConfig):
            env.close()
    return _Seen(team, batch, traits_of(team, batch))


class _Discrete:
    """The same world with discrete actions, where it has them; built when it is asked for."""

    def __init__(self, world: EnvConfig | EnvBase) -> None:
        self._config = world if isinstance(world, EnvConfig) else None
        self._seen: _Seen | None = None

    def __call__(self) -> _Seen | None:
        """Returns it, or None where there is none."""
        config, self._config = self._config, None
        if config is not None and config.continuous_actions:
            # Else it has continuous ones only.
            with contextlib.suppress(UserError):
                self._seen = _look(dataclasses.replace(config, continuous_actions=False))
        return self._seen


def _fit(algorithm: str, seen: _Seen, discrete: _Discrete) -> Fit:
    """Asks the learner of an algorithm, as it is and then with what such a world takes."""
    fit = _fit_as_it_is(algorithm, seen)
    continuous = not all(group.discrete for group in seen.team.groups.values())
    other = discrete() if continuous and not fit.fits else None
    if other is None:
        return fit if fit.fits else _of_some(fit, seen)
    with_discrete = _fit_as_it_is(algorithm, other)
    if not with_discrete.fits:
        return _of_some(fit, seen)
    settings = {"env.continuous_actions": False, **with_discrete.settings}
    why = "; ".join(text for text in (fit.reason, with_discrete.reason) if text)
    return Fit(algorithm, True, settings, why)


def _fit_as_it_is(algorithm: str, seen: _Seen) -> Fit:
    first = ""
    for settings, why in _ways(seen.traits):
        try:
            config = _config(algorithm, settings)
        except UserError as error:
            return Fit(algorithm, False, reason=_short(str(error)))
        if config is None:
            continue
        refused = _refusal(config, seen)
        if refused is None:
            return Fit(algorithm, True, settings, why or _of_mixed(config, seen.traits))
        first = first or refused
    return Fit(algorithm, False, reason=first)


def _of_some(fit: Fit, seen: _Seen) -> Fit:
    """Names the groups for which alone an algorithm would do, and those for which it does not."""
    alone = {"algorithm": fit.algorithm}
    random = _config("random", {})
    takes = [x for x in seen.team.groups if _refusal(random, seen, {x: alone}) is None]
    others = [x for x in seen.team.groups if x not in takes]
    if not takes or not others:
        return fit
    way = f"for {', '.join(takes)} groups.{takes[0]}.algorithm={fit.algorithm} fits"
    return dataclasses.replace(fit, reason=f"{fit.reason} (of {', '.join(others)}); {way}")


def _ways(traits: Traits) -> Iterator[tuple[dict[str, Any], str]]:
    """Yields settings to try in turn, and why such a world takes them."""
    why = _TURNS if traits.in_turns else _DEATHS if traits.deaths and not traits.shared else ""
    if why and (traits.in_turns or traits.shared is not None):
        own = {"learner.bootstrap": "agent"}
        yield own, why
        yield {**own, "learner.mixer.kind": "none"}, why
    yield {}, ""
    if traits.rivals:
        yield {"learner.mixer.kind": "none"}, f"{traits.rivals[0]} and {traits.rivals[1]} compete"


def _config(algorithm: str, settings: Mapping[str, Any]) -> Any:
    """Returns the settings of a learner; None where it does not read all of them."""
    schema: Any = ALGORITHMS.schema(algorithm)
    own = {key.removeprefix("learner."): value for key, value in settings.items()}
    if not own.keys() <= settings_of(schema(algorithm)).keys():
        return None
    config = read(schema, {"algorithm": algorithm, **own})
    return None if unread(config) else config


def _refusal(
    config: Any, seen: _Seen, groups: Mapping[str, Mapping[str, Any]] | None = None
) -> str | None:
    """Returns why a learner refuses a world or warns of it, in a few words; None where it fits."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            check(config, at="learner.")
            for learner in build_learners(seen.team, config, groups):
                look = getattr(learner, "look_at", None)
                if look is not None:
                    look(seen.batch)
        except (UserError, ValueError) as error:
            return _short(str(error))
    told = [str(one.message) for one in caught if issubclass(one.category, UserWarning)]
    return _short(told[0]) if told else None


def _short(text: str) -> str:
    """Returns what is wrong, without whose it is and without the fix."""
    text = text.partition(": ")[2] if text.startswith("group ") else text
    for end in ("; ", ", expected ", ": "):
        text = text.partition(end)[0]
    return text


def _of_mixed(config: Any, traits: Traits) -> str:
    mixes = getattr(config, "mixes", "none") != "none"
    several = any(n > 1 for n in traits.agents.values())
    return _MEAN if mixes and several and traits.shared is False else ""
