"""The processes that learn as one, each from its part of a batch.

What is summed over all is everybody's: statistics, the counts that losses divide by, gradients.
``current()`` says whom statistics reach over: nobody else, except inside :meth:`Alone.active`.
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

# A rank that waits longer for a message than this has lost the others.
LIMIT = timedelta(minutes=5)


@torch.library.custom_op("torchrl_marl::sum_over_ranks", mutates_args=())
def sum_over_ranks(x: Tensor) -> Tensor:
    """Returns the sum of the ranks' tensors, to the bit the same on all; one message."""
    total = x.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(total)
    Ranks.messages += 1
    return total


@sum_over_ranks.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


class SingleProcess:
    """The one process of a run that is not split: what is summed stays as it is.

    Attributes:
        size (int): number of ranks.
        rank (int): one's own, 0 for the first.
        folder (Path, optional): of the run, once it is known.
    """

    size = 1
    rank = 0
    folder: Path | None = None

    sum_all: Any = staticmethod(list)
    """Returns the sums over all ranks of each tensor, in one message; alone, they are its own."""

    def slots(self, x: Tensor) -> Tensor:
        """Returns what becomes everybody's values, side by side, where it is summed.

        Shapes:
            - x: any; returns: ``[R, *x.shape]`` with ``R`` ranks
        """
        return x.unsqueeze(0)

    def all_gather(self, value: Any) -> list[Any]:
        """Returns what each rank has, by rank; such as numbers and texts."""
        return [value]

    def gather(self, value: Any) -> list[Any] | None:
        """Returns what each rank has, on the first; None on the others."""
        return [value]

    def send(self, value: Any) -> Any:
        """Returns what the first rank has."""
        return value

    @contextlib.contextmanager
    def rank_zero_first(self) -> Iterator[bool]:
        """Gives the first rank time of its own; yields whether this is the first."""
        yield True

    @contextlib.contextmanager
    def active(self) -> Iterator[None]:
        """Makes statistics reach over these ranks within the context."""
        token = _CURRENT.set(self)
        try:
            yield
        finally:
            _CURRENT.reset(token)


class Ranks(SingleProcess):
    """The processes that ``torchrun`` has started, which learn as one.

    All of them must ask for the same things in the same order; whoever is missing for five minutes
    fails the others.

    Args:
        size (int): how many.
        rank (int): one's own.
        store (Store, optional): for waiting without a time limit.

    Attributes:
        messages (int): how many sums this process has taken part in.
    """

    messages = 0
    _joined: tuple[dist.Store, int, int] | None = None
    _groups = 0

    def __init__(self, size: int, rank: int, store: dist.Store | None = None) -> None:
        self.size, self.rank, self._store = size, rank, store
        self._turns = 0

    @classmethod
    def start(cls, device: torch.device | str = "cpu") -> Ranks:
        """Joins the group that the variables of ``torchrun`` describe.

        Args:
            device (torch.device): where this process learns: gloo serves a CPU, NCCL a GPU.
        """
        if cls._joined is None:
            cls._joined = next(iter(dist.rendezvous("env://", timeout=LIMIT)))
            cls._joined[0].set_timeout(LIMIT)
        store, rank, size = cls._joined
        cls._groups += 1
        store = dist.PrefixStore(f"run_{cls._groups}", store)
        backend = "gloo"
        if torch.device(device).type == "cuda":
            torch.cuda.set_device(device)
            backend = "cpu:gloo,cuda:nccl"
        own = dist.PrefixStore("group", store)
        dist.init_process_group(backend, store=own, rank=rank, world_size=size, timeout=LIMIT)
        return cls(size, rank, dist.PrefixStore("ranks", store))

    def leave(self, seconds: float = 10.0) -> None:
        """Leaves the group; the first waits for the others, which may ask it why they end.

        Args:
            seconds (float): that it waits at most.
        """
        dist.destroy_process_group()
        store, until = self._held_store, time.monotonic() + seconds
        with contextlib.suppress(dist.DistError):  # whose process has ended
            store.add("left", 1)
            while self.rank == 0 and store.add("left", 0) < self.size and time.monotonic() < until:
                time.sleep(0.02)

    def sum_all(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Returns the sums over all ranks of each tensor, in one message."""
        tensors = list(tensors)
        single = all(x.dtype == torch.float32 for x in tensors)
        wide = torch.float32 if single else torch.float64  # which counts exactly
        flat = torch.cat([x.detach().reshape(-1).to(wide) for x in tensors])
        parts = sum_over_ranks(flat).split([x.numel() for x in tensors])
        return [part.reshape(x.shape).to(x.dtype) for part, x in zip(parts, tensors)]

    def slots(self, x: Tensor) -> Tensor:
        """Returns what becomes everybody's values, side by side, where it is summed."""
        nobody = torch.zeros_like(x)
        return torch.stack([x if i == self.rank else nobody for i in range(self.size)])

    def all_gather(self, value: Any) -> list[Any]:
        """Returns what each rank has, by rank; such as numbers and texts."""
        found: list[Any] = [None] * self.size
        dist.all_gather_object(found, value)
        return found

    def gather(self, value: Any) -> list[Any] | None:
        """Returns what each rank has, on the first; None on the others."""
        found: list[Any] | None = [None] * self.size if self.rank == 0 else None
        dist.gather_object(value, found)
        return found

    def send(self, value: Any) -> Any:
        """Returns what the first rank has."""
        found = [value]
        dist.broadcast_object_list(found)
        return found[0]

    @contextlib.contextmanager
    def rank_zero_first(self) -> Iterator[bool]:
        """Gives the first rank time of its own, however long; the others wait at the end.

        Yields:
            bool: whether this is the first.

        Raises:
            RankError: the first has failed.
        """
        self._turns += 1
        key, store = f"turn_{self._turns}", self._held_store
        yield self.rank == 0
        if self.rank == 0:
            store.set(key, "over")
        while self.rank and not store.check([key]):
            if store.check(["failed"]):
                raise RankError("another rank has failed.")
            time.sleep(0.01)

    def tell(self, text: str) -> str:
        """Tells the others why this rank ends; returns what the first to do so has told."""
        return self._held_store.compare_set("failed", "", text).decode()

    @property
    def _held_store(self) -> dist.Store:
        assert self._store is not None
        return self._store


SINGLE_PROCESS = SingleProcess()
_CURRENT: ContextVar[SingleProcess] = ContextVar("ranks", default=SINGLE_PROCESS)


current = _CURRENT.get
"""Returns the ranks over which statistics reach now."""
