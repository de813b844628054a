"""Jitted steps of JaxMARL environments, and the kinds of agents in each environment."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any

import jax
import jax.numpy as jnp
from torchrl.data import Composite, TensorSpec, Unbounded
from torchrl.envs.utils import MarlGroupMapType

from torchrl_marl.envs.agents.spaces import action_spec_of, group_agents
from torchrl_marl.envs.jaxmarl.build import WrappedEnv, legal_actions, wrap_env
from torchrl_marl.errors import ConfigError, SpecError
from torchrl_marl.specs import AgentSpec

__all__ = ["FLAGS", "Compiled", "JaxStep", "Kind", "Settings", "Shaping", "compiled"]

# A JAX array, or nested dicts of them.
Array = Any
# Names of the agents' flags ("flags") and the episode's flags ("root"), in stacking order.
FLAGS = {
    "flags": ("done", "mask", "terminated", "truncated"),
    "root": ("done", "terminated", "truncated"),
}
State = Callable[[Any, Any], Array]


Shape = tuple[int, ...] | Mapping[str, Any]
"""Shape of one array, or of several arrays by name."""


@dataclass(frozen=True)
class Kind:
    """Agents of a group that have equal observation and action spaces.

    Args:
        name (str): name of the kind.
        ids (tuple): ids of the agents in the environment.
        observation (tuple of int, or dict of such tuples): shape of an agent's observation.
        action (TensorSpec): spec of an agent's action.
        n_legal (int, optional): size of the action mask; None without a mask.
    """

    name: str
    ids: tuple[Any, ...]
    observation: Shape
    action: TensorSpec
    n_legal: int | None

    def spec(self) -> AgentSpec:
        """Returns the spec that declares the kind."""
        return AgentSpec(
            self.name,
            len(self.ids),
            _observation_spec(self.observation),
            self.action,
            action_mask=self.n_legal is not None,
            agent_names=tuple(str(agent) for agent in self.ids),
        )


def kinds_of(
    group: str,
    ids: Sequence[Any],
    env: Any,
    shapes: Mapping[Any, Shape],
    legal: Mapping[Any, tuple[int, ...]] | None,
    one_hot: bool,
) -> tuple[Kind, ...]:
    """Returns the kinds of a group, in the order in which they first appear.

    Args:
        group (str): name of the group.
        ids (sequence): ids of the group's agents.
        env (MultiAgentEnv): environment, from which the action spaces are read.
        shapes (mapping): agent -> shape of its observation, or a dict of shapes.
        legal (mapping, optional): agent -> shape of its mask of legal actions.
        one_hot (bool): True to encode discrete actions as one-hot vectors.
    """
    members: list[tuple[tuple, list[Any]]] = []
    for agent in ids:
        space = env.action_space(agent)
        action = action_spec_of(f"the action space of {agent!r}", space, one_hot=one_hot)
        n_actions = getattr(action.space, "n", None) if action.domain == "discrete" else None
        has_mask = legal is not None and n_actions is not None and legal.get(agent) == (n_actions,)
        key = (shapes[agent], action, n_actions if has_mask else None)
        same = next((same_ids for known_key, same_ids in members if known_key == key), None)
        if same is None:
            members.append((key, [agent]))
        else:
            same.append(agent)
    names = [group] if len(members) == 1 else [str(same_ids[0]) for _, same_ids in members]
    return tuple(Kind(name, tuple(same_ids), *key) for name, (key, same_ids) in zip(names, members))


def _observation_spec(shape: Shape) -> TensorSpec:
    if isinstance(shape, Mapping):
        return Composite({key: _observation_spec(own) for key, own in shape.items()})
    return Unbounded(shape)


@dataclass(frozen=True)
class Shaping:
    """Weight of the environment's shaped reward, which decays linearly to zero.

    Args:
        coefficient (float): initial weight.
        steps (int, optional): number of env steps over which the weight decays; None for no decay.
    """

    coefficient: float = 0.0
    steps: int | None = None

    def at(self, frames: Array) -> Array:
        """Returns the weight after a number of env steps."""
        if self.steps is None:
            return self.coefficient
        return self.coefficient * jnp.maximum(0.0, 1.0 - frames / self.steps)


@dataclass(eq=False)
class JaxStep:
    """Pure functions that start and step E copies of an environment.

    The *carry* holds the state between two calls. The *leaves* are the outputs for torch, in nested
    dicts by group. Carry and leaves share no memory. The leaf ``"flags"``, ``[4, E, A]``, holds the
    flags of all A agents. The leaf ``"root"``, ``[3, E, 1]``, holds the flags of the episodes.
    :data:`FLAGS` gives the order of the flags.

    Args:
        wrapped (WrappedEnv): the environment.
        kinds (mapping): group -> kinds of its agents.
        num_envs (int): number E of copies.
        state (callable, optional): function ``state(jax_state, observations)`` that returns the
            critic's state ``[S]`` of one copy.
        info (bool): True to add infos.
        shaping (Shaping): weight of the shaped reward.
    """

    wrapped: WrappedEnv
    kinds: Mapping[str, Sequence[Kind]]
    num_envs: int
    state: State | None
    info: bool
    shaping: Shaping

    def __post_init__(self) -> None:
        self.env, self.traits = self.wrapped.env, self.wrapped.traits
        self.limit = self.wrapped.limit
        self.ids = [agent for group in self.kinds.values() for kind in group for agent in kind.ids]
        agents = [str(agent) for agent in self.env.agents]
        self.order = [agents.index(str(agent)) for agent in self.ids]

    # ------------------------------------------------------------------------ the three calls

    def start(self, key: Array, calls: Array) -> tuple[Array, ...]:
        """Resets all copies; returns the carry and the leaves."""
        key, reset_key = jax.random.split(key)
        carry, leaves = self._reset_copies(reset_key)
        return _copy_outputs({**carry, "key": key, "calls": calls}, leaves)

    def merge(self, carry: Array, new: Array, fresh: Array) -> Array:
        """Takes the new carry in envs where the mask ``fresh`` is True, the old carry in others."""
        shared = {key: new[key] for key in ("key", "calls")}
        per_copy = {key: x for key, x in new.items() if key not in shared}
        return {**_select_where(fresh, per_copy, carry), **shared}

    def step(self, carry: Array, actions: list[Array]) -> tuple[Array, ...]:
        """Steps all copies; returns the carry, the result, and the inputs of the next step."""
        key, step_key, reset_key = jax.random.split(carry["key"], 3)
        keys = jax.random.split(step_key, self.num_envs)
        results = jax.vmap(self.wrapped.step)(
            keys, carry["world"], self._actions_by_agent(carry, actions)
        )
        observations, state, rewards, dones, infos = results
        steps, calls = carry["steps"] + 1, carry["calls"] + 1
        done_flags = self._compute_done_flags(carry["terminated"], steps, dones, infos)
        next_carry, step_leaves = self._make_carry_and_leaves(
            observations, state, steps, *done_flags, infos
        )
        self._set_rewards(step_leaves, rewards, infos, carry)
        fresh_carry, next_start = self._reset_copies(reset_key)
        fresh = done_flags[1] | done_flags[2]
        next_carry = {
            key: _select_where(fresh, fresh_carry[key], next_carry[key]) for key in fresh_carry
        }
        next_start = _select_where(fresh, next_start, step_leaves)
        return _copy_outputs({**next_carry, "key": key, "calls": calls}, step_leaves, next_start)

    def preview(self, carry: Array, actions: list[Array]) -> Array:
        """Returns the states after a step, before ended episodes are reset."""
        _, step_key, _ = jax.random.split(carry["key"], 3)
        keys = jax.random.split(step_key, self.num_envs)
        return jax.vmap(self.wrapped.step)(
            keys, carry["world"], self._actions_by_agent(carry, actions)
        )[1]

    # ---------------------------------------------------------------------------------- parts

    def _reset_copies(self, key: Array) -> tuple[Array, Array]:
        observations, state = jax.vmap(self.wrapped.reset)(jax.random.split(key, self.num_envs))
        no_flags = jnp.zeros((self.num_envs, len(self.ids)), bool)
        steps = jnp.zeros(self.num_envs, jnp.int32)
        return self._make_carry_and_leaves(
            observations, state, steps, no_flags, no_flags[:, 0], no_flags[:, 0], None
        )

    def _actions_by_agent(self, carry: Array, actions: list[Array]) -> dict[Any, Array]:
        """Returns each agent's action; inactive agents get a legal action, which has no effect."""
        chosen, i = {}, 0
        kinds = [kind for group in self.kinds.values() for kind in group]
        for kind, action in zip(kinds, actions):
            for j, agent in enumerate(kind.ids):
                agent_action, is_acting = action[:, j], carry["mask"][:, i]
                idle_action = jnp.zeros_like(agent_action)
                if kind.n_legal is not None:
                    idle_action = carry["idle"][:, i].astype(agent_action.dtype)
                is_acting = is_acting.reshape(-1, *[1] * (agent_action.ndim - 1))
                chosen[agent] = jnp.where(is_acting, agent_action, idle_action)
                i += 1
        return chosen

    def _compute_done_flags(
        self, terminated: Array, steps: Array, dones: Array, infos: Array
    ) -> tuple[Array, Array, Array]:
        """Returns the agents' terminated flags, and the episodes' flags (terminated, truncated)."""
        episode_ended = dones["__all__"]
        agent_ended = jnp.stack([dones.get(agent, episode_ended) for agent in self.ids], 1)
        limit_reached = jnp.zeros_like(episode_ended) if self.limit is None else steps >= self.limit
        is_truncation = jnp.full_like(episode_ended, self.traits.timed)
        if self.traits.limit_is_seen:
            is_truncation = is_truncation | limit_reached
        if "truncation" in infos:
            is_truncation = is_truncation | (infos["truncation"] > 0)
        terminated = terminated | ((agent_ended | episode_ended[:, None]) & ~is_truncation[:, None])
        all_terminated = terminated.all(1)
        return terminated, all_terminated, (limit_reached | episode_ended) & ~all_terminated

    def _make_carry_and_leaves(
        self,
        observations: Array,
        state: Array,
        steps: Array,
        terminated: Array,
        root_terminated: Array,
        root_truncated: Array,
        infos: Array | None,
    ) -> tuple[Array, Array]:
        """Returns the next carry, and all leaves except the rewards."""
        truncated = ~terminated & root_truncated[:, None]
        mask = ~terminated
        if self.traits.acts is not None:
            is_acting = jax.vmap(lambda copy_state: self.traits.acts(self.env, copy_state))(state)  # type: ignore[misc]
            mask = mask & (is_acting[:, jnp.array(self.order)] | root_truncated[:, None])
        # The keys must not change, because they are stored in snapshots.
        carry = {"world": state, "steps": steps, "terminated": terminated, "mask": mask}
        legal = self._legal_actions(state)
        if legal:
            idle = (legal[agent].argmax(-1) for agent in self.ids)
            carry["idle"] = jnp.stack([x.astype(jnp.int32) for x in idle], 1)
        team_flags = {"terminated": root_terminated, "truncated": root_truncated}
        team_flags["done"] = root_terminated | root_truncated
        flags = {"terminated": terminated, "truncated": truncated, "mask": mask}
        flags["done"] = terminated | truncated
        leaves: dict[str, Any] = {
            "root": {k: x[:, None] for k, x in team_flags.items()},
            "flags": flags,
        }
        if self.state is not None:
            leaves["state"] = jax.vmap(self.state)(state, observations).astype(jnp.float32)
        info = self._collect_infos(state, infos, team_flags["done"]) if self.info else {}
        for name, agents in self.places.items():
            leaves[name] = self._observe_group(name, observations, legal)
            if info:
                leaves[name]["info"] = {key: x[:, agents] for key, x in info.items()}
        return carry, leaves

    @property
    def places(self) -> dict[str, slice]:
        """Group -> slice that selects the group's agents in the list of all agents."""
        places, end = {}, 0
        for name, kinds in self.kinds.items():
            n = sum(len(kind.ids) for kind in kinds)
            places[name], end = slice(end, end + n), end + n
        return places

    def _observe_group(self, group: str, observations: Array, legal: Array) -> dict[str, Any]:
        """Returns a group's observations and action masks, split by kind if there are several."""
        kinds = self.kinds[group]
        kind_outputs: dict[str, Any] = {}
        for kind in kinds:
            observations_of_kind = [observations[agent] for agent in kind.ids]
            stacked = jax.tree.map(
                lambda *x: jnp.stack(x, 1).astype(jnp.float32), *observations_of_kind
            )
            kind_outputs[kind.name] = {"observation": stacked}
            if kind.n_legal is not None:
                masks = jnp.stack([legal[agent] for agent in kind.ids], 1)
                kind_outputs[kind.name]["action_mask"] = masks > 0
        return kind_outputs if len(kinds) > 1 else kind_outputs[kinds[0].name]

    def _legal_actions(self, state: Array) -> dict[Any, Array]:
        if all(kind.n_legal is None for group in self.kinds.values() for kind in group):
            return {}
        return jax.vmap(partial(legal_actions, self.env, self.traits))(state)

    def _set_rewards(self, leaves: Array, rewards: Array, infos: Array, carry: Array) -> None:
        """Sets the rewards of all agents; 0 for an agent that terminated in an earlier step."""
        reward = jnp.stack([rewards[agent] for agent in self.ids], 1).astype(jnp.float32)
        is_alive = ~carry["terminated"]
        total = reward = jnp.where(is_alive, reward, 0.0)
        if self.shaping.coefficient:
            shaped = jnp.stack([infos["shaped_reward"][agent] for agent in self.ids], 1)
            scale = self.shaping.at(carry["calls"] * float(self.num_envs))
            total = reward + scale * jnp.where(is_alive, shaped, 0.0)
        for name, agents in self.places.items():
            leaves[name]["reward"] = total[:, agents, None]
            if self.shaping.coefficient:
                leaves[name]["unshaped"] = reward[:, agents, None]
            if self.info and self.shaping.coefficient:
                leaves[name]["info"]["unshaped_reward"] = reward[:, agents, None]

    def _collect_infos(self, state: Array, infos: Array | None, done: Array) -> dict[str, Array]:
        """Returns a dict, name -> infos ``[E, A, 1]``; it has ``"won"`` if games can be won."""
        rows = {} if infos is None else self._info_rows(infos)
        if infos is None:
            rows = {
                name: jnp.zeros(shape, jnp.float32) for name, shape in self.info_shapes().items()
            }
        elif self.traits.won is not None:
            won = jax.vmap(lambda copy_state: self.traits.won(self.env, copy_state))(state)  # type: ignore[misc]
            rows["won"] = (won[:, jnp.array(self.order)] & done[:, None]).astype(jnp.float32)
        return {name: x.reshape(self.num_envs, len(self.ids), 1) for name, x in rows.items()}

    def info_shapes(self) -> dict[str, tuple[int, ...]]:
        """Returns a dict, name -> shape ``[E, A]``, of the infos of a step."""
        shapes = jax.eval_shape(self._sample_infos, jax.random.PRNGKey(0))
        return {name: tuple(x.shape) for name, x in shapes.items()}

    def _sample_infos(self, key: Array) -> dict[str, Array]:
        keys = jax.random.split(key, self.num_envs)
        _, state = jax.vmap(self.wrapped.reset)(keys)
        spaces = {agent: self.env.action_space(agent) for agent in self.env.agents}
        drawn = {agent: space.sample(key) for agent, space in spaces.items()}
        actions = jax.tree.map(lambda x: jnp.stack([x] * self.num_envs), drawn)
        _, state, rewards, _, infos = jax.vmap(self.wrapped.step)(keys, state, actions)
        rows = self._info_rows(infos)
        flat = jnp.zeros((self.num_envs, len(self.ids)), jnp.float32)
        rows.update({"won": flat} if self.traits.won is not None else {})
        return {**rows, **({"unshaped_reward": flat} if self.shaping.coefficient else {})}

    def _info_rows(self, infos: Array) -> dict[str, Array]:
        rows = {}
        for name, x in infos.items():
            if isinstance(x, dict) and all(agent in x for agent in self.ids):
                x = jnp.stack([x[agent] for agent in self.ids], 1)
            elif isinstance(x, dict) or x.ndim > 2:
                continue
            elif x.ndim == 1:
                x = jnp.broadcast_to(x[:, None], (self.num_envs, len(self.ids)))
            else:
                x = x[:, jnp.array(self.order)]
            rows[name] = x.astype(jnp.float32)
        return rows


