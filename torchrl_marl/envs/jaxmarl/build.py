"""Builds JaxMARL environments, and lists facts about them that the classes do not declare."""

from __future__ import annotations

import contextlib
import importlib.util
import inspect
import io
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from torchrl_marl.errors import ConfigError, MissingExtraError, nearest

__all__ = [
    "ENV_TRAITS",
    "EnvTraits",
    "WrappedEnv",
    "import_jaxmarl",
    "legal_actions",
    "traits_of",
    "wrap_env",
]


@dataclass(frozen=True)
class EnvTraits:
    """Facts about an environment class that the class does not declare.

    Args:
        limit (str, optional): name of the attribute that holds the time limit.
        limit_is_seen (bool): True if observations depend on the time limit. Then the environment
            itself ends the episode at its limit. Otherwise the environment's limit is disabled, and
            the adapter counts the steps.
        deadline (bool): True if the time limit is a rule of the game. The environment then
            enforces it, and agents that reach it are terminated.
        timed (bool): True if episodes end only at the time limit.
        legal (str or callable): name of the method that returns the legal actions, or a function
            ``legal(env, state)``.
        state (callable, optional): function ``state(env, state, observations)`` that returns the
            central critic's input.
        acts (callable, optional): function ``acts(env, state)`` that returns a mask of the agents
            that act next, in the order of ``env.agents``.
        won (callable, optional): function ``won(env, state)`` that returns a mask of the agents on
            the winning side, in the order of ``env.agents``.
        seen (callable, optional): function ``seen(env, observations)`` that returns a dict of
            observations by agent, for environments that return another structure.
        by_place (bool): True if actions are passed as a tuple instead of a dict by agent.
        labels (callable, optional): function ``labels(env)`` that returns the label of each feature
            and of each action, -1 for none, if labels such as colors can be exchanged; see
            :class:`~torchrl_marl.envs.Labels`.
        length (callable, optional): function ``length(env)`` that returns the built-in number of
            steps per episode. The adapter enforces a time limit that is shorter; a longer one has
            no effect.
    """

    limit: str | None = None
    limit_is_seen: bool = False
    deadline: bool = False
    timed: bool = False
    legal: str | Callable[..., Any] = "get_avail_actions"
    state: Callable[..., Any] | None = None
    acts: Callable[..., Any] | None = None
    won: Callable[..., Any] | None = None
    seen: Callable[..., Any] | None = None
    by_place: bool = False
    labels: Callable[[Any], tuple[list[int], list[int]] | None] | None = None
    length: Callable[[Any], int] | None = None


def legal_actions(env: Any, traits: EnvTraits, state: Any) -> Any:
    """Returns a mask ``[n_actions]`` of the legal actions for each agent.

    Raises:
        AttributeError, NotImplementedError: if the environment has no masks of legal actions.
    """
    if callable(traits.legal):
        return traits.legal(env, state)
    return getattr(env, traits.legal)(state)


def traits_of(env: Any) -> EnvTraits:
    """Returns the known facts about an environment's class, or about its nearest known base.

    Args:
        env (MultiAgentEnv): a JaxMARL environment.

    Examples:
        >>> class SwitchRiddle:
        ...     max_steps = 5
        >>> traits_of(SwitchRiddle()).limit, traits_of(object()).limit
        ('max_steps', None)
    """
    names = [cls.__name__ for cls in type(env).__mro__]
    return next((ENV_TRAITS[name] for name in names if name in ENV_TRAITS), EnvTraits())


def _smax_state(state: Any) -> Any:
    return getattr(state, "state", state)


def _winning_agents(env: Any, state: Any) -> Any:
    import jax.numpy as jnp

    alive = _smax_state(state).unit_alive
    allies, enemies = alive[: env.num_allies].any(), alive[env.num_allies :].any()
    is_ally = [str(agent).startswith("ally") for agent in env.agents]
    return jnp.where(jnp.array(is_ally), allies & ~enemies, enemies & ~allies)


def _acting_player(env: Any, state: Any) -> Any:
    import jax.numpy as jnp

    # The state gives the current player's seat, and agents may change seats between episodes.
    acting = state.seat_order[jnp.argmax(state.cur_player_idx)]
    return jnp.arange(env.num_agents) == acting


