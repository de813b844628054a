"""A stack of modules over agents, and its builders ``stack``, ``expand`` and ``cat``."""

from __future__ import annotations

import contextlib
import operator
import weakref
from collections.abc import Iterator, Sequence
from typing import Any

from tensordict import NestedKey
from torch import Tensor, nn

from torchrl_marl.modules.stacks.batching import EXECUTORS, Batching, Place, choose_executor
from torchrl_marl.modules.stacks.members import (
    DEFAULT_KEYS,
    Members,
    MultiAgentPart,
    StackMember,
    StackPart,
    StackSelection,
)
from torchrl_marl.modules.stacks.storage import Bucket, Slot, shared_parameters, signature

__all__ = ["ModuleStack", "cat", "expand", "run_only_agents", "stack"]


class ModuleStack(MultiAgentPart):
    """Modules over an agent dim, run in one batched call for each structure.

    Every distinct module is stored once. Parameters of the K modules with the same structure are
    stacked, ``[K, ...]``, so that optimizers, ``state_dict``, target networks and ``torch.func``
    work on them. Tied weights stay tied and frozen members stay frozen. A parameter that is one
    object in all members (a shared trunk) stays one object. ``stack[i]`` is a view of an agent's
    member, ``stack[1:3]`` of several; ``stack[i].detach()`` is an ordinary module with copies.

    Perceptrons and GRU cells run as batched matmuls, other modules by ``vmap``. Modules that
    ``vmap`` cannot run (``nn.GRU``, ``nn.LSTM``, batch norm that agents share) run in a loop.
    Dropout samples differ between agents. Buffers that a forward writes or assigns are kept for
    each member. :func:`stack`, :func:`expand` and :func:`cat` build stacks.

    Args:
        modules (sequence of nn.Module): distinct modules; they are copied.
        index (sequence of int): module of each agent.

    Keyword Args:
        pad (bool): whether perceptrons that differ only in widths are stored padded and run as one
            call. Dense inputs and outputs are padded to the widest agent. Padding of an input is
            ignored; padding of an output is 0.
        event_dims (int): number of feature dims of an input: 1 for vectors (the default), 3 for
            images.
        executor (str, optional): ``"vmap"`` or ``"loop"``, for all structures; default: the fastest
            for each structure.
        origins (sequence, optional): modules that were copied, by which :func:`cat` recognizes
            copies.
        keys (tuple, optional): input and output keys, for a TensorDict.

    Shapes:
        - input: ``[*B, N, *F]``, or a list of N tensors ``[*B, *F_i]``; also several inputs, and
          tuples of them, with the same ``*B``; or a TensorDict ``[*B, N]``, dense or lazily stacked
        - output: ``[*B, N, *F]`` if the shapes of all members' outputs agree, else a list of N
          tensors

    Raises:
        ValueError: no modules, an unknown executor; in the forward, a wrong number of agents or
            features.
        TypeError: a module with lazy parameters, or with a tensor that is not registered.

    Examples:
        >>> import torch
        >>> policy = ModuleStack([nn.Linear(4, 2), nn.Linear(3, 2)], index=[0, 0, 1])
        >>> policy([torch.randn(5, 4), torch.randn(5, 4), torch.randn(5, 3)]).shape
        torch.Size([5, 3, 2])
        >>> policy[2](torch.randn(5, 3)).shape
        torch.Size([5, 2])
    """

    def __init__(
        self,
        modules: Sequence[nn.Module],
        index: Sequence[int],
        *,
        pad: bool = False,
        event_dims: int = 1,
        executor: str | None = None,
        origins: Sequence[nn.Module | None] | None = None,
        keys: tuple[Sequence[NestedKey], Sequence[NestedKey]] | None = None,
    ) -> None:
        super().__init__()
        if not modules:
            raise ValueError("a module stack needs at least one module, found none.")
        if executor not in (None, *EXECUTORS[1:]):
            raise ValueError(f"executor {executor!r}, expected one of {EXECUTORS[1:]} or None.")
        self.index = tuple(index)
        self.agents = tuple(range(len(self.index)))
        self.pad = pad
        self.event_dims = event_dims
        self.executor = executor
        self.keys = DEFAULT_KEYS if keys is None else keys
        self.places: tuple[Place, ...] = ()
        self.buckets = nn.ModuleList(self._make_buckets(modules))
        self.batching = self.route(self.agents)
        self._origins = [None if m is None else weakref.ref(m) for m in origins or modules]
        self.training = any(module.training for module in modules)

    def _make_buckets(self, modules: Sequence[nn.Module]) -> Iterator[Bucket]:
        shared, slots = shared_parameters(modules), dict[int, Slot]()
        groups: dict[Any, list[int]] = {}
        # Sorted by number of agents, so members with the same number are adjacent.
        for member in sorted(range(len(modules)), key=self.index.count):
            key = signature(modules[member], shared, self.pad and self.executor is None)
            groups.setdefault(key, []).append(member)
        places: dict[int, Place] = {}
        for b, members in enumerate(sorted(groups.values(), key=min)):
            bucket = Bucket([modules[member] for member in members], shared, slots)
            copies = max(self.index.count(member) for member in members)
            bucket.executor = self.executor or choose_executor(bucket, copies, self.event_dims)
            places |= {member: (b, k) for k, member in enumerate(members)}
            yield bucket
        self.places = tuple(places[member] for member in self.index)

    def route(self, agents: Sequence[int]) -> Batching:
        """Returns the given agents' batching: members with the same structure run in one call."""
        places = [self.places[agent] for agent in agents]
        return Batching(places, self._typed_buckets(), self.event_dims, self.pad)

    def _typed_buckets(self) -> list[Bucket]:
        return [bucket for bucket in self.buckets if isinstance(bucket, Bucket)]

    @classmethod
    def join(
        cls,
        parts: Sequence[nn.Module],
        *,
        pad: bool = False,
        event_dims: int | None = None,
        executor: str | None = None,
    ) -> ModuleStack:
        """Joins the agents of all parts in a new stack, as :func:`cat` does."""
        members = Members()
        for part in (parts := list(parts)):
            members.add(part)
        stacks = [part.stack for part in parts if isinstance(part, StackPart)]
        dims = {stack.event_dims for stack in stacks}
        if event_dims is None and len(dims) > 1:
            raise ValueError(f"parts with event_dims {sorted(dims)}; say which by event_dims=...")
        if event_dims is None:
            event_dims = dims.pop() if dims else 1
        return cls(
            members.modules,
            members.index,
            pad=pad or any(stack.pad for stack in stacks),
            event_dims=event_dims,
            executor=executor,
            origins=members.origins,
            keys=members.keys,
        )

    @property
    def stack(self) -> ModuleStack:  # type: ignore[override]
        """The stack itself; for a view, the stack that it shows."""
        return self

    def __getitem__(self, agents: int | slice | Sequence[int]) -> StackMember | StackSelection:
        if isinstance(agents, int):
            return StackMember(self, self._check_agent(agents))
        if isinstance(agents, slice):
            return StackSelection(self, range(len(self))[agents])
        return StackSelection(self, [self._check_agent(agent) for agent in agents])

    def _check_agent(self, agent: int) -> int:
        is_bool = isinstance(agent, bool) or "bool" in str(getattr(agent, "dtype", ""))
        if is_bool or not hasattr(agent, "__index__"):
            raise TypeError(
                f"a stack is indexed by {agent!r}, expected the numbers of agents, such as [0, 2]."
            )
        agent = operator.index(agent)
        if not -len(self) <= agent < len(self):
            raise IndexError(f"agent {agent} of a stack of {len(self)}.")
        return agent % len(self)

    def bucket(self, agent: int) -> tuple[Bucket, int]:
        """Returns the bucket of an agent's member, and the member's index in the bucket."""
        b, k = self.places[agent]
        bucket = self.buckets[b]
        assert isinstance(bucket, Bucket)
        return bucket, k

    def load(self, agent: int, module: nn.Module) -> None:
        """Copies a module's parameters into the agent's member, for all agents that share it.

        Raises:
            ValueError: names or shapes that differ from the member's.
        """
        bucket, k = self.bucket(self._check_agent(agent))
        bucket.load(k, module)

    def copies(self) -> list[nn.Module]:
        """Returns an ordinary module for each distinct member; shared parameters stay shared."""
        memo: dict[int, nn.Parameter] = {}
        agents = [self.index.index(member) for member in range(max(self.index) + 1)]
        return [self.copy_of(agent, memo) for agent in agents]

    def copy_of(self, agent: int, memo: dict[int, nn.Parameter] | None = None) -> nn.Module:
        bucket, k = self.bucket(agent)
        return bucket.copy_of(k, memo)

    def select(self, agents: Sequence[int]) -> ModuleStack:
        """Returns a stack of copies of the given agents' members."""
        copies, members = self.copies(), [self.index[agent] for agent in agents]
        distinct = list(dict.fromkeys(members))
        index = [distinct.index(member) for member in members]
        return self._restack([copies[member] for member in distinct], index)

    def unshare(self) -> ModuleStack:
        """Returns a stack with separate parameters for every agent; the outputs do not change."""
        return self._restack([self.copy_of(agent) for agent in self.agents], self.agents)

    def _restack(self, modules: Sequence[nn.Module], index: Sequence[int]) -> ModuleStack:
        """Returns a stack of other modules with the same settings."""
        return ModuleStack(
            modules,
            index,
            pad=self.pad,
            event_dims=self.event_dims,
            executor=self.executor,
            keys=self.keys,
        )

    def reset_parameters(self) -> None:
        """Resets all members' parameters, by the ``reset_parameters`` of their layers."""
        fresh = self.copies()
        for member, module in enumerate(fresh):
            for layer in module.modules():
                for name in ("reset_parameters", "_reset_parameters"):
                    if callable(getattr(layer, name, None)):
                        getattr(layer, name)()
                        break
            self.load(self.index.index(member), module)

    def origin(self, member: int) -> nn.Module | None:
        """Returns the module from which a member was copied, if it still exists."""
        reference = self._origins[member]
        return None if reference is None else reference()

    def __getstate__(self) -> dict[str, Any]:
        # A copied stack has no origins; and weak references cannot be pickled.
        return {**vars(self), "_origins": [None] * len(self._origins)}

    def extra_repr(self) -> str:
        executors = ", ".join(f"{one.n_members} by {one.executor}" for one in self._typed_buckets())
        return f"{len(self)} agents, {len(set(self.index))} members: {executors}"


