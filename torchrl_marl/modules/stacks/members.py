"""Members of a stack, views of its agents, and modules that read and write TensorDicts."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
from tensordict import (
    LazyStackedTensorDict,
    NestedKey,
    TensorDictBase,
    is_tensor_collection,
    unravel_key,
)
from tensordict.nn import TensorDictModule, TensorDictModuleBase, dispatch, set_skip_existing
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from torchrl_marl.modules.stacks.storage import named_tensors

if TYPE_CHECKING:
    from torchrl_marl.modules.stacks.batching import Batching
    from torchrl_marl.modules.stacks.module_stack import ModuleStack


__all__ = [
    "DEFAULT_KEYS",
    "Members",
    "MultiAgentPart",
    "StackMember",
    "StackModule",
    "StackPart",
    "StackSelection",
    "Window",
]

DEFAULT_KEYS = (("observation",), ("action",))


class StackPart(nn.Module):
    """Agents of a module stack: the stack itself, or a view of some of its agents.

    ``torch.cat`` and ``torch.stack`` of such parts make a new stack.
    """

    stack: Any
    """The :class:`ModuleStack` that holds the members."""
    agents: tuple[int, ...]
    """Indices of the agents."""
    event_dims: int
    """Number of feature dims of an input."""
    single = False
    """True for one agent without an agent dim."""

    @classmethod
    def __torch_function__(
        cls,
        function: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Joins stacks and their members for ``torch.cat`` and ``torch.stack``."""
        if function not in (torch.cat, torch.stack) or len(args) != 1 or kwargs:
            return NotImplemented
        parts = list(args[0])
        own = [part for part in parts if isinstance(part, StackPart)]
        if function is torch.stack and not all(part.single for part in own):
            raise TypeError("torch.stack takes single members; torch.cat takes stacks.")
        return type(own[0].stack).join(parts)


class MultiAgentPart(StackPart):
    """Part of a stack with an agent dim: the stack itself, or a view of several agents."""

    batching: Batching

    def forward(self, *inputs: Any) -> Any:
        """Runs the agents on tensors, or on a group's TensorDict as :class:`StackModule` does.

        The keys are those of the members if they are TensorDictModules, else ``"observation"`` and
        ``"action"``.
        """
        if len(inputs) == 1 and isinstance(inputs[0], TensorDictBase):
            return StackModule(self, *self.stack.keys)(inputs[0])
        return self.batching(self.stack.buckets, inputs)

    @property
    def shape(self) -> torch.Size:
        """``[n]``."""
        return torch.Size([len(self)])

    def __len__(self) -> int:
        return len(self.agents)

    def __iter__(self) -> Iterator[StackMember]:
        return (StackMember(self.stack, agent) for agent in self.agents)


class Members:
    """The distinct modules of several parts of stacks."""

    def __init__(self) -> None:
        self.modules: list[nn.Module] = []
        self.origins: list[nn.Module | None] = []
        self.index: list[int] = []
        self._number_of_key: dict[Any, int] = {}
        self._copies: dict[int, list[nn.Module]] = {}
        self._keys: dict[Any, None] = {}

    @property
    def keys(self) -> Any:
        """The keys of all parts; None for plain modules."""
        if len(self._keys) > 1:
            raise ValueError(
                f"the modules have keys {list(self._keys)}, expected the same for all; "
                "RoutedSequential takes modules of different keys."
            )
        return next(iter(self._keys), None)

    def add(self, part: nn.Module) -> None:
        """Adds the agents of a part."""
        if isinstance(part, StackPart):
            self._keys[part.stack.keys] = None
            for agent in part.agents:
                self._add_agent(part.stack, agent)
        elif isinstance(part, TensorDictModuleBase):
            self._add_wrapped(part)
        elif isinstance(part, nn.Module):
            self._keys[DEFAULT_KEYS] = None
            self._add_module(id(part), part, part)
        else:
            raise TypeError(f"expected modules and module stacks, found {type(part).__name__}.")

    def _add_wrapped(self, part: Any) -> None:
        if type(part) is not TensorDictModule:
            raise TypeError(
                f"a {type(part).__name__} cannot be stacked, expected modules or "
                "TensorDictModules of them; put the stack of its networks into one."
            )
        self._keys[tuple(part.in_keys), tuple(part.out_keys)] = None
        self._add_module(id(part.module), part.module, part.module)

    def _add_agent(self, part: Any, agent: int) -> None:
        if id(part) not in self._copies:
            self._copies[id(part)] = part.copies()
        member = part.index[agent]
        origin = part.origin(member)
        key = (id(part), member) if origin is None else id(origin)
        self._add_module(key, self._copies[id(part)][member], origin)

    def _add_module(self, key: Any, module: nn.Module, origin: nn.Module | None) -> None:
        if key not in self._number_of_key:
            self._number_of_key[key] = len(self.modules)
            self.modules.append(module)
            self.origins.append(origin)
        elif not _have_equal_tensors(self.modules[self._number_of_key[key]], module):
            raise ValueError(
                f"copies of one {type(module).__name__} have been trained apart since they were "
                "stacked, so they are no longer one member; copy.deepcopy one of the parts."
            )
        self.index.append(self._number_of_key[key])