def _hanabi_colors(env: Any) -> tuple[list[int], list[int]]:
    """Returns the color of each feature and action of Hanabi."""
    n_agents, hand_size, n_ranks = env.num_agents, env.hand_size, env.num_ranks
    colors = list(range(env.num_colors))
    card_colors = [color for color in colors for _ in range(n_ranks)]
    pile_colors = [color for color in colors for _ in range(int(sum(env.num_cards_of_rank)))]
    other_hands = card_colors * (n_agents - 1) * hand_size + _no_labels(n_agents)
    deck = _no_labels(env.deck_size - n_agents * hand_size)
    board = deck + card_colors + _no_labels(env.max_info_tokens + env.max_life_tokens)
    last_action = (
        _no_labels(n_agents + 4 + n_agents)
        + colors
        + _no_labels(n_ranks + 2 * hand_size)
        + card_colors
        + _no_labels(2)
    )
    beliefs = (card_colors + colors + _no_labels(n_ranks)) * n_agents * hand_size
    actions = (
        _no_labels(2 * hand_size)
        + colors * (n_agents - 1)
        + _no_labels((n_agents - 1) * n_ranks + 1)
    )
    return other_hands + board + pile_colors + last_action + beliefs, actions


def _overcooked_ingredients(env: Any) -> tuple[list[int], list[int]] | None:
    """Returns the ingredient of each channel of OvercookedV2; None if none can be exchanged.

    Ingredients can be exchanged if the recipes stay the same. Their piles stay where they are, as
    with JaxMARL's ``op_ingredient_permutations``.
    """
    n_ingredients, exchangeable = env.layout.num_ingredients, _exchangeable_ingredients(env.layout)
    if len(exchangeable) < 2 or len(env.obs_shape) != 3:
        return None
    labels = [exchangeable.index(i) if i in exchangeable else -1 for i in range(n_ingredients)]
    # An item's channels are: on a plate, cooked, and its ingredients.
    items, cook, fixed = _no_labels(2) + labels, _no_labels(5), _no_labels(6)
    channels = (cook + items) * 2 + fixed + labels + items + items
    return channels + _no_labels(env.obs_shape[-1] - len(channels)), _no_labels(len(env.action_set))


def _exchangeable_ingredients(layout: Any) -> list[int]:
    """Returns the largest set of ingredients that can be exchanged in all recipes."""
    recipes = {tuple(sorted(map(int, recipe))) for recipe in layout.possible_recipes}

    def recipes_after_exchange(i: int, j: int) -> set[tuple[int, ...]]:
        replacement = {i: j, j: i}
        return {tuple(sorted(replacement.get(x, x) for x in recipe)) for recipe in recipes}

    kinds = range(layout.num_ingredients)
    return max(
        ([j for j in kinds if recipes_after_exchange(i, j) == recipes] for i in kinds), key=len
    )


def _no_labels(n: int) -> list[int]:
    return [-1] * n


def _legal_in_switch_riddle(env: Any, state: Any) -> Any:
    import jax.numpy as jnp

    # The rule of the riddle's paper: agents outside the room do nothing.
    nothing = jnp.arange(len(env.game_actions)) == env.game_actions["NOTHING"]
    return {agent: nothing | (state.agent_in_room == i) for i, agent in enumerate(env.agents)}


def _mpe_state(env: Any, state: Any, observations: Any) -> Any:
    import jax.numpy as jnp

    parts = [state.p_pos, state.p_vel, state.c]
    parts += [] if state.goal is None else [state.goal]
    return jnp.concatenate([jnp.ravel(part).astype(jnp.float32) for part in parts])


def _smax_world_state(env: Any, state: Any, observations: Any) -> Any:
    return observations["world_state"]


def _overcooked_state(env: Any, state: Any, observations: Any) -> Any:
    # Each cook sees the whole kitchen.
    return observations[env.agents[0]].reshape(-1)


def _split_grid_observations(env: Any, observations: Any) -> Any:
    # The views of all agents are one array; the inventories have one column per agent.
    grids, inventories = observations["observations"], observations["inventory"]
    return {
        agent: {"observation": grids[i], "inventory": inventories[:, i]}
        for i, agent in enumerate(env.agents)
    }


def _steps_per_episode(env: Any) -> int:
    return int(env.num_inner_steps * env.num_outer_steps)


_SMAX_TRAITS = EnvTraits(limit="max_steps", state=_smax_world_state, won=_winning_agents)
ENV_TRAITS = {
    "SimpleMPE": EnvTraits(limit="max_steps", state=_mpe_state),
    "SMAX": _SMAX_TRAITS,
    "EnemySMAX": _SMAX_TRAITS,
    "Overcooked": EnvTraits(
        limit="max_steps", limit_is_seen=True, timed=True, state=_overcooked_state
    ),
    "OvercookedV2": EnvTraits(limit="max_steps", timed=True, labels=_overcooked_ingredients),
    "HanabiEnv": EnvTraits(legal="get_legal_moves", acts=_acting_player, labels=_hanabi_colors),
    "JaxNav": EnvTraits(limit="max_steps", limit_is_seen=True),
    "SwitchRiddle": EnvTraits(limit="max_steps", deadline=True, legal=_legal_in_switch_riddle),
    "CoinGame": EnvTraits(timed=True, length=_steps_per_episode),
    "InTheGrid": EnvTraits(timed=True, length=_steps_per_episode, seen=_split_grid_observations),
    "InTheGrid_2p": EnvTraits(timed=True, length=_steps_per_episode, by_place=True),
    "InTheMatrix": EnvTraits(timed=True, length=_steps_per_episode),
}


