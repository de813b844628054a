"""Input and output of a world's copies: numpy rows of one block that processes share."""

from __future__ import annotations

import math
import mmap
import os
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

__all__ = ["RowLayout", "Rows", "open_block", "row_of"]

Rows = dict[str, np.ndarray]
"""Field -> array: of all copies, or of one."""

ALIGNMENT = 64  # bytes: a cache line, and the alignment of torch's vector instructions


@dataclass(frozen=True)
class RowLayout:
    """Layout of the arrays that a world's copies read and write; one row of each per copy.

    Args:
        fields (dict): name -> (shape of one copy, name of the numpy dtype).

    Examples:
        >>> layout = RowLayout({"action": ((2,), "float32"), "done": ((), "bool")})
        >>> rows = layout.views(bytearray(layout.n_bytes(3)), 3)
        >>> rows["action"].shape, rows["done"].shape
        ((3, 2), (3,))
    """

    fields: dict[str, tuple[tuple[int, ...], str]]

    def n_bytes(self, n_copies: int) -> int:
        """Returns the bytes of a block for a number of copies."""
        end = max((end for *_, end in self._places(n_copies)), default=0)
        return -(-end // ALIGNMENT) * ALIGNMENT

    def views(self, buffer: mmap.mmap | bytearray | memoryview, n_copies: int) -> Rows:
        """Returns the arrays of a buffer: field -> ``[n_copies, *shape]``."""
        return {
            name: np.ndarray((n_copies, *shape), dtype, buffer, start)
            for name, shape, dtype, start, _ in self._places(n_copies)
        }

    def _places(self, n_copies: int) -> Iterator[tuple[str, tuple[int, ...], str, int, int]]:
        end = 0
        for name, (shape, dtype) in self.fields.items():
            start = -(-end // ALIGNMENT) * ALIGNMENT
            end = start + n_copies * math.prod(shape) * np.dtype(dtype).itemsize
            yield name, shape, dtype, start, end


def row_of(rows: Rows, number: int) -> Rows:
    """Returns the views of one copy, scalars included."""
    return {name: array[number, ...] for name, array in rows.items()}


def open_block(n_bytes: int) -> int:
    """Opens new memory, all zero, without a name: it is freed with its last process."""
    if hasattr(os, "memfd_create"):
        block = os.memfd_create("torchrl_marl")
    else:
        with tempfile.TemporaryFile() as file:
            block = os.dup(file.fileno())
    os.truncate(block, max(n_bytes, 1))
    return block
