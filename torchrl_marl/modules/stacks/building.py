"""Building module stacks: ``stack``, ``expand`` and ``cat``."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from torchrl_marl.modules.stacks.members import StackPart
from torchrl_marl.modules.stacks.module_stack import ModuleStack

__all__ = ["cat", "expand", "stack"]


def stack(
    modules: Sequence[nn.Module],
    *,
    pad: bool = False,
    event_dims: int = 1,
    executor: str | None = None,
) -> ModuleStack:
    """Stacks one module for every agent; a module that comes twice is one member of two agents.

    The modules are copied: training one of them afterwards changes nothing in the stack.

    Args:
        modules (sequence of nn.Module): agent by agent.

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
    """Makes a stack of one module for n agents; it is copied once, and its gradient sums over them.

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
    """Joins the agents of all parts, one after the other, in a new stack.

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
    if isinstance(parts, nn.Module) and not isinstance(parts, StackPart):
        raise TypeError(
            f"one {type(parts).__name__} is given, expected a list of modules, one for each agent; "
            "expand(module, n) makes it the module of n agents."
        )
    return ModuleStack.join(parts, pad=pad, event_dims=event_dims, executor=executor)
