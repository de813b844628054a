"""Optional parts of a run, such as a league, and the progress of the run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from tensordict import TensorDictBase

if TYPE_CHECKING:
    from torchrl_marl.training.training import Training

__all__ = ["Part", "Progress"]


class Progress(NamedTuple):
    """Progress of a run."""

    iteration: int = 0
    frames: int = 0
    seconds: float = 0.0

    def since(self, begun: Progress) -> dict[str, Any]:
        """Returns the progress since a member began, as columns of the member's tables."""
        return {
            "iteration": self.iteration - begun.iteration,
            "frames": self.frames - begun.frames,
            "seconds": round(self.seconds - begun.seconds, 3),
        }


class Part:
    """Optional part of a run, such as a league or an evolution.

    A part overrides the methods that it needs. The training loop calls the methods of every part.
    """

    @property
    def done(self) -> bool:
        """True if the part ends the run."""
        return False

    def open(self, iteration: int) -> None:
        """Opens the part's tables, and removes rows after the given iteration."""

    def begin(self, training: Training) -> None:
        """Prepares the part for a new run."""

    def extend(self) -> None:
        """Prepares the part for more frames, when a run is resumed with a new ``total_frames``."""

    def collect(self, training: Training, batch: TensorDictBase) -> None:
        """Processes a batch before the update."""

    def take(self, batch: TensorDictBase) -> TensorDictBase:
        """Returns, before the update, the part of a batch from which the run's learners learn."""
        return batch

    def learn(self, batch: TensorDictBase, progress: float) -> None:
        """Learns from a batch after the run's learners have; the run's progress is from 0 to 1."""

    def measure(
        self, training: Training, batch: TensorDictBase, values: Sequence[dict[str, Any]]
    ) -> None:
        """Processes a batch after the update; may add metrics to those of each member."""

    def update(self, training: Training, batch: TensorDictBase) -> dict[str, float]:
        """Processes a batch after the update; returns metrics for the row of ``metrics.csv``."""
        return {}

    def finish(self, training: Training) -> None:
        """Finishes an iteration; called after its row in ``metrics.csv`` is written."""

    def evaluated(self, training: Training, results: Sequence[dict[str, Any]]) -> None:
        """Processes the results of an evaluation; may add to those of each member."""

    def saved(self, training: Training) -> None:
        """Called after a checkpoint is written."""

    def end(self, training: Training) -> None:
        """Called once at the end of a run, before its summary and last checkpoint are written."""

    def close(self) -> None:
        """Releases the part's resources."""

    def state_dict(self) -> dict[str, Any]:
        """Returns the state for a checkpoint."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores a saved state."""
