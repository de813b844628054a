"""Statistics of a few runs: estimates with intervals, differences, and verdicts in words.

Shapes: L any leading dims, R runs of a task, or R pairs of scores, K thresholds.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from torchrl_marl.errors import ConfigError
from torchrl_marl.training.significance import (
    Scores,
    permutation_p_value,
    probability_of_improvement,
    sign_flip_p_value,
    signs,
    smallest_p_value,
    student_p_value,
    student_quantile,
)

__all__ = [
    "CONFIDENCE",
    "RESAMPLES",
    "Estimate",
    "Paired",
    "difference_of_runs",
    "estimate",
    "interquartile_mean",
    "matters",
    "mean",
    "median",
    "needed",
    "optimality_gap",
    "paired_difference",
    "permutation_p_value",
    "probability_of_improvement",
    "score_distribution",
    "sign_flip_p_value",
    "significant",
    "smallest_p_value",
    "student_p_value",
    "student_quantile",
    "too_few",
    "undecided",
]

CONFIDENCE = 0.95
"""Confidence level of intervals."""
RESAMPLES = 5000
"""Number of bootstrap resamples."""

_SMALLEST_EFFECT = 0.2  # smallest difference that is worth reporting, in standard deviations
LARGEST_CHUNK = 4_000_000  # largest number of values that are resampled at once
Statistic = Callable[..., NDArray[np.float64]]


@dataclass(frozen=True)
class Estimate:
    """A statistic and its interval; both are arrays if the scores have leading dims."""

    value: Any
    low: Any = None
    """Lower end of the interval; None without an interval."""
    high: Any = None
    confidence: float = CONFIDENCE
    runs: tuple[int, ...] = ()
    """Number of runs per task."""
    why_none: str = ""
    """Reason for a missing interval."""

    @property
    def has_interval(self) -> bool:
        """True if there were enough runs for an interval."""
        return self.low is not None


def interquartile_mean(tasks: Scores) -> NDArray[np.float64]:
    """Averages the middle half of all runs of all tasks.

    The best and the worst quarter of the runs are left out, rounded down to whole runs. If tasks
    have different numbers of runs, each task has the same total weight, and exactly a quarter of
    the weight is left out at each end.

    Args:
        tasks (list of arrays): scores of each task, ``[*L, R]``.

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
        tasks (list of arrays): scores of each task, ``[*L, R]``.
    """
    return np.asarray(_task_means(tasks).mean(-1))


def median(tasks: Scores) -> NDArray[np.float64]:
    """Returns the median of the tasks' means; for one task, the median of its runs.

    Args:
        tasks (list of arrays): scores of each task, ``[*L, R]``.

    Examples:
        >>> float(median([[0.0, 1.0], [3.0, 3.0], [9.0, 7.0]])), float(median([[0.0, 1.0, 5.0]]))
        (3.0, 1.0)
    """
    if len(tasks) == 1:
        return np.asarray(np.median(np.asarray(tasks[0], dtype=float), -1))
    return np.asarray(np.median(_task_means(tasks), -1))


def optimality_gap(tasks: Scores, target: float = 1.0) -> NDArray[np.float64]:
    """Returns the mean shortfall of the runs from a target; higher scores count as the target.

    Args:
        tasks (list of arrays): scores of each task, ``[*L, R]``.
        target (float): target score.

    Examples:
        >>> float(optimality_gap([[0.5, 2.0]]))
        0.25
    """
    short = [np.maximum(target - np.asarray(task, dtype=float), 0) for task in tasks]
    return mean(short)


def score_distribution(tasks: Scores, thresholds: ArrayLike) -> NDArray[np.float64]:
    """Returns the share of runs above each threshold, a performance profile.

    Args:
        tasks (list of arrays): scores of each task, ``[*L, R]``.
        thresholds (array): thresholds, ``[K]``.

    Returns:
        array: shares, averaged over the tasks, ``[*L, K]``.

    Examples:
        >>> score_distribution([[0.1, 0.9]], [0.0, 0.5, 1.0]).tolist()
        [1.0, 0.5, 0.0]
    """
    above = np.asarray(thresholds, dtype=float)[:, None]
    shares = [(np.asarray(task, dtype=float)[..., None, :] > above).mean(-1) for task in tasks]
    return np.asarray(np.mean(shares, 0))


def estimate(
    statistic: Statistic,
    *scores: Scores,
    confidence: float = CONFIDENCE,
    resamples: int = RESAMPLES,
    seed: int = 0,
) -> Estimate:
    """Computes a statistic, with an interval by the stratified percentile bootstrap.

    Tasks are the strata: the runs of each task are resampled with replacement. A run is resampled
    as a whole, with all leading dims of its scores: for example, its whole curve. Runs of different
    algorithms are resampled independently.

    Args:
        statistic (callable): function of ``scores``, such as :func:`interquartile_mean`.
        *scores (list of arrays): scores of one algorithm, or of two algorithms to compare.

    Keyword Args:
        confidence (float): confidence level of the interval.
        resamples (int): number of resamples.
        seed (int): random seed of the resampling.

    Returns:
        Estimate: value and interval; without an interval if a task has a single run.

    Raises:
        ConfigError: there are no runs, or scores are not finite.

    Examples:
        >>> found = estimate(interquartile_mean, [[1.0, 2.0, 3.0, 4.0]])
        >>> float(found.value), found.low < 2.5 < found.high
        (2.5, True)
        >>> estimate(mean, [[1.0]]).why_none
        'one run says nothing about how much runs differ'
    """
    players = [[np.asarray(task, dtype=float) for task in tasks] for tasks in scores]
    for tasks in players:
        _check_scores(tasks)
    found = Estimate(
        _as_float(statistic(*players)),
        confidence=confidence,
        runs=tuple(task.shape[-1] for tasks in players for task in tasks),
    )
    if min(found.runs) < 2:
        reason = "one run says nothing about how much runs differ"
        return dataclasses.replace(found, why_none=reason)
    tail = (1 - confidence) / 2
    drawn = _bootstrap(statistic, players, resamples, seed)
    low, high = np.quantile(drawn, (tail, 1 - tail), axis=0)
    return dataclasses.replace(found, low=_as_float(low), high=_as_float(high))


def _task_means(tasks: Scores) -> NDArray[np.float64]:
    return np.stack([np.asarray(task, dtype=float).mean(-1) for task in tasks], -1)


def _bootstrap(
    statistic: Statistic, players: Sequence[Sequence[Any]], resamples: int, seed: int
) -> NDArray[np.float64]:
    """Returns the statistic of each bootstrap resample."""
    random = np.random.default_rng(seed)
    size = sum(task.size for tasks in players for task in tasks)
    chunk = max(1, min(resamples, LARGEST_CHUNK // size))

    def resampled(task: NDArray[np.float64], count: int) -> NDArray[np.float64]:
        """Returns resampled runs of a task, ``[count, *L, R]``."""
        runs = task.shape[-1]
        return np.moveaxis(task[..., random.integers(runs, size=(count, runs))], -2, 0)

    found = []
    for first in range(0, resamples, chunk):
        count = min(chunk, resamples - first)
        found.append(statistic(*([resampled(task, count) for task in t] for t in players)))
    return np.concatenate(found)


def _check_scores(tasks: Sequence[NDArray[np.float64]]) -> None:
    """Refuses missing runs, and scores that are not finite.

    Raises:
        ConfigError: there are no runs, or a score is not finite.
    """
    if not tasks or any(task.ndim == 0 or not task.size for task in tasks):
        raise ConfigError("there are no runs to estimate from, expected at least one of each task.")
    for task in tasks:
        if not np.isfinite(task).all():
            bad = task[~np.isfinite(task)][0]
            raise ConfigError(f"a score is {bad}, expected finite numbers; leave that run out.")


def _as_float(value: NDArray[np.float64]) -> Any:
    """Converts a scalar to a float; returns an array unchanged."""
    return float(value) if np.ndim(value) == 0 else np.asarray(value)


@dataclass(frozen=True)
class Paired:
    """Difference between the scores of two players from the same initial states."""

    difference: Estimate
    """Mean difference, first minus second, with Student's interval."""
    probability: float | None
    """Share of resamples of the pairs in which the first's mean is greater; ties count half.

    None for a single pair, and if a side has several runs.
    """
    won: float
    """Share of initial states from which the first's score is greater; ties count half."""
    p_value: float | None = None
    """P-value of the exact two-sided test; its null hypothesis is that the two do not differ."""
    smallest_p_value: float | None = None
    """Smallest p-value that the exact test can give for this number of scores."""

    @property
    def distinguishable(self) -> bool:
        """True if the interval excludes 0 and the p-value is at most 0.05."""
        found = self.difference
        if not found.has_interval or self.p_value is None or found.low <= 0 <= found.high:
            return False
        return self.p_value <= 1 - CONFIDENCE