_DISABLED_LIMIT = 2**30
_BRAX_ENVIRONMENTS = ("ant_4x2", "halfcheetah_6x1", "hopper_3x1", "humanoid_9|8", "walker2d_2x3")
# Arguments that SimpleMPE reads from its **kwargs; all other arguments there are ignored.
_MPE_ARGUMENTS = (
    *("rad", "moveable", "silent", "collide", "mass", "accel", "max_speed"),
    *("u_noise", "c_noise", "damping", "contact_force", "contact_margin"),
)


@dataclass(frozen=True)
class WrappedEnv:
    """JaxMARL environment, together with its name, :class:`EnvTraits` and time limit."""

    env: Any
    name: str
    traits: EnvTraits
    limit: int | None

    def reset(self, key: Any) -> tuple[Any, Any]:
        """Resets one copy; returns the observations and the environment's state."""
        observations, state = self.env.reset(key)
        return self._observations_by_agent(observations), state

    def step(self, key: Any, state: Any, actions: Any) -> tuple[Any, Any, Any, Any, Any]:
        """Steps one copy; returns observations, state, rewards, done flags and infos."""
        if self.traits.by_place:
            actions = tuple(actions[agent] for agent in self.env.agents)
        observations, state, rewards, dones, infos = self.env.step_env(key, state, actions)
        return (
            self._observations_by_agent(observations),
            state,
            self._by_agent(rewards),
            dones,
            infos,
        )

    def _observations_by_agent(self, observations: Any) -> Any:
        if self.traits.seen is not None:
            return self.traits.seen(self.env, observations)
        return self._by_agent(observations)

    def _by_agent(self, value: Any) -> Any:
        """Returns a dict by agent, even if the environment returns a sequence or one array."""
        n = len(value) if isinstance(value, (tuple, list)) else (*getattr(value, "shape", ()), 0)[0]
        return dict(zip(self.env.agents, value)) if n == len(self.env.agents) else value


def import_jaxmarl() -> Any:
    """Imports JaxMARL, with JAX's preallocation of GPU memory disabled.

    Raises:
        MissingExtraError: if JaxMARL is not installed.
    """
    if importlib.util.find_spec("jaxmarl") is None:
        raise MissingExtraError("JaxMARL", "jaxmarl")
    if "jax" not in sys.modules:
        os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    with _suppress_output():
        import jaxmarl
    return jaxmarl


@contextlib.contextmanager
def _suppress_output() -> Iterator[None]:
    """Suppresses the output of JaxMARL's import, including writes to ``sys.__stdout__``."""
    kept = sys.stdout, sys.stderr, sys.__stdout__, sys.__stderr__
    sys.stdout = sys.__stdout__ = io.StringIO()  # type: ignore[assignment, misc]
    try:
        yield
    finally:
        sys.stdout, sys.stderr, sys.__stdout__, sys.__stderr__ = kept  # type: ignore[misc]


def wrap_env(
    environment: Any, max_steps: int | None, continuous: bool | None, kwargs: dict[str, Any]
) -> WrappedEnv:
    """Builds an environment from its name, or wraps a built one, and disables its time limit.

    Args:
        environment (str or MultiAgentEnv): name of an environment, or a built environment.
        max_steps (int, optional): number of steps per episode; if None, the class's default.
        continuous (bool, optional): True for continuous actions, False for discrete ones; if None,
            the class's default. Used only for classes that support both.
        kwargs (dict): arguments of the class.

    Raises:
        ConfigError: if an environment, scenario, layout or argument is unknown, or if the
            environment needs brax and it is not installed.
        MissingExtraError: if JaxMARL is not installed.
    """
    named = isinstance(environment, str)
    env = _make_env(environment, max_steps, continuous, kwargs) if named else environment
    if not callable(getattr(env, "step_env", None)):
        raise ConfigError(
            f"JaxMarlEnv: the environment is a {type(env).__name__}, expected a name such as "
            "'MPE_simple_spread_v3' or a JaxMARL environment."
        )
    if env is environment and kwargs:
        raise ConfigError(
            f"JaxMarlEnv: {', '.join(sorted(kwargs))} cannot be applied to an environment that is "
            "already built; pass them to its constructor."
        )
    if getattr(env, "auto_reset", False):
        raise ConfigError(
            f"JaxMarlEnv: {type(env).__name__} resets itself, which loses the last observation of "
            "an episode; build it with auto_reset=False."
        )
    traits = traits_of(env)
    limit = max_steps
    if limit is None and traits.limit is not None:
        limit = int(getattr(env, traits.limit))
    if traits.length is not None:
        limit = min(traits.length(env), limit or _DISABLED_LIMIT)
    if traits.limit is not None:
        env_limit = limit if traits.limit_is_seen or traits.deadline else _DISABLED_LIMIT
        env = _copy_with_limit(env, traits.limit, env_limit)
    return WrappedEnv(env, environment if named else type(env).__name__, traits, limit)


