"""Ranks of a data-parallel run, which train one model on parts of a batch.

Statistics, the counts that losses divide by, and gradients are summed over all ranks.
``current()`` returns the ranks over which statistics are computed: this process alone, except
inside :meth:`Ranks.active`.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Sequence
from contextvars import ContextVar
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from torchrl_marl.errors import RankError

__all__ = ["SINGLE_PROCESS", "Ranks", "SingleProcess", "current"]

# Time limit of a message between ranks.
LIMIT = timedelta(minutes=5)


@torch.library.custom_op("torchrl_marl::sum_over_ranks", mutates_args=())
def sum_over_ranks(x: Tensor) -> Tensor:
    """Sums a tensor over all ranks in one message; the result is bitwise equal on all ranks."""
    total = x.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(total)
    Ranks.messages += 1
    return total


@sum_over_ranks.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


class SingleProcess:
    """The only process of a run; sums over ranks are the identity.

    Attributes:
        size (int): number of ranks.
        rank (int): rank of this process; 0 is the first.
        folder (Path, optional): run folder, once it is known.
    """

    size = 1
    rank = 0
    folder: Path | None = None

    sum_all: Any = staticmethod(list)
    """Sums each tensor over all ranks, in one message; here it returns them unchanged."""

    def row_of_rank(self, x: Tensor) -> Tensor:
        """Returns ``x`` in this rank's row, and zeros elsewhere; the sum over ranks has all rows.

        Shapes:
            - x: any; returns: ``[R, *x.shape]`` with ``R`` ranks
        """
        return x.unsqueeze(0)

    def all_gather(self, value: Any) -> list[Any]:
        """Returns the values of all ranks, in their order."""
        return [value]

    def gather(self, value: Any) -> list[Any] | None:
        """Returns the values of all ranks on the first; None on the others."""
        return [value]

    def broadcast(self, value: Any) -> Any:
        """Returns the value of the first rank."""
        return value

    @contextlib.contextmanager
    def rank_zero_first(self) -> Iterator[bool]:
        """Context that the first rank leaves before the others; yields True on the first."""
        yield True

    @contextlib.contextmanager
    def active(self) -> Iterator[None]:
        """Context in which statistics are computed over these ranks."""
        token = _CURRENT.set(self)
        try:
            yield
        finally:
            _CURRENT.reset(token)


class Ranks(SingleProcess):
    """The ranks of a run that ``torchrun`` has started.

    All ranks must call the same methods in the same order. If a rank is missing for five minutes,
    the other ranks fail.

    Args:
        size (int): number of ranks.
        rank (int): rank of this process.
        store (Store, optional): store for waiting without a time limit.

    Attributes:
        messages (int): number of sums in which this process took part.
    """

    messages = 0
    _rendezvous: tuple[dist.Store, int, int] | None = None
    _n_groups = 0

    def __init__(self, size: int, rank: int, store: dist.Store | None = None) -> None:
        self.size, self.rank, self._store = size, rank, store
        self._n_turns = 0

    @classmethod
    def start(cls, device: torch.device | str = "cpu") -> Ranks:
        """Joins the process group described by the environment variables of ``torchrun``.

        Args:
            device (torch.device): device of this process. A CPU uses gloo, and a GPU uses NCCL.
        """
        if cls._rendezvous is None:
            cls._rendezvous = next(iter(dist.rendezvous("env://", timeout=LIMIT)))
            cls._rendezvous[0].set_timeout(LIMIT)
        store, rank, size = cls._rendezvous
        cls._n_groups += 1
        store = dist.PrefixStore(f"run_{cls._n_groups}", store)
        backend = "gloo"
        if torch.device(device).type == "cuda":
            torch.cuda.set_device(device)
            backend = "cpu:gloo,cuda:nccl"
        own = dist.PrefixStore("group", store)
        dist.init_process_group(backend, store=own, rank=rank, world_size=size, timeout=LIMIT)
        return cls(size, rank, dist.PrefixStore("ranks", store))

    def leave(self, seconds: float = 10.0) -> None:
        """Leaves the group; the first rank waits for the others, which need its store.

        Args:
            seconds (float): time limit of the wait.
        """
        dist.destroy_process_group()
        store, until = self._required_store, time.monotonic() + seconds
        with contextlib.suppress(dist.DistError):  # the first rank has ended
            store.add("left", 1)
            while self.rank == 0 and store.add("left", 0) < self.size and time.monotonic() < until:
                time.sleep(0.02)

    def sum_all(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Sums each tensor over all ranks, in one message."""
        tensors = list(tensors)
        single = all(x.dtype == torch.float32 for x in tensors)
        wide = torch.float32 if single else torch.float64  # exact for counts
        flat = torch.cat([x.detach().reshape(-1).to(wide) for x in tensors])
        parts = sum_over_ranks(flat).split([x.numel() for x in tensors])
        return [part.reshape(x.shape).to(x.dtype) for part, x in zip(parts, tensors)]

    def row_of_rank(self, x: Tensor) -> Tensor:
        """Returns ``x`` in this rank's row and zeros in the others."""
        zeros = torch.zeros_like(x)
        return torch.stack([x if i == self.rank else zeros for i in range(self.size)])

    def all_gather(self, value: Any) -> list[Any]:
        """Returns the values of all ranks, in their order."""
        found: list[Any] = [None] * self.size
        dist.all_gather_object(found, value)
        return found

    def gather(self, value: Any) -> list[Any] | None:
        """Returns the values of all ranks on the first; None on the others."""
        found: list[Any] | None = [None] * self.size if self.rank == 0 else None
        dist.gather_object(value, found)
        return found

    def broadcast(self, value: Any) -> Any:
        """Returns the value of the first rank."""
        found = [value]
        dist.broadcast_object_list(found)
        return found[0]

    @contextlib.contextmanager
    def rank_zero_first(self) -> Iterator[bool]:
        """Context after which the other ranks wait for the first, without a time limit.

        Yields:
            bool: True on the first rank.

        Raises:
            RankError: if another rank has failed.
        """
        self._n_turns += 1
        key, store = f"turn_{self._n_turns}", self._required_store
        yield self.rank == 0
        if self.rank == 0:
            store.set(key, "over")
        while self.rank and not store.check([key]):
            if store.check(["failed"]):
                raise RankError("another rank has failed.")
            time.sleep(0.01)

    def report_failure(self, text: str) -> str:
        """Reports this rank's failure to the others; returns the first reported failure."""
        return self._required_store.compare_set("failed", "", text).decode()

    @property
    def _required_store(self) -> dist.Store:
        assert self._store is not None
        return self._store


SINGLE_PROCESS = SingleProcess()
_CURRENT: ContextVar[SingleProcess] = ContextVar("ranks", default=SINGLE_PROCESS)


current = _CURRENT.get
"""Returns the ranks that statistics are over."""