def _have_equal_tensors(a: nn.Module, b: nn.Module) -> bool:
    if a is b:
        return True
    pairs = zip(named_tensors(a), named_tensors(b))
    return all(name == other and torch.equal(x, y) for (name, x), (other, y) in pairs)


class StackModule(TensorDictModuleBase):
    """A :class:`ModuleStack` that reads from a TensorDict and writes to it.

    A group whose agents differ in shape is lazily stacked: every agent's leaf is read from, and
    written to, the TensorDict of this agent. The module works inside ``TensorDictSequential``, and
    as the module of a ``ProbabilisticActor`` if the agents' outputs have one shape.

    Args:
        stack (ModuleStack or StackSelection): the modules.
        in_keys (sequence of NestedKey): inputs, in order.
        out_keys (sequence of NestedKey): outputs, in order.

    Keys:
        - reads: ``in_keys``, ``[*B, N, *F]``, or lazily stacked over N
        - writes: ``out_keys``, ``[*B, N, *F]``, or leaf by leaf into a lazily stacked group

    Raises:
        KeyError: a missing input.
        ValueError: outputs of different shapes for a group that is not lazily stacked, or a number
            of outputs that differs from that of ``out_keys``.

    Examples:
        >>> from tensordict import TensorDict, lazy_stack
        >>> from torchrl_marl.modules import stack
        >>> drone, rover = torch.nn.Linear(4, 2), torch.nn.Linear(3, 2)
        >>> key, out = ("agents", "observation"), ("agents", "action")
        >>> policy = StackModule(stack([drone, rover]), [key], [out])
        >>> agents = [TensorDict({"observation": torch.zeros(5, f)}, [5]) for f in (4, 3)]
        >>> policy(TensorDict({"agents": lazy_stack(agents, -1)}, [5])).get(out).shape
        torch.Size([5, 2, 2])
    """

    def __init__(
        self, stack: StackPart, in_keys: Sequence[NestedKey], out_keys: Sequence[NestedKey]
    ) -> None:
        super().__init__()
        self.module = stack
        self.in_keys = [unravel_key(key) for key in in_keys]
        self.out_keys = [unravel_key(key) for key in out_keys]

    @dispatch(auto_batch_size=False)
    @set_skip_existing(None)
    def forward(
        self, tensordict: TensorDictBase, tensordict_out: TensorDictBase | None = None
    ) -> TensorDictBase:
        """Runs all agents."""
        inputs = [self._read(tensordict, _as_path(key)) for key in self.in_keys]
        output = self.module(*inputs)
        outputs = pytree.tree_leaves(output, is_leaf=lambda x: isinstance(x, list))
        if len(outputs) != len(self.out_keys):
            raise ValueError(
                f"the stack has {len(outputs)} outputs, expected {len(self.out_keys)}: "
                f"{self.out_keys}."
            )
        target = tensordict if tensordict_out is None else tensordict_out
        for key, value in zip(self.out_keys, outputs):
            if isinstance(value, list):
                _write_to_agents(target, _as_path(key), value)
            else:
                target.set(key, value)
        return target

    def _read(self, tensordict: TensorDictBase, path: tuple[str, ...]) -> Tensor | list[Tensor]:
        """Returns a leaf, or a list of each agent's if they are lazily stacked."""
        *group, leaf = path
        for i, part in enumerate(group):
            inner = tensordict.get(part, None)
            if not is_tensor_collection(inner):
                raise KeyError(f"the input {path} is missing: no {path[: i + 1]}.")
            tensordict = inner
        return self._read_leaf(tensordict, leaf, path)

    def _read_leaf(
        self, tensordict: TensorDictBase, leaf: str, path: tuple[str, ...]
    ) -> Tensor | list[Tensor]:
        if not isinstance(tensordict, LazyStackedTensorDict):
            value = tensordict.get(leaf, None)
            if value is None:
                raise KeyError(f"the input {path} is missing, found {sorted(tensordict.keys())}.")
            return value
        parts = [self._read_leaf(part, leaf, path) for part in tensordict.tensordicts]
        first, dim = parts[0], tensordict.stack_dim
        if isinstance(first, list):  # a batch of lazily stacked groups, as from reshape
            return [torch.stack(list(rows), dim) for rows in zip(*parts)]
        if first.ndim == tensordict.tensordicts[0].ndim + self.module.event_dims:
            return parts  # type: ignore[return-value]
        return torch.stack(parts, dim)  # type: ignore[arg-type]


