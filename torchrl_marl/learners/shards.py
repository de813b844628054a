"""Minibatches with an equal part of every shard; counts and gradients summed over ranks.

Shapes: S shards of the run, F frames of this process, M frames of a minibatch of this process,
G groups of a loss.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from tensordict import TensorDictBase
from torch import Tensor

from torchrl_marl.errors import ConfigError
from torchrl_marl.runtime.ranks import SingleProcess

__all__ = ["ShardOrder", "global_counts", "reduce_gradients"]


class ShardOrder:
    """Draws minibatches with an equal part of every shard of a run.

    The order of a shard's frames depends on the seed, the shard's index and the number of earlier
    batches. A minibatch is therefore the same, whether the shards are in one process or in several.

    Args:
        own (range): shards whose frames this process has, in this order.
        total (int): number S of shards of the run.
        seed (int): random seed of all orders.

    Attributes:
        drawn (int): number of batches so far, the only state that resuming needs.

    Examples:
        >>> one, half = ShardOrder(range(2), 2, seed=0), ShardOrder(range(1), 2, seed=0)
        >>> [[first, _]], [[own, _]] = (
        ...     order.epochs(n, 4, n_epochs=1) for order, n in ((one, 8), (half, 4))
        ... )
        >>> len(first), torch.equal(first[:2], own)
        (4, True)
    """

    def __init__(self, own: range, total: int, seed: int) -> None:
        self.own, self.total, self.seed, self.drawn = own, total, seed, 0

    def epochs(
        self,
        n_frames: int,
        minibatch_size: int,
        *,
        n_epochs: int,
        device: torch.device | None = None,
    ) -> Iterator[Sequence[Tensor]]:
        """Draws the minibatches of each epoch when the epoch begins.

        Args:
            n_frames (int): number F of frames of this process.
            minibatch_size (int): frames of a minibatch of the whole run.
            n_epochs (int): number of epochs.
            device (torch.device, optional): device of the indices.

        Raises:
            ConfigError: minibatches or batches that cannot be split equally among shards.
        """
        for name, size, parts in (
            ("a minibatch", minibatch_size, self.total),
            ("a batch", n_frames, len(self.own)),
        ):
            if size % parts:
                raise ConfigError(
                    f"{name} has {size} frames or windows, expected a multiple of the number of "
                    f"its shards, {parts}; use another distributed.collectors."
                )
        of_shard, piece = n_frames // len(self.own), minibatch_size // self.total
        batch = self.drawn
        self.drawn += 1
        for epoch in range(n_epochs):
            orders = [self._order(of_shard, device, shard, batch, epoch) for shard in self.own]
            rows = torch.stack(orders)
            rows += of_shard * torch.arange(len(orders), device=rows.device).unsqueeze(-1)
            yield [part.flatten() for part in rows.split(piece, -1)]

    def _order(self, n: int, device: torch.device | None, *of: int) -> Tensor:
        seed = np.random.SeedSequence([self.seed, *of]).generate_state(1, np.uint64)
        generator = torch.Generator(device or "cpu").manual_seed(int(seed[0]) >> 1)
        return torch.randperm(n, generator=generator, device=device)


@contextlib.contextmanager
def global_counts(
    ranks: SingleProcess, objectives: Mapping[str, Any], minibatch: TensorDictBase
) -> Iterator[dict[str, Tensor]]:
    """Makes losses divide by the number of steps of all ranks; gradients can then be summed.

    The counts are summed by one all-reduce.

    Args:
        ranks (SingleProcess): the ranks.
        objectives (mapping): name -> a loss with ``local_count`` and ``count``.
        minibatch (TensorDictBase): this rank's part, ``[M]``.

    Yields:
        dict: name -> the number of steps, a scalar or ``[G]``.
    """
    with torch.no_grad():
        found = ranks.sum_all([loss.local_count(minibatch) for loss in objectives.values()])
    counts = {name: count.clamp_min(1) for name, count in zip(objectives, found)}
    for name, loss in objectives.items():
        loss.count = counts[name]
    try:
        yield counts
    finally:
        for loss in objectives.values():
            loss.count = None


@torch.no_grad()
def reduce_gradients(
    ranks: SingleProcess,
    objectives: Mapping[str, Any],
    gradients: Sequence[Tensor],
    metrics: Mapping[tuple[str, str], Tensor],
    counts: Mapping[str, Tensor],
) -> tuple[list[Tensor], dict[tuple[str, str], Tensor]]:
    """Returns the gradients and metrics of all ranks together, by one all-reduce.

    Args:
        ranks (SingleProcess): the ranks.
        objectives (mapping): name -> a loss. Its ``combine`` maps the name of each metric that is
            not a mean to a function.
        gradients (sequence of Tensor): this rank's gradients, within :func:`global_counts`.
        metrics (mapping): (name, metric) -> a scalar or ``[G]``; ``[*, G]`` for ``combine``.
        counts (dict): from :func:`global_counts`.
    """
    apart = {key: objectives[key[0]].combine.get(key[1]) for key in metrics}
    own = [ranks.row_of_rank(x) if apart[key] is not None else x for key, x in metrics.items()]
    summed = ranks.sum_all([*gradients, *own])
    found = dict(zip(metrics, summed[len(gradients) :]))
    for key, combine in apart.items():
        if combine is not None:
            found[key] = combine(found[key], counts[key[0]])
    return summed[: len(gradients)], found
