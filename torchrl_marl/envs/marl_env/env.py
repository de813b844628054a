"""Base class for custom environments."""

from __future__ import annotations

import contextlib
import functools
import random
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import torch
from tensordict import TensorDict, TensorDictBase
from torch import Tensor
from torchrl.data import TensorSpec

from torchrl_marl.envs.agents.declaration import (
    Declaration,
    check_parts,
    check_whole_numbers,
    refuse_unknown,
)
from torchrl_marl.envs.agents.declared_env import DeclaredEnv
from torchrl_marl.envs.agents.life_cycle import (
    GroupFlags,
    TeamFlags,
    episode_state,
    flags_after_reset,
    flags_after_step,
    mask_rewards,
    where_fresh,
)
from torchrl_marl.envs.agents.spaces import check_bounds
from torchrl_marl.envs.marl_env.domain import DomainParameters
from torchrl_marl.envs.marl_env.graphs import EnvGraphs
from torchrl_marl.errors import ConfigError, SimulatorStateError, SpecError
from torchrl_marl.runtime.random_state import RandomState, offset_seed
from torchrl_marl.simulator.resets import RunningEnvs
from torchrl_marl.simulator.state import Path, SimulatorState, set_child, walk_simulator
from torchrl_marl.specs import AgentSpec

__all__ = ["MarlEnv", "completed", "forbid_inplace_writes"]


def completed(method: Callable[..., Any], complete: str) -> Callable[..., Any]:
    """Wraps a method of an env; calling it runs the env's ``complete(method, tensordict)``.

    If the method is called while ``complete`` runs, as by ``super()._step(...)`` in a subclass, the
    method itself runs.

    Args:
        method (callable): method ``_reset`` or ``_step`` of an environment.
        complete (str): name of the environment's method that completes the output of ``method``.
    """

    @functools.wraps(method)
    def run(self: Any, tensordict: TensorDictBase | None = None, **kwargs: Any) -> Any:
        if self._is_completing:
            return method(self, tensordict, **kwargs)
        self._is_completing = True
        try:
            return getattr(self, complete)(method, tensordict, **kwargs)
        finally:
            self._is_completing = False

    return run


_GENERATORS = (torch.Generator, np.random.Generator, np.random.RandomState, random.Random)


@contextlib.contextmanager
def forbid_inplace_writes(episode: dict[str, Any], method: str) -> Iterator[None]:
    """Context in which writing in place to an output that a rollout may hold raises an error."""
    leaves = list(_leaves(episode.get("given", {})))
    versions = [x._version for _, x in leaves]
    yield
    for (key, x), version in zip(leaves, versions):
        if x._version != version:
            raise SpecError(
                f"{method} writes in place to its earlier output {key!r}; return a clone, or "
                "write x = x + y for x += y."
            )


def _leaves(nested: dict[str, Any], path: Path = ()) -> Iterator[tuple[Path, Tensor]]:
    for key, x in nested.items():
        if isinstance(x, dict):
            yield from _leaves(x, (*path, key))
        else:
            yield (*path, key), x


# Attributes that EnvBase sets after __init__. All attributes that neither EnvBase nor this class
# sets are the environment's state.
_NOT_SIMULATOR = (
    "_cache_in_keys",
    "_state_keys",
    "_collector",
    "_is_spec_locked",
    "_inplace_update",
)
_STATE_ATTRIBUTES = {("_episode",), ("_buffers",), ("_modules",)}


