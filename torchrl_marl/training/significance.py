"""How probable something is: that a run is better, and that chance alone brings runs as far."""

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
_FINEST = 10_000  # steps from 0 to 1 of a distribution
_ALL_SIGNS = 14  # pairs of which all signs are tried


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
    won = []
    for one, other in zip(tasks, others):
        own, theirs = np.asarray(one, dtype=float), np.asarray(other, dtype=float)
        won.append(signs(own[..., :, None] - theirs[..., None, :]).mean((-2, -1)))
    return np.asarray(np.mean(won, 0))


def signs(gap: NDArray[np.float64]) -> NDArray[np.float64]:
    """Returns 1 where a number is positive, 0.5 where it is 0, else 0."""
    return (gap > 0) + 0.5 * (gap == 0)


def permutation_p_value(tasks: Scores, others: Scores) -> float:
    """Gives how often runs that do not differ come as far apart as these, in either direction.

    The exact two-sided test of :func:`probability_of_improvement`: each task's runs are dealt out
    to the two algorithms in every way. It knows what a bootstrap of few runs does not: that two
    runs are both better than two others in 1 of 3 cases, by chance.

    Args:
        tasks (list of arrays): the scores of one algorithm, ``[R]`` each.
        others (list of arrays): those of the other on the same tasks, ``[R']`` each.

    Reference: Mann and Whitney, 1947, https://doi.org/10.1214/aoms/1177730491.

    Examples:
        >>> permutation_p_value([[2.0, 3.0, 4.0]], [[-1.0, 0.0, 1.0]])
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


def smallest_p_value(counts: ArrayLike, others: ArrayLike) -> float:
    """Gives the least that :func:`permutation_p_value` can give of so many runs.

    Args:
        counts, others (list of int): runs of each task, of either algorithm.

    Examples:
        >>> round(smallest_p_value([2], [2]), 3), smallest_p_value([3], [3])
        (0.333, 0.1)
    """
    above = [np.arange(1.0, n + 1) for n in np.atleast_1d(counts)]
    return permutation_p_value(above, [-np.arange(1.0, n + 1) for n in np.atleast_1d(others)])


def sign_flip_p_value(gaps: ArrayLike) -> float:
    """Gives how often the mean of these differences is as far from 0, had each either sign.

    The exact two-sided test of pairs: all signs are tried. Of more than 14 pairs it is Student's
    test, which then says the same.

    Args:
        gaps (array): a pair's difference each, ``[R]``.

    Reference: Fisher, 1935, The Design of Experiments, section 21.

    Examples:
        >>> sign_flip_p_value([1.0, 2.0, 3.0]), sign_flip_p_value([1.0, -1.0])
        (0.25, 1.0)
    """
    own = np.asarray(gaps, dtype=float)
    if len(own) > _ALL_SIGNS:
        error = float(own.std(ddof=1)) / math.sqrt(len(own))
        if error == 0:
            return 1.0 if own[0] == 0 else 0.0
        return student_p_value(float(own.mean()) / error, len(own) - 1)
    signs = 1.0 - 2 * ((np.arange(2 ** len(own))[:, None] >> np.arange(len(own))) & 1)
    far = np.abs(signs @ own) >= abs(own.sum()) - 1e-9 * np.abs(own).sum()
    return float(far.mean())


def student_p_value(value: float, freedom: int) -> float:
    """Gives how often a number of Student's distribution is as far from 0, in either direction.

    Args:
        value (float): the number.
        freedom (int): degrees of freedom, 1 or more.

    Reference: Abramowitz and Stegun, 1964, 26.7.3 and 26.7.4.

    Examples:
        >>> round(student_p_value(12.706, 1), 4), round(student_p_value(-2.228, 10), 4)
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
