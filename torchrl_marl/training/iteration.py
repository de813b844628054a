"""What a run yields after each iteration."""

from __future__ import annotations

import dataclasses

from tensordict import TensorDictBase

from torchrl_marl.training.run import Run

__all__ = ["Iteration"]


@dataclasses.dataclass(frozen=True)
class Iteration:
    """One collect-and-learn, as :func:`iterate` yields it."""

    run: Run
    """The run, with the policy as it is now."""
    number: int
    """1 for the first."""
    frames: int
    """Env steps so far."""
    metrics: dict[str, float]
    """The row of ``metrics.csv``."""
    batch: TensorDictBase
    """What was collected, ``[E, T]``, with advantages."""
