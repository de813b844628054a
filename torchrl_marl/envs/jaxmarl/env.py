"""JaxMARL's worlds as TorchRL environments.

Shapes: E envs, N agents of a group, S state features.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from tensordict import TensorDict
from torch import Tensor
from torchrl.data import Composite, OneHot, Unbounded
from torchrl.envs.utils import MarlGroupMapType

from torchrl_marl.envs.auto_reset import AutoResetEnv
from torchrl_marl.envs.declaration import Declaration
from torchrl_marl.envs.jaxmarl.worlds import World, import_jaxmarl, make_world
from torchrl_marl.envs.life_cycle import where_fresh
from torchrl_marl.errors import ConfigError, SpecError

__all__ = ["JaxMarlEnv"]


class JaxMarlEnv(AutoResetEnv):
    """A world of JaxMARL, all copies stepped by one jitted call, in groups.

    A step gives an episode's last observation and the next one's first, and the life cycle is
    worked out in JAX. Tensors are exchanged by DLPack, without a copy on the CPU. An episode has
    exactly ``max_steps`` steps, or as many as the world's class says (25 in MPE, 100 in SMAX, 400
    in Overcooked, where JaxMARL itself makes one more in the first two), and is ``truncated``
    then; what a world ends by itself is ``terminated``, also where its class is not known here.

    - SMAX: a unit that dies is ``terminated``, its mask False; the dead still get the team's
      reward (``bootstrap: team``). ``info=True`` gives ``(group, "info", "won")``: 1 at the end
      of an episode that was won.
    - Hanabi: the mask is True of the one whose turn it is.
    - Overcooked: ``shaped_reward=1.0`` adds the world's shaped reward, linearly less until
      ``shaped_reward_steps`` env steps of all copies; ``info=True`` gives the reward without.

    On a CPU one thread of torch is best (``torch.set_num_threads(1)``, ``threads: 1`` in a
    recipe): torch's and JAX's threads get in each other's way. JAX does not survive a fork: start
    processes by spawn. On a GPU it needs JAX's own GPU build, else the world runs on the CPU and
    its tensors are moved; GPUs are untested.

    Args:
        world (str or MultiAgentEnv): one of ``jaxmarl.registered_envs``, or an environment of
            JaxMARL's of one's own, which stays as it is.

    Keyword Args:
        num_envs (int): number E of copies.
        max_steps (int, optional): time limit of an episode; None: as the world's class says.
        seed (int, optional): drawn from torch's global generator if None.
        device (torch.device): of the tensors.
        state ("observations", "world" or callable, optional): what a central critic sees: all
            agents' observations side by side, the world's own state (of SMAX, MPE and
            Overcooked), or what ``state(world)`` gives of a copy's JAX state, ``[S]``.
        info (bool): with ``(group, "info")``.
        group_map (dict or MarlGroupMapType, optional): group -> agents; by the ids' prefixes.
        continuous_actions (bool, optional): in MPE, which has both; ignored elsewhere.
        categorical_actions (bool): discrete actions as an index, otherwise one-hot.
        shaped_reward (float): how much of the world's shaped reward is added.
        shaped_reward_steps (int, optional): env steps after which none is.
        **kwargs: of the world; ``scenario`` (SMAX) and ``layout`` (Overcooked) may be names.

    Shapes:
        - ``(group, "observation")``: ``[E, N, ...]``; ``("next", group, "reward")``: ``[E, N, 1]``
        - ``(group, "mask")``: ``[E, N]``; ``(group, "action_mask")``: ``[E, N, n_actions]``
        - ``done``, ``terminated``, ``truncated``: ``[E, 1]``; ``"state"``: ``[E, S]``

    Raises:
        ConfigError: an unknown world, scenario, layout or argument; a state, shaped reward or
            grouping that the world has not.
        MissingExtraError: JaxMARL, or brax for its worlds, is not installed.

    Reference: Rutherford et al., 2024, https://arxiv.org/abs/2311.10090.

    Examples:
        >>> env = JaxMarlEnv("MPE_simple_spread_v3", num_envs=4, seed=0)
        >>> env.rollout(5)["next", "agent", "reward"].shape
        torch.Size([4, 5, 3, 1])
    """

    def __init__(
        self,
        world: Any,
        *,
        num_envs: int,
        max_steps: int | None = None,
        seed: int | None = None,
        device: torch.device | str = "cpu",
        state: str | Callable[[Any], Any] | None = None,
        info: bool = False,
        group_map: MarlGroupMapType | Mapping[str, Sequence[Any]] | None = None,
        continuous_actions: bool | None = None,
        categorical_actions: bool = True,
        shaped_reward: float = 0.0,
        shaped_reward_steps: int | None = None,
        **kwargs: Any,
    ) -> None:
        for name, value in {"num_envs": num_envs, "max_steps": max_steps}.items():
            if value is not None and value < 1:
                raise ConfigError(f"JaxMarlEnv: {name} is {value}, expected 1 or more.")
        import_jaxmarl()
        import jax

        from torchrl_marl.envs.jaxmarl import exchange, program

        self._exchange = exchange
        self._jax_device = exchange.device_of(torch.device(device))
        own = make_world(world, max_steps, continuous_actions, kwargs)
        kinds = _kinds(own, group_map, not categorical_actions)
        self._program = program.Program(
            own,
            kinds,
            num_envs,
            state=_state_of(own, state, kinds),
            info=info,
            shaping=program.Shaping(shaped_reward, shaped_reward_steps),
        )
        self.world_name, self.max_steps = own.name, own.limit
        self._set_seed(int(torch.randint(2**31, ())) if seed is None else seed)
        self._template, shapes = jax.eval_shape(self._program.start, *self._seeded)
        if shaped_reward and "shaped_reward" not in self._program.told():
            raise ConfigError(
                f"JaxMarlEnv: shaped_reward is {shaped_reward}, but {own.name!r} has none of its "
                "own; leave it 0."
            )
        specs = {name: tuple(kind.spec() for kind in group) for name, group in kinds.items()}
        described = Unbounded(shapes["state"].shape[1:]) if "state" in shapes else None
        super().__init__(
            Declaration(type(self).__name__, num_envs, specs, described),
            device=device,
            info={name: _info_spec(shapes[name]) for name in kinds if "info" in shapes[name]},
        )
        # What a call goes on from is its own, and the next call's to write to.
        self._start_all = jax.jit(self._program.start)
        self._restart = jax.jit(self._program.restart, donate_argnums=0)
        self._advance = jax.jit(self._program.step, donate_argnums=0)

    # ------------------------------------------------------------------------ reset and step

    def _start(self, fresh: Tensor | None) -> dict[str, Any]:
        if fresh is None or self._carry is None:
            given = self._seeded if self._carry is None else self._gone_on()
            self._carry, leaves = self._start_all(*given)
            return self._given(leaves)
        asked = self._exchange.to_jax(fresh, self._jax_device)
        self._carry, leaves = self._restart(self._carry, asked)
        return where_fresh(fresh, self._given(leaves), self._begun or {})

    def _gone_on(self) -> tuple[Any, Any]:
        return self._carry["key"], self._carry["calls"]

    def _play(
        self, actions: dict[str, dict[str, Any]]
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        rows = [
            self._action(given, self._declaration.kinds[name][i].action_spec)
            for name, kinds in self.group_kinds.items()
            for i, given in enumerate(kinds.parts(actions[name], "action").values())
        ]
        self._carry, after, begun = self._advance(self._carry, rows)
        return self._given(after), self._given(begun)

    def _action(self, action: Tensor, spec: Any) -> Any:
        if isinstance(spec, OneHot):
            action = action.to(torch.int32).argmax(-1)
        return self._exchange.to_jax(action, self._jax_device)

    def _given(self, leaves: dict[str, Any]) -> dict[str, Any]:
        return self._exchange.to_torch(leaves, self.device)

    # ---------------------------------------------------------------- random state, snapshot

    def _set_seed(self, seed: int | None) -> None:
        import jax

        key = jax.random.PRNGKey(0 if seed is None else seed)
        zero = jax.numpy.zeros((), jax.numpy.int32)
        self._seeded = jax.device_put((key, zero), self._jax_device)
        self._carry: Any = None
        self._begun = None

    def snapshot(self) -> TensorDict:
        """The environment's whole state: the worlds, running episodes and JAX's random key.

        Returns:
            TensorDict: to be given to :meth:`restore`; saves with ``torch.save(x.to_dict())``.
        """
        if self._carry is None:
            self.reset()
        shared = dict(zip(("key", "calls"), self._gone_on()))
        world = {key: x for key, x in self._carry.items() if key not in shared}
        read = self._exchange.read_tree
        source = {"world": {"batched": read(world), "shared": read(shared)}}
        if self._begun is not None:
            source["begun"] = _cloned(self._begun)
            source["ended"] = self._ended.clone()  # type: ignore[union-attr,assignment]
        return TensorDict(source)

    def restore(self, snapshot: TensorDict) -> None:
        """Continues from a snapshot of an environment that was built with the same arguments.

        Raises:
            SimulatorStateError: a snapshot of another world or another number of envs.
        """
        saved = {**snapshot["world", "batched"], **snapshot["world", "shared"]}
        carry = self._exchange.write_tree(self._template, saved, self._jax_device)
        self._begun, self._ended = None, None
        if "begun" in snapshot.keys():
            self._begun = _cloned(snapshot["begun"].to_dict())
            self._ended = snapshot["ended"].clone()
        self._carry = carry


def _kinds(world: World, group_map: Any, one_hot: bool) -> dict[str, tuple]:
    """Group -> its kinds, with the shapes that the world really gives."""
    import jax

    from torchrl_marl.envs.jaxmarl.teams import group_ids, kinds_of

    env = world.env
    seen, state = jax.eval_shape(env.reset, jax.random.PRNGKey(0))
    if not isinstance(seen, dict) or any(agent not in seen for agent in env.agents):
        raise SpecError(
            f"JaxMARL's {world.name!r} gives its observations as {_outline(seen)}, expected a dict "
            f"with one for each of {list(env.agents)}; wrap it to give these."
        )
    try:
        legal = jax.eval_shape(getattr(env, world.traits.legal), state)
    except (NotImplementedError, AttributeError):
        legal = None
    shapes = {agent: tuple(seen[agent].shape) for agent in env.agents}
    masks = None if legal is None else {agent: tuple(x.shape) for agent, x in legal.items()}
    groups = group_ids("JaxMarlEnv", env.agents, group_map)
    return {name: kinds_of(name, ids, env, shapes, masks, one_hot) for name, ids in groups.items()}


def _outline(seen: Any) -> str:
    return f"a dict of {sorted(seen)}" if isinstance(seen, dict) else f"a {type(seen).__name__}"


def _state_of(world: World, state: Any, kinds: Mapping[str, Any]) -> Callable[..., Any] | None:
    """``state(world, observations)`` of a copy."""
    import jax.numpy as jnp

    if state is None:
        return None
    if callable(state):
        return lambda own, seen: jnp.ravel(state(own))
    if state == "observations":
        ids = [agent for group in kinds.values() for kind in group for agent in kind.ids]
        return lambda own, seen: jnp.concatenate([seen[agent].reshape(-1) for agent in ids])
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


def _info_spec(leaves: Mapping[str, Any]) -> Composite:
    own = {name: Unbounded(tuple(x.shape[1:])) for name, x in leaves["info"].items()}
    return Composite(own, shape=leaves["mask"].shape[1:])


def _cloned(nested: Mapping[str, Any]) -> dict[str, Any]:
    return {k: _cloned(x) if isinstance(x, Mapping) else x.clone() for k, x in nested.items()}
