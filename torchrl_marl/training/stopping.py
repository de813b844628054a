"""Early end of a run: at a return that is high enough."""

from __future__ import annotations

import math
from collections import deque
from typing import Any

from torchrl_marl.training.config import TrainConfig
from torchrl_marl.training.recorder import say

__all__ = ["StopAtReturn", "is_due"]


class StopAtReturn:
    """Condition that the mean return of all agents has reached ``stop_at_return``.

    With ``evaluation.every_frames`` the evaluations in training are asked. Without it the mean
    over the last ``evaluation.episodes`` episodes of training is, once so many have ended;
    these are whole iterations, so it is over that many or some more; for 0, over those of the last
    iteration in which any did.

    Args:
        config (TrainConfig): the run's settings.

    Examples:
        >>> from torchrl_marl.training.config import EvaluationConfig
        >>> evaluation = EvaluationConfig(episodes=8)
        >>> stop = StopAtReturn(TrainConfig(stop_at_return=2, evaluation=evaluation))
        >>> stop.saw_episodes(1.0, 4), stop.saw_episodes(2.5, 4), stop.saw_episodes(1.5, 4)
        (False, False, True)
    """

    def __init__(self, config: TrainConfig) -> None:
        self.limit = config.stop_at_return
        self.episodes = max(1, config.evaluation.episodes)
        self.by_evaluation = config.evaluation.every_frames is not None
        self._evaluated: float | None = None
        self._last: deque[tuple[float, int]] = deque()

    @property
    def value(self) -> float | None:
        """The watched mean return; None before it is known."""
        if self.by_evaluation:
            return self._evaluated
        count = sum(number for _, number in self._last)
        if count < self.episodes:
            return None
        return sum(mean * number for mean, number in self._last) / count

    @property
    def reached(self) -> bool:
        """Returns whether the run should end."""
        return self.limit is not None and self.value is not None and self.value >= self.limit

    def saw_evaluation(self, mean: float) -> bool:
        """Notes an evaluation's mean return."""
        if self.limit is not None:
            self._evaluated = mean
        return self.reached

    def saw_episodes(self, mean: float, count: int) -> bool:
        """Notes the mean return of the episodes that ended in an iteration, and their number."""
        if count and not math.isnan(mean):
            self._last.append((mean, count))
            spare = sum(number for _, number in self._last) - self.episodes
            while spare >= self._last[0][1]:
                spare -= self._last.popleft()[1]
        return self.reached

    def tell(self, frames: int) -> None:
        """Says that the run has ended early, if it has.

        Args:
            frames (int): env steps so far.
        """
        if self.reached:
            say(
                f"ends after {frames:,} frames: the return, {self.value:.4g}, "
                f"has reached stop_at_return, {self.limit:g}"
            )

    def state_dict(self) -> dict[str, Any]:
        """Returns the state for a checkpoint."""
        return {"evaluated": self._evaluated, "last": [list(entry) for entry in self._last]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restores a saved state."""
        evaluated = state["evaluated"]  # a text in a foreign file is found here, not in training
        self._evaluated = None if evaluated is None else float(evaluated)
        self._last = deque((float(mean), int(number)) for mean, number in state["last"])


def is_due(every: int | None, frames: int, collected: int) -> bool:
    """Returns whether what is done every so many frames is due after a batch.

    Args:
        every (int, optional): frames in between; None for never.
        frames (int): env steps so far.
        collected (int): of them, those of the batch.
    """
    return bool(every) and frames // every > (frames - collected) // every  # type: ignore[operator]