def _select_where(fresh: Array, new: Array, old: Array) -> Array:
    """Takes new leaves in the envs where ``fresh`` is True; drops leaves that have no new value."""
    if isinstance(new, dict):
        return {key: _select_where(fresh, x, old[key]) for key, x in new.items()}

    def select(x: Array, y: Array) -> Array:
        return jnp.where(fresh.reshape(-1, *[1] * (x.ndim - 1)), x, y).astype(x.dtype)

    return jax.tree.map(select, new, old)


def _copy_outputs(carry: Array, *leaves: Array) -> tuple[Array, ...]:
    """Returns copies of the arrays; their dtypes are fixed, so later calls do not recompile.

    Without the copies, JAX may return the same array in carry and leaves, and torch would write to
    the carry. The flags are packed into one array, because handing a single array to torch takes
    about as long as a cheap step.
    """
    carry = jax.tree.map(lambda x: jax.lax.convert_element_type(x, x.dtype), carry)
    packed = [
        {**output, **{key: jnp.stack([output[key][k] for k in FLAGS[key]]) for key in FLAGS}}
        for output in leaves
    ]
    return carry, *jax.tree.map(jnp.copy, packed)


@dataclass(frozen=True)
class Settings:
    """Settings that determine the jitted calls; see :class:`JaxMarlEnv`."""

    environment: Any
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
        """True if no setting is a user's object; then equal settings give the same environment."""
        return _is_plain_value((self.environment, self.state, self.group_map, self.kwargs))


