"""A report as one page of HTML, and its files."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from html import escape
from importlib import resources
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
from jinja2 import Environment, StrictUndefined, Template
from markupsafe import Markup

from torchrl_marl.apps.reports.aggregates import Aggregate, Line, WorldResult, shown_by
from torchrl_marl.apps.reports.answers import (
    answers,
    counted,
    duration,
    figure,
    listed,
    methods,
    notes,
)
from torchrl_marl.apps.reports.pictures import draw
from torchrl_marl.apps.reports.results import Report, make_report
from torchrl_marl.apps.reports.tables import (
    curves_csv,
    evaluations_csv,
    markdown,
    results_csv,
    tables_of,
)
from torchrl_marl.errors import ConfigError
from torchrl_marl.training.files import whole_file, writing
from torchrl_marl.training.statistics import Estimate
from torchrl_marl.version import __version__

__all__ = ["GENERATOR", "page", "write_report"]

GENERATOR = "torchrl_marl report"
"""By which a page is known as a report's."""

_SCRIPTS = ("numbers.js", "charts.js", "worlds.js", "overall.js", "tables.js", "start.js")
_UNITS = {"s": 1, "min": 60, "h": 3600}


def page(report: Report) -> str:
    """Writes a report as HTML.

    Args:
        report (Report): the figures.
    """
    worlds = listed([result.world.name for result in report.worlds], 3)
    data = json.dumps(data_of(report), allow_nan=False, separators=(",", ":"))
    return _template("report.html").render(
        report=report,
        generator=GENERATOR,
        title=f"{listed(report.algorithms, 3)} in {worlds}",
        scope=f"Report on {counted(len(report.runs), 'run')}",
        sentences=map(_with_numbers_whole, answers(report)[:8]),
        tiles=_tiles(report),
        notes=notes(report),
        methods=methods(report),
        folds=groupby(tables_of(report), key=lambda table: table.fold),
        style=Markup(_asset("report.css")),
        script=Markup("\n".join(map(_asset, _SCRIPTS))),
        # So that no text can end the element it stands in.
        data=Markup(data.replace("<", "\\u003c")),
        version=__version__,
    )


def data_of(report: Report) -> dict[str, Any]:
    """Returns what the page's charts are drawn from."""
    order = {name: i for i, name in enumerate(report.algorithms)}
    return {
        "algorithms": report.algorithms,
        "worlds": [_world_data(result, order) for result in report.worlds],
        "aggregates": [_aggregate_data(found) for found in report.aggregates],
    }


def _asset(name: str) -> str:
    assets = resources.files("torchrl_marl.apps.reports") / "assets"
    return (assets / name).read_text(encoding="utf-8")


def _template(name: str) -> Template:
    environment = Environment(
        autoescape=True,
        finalize=_escaped,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        undefined=StrictUndefined,
    )
    environment.globals |= {
        "arguments_of": _arguments_of,
        "caption_of": _caption_of,
        "counted": counted,
        "listed": listed,
        "sort_value": _sort_value,
    }
    return environment.from_string(_asset(name))


def _escaped(value: Any) -> Markup:
    return value if isinstance(value, Markup) else Markup(escape(str(value)))


def _with_numbers_whole(sentence: str) -> Markup:
    """A sentence in which a number and its interval stay on one line."""
    number = r"(-?[\d.,]*\d \[[^\]]*\])"
    return Markup(re.sub(number, r'<span class="number">\1</span>', escape(sentence)))


def _tiles(report: Report) -> list[tuple[str, str]]:
    runs = report.runs
    seeds = sorted({len(team.runs) for result in report.worlds for team in result.teams.values()})
    seconds = np.array([run.record.measured.seconds[-1] for run in runs])
    tiles = [
        (figure(len(runs)), "runs"),
        (figure(len(report.worlds)), "world" + "s" * (len(report.worlds) != 1)),
        (figure(len(report.algorithms)), "algorithm" + "s" * (len(report.algorithms) != 1)),
        (" to ".join(map(str, dict.fromkeys((seeds[0], seeds[-1])))), "seeds of each"),
        (figure(sum(run.record.frames for run in runs)), "frames in all"),
    ]
    if np.isfinite(seconds).any():  # others' tables need not have them
        tiles.append((duration(float(np.nansum(seconds))), "of training in all"))
    return tiles


def _arguments_of(result: WorldResult) -> str:
    return ", ".join(
        f"{key.removeprefix('env.').removeprefix('kwargs.')}={value}"
        for key, value in result.world.settings.items()
        if key.startswith("env.kwargs.") or (key == "env.max_steps" and value is not None)
    )


def _caption_of(result: WorldResult) -> str:
    teams = result.teams.values()
    counts = listed([f"{team.algorithm} {counted(len(team.runs), 'seed')}" for team in teams])
    kind = "evaluations" if shown_by(result) == "evaluation" else "training episodes"
    return f"{counts}. Returns of {kind}; compared at {figure(result.frames)} frames."


