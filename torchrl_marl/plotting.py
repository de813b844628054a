"""Learning curves from run folders, with the seeds of a recipe as one line and its range."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from torchrl_marl.curves import Curves, read_run
from torchrl_marl.errors import CheckpointError, ConfigError, nearest
from torchrl_marl.experiments import experiments, world_name
from torchrl_marl.training.config import seed_folders
from torchrl_marl.training.drawing import check_matplotlib
from torchrl_marl.training.files import whole_file, writing

if TYPE_CHECKING:
    from matplotlib.artist import Artist
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["aggregate", "learning_curve"]

_REWARD = "/episode_reward"
_COLORS = ("#2a6fbb", "#d1662a", "#3a8f57", "#9a4fb0", "#b8902a", "#4f9fb0", "#b03a5b", "#5d4037")
_STYLES = ("-", "--", "-.")  # for lines beyond the number of colors
_GRAY = "#707070"
_RANGE = "range of seeds"
# Entries that mean the same in every color come last in the legend.
_SHARED = (_RANGE, "evaluation", "random policy", "VMAS heuristic")


@dataclass(frozen=True)
class _Line:
    """A column of the runs of one experiment."""

    name: str
    seeds: Sequence[Curves]
    column: str


def learning_curve(
    folders: Iterable[str | Path] | str | Path,
    key: str | None = None,
    path: str | Path | None = None,
) -> Figure:
    """Draws return over frames: training as a line, evaluation as dots, range over the seeds.

    Runs are seeds of one line if all settings that matter agree.

    Args:
        folders (list of paths): run folders, or such as hold the runs of several seeds.
        key (str, optional): a column of ``metrics.csv`` or ``evaluation.csv`` to draw instead.
        path (str or Path, optional): where to write the picture.

    Returns:
        matplotlib.figure.Figure: the picture, for a notebook.

    Raises:
        CheckpointError: a folder that is no run, or has no rows yet.
        ConfigError: an unknown ``key``, or a kind of file that matplotlib does not write.
        MissingExtraError: matplotlib is not installed.
        WriteError: the picture cannot be written.
    """
    check_matplotlib()
    folders = [folders] if isinstance(folders, (str, Path)) else list(folders)
    folders = [run for folder in folders for run in _runs_in(folder)]
    folders = list({Path(folder).resolve(): folder for folder in folders}.values())
    if not folders:
        raise ConfigError("no run folder is given, expected one or more; name them.")
    runs = [read_run(folder) for folder in folders]
    from matplotlib import pyplot, rc_context

    with rc_context(_style()):
        figure = pyplot.figure(figsize=(7.2, 4.2), layout="constrained")
        pyplot.close(figure)  # a notebook shows the returned figure, once
        _draw(figure, runs, key)
    if path is not None:
        _save(figure, Path(path))
    return figure


def _runs_in(folder: str | Path) -> Sequence[str | Path]:
    """Returns a run's folder as it is, or those of its seeds, or of a population's members."""
    seeds = seed_folders(folder) if isinstance(folder, (str, Path)) else []
    return seeds or [folder]


def aggregate(
    curves: Sequence[tuple[np.ndarray, np.ndarray]],
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Returns frames, mean, minimum and maximum of several seeds, on their common frames.

    Args:
        curves: per seed, frames in rising order and values, ``[rows]`` each.

    Examples:
        >>> frames, mean, low, high = aggregate([
        ...     (np.array([0.0, 10.0]), np.array([0.0, 10.0])),
        ...     (np.array([0.0, 20.0]), np.array([2.0, 22.0])),
        ... ])
        >>> frames.tolist(), mean.tolist(), high.tolist()
        ([0.0, 10.0], [1.0, 11.0], [2.0, 12.0])
    """
    known = [np.isfinite(x) & np.isfinite(y) for x, y in curves]
    curves = [(x[rows], y[rows]) for (x, y), rows in zip(curves, known) if rows.any()]
    if not curves:
        return (np.empty(0),) * 4  # type: ignore[return-value]
    grid = np.unique(np.concatenate([x for x, _ in curves]))
    start, end = max(x[0] for x, _ in curves), min(x[-1] for x, _ in curves)
    if start <= end:
        grid = grid[(grid >= start) & (grid <= end)]
    values = np.stack([np.interp(grid, x, y) for x, y in curves])
    return grid, values.mean(0), values.min(0), values.max(0)


