"""Who is copied to whom.

Shapes: P members of a population.
"""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["tournament", "truncation"]


def truncation(fitness: Tensor, share: float, generator: torch.Generator | None = None) -> Tensor:
    """Returns whose copy each member becomes: the worst become copies of the best.

    As many of the best as there are replaced are parents, each drawn with the same chance. NaN is
    worse than anything. Of equally fit members the one that comes first counts as the better.

    Args:
        fitness (Tensor): of each member; more is better.
        share (float): of the members that are replaced, at most a half; one at least, if above 0.
        generator (Generator, optional): of the draws.

    Shapes:
        - fitness, returns: ``[P]``; who stays is its own parent

    Raises:
        ValueError: a share that is not between 0 and a half.

    Reference: Jaderberg et al., 2017, https://arxiv.org/abs/1711.09846 (population-based
    training).

    Examples:
        >>> truncation(torch.tensor([3.0, float("nan"), 9.0, 1.0]), 0.25)
        tensor([0, 2, 2, 3])
    """
    if not 0.0 <= share <= 0.5:
        raise ValueError(f"share is {share}, expected 0 to 0.5.")
    n_members = len(fitness)
    count = min(max(int(share * n_members), 1), n_members // 2) if share else 0
    order = _from_the_best(fitness)
    parent = torch.arange(n_members)
    chosen = torch.randint(max(count, 1), (count,), generator=generator)
    parent[order[n_members - count :]] = order[chosen]
    return parent


def tournament(
    fitness: Tensor, size: int, elite: int = 1, generator: torch.Generator | None = None
) -> Tensor:
    """Returns whose copy each member becomes: of a few that are drawn, the best.

    Args:
        fitness (Tensor): of each member; more is better, NaN is worse than anything.
        size (int): how many are drawn for each place, with replacement.
        elite (int): of the best, so many stay as they are.
        generator (Generator, optional): of the draws.

    Shapes:
        - fitness, returns: ``[P]``

    Raises:
        ValueError: a size below 1, or an elite larger than the population.

    Examples:
        >>> tournament(torch.tensor([1.0, 5.0, 3.0]), size=50)
        tensor([1, 1, 1])
    """
    n_members = len(fitness)
    if size < 1 or not 0 <= elite <= n_members:
        raise ValueError(
            f"size is {size} and elite {elite}, expected 1 or more, and 0 to {n_members}."
        )
    order = _from_the_best(fitness)
    rank = torch.empty_like(order)
    rank[order] = torch.arange(n_members)
    drawn = torch.randint(n_members, (n_members, size), generator=generator)
    parent = drawn.gather(1, rank[drawn].argmin(1, keepdim=True)).squeeze(1)
    parent[order[:elite]] = order[:elite]
    return parent


def _from_the_best(fitness: Tensor) -> Tensor:
    return fitness.cpu().nan_to_num(-torch.inf).argsort(descending=True, stable=True)