def _sort_value(text: str) -> float | None:
    """Returns the number that a cell begins with, a time in seconds."""
    found = re.match(r"\[?(-?\d[\d,]*\.?\d*(?:e[+-]?\d+)?) ?(s|min|h)?\b", text)
    if found is None:
        return None
    return float(found[1].replace(",", "")) * _UNITS.get(found[2] or "s", 1)


def _world_data(result: WorldResult, order: dict[str, int]) -> dict[str, Any]:
    reference = result.reference
    from_runs = reference.best_source.startswith("the best run of this report")
    return {
        "name": result.world.name,
        "random": _plain(reference.random),
        "best": None if from_runs else _plain(reference.best),
        "teams": [
            {
                "algorithm": name,
                "order": order[name],
                "measured": shown_by(result),
                "evaluation": _line_data(
                    team.evaluation, [len(run.record.evaluation) for run in team.runs]
                ),
                "training": _line_data(
                    team.training, [len(run.record.training) for run in team.runs]
                ),
            }
            for name, team in result.teams.items()
        ],
    }


def _line_data(line: Line | None, lengths: Sequence[int]) -> dict[str, Any] | None:
    if line is None:
        return None
    columns = ("frames", "agent_frames", "seconds", "value", "low", "high", "runs", "each")
    of = [i for i, length in enumerate(lengths) if length]
    return {name: _plain(getattr(line, name)) for name in columns} | {"of": of}


def _aggregate_data(found: Aggregate) -> dict[str, Any]:
    return {
        "algorithms": found.algorithms,
        "estimates": {
            name: {what: _estimate_data(one) for what, one in own.items()}
            for name, own in found.estimates.items()
        },
        "thresholds": _plain(found.thresholds),
        "profiles": {name: _estimate_data(one, True) for name, one in found.profiles.items()},
        "share": _plain(found.share),
        "curves": {name: _estimate_data(one, True) for name, one in found.curves.items()},
        "improvements": [
            {"first": one, "second": other, **_estimate_data(found.improvements[one, other])}
            for i, one in enumerate(found.algorithms)
            for other in found.algorithms[i + 1 :]
        ],
    }


def _estimate_data(found: Estimate, of_curve: bool = False) -> dict[str, Any]:
    nothing = [None] * len(found.value) if of_curve else None
    low, high = (nothing if end is None else _plain(end) for end in (found.low, found.high))
    return {"value": _plain(found.value), "low": low, "high": high}


def _plain(value: Any) -> Any:
    """Lists and numbers of six digits; None for what is not finite."""
    if isinstance(value, np.ndarray):
        return [_plain(one) for one in value.tolist()]
    if isinstance(value, list):
        return [_plain(one) for one in value]
    if value is None or not np.isfinite(value):
        return None
    short = float(f"{value:.6g}") if abs(value) < 1e6 else float(round(value))
    return int(short) if short.is_integer() else short


_PAGE = "report.html"


def write_report(
    runs: Iterable[str | Path] | str | Path,
    folder: str | Path = "report",
    references: str | Path | None = None,
) -> Report:
    """Writes what runs say together: a page to look at, Markdown, and CSV.

    ``report.html`` is one file without anything from elsewhere, ``report.md`` has the same
    tables and, where matplotlib is installed, pictures (``curves.png``, ``together.png``),
    ``results.csv`` a row for each world and algorithm, ``evaluations.csv`` one for each run
    and evaluation, ``curves.csv`` one for each point of a curve, with its interval.

    Args:
        runs (list of paths): of :func:`make_report`.
        folder (str or Path): where to write; a report that is there is replaced.
        references (path, optional): a file of what returns are normalized by.

    Returns:
        Report: every figure.

    Raises:
        CheckpointError: no runs, or none that can be used.
        ConfigError: a folder that holds other files, or references that cannot be read.
        WriteError: a folder that cannot be written to.
    """
    folder = Path(folder)
    _check(folder)
    found = make_report(runs, references)
    with writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
    _write(folder / _PAGE, page(found))  # the first, by which the folder is known
    _write(folder / "report.md", markdown(found, draw(found, folder)))
    _write(folder / "results.csv", results_csv(found))
    _write(folder / "evaluations.csv", evaluations_csv(found))
    _write(folder / "curves.csv", curves_csv(found))
    return found


def _write(path: Path, text: str) -> None:
    with whole_file(path, at_once=True, newline="") as file:
        file.write(text)


def _check(folder: Path) -> None:
    """Refuses a folder of something else.

    Raises:
        ConfigError: naming what is there.
    """
    if folder.exists() and not folder.is_dir():
        raise ConfigError(f"{str(folder)!r} is a file, expected a folder; use --out FOLDER.")
    if not folder.is_dir():
        return
    # What a killed process had half written goes.
    others = sorted(path.name for path in folder.iterdir() if path.suffix != ".part")
    if not others or _is_report(folder / _PAGE):
        return
    raise ConfigError(
        f"{str(folder)!r} holds {others[0]!r} and no report, expected a new folder or that of an "
        "earlier report; use --out FOLDER."
    )


def _is_report(path: Path) -> bool:
    try:
        with path.open(encoding="utf-8", errors="replace") as file:
            return GENERATOR in file.read(2000)
    except OSError:
        return False