def stack(
    modules: Sequence[nn.Module],
    *,
    pad: bool = False,
    event_dims: int = 1,
    executor: str | None = None,
) -> ModuleStack:
    """Stacks one module for every agent; agents that are given the same module share it.

    The modules are copied: training one of them afterwards does not change the stack.

    Args:
        modules (sequence of nn.Module): module of each agent.

    Keyword Args:
        pad (bool): see :class:`ModuleStack`.
        event_dims (int): see :class:`ModuleStack`.
        executor (str, optional): see :class:`ModuleStack`.

    Examples:
        >>> import torch
        >>> policy = stack([nn.Linear(4, 2), nn.Linear(4, 2), nn.Linear(4, 2)])
        >>> policy(torch.randn(5, 3, 4)).shape
        torch.Size([5, 3, 2])
    """
    return cat(modules, pad=pad, event_dims=event_dims, executor=executor)


def expand(
    module: nn.Module, n: int, *, event_dims: int = 1, executor: str | None = None
) -> ModuleStack:
    """Builds a stack in which n agents share one module; the module is copied.

    Args:
        module (nn.Module): the module.
        n (int): number of agents.

    Keyword Args:
        event_dims (int): see :class:`ModuleStack`.
        executor (str, optional): see :class:`ModuleStack`.

    Examples:
        >>> policy = expand(nn.Linear(4, 2), 3)
        >>> policy.shape, sum(p.numel() for p in policy.parameters())
        (torch.Size([3]), 10)
    """
    if isinstance(module, ModuleStack):
        raise TypeError(f"expand takes one module; for all agents {n} times: cat([stack] * {n}).")
    if n < 1:
        raise ValueError(f"expand to {n} agents, expected at least 1.")
    return cat([module] * n, event_dims=event_dims, executor=executor)


