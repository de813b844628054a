"""Ranks as threads of this process, to test sums over ranks without processes."""

from concurrent.futures import ThreadPoolExecutor
from threading import Barrier

import torch

from torchrl_marl.runtime.ranks import Ranks


class ThreadRanks(Ranks):
    """The rank of one of several threads in :func:`run_on_thread_ranks`."""

    def __init__(self, size, rank, tensors_of_ranks, barrier):
        super().__init__(size, rank)
        self.tensors_of_ranks, self.barrier = tensors_of_ranks, barrier

    def sum_all(self, tensors):
        self.tensors_of_ranks[self.rank] = list(tensors)
        self.barrier.wait(10)
        sums = [
            torch.stack(list(same_tensors)).sum(0) for same_tensors in zip(*self.tensors_of_ranks)
        ]
        self.barrier.wait(10)
        return sums


def run_on_thread_ranks(work, *parts):
    """Results of ``work(part)`` for each part, on ranks that share their sums."""
    tensors_of_ranks, barrier = [None] * len(parts), Barrier(len(parts))

    def run(rank):
        with ThreadRanks(len(parts), rank, tensors_of_ranks, barrier).active():
            return work(parts[rank])

    with ThreadPoolExecutor(len(parts)) as pool:
        return list(pool.map(run, range(len(parts))))
