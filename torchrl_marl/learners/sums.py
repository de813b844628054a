"""An update that several ranks take as one: counts of all before, gradients of all after.

Two messages an update: the number of steps that each loss averages over; then gradients and
metrics, flat, as one. What follows, limits, Adam, stopping, is the same on all ranks, to the bit.

Shapes: M frames of a rank's minibatch, G groups of an objective, R ranks.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from tensordict import TensorDictBase
from torch import Tensor

from torchrl_marl.ranks import Alone

__all__ = ["counted_by_all", "sum_of_all"]


Counts = dict[str, Tensor]


@contextlib.contextmanager
def counted_by_all(
    ranks: Alone, objectives: Mapping[str, Any], minibatch: TensorDictBase
) -> Iterator[Counts]:
    """Lets losses divide by everybody's number of steps, so that gradients add up; one message.

    Args:
        ranks (Alone): who learns.
        objectives (mapping): name -> a loss with ``own_count`` and ``count``.
        minibatch (TensorDictBase): the own part ``[M]``.

    Yields:
        dict: name -> that number, a scalar or ``[G]``; nothing where there are no others.
    """
    if ranks.size == 1:
        yield {}
        return
    with torch.no_grad():
        found = ranks.sum_all([loss.own_count(minibatch) for loss in objectives.values()])
    counts = {name: count.clamp_min(1) for name, count in zip(objectives, found)}
    for name, loss in objectives.items():
        loss.count = counts[name]
    try:
        yield counts
    finally:
        for loss in objectives.values():
            loss.count = None


@torch.no_grad()
def sum_of_all(
    ranks: Alone,
    objectives: Mapping[str, Any],
    gradients: Sequence[Tensor],
    metrics: Mapping[tuple[str, str], Tensor],
    counts: Counts,
) -> tuple[list[Tensor], dict[tuple[str, str], Tensor]]:
    """Returns everybody's gradients and metrics; one message.

    Args:
        ranks (Alone): who learns.
        objectives (mapping): name -> a loss; its ``combine`` has what metrics that are no means are
            made of.
        gradients (sequence of Tensor): own ones, of losses that were counted by all.
        metrics (mapping): (name, metric) -> a scalar or ``[G]``; ``[*, G]`` for ``combine``.
        counts (dict): of :func:`counted_by_all`.
    """
    if ranks.size == 1:
        return list(gradients), dict(metrics)
    apart = {key: objectives[key[0]].combine.get(key[1]) for key in metrics}
    own = [ranks.slots(x) if apart[key] is not None else x for key, x in metrics.items()]
    summed = ranks.sum_all([*gradients, *own])
    found = dict(zip(metrics, summed[len(gradients) :]))
    for key, combine in apart.items():
        if combine is not None:
            found[key] = combine(found[key], counts[key[0]])
    return summed[: len(gradients)], found
