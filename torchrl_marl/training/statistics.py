"""What a few runs say, and how sure it is: estimates, differences, and the sentences on them."""

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
    "by_chance",
    "difference_of_runs",
    "estimate",
    "explained",
    "interquartile_mean",
    "matters",
    "mean",
    "median",
    "optimality_gap",
    "paired_difference",
    "permutation_p_value",
    "probability_of_improvement",
    "score_distribution",
    "sign_flip_p_value",
    "smallest_p_value",
    "student_p_value",
    "student_quantile",
    "undecided",
]

CONFIDENCE = 0.95
"""Share of repetitions in which an interval is meant to hold the truth."""
RESAMPLES = 5000
"""How often runs are drawn anew, with replacement."""

_SMALL = 0.2  # standard deviations that make a difference worth a sentence
LARGEST_CHUNK = 4_000_000  # numbers that are drawn at once
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
        _check_scores(tasks)
    found = Estimate(
        _plain(statistic(*players)),
        confidence=confidence,
        runs=tuple(task.shape[-1] for tasks in players for task in tasks),
    )
    if min(found.runs) < 2:
        reason = "one run says nothing about how much runs differ"
        return dataclasses.replace(found, why_none=reason)
    tail = (1 - confidence) / 2
    drawn = _resampled(statistic, players, resamples, seed)
    low, high = np.quantile(drawn, (tail, 1 - tail), axis=0)
    return dataclasses.replace(found, low=_plain(low), high=_plain(high))


def _task_means(tasks: Scores) -> NDArray[np.float64]:
    return np.stack([np.asarray(task, dtype=float).mean(-1) for task in tasks], -1)


