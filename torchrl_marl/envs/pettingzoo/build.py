"""Builds PettingZoo environments, and finds their agents and spaces."""

from __future__ import annotations

import copy
import functools
import inspect
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from types import ModuleType
from typing import Any

import numpy as np

from torchrl_marl.envs.pettingzoo.agent_rows import AgentSpaces, spaces_of
from torchrl_marl.envs.pettingzoo.drawing import quiet, takes_mode
from torchrl_marl.envs.pettingzoo.instance import declared_limit
from torchrl_marl.envs.pettingzoo.library import Backend, by_name, continuous_argument, of_module
from torchrl_marl.envs.pettingzoo.parts import flat_mask, has_parts, in_order, parts_of, sizes_of
from torchrl_marl.envs.pettingzoo.rng import OwnRandom
from torchrl_marl.envs.pettingzoo.tuple_env import as_team
from torchrl_marl.errors import ConfigError

__all__ = ["Backend", "EnvFacts", "EnvMaker", "maker_of", "probe"]


@dataclass(frozen=True)
class EnvMaker:
    """Factory of an environment's copies, which can be sent to other processes.

    Args:
        name (str): name of the environment in messages.
        create (callable): function that returns the environment.
        kwargs (dict): arguments of ``create``.
    """

    name: str
    create: Callable[..., Any]
    kwargs: dict[str, Any] = field(default_factory=dict)

    def __call__(self) -> Any:
        with quiet():
            try:
                return as_team(self.create(**self.kwargs))
            except TypeError as error:
                if "argument" not in str(error):
                    raise
                raise ConfigError(
                    f"{self.name} cannot be built with {self.kwargs} ({error}); "
                    "check the arguments of the environment."
                ) from error


def maker_of(
    env: Any,
    backend: Backend,
    kwargs: dict[str, Any],
    continuous: bool | None,
    n_copies: int,
    drawn: bool = False,
) -> EnvMaker:
    """Returns a factory of an environment's copies.

    Args:
        env (str, module, callable or environment): name, factory or instance.
        backend ("auto", "parallel" or "aec"): PettingZoo API of a named environment.
        kwargs (dict): arguments of the environment.
        continuous (bool, optional): True for continuous actions, False for discrete ones, in
            environments that have both.
        n_copies (int): number of copies.
        drawn (bool): True to build the environment with rendering, if it supports that.

    Raises:
        ConfigError: if the name is unknown, the environment cannot be copied, or a package that the
            environment imports is not installed.
        MissingExtraError: if PettingZoo or the environment's own package is not installed, and an
            extra of this library would install it.
    """
    if backend not in ("auto", "parallel", "aec"):
        raise ConfigError(f"backend is {backend!r}, expected 'auto', 'parallel' or 'aec'.")
    if isinstance(env, str):
        with quiet():
            creator, own = by_name(env, backend)
        kwargs = {**own, **_render_mode_argument(creator, drawn), **kwargs}
        return EnvMaker(
            env, creator, {**continuous_argument(creator, continuous, kwargs), **kwargs}
        )
    if isinstance(env, ModuleType):
        creator = of_module(env, backend)
        return EnvMaker(env.__name__, creator, {**_render_mode_argument(creator, drawn), **kwargs})
    if hasattr(env, "reset") and hasattr(env, "step") and not inspect.isclass(env):
        return _maker_of_object(env, kwargs, n_copies)
    if callable(env):
        kwargs = {**_render_mode_argument(env, drawn), **kwargs}
        return EnvMaker(getattr(env, "__name__", type(env).__name__), env, kwargs)
    raise ConfigError(
        f"the environment is a {type(env).__name__}, expected a name such as "
        "'mpe2/simple_spread_v3', a PettingZoo environment or a callable that makes one."
    )


def _render_mode_argument(creator: Callable[..., Any], drawn: bool) -> dict[str, Any]:
    """Returns the argument ``render_mode`` in a dict; empty if the environment does not take it."""
    return {"render_mode": "rgb_array"} if drawn and takes_mode(creator) else {}


