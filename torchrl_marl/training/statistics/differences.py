"""Differences between runs, and the sentences on them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from torchrl_marl.errors import ConfigError
from torchrl_marl.training.statistics.estimates import (
    CONFIDENCE,
    LARGEST_CHUNK,
    RESAMPLES,
    Estimate,
    check_scores,
    drawn_anew,
    exact_chance,
    least_chance,
    sign_flip_chance,
    signs,
    student_quantile,
)

__all__ = [
    "Paired",
    "by_chance",
    "difference_of_runs",
    "explained",
    "paired_difference",
    "undecided",
]


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
    def told_apart(self) -> bool:
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
    check_scores([gap])
    won = float(signs(gap).mean())
    if len(gap) < 2:
        return Paired(Estimate(float(gap[0]), why_none=_ONE_START), None, won)
    found = _interval(float(gap.mean()), _of_mean(gap), len(gap) - 1, confidence, (len(gap),))
    random = np.random.default_rng(seed)
    chunk = max(1, min(resamples, LARGEST_CHUNK // gap.size))
    counts = [min(chunk, resamples - first) for first in range(0, resamples, chunk)]
    means = np.concatenate([drawn_anew(gap, count, random).mean(-1) for count in counts])
    return Paired(found, float(signs(means).mean()), won, *_of_signs(gap))


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
    two variances are. The chance is that of :func:`exact_chance`, or, by seed, of
    :func:`sign_flip_chance`.

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
        return Paired(found, None, won, *_of_signs(ours - theirs))
    chance = exact_chance([ours], [theirs])
    return Paired(found, None, won, chance, least_chance(len(ours), len(theirs)))


_ONE_START = "one start says nothing about others"


def _of_mean(values: NDArray[np.float64]) -> float:
    """The variance of a mean."""
    return float(values.var(ddof=1)) / len(values)


def _interval(
    value: float, variance: float, freedom: int, confidence: float, runs: tuple[int, ...]
) -> Estimate:
    half = student_quantile(confidence, freedom) * math.sqrt(variance)
    return Estimate(value, value - half, value + half, confidence, runs)


def _of_signs(gaps: NDArray[np.float64]) -> tuple[float, float]:
    return sign_flip_chance(gaps), 2.0 ** (1 - len(gaps))


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
    return f"{words}, and {_fewest(pairs)} {things} each are the fewest that can tell"


def _fewest(pairs: bool) -> int:
    """How many runs of each side the exact test needs to tell any two apart."""
    counts = range(2, 10)
    least = {n: 2.0 ** (1 - n) if pairs else least_chance(n, n) for n in counts}
    return next(n for n in counts if least[n] <= 1 - CONFIDENCE)