def _resampled(
    statistic: Statistic, players: Sequence[Sequence[Any]], resamples: int, seed: int
) -> NDArray[np.float64]:
    """Returns a statistic of each resample, of which every task's runs are drawn anew."""
    random = np.random.default_rng(seed)
    size = sum(task.size for tasks in players for task in tasks)
    chunk = max(1, min(resamples, LARGEST_CHUNK // size))

    def resampled(task: NDArray[np.float64], count: int) -> NDArray[np.float64]:
        """Returns ``[count, *L, R]``."""
        runs = task.shape[-1]
        return np.moveaxis(task[..., random.integers(runs, size=(count, runs))], -2, 0)

    found = []
    for first in range(0, resamples, chunk):
        count = min(chunk, resamples - first)
        found.append(statistic(*([resampled(task, count) for task in t] for t in players)))
    return np.concatenate(found)


def _check_scores(tasks: Sequence[NDArray[np.float64]]) -> None:
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


@dataclass(frozen=True)
class Paired:
    """How the scores of one player differ from another's on the same starts."""

    difference: Estimate
    """Mean of first less second, with Student's interval."""
    probability: float | None
    """Share of resamples of the starts in which the first's mean is greater, half of ties; None
    for one pair, and of several runs a side."""
    won: float
    """Share of starts on which the first's score is greater, with half of ties."""
    chance: float | None = None
    """How often chance alone brings the two as far apart: the exact test."""
    least: float | None = None
    """The least that :attr:`chance` can be, of so many."""

    @property
    def distinguishable(self) -> bool:
        """Whether the interval leaves out 0 and chance alone hardly comes as far."""
        found = self.difference
        if not found.has_interval or self.chance is None or found.low <= 0 <= found.high:
            return False
        return self.chance <= 1 - CONFIDENCE


def paired_difference(
    first: ArrayLike,
    second: ArrayLike,
    *,
    confidence: float = CONFIDENCE,
    resamples: int = RESAMPLES,
    seed: int = 0,
) -> Paired:
    """Compares the scores of two players on the same starts, start by start.

    Args:
        first (array): scores, such as returns of episodes, ``[R]``.
        second (array): the other's, from the same starts, ``[R]``.

    Keyword Args:
        confidence (float): of the interval.
        resamples, seed (int): of :attr:`Paired.probability`.

    Raises:
        ConfigError: unlike numbers of scores, none, or some that are not finite.

    Examples:
        >>> found = paired_difference([3.0, 5.0, 9.0], [1.0, 4.0, 9.0])
        >>> float(found.difference.value), round(found.won, 3), found.chance
        (1.0, 0.833, 0.5)
    """
    one, other = np.asarray(first, dtype=float), np.asarray(second, dtype=float)
    if one.shape != other.shape or one.ndim != 1:
        raise ConfigError(
            f"scores of shapes {one.shape} and {other.shape} are no pairs, expected one number for "
            "each start from both; play the same starts."
        )
    gap = one - other
    _check_scores([gap])
    won = float(signs(gap).mean())
    if len(gap) < 2:
        return Paired(Estimate(float(gap[0]), why_none=_ONE_START), None, won)
    found = _interval(float(gap.mean()), _of_mean(gap), len(gap) - 1, confidence, (len(gap),))
    means = _resampled(lambda tasks: tasks[0].mean(-1), [[gap]], resamples, seed)
    return Paired(
        found, float(signs(means).mean()), won, sign_flip_p_value(gap), _least(len(gap), True)
    )


def difference_of_runs(
    first: ArrayLike,
    second: ArrayLike,
    *,
    by_seed: bool = False,
    confidence: float = CONFIDENCE,
) -> Paired:
    """Compares the mean returns of two algorithms, of several runs each on the same starts.

    The interval is Student's, of what runs and starts both leave open: the variances of the two
    sides' runs and of the starts' differences add up, and the degrees of freedom are the fewest of
    the three. So it is never too narrow where returns are normally distributed, however unlike the
    two variances are. The chance is that of :func:`permutation_p_value`, or, by seed, of
    :func:`sign_flip_p_value`.

    Args:
        first, second (array): returns, ``[R, n]`` and ``[R', n]``.

    Keyword Args:
        by_seed (bool): the runs are pairs, in this order.
        confidence (float): of the interval.

    Raises:
        ConfigError: sides of other starts, or pairs of unlike many runs.

    Reference: Mickey and Brown, 1966, https://doi.org/10.1214/aoms/1177699514.

    Reduces to: :func:`paired_difference` of the means, where a side is a single run: then it is
        about these runs.

    Examples:
        >>> one, other = [[1.0, 3.0], [2.0, 4.0]], [[0.0, 2.0], [0.0, 1.0]]
        >>> found = difference_of_runs(one, other)
        >>> found.difference.value, round(found.chance, 3)
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
    of_runs = _of_mean(ours - theirs) if by_seed else _of_mean(ours) + _of_mean(theirs)
    freedom = min(len(one), len(other), gap.size) - 1
    runs = (len(one), len(other))
    found = _interval(value, of_runs + _of_mean(gap), freedom, confidence, runs)
    if by_seed:
        return Paired(found, None, won, sign_flip_p_value(ours - theirs), _least(len(ours), True))
    chance = permutation_p_value([ours], [theirs])
    return Paired(found, None, won, chance, smallest_p_value(len(ours), len(theirs)))


_ONE_START = "one start says nothing about others"


def _of_mean(values: NDArray[np.float64]) -> float:
    """The variance of a mean."""
    return float(values.var(ddof=1)) / len(values)


def _interval(
    value: float, variance: float, freedom: int, confidence: float, runs: tuple[int, ...]
) -> Estimate:
    half = student_quantile(confidence, freedom) * math.sqrt(variance)
    return Estimate(value, value - half, value + half, confidence, runs)


def _check_runs(one: NDArray[Any], other: NDArray[Any], by_seed: bool) -> None:
    if one.ndim != 2 or other.ndim != 2 or one.shape[1] != other.shape[1]:
        raise ConfigError(
            f"returns of shapes {one.shape} and {other.shape} are no two sides, expected [runs, "
            "starts] of the same starts; play the same starts."
        )
    if by_seed and len(one) != len(other):
        raise ConfigError(
            f"the sides have {len(one)} and {len(other)} runs, expected as many for pairs by seed."
        )


def undecided(things: str) -> str:
    """Returns what is said where an interval leaves both open.

    Examples:
        >>> undecided("episodes")
        'these episodes cannot tell them apart'
    """
    return f"these {things} cannot tell them apart"


def explained(thing: str) -> str:
    """Returns what is said where chance alone hardly comes as far.

    Examples:
        >>> explained("seeds")
        'more than chance among seeds explains'
    """
    return f"more than chance among {thing} explains"


def matters(gap: float, spread: float) -> bool:
    """Whether a difference of mean returns is large beside the episodes' standard deviation.

    Examples:
        >>> matters(0.1, 1.0), matters(-0.3, 1.0), matters(0.1, 0.0)
        (False, True, True)
    """
    return abs(gap) >= _SMALL * spread


def by_chance(
    things: str, counts: Sequence[int], chance: float, least: float, pairs: bool = False
) -> str:
    """Returns what is said where so few come as far apart by chance.

    Args:
        things (str): what was counted, ``seeds``.
        counts (sequence of int): how many there are of each side.
        chance, least (float): of the exact test, and the least that it can give of so many.
        pairs (bool): they are compared pair by pair.

    Examples:
        >>> by_chance("seeds", [5, 5], 0.0625, 0.008)
        'so few cannot tell: 5 seeds each come as far apart by chance in 1 of 16 cases'
    """
    few = sorted(set(counts))
    each = f"{few[0]} {things} each" if len(few) == 1 else f"{few[0]} to {few[-1]} {things}"
    words = f"so few cannot tell: {each} come as far apart by chance in 1 of {1 / chance:.3g} cases"
    if least <= 1 - CONFIDENCE:
        return words
    fewest = next(n for n in range(2, 10) if _least(n, pairs) <= 1 - CONFIDENCE)
    return f"{words}, and {fewest} {things} each are the fewest that can tell"


def _least(n: int, pairs: bool) -> float:
    """The least chance that the exact test of so many runs of each side can give."""
    return 2.0 ** (1 - n) if pairs else smallest_p_value(n, n)