def paired_difference(
    first: ArrayLike,
    second: ArrayLike,
    *,
    confidence: float = CONFIDENCE,
    resamples: int = RESAMPLES,
    seed: int = 0,
) -> Paired:
    """Compares the scores of two players from the same initial states, pair by pair.

    Args:
        first (array): first player's scores, such as episode returns, ``[R]``.
        second (array): second player's scores from the same initial states, ``[R]``.

    Keyword Args:
        confidence (float): confidence level of the interval.
        resamples, seed (int): number of resamples and random seed for
            :attr:`Paired.probability`.

    Raises:
        ConfigError: the numbers of scores differ or are 0, or scores are not finite.

    Examples:
        >>> found = paired_difference([3.0, 5.0, 9.0], [1.0, 4.0, 9.0])
        >>> float(found.difference.value), round(found.won, 3), found.p_value
        (1.0, 0.833, 0.5)
    """
    one, other = np.asarray(first, dtype=float), np.asarray(second, dtype=float)
    if one.shape != other.shape or one.ndim != 1:
        raise ConfigError(
            f"scores of shapes {one.shape} and {other.shape} are not pairs, expected one number "
            "per start from both; play the same starts."
        )
    gap = one - other
    _check_scores([gap])
    won = float(signs(gap).mean())
    if len(gap) < 2:
        return Paired(Estimate(float(gap[0]), why_none=_ONE_START), None, won)
    found = _interval(float(gap.mean()), _mean_variance(gap), len(gap) - 1, confidence, (len(gap),))
    means = _bootstrap(lambda tasks: tasks[0].mean(-1), [[gap]], resamples, seed)
    return Paired(
        found,
        float(signs(means).mean()),
        won,
        sign_flip_p_value(gap),
        _smallest_for(len(gap), True),
    )