def _is_plain_value(value: Any) -> bool:
    if isinstance(value, tuple):
        return all(_is_plain_value(x) for x in value)
    return isinstance(value, (str, int, float, MarlGroupMapType, type(None)))


@dataclass(frozen=True)
class Compiled:
    """The jitted calls of an environment.

    Args:
        wrapped (WrappedEnv): the environment.
        kinds (dict): group -> kinds of its agents.
        places (dict): group -> slice that selects its agents in the list of all agents.
        start, merge, step (callable): jitted functions; ``merge`` and ``step`` consume the carry.
        preview (callable): jitted function that returns the states after a step, for pictures.
        carry, leaves: shapes and dtypes of the carry and of the leaves.
    """

    wrapped: WrappedEnv
    kinds: dict[str, tuple[Kind, ...]]
    places: dict[str, slice]
    start: Callable[..., Any]
    merge: Callable[..., Any]
    step: Callable[..., Any]
    preview: Callable[..., Any]
    carry: Any
    leaves: Any


def compiled(settings: Settings) -> Compiled:
    """Returns the jitted calls of an environment, cached for later calls with equal settings.

    Raises:
        ConfigError: if an environment or argument is unknown, or if the state, shaped reward or
            group map does not fit the environment.
        SpecError: if the observations are not a dict by agent.
    """
    return _compile_cached(settings) if settings.plain else _compile(settings)


