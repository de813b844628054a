"""Computes a whole report, from run folders and from tables of other libraries."""

from __future__ import annotations

import csv
import dataclasses
import math
import os
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from torchrl_marl.apps.reports.aggregates import (
    Aggregate,
    AlgorithmResult,
    RunScore,
    TaskResult,
    aggregates_of,
    evaluate_task,
    read_references,
)
from torchrl_marl.apps.reports.curves import Curves, last_line_is_incomplete
from torchrl_marl.apps.reports.grouping import (
    Record,
    Task,
    extract_record,
    find_runs,
    group,
    keep_one_run_per_seed,
    remove_duplicate_runs,
)
from torchrl_marl.apps.reports.marl_eval import read_raw_results
from torchrl_marl.errors import CheckpointError, ConfigError, quoted

__all__ = ["Report", "environment_of", "join", "make_report", "read_table"]

_REQUIRED_COLUMNS = ("task", "algorithm", "seed", "frames", "return")
_RENAMED_COLUMNS = {"world": "task"}  # columns of tables that were written before 0.2
_COUNTERS = ("agent_frames", "seconds")
_KNOWN_COLUMNS = (*_REQUIRED_COLUMNS, *_COUNTERS, "run", "finished")
Foreign = Mapping[tuple[str, str], Sequence[Record]]
_RunKey = tuple[str, str, int, str]  # task, algorithm, seed, run


def read_table(path: Path) -> tuple[dict[tuple[str, str], list[Record]], list[str]]:
    """Reads a table of evaluations that has the form of a report's ``evaluations.csv``.

    Its columns are ``task, algorithm, seed, frames, return`` and, optionally, ``agent_frames``,
    ``seconds``, ``run``, which distinguishes two runs of one seed, and ``finished``, which is False
    in the rows of an unfinished run. Other columns are ignored.

    Args:
        path (Path): the file.

    Returns:
        tuple: a dict, (task, algorithm) -> runs by seed; and a sentence for each run without a
        finite return.

    Raises:
        CheckpointError: a column is missing or there twice, a row has too many or too few cells or
            is not numeric, frames are negative, or a run has two rows at the same frames.
    """
    runs: dict[_RunKey, dict[float, tuple[int, list[float]]]] = {}
    unfinished: set[_RunKey] = set()
    for line, row in _read_rows(path):
        key, frames, numbers = _parse_row(path, line, row)
        if (row.get("finished") or "").lower() == "false":
            unfinished.add(key)
        first, _ = runs.setdefault(key, {}).setdefault(frames, (line, numbers))
        if first != line:
            raise CheckpointError(
                f"{str(path)!r} has two rows of {_run_text(key)} at frame {frames:,.0f}, in lines "
                f"{first} and {line}, expected one; delete one of them."
            )
    found: dict[tuple[str, str], list[Record]] = {}
    left_out = []
    cut = key if last_line_is_incomplete(path) else None  # of the last row
    for key, rows in sorted(runs.items()):
        values = np.array([[frames, *numbers] for frames, (_, numbers) in sorted(rows.items())])
        record = _make_record(path, key, values, key not in unfinished)
        if isinstance(record, Record):
            if key == cut:
                note = f"ends in line {line} without a newline; the last number may be cut"
                record = dataclasses.replace(record, notes=(*record.notes, note))
            found.setdefault(key[:2], []).append(record)
        else:
            left_out.append(f"{str(path)!r} has no finite return at the start of {_run_text(key)}.")
    return found, left_out


