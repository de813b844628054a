"""Sampling in proportion to changing values, in time logarithmic in the number of values.

Shapes: C capacity, M indices sampled or written at once.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

__all__ = ["SumTree"]

# One operation, like Adam's step. If it were written out in a graph, the compiler would copy all
# values to change a few of them (1.2 to 1.6 ms instead of 0.15 to 0.5 for a million).
_LIBRARY = torch.library.Library("torchrl_marl", "FRAGMENT")
_LIBRARY.define(
    "sum_tree_set_(Tensor(a!)[] sums, Tensor(b!)[] ends, Tensor index, Tensor value, "
    "Tensor[] before) -> ()"
)


class SumTree:
    """Tree of sums over non-negative values, for sampling in proportion to them.

    A node has several children and stores their running sums, so each level of the tree takes one
    search in one row. Setting values recomputes the sums above them from the children, so rounding
    errors do not accumulate. Nothing waits for the device. Sums have double precision, and the
    random numbers should have it, too. In float32, ``torch.rand`` gives multiples of 2^-24, with
    which some of a million rows with equal values would be drawn 6 % more often than others.

    Args:
        capacity (int): number C of values, all 0 at first.
        width (int): number of children of a node.
        device (torch.device, optional): device of the values.

    Attributes:
        tensors (list of Tensor): all tensors that a graph reads and writes; they are never
            replaced.

    Raises:
        ValueError: a capacity below 1 or a width below 2.

    Reference: Schaul et al., 2016, https://arxiv.org/abs/1511.05952 (appendix B.2.1).

    Reduces to: ``torch.searchsorted(values.cumsum(0), uniform * values.sum(), right=True)``, up to
    the rounding of the sums.

    Examples:
        >>> tree = SumTree(4)
        >>> tree.set(torch.tensor([0, 2]), torch.tensor([1.0, 3.0]))
        >>> tree.sample(torch.tensor([0.0, 0.2, 0.3, 0.9], dtype=torch.float64))
        tensor([0, 0, 2, 2])
        >>> tree.total
        tensor(4., dtype=torch.float64)
    """

    def __init__(
        self, capacity: int, width: int = 16, device: torch.device | str | None = None
    ) -> None:
        if capacity < 1 or width < 2:
            raise ValueError(
                f"SumTree: capacity is {capacity} and width {width}, expected at least 1 and 2."
            )
        self.capacity, self.width = capacity, width
        zeros = functools.partial(torch.zeros, dtype=torch.float64, device=device)
        self._sums: list[Tensor] = []  # sums of all nodes, by level from the values to the root
        self._prefix_sums: list[Tensor] = []  # 0, and the running sums of each node's children
        nodes = capacity
        while not self._sums or nodes > 1:
            nodes = -(-nodes // width)
            self._sums.append(zeros(nodes * width))
            self._prefix_sums.append(zeros(nodes, width + 1))
        self._sums.append(zeros(1))

    @property
    def tensors(self) -> list[Tensor]:
        """All tensors that a graph reads and writes."""
        return [*self._sums, *self._prefix_sums]

    @property
    def total(self) -> Tensor:
        """Sum of all values, a scalar."""
        return self._sums[-1][0]

    @property
    def values(self) -> Tensor:
        """All values, ``[C]``; read-only."""
        return self._sums[0][: self.capacity]

    def __getitem__(self, index: Tensor) -> Tensor:
        return self._sums[0][index]

    def set(self, index: Tensor, value: Tensor) -> None:
        """Sets values; for an index given twice, the larger value counts.

        Args:
            index (Tensor): integers from 0 to C - 1.
            value (Tensor): non-negative values.

        Shapes:
            - index, value: ``[M]``

        Raises:
            ValueError: shapes that differ.
        """
        if index.ndim != 1 or index.shape != value.shape:
            raise ValueError(
                f"SumTree.set: index has shape {tuple(index.shape)} and value "
                f"{tuple(value.shape)}, expected one shape [M]."
            )
        value = value.to(torch.float64)
        torch.ops.torchrl_marl.sum_tree_set_(self._sums, self._prefix_sums, index, value, [])

    def fill(self, first: int, values: Tensor) -> None:
        """Sets consecutive values from the index ``first`` on; cannot be captured in a graph.

        Shapes:
            - values: ``[M]``

        Raises:
            ValueError: values outside the capacity.

        Reduces to: :meth:`set` of these indices, to the bit.
        """
        start, stop = first, first + len(values)
        if not 0 <= start <= stop <= self.capacity:
            raise ValueError(
                f"SumTree.fill: values from {start} to {stop} exceed the capacity {self.capacity}."
            )
        self._sums[0][start:stop].copy_(values)
        for level, prefix, parents in zip(self._sums, self._prefix_sums, self._sums[1:]):
            start, stop = start // self.width, -(-stop // self.width)
            children = level.view(-1, self.width)[start:stop]
            prefix[start:stop, 1:].copy_(_running_sums(children))
            parents[start:stop].copy_(prefix[start:stop, -1])

    def sample(self, uniform: Tensor) -> Tensor:
        """Returns indices sampled in proportion to their values; a value of 0 is never sampled.

        If all values are 0, any index may be returned.

        Args:
            uniform (Tensor): random numbers in [0, 1), with dtype ``torch.float64``.

        Shapes:
            - uniform, returns: ``[M]``

        Raises:
            ValueError: numbers of another dtype or shape.
        """
        if uniform.dtype is not torch.float64 or uniform.ndim != 1:
            raise ValueError(
                f"SumTree.sample: numbers are {uniform.dtype} of shape {tuple(uniform.shape)}, "
                "expected torch.float64 [M]; draw them by torch.rand(M, dtype=torch.float64)."
            )
        remainder = uniform * self._sums[-1]
        node = torch.zeros_like(uniform, dtype=torch.long)
        zero = torch.zeros_like(self._sums[-1])
        sizes = [self.capacity, *map(len, self._prefix_sums)]  # of the level below
        for prefix, size in zip(reversed(self._prefix_sums), reversed(sizes[:-1])):
            row = prefix.index_select(0, node)
            # Rounding may lead past the last child with a positive value.
            remainder = torch.minimum(remainder, torch.nextafter(row[:, -1], zero))
            child = torch.searchsorted(row, remainder.unsqueeze(1), right=True) - 1
            remainder = remainder - row.gather(1, child).squeeze(1)
            # NaN leads to the last node, not out of the tree.
            node = (node * self.width + child.squeeze(1)).clamp_max(size - 1)
        return node


def _set_values_(
    sums: list[Tensor], ends: list[Tensor], index: Tensor, value: Tensor, before: list[Tensor]
) -> None:
    sums[0].index_fill_(0, index, 0.0)
    sums[0].scatter_reduce_(0, index, value, "amax")
    for level, prefix, parents in zip(sums, ends, sums[1:]):
        width = prefix.shape[1] - 1
        index = index // width
        row = _running_sums(level.view(-1, width).index_select(0, index))
        prefix[:, 1:].index_copy_(0, index, row)
        parents.index_copy_(0, index, row[:, -1])


def _running_sums(children: Tensor) -> Tensor:
    sums = children.cumsum(-1)
    if not sums.is_cuda:
        return sums
    # A GPU does not add from left to right, so a child with value 0 could get a positive share.
    return torch.where(children > 0, sums, 0.0).cummax(-1).values


_LIBRARY.impl("sum_tree_set_", _set_values_, "CompositeExplicitAutograd")
_LIBRARY.impl("sum_tree_set_", lambda *arguments: None, "Meta")