def cat(
    parts: Sequence[nn.Module],
    *,
    pad: bool = False,
    event_dims: int | None = None,
    executor: str | None = None,
) -> ModuleStack:
    """Concatenates the agents of all parts in a new stack.

    Shared members stay shared: in ``cat([expand(a, 2), expand(a, 1)])`` three agents share one copy
    of ``a``.

    Args:
        parts (sequence of nn.Module): stacks, members of stacks, and modules for one agent each.
            All are copied.

    Keyword Args:
        pad (bool): see :class:`ModuleStack`; if a part is padded, the result is.
        event_dims (int, optional): see :class:`ModuleStack`. Default: that of the parts.
        executor (str, optional): see :class:`ModuleStack`.

    Raises:
        ValueError: no parts, or copies of one module that have since been trained separately.

    Examples:
        >>> drone, rover = nn.Linear(4, 2), nn.Linear(3, 2)
        >>> policy = cat([expand(drone, 4), expand(rover, 2)])
        >>> policy.shape, policy.index
        (torch.Size([6]), (0, 0, 0, 0, 1, 1))
    """
    if isinstance(parts, nn.Module) and not isinstance(parts, StackPart):
        raise TypeError(
            f"one {type(parts).__name__} is given, expected a list of modules, one for each agent; "
            "expand(module, n) makes it the module of n agents."
        )
    return ModuleStack.join(parts, pad=pad, event_dims=event_dims, executor=executor)


@contextlib.contextmanager
def run_only_agents(network: nn.Module, chosen: Tensor) -> Iterator[None]:
    """Within the context, the stacks of a network run only some agents; other outputs are 0.

    A stack in which agents share members, or have different structures, runs all agents.

    Args:
        network (nn.Module): network with stacks.
        chosen (Tensor): indices of K different agents, ``[K]``.

    Examples:
        >>> import torch
        >>> policy = stack([nn.Linear(4, 2), nn.Linear(4, 2), nn.Linear(4, 2)])
        >>> with run_only_agents(policy, torch.tensor([1])):
        ...     (policy(torch.ones(3, 4)) != 0).any(-1).tolist()
        [False, True, False]
    """
    batchings = [part.batching for part in network.modules() if isinstance(part, ModuleStack)]
    for batching in batchings:
        batching.chosen = chosen
    try:
        yield
    finally:
        for batching in batchings:
            batching.chosen = None
