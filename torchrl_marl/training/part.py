"""What takes part in a run beside its learners, and how far a run is."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from tensordict import TensorDictBase

if TYPE_CHECKING:
    from torchrl_marl.training.training import Training

__all__ = ["Part", "Progress"]


class Progress(NamedTuple):
    """How far a run is."""

    iteration: int = 0
    frames: int = 0
    seconds: float = 0.0

    def since(self, begun: Progress) -> dict[str, Any]:
        """Returns what has passed since a member began, as its tables have it."""
        return {
            "iteration": self.iteration - begun.iteration,
            "frames": self.frames - begun.frames,
            "seconds": round(self.seconds - begun.seconds, 3),
        }


class Part:
    """Part of a run, such as a league or an evolution: what a run does not use, it does not have.

    A part overrides the methods that it needs; the loop calls all parts at the same places.
    """

    def open(self, iteration: int) -> None:
        """Opens its tables, cut back to an iteration."""

    def begin(self, training: Training) -> None:
        """Prepares a run that has not begun yet."""

    def take(self, batch: TensorDictBase) -> TensorDictBase:
        """Returns what the run's learners learn from, before they do."""
        return batch

    def learn(self, batch: TensorDictBase, progress: float) -> None:
        """Learns from a batch, after the run's learners; ``progress`` is of the run, 0 to 1."""

    def update(self, training: Training, batch: TensorDictBase) -> dict[str, float]:
        """Takes in a batch that has been learned from; returns metrics for its row."""
        return {}

    def finish(self, training: Training) -> None:
        """Does what is due after an iteration's row is written."""

    def close(self) -> None:
        """Releases what it holds."""

    def state_dict(self) -> dict[str, Any]:
        """Returns the state for a checkpoint."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores a saved state."""