def _draw(figure: Figure, runs: Sequence[Curves], key: str | None) -> None:
    panels = _panels(experiments(runs), key)
    height, width = figure.get_figheight(), figure.get_figwidth()
    figure.set_figwidth(max(width, 3.8 * len(panels)))
    legend: dict[str, Artist] = {}
    drawn = 0
    for axes, (group, lines) in zip(
        figure.subplots(1, len(panels), squeeze=False)[0], panels.items()
    ):
        drawn += _draw_panel(axes, lines, key, legend)
        if group:
            axes.set_title(group, loc="right")
    if not drawn:
        raise CheckpointError(
            f"{str(runs[0].folder)!r} has no value of {key or 'the return'} yet; "
            "wait until an episode has ended."
        )
    first = figure.axes[0]
    first.set_ylabel(key or "episode return")
    worlds = sorted({world_name(run) for run in runs})
    first.set_title(", ".join(worlds), loc="left")
    rows = _draw_legend(figure, legend)
    figure.set_figheight(height + 0.2 * rows)


def _panels(named: list[tuple[str, list[Curves]]], key: str | None) -> dict[str, list[_Line]]:
    """Returns the panels: by group where several experiments have the same groups, else one."""
    columns = [[key] if key else _reward_columns(seeds) for _, seeds in named]
    if len(named) > 1 and len(columns[0]) > 1 and all(c == columns[0] for c in columns):
        return {
            column.removesuffix(_REWARD): [_Line(name, seeds, column) for name, seeds in named]
            for column in columns[0]
        }
    lines = []
    for (name, seeds), own in zip(named, columns):
        for column in own:
            group = column.removesuffix(_REWARD)
            both = group if len(named) == 1 else f"{name}: {group}"
            lines.append(_Line(name if len(own) == 1 else both, seeds, column))
    return {"": lines}


def _draw_panel(
    axes: Axes, lines: Sequence[_Line], key: str | None, legend: dict[str, Artist]
) -> int:
    from matplotlib.ticker import EngFormatter

    drawn = 0
    for i, line in enumerate(lines):
        turn, color = divmod(i, len(_COLORS))
        style = {"color": _COLORS[color], "linestyle": _STYLES[turn % len(_STYLES)]}
        drawn += _draw_line(axes, line, style, legend)
        if key is None:
            drawn += _draw_dots(axes, line, _COLORS[color], legend)
    if key is None:
        _draw_references(axes, lines, legend)
    axes.set_xlabel("frames")
    axes.xaxis.set_major_formatter(EngFormatter(sep=""))
    axes.margins(x=0.02)
    return drawn


def _draw_line(axes: Axes, line: _Line, style: dict[str, Any], legend: dict[str, Artist]) -> bool:
    rows = _columns(line.seeds, line.column)
    frames, mean, low, high = aggregate(rows)
    if not len(frames):
        return False
    from matplotlib.patches import Patch

    name = line.name + (f" ({len(rows)} seeds)" if len(rows) > 1 else "")
    marker = "o" if len(frames) < 3 else None
    (legend[name],) = axes.plot(frames, mean, label=name, marker=marker, **style)
    if len(rows) > 1:
        axes.fill_between(frames, low, high, color=style["color"], alpha=0.18, linewidth=0)
        legend.setdefault(_RANGE, Patch(color=_GRAY, alpha=0.3, linewidth=0))
    return True


