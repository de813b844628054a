"""The distinct members of modules and stacks that are put side by side."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from tensordict.nn import TensorDictModule, TensorDictModuleBase
from torch import nn

from torchrl_marl.modules.stacks.storage import named_tensors

__all__ = ["DEFAULT_KEYS", "Members", "StackPart"]

DEFAULT_KEYS = (("observation",), ("action",))


class StackPart(nn.Module):
    """Agents of a module stack: the stack itself, or a window on some of them.

    ``torch.cat`` and ``torch.stack`` of such parts make a new stack.
    """

    stack: Any
    """The :class:`ModuleStack` that holds the members."""
    agents: tuple[int, ...]
    """Which of its agents."""
    event_dims: int
    """Feature dims of an input."""
    single = False
    """Whether it is one agent without an agent dimension."""

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


class Members:
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
        if isinstance(part, StackPart):
            self._keys[part.stack.keys] = None
            for agent in part.agents:
                self._add_agent(part.stack, agent)
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

    def _add_agent(self, part: Any, agent: int) -> None:
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
