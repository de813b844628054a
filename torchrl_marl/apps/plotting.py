"""Plots learning curves from run folders, with mean and range over the seeds."""

from __future__ import annotations

import csv
import os
import warnings
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from torchrl_marl.apps.pictures.drawing import (
    check_matplotlib,
    legend_below,
    new_figure,
    save_figure,
)
from torchrl_marl.apps.reports.curves import (
    REWARD,
    Curves,
    environment_name,
    group_by_experiment,
    read_run,
)
from torchrl_marl.apps.reports.grouping import (
    Progress,
    Record,
    find_runs,
    group_by_task,
    remove_duplicate_runs,
)
from torchrl_marl.errors import CheckpointError, ConfigError, nearest
from torchrl_marl.training.config import read_run_config, seed_folders
from torchrl_marl.training.files import explain_write_errors, open_atomically

if TYPE_CHECKING:
    from matplotlib.artist import Artist
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["aggregate", "learning_curve"]

_COLORS = ("#2a6fbb", "#d1662a", "#3a8f57", "#9a4fb0", "#b8902a", "#4f9fb0", "#b03a5b", "#5d4037")
_STYLES = ("-", "--", "-.")  # for lines beyond the number of colors
_MAX_COLUMNS = 4  # most panels in a row
_CSV_COLUMNS = ("task", "line", "column", "seeds", "frames", "mean", "least", "greatest")
_GRAY = "#707070"
_RANGE_LABEL = "range of seeds"
# Entries that are the same for all lines come last in the legend.
_SHARED_LABELS = (_RANGE_LABEL, "evaluation", "random policy", "VMAS heuristic")


@dataclass(frozen=True)
class _Line:
    """A line of a plot: one column of the tables, over all runs of an experiment."""

    name: str
    seeds: Sequence[Curves]
    column: str
    place: int
    """Index that selects the line's color."""

    @property
    def look(self) -> dict[str, Any]:
        """Color and style of the line."""
        turn, color = divmod(self.place, len(_COLORS))
        return {"color": _COLORS[color], "linestyle": _STYLES[turn % len(_STYLES)]}


@dataclass(frozen=True)
class _Panel:
    """The lines on one pair of axes; all belong to one task or to one group of agents."""

    task: str
    group: str
    lines: Sequence[_Line]


def learning_curve(
    folders: Iterable[str | Path] | str | Path,
    key: str | None = None,
    path: str | Path | None = None,
    table: str | Path | None = None,
) -> Figure:
    """Plots returns over frames: training as a line, evaluations as dots, seed range as a band.

    Runs with equal learning settings are the seeds of one line. Each environment has its own axes.

    Args:
        folders (list of paths): run folders, or folders above them.
        key (str, optional): column of ``metrics.csv`` or ``evaluation.csv`` to draw instead of the
            return.
        path (str or Path, optional): picture file to write.
        table (str or Path, optional): CSV file for the plotted data: a row for each line and
            point, with mean and range over the seeds.

    Returns:
        matplotlib.figure.Figure: the figure, for a notebook.

    Raises:
        CheckpointError: a folder is not a run folder, or its table has no rows yet.
        ConfigError: an unknown ``key``, or a file type that matplotlib cannot write.
        MissingExtraError: matplotlib is not installed.
        WriteError: the picture cannot be written.
    """
    check_matplotlib()
    runs = _read_runs([folders] if isinstance(folders, (str, Path)) else list(folders))
    panels = _make_panels(runs, key)
    from matplotlib import rc_context

    with rc_context(_plot_style()):
        figure = new_figure(7.2, 4.2)
        _draw_panels(figure, panels, runs, key)
    if path is not None:
        _save_plot(figure, Path(path))
    if table is not None:
        _write_table(Path(table), panels, key)
    return figure


