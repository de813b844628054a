"""Renders a report as an HTML page, and writes all files of a report."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from html import escape
from itertools import combinations, groupby
from pathlib import Path
from typing import Any

import numpy as np
from markupsafe import Markup

from torchrl_marl.apps.reports.aggregates import (
    Aggregate,
    CurveWithInterval,
    TaskResult,
    default_curves,
)
from torchrl_marl.apps.reports.answers import (
    answers,
    counted,
    duration,
    figure,
    format_range,
    listed,
    methods,
    notes,
    read_asset,
)
from torchrl_marl.apps.reports.grouping import Progress
from torchrl_marl.apps.reports.marl_eval import raw_results, read_raw_results
from torchrl_marl.apps.reports.pictures import draw
from torchrl_marl.apps.reports.results import Report, make_report
from torchrl_marl.apps.reports.tables import (
    curves_csv,
    evaluations_csv,
    markdown,
    results_csv,
    tables_of,
    template,
)
from torchrl_marl.errors import CheckpointError, ConfigError
from torchrl_marl.training.files import explain_write_errors, open_atomically
from torchrl_marl.training.statistics import Estimate
from torchrl_marl.version import __version__

__all__ = ["GENERATOR", "page", "write_report"]

GENERATOR = "torchrl_marl report"
"""Value of the page's ``generator`` tag, which identifies a report."""

_SCRIPTS = ("numbers.js", "charts.js", "tasks.js", "overall.js", "tables.js", "start.js")
_UNITS = {"s": 1, "min": 60, "h": 3600}


def page(report: Report) -> str:
    """Renders a report as HTML.

    Args:
        report (Report): the results.
    """
    tasks = listed([result.task.name for result in report.tasks], 3)
    data = json.dumps(chart_data(report), allow_nan=False, separators=(",", ":"))
    functions = {"arguments_of": _arguments_of, "caption_of": _caption_of, "counted": counted}
    functions |= {"listed": listed, "ranged": format_range, "sort_value": _sort_value}
    return template("report.html.j2", escape, **functions).render(
        report=report,
        generator=GENERATOR,
        title=f"{listed(report.algorithms, 3)} in {tasks}",
        scope=f"Report on {counted(len(report.runs), 'run')}",
        sentences=map(_keep_numbers_together, answers(report)[:8]),
        tiles=_tiles(report),
        notes=notes(report),
        methods=methods(),
        folds=groupby(tables_of(report), key=lambda table: table.fold),
        style=Markup(read_asset("report.css")),
        script=Markup("\n".join(map(read_asset, _SCRIPTS))),
        # No text in the data can then end the HTML element that holds it.
        data=Markup(data.replace("<", "\\u003c")),
        version=__version__,
    )


def chart_data(report: Report) -> dict[str, Any]:
    """Returns the data for the page's charts."""
    order = {name: i for i, name in enumerate(report.algorithms)}
    found = {
        "algorithms": report.algorithms,
        "tasks": [_task_data(result, order) for result in report.tasks],
        "aggregates": [_aggregate_data(found) for found in report.aggregates],
    }
    return {name: _as_json(value) for name, value in found.items()}


def _keep_numbers_together(sentence: str) -> Markup:
    """Marks each number and its interval in a sentence, so that no line break separates the two."""
    number = r"(-?[\d.,]*\d \[[^\]]*\])"
    return Markup(re.sub(number, r'<span class="number">\1</span>', escape(sentence)))


def _tiles(report: Report) -> list[tuple[str, str]]:
    runs = report.runs
    seeds = sorted({len(team.runs) for result in report.tasks for team in result.teams.values()})
    seconds = np.array([run.record.measured.seconds[-1] for run in runs])
    tiles = [
        (figure(len(runs)), "runs"),
        (figure(len(report.tasks)), "task" + "s" * (len(report.tasks) != 1)),
        (figure(len(report.algorithms)), "algorithm" + "s" * (len(report.algorithms) != 1)),
        (" to ".join(map(str, dict.fromkeys((seeds[0], seeds[-1])))), "seeds of each"),
        (figure(sum(run.record.frames for run in runs)), "frames in all"),
    ]
    if np.isfinite(seconds).any():  # others' tables need not have them
        tiles.append((duration(float(np.nansum(seconds))), "of training in all"))
    return tiles


