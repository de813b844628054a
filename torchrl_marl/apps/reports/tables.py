"""Tables of a report, as Markdown and as CSV."""

from __future__ import annotations

import csv
import io
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from jinja2 import Environment, StrictUndefined, Template
from markupsafe import Markup

from torchrl_marl.apps.reports.aggregates import Aggregate, AlgorithmResult, RunScore, TaskResult
from torchrl_marl.apps.reports.answers import (
    answers,
    counted,
    duration,
    figure,
    format_estimate,
    listed,
    methods,
    notes,
    read_asset,
    share,
)
from torchrl_marl.apps.reports.results import Report

__all__ = [
    "Table",
    "curves_csv",
    "evaluations_csv",
    "markdown",
    "results_csv",
    "tables_of",
    "template",
]

Row = Sequence[str]


@dataclass
class Table:
    """Table of texts, to be rendered as Markdown or HTML.

    Args:
        title (str): title of the table.
        head (sequence of str): names of the columns.
        rows (sequence of sequences): texts of each row, one per column.
        words (sequence of str): names of the columns that hold words, by default the first; other
            columns hold numbers.
        fold (str): summary under which the page folds the table; adjacent tables with the same
            summary are folded together. If empty, the table is always shown.
    """

    title: str
    head: Row
    rows: Sequence[Row]
    words: Row = ()
    fold: str = ""

    def __post_init__(self) -> None:
        self.words = self.words or self.head[:1]


def tables_of(report: Report) -> Iterator[Table]:
    """Yields the tables over all tasks, of each task, of reference returns, and of all runs."""
    for found in report.aggregates:
        yield _aggregate_table(found)
        if len(found.algorithms) > 1:
            yield _improvement_table(f"P(row > column) over {listed(found.tasks)}", found)
    if len(report.tasks) > 1:
        yield _return_table(report)
    many = len(report.tasks) > 2
    for result in report.tasks:
        fold = result.task.name if many else ""
        yield _task_table(result, fold)
        if any(team.groups for team in result.teams.values()):
            yield _group_table(result, fold)
        if len(result.teams) > 1:
            yield _improvement_table(f"P(row > column) in {result.task.name}", result, fold)
    yield _reference_table(report)
    yield _run_table(report)


def markdown(report: Report, pictures: Sequence[str] = ()) -> str:
    """Renders a report as Markdown.

    Args:
        report (Report): the results.
        pictures (sequence of str): names of picture files in the same folder.
    """
    tasks = [task.task.name for task in report.tasks]
    return template("report.md.j2", _escape_markdown).render(
        scope=f"{counted(len(report.runs), 'run')} of {listed(report.algorithms)} in "
        f"{counted(len(tasks), 'task')}: {listed(tasks)}",
        answers=answers(report),
        pictures=pictures,
        notes=notes(report),
        tables=tables_of(report),
        methods=methods(),
    )


def template(name: str, escape: Callable[[str], str], **functions: Any) -> Template:
    """Returns a template that escapes all inserted values except markup.

    Args:
        name (str): file name in ``assets``.
        escape (callable): function that escapes a text.
        **functions: functions that the template may call.
    """
    environment = Environment(
        autoescape=True,
        finalize=lambda x: x if isinstance(x, Markup) else Markup(escape(str(x))),
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        undefined=StrictUndefined,
    )
    environment.globals |= functions
    return environment.from_string(read_asset(name))


def _escape_markdown(text: str) -> str:
    """Escapes a text for Markdown."""
    for letter in "\\`*_[]<>|#":
        text = text.replace(letter, f"\\{letter}")
    return " ".join(text.split())


def _aggregate_table(found: Aggregate) -> Table:
    head = ["algorithm", "IQM", "median", "mean", "optimality gap", "seeds in each task"]
    rows = []
    for name in found.algorithms:
        cells = [format_estimate(found.estimates[name][what], True) for what in head[1:5]]
        rows.append([name, *cells, _range_text(found.seeds[name])])
    return Table(f"Normalized scores over {listed(found.tasks)}", head, rows)


def _range_text(numbers: Sequence[float]) -> str:
    low, high = min(numbers), max(numbers)
    return figure(low) if low == high else f"{figure(low)} to {figure(high)}"


def _improvement_table(title: str, found: Aggregate | TaskResult, fold: str = "") -> Table:
    names = found.algorithms if isinstance(found, Aggregate) else list(found.teams)
    rows = [
        [
            row,
            *(
                "-" if row == c else format_estimate(found.improvements[row, c], True)
                for c in names
            ),
        ]
        for row in names
    ]
    return Table(title, ["", *names], rows, fold=fold)


def _return_table(report: Report) -> Table:
    names = report.algorithms
    rows = []
    for result in report.tasks:
        cells = [
            format_estimate(result.teams[name].iqm) if name in result.teams else "-"
            for name in names
        ]
        rows.append([result.task.name, *cells, figure(result.reference.random)])
    return Table("Return in each task (IQM)", ["task", *names, "random policy"], rows)


def _task_table(result: TaskResult, fold: str) -> Table:
    head = [
        "algorithm", "IQM", "median", "mean", "worst to best", "normalized",
        "seeds", "frames", "agent frames", "time of a run", "at its end",
    ]  # fmt: skip
    rows = []
    for team in sorted(result.teams.values(), key=lambda team: -team.iqm.value):
        runs, scores = team.runs, team.scores
        rows.append([
            team.algorithm, format_estimate(team.iqm), figure(team.median.value),
            figure(team.mean.value), f"{figure(min(scores))} to {figure(max(scores))}",
            share(_scaled(result, team.iqm.value)),
            _seeds_text(team), _range_text([run.frames for run in runs]),
            figure(_column_mean(runs, "agent_frames")),
            duration(_column_mean(runs, "seconds")), figure(_column_mean(runs, "end")),
        ])  # fmt: skip
    frames = figure(result.frames)
    return Table(f"{result.task.name}: return at {frames} frames", head, rows, fold=fold)


