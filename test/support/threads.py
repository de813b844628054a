"""Ranks as threads of this process, to test sums over ranks without processes."""

from concurrent.futures import ThreadPoolExecutor
from threading import Barrier

import torch

from torchrl_marl.runtime.ranks import Ranks


class ThreadRanks(Ranks):
    """The rank of one of several threads in :func:`by_threads`."""

    def __init__(self, size, rank, given, barrier):
        super().__init__(size, rank)
        self.given, self.barrier = given, barrier

    def sum_all(self, tensors):
        self.given[self.rank] = list(tensors)
        self.barrier.wait(10)
        sums = [torch.stack(list(own)).sum(0) for own in zip(*self.given)]
        self.barrier.wait(10)
        return sums


def by_threads(work, *parts):
    """Results of ``work(part)`` for each part, on ranks that share their sums."""
    given, barrier = [None] * len(parts), Barrier(len(parts))

    def run(rank):
        with ThreadRanks(len(parts), rank, given, barrier).active():
            return work(parts[rank])

    with ThreadPoolExecutor(len(parts)) as pool:
        return list(pool.map(run, range(len(parts))))