def difference_of_runs(
    first: ArrayLike,
    second: ArrayLike,
    *,
    by_seed: bool = False,
    confidence: float = CONFIDENCE,
) -> Paired:
    """Compares the mean returns of two algorithms with several runs from the same initial states.

    The interval is Student's, over runs and initial states. Three variances are added: that of the
    first side's mean over its runs, that of the second side's mean over its runs, and that of the
    mean difference over initial states. The smallest of their degrees of freedom is used. For
    normally distributed returns the interval is never too narrow, however different the variances
    are. The p-value is from :func:`permutation_p_value`, or with ``by_seed`` from
    :func:`sign_flip_p_value`.

    Args:
        first, second (array): returns by run and initial state, ``[R, n]`` and ``[R', n]``
            for n initial states.

    Keyword Args:
        by_seed (bool): True to compare the runs as pairs, in the given order.
        confidence (float): confidence level of the interval.

    Raises:
        ConfigError: the numbers of initial states differ, or with ``by_seed`` the numbers of runs.

    Reference: Mickey and Brown, 1966, https://doi.org/10.1214/aoms/1177699514.

    Reduces to: :func:`paired_difference` of the means over runs, if a side has a single run; the
        result then holds for these runs only.

    Examples:
        >>> one, other = [[1.0, 3.0], [2.0, 4.0]], [[0.0, 2.0], [0.0, 1.0]]
        >>> found = difference_of_runs(one, other)
        >>> found.difference.value, round(found.p_value, 3)
        (1.75, 0.333)
    """
    one, other = np.asarray(first, dtype=float), np.asarray(second, dtype=float)
    _check_runs(one, other, by_seed)
    if min(len(one), len(other)) == 1:
        return paired_difference(one.mean(0), other.mean(0), confidence=confidence)
    gap = one.mean(0) - other.mean(0)
    won, value = float(signs(gap).mean()), float(gap.mean())
    if gap.size < 2:
        return Paired(Estimate(value, why_none=_ONE_START), None, won)
    ours, theirs = one.mean(1), other.mean(1)
    of_runs = (
        _mean_variance(ours - theirs) if by_seed else _mean_variance(ours) + _mean_variance(theirs)
    )
    freedom = min(len(one), len(other), gap.size) - 1
    runs = (len(one), len(other))
    found = _interval(value, of_runs + _mean_variance(gap), freedom, confidence, runs)
    if by_seed:
        return Paired(
            found, None, won, sign_flip_p_value(ours - theirs), _smallest_for(len(ours), True)
        )
    p_value = permutation_p_value([ours], [theirs])
    return Paired(found, None, won, p_value, smallest_p_value(len(ours), len(theirs)))


