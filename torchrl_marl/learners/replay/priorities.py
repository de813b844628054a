"""Prioritized replay: rows with large errors are sampled more often and weighted less.

Shapes: B rows of a minibatch.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from torchrl_marl.functional import fit_mask
from torchrl_marl.functional.sum_tree import SumTree

__all__ = ["Priorities", "Priority"]


@dataclass(frozen=True)
class Priority:
    """Exponents of prioritized replay.

    Args:
        alpha (float): priority exponent; 0 samples uniformly.
        beta (float): importance-sampling exponent; 1 corrects the sampling bias in full.
        eps (float): number added to every error, so that each row can be sampled.

    Raises:
        ValueError: a number is negative or not finite.

    Reference: Schaul et al., 2016, https://arxiv.org/abs/1511.05952.

    Examples:
        >>> from torchrl_marl.learners import TeamReplay
        >>> replay = TeamReplay(1000, 8, [("agents", "action")], Priority(alpha=0.7))
        >>> replay.priority.beta
        0.4
    """

    alpha: float = 0.6
    beta: float = 0.4
    eps: float = 1e-6

    def __post_init__(self) -> None:
        for name in ("alpha", "beta", "eps"):
            value = getattr(self, name)
            if not 0 <= value < math.inf:
                raise ValueError(f"priority: {name} is {value}, expected 0 or more, and finite.")


class Priorities:
    r"""Priorities of the rows of a replay buffer, :math:`(|\delta| + \epsilon)^\alpha`.

    Args:
        n_rows (int): number of rows of the replay buffer.
        priority (Priority): exponents.
        device (torch.device, optional): device of the replay buffer.

    Attributes:
        highest (Tensor): the highest priority so far; new rows get it.
        beta (Tensor): the exponent beta, a scalar that graphs read; change it in place.
    """

    def __init__(
        self, n_rows: int, priority: Priority, device: torch.device | str | None = None
    ) -> None:
        self.priority = priority
        self.tree = SumTree(n_rows, device=device)
        self.highest = torch.ones((), dtype=torch.float64, device=device)
        self.beta = torch.full((), priority.beta, dtype=torch.float64, device=device)

    @property
    def tensors(self) -> list[Tensor]:
        """Tensors that a graph reads or writes."""
        return [*self.tree.tensors, self.highest, self.beta]

    def add(self, first: int, n_rows: int) -> None:
        """Gives consecutive new rows the highest priority so far, so each row is soon sampled."""
        self.tree.fill(first, self.highest.expand(n_rows))

    def sample(self, uniform: Tensor) -> tuple[Tensor, Tensor]:
        """Returns rows, and their importance weights relative to the largest weight.

        Shapes:
            - uniform: ``[B]``, in [0, 1); returns: ``[B]`` each
        """
        index = self.tree.sample(uniform)
        priority = self.tree[index]
        return index, (priority / priority.amin()).pow(-self.beta).float()

    def update(self, index: Tensor, error: Tensor, mask: Tensor | None = None) -> None:
        """Sets the priority of each row from its largest unmasked error.

        A row whose error is NaN or infinite gets the highest priority so far.

        Shapes:
            - index: ``[B]``; error: ``[B, ...]``
            - mask: the error's shape, with or without its trailing dims
        """
        error = error.detach().abs()
        if mask is not None:
            error = torch.where(fit_mask(mask, error), error, 0.0)
        worst = error.reshape(len(index), -1).amax(-1).double()
        value = (worst + self.priority.eps).pow(self.priority.alpha)
        value = torch.where(worst.isfinite(), value, self.highest)  # one NaN would spoil all sums
        self.highest.copy_(torch.maximum(self.highest, value.amax()))
        self.tree.set(index, value)

    def state_dict(self, n_rows: int) -> dict[str, Any]:
        """Returns the priorities of the first rows."""
        values = self.tree.values[:n_rows].clone()
        return {"values": values, "highest": self.highest.clone(), "beta": self.beta.clone()}

    def load_state_dict(self, state: Mapping[str, Any] | None) -> None:
        """Restores priorities in place; rows without a saved priority are never sampled."""
        values = torch.zeros_like(self.tree.values)
        if state is None:
            self.highest.fill_(1.0)
            self.beta.fill_(self.priority.beta)
        else:
            values[: len(state["values"])] = state["values"].to(values.device)
            self.highest.copy_(state["highest"])
            self.beta.copy_(state["beta"])
        self.tree.fill(0, values)
