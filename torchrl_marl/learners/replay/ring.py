"""The memory of a store: a ring of steps of all envs.

Shapes: S steps that are kept, E envs, T steps of a batch, B rows, L steps of a window.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any, Literal

import torch
from tensordict import TensorDict
from torch import Tensor

from torchrl_marl.errors import ConfigError
from torchrl_marl.memory import refuse_too_large

__all__ = ["Ring"]

Key = tuple[str, ...]


class Ring:
    """The last S steps of E envs, in tensors that are allocated once and written in place.

    The row of env ``e`` in slot ``s`` has the number ``s * E + e``.

    Args:
        n_steps (int): steps S that are kept.
        num_envs (int): number E of envs.
        device (torch.device, optional): where it is kept; by default where the first batch is.
        more_bytes (int): what a row takes elsewhere, counted where memory is too small.
        windows (bool): steps are read in windows, which go on over the ends of episodes.

    Attributes:
        store (TensorDict): ``[S, E]``, time-major; None before the first batch.
        marks (dict): bool ``[S, E]``: ``ends`` of episodes, with ``windows`` also ``cuts``, after
            which the next step does not follow.
        n_filled (int): slots that are filled.
        head (int): the slot that is written next.
    """

    def __init__(
        self,
        n_steps: int,
        num_envs: int,
        device: torch.device | str | None = None,
        more_bytes: int = 0,
        windows: bool = False,
    ) -> None:
        self.windows = windows
        self.n_steps, self.num_envs, self.more_bytes = n_steps, num_envs, more_bytes
        self.device = None if device is None else torch.device(device)
        self.store: TensorDict | None = None
        self.marks: dict[str, Tensor] = {}
        self.n_filled = self.head = 0

    @property
    def capacity(self) -> int:
        """Number of rows, of all envs, that are kept."""
        return self.n_steps * self.num_envs

    @property
    def tensors(self) -> list[Tensor]:
        """All that a graph reads; none before the first batch."""
        if self.store is None:
            return []
        return [*self.store.values(True, True), *self.marks.values(), self._head]

    # ------------------------------------------------------------------------------- writing

    def write(
        self, leaves: Mapping[Key, Tensor], ends: Tensor, cuts: Tensor | None = None
    ) -> list[slice]:
        """Stores steps in place of the oldest; returns the slots that were written, in order.

        Args:
            leaves (mapping): key -> values.
            ends (Tensor): bool, an episode's end; no look-ahead goes beyond this step.
            cuts (Tensor, optional): bool, nor does a window, since the next does not follow.

        Shapes:
            - leaves: ``[E, T, ...]``; ends, cuts: ``[E, T]``

        Raises:
            ValueError: leaves of other shapes or types than before.
            ConfigError: rows that do not fit into memory.
        """
        self._allocate({key: (x.shape[2:], x.dtype) for key, x in leaves.items()}, ends.device)
        written = []
        for slots, steps in self._spans(ends.shape[1]):
            for key, value in leaves.items():
                self.leaf(key)[slots].copy_(value[:, steps].transpose(0, 1))
            for name, mark in self.marks.items():
                given = {"ends": ends, "cuts": cuts}[name]
                mark[slots] = False if given is None else given[:, steps].T
            self._move(slots.stop % self.n_steps, max(self.n_filled, slots.stop))
            written.append(slots)
        return written

    def cut(self) -> None:
        """Lets no look-ahead and no window go beyond the newest steps."""
        for mark in self.marks.values() if self.n_filled else ():
            mark[self.head - 1].fill_(True)

    def _spans(self, n: int) -> Iterator[tuple[slice, slice]]:
        """Gives slots up to the ring's end, and from its start, for the last of n new steps."""
        first, head = max(n - self.n_steps, 0), self.head
        while first < n:
            size = min(n - first, self.n_steps - head)
            yield slice(head, head + size), slice(first, first + size)
            first, head = first + size, 0

    def _move(self, head: int, n_filled: int) -> None:
        self.head, self.n_filled = head, n_filled
        self._head.fill_(head)

    def _allocate(
        self, rows: Mapping[Key, tuple[torch.Size, torch.dtype]], device: torch.device
    ) -> None:
        """Allocates the store, or checks that rows are what it was allocated for."""
        if self.store is not None:
            for key, found in rows.items():
                known = self.leaf(key).shape[2:], self.leaf(key).dtype
                if found != known:
                    raise ValueError(
                        f"TeamReplay: {key!r} has rows of {list(found[0])}, {found[1]}, expected "
                        f"{list(known[0])}, {known[1]}, as in the first batch."
                    )
            return
        self.device = device if self.device is None else self.device
        size = sum(math.prod(shape) * dtype.itemsize for shape, dtype in rows.values())
        size += 1 + self.windows + self.more_bytes
        refuse_too_large(
            size * self.capacity,
            self.device,
            f"a replay of {self.capacity:,} rows of {size:,} B",
            "keep fewer rows",
        )
        shape = (self.n_steps, self.num_envs)
        self.store = TensorDict({}, shape, device=self.device)
        for key, (features, dtype) in rows.items():
            self.store.set(key, torch.zeros(*shape, *features, dtype=dtype, device=self.device))
        for name in ("ends", "cuts") if self.windows else ("ends",):
            self.marks[name] = torch.zeros(shape, dtype=torch.bool, device=self.device)
        self._head = torch.zeros((), dtype=torch.long, device=self.device)

    # ------------------------------------------------------------------------------- reading

    def leaf(self, key: Key) -> Tensor:
        """Returns all rows of a leaf, ``[S, E, ...]``."""
        if self.store is None:
            raise RuntimeError("TeamReplay: nothing is stored yet; call extend(batch) first.")
        return self.store.get(key)

    def read(self, key: Key, index: Tensor) -> Tensor:
        """Returns a leaf of the rows ``index``, ``[*B]``, as ``[*B, ...]``."""
        rows = self.leaf(key).flatten(0, 1).index_select(0, index.flatten())
        return rows if index.ndim == 1 else rows.unflatten(0, index.shape)

    def ahead(
        self, index: Tensor, length: int, marks: Literal["ends", "cuts"] = "ends"
    ) -> tuple[Tensor, Tensor]:
        """Returns the rows from each row on, and after which of them not to look on.

        That is where an episode ends, or only where the next step does not follow (``cuts``), and
        at the newest step.

        Shapes:
            - index: ``[B]``; returns: ``[B, L]`` each

        Raises:
            ConfigError: more steps than are kept.
        """
        if not 1 <= length <= self.n_steps:
            raise ConfigError(
                f"TeamReplay: {length} steps are to be looked at, expected 1 to {self.n_steps}, "
                "as many as are kept of each env; look at fewer or keep more."
            )
        if length == 1:
            alone = index.unsqueeze(1)
            return alone, torch.ones_like(alone, dtype=torch.bool)
        # Without divisions, which a compiled graph would repeat for every number that is read.
        path = index.unsqueeze(1) + torch.arange(length, device=index.device) * self.num_envs
        path = torch.where(path < self.capacity, path, path - self.capacity)
        newest = (self._head - 1) % self.n_steps * self.num_envs  # its first env's row
        is_newest = (path >= newest) & (path < newest + self.num_envs)
        ends = self.marks[marks].flatten().index_select(0, path.flatten()).view(path.shape)
        return path, ends | is_newest

    def starts(self, draws: Tensor) -> Tensor:
        """Returns the rows with these numbers, counted from the oldest step of the first env."""
        oldest = self.head if self.n_filled == self.n_steps else 0
        return (draws + oldest * self.num_envs) % self.capacity

    # --------------------------------------------------------------------------------- state

    def state_dict(self) -> dict[str, Any]:
        """Returns the filled slots; where all are, as the live tensors."""
        shape = [self.n_steps, self.num_envs]
        state = {"shape": shape, "head": self.head, "n_filled": self.n_filled, "leaves": {}}
        if self.store is None:
            return state
        leaves = {key: self.leaf(key) for key in self._keys()}
        leaves |= {(name,): mark for name, mark in self.marks.items()}
        if self.n_filled < self.n_steps:  # a slice would be saved with all of its memory
            leaves = {key: value[: self.n_filled].clone() for key, value in leaves.items()}
        return {**state, "leaves": leaves}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Takes filled slots back, in place.

        Raises:
            ValueError: the state of a ring of another size or with other leaves.
        """
        if state["shape"] != [self.n_steps, self.num_envs]:
            raise ValueError(
                f"TeamReplay: the state is of {state['shape'][0]} steps of {state['shape'][1]} "
                f"envs, expected {self.n_steps} of {self.num_envs}; keep as many as before."
            )
        leaves = dict(state["leaves"])
        if leaves:
            names = [key for key in leaves if key in (("ends",), ("cuts",))]
            marks = {key[0]: leaves.pop(key) for key in names}
            device = marks["ends"].device
            self._allocate({key: (x.shape[2:], x.dtype) for key, x in leaves.items()}, device)
            for key, value in leaves.items():
                self.leaf(key)[: len(value)].copy_(value)
            for name, mark in marks.items():
                self.marks[name][: len(mark)].copy_(mark)
        if self.store is not None:
            self._move(state["head"], state["n_filled"])

    def _keys(self) -> list[Key]:
        assert self.store is not None
        return [(k,) if isinstance(k, str) else k for k in self.store.keys(True, True)]