def _read_rows(path: Path) -> Iterator[tuple[int, dict[str, str]]]:
    """Yields the line number of each row, and the row."""
    try:
        # Cells may hold newlines; Excel writes a byte-order mark first.
        with path.open(newline="", encoding="utf-8-sig") as file:
            reader = csv.DictReader(file)
            reader.fieldnames = [
                _RENAMED_COLUMNS.get(name, name) for name in reader.fieldnames or ()
            ]
            rows = [(reader.line_num, row) for row in reader]
            head = list(reader.fieldnames)
    except (OSError, UnicodeError, csv.Error) as error:
        raise CheckpointError(f"{str(path)!r} cannot be read: {error}.") from None
    missing = [name for name in _REQUIRED_COLUMNS if not rows or name not in rows[0][1]]
    if missing:
        raise CheckpointError(
            f"{str(path)!r} is not a table of evaluations: it has no "
            f"{f'column {missing[0]!r}' if rows else 'rows'}, expected "
            f"{', '.join(_REQUIRED_COLUMNS)}; see docs/reports.md."
        )
    twice = next((name for name in _KNOWN_COLUMNS if head.count(name) > 1), None)
    if twice is not None:
        raise CheckpointError(
            f"{str(path)!r} has two columns {twice!r}, expected one; delete the other."
        )
    for line, row in rows:
        _check_cells(path, line, row, len(head))
        yield line, row


def _check_cells(path: Path, line: int, row: Mapping[Any, Any], expected: int) -> None:
    """Refuses a row that a decimal comma has split, or that is cut."""
    missing = sum(cell is None for cell in row.values())
    found = expected - missing + len(row.get(None, ()))
    if found != expected:
        raise CheckpointError(
            f"{str(path)!r} has {found} cells in line {line} and {expected} columns, expected as "
            "many; write numbers with a point and names with commas in quotes, or delete the line."
        )


def _parse_row(path: Path, line: int, row: Mapping[str, str]) -> tuple[_RunKey, float, list[float]]:
    """Returns the key, the frames, the return and the counters of a row."""
    try:
        key = row["task"], row["algorithm"], int(row["seed"]), row.get("run") or ""
        if not all(key[:2]):
            raise ValueError
        frames = float(row["frames"])
        numbers = [float(row["return"])]
        numbers += [float(row.get(name) or math.nan) for name in _COUNTERS]
    except (TypeError, ValueError):
        raise CheckpointError(
            f"{str(path)!r} is broken in line {line}, expected a task, an algorithm, "
            "and numbers for seed, frames and return; delete the line."
        ) from None
    if not (math.isfinite(frames) and frames >= 0):
        raise CheckpointError(
            f"{str(path)!r} has frames={row['frames']} in line {line}, expected a number of 0 or "
            "more; delete the line."
        )
    return key, frames, numbers


def _run_text(key: _RunKey) -> str:
    return f"{quoted(key[1])} in {quoted(key[0])}, seed {key[2]}"


def _make_record(path: Path, key: _RunKey, values: np.ndarray, finished: bool) -> Record | str:
    table = dict(zip(("frames", "return_mean", "agent_frames", "seconds"), values.T))
    summary = {"frames": float(values[-1, 0])} if finished else {}
    found = extract_record(Curves(path, "", {}, {}, table, summary, key[2]))
    if isinstance(found, str):
        return found
    return dataclasses.replace(found, row=_run_text(key))


def join(tasks: Sequence[Task], tables: Iterable[Foreign]) -> list[Task]:
    """Adds the algorithms in tables to the tasks with the same names.

    Several tables may hold different seeds of one algorithm.

    Args:
        tasks (list of Task): tasks from the run folders.
        tables (list): runs of each table, from :func:`read_table`.

    Raises:
        ConfigError: the task already has an algorithm of that name, from run folders, with one of
            these seeds, or of another environment.
    """
    joined = {task.name: Task(task.name, task.settings, {**task.algorithms}) for task in tasks}
    seeds: dict[tuple[str, str], set[int]] = {}  # of the tables
    for table in tables:
        for (name, algorithm), records in table.items():
            settings = {"env.library": "", "env.name": name, **records[0].run.settings}
            task = joined.setdefault(name, Task(name, settings, {}))
            _check_one_environment(records[0], task, algorithm)
            own = {record.run.seed for record in records}
            known = seeds.setdefault((name, algorithm), set())
            if algorithm in task.algorithms and (not known or known & own):
                raise ConfigError(
                    f"{str(records[0].run.folder)!r} has {quoted(algorithm)} in {quoted(name)}, "
                    "as other runs do; give it another name, such as "
                    f"{quoted(f'other {algorithm}')}."
                )
            task.algorithms[algorithm] = [*task.algorithms.get(algorithm, ()), *records]
            known |= own
    return sorted(joined.values(), key=lambda task: task.name)


