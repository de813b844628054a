"""Estimates from a few runs, their intervals and probabilities."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator, Sequence
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
    "exact_chance",
    "interquartile_mean",
    "least_chance",
    "mean",
    "median",
    "optimality_gap",
    "probability_of_improvement",
    "score_distribution",
    "sign_flip_chance",
    "student_chance",
    "student_quantile",
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


_FINEST = 10_000  # steps from 0 to 1 of a distribution
_ALL_SIGNS = 14  # pairs of which all signs are tried


def exact_chance(tasks: Scores, others: Scores) -> float:
    """Gives how often runs that do not differ come as far apart as these, in either direction.

    The exact two-sided test of :func:`probability_of_improvement`: each task's runs are dealt out
    to the two algorithms in every way. It knows what a bootstrap of few runs does not: that two
    runs are both better than two others in 1 of 3 cases, by chance.

    Args:
        tasks (list of arrays): the scores of one algorithm, ``[R]`` each.
        others (list of arrays): those of the other on the same tasks, ``[R']`` each.

    Reference: Mann and Whitney, 1947, https://doi.org/10.1214/aoms/1177730491.

    Examples:
        >>> exact_chance([[2.0, 3.0, 4.0]], [[-1.0, 0.0, 1.0]])
        0.1
    """
    shares = [_dealt_out(np.asarray(x), np.asarray(y)) for x, y in zip(tasks, others)]
    whole = math.lcm(*(len(own) - 1 for own in shares))
    steps = min(whole, _FINEST)
    off = 0.01 if steps == whole else len(shares) / 2  # tasks of many unlike numbers are rounded
    chance = np.ones(1)
    for own in shares:
        places = np.rint(np.arange(len(own)) * (steps / (len(own) - 1))).astype(int)
        before, chance = chance, np.zeros(len(chance) + steps)
        for place, weight in zip(places, own):
            chance[place : place + len(before)] += weight * before
    middle = (len(chance) - 1) / 2
    found = float(probability_of_improvement(tasks, others)) * 2 * middle
    far = np.abs(np.arange(len(chance)) - middle) >= abs(found - middle) - off
    return round(float(chance[far].sum()), 12)


def _dealt_out(own: NDArray[np.float64], other: NDArray[np.float64]) -> NDArray[np.float64]:
    """How probable each share of won pairs is: those of 0, half a pair, and so on up to all."""
    if len(own) > len(other):
        return _dealt_out(other, own)[::-1]
    together, n = np.concatenate([own, other]), len(own)
    # Twice a run's rank among all, from which half-won pairs are whole numbers.
    ranks = (np.sign(together[:, None] - together).sum(1) + len(together) + 1).astype(int)
    ways = np.zeros((n + 1, int(np.sort(ranks)[-n:].sum()) + 1))
    ways[0, 0] = 1
    for rank in ranks:
        ways[1:, rank:] += ways[:-1, : ways.shape[1] - rank]
    found = ways[n, n * (n + 1) :]
    found = np.pad(found, (0, 2 * n * len(other) + 1 - len(found)))
    return np.asarray(found / found.sum())


def least_chance(counts: ArrayLike, others: ArrayLike) -> float:
    """Gives the least that :func:`exact_chance` can give of so many runs.

    Args:
        counts, others (list of int): runs of each task, of either algorithm.

    Examples:
        >>> round(least_chance([2], [2]), 3), least_chance([3], [3])
        (0.333, 0.1)
    """
    above = [np.arange(1.0, n + 1) for n in np.atleast_1d(counts)]
    return exact_chance(above, [-np.arange(1.0, n + 1) for n in np.atleast_1d(others)])


def sign_flip_chance(gaps: ArrayLike) -> float:
    """Gives how often the mean of these differences is as far from 0, had each either sign.

    The exact two-sided test of pairs: all signs are tried. Of more than 14 pairs it is Student's
    test, which then says the same.

    Args:
        gaps (array): a pair's difference each, ``[R]``.

    Reference: Fisher, 1935, The Design of Experiments, section 21.

    Examples:
        >>> sign_flip_chance([1.0, 2.0, 3.0]), sign_flip_chance([1.0, -1.0])
        (0.25, 1.0)
    """
    own = np.asarray(gaps, dtype=float)
    if len(own) > _ALL_SIGNS:
        return _student_of_pairs(own)
    signs = 1.0 - 2 * ((np.arange(2 ** len(own))[:, None] >> np.arange(len(own))) & 1)
    far = np.abs(signs @ own) >= abs(own.sum()) - 1e-9 * np.abs(own).sum()
    return float(far.mean())


def _student_of_pairs(gaps: NDArray[np.float64]) -> float:
    error = float(gaps.std(ddof=1)) / math.sqrt(len(gaps))
    if error == 0:
        return 1.0 if gaps[0] == 0 else 0.0
    return student_chance(float(gaps.mean()) / error, len(gaps) - 1)


def student_chance(value: float, freedom: int) -> float:
    """Gives how often a number of Student's distribution is as far from 0, in either direction.

    Args:
        value (float): the number.
        freedom (int): degrees of freedom, 1 or more.

    Reference: Abramowitz and Stegun, 1964, 26.7.3 and 26.7.4.

    Examples:
        >>> round(student_chance(12.706, 1), 4), round(student_chance(-2.228, 10), 4)
        (0.05, 0.05)
    """
    return 1 - _within(math.atan(abs(value) / math.sqrt(freedom)), freedom)


def student_quantile(confidence: float, freedom: int) -> float:
    """Gives how far from 0 Student's distribution holds that share of its numbers.

    Args:
        confidence (float): the share, below 1.
        freedom (int): degrees of freedom, 1 or more.

    Examples:
        >>> round(student_quantile(0.95, 1), 3), round(student_quantile(0.95, 10), 3)
        (12.706, 2.228)
    """
    low, high = 0.0, math.pi / 2
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if _within(middle, freedom) < confidence else (low, middle)
    return math.tan(low) * math.sqrt(freedom)


def _within(angle: float, freedom: int) -> float:
    """The share of Student's distribution up to ``sqrt(freedom) * tan(angle)`` from 0."""
    sine, cosine = math.sin(angle), math.cos(angle)
    if freedom % 2 == 0:
        return sine * sum(_terms(cosine, 1.0, range(1, freedom - 2, 2)))
    inner = sine * sum(_terms(cosine, cosine, range(2, freedom - 2, 2))) if freedom > 1 else 0.0
    return 2 / math.pi * (angle + inner)


def _terms(cosine: float, first: float, steps: range) -> Iterator[float]:
    yield first
    for step in steps:
        first *= step / (step + 1) * cosine**2
        yield first