def _read_runs(folders: Sequence[str | Path]) -> list[Curves]:
    """Reads runs.

    A broken run causes a warning if it was found below a folder, and an error if it was given
    directly.
    """
    for folder in folders:
        if not isinstance(folder, (str, os.PathLike)):
            read_run_config(folder)  # raises an error that names the expected type
        if (Path(folder) / "config.yaml").is_file() and not seed_folders(folder):
            read_run(folder)
    runs, left_out = find_runs(folders)
    nothing = Progress(*(np.empty(0),) * 4)
    records, copies = remove_duplicate_runs(
        [Record(run, nothing, nothing, False, ()) for run in runs]
    )
    for sentence in left_out + copies:
        warnings.warn(f"left out: {sentence}", stacklevel=3)
    return [record.run for record in records]


def aggregate(
    curves: Sequence[tuple[np.ndarray, np.ndarray]],
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Returns the frames that all seeds share, and mean, minimum and maximum of the values there.

    Seeds that share no frames have the values of each at its own frames.

    Args:
        curves: for each seed, a pair of ascending frames and values, ``[rows]`` each.

    Examples:
        >>> frames, mean, low, high = aggregate([
        ...     (np.array([0.0, 10.0]), np.array([0.0, 10.0])),
        ...     (np.array([0.0, 20.0]), np.array([2.0, 22.0])),
        ... ])
        >>> frames.tolist(), mean.tolist(), high.tolist()
        ([0.0, 10.0], [1.0, 11.0], [2.0, 12.0])
    """
    curves = _known_values(curves)
    if not curves:
        return (np.empty(0),) * 4  # type: ignore[return-value]
    grid = np.unique(np.concatenate([x for x, _ in curves]))
    start, end = max(x[0] for x, _ in curves), min(x[-1] for x, _ in curves)
    if start <= end:
        grid = grid[(grid >= start) & (grid <= end)]
    values = np.stack([np.interp(grid, x, y, left=np.nan, right=np.nan) for x, y in curves])
    return grid, np.nanmean(values, 0), np.nanmin(values, 0), np.nanmax(values, 0)


def _known_values(
    curves: Iterable[tuple[np.ndarray, np.ndarray]],
) -> list[tuple[np.ndarray, np.ndarray]]:
    """Returns the finite values of each seed; seeds without any are left out."""
    known = [(x, y, np.isfinite(x) & np.isfinite(y)) for x, y in curves]
    return [(x[rows], y[rows]) for x, y, rows in known if rows.any()]


def _draw_panels(
    figure: Figure, panels: Sequence[_Panel], runs: Sequence[Curves], key: str | None
) -> None:
    across = min(len(panels), _MAX_COLUMNS)
    down = -(-len(panels) // across)
    figure.set_figwidth(max(figure.get_figwidth(), 3.8 * across))
    figure.set_figheight(figure.get_figheight() if down == 1 else 3.2 * down)
    legend: dict[str, Artist] = {}
    drawn = 0
    for i, panel in enumerate(panels):
        axes = figure.add_subplot(down, across, i + 1)
        drawn += _draw_panel(axes, panel.lines, key, legend)
        axes.set_title(panel.task, loc="left")
        axes.set_title(panel.group, loc="right")
    if not drawn:
        raise CheckpointError(
            f"{str(runs[0].folder)!r} has no value of {key or 'the return'} yet; "
            "wait for the first episode to end."
        )
    figure.axes[0].set_ylabel(key or "episode return")
    shared = [name for name in _SHARED_LABELS if name in legend]
    names = [*(name for name in legend if name not in shared), *shared]
    legend_below(figure, {name: legend[name] for name in names})


def _make_panels(runs: Sequence[Curves], key: str | None) -> list[_Panel]:
    """Returns a panel for each task or, if there is only one task, for each group."""
    tasks = group_by_task(runs)
    if len(tasks) == 1:
        named = group_by_experiment(runs)
        title = ", ".join(sorted({environment_name(run) for run in runs}))
        groups = _lines_by_group(named, key)
        return [
            _Panel(title if i == 0 else "", group, lines)
            for i, (group, lines) in enumerate(groups.items())
        ]
    places: dict[str, int] = {}
    panels = []
    for task, algorithms in tasks.items():
        lines = [
            _Line(name, seeds, column, places.setdefault(name, len(places)))
            for name, seeds, column in _all_lines(list(algorithms.items()), key)
        ]
        panels.append(_Panel(task, "", lines))
    return panels


def _lines_by_group(
    named: list[tuple[str, list[Curves]]], key: str | None
) -> dict[str, list[_Line]]:
    """Returns a dict of the lines to plot: group -> lines.

    The lines are split by group if several experiments have the same groups. Otherwise all lines
    are in one list, under the key ``""``.
    """
    columns = [[key] if key else _reward_columns(seeds) for _, seeds in named]
    if len(named) > 1 and len(columns[0]) > 1 and all(c == columns[0] for c in columns):
        return {
            column.removesuffix(REWARD): [
                _Line(name, seeds, column, i) for i, (name, seeds) in enumerate(named)
            ]
            for column in columns[0]
        }
    return {"": [_Line(*line, i) for i, line in enumerate(_all_lines(named, key))]}


def _all_lines(
    named: Sequence[tuple[str, list[Curves]]], key: str | None
) -> Iterator[tuple[str, list[Curves], str]]:
    """Yields each line's name, seeds and column; with several groups, names contain the group."""
    for name, seeds in named:
        own = [key] if key else _reward_columns(seeds)
        for column in own:
            group = column.removesuffix(REWARD)
            both = group if len(named) == 1 else f"{name}: {group}"
            yield name if len(own) == 1 else both, seeds, column


def _draw_panel(
    axes: Axes, lines: Sequence[_Line], key: str | None, legend: dict[str, Artist]
) -> int:
    from matplotlib.ticker import EngFormatter

    drawn = 0
    for line in lines:
        drawn += _draw_line(axes, line, legend)
        if key is None:
            drawn += _draw_evaluations(axes, line, legend)
    if key is None:
        _draw_references(axes, lines, legend)
    axes.set_xlabel("frames")
    axes.xaxis.set_major_formatter(EngFormatter(sep=""))
    axes.margins(x=0.02)
    return drawn


def _draw_line(axes: Axes, line: _Line, legend: dict[str, Artist]) -> bool:
    rows, style = _column_curves(line.seeds, line.column), line.look
    frames, mean, low, high = aggregate(rows)
    if not len(frames):
        return False
    from matplotlib.patches import Patch

    name = line.name + (f" ({len(rows)} seeds)" if len(rows) > 1 else "")
    marker = "o" if len(frames) < 3 else None
    (drawn,) = axes.plot(frames, mean, label=name, marker=marker, **style)
    legend.setdefault(name, drawn)
    if len(rows) > 1:
        axes.fill_between(frames, low, high, color=style["color"], alpha=0.18, linewidth=0)
        legend.setdefault(_RANGE_LABEL, Patch(color=_GRAY, alpha=0.3, linewidth=0))
    return True


def _draw_evaluations(axes: Axes, line: _Line, legend: dict[str, Artist]) -> bool:
    rows = _evaluation_curves(line)
    frames, mean, low, high = aggregate(rows)
    if not len(frames):
        return False
    from matplotlib.lines import Line2D

    # The mean of equal numbers can be beyond them, by a rounding error.
    spread = np.stack([mean - low, high - mean]).clip(min=0) if len(rows) > 1 else None
    dots: dict[str, Any] = {"marker": "o", "linestyle": "none", "markeredgecolor": "white"}
    axes.errorbar(
        frames, mean, yerr=spread, color=line.look["color"], markersize=6, elinewidth=1.2,
        zorder=3, **dots,
    )  # fmt: skip
    legend.setdefault("evaluation", Line2D([], [], color=_GRAY, markersize=7, **dots))
    return True


def _draw_references(axes: Axes, lines: Sequence[_Line], legend: dict[str, Artist]) -> None:
    """Draws the returns of untrained policies, if all lines belong to one environment."""
    if len({environment_name(line.seeds[0]) for line in lines}) > 1:
        return
    from matplotlib.lines import Line2D

    columns = list(dict.fromkeys(line.column for line in lines))
    for name, what, style in (
        ("return_random", "random policy", ":"),
        ("return_heuristic", "VMAS heuristic", "--"),
    ):
        for column in columns:
            of_column = [line for line in lines if line.column == column]
            known = [v for line in of_column for v in _summary_values(line, name)]
            if not known:
                continue
            color = _GRAY if len(columns) == 1 else of_column[0].look["color"]
            drawn: dict[str, Any] = {"linestyle": style, "linewidth": 1.2}
            label = None if what in legend else what
            axes.axhline(float(np.mean(known)), color=color, label=label, **drawn)
            legend.setdefault(what, Line2D([], [], color=_GRAY, **drawn))


def _summary_values(line: _Line, name: str) -> list[float]:
    """Returns a number for a line's group, from the summaries of the line's seeds."""
    if len(_reward_columns(line.seeds)) > 1:
        name = f"{line.column.removesuffix(REWARD)}/{name}"
    found = [seed.summary.get(name) for seed in line.seeds]
    return [float(value) for value in found if isinstance(value, (int, float))]


def _evaluation_curves(line: _Line) -> list[tuple[np.ndarray, np.ndarray]]:
    """Returns a pair of frames and returns for each seed of a line that has evaluations."""
    tables = [seed.evaluation for seed in line.seeds]
    column = line.column if len(_reward_columns(line.seeds)) > 1 else "return_mean"
    rows = [(table["frames"], table[column]) for table in tables if column in table]
    return _known_values(rows)


def _reward_columns(seeds: Sequence[Curves]) -> list[str]:
    trained, evaluated = (
        [name for name in table if name.endswith(REWARD)]
        for table in (seeds[0].training, seeds[0].evaluation)
    )
    return trained or (evaluated if len(evaluated) > 1 else ["return_mean"])


def _column_curves(seeds: Sequence[Curves], column: str) -> list[tuple[np.ndarray, np.ndarray]]:
    rows = []
    for run in seeds:
        table = run.training if column in run.training else run.evaluation
        if column not in table:
            known = sorted({*run.training, *run.evaluation} - {"frames"})
            raise ConfigError(
                f"{str(run.folder)!r} has no column {column!r}; {nearest(column, known)}"
                f"it has {', '.join(known)}."
            )
        rows.append((table["frames"], table[column]))
    return _known_values(rows)


def _save_plot(figure: Figure, path: Path) -> None:
    kinds = figure.canvas.get_supported_filetypes()
    if path.suffix[1:] not in kinds:
        raise ConfigError(
            f"the picture {str(path)!r} has no known ending, expected one of "
            f"{', '.join(sorted(kinds))}; name it {path.stem}.png."
        )
    with explain_write_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
    save_figure(figure, path, kind=path.suffix[1:])


def _write_table(path: Path, panels: Sequence[_Panel], key: str | None) -> None:
    """Writes the plotted data as CSV, with a row for each line and point."""
    with open_atomically(path, newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(_CSV_COLUMNS)
        for panel in panels:
            task = panel.task or panels[0].task
            for line in panel.lines:
                curves = {line.column: _column_curves(line.seeds, line.column)}
                if key is None:
                    curves["evaluation"] = _evaluation_curves(line)
                for what, rows in curves.items():
                    for point in zip(*aggregate(rows)):
                        numbers = [f"{float(x):.10g}" for x in point]
                        writer.writerow([task, line.name, what, len(rows), *numbers])


def _plot_style() -> Any:
    return {
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.grid": True,
        "grid.color": "#e4e4e4",
        "axes.axisbelow": True,
        "axes.edgecolor": "#909090",
        "lines.linewidth": 2.0,
        "legend.edgecolor": "none",
        "legend.framealpha": 0.85,
        "legend.fontsize": 8.5,
        "legend.handlelength": 1.6,
        "legend.columnspacing": 1.4,
        "font.size": 10.5,
        "axes.titleweight": "bold",
    }