def environment_of(record: Record) -> str:
    """Returns the library of a run's environment; an empty text for runs of a CSV table.

    Args:
        record (Record): the run.
    """
    return str(record.run.settings.get("env.library", ""))


def _check_one_environment(record: Record, task: Task, algorithm: str) -> None:
    """Refuses seeds of one algorithm that two files have for different environments."""
    environment = environment_of(record)
    known = map(environment_of, task.algorithms.get(algorithm, ()))
    other = next((name for name in known if name != environment), None)
    if environment and other:
        raise ConfigError(
            f"{record.name!r} has {quoted(algorithm)} in {quoted(task.name)} of the environment "
            f"{quoted(environment)}, and other runs of {quoted(other)}, expected one "
            "environment; report on each environment alone."
        )


_READERS = {".csv": read_table, ".json": read_raw_results}


@dataclass(frozen=True)
class Report:
    """All results of a report."""

    tasks: list[TaskResult]
    aggregates: list[Aggregate]
    left_out: list[str]
    """A sentence for each run that could not be used."""

    @property
    def teams(self) -> list[tuple[TaskResult, AlgorithmResult]]:
        """All pairs of a task's result and the results of one algorithm in that task."""
        return [(task, team) for task in self.tasks for team in task.teams.values()]

    @property
    def runs(self) -> list[RunScore]:
        """All runs, by task, algorithm and seed."""
        return [run for _, team in self.teams for run in team.runs]

    @property
    def algorithms(self) -> list[str]:
        """Names of all algorithms, those with the most tasks first."""
        tasks = Counter(name for task in self.tasks for name in task.teams)
        return sorted(tasks, key=lambda name: (-tasks[name], name))


def make_report(
    runs: Iterable[str | Path] | str | Path, references: str | Path | None = None
) -> Report:
    """Reads runs and computes all results of a report.

    Args:
        runs (list of paths): run folders, or folders above them; a ``.csv`` file is a table
            of evaluations, from an earlier report or another library, and a ``.json`` file has
            the raw results of ``--json``, Mava or BenchMARL.
        references (path, optional): file of reference returns that replaces ``references.yaml``
            beside this module, in the same form.

    Raises:
        CheckpointError: there are no runs, no run is usable, or a table is broken.
        ConfigError: the references cannot be read, or a table has an algorithm that the runs
            already have.
    """
    entries = read_references(None if references is None else Path(references))
    given = [runs] if isinstance(runs, (str, os.PathLike)) else list(runs)
    tables = [path for path in map(Path, given) if path.suffix in _READERS and path.is_file()]
    folders = [path for path in given if Path(path) not in tables]
    found, left_out = find_runs(folders) if folders or not tables else ([], [])
    records = [extract_record(run) for run in found]
    usable, copies = remove_duplicate_runs([x for x in records if isinstance(x, Record)])
    usable, repeats = keep_one_run_per_seed(usable)
    left_out += [record for record in records if isinstance(record, str)] + copies + repeats
    foreign = [_READERS[path.suffix](path) for path in tables]
    left_out += [sentence for _, without in foreign for sentence in without]
    tasks = join(group(usable), (runs for runs, _ in foreign))
    if not tasks:
        raise CheckpointError(left_out[0])
    results = [evaluate_task(task, entries) for task in tasks]
    return Report(results, aggregates_of(results), left_out)
