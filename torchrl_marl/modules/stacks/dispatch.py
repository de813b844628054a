"""Rows of a batch in blocks, each of one member: every row with the weights of whom it belongs to.

Shapes: M rows, K members, B rows of a block, G blocks.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

__all__ = ["Blocks", "dispatch"]


class Blocks(NamedTuple):
    """Where rows lie in blocks of one member each, from :func:`dispatch`."""

    place: Tensor
    """Where each row lies, ``[M]``."""
    member: Tensor
    """Whose each block is, ``[G]``."""
    size: int
    """Rows B of a block."""

    def gather(self, rows: Tensor) -> Tensor:
        """Puts rows into their blocks, zeros where none is: ``[M, ...]`` to ``[G, B, ...]``."""
        blocks = rows.new_zeros(len(self.member) * self.size, *rows.shape[1:])
        return blocks.index_copy(0, self.place, rows).unflatten(0, (-1, self.size))

    def scatter(self, blocks: Tensor) -> Tensor:
        """Takes rows out of their blocks again: ``[G, B, ...]`` to ``[M, ...]``."""
        return blocks.flatten(0, 1).index_select(0, self.place)


def dispatch(who: Tensor, n_members: int, block: int) -> Blocks:
    """Sorts rows by member, each member's in blocks of their own.

    Shapes do not depend on who has how many rows, and nothing waits for the device, so that a
    graph may hold it: there are ``M // B + K`` blocks, of which the last ones may be empty.

    Args:
        who (Tensor): whose each row is, integers.
        n_members (int): number K of members.
        block (int): rows of a block.

    Shapes:
        - who: ``[M]``

    Examples:
        >>> blocks = dispatch(torch.tensor([1, 0, 1, 1]), n_members=2, block=2)
        >>> blocks.place.tolist(), blocks.member.tolist()
        ([2, 0, 3, 4], [0, 1, 1, 1])
        >>> blocks.gather(torch.tensor([5, 6, 7, 8])).tolist()
        [[6, 0], [5, 7], [8, 0], [0, 0]]
    """
    n_blocks = len(who) // block + n_members
    order = who.argsort(stable=True)
    counts = torch.zeros(n_members, dtype=torch.int64, device=who.device)
    counts = counts.scatter_add(0, who, torch.ones_like(who))
    first = counts.cumsum(0) - counts
    ends = ((counts + block - 1) // block).cumsum(0)
    begins = ends - (counts + block - 1) // block
    sorted_who = who[order]
    rank = torch.arange(len(who), device=who.device) - first[sorted_who]
    place = torch.zeros_like(who).scatter(0, order, begins[sorted_who] * block + rank)
    numbers = torch.arange(n_blocks, device=who.device)
    member = torch.searchsorted(ends, numbers, right=True).clamp_max(n_members - 1)
    return Blocks(place, member, block)