def _arguments_of(result: TaskResult) -> str:
    return ", ".join(
        f"{key.removeprefix('env.').removeprefix('kwargs.')}={value}"
        for key, value in result.task.settings.items()
        if key.startswith("env.kwargs.") or (key == "env.max_steps" and value is not None)
    )


def _caption_of(result: TaskResult) -> str:
    teams = result.teams.values()
    counts = listed([f"{team.algorithm} {counted(len(team.runs), 'seed')}" for team in teams])
    kind = "evaluations" if default_curves(result) == "evaluation" else "training episodes"
    return f"{counts}. Returns of {kind}; compared at {figure(result.frames)} frames."


def _sort_value(text: str) -> float | None:
    """Returns the number at the start of a cell; None without one. Durations become seconds."""
    found = re.match(r"\[?(-?\d[\d,]*\.?\d*(?:e[+-]?\d+)?) ?(s|min|h)?\b", text)
    if found is None:
        return None
    return float(found[1].replace(",", "")) * _UNITS.get(found[2] or "s", 1)


def _task_data(result: TaskResult, order: dict[str, int]) -> dict[str, Any]:
    reference = result.reference
    from_runs = reference.best_source.startswith("the best run of this report")
    return {
        "name": result.task.name,
        "random": reference.random,
        "best": None if from_runs else reference.best,
        "teams": [
            {
                "algorithm": name,
                "order": order[name],
                "measured": default_curves(result),
                "evaluation": _line_data(team.evaluation, [r.record.evaluation for r in team.runs]),
                "training": _line_data(team.training, [r.record.training for r in team.runs]),
            }
            for name, team in result.teams.items()
        ],
    }


def _line_data(line: CurveWithInterval | None, runs: Sequence[Progress]) -> dict[str, Any] | None:
    """Returns the data of a line, with the indices of its runs."""
    if line is None:
        return None
    return {**vars(line), "of": [i for i, run in enumerate(runs) if len(run)]}


def _aggregate_data(found: Aggregate) -> dict[str, Any]:
    names = ("algorithms", "estimates", "thresholds", "profiles", "share", "curves")
    return {
        **{name: getattr(found, name) for name in names},
        "improvements": [
            {"first": one, "second": other, **_as_json(found.improvements[one, other])}
            for one, other in combinations(found.algorithms, 2)
        ],
    }


def _as_json(value: Any) -> Any:
    """Converts a value to JSON types; numbers get six digits, non-finite ones become None."""
    if value is None or isinstance(value, str):
        return value
    if isinstance(value, Estimate):
        ends = (value.low, value.high) if value.has_interval else (value.value * np.nan,) * 2
        return _as_json(dict(zip(("value", "low", "high"), (value.value, *ends))))
    if isinstance(value, Mapping):
        return {key: _as_json(one) for key, one in value.items()}
    if isinstance(value, (Sequence, np.ndarray)):
        return [_as_json(one) for one in value]
    if not np.isfinite(value):
        return None
    short = float(f"{value:.6g}") if abs(value) < 1e6 else float(round(value))
    return int(short) if short.is_integer() else short


_PAGE_FILE = "report.html"
_REPORT_FILES = (_PAGE_FILE, "report.md", "results.csv", "evaluations.csv", "curves.csv")


