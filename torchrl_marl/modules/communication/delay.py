"""The delay of a channel: what agents have heard and do not know yet.

Shapes: T steps, R any dims of rows whose last is N agents, V numbers of what is heard.
"""

from __future__ import annotations

import torch
from torch import Tensor

from torchrl_marl.modules.memory.cells import Layers, Memory

__all__ = ["OneStep", "make_delay"]


class OneStep(Memory):
    """Gives in each step what came in the step before, and 0 in an episode's first.

    A memory without parameters: who does not act neither hears nor forgets.

    Args:
        size (int): numbers V.

    Shapes:
        - as :class:`~torchrl_marl.modules.memory.cells.Memory`; ``F = H = S = V``

    Examples:
        >>> heard = torch.tensor([1.0, 2.0, 3.0]).view(3, 1, 1)
        >>> OneStep(1)(heard, torch.zeros(1, 1), None, None)[0].flatten()
        tensor([0., 1., 2.])
        >>> begins = torch.tensor([False, False, True]).view(3, 1, 1)
        >>> OneStep(1)(heard, torch.zeros(1, 1), begins, None)[0].flatten()
        tensor([0., 1., 0.])
    """

    def __init__(self, size: int) -> None:
        super().__init__()
        self.state_size = self.out_features = size

    def forward(
        self, x: Tensor, state: Tensor, init: Tensor | None, mask: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Runs over the steps."""
        x = x.to(state.dtype)
        states = x if mask is None else _latest(x, state, init, mask)
        before = torch.cat([state.unsqueeze(0), states[:-1]])
        return (before if init is None else torch.where(init, 0.0, before)), states


def _latest(x: Tensor, state: Tensor, init: Tensor | None, mask: Tensor) -> Tensor:
    """Returns what came last in a step in which the agent acted, of this episode."""
    if len(x) == 1:
        kept = state if init is None else torch.where(init[0], 0.0, state)
        return torch.where(mask, x, kept.unsqueeze(0))
    rows = torch.cat([state.unsqueeze(0), x])
    steps = torch.arange(1, len(rows), device=x.device).view(-1, *[1] * (x.ndim - 1))
    latest = torch.where(mask, steps, 0).cummax(0).values
    found = rows.gather(0, latest.expand_as(x))
    if init is None:
        return found
    began = torch.where(init, steps, 0).cummax(0).values
    return torch.where(latest < began, 0.0, found)


def make_delay(size: int, steps: int) -> Memory | None:
    """Builds a delay of so many steps; None where there are none.

    Args:
        size (int): numbers V.
        steps (int): after which something heard is known.

    Examples:
        >>> heard = torch.tensor([1.0, 2.0, 3.0]).view(3, 1, 1)
        >>> make_delay(1, steps=2)(heard, torch.zeros(1, 2), None, None)[0].flatten()
        tensor([0., 0., 1.])
    """
    if steps < 2:
        return OneStep(size) if steps else None
    return Layers([OneStep(size) for _ in range(steps)])