def _maker_of_object(env: Any, kwargs: dict[str, Any], n_copies: int) -> EnvMaker:
    name = type(getattr(env, "unwrapped", env)).__name__
    if kwargs:
        raise ConfigError(
            f"PettingZooEnv takes {', '.join(sorted(kwargs))} with a name or a factory only; "
            f"{name} is already built, pass them to its constructor."
        )
    if n_copies == 1:
        return EnvMaker(name, lambda: env)
    try:
        copy.deepcopy(env)
    except Exception as error:
        raise ConfigError(
            f"{name} cannot be copied {n_copies} times ({type(error).__name__}: {error}); "
            "pass a function that returns one instead."
        ) from error
    return EnvMaker(name, functools.partial(copy.deepcopy, env))


_PROBE_STEPS = 16


@dataclass(frozen=True)
class EnvFacts:
    """Facts about an environment.

    Args:
        turns (bool): True if agents act in turns.
        agents (list of AgentSpaces): spaces of all agents that may appear.
        infos (dict): agent -> sorted keys of the numbers in the agent's infos.
        n_state (int): number S of features of the environment's ``state()``; 0 if unused.
        limit (int, optional): the time limit that the environment declares, in steps.
    """

    turns: bool
    agents: list[AgentSpaces]
    infos: dict[Any, list[str]]
    n_state: int
    limit: int | None


def probe(name: str, env: Any, infos: bool, state: bool) -> EnvFacts:
    """Finds facts about an environment by a reset, and by a few random steps if infos are needed.

    Args:
        name (str): name of the environment in messages.
        env: the environment.
        infos (bool): True to find the keys of the environment's infos.
        state (bool): True to find the size of the environment's state.

    Raises:
        ConfigError: if ``env`` is not a PettingZoo environment, or has no ``state()``.
    """
    missing = [key for key in ("reset", "step", "observation_space") if not hasattr(env, key)]
    if missing:
        raise ConfigError(
            f"{name} is a {type(env).__name__} without {', '.join(missing)}, expected a "
            "PettingZoo environment, parallel or AEC."
        )
    # Only AEC environments have these attributes.
    turns = hasattr(type(env), "last") or hasattr(type(env), "agent_iter")
    with OwnRandom(0).active(look=True):
        output = env.reset(seed=0)
        first_infos = env.infos if turns else output[1]
        agents = list(_agents_of(name, env))
        spaces = _mark_masked([spaces_of(env, agent, first_infos) for agent in agents])
        n_state = _state_size(name, env) if state else 0
        keys: dict[Any, set[str]] = {agent: set() for agent in agents}
        for step_infos in _iterate_infos(env, first_infos, turns) if infos else ():
            for agent in agents:
                keys[agent] |= {
                    key for key, x in (step_infos.get(agent) or {}).items() if _is_number(x)
                }
    info_keys_of = {agent: sorted(own) for agent, own in keys.items()}
    limit = declared_limit(env, len(agents) if turns else 1)
    return EnvFacts(turns, spaces, info_keys_of, n_state, limit)


def _agents_of(name: str, env: Any) -> Iterable[Any]:
    """Returns the ids of an environment's agents."""
    agents = getattr(env, "possible_agents", None) or getattr(env, "agents", None)
    if agents is None:
        raise ConfigError(
            f"{name} is a {type(env).__name__} without possible_agents, like a single-agent "
            "environment, expected a PettingZoo environment; write a team of one as a MarlEnv "
            "(docs/environments/own.md), or train one agent with TorchRL's losses."
        )
    return agents


def _mark_masked(agents: list[AgentSpaces]) -> list[AgentSpaces]:
    """If an agent's info has an action mask, marks all agents as having their masks in infos.

    Agents whose actions are not discrete, or whose observation has a mask, are not marked.
    """
    if all(own.masked != "info" for own in agents):
        return agents
    return [
        replace(own, masked="info")
        if own.masked is None and type(own.action).__name__ in ("Discrete", *_SPACES_OF_CHOICES)
        else own
        for own in agents
    ]