def write_report(
    runs: Iterable[str | Path] | str | Path,
    folder: str | Path = "report",
    references: str | Path | None = None,
    raw: str | Path | None = None,
) -> Report:
    """Writes a report over runs: an HTML page, Markdown, and CSV tables.

    ``report.html`` is a self-contained page. ``report.md`` has the same tables and, if matplotlib
    is installed, pictures (``curves.png``, ``together.png``). ``results.csv`` has a row for each
    task and algorithm, ``evaluations.csv`` one for each run and evaluation, and ``curves.csv`` one
    for each point of a curve, with its interval.

    Args:
        runs (list of paths): folders and tables, as for :func:`make_report`.
        folder (str or Path): output folder; an earlier report in it is replaced.
        references (path, optional): file of reference returns, as for :func:`make_report`.
        raw (path, optional): JSON file for the raw results, which marl-eval reads.

    Returns:
        Report: all results.

    Raises:
        CheckpointError: there are no runs, or no run is usable.
        ConfigError: the folder holds other files, a table or a file that holds no raw results would
            be overwritten, or the references cannot be read.
        WriteError: the folder cannot be written to.
    """
    folder, runs = Path(folder), [runs] if isinstance(runs, (str, os.PathLike)) else list(runs)
    _check_folder(folder)
    _check_inputs(runs, folder, raw)
    found = make_report(runs, references)
    with explain_write_errors(folder):
        folder.mkdir(parents=True, exist_ok=True)
    _write(folder / _PAGE_FILE, page(found))  # first, since it identifies the folder as a report's
    _write(folder / "report.md", markdown(found, draw(found, folder)))
    _write(folder / "results.csv", results_csv(found))
    _write(folder / "evaluations.csv", evaluations_csv(found))
    _write(folder / "curves.csv", curves_csv(found))
    if raw is not None:
        _write(Path(raw), json.dumps(raw_results(found.tasks), indent=1) + "\n")
    return found


def _write(path: Path, text: str) -> None:
    with open_atomically(path, at_once=True, newline="") as file:
        file.write(text)


def _check_folder(folder: Path) -> None:
    """Raises an error if the output folder holds anything but a report.

    Raises:
        ConfigError: the path is a file, or a folder with other files.
    """
    if folder.exists() and not folder.is_dir():
        raise ConfigError(f"{str(folder)!r} is a file, expected a folder; use --out FOLDER.")
    if not folder.is_dir():
        return
    # Partial files of a killed process do not count.
    others = sorted(path.name for path in folder.iterdir() if path.suffix != ".part")
    if not others or _is_report(folder / _PAGE_FILE):
        return
    raise ConfigError(
        f"{str(folder)!r} holds {others[0]!r} but no report, expected a new folder or an earlier "
        "report's; use --out FOLDER."
    )


def _check_inputs(runs: Iterable[str | Path], folder: Path, raw: str | Path | None) -> None:
    """Raises an error if the report would overwrite one of its tables."""
    written = {(folder / name).resolve(): "--out FOLDER" for name in _REPORT_FILES}
    if raw is not None:
        _check_raw(Path(raw), written)
        written[Path(raw).resolve()] = "--json FILE"
    for path in runs:
        fix = written.get(Path(path).resolve())
        if fix is not None and Path(path).is_file():
            raise ConfigError(
                f"{str(path)!r} is read and would be overwritten by the report; use another {fix}."
            )


def _check_raw(raw: Path, others: Collection[Path]) -> None:
    """Refuses to write raw results over a file of the report, or one that holds something else.

    Raises:
        ConfigError: the path is a folder, a file of the report, or a file without raw results.
    """
    what = "a folder" if raw.is_dir() else ""
    what = "a file of the report itself" if raw.resolve() in others else what
    if raw.is_file() and not what:
        try:
            read_raw_results(raw)
        except CheckpointError:
            what = "a file without raw results, which would be overwritten"
    if what:
        raise ConfigError(f"{str(raw)!r} is {what}, expected a new file; use another --json FILE.")


def _is_report(path: Path) -> bool:
    try:
        with path.open(encoding="utf-8", errors="replace") as file:
            return GENERATOR in file.read(2000)
    except OSError:
        return False
