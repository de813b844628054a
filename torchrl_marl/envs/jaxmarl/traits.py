"""Table of traits that the classes of JaxMARL's worlds do not declare.

Functions of a world here are of one copy, and run inside a jitted step.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

__all__ = ["WORLD_TRAITS", "WorldTraits", "legal_actions", "traits_of"]


@dataclass(frozen=True)
class WorldTraits:
    """Undeclared traits of a class of worlds.

    Args:
        limit (str, optional): the attribute that holds its time limit.
        limit_is_seen (bool): observations read the limit, so it is the world's that ends the
            episode; otherwise the world's own is put out of reach, and ours counts the steps.
        deadline (bool): the limit is a rule of the game, kept by the world: who is ended by it is
            terminated.
        timed (bool): it ends by time only.
        action_types (tuple of str, optional): its words for continuous and discrete actions,
            where ``continuous_actions`` chooses.
        legal (str or callable): its method that gives the legal actions, or ``legal(env, world)``.
        state (callable, optional): ``state(env, world, observations)``, for a central critic.
        acts (callable, optional): ``acts(env, world)``: who acts next, of ``env.agents``.
        won (callable, optional): ``won(env, world)``: whose side has won, of ``env.agents``.
        seen (callable, optional): ``seen(env, observations)``: what each of ``env.agents`` sees,
            where the world gives it in a form of its own.
        by_place (bool): it takes actions one after the other, not by agent.
        length (callable, optional): ``length(env)``: steps of its episodes, where that is built
            in: a shorter limit is ours, a longer one never reached.
    """

    limit: str | None = None
    limit_is_seen: bool = False
    deadline: bool = False
    timed: bool = False
    action_types: tuple[str, str] | None = None
    legal: str | Callable[..., Any] = "get_avail_actions"
    state: Callable[..., Any] | None = None
    acts: Callable[..., Any] | None = None
    won: Callable[..., Any] | None = None
    seen: Callable[..., Any] | None = None
    by_place: bool = False
    length: Callable[[Any], int] | None = None


def legal_actions(env: Any, traits: WorldTraits, world: Any) -> Any:
    """Maps each agent to its legal actions, ``[n_actions]``.

    Raises:
        AttributeError, NotImplementedError: where all actions are always legal.
    """
    if callable(traits.legal):
        return traits.legal(env, world)
    return getattr(env, traits.legal)(world)


def traits_of(env: Any) -> WorldTraits:
    """Returns the traits of a world by its class or the nearest one that it extends.

    Args:
        env (MultiAgentEnv): a world of JaxMARL.

    Examples:
        >>> class SwitchRiddle:
        ...     max_steps = 5
        >>> traits_of(SwitchRiddle()).limit, traits_of(object()).limit
        ('max_steps', None)
    """
    names = [cls.__name__ for cls in type(env).__mro__]
    return next((WORLD_TRAITS[name] for name in names if name in WORLD_TRAITS), WorldTraits())


def _units(world: Any) -> Any:
    return getattr(world, "state", world)


def _won(env: Any, world: Any) -> Any:
    import jax.numpy as jnp

    alive = _units(world).unit_alive
    allies, enemies = alive[: env.num_allies].any(), alive[env.num_allies :].any()
    ours = [str(agent).startswith("ally") for agent in env.agents]
    return jnp.where(jnp.array(ours), allies & ~enemies, enemies & ~allies)


def _seat(env: Any, world: Any) -> Any:
    import jax.numpy as jnp

    # The current player is a seat, and seats may be dealt anew in every episode.
    acting = world.seat_order[jnp.argmax(world.cur_player_idx)]
    return jnp.arange(env.num_agents) == acting


def _in_the_room(env: Any, world: Any) -> Any:
    import jax.numpy as jnp

    # The rule of the riddle's paper: who is not in the room does nothing.
    nothing = jnp.arange(len(env.game_actions)) == env.game_actions["NOTHING"]
    return {agent: nothing | (world.agent_in_room == i) for i, agent in enumerate(env.agents)}


def _entities(env: Any, world: Any, observations: Any) -> Any:
    import jax.numpy as jnp

    parts = [world.p_pos, world.p_vel, world.c]
    parts += [] if world.goal is None else [world.goal]
    return jnp.concatenate([jnp.ravel(part).astype(jnp.float32) for part in parts])


def _world_state(env: Any, world: Any, observations: Any) -> Any:
    return observations["world_state"]


def _kitchen(env: Any, world: Any, observations: Any) -> Any:
    # Each cook sees the whole kitchen.
    return observations[env.agents[0]].reshape(-1)


def _in_the_grid(env: Any, observations: Any) -> Any:
    # All agents' views are one array; what they carry has a column for each agent.
    grids, inventories = observations["observations"], observations["inventory"]
    return {
        agent: {"observation": grids[i], "inventory": inventories[:, i]}
        for i, agent in enumerate(env.agents)
    }


def _all_rounds(env: Any) -> int:
    return int(env.num_inner_steps * env.num_outer_steps)


_SMAX = WorldTraits(limit="max_steps", state=_world_state, won=_won)
WORLD_TRAITS = {
    "SimpleMPE": WorldTraits(
        limit="max_steps", action_types=("Continuous", "Discrete"), state=_entities
    ),
    "SMAX": _SMAX,
    "EnemySMAX": _SMAX,
    "Overcooked": WorldTraits(limit="max_steps", limit_is_seen=True, timed=True, state=_kitchen),
    "OvercookedV2": WorldTraits(limit="max_steps", timed=True),
    "HanabiEnv": WorldTraits(legal="get_legal_moves", acts=_seat),
    "JaxNav": WorldTraits(limit="max_steps", limit_is_seen=True),
    "SwitchRiddle": WorldTraits(limit="max_steps", deadline=True, legal=_in_the_room),
    "CoinGame": WorldTraits(timed=True, length=_all_rounds),
    "InTheGrid": WorldTraits(timed=True, length=_all_rounds, seen=_in_the_grid),
    "InTheGrid_2p": WorldTraits(timed=True, length=_all_rounds, by_place=True),
    "InTheMatrix": WorldTraits(timed=True, length=_all_rounds),
}