def _state_size(name: str, env: Any) -> int:
    try:
        return int(np.size(env.state()))
    except (AttributeError, NotImplementedError) as error:
        raise ConfigError(
            f"{name} has no state() of its own ({error}); use state='observations', which "
            "concatenates all agents' observations."
        ) from error


def _iterate_infos(env: Any, infos: Mapping[Any, Any], turns: bool) -> Iterator[Mapping[Any, Any]]:
    """Yields the infos of a reset and of a few random steps."""
    yield infos
    observations: Any = {}
    for _ in range(_PROBE_STEPS):
        if not env.agents:
            return
        if turns:
            observations, _, terminated, truncated, info = env.last()
            agent = env.agent_selection
            env.step(
                None if terminated or truncated else _sample_action(env, agent, observations, info)
            )
            infos = env.infos
        else:
            sampled = {
                a: _sample_action(env, a, observations.get(a), infos.get(a)) for a in env.agents
            }
            observations, _, _, _, infos = env.step(sampled)
        yield infos


def _sample_action(env: Any, agent: Any, observation: Any, infos: Any) -> Any:
    space = copy.deepcopy(env.action_space(agent))
    for source in (observation, infos):
        if isinstance(source, Mapping) and "action_mask" in source:
            legal = source["action_mask"]
            if type(space).__name__ in _SPACES_OF_CHOICES:
                return _sample_choices(space, legal)
            legal = np.asarray(legal, np.int8)
            return space.sample(legal) if legal.any() else space.sample()
    return space.sample()


_SPACES_OF_CHOICES = ("MultiDiscrete", "MultiBinary", "Tuple", "Dict")


def _sample_choices(space: Any, legal: Any) -> Any:
    """Draws a legal option of each choice; the mask is that of the whole space or a part of it."""
    legal = flat_mask(legal, space)
    if not has_parts(space):
        return _sample_options(space, legal.astype(bool))
    drawn, start = {}, 0
    for key, part in parts_of(space):
        end = start + sum(sizes_of(part))
        drawn[key] = _sample_options(part, legal[start:end].astype(bool))
        start = end
    return in_order(drawn, space)


def _sample_options(space: Any, legal: np.ndarray) -> Any:
    if not len(legal):
        return space.sample()
    options = [np.flatnonzero(part) for part in np.split(legal, np.cumsum(sizes_of(space))[:-1])]
    drawn = [space.np_random.choice(part) if len(part) else 0 for part in options]
    return np.reshape(drawn, space.shape).astype(space.dtype) + getattr(space, "start", 0)


def _is_number(value: Any) -> bool:
    if isinstance(value, (bool, int, float, np.number, np.bool_)):
        return True
    return isinstance(value, np.ndarray) and value.size == 1 and value.dtype.kind in "biuf"


def info_keys(
    facts: EnvFacts, groups: Mapping[str, Iterable[Any]], requested: bool | Iterable[str]
) -> dict[str, list[str]]:
    """Returns a dict, group -> keys of the infos that the adapter returns.

    Args:
        facts (EnvFacts): facts about the environment.
        groups (mapping): group -> ids of its agents.
        requested (bool or iterable of str): True for all keys, False for none, or the wanted keys.
    """
    if not isinstance(requested, bool):
        requested = list(requested)
        known = sorted({key for keys in facts.infos.values() for key in keys})
        if unknown := [key for key in requested if key not in known]:
            warnings.warn(
                f"no agent had the info {', '.join(map(repr, unknown))} in the first "
                f"{_PROBE_STEPS} steps; it is 0 in steps without it; "
                f"there were {', '.join(map(repr, known)) or 'none'}.",
                stacklevel=3,
            )
        return dict.fromkeys(groups, requested)
    found = {
        group: sorted({key for agent in agents for key in facts.infos[agent]})
        for group, agents in groups.items()
    }
    return {group: keys for group, keys in found.items() if keys and requested}
