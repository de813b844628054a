"""Numbers, intervals and lists as a report's reader sees them."""

from __future__ import annotations

import math
from collections.abc import Sequence

from torchrl_marl.statistics import Estimate

__all__ = ["counted", "duration", "figure", "interval", "listed", "share", "with_interval"]


def figure(value: float | None) -> str:
    """Formats a number with about four significant digits, ``-`` for None and NaN.

    Examples:
        >>> figure(1500000), figure(-8.7654), figure(0.00004), figure(None)
        ('1,500,000', '-8.765', '4e-05', '-')
    """
    if value is None or not math.isfinite(value):
        return "-"
    if float(value).is_integer() or abs(value) >= 1000:
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


def interval(found: Estimate, of_share: bool = False) -> str:
    """Formats an estimate's interval, ``-`` where there is none.

    Examples:
        >>> interval(Estimate(1.5, 1.0, 2.0)), interval(Estimate(0.5), of_share=True)
        ('[1, 2]', '-')
    """
    write = share if of_share else figure
    return f"[{write(found.low)}, {write(found.high)}]" if found.has_interval else "-"


def with_interval(found: Estimate, of_share: bool = False) -> str:
    """Formats an estimate and, behind it, its interval.

    Examples:
        >>> with_interval(Estimate(1.5, 1.0, 2.0)), with_interval(Estimate(0.5), of_share=True)
        ('1.5 [1, 2]', '0.50')
    """
    value = share(found.value) if of_share else figure(found.value)
    return f"{value} {interval(found, of_share)}" if found.has_interval else value


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
