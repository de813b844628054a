"""How the settings of a copy differ from its parent's.

Shapes: P members of a population.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

__all__ = ["Bounds", "perturb"]


class Bounds(NamedTuple):
    """The range of a setting."""

    low: float
    high: float
    log: bool = False
    """Drawn anew by its logarithm."""


def perturb(
    values: Tensor,
    parent: Tensor,
    bounds: Bounds,
    *,
    factors: Sequence[float] = (0.8, 1.25),
    resample: float = 0.25,
    generator: torch.Generator | None = None,
) -> Tensor:
    """Returns the setting of each member after a selection.

    Who stays keeps its own. A copy takes its parent's times one of the factors, or with a chance
    one drawn anew from the range; within the range either way.

    Args:
        values (Tensor): before.
        parent (Tensor): whose copy each member is, from
            :func:`~torchrl_marl.evolution.truncation`.
        bounds (Bounds): the range.
        factors (sequence of float): each is as likely.
        resample (float): chance that a copy's is drawn anew.
        generator (Generator, optional): of the draws.

    Shapes:
        - values, parent, returns: ``[P]``

    Reference: Jaderberg et al., 2017, https://arxiv.org/abs/1711.09846 (perturb, resample).

    Examples:
        >>> values, parent = torch.tensor([1.0, 2.0, 4.0]), torch.tensor([0, 2, 2])
        >>> perturb(values, parent, Bounds(0.5, 6.0), factors=[2.0], resample=0.0)
        tensor([1., 6., 4.])
    """
    n_members = len(values)
    # Drawn for all, so that what a member gets does not depend on how many are replaced.
    factor = torch.tensor(factors)[torch.randint(len(factors), (n_members,), generator=generator)]
    share = torch.rand(n_members, generator=generator, dtype=torch.float64)
    anew = torch.rand(n_members, generator=generator) < resample
    low, high = (torch.tensor(x, dtype=torch.float64) for x in bounds[:2])
    drawn = low * (high / low) ** share if bounds.log else low + share * (high - low)
    copied = parent != torch.arange(n_members)
    own = values.cpu().double()
    child = torch.where(anew, drawn, own[parent] * factor).clamp(low, high)
    return torch.where(copied, child, own).to(values)
