"""Sentences on which of two is better: the same words for a comparison and for a report."""

from __future__ import annotations

from collections.abc import Sequence

from torchrl_marl.statistics.chance import least_chance
from torchrl_marl.statistics.estimates import CONFIDENCE

__all__ = ["by_chance", "explained", "undecided"]


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
