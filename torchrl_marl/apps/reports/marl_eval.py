"""Raw results as the JSON file of marl-eval, which Mava and BenchMARL write, too."""

from __future__ import annotations

import dataclasses
import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from torchrl_marl.apps.reports.aggregates import TaskResult
from torchrl_marl.apps.reports.curves import Curves
from torchrl_marl.apps.reports.grouping import Record, extract_record
from torchrl_marl.errors import CheckpointError, nearest, quoted

__all__ = ["raw_results", "read_raw_results"]

_ABSOLUTE = "absolute_metrics"
_COUNTERS = ("step_count", "elapsed_time")
_RETURN_NAMES = ("return", "mean_episode_return", "episode_return")
Tree = Mapping[str, Any]


def raw_results(tasks: Sequence[TaskResult]) -> dict[str, Any]:
    """Returns the measured returns of all runs in the form of marl-eval.

    Its levels are environment, task, algorithm, ``seed_k`` and ``step_i``. A step has the frames as
    ``step_count``, and lists of values such as ``{"return": [1.5]}``. The list has one value, the
    mean over the episodes. ``absolute_metrics`` has the return of ``evaluation.absolute_episodes``,
    or the last return of a run without it. Names of algorithms have no commas, as marl-eval asks.

    Args:
        tasks (list of TaskResult): results of a report's tasks.

    Reference: Gorsane et al., 2022, Towards a Standardised Performance Evaluation Protocol for
    Cooperative MARL.
    """
    found: dict[str, Any] = {}
    for result in tasks:
        environment = str(result.task.settings["env.library"]) or "environment"
        algorithms = found.setdefault(environment, {}).setdefault(result.task.name, {})
        for name, team in result.teams.items():
            own = algorithms.setdefault(name.replace(", ", " - ").replace(",", " "), {})
            for record in (run.record for run in team.runs):
                seed = f"seed_{record.run.seed}"
                again = sum(key == seed or key.startswith(f"{seed}_run_") for key in own)
                own[f"{seed}_run_{again + 1}" if again else seed] = _steps_as_json(record)
    return found


def _steps_as_json(record: Record) -> dict[str, Any]:
    measured = record.measured
    found: dict[str, Any] = {
        f"step_{i}": {"step_count": int(frames), "return": [float(value)]}
        for i, (frames, value) in enumerate(zip(measured.frames, measured.returns))
    }
    last = float(measured.returns[-1])
    absolute = record.summarized("return_absolute")
    found[_ABSOLUTE] = {"return": [last if absolute is None else absolute]}
    return found


def read_raw_results(path: Path) -> tuple[dict[tuple[str, str], list[Record]], list[str]]:
    """Reads a JSON file in the form of marl-eval, of any library.

    A step's return is the mean of the values under ``return``, ``mean_episode_return`` or
    ``episode_return``, whichever comes first. ``elapsed_time``, as Mava writes it, becomes the
    seconds of the run.

    Args:
        path (Path): the file.

    Returns:
        tuple: a dict, (task, algorithm) -> runs by seed; and a sentence for each run without a
        finite return.

    Raises:
        CheckpointError: the file has another form, or a seed twice; the message names the place.
    """
    found: dict[tuple[str, str], list[Record]] = {}
    left_out = []
    tree = _read_json(path)
    seeds: dict[tuple[str, str, str, int, int], str] = {}  # last: seed and run -> name
    shared = _ambiguous_tasks(path, tree)
    for (environment, task, algorithm, name), steps in _iterate_runs(path, tree):
        where = f"{environment}/{task}/{algorithm}/{name}"
        if (seed := _seed_and_run(name)) is not None:
            other = seeds.setdefault((environment, task, algorithm, *seed), name)
            if other != name:
                raise CheckpointError(
                    f"{str(path)!r} has {quoted(other)} and {quoted(name)} in "
                    f"{environment}/{task}/{algorithm}, which are one seed, expected one of them; "
                    "delete the other."
                )
        title = f"{environment}, {task}" if task in shared else task
        own = found.setdefault((title, algorithm), [])
        record = _read_record(path, where, steps, seed[0] if seed else len(own))
        if isinstance(record, Record):
            own.append(record)
        else:
            left_out.append(f"{str(path)!r} has no finite return at the start of {where}.")
    return {key: runs for key, runs in found.items() if runs}, left_out


