"""A report as one page of HTML, and its files."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from html import escape
from importlib import resources
from itertools import groupby
from pathlib import Path
from string import Template
from typing import Any

import numpy as np

from torchrl_marl.apps.reports.aggregates import (
    STATISTICS,
    Aggregate,
    Line,
    Team,
    WorldResult,
    shown_by,
)
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
    Table,
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
    data = json.dumps(data_of(report), allow_nan=False, separators=(",", ":"))
    return Template(_asset("report.html")).substitute(
        generator=GENERATOR,
        title=escape(_title(report)),
        scope=escape(_scope(report)),
        style=_asset("report.css"),
        script="\n".join(map(_asset, _SCRIPTS)),
        # So that no text can end the element it stands in.
        data=data.replace("<", "\\u003c"),
        answers="\n  ".join(map(_answer, _first_sentences(report))),
        tiles=_tiles(report),
        notes=_notes(report),
        overall="\n".join(_overall(found, i) for i, found in enumerate(report.aggregates)),
        cards="\n".join(_card(result, i) for i, result in enumerate(report.worlds)),
        tables=_tables(report),
        methods=_section("methods", "How it was worked out", _list(methods(report), "methods")),
        footer=f"Written by torchrl_marl {escape(__version__)}.",
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


def _title(report: Report) -> str:
    worlds = listed([result.world.name for result in report.worlds], 3)
    return f"{listed(report.algorithms, 3)} in {worlds}"


def _scope(report: Report) -> str:
    return f"Report on {counted(len(report.runs), 'run')}"


def _first_sentences(report: Report) -> list[tuple[str, str]]:
    """The first answer stands out; a report on many worlds shows the first few."""
    sentences = answers(report)
    return [(x, "answer" if i == 0 else "answer more") for i, x in enumerate(sentences[:8])]


def _answer(sentence: tuple[str, str]) -> str:
    text, kind = sentence
    # A number and its interval stay on one line.
    text = re.sub(r"(-?[\d.,]*\d \[[^\]]*\])", r'<span class="number">\1</span>', escape(text))
    return f'<p class="{kind}">{text}</p>'


def _tiles(report: Report) -> str:
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
    cells = "".join(f"<li><b>{escape(n)}</b><span>{escape(what)}</span></li>" for n, what in tiles)
    return f'<ul class="tiles">{cells}</ul>'


def _notes(report: Report) -> str:
    found = notes(report)
    if not found:
        return ""
    title = f"{counted(len(found), 'thing')} to know before believing this"
    opened = " open" if len(found) <= 8 else ""
    return f'<details class="notes"{opened}><summary>{title}</summary>{_list(found)}</details>'


def _list(texts: Sequence[str], kind: str = "") -> str:
    return f'<ul class="{kind}">{"".join(f"<li>{escape(text)}</li>" for text in texts)}</ul>'


def _section(name: str, title: str, inner: str, lead: str = "") -> str:
    lead = f'<p class="lead">{lead}</p>' if lead else ""
    return (
        f'<section id="{name}" aria-labelledby="{name}-title">'
        f'<h2 id="{name}-title">{title}</h2>{lead}{inner}</section>'
    )


def _overall(found: Aggregate, number: int) -> str:
    names, worlds = listed(found.algorithms, 12), listed(found.worlds, 20)
    where = "All worlds together" if len(found.worlds) > 1 else "Algorithms beside each other"
    counts = sorted({n for runs in found.seeds.values() for n in runs})
    seeds = counted(counts[0], "seed") if len(counts) == 1 else f"{counts[0]} to {counts[-1]} seeds"
    bands = "" if counts[0] > 1 else " No bands where a world has a single seed."
    of = f"{seeds} in each of {counted(len(found.worlds), 'world')}"
    lead = (
        f"{escape(names)} in {escape(worlds)}; {of}. Scores are normalized: 0 is the random "
        "policy, 1 the best known. Bars and bands are 95&nbsp;% intervals over seeds."
    )
    meanings = _MEANINGS if len(found.worlds) > 1 else _MEANINGS | _OF_ONE
    small = [
        _chart("estimates", what, meanings[what], f' data-statistic="{what}"')
        for what in STATISTICS
    ]
    charts = []
    if found.curves:
        text = "IQM of normalized scores in the course of training."
        charts.append(_chart("curves", "Sample efficiency", f"{text} {of}.{bands}"))
    text = "Share of runs above a score: the higher the curve, the better."
    charts.append(_chart("profiles", "Performance profile", f"{text} {of}.{bands}"))
    if found.improvements:
        text = "How probably a run of the first has the greater score; 0.5 is no difference."
        charts.append(_chart("improvements", "Probability of improvement", f"{text} {of}."))
    inner = (
        f'<div data-overall="{number}"><div class="cards small">{"".join(small)}</div>'
        f'<div class="cards third">{"".join(charts)}</div></div>'
    )
    return _section(f"overall{number}", where, inner, lead)


_MEANINGS = {
    "IQM": "Interquartile mean: the mean of the middle half of all runs.",
    "median": "Median of the worlds' means.",
    "mean": "Mean of the worlds' means; outliers count.",
    "optimality gap": "How far runs fall short of 1; less is better.",
}

_OF_ONE = {"median": "Median of the runs.", "mean": "Mean of the runs; outliers count."}


def _chart(kind: str, title: str, caption: str, more: str = "") -> str:
    return (
        f'<figure class="card"><h3>{escape(title[:1].upper() + title[1:])}</h3>'
        f'<div class="chart" data-chart="{kind}"{more}></div>'
        f'<figcaption class="caption">{escape(caption)}</figcaption></figure>'
    )


def _card(result: WorldResult, number: int) -> str:
    world = result.world
    counts = listed(
        [f"{t.algorithm} {counted(len(t.runs), 'seed')}" for t in result.teams.values()]
    )
    kind = "evaluations" if shown_by(result) == "evaluation" else "training episodes"
    caption = f"{counts}. Returns of {kind}; compared at {figure(result.frames)} frames."
    settings = ", ".join(
        f"{key.removeprefix('env.').removeprefix('kwargs.')}={value}"
        for key, value in world.settings.items()
        if key.startswith("env.kwargs.") or (key == "env.max_steps" and value is not None)
    )
    runs = "".join(_run_switches(team, i) for i, team in enumerate(result.teams.values()))
    return (
        f'<figure class="card" data-world="{number}"><h3>{escape(world.name)}</h3>'
        f'<p class="caption">{escape(settings)}</p><div class="chart"></div>'
        f'<figcaption class="caption">{escape(caption)}</figcaption>'
        f'<details class="runs"><summary>Switch runs off</summary>{runs}</details></figure>'
    )


def _run_switches(team: Team, number: int) -> str:
    boxes = []
    for i, run in enumerate(team.runs):
        state = "" if run.record.finished else ' <span class="mark">not finished</span>'
        boxes.append(
            f'<label title="{escape(run.record.name)}"><input type="checkbox" checked '
            f'data-team="{number}" data-run="{i}"> seed {run.record.run.seed}{state}</label>'
        )
    return f"<fieldset><legend>{escape(team.algorithm)}</legend>{''.join(boxes)}</fieldset>"


def _tables(report: Report) -> str:
    lead = "Press a column's name to sort by it. Intervals are of 95&nbsp;%, over seeds."
    parts = []
    for fold, tables in groupby(tables_of(report), key=lambda table: table.fold):
        inner = "".join(map(_table, tables))
        if fold:
            inner = f'<details class="fold"><summary>{escape(fold)}</summary>{inner}</details>'
        parts.append(inner)
    inner = "".join(parts)
    return _section("tables", "Tables", inner, lead)


def _table(table: Table) -> str:
    words = [' class="words"' if x in table.words else "" for x in table.head]
    head = "".join(f'<th scope="col"{w}>{escape(x)}</th>' for x, w in zip(table.head, words))
    rows = "".join(
        f"<tr>{''.join(_cell(text, word) for text, word in zip(row, words))}</tr>"
        for row in table.rows
    )
    title = escape(table.title)
    inner = (
        f'<div class="scroll" tabindex="0" role="region" aria-label="{title}"><table class="data">'
        f"<thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table></div>"
    )
    return f'<div class="table"><h3>{title}</h3>{inner}</div>'


def _cell(text: str, word: str) -> str:
    value = None if word else _sort_value(text)
    sort = "" if value is None else f' data-value="{value:g}"'
    return f"<td{word}{sort}>{escape(text)}</td>"


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