def _make_env(
    name: str, max_steps: int | None, continuous: bool | None, kwargs: dict[str, Any]
) -> Any:
    jaxmarl = import_jaxmarl()
    known = jaxmarl.registered_envs
    if name not in known:
        raise ConfigError(
            f"unknown JaxMARL environment {name!r}; {nearest(name, known)}"
            f"expected one of {', '.join(known)}."
        )
    arguments = dict(kwargs)
    if name in _BRAX_ENVIRONMENTS:
        if importlib.util.find_spec("brax") is None:
            raise ConfigError(
                f"JaxMARL's {name!r} needs brax, which is not installed; run: pip install "
                "'jaxmarl[mabrax]'"
            )
        arguments.setdefault("auto_reset", False)
        if max_steps is not None:
            arguments["episode_length"] = max_steps
    _replace_names(name, arguments)
    # The environments of the package facmac have continuous actions only.
    if continuous is not None and name.startswith("MPE_") and "facmac" not in name:
        arguments.setdefault("action_type", "Continuous" if continuous else "Discrete")
    try:
        env = jaxmarl.make(name, **arguments)
    except (TypeError, ImportError, ValueError, AssertionError) as error:
        why = " ".join(str(error).split()).rstrip(".") or type(error).__name__
        given = f"with {kwargs}" if kwargs else "without arguments"
        fix = "install it" if "not installed" in why else "check these values"
        raise ConfigError(f"JaxMARL's {name!r} cannot be built {given} ({why}); {fix}.") from error
    _refuse_unknown_mpe_arguments(name, env, arguments)
    return env


def _replace_names(name: str, arguments: dict[str, Any]) -> None:
    """Replaces names of SMAX scenarios or Overcooked layouts with the named objects of JaxMARL."""
    tables: dict[str, Mapping[str, Any]] = {}
    if "SMAX" in name:
        from jaxmarl.environments.smax.smax_env import MAP_NAME_TO_SCENARIO

        tables["scenario"] = MAP_NAME_TO_SCENARIO
    if name == "overcooked":
        from jaxmarl.environments.overcooked.layouts import overcooked_layouts

        tables["layout"] = overcooked_layouts
    for key, table in tables.items():
        value = arguments.get(key)
        if not isinstance(value, str):
            continue
        if value not in table:
            raise ConfigError(
                f"JaxMARL's {name!r} has no {key} {value!r}; {nearest(value, table)}"
                f"expected one of {', '.join(table)}."
            )
        arguments[key] = table[value]


def _refuse_unknown_mpe_arguments(name: str, env: Any, arguments: dict[str, Any]) -> None:
    """Raises an error for unknown arguments, because MPE environments silently ignore them."""
    classes = type(env).__mro__[:-1]
    if "SimpleMPE" not in {cls.__name__ for cls in classes}:
        return
    inits = [inspect.signature(cls.__init__).parameters for cls in classes]  # type: ignore[misc]
    known = {key for init in inits for key in init} - {"self", "kwargs"}
    known.update(_MPE_ARGUMENTS)
    for key in arguments:
        if key not in known:
            raise ConfigError(
                f"JaxMARL's {name!r} has no argument {key!r}; {nearest(key, known)}"
                f"it takes {', '.join(sorted(known))}."
            )


def _copy_with_limit(env: Any, attribute: str, limit: int | None) -> Any:
    """Returns a shallow copy of an environment, with another time limit."""
    copy = object.__new__(type(env))
    copy.__dict__.update(vars(env))
    if attribute not in vars(env):  # EnemySMAX takes the attribute from its inner environment
        copy._env = _copy_with_limit(env._env, attribute, limit)
        return copy
    setattr(copy, attribute, limit)
    return copy