def _draw_dots(axes: Axes, line: _Line, color: str, legend: dict[str, Artist]) -> bool:
    tables = [seed.evaluation for seed in line.seeds]
    column = line.column if len(_reward_columns(line.seeds)) > 1 else "return_mean"
    rows = [(table["frames"], table[column]) for table in tables if column in table]
    frames, mean, low, high = aggregate(rows)
    if not len(frames):
        return False
    from matplotlib.lines import Line2D

    spread = np.stack([mean - low, high - mean]) if len(rows) > 1 else None
    dots: dict[str, Any] = {"marker": "o", "linestyle": "none", "markeredgecolor": "white"}
    axes.errorbar(
        frames, mean, yerr=spread, color=color, markersize=6, elinewidth=1.2, zorder=3, **dots
    )
    legend.setdefault("evaluation", Line2D([], [], color=_GRAY, markersize=7, **dots))
    return True


def _draw_references(axes: Axes, lines: Sequence[_Line], legend: dict[str, Artist]) -> None:
    """Draws each group's untrained policies, if all lines are of one world."""
    if len({world_name(line.seeds[0]) for line in lines}) > 1:
        return
    from matplotlib.lines import Line2D

    columns = list(dict.fromkeys(line.column for line in lines))
    for name, what, style in (
        ("return_random", "random policy", ":"),
        ("return_heuristic", "VMAS heuristic", "--"),
    ):
        for column in columns:
            of_column = [line for line in lines if line.column == column]
            known = [v for line in of_column for v in _summarized(line, name)]
            if not known:
                continue
            color = (
                _GRAY if len(columns) == 1 else _COLORS[lines.index(of_column[0]) % len(_COLORS)]
            )
            drawn: dict[str, Any] = {"linestyle": style, "linewidth": 1.2}
            label = None if what in legend else what
            axes.axhline(float(np.mean(known)), color=color, label=label, **drawn)
            legend.setdefault(what, Line2D([], [], color=_GRAY, **drawn))


def _summarized(line: _Line, name: str) -> list[float]:
    """Returns the figures of a line's group from its seeds' summaries."""
    if len(_reward_columns(line.seeds)) > 1:
        name = f"{line.column.removesuffix(_REWARD)}/{name}"
    found = [seed.summary.get(name) for seed in line.seeds]
    return [float(value) for value in found if isinstance(value, (int, float))]


def _draw_legend(figure: Figure, entries: dict[str, Artist]) -> int:
    """Draws the legend below the axes, in as many columns as fit; returns the number of rows."""
    shared = [name for name in _SHARED if name in entries]
    names = [*(name for name in entries if name not in shared), *shared]
    texts = ["\n".join(textwrap.wrap(name, 90)) for name in names]
    for columns in range(min(len(names), 4), 0, -1):
        legend = figure.legend(
            [entries[name] for name in names], texts, loc="outside lower center", ncols=columns
        )
        if columns == 1 or legend.get_window_extent().width < figure.bbox.width:
            break
        legend.remove()
    return -(-len(names) // columns)


def _reward_columns(seeds: Sequence[Curves]) -> list[str]:
    trained, evaluated = (
        [name for name in table if name.endswith(_REWARD)]
        for table in (seeds[0].training, seeds[0].evaluation)
    )
    return trained or (evaluated if len(evaluated) > 1 else ["return_mean"])


def _columns(seeds: Sequence[Curves], column: str) -> list[tuple[np.ndarray, np.ndarray]]:
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
    return rows


def _save(figure: Figure, path: Path) -> None:
    kinds = figure.canvas.get_supported_filetypes()
    if path.suffix[1:] not in kinds:
        raise ConfigError(
            f"the picture {str(path)!r} has no known ending, expected one of "
            f"{', '.join(sorted(kinds))}; name it {path.stem}.png."
        )
    with writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
    with whole_file(path, "wb") as file:
        figure.savefig(file, dpi=150, format=path.suffix[1:])


def _style() -> Any:
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
