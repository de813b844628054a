"""Learning curves from run folders, with the seeds of a recipe as one line and its range."""

from __future__ import annotations

import csv
import dataclasses
import importlib.util
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from torchrl_marl.errors import CheckpointError, ConfigError, MissingExtraError, nearest
from torchrl_marl.schema import flatten
from torchrl_marl.training.config import read_run_config
from torchrl_marl.training.files import whole_file, writing

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["Curves", "aggregate", "learning_curve", "read_csv", "read_run"]

_REWARD = "/episode_reward"
# Settings in which runs of one experiment may differ.
_NOT_COMPARED = ("seed", "device", "threads", "folder")
_SECTIONS_NOT_COMPARED = ("checkpoint.", "logging.", "evaluation.")
_COLORS = ("#2a6fbb", "#d1662a", "#3a8f57", "#9a4fb0", "#b8902a", "#4f9fb0", "#b03a5b", "#6a6a6a")


@dataclass(frozen=True)
class Curves:
    """What a run folder holds: settings, both tables, and the policies it is compared with."""

    folder: Path
    recipe: str
    settings: dict[str, Any]
    training: dict[str, np.ndarray]
    evaluation: dict[str, np.ndarray]
    summary: dict[str, Any]


def learning_curve(
    folders: Iterable[str | Path] | str | Path,
    key: str | None = None,
    path: str | Path | None = None,
) -> Figure:
    """Draws return over frames: training as a line, evaluation as dots, range over the seeds.

    Runs are seeds of one line if all settings that matter agree.

    Args:
        folders (list of paths): run folders.
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
    if importlib.util.find_spec("matplotlib") is None:
        raise MissingExtraError("matplotlib", "plot")
    folders = [folders] if isinstance(folders, (str, Path)) else list(folders)
    if not folders:
        raise ConfigError("no run folder is given, expected one or more; name them.")
    runs = [read_run(folder) for folder in folders]
    from matplotlib import pyplot, rc_context

    with rc_context(_style()):
        figure, axes = pyplot.subplots(figsize=(7.2, 4.4), layout="constrained")
        pyplot.close(figure)  # a notebook shows what is returned, and shows it once
        _draw(axes, runs, key)
    if path is not None:
        _save(figure, Path(path))
    return figure


def read_run(folder: str | Path) -> Curves:
    """Reads a run folder; a last line that is still being written is left out.

    Raises:
        CheckpointError: a folder that is no run, or has no rows yet.
    """
    folder = Path(folder)
    config = read_run_config(folder)
    training, evaluation = read_csv(folder / "metrics.csv"), read_csv(folder / "evaluation.csv")
    if not len(training.get("frames", ())) and not len(evaluation.get("frames", ())):
        raise CheckpointError(
            f"{str(folder)!r} has no row in metrics.csv yet, expected one or more; "
            "wait for its first iteration."
        )
    settings = {
        name: value
        for name, value in flatten(dataclasses.asdict(config)).items()
        if name not in _NOT_COMPARED and not name.startswith(_SECTIONS_NOT_COMPARED)
    }
    return Curves(
        folder, config.recipe, settings, training, evaluation, _read_json(folder / "summary.json")
    )


def read_csv(path: Path) -> dict[str, np.ndarray]:
    """Columns of a table of numbers by name, empty cells as NaN; nothing if there is no file.

    Raises:
        CheckpointError: a line that is not numbers.
    """
    if not path.is_file():
        return {}
    lines = path.read_text(encoding="utf-8", errors="replace").splitlines(keepends=True)
    if lines and not lines[-1].endswith("\n"):
        lines.pop()  # half written: a number in it may be cut, too
    rows = list(csv.reader(lines))
    if not rows:
        return {}
    head, *body = rows
    table = np.full((len(body), len(head)), np.nan)
    for i, row in enumerate(body):
        try:
            if len(row) != len(head):
                raise ValueError
            table[i] = [float(cell) if cell else np.nan for cell in row]
        except ValueError:
            raise CheckpointError(
                f"{str(path)!r} is broken in line {i + 2}, expected {len(head)} numbers; "
                "delete the line."
            ) from None
    return dict(zip(head, table.T))


def aggregate(
    curves: Sequence[tuple[np.ndarray, np.ndarray]],
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Frames, mean, minimum and maximum of several seeds, on the frames that all have reached.

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
    curves = [(x[~np.isnan(y)], y[~np.isnan(y)]) for x, y in curves]
    curves = [(x, y) for x, y in curves if len(x)]
    if not curves:
        return (np.empty(0),) * 4  # type: ignore[return-value]
    grid = np.unique(np.concatenate([x for x, _ in curves]))
    start, end = max(x[0] for x, _ in curves), min(x[-1] for x, _ in curves)
    if start <= end:
        grid = grid[(grid >= start) & (grid <= end)]
    values = np.stack([np.interp(grid, x, y) for x, y in curves])
    return grid, values.mean(0), values.min(0), values.max(0)


def _draw(axes: Axes, runs: Sequence[Curves], key: str | None) -> None:
    from matplotlib.ticker import EngFormatter

    experiments = _experiments(runs)
    drawn, color, dots = 0, 0, False
    for label, seeds in experiments:
        for column in [key] if key else _reward_columns(seeds):
            rows = _columns(seeds, column)
            name = label if key or len(_reward_columns(seeds)) < 2 else f"{label}: {column}"
            name = name.removesuffix(_REWARD)
            drawn += _line(axes, rows, name, _COLORS[color % len(_COLORS)])
            color += 1
        if key is None:
            drawn += _dots(axes, seeds, _COLORS[(color - 1) % len(_COLORS)], name=not dots)
            dots = True
    if not drawn:
        raise CheckpointError(
            f"{str(runs[0].folder)!r} has no value of {key or 'the return'} yet; "
            "wait until an episode has ended."
        )
    if key is None:
        _references(axes, runs)
    axes.set_xlabel("frames")
    axes.set_ylabel(key or "episode return")
    axes.xaxis.set_major_formatter(EngFormatter(sep=""))
    axes.margins(x=0.02)
    worlds = sorted({str(run.settings["env.name"]) for run in runs})
    axes.set_title(", ".join(worlds), loc="left")
    axes.legend(loc="best")


def _line(axes: Axes, rows: list[tuple[np.ndarray, np.ndarray]], name: str, color: str) -> bool:
    frames, mean, low, high = aggregate(rows)
    if len(frames):
        seeds = f" ({len(rows)} seeds, mean and range)" if len(rows) > 1 else ""
        marker = "o" if len(frames) < 3 else None
        axes.plot(frames, mean, color=color, label=name + seeds, marker=marker)
        if len(rows) > 1:
            axes.fill_between(frames, low, high, color=color, alpha=0.18, linewidth=0)
    return bool(len(frames))


def _dots(axes: Axes, seeds: Sequence[Curves], color: str, name: bool) -> bool:
    rows = [(s.evaluation["frames"], s.evaluation["return_mean"]) for s in seeds if s.evaluation]
    frames, mean, low, high = aggregate(rows)
    if len(frames):
        spread = np.stack([mean - low, high - mean]) if len(rows) > 1 else None
        axes.errorbar(
            frames, mean, yerr=spread, fmt="o", color=color, markeredgecolor="white",
            markersize=6, elinewidth=1.2, zorder=3, label="evaluation" if name else None,
        )  # fmt: skip
    return bool(len(frames))


def _references(axes: Axes, runs: Sequence[Curves]) -> None:
    """Dashed lines for the policies that need no training, if all runs play one world."""
    if len({str(run.settings["env.name"]) for run in runs}) > 1:
        return
    for key, name, style in (
        ("return_random", "random policy", ":"),
        ("return_heuristic", "VMAS heuristic", "--"),
    ):
        known = [run.summary[key] for run in runs if run.summary.get(key) is not None]
        if known:
            axes.axhline(
                np.mean(known), color="#707070", linestyle=style, linewidth=1.2, label=name
            )


def _experiments(runs: Sequence[Curves]) -> list[tuple[str, list[Curves]]]:
    """Runs that differ only in their seed belong together, under the recipe and what differs."""
    together: dict[str, list[Curves]] = {}
    for run in runs:
        together.setdefault(json.dumps(run.settings, sort_keys=True), []).append(run)
    named = []
    for seeds in together.values():
        own = seeds[0]
        rivals = [
            other[0].settings
            for other in together.values()
            if other is not seeds and other[0].recipe == own.recipe
        ]
        differs = [
            f"{name}={value}"
            for name, value in own.settings.items()
            if any(rival.get(name) != value for rival in rivals)
        ]
        named.append((" ".join([own.recipe, *differs]), seeds))
    return named


def _reward_columns(seeds: Sequence[Curves]) -> list[str]:
    columns = [name for name in seeds[0].training if name.endswith(_REWARD)]
    return columns or ["return_mean"]


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


def _read_json(path: Path) -> dict[str, Any]:
    try:
        return dict(json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError):  # a run that has not ended has none
        return {}


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
        "legend.fontsize": 9,
        "font.size": 10.5,
        "axes.titleweight": "bold",
    }
