"""Probability of improvement, exact tests, and Student's distribution.

Shapes: L any leading dims, R and R' runs of the two algorithms, or R pairs of scores.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import ArrayLike, NDArray

from torchrl_marl.errors import ConfigError

__all__ = [
    "permutation_p_value",
    "probability_of_improvement",
    "sign_flip_p_value",
    "signs",
    "smallest_p_value",
    "student_p_value",
    "student_quantile",
]

Scores = Sequence[ArrayLike]
_MAX_GRID_STEPS = 10_000  # largest number of steps of a discrete distribution on [0, 1]
_MAX_ENUMERATED_PAIRS = 14  # largest number of pairs for which all signs are enumerated


def probability_of_improvement(tasks: Scores, others: Scores) -> NDArray[np.float64]:
    """Returns the probability that a run beats another algorithm's run, averaged over tasks.

    This is the Mann-Whitney statistic divided by the number of pairs. Ties count half.

    Args:
        tasks (list of arrays): first algorithm's scores in each task, ``[*L, R]``.
        others (list of arrays): second algorithm's scores in the same tasks, ``[*L, R']``.

    Raises:
        ConfigError: the numbers of tasks differ.

    Examples:
        >>> float(probability_of_improvement([[2.0, 3.0]], [[1.0, 2.0]]))
        0.875
    """
    if len(tasks) != len(others):
        raise ConfigError(
            f"the first algorithm has scores of {len(tasks)} tasks and the second of "
            f"{len(others)}, expected the same tasks; compare on those that both have."
        )
    won = []
    for one, other in zip(tasks, others):
        own, theirs = np.asarray(one, dtype=float), np.asarray(other, dtype=float)
        won.append(signs(own[..., :, None] - theirs[..., None, :]).mean((-2, -1)))
    return np.asarray(np.mean(won, 0))


def signs(gap: NDArray[np.float64]) -> NDArray[np.float64]:
    """Returns 1 for positive numbers, 0.5 for 0, and 0 for negative numbers."""
    return (gap > 0) + 0.5 * (gap == 0)


def permutation_p_value(tasks: Scores, others: Scores) -> float:
    """Returns the p-value of the exact two-sided test of :func:`probability_of_improvement`.

    The test enumerates all ways to assign each task's runs to the two algorithms. It is valid even
    for few runs, for which a bootstrap interval would be too narrow. With two runs each, even a
    perfect separation has a p-value of 1/3.

    Args:
        tasks (list of arrays): first algorithm's scores in each task, ``[R]``.
        others (list of arrays): second algorithm's scores in the same tasks, ``[R']``.

    Reference: Mann and Whitney, 1947, https://doi.org/10.1214/aoms/1177730491.

    Examples:
        >>> permutation_p_value([[2.0, 3.0, 4.0]], [[-1.0, 0.0, 1.0]])
        0.1
    """
    shares = [_share_distribution(np.asarray(x), np.asarray(y)) for x, y in zip(tasks, others)]
    whole = math.lcm(*(len(own) - 1 for own in shares))
    steps = min(whole, _MAX_GRID_STEPS)
    off = 0.01 if steps == whole else len(shares) / 2  # tolerance, larger if rounded
    probability = np.ones(1)
    for own in shares:
        places = np.rint(np.arange(len(own)) * (steps / (len(own) - 1))).astype(int)
        before, probability = probability, np.zeros(len(probability) + steps)
        for place, weight in zip(places, own):
            probability[place : place + len(before)] += weight * before
    middle = (len(probability) - 1) / 2
    found = float(probability_of_improvement(tasks, others)) * 2 * middle
    far = np.abs(np.arange(len(probability)) - middle) >= abs(found - middle) - off
    return round(float(probability[far].sum()), 12)


def _share_distribution(
    own: NDArray[np.float64], other: NDArray[np.float64]
) -> NDArray[np.float64]:
    """Returns the null distribution of the number of pairs won, in steps of half a pair."""
    if len(own) > len(other):
        return _share_distribution(other, own)[::-1]
    together, n = np.concatenate([own, other]), len(own)
    # Ranks are doubled, to count tied pairs (half a win) in whole numbers.
    ranks = (np.sign(together[:, None] - together).sum(1) + len(together) + 1).astype(int)
    ways = np.zeros((n + 1, int(np.sort(ranks)[-n:].sum()) + 1))
    ways[0, 0] = 1
    for rank in ranks:
        ways[1:, rank:] += ways[:-1, : ways.shape[1] - rank]
    found = ways[n, n * (n + 1) :]
    found = np.pad(found, (0, 2 * n * len(other) + 1 - len(found)))
    return np.asarray(found / found.sum())


def smallest_p_value(counts: ArrayLike, others: ArrayLike) -> float:
    """Returns the smallest possible :func:`permutation_p_value` for the given numbers of runs.

    Args:
        counts, others (list of int): numbers of runs per task, of the first and second algorithm.

    Examples:
        >>> round(smallest_p_value([2], [2]), 3), smallest_p_value([3], [3])
        (0.333, 0.1)
    """
    above = [np.arange(1.0, n + 1) for n in np.atleast_1d(counts)]
    return permutation_p_value(above, [-np.arange(1.0, n + 1) for n in np.atleast_1d(others)])


def sign_flip_p_value(gaps: ArrayLike) -> float:
    """Returns the p-value of the exact two-sided test of paired differences.

    The test enumerates all combinations of signs of the differences. For more than 14 pairs,
    Student's test is used instead, which then gives practically the same result.

    Args:
        gaps (array): difference of each pair, ``[R]``.

    Reference: Fisher, 1935, The Design of Experiments, section 21.

    Examples:
        >>> sign_flip_p_value([1.0, 2.0, 3.0]), sign_flip_p_value([1.0, -1.0])
        (0.25, 1.0)
    """
    own = np.asarray(gaps, dtype=float)
    if len(own) > _MAX_ENUMERATED_PAIRS:
        error = float(own.std(ddof=1)) / math.sqrt(len(own))
        if error == 0:
            return 1.0 if own[0] == 0 else 0.0
        return student_p_value(float(own.mean()) / error, len(own) - 1)
    signs = 1.0 - 2 * ((np.arange(2 ** len(own))[:, None] >> np.arange(len(own))) & 1)
    far = np.abs(signs @ own) >= abs(own.sum()) - 1e-9 * np.abs(own).sum()
    return float(far.mean())


def student_p_value(value: float, freedom: int) -> float:
    """Returns the two-sided p-value of a t statistic under Student's distribution.

    Args:
        value (float): value of the t statistic.
        freedom (int): degrees of freedom, 1 or more.

    Reference: Abramowitz and Stegun, 1964, 26.7.3 and 26.7.4.

    Examples:
        >>> round(student_p_value(12.706, 1), 4), round(student_p_value(-2.228, 10), 4)
        (0.05, 0.05)
    """
    return 1 - _student_share_within(math.atan(abs(value) / math.sqrt(freedom)), freedom)


def student_quantile(confidence: float, freedom: int) -> float:
    """Returns the half-width of the interval around 0 with a given share of Student's distribution.

    Args:
        confidence (float): share of the distribution, below 1.
        freedom (int): degrees of freedom, 1 or more.

    Examples:
        >>> round(student_quantile(0.95, 1), 3), round(student_quantile(0.95, 10), 3)
        (12.706, 2.228)
    """
    low, high = 0.0, math.pi / 2
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (
            (middle, high) if _student_share_within(middle, freedom) < confidence else (low, middle)
        )
    return math.tan(low) * math.sqrt(freedom)


def _student_share_within(angle: float, freedom: int) -> float:
    """Returns the share of Student's distribution within ``sqrt(freedom) * tan(angle)`` of 0."""
    sine, cosine = math.sin(angle), math.cos(angle)
    if freedom % 2 == 0:
        return sine * sum(_series_terms(cosine, 1.0, range(1, freedom - 2, 2)))
    inner = (
        sine * sum(_series_terms(cosine, cosine, range(2, freedom - 2, 2))) if freedom > 1 else 0.0
    )
    return 2 / math.pi * (angle + inner)


def _series_terms(cosine: float, first: float, steps: range) -> Iterator[float]:
    yield first
    for step in steps:
        first *= step / (step + 1) * cosine**2
        yield first
