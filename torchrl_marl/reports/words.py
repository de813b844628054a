"""Numbers, intervals and lists as a report's reader sees them."""

from __future__ import annotations

import math
from collections.abc import Sequence

from torchrl_marl.statistics import Estimate

__all__ = ["counted", "duration", "figure", "listed", "share", "with_interval"]


def figure(value: float | None) -> str:
    """Formats a number with about four significant digits, ``-`` for None and NaN.

    Examples:
        >>> figure(1500000), figure(-8.7654), figure(0.00004), figure(None)
        ('1,500,000', '-8.765', '4e-05', '-')
    """
    if value is None or not math.isfinite(value):
        return "-"
    if abs(value) < 1e12 and (float(value).is_integer() or abs(value) >= 1000):
        return f"{value:,.0f}"
    return f"{value:.4g}"


def share(value: float | None) -> str:
    """Formats a normalized score or a probability with two decimals.

    Examples:
        >>> share(0.918), share(-0.001), share(None)
        ('0.92', '0.00', '-')
    """
    if value is None or not math.isfinite(value):
        return "-"
    return f"{value + 0.0 if abs(value) >= 0.005 else 0.0:.2f}"


def with_interval(found: Estimate, of_share: bool = False) -> str:
    """Formats an estimate and its interval, with as many decimals as the interval has a use for.

    Examples:
        >>> with_interval(Estimate(41.2345, 36.054, 44.87)), with_interval(Estimate(0.5), True)
        ('41.2 [36.1, 44.9]', '0.50')
    """
    if not found.has_interval:
        return share(found.value) if of_share else figure(found.value)
    if of_share:
        value, low, high = (share(x) for x in (found.value, found.low, found.high))
    else:
        width = found.high - found.low
        digits = max(0, 1 - math.floor(math.log10(width))) if 0 < width < 1e12 else None
        value, low, high = (_rounded(x, digits) for x in (found.value, found.low, found.high))
    return f"{value} [{low}, {high}]"


def _rounded(value: float, digits: int | None) -> str:
    return figure(value) if digits is None or digits > 6 else f"{value:,.{digits}f}"


def duration(seconds: float | None) -> str:
    """Formats a time.

    Examples:
        >>> duration(8.25), duration(754), duration(9000)
        ('8.2 s', '12.6 min', '2.5 h')
    """
    if seconds is None or not math.isfinite(seconds):
        return "-"
    for size, unit in ((3600, "h"), (60, "min")):
        if seconds >= 1.5 * size:
            return f"{seconds / size:.1f} {unit}"
    return f"{seconds:.1f} s"


def counted(number: int, thing: str) -> str:
    """Formats a number of things.

    Examples:
        >>> counted(1, "run"), counted(3, "seed")
        ('1 run', '3 seeds')
    """
    return f"{number:,} {thing}{'s' * (number != 1)}"


def listed(names: Sequence[str], most: int = 6) -> str:
    """Joins names with commas and `and`; many are cut.

    Examples:
        >>> listed(["a", "b", "c"]), listed(["a", "b", "c"], most=2)
        ('a, b and c', 'a, b and 1 more')
    """
    names = list(names)
    if len(names) > most:
        names = [*names[:most], f"{len(names) - most} more"]
    return " and ".join([", ".join(names[:-1]), names[-1]] if len(names) > 1 else names)
