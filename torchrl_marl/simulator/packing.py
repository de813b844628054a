"""A simulator's state as a few matrices: a row per number, a column per env.

Shapes: E envs, K numbers of an env.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from torchrl_marl.errors import CaptureError
from torchrl_marl.simulator.state import (
    Path,
    SimulatorState,
    child,
    path_name,
    set_child,
    walk_simulator,
)

__all__ = ["Packing", "put_back"]


@dataclass(frozen=True)
class _Slot:
    """Tensors of a simulator that are one object, and the place of their numbers."""

    paths: tuple[Path, ...]
    shape: torch.Size  # without the envs
    dtype: torch.dtype


class Packing:
    """Places of a simulator's tensors in matrices ``[K, E]``, one for each dtype.

    Envs lie side by side in memory: what is done to all of them is one sweep, and new starts
    for some are one ``torch.where`` a matrix. Tensors that all envs share follow as they are.

    Args:
        simulator: after a reset and a step.
        state (SimulatorState): of this kind of simulator.
        shared (iterable of Path): tensors shared by all envs that a step writes.
        apart (iterable of Path): slots that hold the tensor of another slot now, and may not
            later.
        written (iterable of Path): all that a step writes.

    Shapes:
        - a state: a list of ``[K, E]`` a dtype, and of the shared tensors
    """

    def __init__(
        self,
        simulator: Any,
        state: SimulatorState,
        shared: Iterable[Path] = (),
        apart: Iterable[Path] = (),
        written: Iterable[Path] = (),
    ) -> None:
        self.exclude = state.exclude
        self.batched = frozenset(state.batched)
        self.written = frozenset(written)
        self.apart = frozenset(apart)
        walk = walk_simulator(simulator, state.exclude)
        self.shared = tuple(_group(walk, shared, frozenset()))
        slots = []
        for paths in _group(walk, state.batched, self.apart):
            x = walk.tensors[paths[0]]
            slots.append(_Slot(paths, x.shape[1:], x.dtype))
        if not slots:
            raise CaptureError("the simulator has no tensor with the envs in the first dim")
        self.device = walk.tensors[slots[0].paths[0]].device
        self.dtypes = sorted({slot.dtype for slot in slots}, key=str)
        self._slots = [[s for s in slots if s.dtype == dtype] for dtype in self.dtypes]
        self._sizes = [[s.shape.numel() for s in slots] for slots in self._slots]

    @property
    def paths(self) -> frozenset[Path]:
        """Returns the path of every slot."""
        own = {path for slots in self._slots for slot in slots for path in slot.paths}
        return frozenset(own.union(*self.shared))

    @property
    def n_numbers(self) -> int:
        """Number K of numbers of an env, over all matrices."""
        return sum(map(sum, self._sizes))

    def read(self, simulator: Any) -> list[Tensor]:
        """Returns the state in new tensors.

        Raises:
            CaptureError: a tensor is missing, or of another shape than before.
        """
        find = _Finder(simulator)
        state = []
        for slots in self._slots:
            rows = [_rows(slot, find.get(slot.paths[0])) for slot in slots]
            # Compiled, a ``cat`` of one slot would keep its layout; graphs want one layout.
            own = rows[0].clone(memory_format=torch.contiguous_format)
            state.append(torch.cat(rows) if len(rows) > 1 else own)
        return state + [find.get(paths[0]).clone().contiguous() for paths in self.shared]

    def name(self, i: int, x: Tensor, y: Tensor) -> str:
        """Returns the first slot in which two matrices of a state differ."""
        if i >= len(self._slots):
            return path_name(self.shared[i - len(self._slots)][0])
        row = int((x != y).any(1).nonzero()[0])
        ends = torch.tensor(self._sizes[i]).cumsum(0)
        return path_name(self._slots[i][int((ends <= row).sum())].paths[0])

    def write(self, simulator: Any, state: Sequence[Tensor]) -> None:
        """Writes copies of a state into the simulator's slots."""
        find = _Finder(simulator)
        for slots, sizes, matrix in zip(self._slots, self._sizes, state):
            for slot, rows in zip(slots, matrix.split(sizes)):
                # A simulator may ask for a view, so the numbers of an env lie together.
                x = rows.view(*slot.shape, matrix.shape[-1]).movedim(-1, 0)
                find.set(slot.paths, x.clone(memory_format=torch.contiguous_format))
        for paths, x in zip(self.shared, state[len(self._slots) :]):
            find.set(paths, x.clone())

    def rows_of(self, written: frozenset[Path], device: torch.device) -> list[Tensor]:
        """Returns each matrix's rows that belong to slots with a path among ``written``.

        Shapes:
            - returns: ``[K, 1]`` bool a matrix
        """
        rows = []
        for slots, sizes in zip(self._slots, self._sizes):
            flags = [not written.isdisjoint(slot.paths) for slot in slots]
            rows.append(torch.tensor(flags).repeat_interleave(torch.tensor(sizes)))
        return [x.unsqueeze(-1).to(device) for x in rows]

    def __len__(self) -> int:
        """Returns the number of matrices, without the shared tensors."""
        return len(self._slots)


class _Finder:
    """Tensors of a simulator by path; each holder is looked up once."""

    def __init__(self, simulator: Any) -> None:
        self._holders: dict[Path, Any] = {(): simulator}

    def _holder(self, path: Path) -> Any:
        if path not in self._holders:
            self._holders[path] = child(self._holder(path[:-1]), path[-1])
        return self._holders[path]

    def get(self, path: Path) -> Tensor:
        try:
            value = child(self._holder(path[:-1]), path[-1])
        except LookupError:
            value = None
        if not isinstance(value, Tensor):
            raise CaptureError(f"the simulator has no tensor {path_name(path)} any more")
        return value

    def set(self, paths: Iterable[Path], value: Tensor) -> None:
        for path in paths:
            set_child(self._holder(path[:-1]), path[-1], value)


def put_back(simulator: Any, tensors: dict[Path, Tensor]) -> None:
    """Puts the tensors themselves, not copies, into a simulator's slots."""
    find = _Finder(simulator)
    for path, x in tensors.items():
        find.set((path,), x)


def _group(walk, wanted: Iterable[Path], apart: frozenset[Path]) -> list[tuple[Path, ...]]:
    """Groups paths that hold one tensor."""
    groups: dict[Any, list[Path]] = {}
    for path in wanted:
        if path in walk.tensors:
            key = path if path in apart else id(walk.tensors[path])
            groups.setdefault(key, []).append(path)
    return [tuple(paths) for paths in groups.values()]


def _rows(slot: _Slot, x: Tensor) -> Tensor:
    """Returns ``[E, ...]`` as ``[K, E]``."""
    if x.ndim == 0 or x.shape[1:] != slot.shape or x.dtype != slot.dtype:
        raise CaptureError(
            f"{path_name(slot.paths[0])} is {x.dtype} {list(x.shape[1:])} of an env now, "
            f"and was {slot.dtype} {list(slot.shape)}"
        )
    return x.unsqueeze(0) if x.ndim == 1 else x.reshape(x.shape[0], -1).t()