def _compile(settings: Settings) -> Compiled:
    wrapped = wrap_env(
        settings.environment, settings.max_steps, settings.continuous, dict(settings.kwargs)
    )
    kinds = _read_kinds(wrapped, settings.group_map, settings.one_hot)
    state = _state_function(wrapped, settings.state, kinds)
    step = JaxStep(
        wrapped, kinds, settings.num_envs, state=state, info=settings.info, shaping=settings.shaping
    )
    if settings.shaping.coefficient and "shaped_reward" not in step.info_shapes():
        raise ConfigError(
            f"JaxMarlEnv: shaped_reward is {settings.shaping.coefficient}, but {wrapped.name!r} "
            "has no shaped reward; set it to 0."
        )
    carry, leaves = jax.eval_shape(step.start, jax.random.PRNGKey(0), jnp.zeros((), jnp.int32))
    return Compiled(
        wrapped,
        kinds,
        step.places,
        start=jax.jit(step.start),
        merge=jax.jit(step.merge, donate_argnums=0),
        step=jax.jit(step.step, donate_argnums=0),
        preview=jax.jit(step.preview),
        carry=carry,
        leaves=leaves,
    )


_compile_cached = lru_cache(maxsize=16)(_compile)


def _read_kinds(wrapped: WrappedEnv, group_map: Any, one_hot: bool) -> dict[str, tuple[Kind, ...]]:
    """Returns the kinds of each group, with the shapes of the data that the environment returns."""
    env = wrapped.env
    observations, state = jax.eval_shape(wrapped.reset, jax.random.PRNGKey(0))
    if not isinstance(observations, dict) or any(agent not in observations for agent in env.agents):
        found_type = (
            f"a dict of {sorted(observations)}"
            if isinstance(observations, dict)
            else type(observations).__name__
        )
        raise SpecError(
            f"JaxMARL's {wrapped.name!r} returns its observations as {found_type}, expected a dict "
            f"with one for each of {list(env.agents)}; wrap the environment to return one."
        )
    try:
        legal = jax.eval_shape(partial(legal_actions, env, wrapped.traits), state)
    except (NotImplementedError, AttributeError):
        legal = None
    shapes = jax.tree.map(
        lambda x: tuple(x.shape), {agent: observations[agent] for agent in env.agents}
    )
    mask_shapes = None if legal is None else {agent: tuple(x.shape) for agent, x in legal.items()}
    # Settings are hashed, so they store mappings as pairs.
    groups = group_agents(
        env.agents, dict(group_map) if isinstance(group_map, tuple) else group_map
    )
    return {
        name: kinds_of(name, ids, env, shapes, mask_shapes, one_hot) for name, ids in groups.items()
    }


def _state_function(
    wrapped: WrappedEnv, state: Any, kinds: Mapping[str, tuple[Kind, ...]]
) -> Callable[..., Any] | None:
    """Returns the function ``state(jax_state, observations)`` that computes one copy's state."""
    if state is None:
        return None
    if callable(state):
        return lambda jax_state, observations: jnp.ravel(state(jax_state))
    if state == "observations":
        ids = [agent for group in kinds.values() for kind in group for agent in kind.ids]
        return lambda jax_state, observations: jnp.concatenate(
            [leaf.reshape(-1) for agent in ids for leaf in jax.tree.leaves(observations[agent])]
        )
    if state != "world":
        raise ConfigError(
            f"JaxMarlEnv: state is {state!r}, expected 'observations', 'world', a function or None."
        )
    read_state = wrapped.traits.state
    if read_state is None:
        raise ConfigError(
            f"JaxMarlEnv: {wrapped.name!r} has no state for a central critic; use "
            "state='observations', or a function from its JAX state to a vector."
        )
    return lambda jax_state, observations: read_state(wrapped.env, jax_state, observations)