def _group_table(result: TaskResult, fold: str) -> Table:
    names = list(dict.fromkeys(group for team in result.teams.values() for group in team.groups))
    rows = [
        [
            team.algorithm,
            *(format_estimate(team.groups[name]) if name in team.groups else "-" for name in names),
        ]
        for team in result.teams.values()
    ]
    title = f"{result.task.name}: return of each group (IQM)"
    return Table(title, ["algorithm", *names], rows, fold=fold)


def _seeds_text(team: AlgorithmResult) -> str:
    """Returns the number of seeds, such as ``5`` or ``5 (1 not finished)``."""
    running = sum(not run.record.finished for run in team.runs)
    return f"{len(team.runs)} ({running} not finished)" if running else str(len(team.runs))


def _reference_table(report: Report) -> Table:
    rows = [
        [
            result.task.name,
            figure(result.reference.random),
            result.reference.random_source or "not measured",
            figure(result.reference.best),
            result.reference.best_source or "unknown",
        ]
        for result in report.tasks
    ]
    head = ["task", "score 0", "source", "score 1", "source"]
    return Table("Reference returns of normalized scores", head, rows, words=["task", "source"])


def _run_table(report: Report) -> Table:
    head = ["task", "algorithm", "seed", "state", "score", "frames", "agent frames", "time", "run"]
    rows = []
    for result, team in report.teams:
        for run in team.runs:
            state = "finished" if run.record.finished else "not finished"
            rows.append([
                result.task.name, team.algorithm, str(run.record.run.seed), state,
                figure(run.score), figure(run.frames), figure(run.agent_frames),
                duration(run.seconds), run.record.name,
            ])  # fmt: skip
    return Table(
        "All runs", head, rows, words=["task", "algorithm", "state", "run"], fold="All runs"
    )


def results_csv(report: Report) -> str:
    """Returns a CSV table of all results and their intervals, by task and algorithm."""
    head = [
        "task", "library", "name", "algorithm", "seeds", "frames", "agent_frames", "seconds",
        "iqm", "iqm_low", "iqm_high", "mean", "mean_low", "mean_high", "median", "worst", "best",
        "normalized_iqm", "random", "random_source", "best_known", "best_known_source",
    ]  # fmt: skip
    rows: list[list[Any]] = []
    for result, team in report.teams:
        reference, settings = result.reference, result.task.settings
        rows.append([
            result.task.name, settings["env.library"], settings["env.name"], team.algorithm,
            len(team.runs), result.frames, _column_mean(team.runs, "agent_frames"),
            _column_mean(team.runs, "seconds"), team.iqm.value, team.iqm.low, team.iqm.high,
            team.mean.value, team.mean.low, team.mean.high, team.median.value,
            min(team.scores), max(team.scores), _scaled(result, team.iqm.value), reference.random,
            reference.random_source, reference.best, reference.best_source,
        ])  # fmt: skip
    return _csv_text(head, rows)


def _scaled(result: TaskResult, value: float) -> float | None:
    """Returns a normalized return; None if it cannot be normalized."""
    return None if result.reference.why_none else float(result.reference.normalize(value))


def evaluations_csv(report: Report) -> str:
    """Returns a CSV table with a row for each evaluation or training measurement of each run."""
    head = [
        "task", "library", "name", "algorithm", "seed", "run", "finished", "measured_by",
        "frames", "agent_frames", "seconds", "return", "normalized",
    ]  # fmt: skip
    rows: list[list[Any]] = []
    for result, team in report.teams:
        settings = result.task.settings
        for record in (run.record for run in team.runs):
            measured = record.measured
            of_run = [
                result.task.name, settings["env.library"], settings["env.name"],
                team.algorithm, record.run.seed, record.name, record.finished,
                "evaluation" if record.is_evaluated else "training",
            ]  # fmt: skip
            columns = measured.frames, measured.agent_frames, measured.seconds, measured.returns
            rows += [[*of_run, *row, _scaled(result, row[-1])] for row in zip(*columns)]
    return _csv_text(head, rows)


def curves_csv(report: Report) -> str:
    """Returns a CSV table with a row for each point of a task's curves, with its interval."""
    head = [
        "task", "algorithm", "measured_by", "frames", "agent_frames", "seconds", "runs",
        "iqm", "iqm_low", "iqm_high",
    ]  # fmt: skip
    rows: list[list[Any]] = []
    for result, team in report.teams:
        for what, line in (("evaluation", team.evaluation), ("training", team.training)):
            if line is not None:
                columns = (
                    line.frames, line.agent_frames, line.seconds, line.runs,
                    line.value, line.low, line.high,
                )  # fmt: skip
                rows += [[result.task.name, team.algorithm, what, *row] for row in zip(*columns)]
    return _csv_text(head, rows)


def _column_mean(runs: Sequence[RunScore], column: str) -> float:
    return float(np.mean([getattr(run, column) for run in runs]))


def _csv_text(head: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    file = io.StringIO()
    writer = csv.writer(file, lineterminator="\n")
    writer.writerow(head)
    writer.writerows([_csv_cell(value) for value in row] for row in rows)
    return file.getvalue()


def _csv_cell(value: Any) -> Any:
    """Returns the shortest exact text of a number; an empty text if the number is unknown."""
    if isinstance(value, (float, np.floating)):
        if not np.isfinite(value):
            return ""
        return int(value) if float(value).is_integer() else repr(float(value))
    return "" if value is None else value
