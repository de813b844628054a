"""Tables, pictures and slopes of ``growth.py``."""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import report

SEVERAL = 2  # points of a line that has a slope
SLOPE = "slope"
LEAST_RATIO = 30  # of the ends of a value axis
MANY_DECADES = 30  # square root of the ratio from which on only powers of 10 are marked

Line = list[tuple[dict[str, Any], dict[str, Any]]]  # points, with their results
Lines = dict[str, Line]


@dataclasses.dataclass(frozen=True)
class Measure:
    """A column of a table, and a panel of a picture.

    Args:
        name (str): key of a point's values.
        heading (str): text in tables and pictures.
        style (str): format of a value.
    """

    name: str
    heading: str
    style: str = ",.0f"


@dataclasses.dataclass(frozen=True)
class Sweep:
    """Sweep over one size, with the quantities that are measured.

    Args:
        grows (str): what a size counts.
        sizes (sequence of int): sizes by default.
        quick (sequence of int): sizes of a smoke test.
        scenarios (sequence of str): lines of the picture.
        text (str): what a point is.
        measures (sequence of Measure): columns.
        shared_cache (bool): whether the points of one call share a compiler cache.
    """

    grows: str
    sizes: Sequence[int]
    quick: Sequence[int]
    scenarios: Sequence[str]
    text: str
    measures: Sequence[Measure]
    shared_cache: bool = False


def slope(sizes: Sequence[float], values: Sequence[float | None]) -> float | None:
    """The exponent of growth: least squares on logarithms, over the upper half of the points.

    Args:
        sizes (sequence of float): what grows.
        values (sequence of float): what is measured; points without a positive value are left out.

    Returns:
        float: None if fewer than two points are left.

    Examples:
        >>> slope([1, 2, 4, 8], [5, 5, 16, 64])
        2.0
    """
    found = sorted((x, y) for x, y in zip(sizes, values) if y is not None and x > 0 and y > 0)
    upper = found[-max(SEVERAL, math.ceil(len(found) / 2)) :]
    if len({x for x, _ in upper}) < SEVERAL:
        return None
    logarithms = ([math.log(x) for x in column] for column in zip(*upper))
    return statistics.linear_regression(*logarithms).slope


def failure_text(point: Mapping[str, Any], result: Mapping[str, Any]) -> str:
    """Why a point has no values."""
    return {
        "time": f"not within {point['limit']:,.0f} s",
        "memory": f"not within {point['memory']:,.0f} GiB",
    }.get(result["failed"]) or f"failed: {result['message']}"


def measures_with_values(sweep: Sweep, lines: Lines) -> list[Measure]:
    """The measures of which there is a value."""
    values = [result.get("values", {}) for line in lines.values() for _, result in line]
    return [x for x in sweep.measures if any(row.get(x.name) is not None for row in values)]


def columns_of(line: Line, measure: Measure) -> tuple[list[int], list[Any]]:
    """Sizes and values of a line."""
    values = [result.get("values", {}).get(measure.name) for _, result in line]
    return [point["size"] for point, _ in line], values


def table(sweep: Sweep, line: Line, measures: Sequence[Measure]) -> str:
    """A row for each size, and the slopes."""
    rows = []
    for point, result in line:
        values = result.get("values", {})
        cells = [_cell(values.get(x.name), x.style) for x in measures]
        if not values:
            cells[0] = failure_text(point, result)
        rows.append([f"{point['size']:,}", *cells])
    slopes = [slope(*columns_of(line, x)) for x in measures]
    rows.append([SLOPE, *(_cell(x, ".2f") for x in slopes)])
    return report.markdown_table([sweep.grows, *(x.heading for x in measures)], rows)


def _cell(value: float | None, style: str) -> str:
    return "-" if value is None else format(value, style)


def draw(sweep: Sweep, lines: Lines, path: Path) -> None:
    """A panel for each measure, a line for each scenario with its slope, logarithmic axes."""
    import matplotlib

    matplotlib.use("agg")
    import matplotlib.pyplot as plt

    measures = measures_with_values(sweep, lines)
    n_columns = min(3, len(measures))
    n_rows = math.ceil(len(measures) / n_columns)
    size = (4 * n_columns, 3 * n_rows)
    figure, panels = plt.subplots(
        n_rows, n_columns, figsize=size, layout="constrained", squeeze=False
    )
    for axes in panels.flat[len(measures) :]:
        axes.set_visible(False)
    for axes, measure in zip(panels.flat, measures):
        _draw_panel(axes, measure, lines)
        axes.set_xlabel(sweep.grows)
    figure.savefig(path, dpi=130)
    plt.close(figure)


def _draw_panel(axes: Any, measure: Measure, lines: Lines) -> None:
    """Lines with their slopes; a constant one is seen to be constant."""
    from matplotlib.ticker import LogLocator

    axes.set(xscale="log", yscale="log")
    axes.set_title(measure.heading, fontsize=10)
    for name, line in lines.items():
        found = zip(*columns_of(line, measure))
        positive_points = [(x, y) for x, y in found if y is not None and y > 0]
        if positive_points:
            exponent = _cell(slope(*columns_of(line, measure)), ".2f")
            axes.plot(*zip(*positive_points), marker="o", markersize=3, label=f"{name} {exponent}")
    if not axes.lines:  # a graph that is not compiled has no kernels
        return
    low, high = axes.get_ylim()
    middle, half = math.sqrt(low * high), max(math.sqrt(high / low), LEAST_RATIO**0.5)
    axes.set_ylim(middle / half, middle * half)
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5) if half < MANY_DECADES else (1,)))
    axes.yaxis.set_major_formatter(lambda y, _: f"{y:,.10g}")
    axes.tick_params(axis="y", labelsize=8)
    sizes = sorted({point["size"] for line in lines.values() for point, _ in line})
    axes.set_xticks(sizes, [_short(x) for x in sizes], fontsize=8)
    axes.minorticks_off()
    axes.grid(color="#e4e4e4")
    axes.legend(fontsize=7, title=SLOPE, title_fontsize=7)


def _short(size: int) -> str:
    power = len(str(size)) - 1
    return f"1e{power}" if size == 10**power >= 10_000 else f"{size:,}"
