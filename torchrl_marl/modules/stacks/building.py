"""Building module stacks: ``stack``, ``expand`` and ``cat``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from tensordict.nn import TensorDictModule, TensorDictModuleBase
from torch import nn

from torchrl_marl.modules.stacks.module_stack import ModuleStack, StackMember, StackSelection
from torchrl_marl.modules.stacks.storage import named_tensors

__all__ = ["cat", "expand", "stack"]

DEFAULT_KEYS = (("observation",), ("action",))
_WINDOWS = (StackMember, StackSelection)


def stack(
    modules: Sequence[nn.Module],
    *,
    pad: bool = False,
    event_dims: int = 1,
    executor: str | None = None,
) -> ModuleStack:
    """One module for every agent; a module that comes twice is one member of two agents.

    The modules are copied: training one of them afterwards changes nothing in the stack.

    Args:
        modules (sequence of nn.Module): agent by agent.

    Keyword Args:
        pad (bool): see :class:`ModuleStack`.
        event_dims (int): see :class:`ModuleStack`.
        executor (str, optional): see :class:`ModuleStack`.

    Examples:
        >>> policy = stack([nn.Linear(4, 2), nn.Linear(4, 2), nn.Linear(4, 2)])
        >>> policy(torch.randn(5, 3, 4)).shape
        torch.Size([5, 3, 2])
    """
    return cat(modules, pad=pad, event_dims=event_dims, executor=executor)


def expand(
    module: nn.Module, n: int, *, event_dims: int = 1, executor: str | None = None
) -> ModuleStack:
    """One module for n agents; it is copied once, and its gradient sums over them.

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
    """The agents of all parts, one after the other, in a new stack.

    A member stays one member: ``cat([expand(a, 2), expand(a, 1)])`` has one for three agents.

    Args:
        parts (sequence of nn.Module): stacks, members of stacks, and modules for one agent each.
            Everything is copied.

    Keyword Args:
        pad (bool): see :class:`ModuleStack`; parts that are padded make the whole so.
        event_dims (int, optional): see :class:`ModuleStack`. Default: as the parts'.
        executor (str, optional): see :class:`ModuleStack`.

    Raises:
        ValueError: no parts, or copies of one module that have been trained apart.

    Examples:
        >>> drone, rover = nn.Linear(4, 2), nn.Linear(3, 2)
        >>> policy = cat([expand(drone, 4), expand(rover, 2)])
        >>> policy.shape, policy.index
        (torch.Size([6]), (0, 0, 0, 0, 1, 1))
    """
    if isinstance(parts, nn.Module) and not isinstance(parts, (ModuleStack, *_WINDOWS)):
        raise TypeError(
            f"one {type(parts).__name__} is given, expected a list of modules, one for each agent; "
            "expand(module, n) makes it the module of n agents."
        )
    parts = list(parts)
    whole = [part.stack if isinstance(part, _WINDOWS) else part for part in parts]
    stacks = [part for part in whole if isinstance(part, ModuleStack)]
    dims = {part.event_dims for part in stacks}
    if event_dims is None and len(dims) > 1:
        raise ValueError(f"parts with event_dims {sorted(dims)}; say which by event_dims=...")
    if event_dims is None:
        event_dims = dims.pop() if dims else 1
    found = _Members()
    for part in parts:
        found.add(part)
    return ModuleStack(
        found.modules,
        found.index,
        pad=pad or any(part.pad for part in stacks),
        event_dims=event_dims,
        executor=executor,
        origins=found.origins,
        keys=found.keys,
    )


class _Members:
    """The distinct modules of several parts."""

    def __init__(self) -> None:
        self.modules: list[nn.Module] = []
        self.origins: list[nn.Module | None] = []
        self.index: list[int] = []
        self._known: dict[Any, int] = {}
        self._copies: dict[int, list[nn.Module]] = {}
        self._keys: dict[Any, None] = {}

    @property
    def keys(self) -> Any:
        """The keys of all parts; None where they are plain modules."""
        if len(self._keys) > 1:
            raise ValueError(
                f"the modules have keys {list(self._keys)}, expected the same for all; "
                "RoutedSequential takes modules of different keys."
            )
        return next(iter(self._keys), None)

    def add(self, part: nn.Module) -> None:
        """Adds the agents of a part."""
        if isinstance(part, _WINDOWS):
            self._keys[part.stack.keys] = None
            for agent in part.agents:
                self._add_agent(part.stack, agent)
        elif isinstance(part, ModuleStack):
            self._keys[part.keys] = None
            for agent in range(len(part)):
                self._add_agent(part, agent)
        elif isinstance(part, TensorDictModuleBase):
            self._add_module(id(part.module), *self._unwrapped(part))
        elif isinstance(part, nn.Module):
            self._keys[DEFAULT_KEYS] = None
            self._add_module(id(part), part, part)
        else:
            raise TypeError(f"expected modules and module stacks, found {type(part).__name__}.")

    def _unwrapped(self, part: Any) -> tuple[nn.Module, nn.Module]:
        if type(part) is not TensorDictModule:
            raise TypeError(
                f"a {type(part).__name__} cannot be stacked, expected modules or "
                "TensorDictModules of them; put the stack of its networks into one."
            )
        self._keys[tuple(part.in_keys), tuple(part.out_keys)] = None
        return part.module, part.module

    def _add_agent(self, part: ModuleStack, agent: int) -> None:
        if id(part) not in self._copies:
            self._copies[id(part)] = part.copies()
        member = part.index[agent]
        origin = part.origin(member)
        key = (id(part), member) if origin is None else id(origin)
        self._add_module(key, self._copies[id(part)][member], origin)

    def _add_module(self, key: Any, module: nn.Module, origin: nn.Module | None) -> None:
        if key not in self._known:
            self._known[key] = len(self.modules)
            self.modules.append(module)
            self.origins.append(origin)
        elif not _same_numbers(self.modules[self._known[key]], module):
            raise ValueError(
                f"copies of one {type(module).__name__} have been trained apart since they were "
                "stacked, so they are no longer one member; copy.deepcopy one of the parts."
            )
        self.index.append(self._known[key])


def _same_numbers(a: nn.Module, b: nn.Module) -> bool:
    if a is b:
        return True
    pairs = zip(named_tensors(a), named_tensors(b))
    return all(name == other and torch.equal(x, y) for (name, x), (other, y) in pairs)