_ONE_START = "one start says nothing about others"


def _mean_variance(values: NDArray[np.float64]) -> float:
    """Returns the variance of the mean of the given values."""
    return float(values.var(ddof=1)) / len(values)


def _interval(
    value: float, variance: float, freedom: int, confidence: float, runs: tuple[int, ...]
) -> Estimate:
    half = student_quantile(confidence, freedom) * math.sqrt(variance)
    return Estimate(value, value - half, value + half, confidence, runs)


def _check_runs(one: NDArray[Any], other: NDArray[Any], by_seed: bool) -> None:
    if one.ndim != 2 or other.ndim != 2 or one.shape[1] != other.shape[1]:
        raise ConfigError(
            f"returns of shapes {one.shape} and {other.shape} cannot be compared, expected [runs, "
            "starts] with the same starts; play the same starts."
        )
    if by_seed and len(one) != len(other):
        raise ConfigError(
            f"the sides have {len(one)} and {len(other)} runs, expected equal numbers for pairs "
            "by seed."
        )


def undecided(things: str, more: str = "") -> str:
    """Returns the verdict for a difference with an interval that contains 0.

    Args:
        things (str): plural noun for the repetitions, such as ``runs``.
        more (str): what a verdict takes, from :func:`needed`.

    Examples:
        >>> undecided("episodes")
        'these episodes cannot tell them apart'
    """
    return f"these {things} cannot tell them apart{more}"


def significant(things: str) -> str:
    """Returns the verdict for a significant difference.

    Examples:
        >>> significant("seeds")
        'a significant difference over seeds'
    """
    return f"a significant difference over {things}"


def matters(gap: float, spread: float) -> bool:
    """Returns whether a difference of mean returns is at least 0.2 standard deviations.

    Examples:
        >>> matters(0.1, 1.0), matters(-0.3, 1.0), matters(0.1, 0.0)
        (False, True, True)
    """
    return abs(gap) >= _SMALLEST_EFFECT * spread


def too_few(
    things: str, counts: Sequence[int], p_value: float, smallest: float, pairs: bool = False
) -> str:
    """Returns the verdict for a difference that is not significant.

    Args:
        things (str): plural noun for the repetitions, such as ``seeds``.
        counts (sequence of int): number of repetitions on each side.
        p_value (float): p-value of the exact test.
        smallest (float): smallest p-value that the test can give for these counts.
        pairs (bool): True if the repetitions were compared pair by pair.

    Examples:
        >>> too_few("seeds", [5, 5], 0.0625, 0.008)
        'this can be chance: 5 seeds each differ as much by chance in 1 of 16 cases'
        >>> too_few("seeds", [5, 5], 0.5625, 0.008)
        'this can be chance: 5 seeds each differ as much by chance (p = 0.56)'
    """
    few = sorted(set(counts))
    each = f"{few[0]} {things} each" if len(few) == 1 else f"{few[0]} to {few[-1]} {things}"
    cases = round(1 / p_value)
    whole = cases > 1 and math.isclose(cases * p_value, 1)
    often = f"in 1 of {cases:,} cases" if whole else f"(p = {p_value:.2g})"
    text = f"this can be chance: {each} differ as much by chance {often}"
    return text + needed(things, smallest, pairs)


def needed(things: str, smallest: float, pairs: bool = False) -> str:
    """Returns how many repetitions a verdict takes; an empty text if there are enough.

    Args:
        things (str): plural noun for the repetitions, such as ``seeds``.
        smallest (float): smallest p-value that the exact test can give.
        pairs (bool): True if the repetitions were compared pair by pair.

    Examples:
        >>> needed("seeds", 0.1), needed("seeds", 0.008)
        (', and a verdict takes at least 4 seeds each', '')
    """
    if smallest <= 1 - CONFIDENCE:
        return ""
    fewest = next(n for n in range(2, 10) if _smallest_for(n, pairs) <= 1 - CONFIDENCE)
    return f", and a verdict takes at least {fewest} {things} each"


def _smallest_for(n: int, pairs: bool) -> float:
    """Returns the smallest p-value of the exact test with n runs on each side."""
    return 2.0 ** (1 - n) if pairs else smallest_p_value(n, n)
