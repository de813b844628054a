"""The jitted calls of a JaxMARL world, shared by environments of equal settings.

Compiling takes seconds, so that an environment that is built anew finds what an earlier one left.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any

import jax
import jax.numpy as jnp
from torchrl.envs.utils import MarlGroupMapType

from torchrl_marl.envs.agents.grouping import grouped
from torchrl_marl.envs.jaxmarl.agents import Kind, kinds_of
from torchrl_marl.envs.jaxmarl.build import World, make_world
from torchrl_marl.envs.jaxmarl.step import JaxStep, Shaping
from torchrl_marl.envs.jaxmarl.traits import legal_actions
from torchrl_marl.errors import ConfigError, SpecError

__all__ = ["Compiled", "Settings", "compiled"]


@dataclass(frozen=True)
class Settings:
    """Settings that the jitted calls depend on; see :class:`JaxMarlEnv`."""

    world: Any
    num_envs: int
    max_steps: int | None
    state: Any
    info: bool
    group_map: Any
    continuous: bool | None
    one_hot: bool
    shaping: Shaping
    kwargs: tuple[tuple[str, Any], ...]

    @property
    def plain(self) -> bool:
        """Returns whether equal settings mean the same: none of them is an object of the user's."""
        return _plain((self.world, self.state, self.group_map, self.kwargs))


def _plain(value: Any) -> bool:
    if isinstance(value, tuple):
        return all(_plain(x) for x in value)
    return isinstance(value, (str, int, float, MarlGroupMapType, type(None)))


@dataclass(frozen=True)
class Compiled:
    """The jitted calls, and the world that they belong to.

    Args:
        world (World): the world.
        kinds (dict): group -> its kinds.
        places (dict): group -> where its agents are among all.
        start, merge, step (callable): jitted; ``merge`` and ``step`` take over what goes on.
        look (callable): jitted; gives the worlds that a step leads to, for pictures.
        carry, leaves: shapes and dtypes of the carry and of the outputs.
    """

    world: World
    kinds: dict[str, tuple[Kind, ...]]
    places: dict[str, slice]
    start: Callable[..., Any]
    merge: Callable[..., Any]
    step: Callable[..., Any]
    look: Callable[..., Any]
    carry: Any
    leaves: Any


def compiled(settings: Settings) -> Compiled:
    """Returns the jitted calls of a world, reused from an earlier one of equal settings.

    Raises:
        ConfigError: an unknown world or argument; a state, shaped reward or group map that does
            not fit it.
        SpecError: a world whose observations are not by agent.
    """
    return _remembered(settings) if settings.plain else _compile(settings)


def _compile(own: Settings) -> Compiled:
    world = make_world(own.world, own.max_steps, own.continuous, dict(own.kwargs))
    kinds = _kinds(world, own.group_map, own.one_hot)
    state = _state_of(world, own.state, kinds)
    step = JaxStep(world, kinds, own.num_envs, state=state, info=own.info, shaping=own.shaping)
    if own.shaping.coefficient and "shaped_reward" not in step.info_shapes():
        raise ConfigError(
            f"JaxMarlEnv: shaped_reward is {own.shaping.coefficient}, but {world.name!r} has none "
            "of its own; leave it 0."
        )
    carry, leaves = jax.eval_shape(step.start, jax.random.PRNGKey(0), jnp.zeros((), jnp.int32))
    return Compiled(
        world,
        kinds,
        step.places,
        start=jax.jit(step.start),
        merge=jax.jit(step.merge, donate_argnums=0),
        step=jax.jit(step.step, donate_argnums=0),
        look=jax.jit(step.look),
        carry=carry,
        leaves=leaves,
    )


_remembered = lru_cache(maxsize=16)(_compile)


def _kinds(world: World, group_map: Any, one_hot: bool) -> dict[str, tuple[Kind, ...]]:
    """Maps each group to its kinds, with the shapes that the world really returns."""
    env = world.env
    seen, state = jax.eval_shape(world.reset, jax.random.PRNGKey(0))
    if not isinstance(seen, dict) or any(agent not in seen for agent in env.agents):
        found = f"a dict of {sorted(seen)}" if isinstance(seen, dict) else type(seen).__name__
        raise SpecError(
            f"JaxMARL's {world.name!r} gives its observations as {found}, expected a dict with one "
            f"for each of {list(env.agents)}; wrap it to give these."
        )
    try:
        legal = jax.eval_shape(partial(legal_actions, env, world.traits), state)
    except (NotImplementedError, AttributeError):
        legal = None
    shapes = jax.tree.map(lambda x: tuple(x.shape), {agent: seen[agent] for agent in env.agents})
    masks = None if legal is None else {agent: tuple(x.shape) for agent, x in legal.items()}
    # Mappings are stored as pairs, since settings are hashed.
    groups = grouped(env.agents, dict(group_map) if isinstance(group_map, tuple) else group_map)
    return {name: kinds_of(name, ids, env, shapes, masks, one_hot) for name, ids in groups.items()}


def _state_of(
    world: World, state: Any, kinds: Mapping[str, tuple[Kind, ...]]
) -> Callable[..., Any] | None:
    """Returns ``state(world, observations)`` of a copy."""
    if state is None:
        return None
    if callable(state):
        return lambda own, seen: jnp.ravel(state(own))
    if state == "observations":
        ids = [agent for group in kinds.values() for kind in group for agent in kind.ids]
        return lambda own, seen: jnp.concatenate(
            [leaf.reshape(-1) for agent in ids for leaf in jax.tree.leaves(seen[agent])]
        )
    if state != "world":
        raise ConfigError(
            f"JaxMarlEnv: state is {state!r}, expected 'observations', 'world', a function or None."
        )
    read = world.traits.state
    if read is None:
        raise ConfigError(
            f"JaxMarlEnv: {world.name!r} has no state for a critic; use state='observations', or a "
            "function of its JAX state that gives a vector."
        )
    return lambda own, seen: read(world.env, own, seen)
