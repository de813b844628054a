"""What minibatches must fit: batches, and shards that each give a part of them."""

from __future__ import annotations

from typing import Any

from torchrl_marl.errors import ConfigError

__all__ = ["check_minibatch", "check_shards"]


def check_minibatch(size: int, run: Any, at: str) -> None:
    """Refuses minibatches larger than a batch.

    Args:
        size (int): env steps of a minibatch.
        run (TrainConfig): the run's settings.
        at (str): what stands before the name in messages.

    Raises:
        ConfigError: it is larger.
    """
    if size > run.frames_per_batch:
        raise ConfigError(
            f"{at}minibatch_size is {size}, expected at most "
            f"frames_per_batch, {run.frames_per_batch}; "
            f"use {at}minibatch_size={run.frames_per_batch}."
        )


def check_shards(section: Any, run: Any, at: str) -> None:
    """Refuses minibatches, or windows of them, of which shards cannot give equal parts.

    Args:
        section: settings of a learner that trains on whole batches.
        run (TrainConfig): the run's settings.
        at (str): what stands before the names in messages.

    Raises:
        ConfigError: naming the next good number.
    """
    if run.distributed.asynchronous:  # whose batches are made of whatever comes
        return
    part = (run.distributed.collectors or 1) * (section.window if section.remembers else 1)
    size = section.minibatch_size
    if size % part:
        fits = -(-size // part) * part
        fits = fits if fits <= run.frames_per_batch else size // part * part
        raise ConfigError(
            f"{at}minibatch_size is {size}, expected a multiple of {part}, so that each of the "
            f"{run.distributed.collectors} distributed.collectors gives as much"
            + (f"; use {at}minibatch_size={fits}." if fits else "; use fewer.")
        )