class MarlEnv(DomainParameters, EnvGraphs, DeclaredEnv):
    """Base class for vectorized multi-agent environments.

    A subclass declares its agents in ``__init__`` and defines two methods, which handle all E envs
    at once:

    - ``_reset(tensordict)`` draws initial states for all E envs, and returns
      ``(group, "observation")``. Optional entries are ``(group, "mask")``, which is False for
      waiting agents, ``(group, "action_mask")``, and the states that only critics read: ``"state"``
      of the team, and ``(group, "state")`` of each agent. If only some envs are reset, the base
      class keeps the states and entries of the others.
    - ``_step(tensordict)`` returns the same entries of the next state, and ``(group, "reward")``.
      Optional entries are ``(group, "terminated")`` and ``(group, "truncated")`` of agents that
      end in this step, and ``"terminated"`` and ``"truncated"`` of the whole episode. The argument
      ``tensordict`` has ``(group, "action")``, ``(group, "mask")`` and the agents' done flags. The
      actions of dead and waiting agents are zeros.

    The base class adds the rest:

    - specs, ``group_map`` and masks;
    - the agents' done flags, which stay True until the episode's reset, or until the agent comes
      back;
    - the episode's done flags, at the root: an episode is terminated if all its agents are
      terminated, and truncated if it ends for another reason;
    - the time limit, at which episodes are truncated;
    - random numbers: in ``_reset`` and ``_step``, the global functions of torch, numpy and Python
      draw from the env's random state;
    - parameters that each new episode draws (:meth:`register_domain_parameter`);
    - :meth:`snapshot` and :meth:`restore`.

    An agent is born in the first step in which it acts, and earns rewards from then until its end.
    Its rewards in other steps become 0. A turn-based environment sets ``in_turns = True``: all
    agents are then born at the reset, and may win or lose before their first turn.

    With ``respawns = True`` ended agents may come back within the episode. An agent whose mask is
    True again, in a later step than the one in which it ended, acts next, in a new life. The
    episode then ends only by its own flags and the time limit, even if no agent lives.

    Keep the state in tensor attributes with the E envs in the first dim. Never write in place to
    an output of ``_step``. To find the tensors of the state, the base class also builds the
    environment with 7 and 11 envs, so ``__init__`` must pass ``num_envs`` to ``super().__init__``.

    A group may have several kinds of agents. Return the entries of each kind under its name, or
    return a lazily stacked group. Entries that have the same shape for all kinds may be returned
    for the whole group. :meth:`by_kind` splits the actions by kind. If shapes differ between the
    kinds, the group is heterogeneous: its specs are TorchRL's stacked specs, and its data are a
    lazily stacked TensorDict ``[E, N]``. :class:`~torchrl_marl.envs.PadAgents` makes it dense.

    A method ``scene(index)`` makes the environment drawable. It returns the shapes, the pixels or
    the text of one env; see :mod:`torchrl_marl.envs.scene`.

    Shapes and dtypes are checked in every step. Values are checked against the specs only in the
    first reset and the first step, because a check of values waits for the device.

    Args:
        num_envs (int): number E of parallel envs.

    Keyword Args:
        max_steps (int, optional): time limit of an episode, in steps.
        seed (int, optional): random seed; if None, it is drawn from torch's global generator.
        device (torch.device, optional): device of the tensors; torch's default device if None.
        check (bool): True to check observations and actions against their specs in every step.

    Shapes:
        - ``(group, "observation")``: ``[E, N, O]``; ``("next", group, "reward")``: ``[E, N, 1]``
        - ``(group, "mask")``: ``[E, N]``; ``(group, "action_mask")``: ``[E, N, n_actions]``
        - ``"state"``: ``[E, S]``; ``(group, "state")``: ``[E, N, S]``
        - ``done``, ``terminated``, ``truncated``: ``[E, 1]``, and ``[E, N, 1]`` per group

    Raises:
        ConfigError: the declared agents are invalid.
        SpecError: an output of ``_reset`` or ``_step`` differs from the declaration.

    Examples:
        >>> from torchrl.data import Bounded, Unbounded
        >>> class Reach(MarlEnv):
        ...     def __init__(self, num_envs, **kwargs):
        ...         super().__init__(num_envs, **kwargs)
        ...         rover = AgentSpec("rover", 2, Unbounded((1,)), Bounded(-1, 1, (1,)))
        ...         self.register_agent(rover)
        ...     def _reset(self, tensordict):
        ...         self.position = torch.randn(self.num_envs, 2, 1)
        ...         return TensorDict({"rover": {"observation": self.position}})
        ...     def _step(self, tensordict):
        ...         self.position = self.position + tensordict["rover", "action"]
        ...         arrived = self.position.abs() < 0.1
        ...         return TensorDict({"rover": {
        ...             "observation": self.position, "reward": arrived.float(),
        ...             "terminated": arrived}})
        >>> env = Reach(num_envs=8, max_steps=20, seed=0)
        >>> env.rollout(5, break_when_any_done=False)["next", "rover", "done"].shape
        torch.Size([8, 5, 2, 1])

        Two kinds in one group, with different observations and actions:

        >>> class Race(MarlEnv):
        ...     def __init__(self, num_envs, **kwargs):
        ...         super().__init__(num_envs, **kwargs)
        ...         rover = AgentSpec("rover", 3, Unbounded((1,)), Bounded(-1, 1, (1,)))
        ...         drone = AgentSpec("drone", 1, Unbounded((4,)), Bounded(-1, 1, (2,)))
        ...         self.register_agent(rover, group="team")
        ...         self.register_agent(drone, group="team")
        ...     def _reset(self, tensordict):
        ...         return {"team": self._observe(torch.zeros(self.num_envs, 3, 1))}
        ...     def _step(self, tensordict):
        ...         actions = self.by_kind(tensordict, "team")
        ...         gap = actions["drone"]["action"].sum((1, 2)).view(-1, 1, 1)
        ...         seen = self._observe(actions["rover"]["action"] + gap)
        ...         return {"team": {**seen, "reward": gap.repeat(1, 4, 1)}}
        ...     def _observe(self, x):
        ...         drone = torch.cat([x.flatten(1), x.mean(1)], -1).unsqueeze(1)
        ...         return {"rover": {"observation": x}, "drone": {"observation": drone}}
        >>> td = Race(num_envs=8, seed=0).rollout(5)
        >>> td["team"].shape, [agent["action"].shape[-1] for agent in td["team"].unbind(-1)]
        (torch.Size([8, 5, 4]), [1, 1, 1, 2])
    """

    in_turns = False
    respawns = False

    def __init_subclass__(cls, **kwargs: Any) -> None:
        # The methods are wrapped, because transforms and batched envs call them directly.
        super().__init_subclass__(**kwargs)
        for name, complete in (("_reset", "_complete_reset"), ("_step", "_complete_step")):
            if name in vars(cls):
                setattr(cls, name, completed(vars(cls)[name], complete))

    def __init__(
        self,
        num_envs: int,
        *,
        max_steps: int | None = None,
        seed: int | None = None,
        device: torch.device | str | None = None,
        check: bool = False,
        **unknown: Any,
    ) -> None:
        name = type(self).__name__
        refuse_unknown(unknown, type(self), MarlEnv)
        check_whole_numbers(name, {"num_envs": num_envs, "max_steps": max_steps})
        device = torch.get_default_device() if device is None else torch.device(device)
        super().__init__(device=device, batch_size=(num_envs,))
        self.max_steps, self.check = max_steps, check
        self._checked_methods: set[str] = set()
        # Names of the groups for which _reset returned a mask.
        self._masked_groups: set[str] = set()
        self.group_map: dict[str, list[str]] = {}
        self._declaration = Declaration(name, num_envs, in_turns=self.in_turns)
        self._is_completing = False
        self._seed = int(torch.randint(2**31, ())) if seed is None else seed
        self.random_state = RandomState(offset_seed(self._seed), self.device)
        self._captured = self._leader = None
        self._env_slots: Any = ...  # not yet probed
        self._nominal, self._ranges, self._domain = {}, {}, {}
        # The state that the base class keeps; empty before the first reset.
        self._episode: dict[str, Any] = {}
        self._not_simulator = (
            frozenset((key,) for key in (*vars(self), *_NOT_SIMULATOR, "_not_simulator"))
            - _STATE_ATTRIBUTES
        )

    # ---------------------------------------------------------------------------- declaring

    def register_agent(self, spec: AgentSpec, group: str | None = None) -> None:
        """Adds a kind of agent; call it in ``__init__``.

        Args:
            spec (AgentSpec): kind of agent: the number of agents, and the specs of one of them.
            group (str, optional): name of the kind's group; the kind's name by default.

        Raises:
            ConfigError: the group or agent exists already, or ``__init__`` is over.
            ValueError: the group's name is reserved.
        """
        self._declare(self._declaration.with_agent(spec, group), f"agent {spec.name!r}")

    def register_state(self, spec: TensorSpec) -> None:
        """Adds ``"state"``, an input for the critic only; call it in ``__init__``.

        Args:
            spec (TensorSpec): spec of one env's state, ``[S]``.

        Raises:
            ConfigError: the spec's values are not floats, there is a state already, or
                ``__init__`` is over.
        """
        self._declare(self._declaration.with_state(spec), "the state")

    def _declare(self, declaration: Declaration, what: str) -> None:
        self._refuse_late(what)
        self._set_declaration(declaration)

    def _refuse_late(self, what: str) -> None:
        if self.is_spec_locked or self._episode:
            raise ConfigError(
                f"{type(self).__name__}: {what} is registered too late; do it in __init__, "
                "before the specs are used."
            )

    def by_kind(self, tensordict: TensorDictBase, group: str) -> dict[str, TensorDictBase]:
        """Returns the dense data of each kind of agent in a group.

        Args:
            tensordict (TensorDictBase): data that contain the group, lazily stacked, padded or
                dense.
            group (str): name of the group.

        Shapes:
            - tensordict: ``[*B]``; returns: ``[*B, M]`` for a kind of M agents
        """
        return self.group_kinds[group].split(tensordict.get(group))

    @property
    def steps(self) -> Tensor:
        """Number of steps made in the current episode of each env, ``[E]``."""
        return self._episode["steps"]

    # ------------------------------------------------------------------------ reset and step

    def _complete_reset(
        self, draw: Callable[..., Any], tensordict: TensorDictBase | None, **kwargs: Any
    ) -> TensorDict:
        if not self.group_map:
            raise ConfigError(
                f"{type(self).__name__} has no agents; call register_agent in __init__."
            )
        fresh = None if tensordict is None else tensordict.get("_reset", None)
        if fresh is not None:
            fresh = fresh.reshape(self.batch_size)
        if not self._episode or (fresh is not None and bool(fresh.all())):
            fresh = None
        if self._leader is not None:
            self._follow_leader()
        running = None
        if fresh is not None:
            exclude = {*self._not_simulator, ("_episode",)}
            slots = self._find_env_slots() if self._env_slots is ... else self._env_slots
            running = RunningEnvs(self, self.num_envs, exclude, slots)
        with (
            self._use_random_state(),
            forbid_inplace_writes(self._episode, f"{type(self).__name__}._reset"),
        ):
            if self._ranges:
                self._draw_domain()
            output = draw(self, tensordict, **kwargs)
        source = self._declaration.reader.read(output, "_reset")
        if fresh is not None and running is not None:
            running.put_back(~fresh)
        self._start_episode(source, fresh)
        return self._to_tensordict(self._episode["given"])

    def _use_random_state(self) -> contextlib.AbstractContextManager[None]:
        """Context in which the env's random state is used; captured steps use torch's instead."""
        in_graph = self._captured is not None and self._captured.in_graph
        return contextlib.nullcontext() if in_graph else self.random_state.active()

    def _start_episode(self, source: dict[str, Any], fresh: Tensor | None) -> None:
        steps = torch.zeros(self.batch_size, dtype=torch.int64, device=self.device)
        false = torch.zeros(*self.batch_size, 1, dtype=torch.bool, device=self.device)
        root = TeamFlags(false, false)
        groups = flags_after_reset(self.team, root, source)
        born = {n: flags.mask | self.in_turns for n, flags in groups.items()}
        episode = episode_state(steps, root, groups, source, born)
        self._episode = episode if fresh is None else where_fresh(fresh, episode, self._episode)
        self._masked_groups = {name for name in self.team.groups if "mask" in source[name]}
        if self.respawns and not self._masked_groups:
            raise SpecError(
                f"{type(self).__name__} has respawns=True, but _reset returned no mask; return "
                "(group, 'mask'), which is True for agents that act next."
            )
        self._check_values("_reset", "observation", self._episode["given"])
        self._checked_methods |= {"_reset"}

    def _complete_step(
        self, advance: Callable[..., Any], tensordict: TensorDictBase, **kwargs: Any
    ) -> TensorDict:
        before = self._episode
        if not before:
            raise ConfigError(
                f"{type(self).__name__}: a step before the first reset; call reset() first."
            )
        tensordict = self._prepare_step(tensordict)
        with (
            self._use_random_state(),
            forbid_inplace_writes(self._episode, f"{type(self).__name__}._step"),
        ):
            output = advance(self, tensordict, **kwargs)
        source = self._declaration.reader.read(output, "_step")
        self._check_returned_masks(source)
        flags_before = {name: GroupFlags(**flags) for name, flags in before["groups"].items()}
        rewards = {
            name: mask_rewards(source[name].pop("reward"), flags, before["born"][name])
            for name, flags in flags_before.items()
        }
        steps = before["steps"] + 1
        root, groups = self._flags_after_step(steps, flags_before, source)
        born = {name: flags.mask | before["born"][name] for name, flags in groups.items()}
        self._episode = episode_state(steps, root, groups, source, born)
        self._check_values("_step", "observation", source)
        self._checked_methods |= {"step", "_step"}
        return self._to_tensordict(self._episode["given"], rewards)

    def _check_returned_masks(self, source: Mapping[str, Any]) -> None:
        """Refuses a step without the mask of a group that had one after the reset."""
        for name in sorted(self._masked_groups):
            if "mask" not in source[name]:
                raise SpecError(
                    f"{type(self).__name__}._step returned no {(name, 'mask')!r}, but _reset did; "
                    "return the mask of the next step, too."
                )

    def _flags_after_step(
        self, steps: Tensor, flags_before: Mapping[str, GroupFlags], source: dict[str, Any]
    ) -> tuple[TeamFlags, dict[str, GroupFlags]]:
        """Returns the flags of the team and of the groups; takes those of the team from a step."""
        limit = None if self.max_steps is None else (steps >= self.max_steps).unsqueeze(-1)
        groups = flags_after_step(flags_before, source)
        ends = source.pop("terminated", None), source.pop("truncated", None)
        ending_groups = [] if self.respawns else list(groups.values())
        root = TeamFlags(**self._episode["root"]).after(ending_groups, *ends, limit)
        for name in sorted(self._masked_groups) if self.respawns else ():
            acts = source[name]["mask"]
            groups[name] = groups[name].revived(flags_before[name], acts, root)
        closed = {n: flags.closed_by(root, source[n].get("mask")) for n, flags in groups.items()}
        return root, closed

    def _prepare_step(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Returns the input of ``_step``: adds flags, and sets actions of masked agents to 0."""
        actions = self._declaration.reader.read_actions(tensordict)
        self._check_values("step", "action", actions)
        tensordict = tensordict.clone(recurse=False)
        for name, flags in self._episode["groups"].items():
            kinds = self.group_kinds[name]
            own = {**flags, "done": flags["terminated"] | flags["truncated"]}
            own |= kinds.zero_masked_actions(actions[name], flags["mask"])
            tensordict.set(name, kinds.with_leaves(tensordict.get(name), own))
        return tensordict

    def _check_values(self, method: str, leaf: str, output: dict[str, dict[str, Any]]) -> None:
        """Checks values against their specs in a method's first call; in all calls if ``check``."""
        if torch.compiler.is_compiling() or (method in self._checked_methods and not self.check):
            return
        masks = {name: flags["mask"] for name, flags in self._episode["groups"].items()}
        where = f"{type(self).__name__}.{method}"
        check_bounds(where, leaf, output, masks, self._declaration)

    def _to_tensordict(
        self, output: dict[str, Any], rewards: dict[str, Tensor] | None = None
    ) -> TensorDict:
        source = dict(output)
        for name, group in self.team.groups.items():
            kinds = self.group_kinds[name]
            leaves = output[name] if rewards is None else {**output[name], "reward": rewards[name]}
            if kinds.lazy:
                source[name] = kinds.stack_lazily(leaves, self.batch_size, self.device)
                continue
            source[name] = TensorDict(leaves, (*self.batch_size, group.n_agents), self.device)
        return TensorDict(source, self.batch_size, self.device)

    # -------------------------------------------------------------- random state and snapshot

    def _set_seed(self, seed: int | None) -> None:
        self._seed = 0 if seed is None else seed
        self.random_state.seed(offset_seed(self._seed))

    def snapshot(self) -> TensorDict:
        """Returns the whole state: simulation, running episodes and random state.

        Returns:
            TensorDict: argument of :meth:`restore`; save it with ``torch.save(x.to_dict())``.

        Raises:
            SimulatorStateError: an attribute is a random generator, which cannot be saved.
        """
        if not self._episode:
            self.reset()
        for path, value in walk_simulator(self, self._not_simulator).slots():
            if isinstance(value, _GENERATORS):
                raise SimulatorStateError(
                    f"{type(self).__name__}: {'.'.join(path)} is a {type(value).__name__}, which "
                    "cannot be saved; use torch's global functions, which this env seeds and saves."
                )
        env = SimulatorState(None, self._not_simulator).read(self)
        return TensorDict({"world": env, "random": TensorDict(self.random_state.state_dict())})

    def restore(self, snapshot: TensorDict) -> None:
        """Restores a snapshot of an environment that was built with the same arguments.

        Raises:
            SimulatorStateError: the snapshot has other state tensors or another number of envs.
        """
        check_parts(snapshot, ["world", "random"], type(self).__name__)
        if not self._episode:
            self.reset()
        SimulatorState(None, self._not_simulator).write(self, snapshot["world"])
        self.random_state.load_state_dict(dict(snapshot["random"].items()))

    def to(self, device: torch.device | str) -> MarlEnv:
        """Moves the environment and its tensors to a device."""
        device = torch.device(device)
        if device != self.device:
            walk = walk_simulator(self, self._not_simulator)
            moved = {id(x): x.to(device) for x in walk.tensors.values()}
            for path, x in walk.tensors.items():
                set_child(walk.objects[path[:-1]], path[-1], moved[id(x)])
            self.random_state = RandomState(offset_seed(self._seed), device)
            self._captured = None
        return super().to(device)