def _read_json(path: Path) -> Tree:
    try:
        tree = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        text = str(error).splitlines()[0]
        raise CheckpointError(f"{str(path)!r} cannot be read: {text}.") from None
    return _check_table(path, tree, "the file")


def _check_table(path: Path, value: Any, where: str) -> Tree:
    if not isinstance(value, Mapping) or not value:
        raise CheckpointError(
            f"{str(path)!r} is not marl-eval's JSON: {where} has {quoted(str(value)[:40])}, "
            "expected environment, task, algorithm, run and step, one within the other; see "
            "docs/reports.md."
        )
    return value


def _ambiguous_tasks(path: Path, tree: Tree) -> set[str]:
    """Returns the tasks that several environments have, which need the environment's name."""
    names = [task for name, own in tree.items() for task in _check_table(path, own, name)]
    return {name for name in names if names.count(name) > 1}


def _iterate_runs(path: Path, tree: Tree) -> Iterator[tuple[tuple[str, str, str, str], Tree]]:
    """Yields environment, task, algorithm and name of each run, and its steps."""

    def inner(keys: tuple[str, ...], value: Any) -> Iterator[tuple[Any, Tree]]:
        own = _check_table(path, value, "/".join(keys) or "the file")
        if len(keys) == 4:
            yield keys, own
            return
        for key, below in own.items():
            yield from inner((*keys, key), below)

    yield from inner((), tree)


def _seed_and_run(name: str) -> tuple[int, int] | None:
    """Returns the seed in the name of a run such as ``seed_3``, and the number of its run."""
    found = re.fullmatch(r"(?:seed|run)?_?(\d+)(?:_run_(\d+))?", name)
    return (int(found[1]), int(found[2] or 1)) if found else None


def _read_record(path: Path, where: str, steps: Tree, seed: int) -> Record | str:
    rows = [
        _read_step(path, f"{where}/{name}", _check_table(path, step, f"{where}/{name}"))
        for name, step in steps.items()
        if "absolute" not in name.lower()
    ]
    if not rows:
        raise CheckpointError(f"{str(path)!r} has no steps in {where}, expected step_0 and so on.")
    rows.sort()
    frames = [row[0] for row in rows]
    if len(set(frames)) < len(frames):
        raise CheckpointError(f"{str(path)!r} has two steps with one step_count in {where}.")
    columns = dict(zip(("frames", "seconds", "return_mean"), np.array(rows).T))
    columns["agent_frames"] = np.full(len(rows), math.nan)
    summary: dict[str, Any] = {"frames": frames[-1]}
    absolute = next((steps[name] for name in steps if "absolute" in name.lower()), None)
    if absolute:
        _, _, summary["return_absolute"] = _read_step(path, f"{where}/{_ABSOLUTE}", absolute, 0.0)
    settings = {"env.library": where.partition("/")[0]}
    found = extract_record(Curves(path, "", settings, {}, columns, summary, seed))
    if isinstance(found, str):
        return found
    return dataclasses.replace(found, row=where)


def _read_step(
    path: Path, where: str, step: Any, frames: float | None = None
) -> tuple[float, float, float]:
    """Returns frames, seconds and return of a step."""
    metrics = [key for key in _check_table(path, step, where) if key not in _COUNTERS]
    metric = next((name for name in _RETURN_NAMES if name in metrics), None)
    if metric is None:
        raise CheckpointError(
            f"{str(path)!r} has no return in {where}, {nearest('return', metrics)}expected one of "
            f"{', '.join(_RETURN_NAMES)}."
        )
    try:
        count = float(step["step_count"]) if frames is None else frames
        values = np.asarray(step[metric], dtype=np.float64)
        value = float(values.mean()) if values.size else math.nan
        seconds = float(step.get("elapsed_time", math.nan))
        if not (math.isfinite(count) and count >= 0 and values.size):
            raise ValueError
    except (KeyError, TypeError, ValueError):
        raise CheckpointError(
            f"{str(path)!r} is broken in {where}, expected a step_count of 0 or more and lists of "
            "numbers."
        ) from None
    return count, seconds, value
