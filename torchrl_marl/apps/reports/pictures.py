"""Draws the pictures of a report with matplotlib, for papers and Markdown."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from torchrl_marl.apps.pictures.drawing import (
    check_matplotlib,
    has_matplotlib,
    legend_below,
    new_figure,
)
from torchrl_marl.apps.reports.aggregates import (
    Aggregate,
    CurveWithInterval,
    TaskResult,
    default_curves,
)
from torchrl_marl.apps.reports.answers import format_range
from torchrl_marl.apps.reports.results import Report
from torchrl_marl.errors import MissingExtraError
from torchrl_marl.training.files import open_atomically
from torchrl_marl.training.statistics import Estimate

if TYPE_CHECKING:
    from matplotlib.artist import Artist
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["draw"]

# Colors of the page's light theme; algorithms beyond these get dashed lines.
_COLORS = (
    "#0080df", "#e94900", "#095638", "#a1729c", "#5e3e00", "#412fd1", "#40445c", "#c46a44",
)  # fmt: skip
_LINE_STYLES = ("-", "--", ":", "-.")
_MAX_COLUMNS = 3


def draw(report: Report, folder: Path) -> list[str]:
    """Draws the curves of all tasks, and the results over several tasks.

    Args:
        report (Report): the results.
        folder (Path): output folder.

    Returns:
        list of str: names of the files written; empty without a working matplotlib.

    Raises:
        WriteError: a picture cannot be written.
    """
    if not has_matplotlib():
        return []
    try:
        check_matplotlib()
    except MissingExtraError as error:
        warnings.warn(f"no pictures are drawn: {error}", stacklevel=2)
        return []
    names = []
    for name, figure in _figures(report):
        with open_atomically(folder / name, "wb", at_once=True) as file:
            figure.savefig(file, dpi=130, format="png")
        names.append(name)
    return names


def _figures(report: Report) -> Iterator[tuple[str, Figure]]:
    """Yields the file name and the matplotlib figure of each picture."""
    order = {name: i for i, name in enumerate(report.algorithms)}
    for i, found in enumerate(report.aggregates):
        yield f"together{i + 1 if i else ''}.png", _aggregate_figure(found, order)
    yield "curves.png", _curves_figure(report, order)


def _empty_figure(panels: int, across: int = _MAX_COLUMNS) -> tuple[Figure, list[Axes]]:
    across = min(panels, across)
    down = -(-panels // across)
    figure = new_figure(4.2 * across, 3.1 * down + 0.4)
    axes = [figure.add_subplot(down, across, i + 1) for i in range(panels)]
    for one in axes:
        one.spines[["top", "right"]].set_visible(False)
        one.grid(color="#e9ecf0")
        one.set_axisbelow(True)
    return figure, axes


def _line_style(order: int) -> dict[str, Any]:
    turn, color = divmod(order, len(_COLORS))
    return {"color": _COLORS[color], "linestyle": _LINE_STYLES[turn % len(_LINE_STYLES)]}


def _draw_line(
    axes: Axes, name: str, order: int, x: np.ndarray, line: CurveWithInterval | Estimate
) -> None:
    marker = "o" if len(x) < 3 else None
    axes.plot(x, np.asarray(line.value), label=name, marker=marker, **_line_style(order))
    if isinstance(line, CurveWithInterval) or line.has_interval:
        color = _line_style(order)["color"]
        axes.fill_between(x, line.low, line.high, color=color, alpha=0.16, lw=0)


def _curves_figure(report: Report, order: dict[str, int]) -> Figure:
    figure, axes = _empty_figure(len(report.tasks))
    for one, result in zip(axes, report.tasks):
        _draw_task(one, result, order)
    counts = [len(team.runs) for result in report.tasks for team in result.teams.values()]
    _draw_legend(figure, axes, counts)
    return figure


def _draw_task(axes: Axes, result: TaskResult, order: dict[str, int]) -> None:
    from matplotlib.ticker import EngFormatter

    measured = default_curves(result)
    for name, team in result.teams.items():
        line = team.evaluation if measured == "evaluation" else team.training
        if line is not None:
            _draw_line(axes, name, order[name], line.frames, line)
    if result.reference.random is not None:
        axes.axhline(result.reference.random, color="#59616e", linestyle=(0, (1, 3)), lw=1)
    axes.set_title(result.task.name, loc="left", fontsize=10.5)
    axes.set_xlabel("frames")
    axes.xaxis.set_major_formatter(EngFormatter(sep=""))


def _aggregate_figure(found: Aggregate, order: dict[str, int]) -> Figure:
    figure, (iqm, curves, profiles) = _empty_figure(3)
    for place, name in enumerate(reversed(found.algorithms)):
        one, color = found.estimates[name]["IQM"], _line_style(order[name])["color"]
        if one.has_interval:
            iqm.barh(place, one.high - one.low, left=one.low, height=0.5, color=color, alpha=0.4)
        iqm.plot([one.value] * 2, [place - 0.32, place + 0.32], color=color, lw=2.5)
        if name in found.curves:
            _draw_line(curves, name, order[name], 100 * found.share, found.curves[name])
        _draw_line(profiles, name, order[name], found.thresholds, found.profiles[name])
    iqm.use_sticky_edges = False
    iqm.set_yticks(range(len(found.algorithms)), found.algorithms[::-1])
    for axes, title, label in (
        (iqm, "IQM of normalized scores", "normalized score"),
        (curves, "sample efficiency (IQM)", "% of each task's frames"),
        (profiles, "profile: share of runs above", "normalized score"),
    ):
        axes.set_title(title, loc="left", fontsize=10.5)
        axes.set_xlabel(label)
    _draw_legend(figure, [profiles], [n for runs in found.seeds.values() for n in runs])
    return figure


def _draw_legend(figure: Figure, axes: list[Axes], seeds: list[int]) -> None:
    """Draws the legend below the axes, including the meaning of bands and bars."""
    found: dict[str, Artist] = {}
    for one in axes:
        handles, labels = one.get_legend_handles_labels()
        found |= dict(zip(labels, handles))
    entries = {name: found[name] for name in sorted(found)}
    legend_below(figure, entries, f"IQM and 95 % intervals over {format_range(seeds, 'seed')}")
    figure.legends[0].set_frame_on(False)
