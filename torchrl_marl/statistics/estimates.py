"""What a few runs say, and how sure it is: estimates with bootstrap intervals.

Shapes: R runs (seeds) of a task, always the last dim. The scores of an algorithm are a list with
an array ``[*L, R]`` for each task (world); the number of runs may differ between tasks, each of
which counts the same. ``L`` are any leading dims, such as points of a curve or resamples.

Reference: Agarwal et al., 2021, https://arxiv.org/abs/2108.13264.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from torchrl_marl.errors import ConfigError

__all__ = [
    "CONFIDENCE",
    "RESAMPLES",
    "Estimate",
    "estimate",
    "interquartile_mean",
    "mean",
    "median",
    "optimality_gap",
    "probability_of_improvement",
    "score_distribution",
]

CONFIDENCE = 0.95
"""Share of repetitions in which an interval is meant to hold the truth."""
RESAMPLES = 5000
"""How often runs are drawn anew, with replacement."""

LARGEST_CHUNK = 4_000_000  # numbers that are drawn at once
Scores = Sequence[ArrayLike]
Statistic = Callable[..., NDArray[np.float64]]


@dataclass(frozen=True)
class Estimate:
    """A statistic and its interval; each is an array where the statistic has leading dims."""

    value: Any
    low: Any = None
    """Lower end of the interval; None where there is none."""
    high: Any = None
    confidence: float = CONFIDENCE
    runs: tuple[int, ...] = ()
    """Runs of each task."""
    why_none: str = ""
    """Why there is no interval."""

    @property
    def has_interval(self) -> bool:
        """Whether there were runs enough for an interval."""
        return self.low is not None


def interquartile_mean(tasks: Scores) -> NDArray[np.float64]:
    """Averages the middle half of all runs of all tasks.

    Cuts off as many whole runs on both sides as a quarter holds. Where tasks have different
    numbers of runs, a run weighs the less the more runs its task has, and exactly a quarter of
    the weight is cut.

    Args:
        tasks (list of arrays): the scores, ``[*L, R]`` each.

    Examples:
        >>> float(interquartile_mean([[1.0, 2.0, 3.0, 100.0]]))
        2.5
    """
    arrays = [np.asarray(task, dtype=float) for task in tasks]
    counts = [array.shape[-1] for array in arrays]
    together = np.concatenate(arrays, -1)
    total = sum(counts)
    if len(set(counts)) == 1:
        cut = total // 4
        inner = np.partition(together, (cut, total - cut - 1), -1) if cut else together
        return np.asarray(inner[..., cut : total - cut].mean(-1))
    weight = np.concatenate([np.full(n, 1 / (n * len(counts))) for n in counts])
    order = np.argsort(together, -1)
    end = np.cumsum(weight[order], -1)
    start = np.concatenate([np.zeros_like(end[..., :1]), end[..., :-1]], -1)
    kept = np.clip(end, 0.25, 0.75) - np.clip(start, 0.25, 0.75)
    return np.asarray((kept * np.take_along_axis(together, order, -1)).sum(-1) / kept.sum(-1))


def mean(tasks: Scores) -> NDArray[np.float64]:
    """Averages the tasks' means.

    Args:
        tasks (list of arrays): the scores, ``[*L, R]`` each.
    """
    return np.asarray(_task_means(tasks).mean(-1))


def median(tasks: Scores) -> NDArray[np.float64]:
    """Takes the median of the tasks' means; for one task, the median of its runs.

    Args:
        tasks (list of arrays): the scores, ``[*L, R]`` each.

    Examples:
        >>> float(median([[0.0, 1.0], [3.0, 3.0], [9.0, 7.0]])), float(median([[0.0, 1.0, 5.0]]))
        (3.0, 1.0)
    """
    if len(tasks) == 1:
        return np.asarray(np.median(np.asarray(tasks[0], dtype=float), -1))
    return np.asarray(np.median(_task_means(tasks), -1))


def optimality_gap(tasks: Scores, target: float = 1.0) -> NDArray[np.float64]:
    """Averages by how much runs fall short of a target; what is above it does not help.

    Args:
        tasks (list of arrays): the scores, ``[*L, R]`` each.
        target (float): the score that is good enough.

    Examples:
        >>> float(optimality_gap([[0.5, 2.0]]))
        0.25
    """
    short = [np.maximum(target - np.asarray(task, dtype=float), 0) for task in tasks]
    return mean(short)


def score_distribution(tasks: Scores, thresholds: ArrayLike) -> NDArray[np.float64]:
    """Gives the share of runs above each threshold: a performance profile.

    Args:
        tasks (list of arrays): the scores, ``[*L, R]`` each.
        thresholds (array): ``[K]``.

    Returns:
        array: ``[*L, K]``, mean over the tasks.

    Examples:
        >>> score_distribution([[0.1, 0.9]], [0.0, 0.5, 1.0]).tolist()
        [1.0, 0.5, 0.0]
    """
    above = np.asarray(thresholds, dtype=float)[:, None]
    shares = [(np.asarray(task, dtype=float)[..., None, :] > above).mean(-1) for task in tasks]
    return np.asarray(np.mean(shares, 0))


def probability_of_improvement(tasks: Scores, others: Scores) -> NDArray[np.float64]:
    """Gives the probability that a run is better than another algorithm's, mean over tasks.

    The Mann-Whitney statistic over the number of pairs; a tie counts half.

    Args:
        tasks (list of arrays): the scores of one algorithm, ``[*L, R]`` each.
        others (list of arrays): those of the other on the same tasks, ``[*L, R']`` each.

    Raises:
        ConfigError: another number of tasks.

    Examples:
        >>> float(probability_of_improvement([[2.0, 3.0]], [[1.0, 2.0]]))
        0.875
    """
    if len(tasks) != len(others):
        raise ConfigError(
            f"the first algorithm has scores of {len(tasks)} tasks and the second of "
            f"{len(others)}, expected the same tasks; compare on those that both have."
        )
    won = [
        _won(np.asarray(x, dtype=float), np.asarray(y, dtype=float)) for x, y in zip(tasks, others)
    ]
    return np.asarray(np.mean(won, 0))


def estimate(
    statistic: Statistic,
    *scores: Scores,
    confidence: float = CONFIDENCE,
    resamples: int = RESAMPLES,
    seed: int = 0,
) -> Estimate:
    """Evaluates a statistic with its stratified bootstrap interval (percentiles).

    Draws the runs of each task anew from its own, with replacement: tasks are the strata. A run
    is drawn with all that stands in leading dims, such as its whole curve. Several algorithms'
    runs are drawn independently.

    Args:
        statistic (callable): such as :func:`interquartile_mean`; takes ``scores``.
        *scores (list of arrays): of one algorithm, or of two that are compared.

    Keyword Args:
        confidence (float): of the interval.
        resamples (int): how often.
        seed (int): of the random numbers.

    Returns:
        Estimate: without an interval where a task has a single run.

    Raises:
        ConfigError: no runs at all, or scores that are not finite.

    Examples:
        >>> found = estimate(interquartile_mean, [[1.0, 2.0, 3.0, 4.0]])
        >>> float(found.value), found.low < 2.5 < found.high
        (2.5, True)
        >>> estimate(mean, [[1.0]]).why_none
        'one run says nothing about how much runs differ'
    """
    players = [[np.asarray(task, dtype=float) for task in tasks] for tasks in scores]
    for tasks in players:
        check_scores(tasks)
    found = Estimate(
        _plain(statistic(*players)),
        confidence=confidence,
        runs=tuple(task.shape[-1] for tasks in players for task in tasks),
    )
    if min(found.runs) < 2:
        reason = "one run says nothing about how much runs differ"
        return dataclasses.replace(found, why_none=reason)
    random = np.random.default_rng(seed)
    size = sum(task.size for tasks in players for task in tasks)
    chunk = max(1, min(resamples, LARGEST_CHUNK // size))
    drawn = []
    for first in range(0, resamples, chunk):
        count = min(chunk, resamples - first)
        drawn.append(statistic(*([drawn_anew(task, count, random) for task in t] for t in players)))
    tail = (1 - confidence) / 2
    low, high = np.quantile(np.concatenate(drawn), (tail, 1 - tail), axis=0)
    return dataclasses.replace(found, low=_plain(low), high=_plain(high))


def _task_means(tasks: Scores) -> NDArray[np.float64]:
    return np.stack([np.asarray(task, dtype=float).mean(-1) for task in tasks], -1)


def _won(own: NDArray[np.float64], other: NDArray[np.float64]) -> NDArray[np.float64]:
    """``[*L]``: the share of pairs of runs of which the first is greater."""
    return np.asarray(signs(own[..., :, None] - other[..., None, :]).mean((-2, -1)))


def signs(gap: NDArray[np.float64]) -> NDArray[np.float64]:
    """Returns 1 where a number is positive, 0.5 where it is 0, else 0."""
    return (gap > 0) + 0.5 * (gap == 0)


def drawn_anew(
    task: NDArray[np.float64], count: int, random: np.random.Generator
) -> NDArray[np.float64]:
    """Returns ``[count, *L, R]``: a task's runs, drawn anew ``count`` times."""
    runs = task.shape[-1]
    return np.moveaxis(task[..., random.integers(runs, size=(count, runs))], -2, 0)


def check_scores(tasks: Sequence[NDArray[np.float64]]) -> None:
    """Refuses no runs at all, or scores that are not finite.

    Raises:
        ConfigError: naming the score.
    """
    if not tasks or any(task.ndim == 0 or not task.size for task in tasks):
        raise ConfigError("there are no runs to estimate from, expected one or more of each task.")
    for task in tasks:
        if not np.isfinite(task).all():
            bad = task[~np.isfinite(task)][0]
            raise ConfigError(f"a score is {bad}, expected finite numbers; leave that run out.")


def _plain(value: NDArray[np.float64]) -> Any:
    """A number as Python has it; an array as it is."""
    return float(value) if np.ndim(value) == 0 else np.asarray(value)