def _as_path(key: Any) -> tuple[str, ...]:
    return (key,) if isinstance(key, str) else key


def _write_to_agents(tensordict: TensorDictBase, path: tuple[str, ...], rows: list[Tensor]) -> None:
    """Writes each agent's leaf into its own TensorDict."""
    *names, leaf = path
    group = tensordict.get(tuple(names), None) if names else tensordict
    if not isinstance(group, LazyStackedTensorDict):
        raise ValueError(
            f"the outputs {path} differ in shape, {[tuple(r.shape) for r in rows]}, but their "
            "group is not lazily stacked: pad=True gives the stack outputs of one shape."
        )
    if group.stack_dim == group.ndim - 1 and len(group.tensordicts) == len(rows):
        for part, row in zip(group.tensordicts, rows):
            part.set(leaf, row)
        return
    for i, part in enumerate(group.tensordicts):
        _write_to_agents(part, (leaf,), [row.select(group.stack_dim, i) for row in rows])


class Window(StackPart):
    """A view of some agents of a stack, which shares storage and gradients.

    Args:
        stack (ModuleStack): the stack.
        agents (sequence of int): indices of the agents.
    """

    def __init__(self, stack: ModuleStack, agents: Sequence[int]) -> None:
        super().__init__()
        self.agents = tuple(agents)
        self.__dict__["stack"] = stack  # hidden: parameters() of a window is empty
        self.event_dims = stack.event_dims


class StackMember(Window):
    """View of one agent, ``stack[i]``; its gradients flow into the stack.

    Examples:
        >>> from torchrl_marl.modules import ModuleStack
        >>> policy = ModuleStack([nn.Linear(4, 2), nn.Linear(4, 2)], index=[0, 1])
        >>> policy[0](torch.randn(5, 4)).shape, list(policy[0].parameters())
        (torch.Size([5, 2]), [])
    """

    single = True

    def __init__(self, stack: ModuleStack, agent: int) -> None:
        super().__init__(stack, [agent])

    def forward(self, *inputs: Any) -> Any:
        """Runs the agent."""
        bucket, k = self.stack.bucket(self.agents[0])
        return bucket.call(k, *inputs)

    def row(self) -> dict[str, Tensor]:
        """Returns name -> parameter or buffer, as views of the stack's tensors."""
        bucket, k = self.stack.bucket(self.agents[0])
        return bucket.row(k)

    def detach(self) -> nn.Module:
        """Returns an ordinary module with copies of the parameters, to save or train separately."""
        return self.stack.copy_of(self.agents[0])


class StackSelection(Window, MultiAgentPart):
    """View of some agents, ``stack[1:3]`` or ``stack[[0, 2]]``; gradients flow into the stack.

    Examples:
        >>> from torchrl_marl.modules import ModuleStack
        >>> policy = ModuleStack([nn.Linear(4, 2), nn.Linear(4, 2)], index=[0, 1, 0])
        >>> policy[1:](torch.randn(5, 2, 4)).shape
        torch.Size([5, 2, 2])
    """

    def __init__(self, stack: ModuleStack, agents: Sequence[int]) -> None:
        if not agents:
            raise IndexError(f"no agent of a stack of {len(stack)} is selected.")
        super().__init__(stack, agents)
        self.batching = stack.route(self.agents)

    def __getitem__(self, agents: int | slice | Sequence[int]) -> StackMember | StackSelection:
        if isinstance(agents, int | slice):
            return self.stack[self.agents[agents]]
        return self.stack[[self.agents[agent] for agent in agents]]

    def detach(self) -> ModuleStack:
        """Returns a stack of copies."""
        return self.stack.select(self.agents)
