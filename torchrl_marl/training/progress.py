"""Iterations, the stopping condition and the summary of a run."""

from __future__ import annotations

import dataclasses
import math
from collections import deque
from collections.abc import Mapping, Sequence
from fractions import Fraction
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tensordict import TensorDictBase

from torchrl_marl.errors import ConfigError, quoted
from torchrl_marl.training.config import TrainConfig
from torchrl_marl.training.files import json_text, open_atomically
from torchrl_marl.training.messages import print_message
from torchrl_marl.training.part import Part
from torchrl_marl.training.run import Run

if TYPE_CHECKING:
    from torchrl_marl.training.training import Training

__all__ = [
    "Iteration",
    "StopAtReturn",
    "Until",
    "evaluation_period",
    "is_due",
    "return_entries",
    "summary_entries",
    "write_summary",
]


@dataclasses.dataclass(frozen=True)
class Iteration:
    """One iteration of training, as yielded by :func:`iterate`."""

    run: Run
    """The run, with the current policy."""
    number: int
    """Number of the iteration, counted from 1."""
    frames: int
    """Environment steps so far."""
    metrics: dict[str, float]
    """The iteration's row in ``metrics.csv``."""
    batch: TensorDictBase
    """The batch, ``[E, T]``, with advantages."""


def summary_entries(config: TrainConfig, frames: int, seconds: float) -> dict[str, Any]:
    """Returns the entries of a run's summary other than returns.

    Args:
        config (TrainConfig): config of the run.
        frames (int): environment steps of the run.
        seconds (float): time for collecting and learning.
    """
    return {
        "recipe": config.recipe,
        "seed": config.seed,
        "frames": frames,
        "seconds": round(seconds, 2),
        "frames_per_second": round(frames / max(seconds, 1e-9), 1),
    }


def return_entries(when: str, result: Mapping[str, float], groups: Sequence[str]) -> dict[str, Any]:
    """Returns an evaluation's entries for a summary; with several groups, also by group.

    Args:
        when (str): ``before``, ``after``, ``random`` or ``heuristic``.
        result (mapping): result of the evaluation; empty if there was none.
        groups (sequence of str): names of the groups.
    """
    found = {f"return_{when}": result.get("return_mean")}
    for name in groups if len(groups) > 1 else ():
        found[f"{name}/return_{when}"] = result.get(f"{name}/episode_reward")
    return found


def write_summary(folder: Path, summary: Mapping[str, Any]) -> None:
    """Writes a run's ``summary.json``.

    Raises:
        WriteError: the disk is full, or the folder is read-only.
    """
    with open_atomically(folder / "summary.json") as file:
        file.write(json_text(summary, indent=2))


