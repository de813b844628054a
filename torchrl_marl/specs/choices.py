"""Masks of several choices: the options of all choices, one choice after the other.

Shapes: K choices, L options of all choices together.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

__all__ = ["choosable_options", "draw_choices"]


def choosable_options(legal: Tensor, branches: Sequence[int]) -> Tensor:
    """Returns the options that may be chosen: the legal ones, or all of a choice without any.

    Args:
        legal (Tensor): True for legal options.
        branches (sequence of int): number of options of each choice.

    Shapes:
        - legal, returns: bool, ``[*, L]``

    Examples:
        >>> choosable_options(torch.tensor([False, True, False, False]), (2, 2))
        tensor([False,  True,  True,  True])
    """
    parts = legal.split(list(branches), -1)
    return torch.cat([part | ~part.any(-1, keepdim=True) for part in parts], -1)


def draw_choices(legal: Tensor, branches: Sequence[int]) -> Tensor:
    """Draws one of the choosable options of each choice, with equal probability.

    Args:
        legal (Tensor): True for legal options.
        branches (sequence of int): number of options of each choice.

    Shapes:
        - legal: bool, ``[*, L]``; returns: int64, ``[*, K]``

    Examples:
        >>> draw_choices(torch.tensor([[False, True, False, False, True]]), (2, 3))
        tensor([[1, 2]])
    """
    weights = choosable_options(legal, branches).float().flatten(0, -2)
    drawn = [torch.multinomial(part, 1) for part in weights.split(list(branches), -1)]
    return torch.cat(drawn, -1).view(*legal.shape[:-1], len(branches))