class StopAtReturn:
    """Stopping condition: the mean return of all agents has reached ``stop_at_return``.

    With evaluations during training, the mean return is that of the last one. Otherwise it is the
    mean over the last ``evaluation.episodes`` training episodes, rounded up to whole iterations.
    For ``evaluation.episodes=0`` it is the mean over the last iteration in which episodes finished.

    Args:
        config (TrainConfig): config of the run.

    Examples:
        >>> from torchrl_marl.training.config import EvaluationConfig
        >>> evaluation = EvaluationConfig(episodes=8)
        >>> stop = StopAtReturn(TrainConfig(stop_at_return=2, evaluation=evaluation))
        >>> [stop.update_from_episodes(value, 4) for value in (1.0, 2.5, 1.5)]
        [False, False, True]
    """

    def __init__(self, config: TrainConfig) -> None:
        self.limit = config.stop_at_return
        self.episodes = max(1, config.evaluation.episodes)
        self.by_evaluation = evaluation_period(config) is not None
        self._evaluated: float | None = None
        self._last: deque[tuple[float, int]] = deque()

    @property
    def value(self) -> float | None:
        """The current mean return, or None before it is known."""
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

    def update_from_evaluation(self, mean: float) -> bool:
        """Records the mean return of an evaluation; returns whether the run should end."""
        if self.limit is not None:
            self._evaluated = mean
        return self.reached

    def update_from_episodes(self, mean: float, count: int) -> bool:
        """Records an iteration's mean return and number of episodes; returns whether to end."""
        if count and not math.isnan(mean):
            self._last.append((mean, count))
            spare = sum(number for _, number in self._last) - self.episodes
            while spare >= self._last[0][1]:
                spare -= self._last.popleft()[1]
        return self.reached

    def report(self, frames: int) -> None:
        """Prints a message if the run ended early.

        Args:
            frames (int): environment steps so far.
        """
        if self.reached:
            print_message(
                f"ends after {frames:,} frames: the return, {self.value:.4g}, "
                f"has reached stop_at_return, {self.limit:g}"
            )

    def state_dict(self) -> dict[str, Any]:
        """Returns the state for a checkpoint."""
        return {"evaluated": self._evaluated, "last": [list(entry) for entry in self._last]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restores a saved state."""
        evaluated = state["evaluated"]  # a wrong type in a file fails here, not later in training
        self._evaluated = None if evaluated is None else float(evaluated)
        self._last = deque((float(mean), int(number)) for mean, number in state["last"])


class Until(Part):
    """Stopping condition: an evaluation during training has reached the values of ``until``.

    Args:
        config (TrainConfig): config of the run.

    Attributes:
        found (dict): values of these metrics in the latest evaluation.

    Examples:
        >>> until = Until(TrainConfig(until={"return": 40, "length_mean": 90}))
        >>> until.found = {"return": 41.0, "length_mean": 80.0}
        >>> until.done
        False
    """

    def __init__(self, config: TrainConfig) -> None:
        self.limits = {name: x for name, x in config.until.items() if x is not None}
        self.found: dict[str, float] = {}

    @property
    def done(self) -> bool:
        """True if all values are reached."""
        return bool(self.found) and all(self.found[k] >= x for k, x in self.limits.items())

    def extend(self) -> None:
        """Continues a run that has ended."""
        self.found = {}

    def evaluated(self, training: Training, results: Sequence[dict[str, Any]]) -> None:
        """Records the metrics of an evaluation during training.

        Raises:
            ConfigError: the evaluation lacks a metric.
        """
        found = {"return": results[0]["return_mean"], **results[0]}
        lacks = next((name for name in self.limits if name not in found), None)
        if lacks is not None:
            raise ConfigError(
                f"until has {quoted(lacks)}, which no evaluation measures; expected one of "
                f"{', '.join(found)}."
            )
        if training.iteration:
            self.found = {name: float(found[name]) for name in self.limits}

    def end(self, training: Training) -> None:
        """Adds the reason of an early end to the summary."""
        if self.done and training.frames < training.config.total_frames:
            pairs = ((name, self.found[name], limit) for name, limit in self.limits.items())
            why = " and ".join(f"{x:.4g} has reached until.{k}, {y:g}" for k, x, y in pairs)
            training.run.summary["stopped"] = why
            print_message(f"ends after {training.frames:,} frames: {why}")

    def state_dict(self) -> dict[str, Any]:
        """Returns the state for a checkpoint."""
        return dict(self.found)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores a saved state."""
        self.found = {name: float(value) for name, value in state.items()}


def evaluation_period(config: TrainConfig) -> float | Fraction | None:
    """Returns the frames between two evaluations during training, or None.

    The period of ``evaluation.count`` is a fraction: a multiple of a rounded one may exceed the
    frames that it should equal.
    """
    settings = config.evaluation
    if settings.count is None:
        return settings.every_frames
    return Fraction(config.total_frames, settings.count)


def is_due(every: float | Fraction | None, frames: int, collected: int) -> bool:
    """Returns whether a periodic task is due after a batch.

    Args:
        every (float or Fraction, optional): period in frames; None: never.
        frames (int): environment steps so far, including the batch.
        collected (int): environment steps of the batch.
    """
    return every is not None and frames // every > (frames - collected) // every
