"""Normalized scores, sample efficiency, and aggregates over environments."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import permutations
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from torchrl_marl.apps.reports.grouping import (
    REWARD,
    Numbers,
    Progress,
    Record,
    Task,
    mean_of_known,
)
from torchrl_marl.errors import ConfigError
from torchrl_marl.training.statistics import (
    Estimate,
    estimate,
    interquartile_mean,
    mean,
    median,
    optimality_gap,
    probability_of_improvement,
    score_distribution,
)

__all__ = [
    "Aggregate",
    "Line",
    "Scored",
    "TaskResult",
    "Team",
    "aggregates_of",
    "read_references",
    "result_of",
    "shown_by",
]

_FILE = Path(__file__).with_name("references.yaml")
_KEYS = {"task", "settings", "random", "best", "source"}


@dataclass(frozen=True)
class Reference:
    """Two returns of a task, each with where it is from; None where it is not known."""

    random: float | None
    random_source: str
    best: float | None
    best_source: str

    @property
    def why_none(self) -> str:
        """Why returns cannot be normalized; empty if they can."""
        if self.random is None:
            return "no run has measured the random policy"
        if self.best is None or self.best <= self.random:
            return f"nothing is known that is better than the random policy's {self.random:.4g}"
        return ""

    def normalize(self, returns: Any) -> Any:
        """Returns 0 for the random policy's return and 1 for the best known; keeps the shape."""
        assert self.random is not None and self.best is not None
        return (returns - self.random) / (self.best - self.random)


def read_references(path: Path | None = None) -> list[Mapping[str, Any]]:
    """Reads the entries of a file such as ``references.yaml``.

    Args:
        path (Path, optional): another file than the package's own.

    Raises:
        ConfigError: a file that does not hold such entries.
    """
    path = _FILE if path is None else path
    try:
        entries = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, yaml.YAMLError) as error:
        raise ConfigError(
            f"the references {str(path)!r} cannot be read: {str(error).splitlines()[0]}."
        ) from None
    for entry in entries if isinstance(entries, list) else [None]:
        if isinstance(entry, dict) and "task" in entry:  # its name before 0.2
            entry["task"] = entry.pop("task")
        keys = set(entry) if isinstance(entry, dict) else set()
        if not {"task", "source"} <= keys <= _KEYS:
            raise ConfigError(
                f"the references {str(path)!r} hold {str(entry)[:80]!r}, expected entries with "
                f"task and source, and of {', '.join(sorted(_KEYS - {'task', 'source'}))} some; "
                "see torchrl_marl/apps/reports/references.yaml."
            )
    return list(entries)


def find_reference(
    task: Task, ends: Mapping[str, Sequence[float]], entries: Sequence[Mapping[str, Any]]
) -> Reference:
    """Finds what the returns of a task are normalized by.

    A figure of the entries comes first. Otherwise random is the mean of what the runs measured, and
    the best known is the better of the heuristic's mean and the best run.

    Args:
        task (Task): with its runs.
        ends (mapping): the scores of each algorithm's runs.
        entries (list of mappings): of :func:`read_references`.
    """
    entry = _entry(task, entries)
    random, random_source = entry.get("random"), entry.get("source", "")
    if random is None:
        random, random_source = _measured(task, "return_random", "random actions")
    best, best_source = entry.get("best"), entry.get("source", "")
    if best is None:
        best, best_source = _measured(task, "return_heuristic", "the library's heuristic")
        name = max(ends, key=lambda name: max(ends[name]), default=None)
        if name is not None and (best is None or max(ends[name]) > best):
            best, best_source = max(ends[name]), f"the best run of this report, of {name}"
    return Reference(random, random_source, best, best_source)


def _entry(task: Task, entries: Sequence[Mapping[str, Any]]) -> Mapping[str, Any]:
    name = f"{task.settings.get('env.library')}/{task.settings.get('env.name')}"
    for entry in entries:
        wanted = entry.get("settings") or {}
        if entry["task"] == name and all(task.settings.get(k) == x for k, x in wanted.items()):
            return entry
    return {}


def _measured(task: Task, key: str, what: str) -> tuple[float | None, str]:
    found = [x for x in (record.summarized(key) for record in task.records) if x is not None]
    runs = f"{len(found)} run{'s' * (len(found) != 1)}"
    return (float(np.mean(found)), f"{what}, measured by {runs}") if found else (None, "")


_FINE = 4  # evaluations from which on they make a curve


@dataclass(frozen=True)
class Scored:
    """A run's score: its measured return at the frames at which the task's runs are compared."""

    record: Record
    score: float
    frames: float
    agent_frames: float
    seconds: float
    at_equal_frames: bool
    """False where the run measured nothing near those frames: its last return is the score."""
    end: float
    """Its last return, whatever the frames."""
    groups: dict[str, float]
    """Each group's return there, of a task of several."""


@dataclass(frozen=True)
class Team:
    """An algorithm in a task: its seeds' scores, estimates and curves."""

    algorithm: str
    runs: list[Scored]
    iqm: Estimate
    mean: Estimate
    median: Estimate
    evaluation: Line | None
    training: Line | None
    groups: dict[str, Estimate]
    """Interquartile mean of each group's return, of a task of several."""

    @property
    def scores(self) -> list[float]:
        """Of each run."""
        return [run.score for run in self.runs]


@dataclass(frozen=True)
class TaskResult:
    """A task's algorithms, compared."""

    task: Task
    frames: float
    """Frames at which runs are compared."""
    equal: bool
    """Whether all runs are compared at those frames."""
    reference: Reference
    teams: dict[str, Team]
    improvements: dict[tuple[str, str], Estimate]
    """Probability that a run of the first algorithm is better than one of the second."""

    @property
    def best(self) -> str:
        """The algorithm of the greatest interquartile mean."""
        return max(self.teams, key=lambda name: self.teams[name].iqm.value)

    def normalized(self, algorithm: str) -> list[float]:
        """Returns the scores of an algorithm, 0 for the random policy's and 1 for the best."""
        return [float(self.reference.normalize(x)) for x in self.teams[algorithm].scores]


def result_of(task: Task, references: Sequence[Mapping[str, Any]]) -> TaskResult:
    """Works out the figures of a task.

    Args:
        task (Task): with its runs.
        references (list of mappings): what returns are normalized by.
    """
    frames = _common_frames(task)
    scored = {
        name: [_scored(record, frames) for record in seeds]
        for name, seeds in task.algorithms.items()
    }
    ends = {name: [run.score for run in runs] for name, runs in scored.items()}
    teams = {name: _team(name, runs) for name, runs in scored.items()}
    return TaskResult(
        task,
        frames,
        all(run.at_equal_frames for runs in scored.values() for run in runs),
        find_reference(task, ends, references),
        teams,
        improvements({name: [np.array(scores)] for name, scores in ends.items()}),
    )


def shown_by(result: TaskResult) -> str:
    """``evaluation`` or ``training``: which curves of a task are shown first.

    Evaluations, unless they are few.
    """
    teams = result.teams.values()
    if all(t.evaluation is not None and len(t.evaluation.frames) >= _FINE for t in teams):
        return "evaluation"
    return "training" if all(t.training is not None for t in teams) else "evaluation"


def improvements(
    scores: Mapping[str, Sequence[np.ndarray]],
) -> dict[tuple[str, str], Estimate]:
    """Compares each algorithm with each other one.

    Args:
        scores (mapping): of each algorithm's tasks, which are the same for all.
    """
    return {
        (one, other): estimate(probability_of_improvement, scores[one], scores[other])
        for one, other in permutations(scores, 2)
    }


def _team(name: str, runs: list[Scored]) -> Team:
    scores = [[run.score for run in runs]]
    return Team(
        name,
        runs,
        estimate(interquartile_mean, scores),
        estimate(mean, scores),
        estimate(median, scores),
        line_of([run.record.evaluation for run in runs]),
        line_of([run.record.training for run in runs]),
        {
            group: estimate(interquartile_mean, [[run.groups[group] for run in runs]])
            for group in runs[0].groups
            if all(group in run.groups for run in runs)
        },
    )


def _common_frames(task: Task) -> float:
    """Returns the most frames that every algorithm has come to with a finished run.

    Where none has finished, with any run.
    """
    finished = [
        max(ends)
        for seeds in task.algorithms.values()
        if (ends := [record.measured.end for record in seeds if record.finished])
    ]
    anyhow = [max(record.measured.end for record in seeds) for seeds in task.algorithms.values()]
    return min(finished or anyhow)


def _scored(record: Record, frames: float) -> Scored:
    measured = record.measured
    place = measured.at(frames)
    at = len(measured) - 1 if place is None else place
    return Scored(
        record,
        float(measured.returns[at]),
        float(measured.frames[at]),
        float(measured.agent_frames[at]),
        float(measured.seconds[at]),
        place is not None,
        float(measured.returns[-1]),
        _group_returns(record, float(measured.frames[at])),
    )


def _group_returns(record: Record, frames: float) -> dict[str, float]:
    table = record.run.evaluation if record.is_evaluated else record.run.training
    (rows,) = np.nonzero(table["frames"] == frames)
    columns = [name for name in table if name.endswith(REWARD)]
    found = {name.removesuffix(REWARD): float(table[name][rows[-1]]) for name in columns}
    known = {name: value for name, value in found.items() if np.isfinite(value)}
    return known if len(known) > 1 else {}


POINTS = 80
"""Points of a curve at most."""
_RESAMPLES = 2000


@dataclass(frozen=True)
class Line:
    """A curve over frames, with its interval, ``[K]`` each; NaN where there is no interval.

    ``agent_frames`` and ``seconds`` are means over the runs at those frames.
    """

    frames: Numbers
    agent_frames: Numbers
    seconds: Numbers
    value: Numbers
    low: Numbers
    high: Numbers
    runs: Numbers
    """Runs that have come so far."""
    each: Numbers
    """Each run's own returns, ``[K, R]``; NaN where it has none."""


def line_of(runs: Sequence[Progress], points: int = POINTS) -> Line | None:
    """Joins the curves of an algorithm's runs in one task.

    Between two measurements a run's curve is straight. The line ends where fewer than half of
    the runs go on.

    Args:
        runs (list of Progress): of the seeds.
        points (int): at most so many.
    """
    runs = [run for run in runs if len(run)]
    if not runs:
        return None
    grid = np.unique(np.concatenate([run.frames for run in runs]))
    each = on_grid(runs, grid)
    grid = grid[np.isfinite(each).sum(1) * 2 >= len(runs)]
    if not len(grid):
        return None
    grid = grid[
        np.unique(np.linspace(0, len(grid) - 1, min(points, len(grid))).round().astype(int))
    ]
    each = on_grid(runs, grid)
    value, low, high = _estimates(each)
    agent_frames, seconds = (
        mean_of_known(on_grid(runs, grid, column), 1) for column in ("agent_frames", "seconds")
    )
    return Line(
        grid, agent_frames, seconds, value, low, high, np.isfinite(each).sum(1).astype(float), each
    )


def on_grid(runs: Sequence[Progress], grid: Numbers, column: str = "returns") -> Numbers:
    """Reads the runs' curves off at some frames, ``[K, R]``; NaN before and after a run.

    Args:
        runs (list of Progress): of the seeds.
        grid (array): frames, ``[K]``.
        column (str): ``returns``, ``agent_frames`` or ``seconds``.
    """
    columns = [
        np.interp(grid, run.frames, getattr(run, column), left=np.nan, right=np.nan) for run in runs
    ]
    return np.stack(columns, 1)


def _estimates(each: Numbers) -> tuple[Numbers, Numbers, Numbers]:
    """Estimates each point from the runs that have come so far."""
    there = np.isfinite(each)
    value, low, high = (np.full(len(each), np.nan) for _ in range(3))
    for pattern in np.unique(there, axis=0):
        rows = (there == pattern).all(1)
        found = estimate(interquartile_mean, [each[rows][:, pattern]], resamples=_RESAMPLES)
        value[rows] = found.value
        if found.has_interval:
            low[rows], high[rows] = found.low, found.high
    return value, low, high


STATISTICS = {
    "IQM": interquartile_mean,
    "median": median,
    "mean": mean,
    "optimality gap": optimality_gap,
}
"""What is estimated of normalized scores."""

_POINTS = 60


@dataclass(frozen=True)
class Aggregate:
    """Some algorithms on all tasks that they have in common."""

    tasks: list[str]
    estimates: dict[str, dict[str, Estimate]]
    """Algorithm -> statistic -> estimate."""
    thresholds: Numbers
    profiles: dict[str, Estimate]
    """Share of runs above each threshold."""
    share: Numbers
    """Share of each task's frames, at the points of the curves."""
    curves: dict[str, Estimate]
    improvements: dict[tuple[str, str], Estimate]
    seeds: dict[str, list[int]]
    """Runs of each algorithm in each task."""
    scores: dict[str, list[Numbers]]
    """Normalized, of each algorithm in each task."""

    @property
    def algorithms(self) -> list[str]:
        """By their interquartile mean, the best first."""
        return sorted(self.estimates, key=lambda name: -self.estimates[name]["IQM"].value)


def aggregates_of(results: Sequence[TaskResult]) -> list[Aggregate]:
    """Aggregates the algorithms that share several tasks.

    First those of the most tasks, then with each that has fewer, on the fewer tasks. Those that
    share too few tasks with them stand among themselves, so that no algorithm is left out that
    has several tasks.

    A report on one task has the same figures of that one.

    Args:
        results (list of TaskResult): those that cannot be normalized do not count.
    """
    usable = {result.task.name: result for result in results if not result.reference.why_none}
    names = {name for result in usable.values() for name in result.teams}
    having = {name: {w for w, result in usable.items() if name in result.teams} for name in names}
    fewest = 1 if len(results) == 1 else 2
    left = sorted(
        (name for name in names if len(having[name]) >= fewest),
        key=lambda name: (-len(having[name]), name),
    )
    blocks: list[tuple[list[str], list[str]]] = []
    while left:
        blocks += _blocks(left, having, fewest)
        shown = {name for _, algorithms in blocks for name in algorithms}
        left = [name for name in left if name not in shown]
    return [
        _aggregate([usable[name] for name in tasks], algorithms) for tasks, algorithms in blocks
    ]


def _blocks(
    order: Sequence[str], having: Mapping[str, set[str]], fewest: int
) -> list[tuple[list[str], list[str]]]:
    """Tasks that algorithms share, and the most of these, of more and more algorithms."""
    blocks: dict[tuple[str, ...], list[str]] = {}
    for i in range(1, len(order) + 1):
        tasks = set.intersection(*(having[name] for name in order[:i]))
        if len(tasks) >= fewest:
            blocks[tuple(sorted(tasks))] = list(order[:i])
    several = {tasks: own for tasks, own in blocks.items() if len(own) > 1} or blocks
    return [(list(tasks), algorithms) for tasks, algorithms in several.items()]


def profile_of(scores: Sequence[np.ndarray], thresholds: Numbers) -> Estimate:
    """Estimates a performance profile with its band.

    Args:
        scores (list of arrays): normalized, of each task.
        thresholds (array): ``[K]``.
    """
    distribution = partial(score_distribution, thresholds=thresholds)
    return estimate(distribution, scores, resamples=_RESAMPLES)


def _aggregate(results: Sequence[TaskResult], algorithms: Sequence[str]) -> Aggregate:
    scores = {
        name: [np.array(result.normalized(name)) for result in results] for name in algorithms
    }
    every = np.concatenate([x for tasks in scores.values() for x in tasks])
    thresholds = np.linspace(min(0.0, every.min()), max(1.0, every.max()), 101).round(4)
    share = np.linspace(0, 1, _POINTS)
    curves = {name: _curve(results, name, share) for name in algorithms}
    return Aggregate(
        [result.task.name for result in results],
        {
            name: {what: estimate(statistic, tasks) for what, statistic in STATISTICS.items()}
            for name, tasks in scores.items()
        },
        thresholds,
        {name: profile_of(tasks, thresholds) for name, tasks in scores.items()},
        share,
        {name: curve for name, curve in curves.items() if curve is not None},
        improvements(scores),
        {name: [len(x) for x in tasks] for name, tasks in scores.items()},
        scores,
    )


def _curve(results: Sequence[TaskResult], name: str, share: Numbers) -> Estimate | None:
    """Estimates the curve over the share of the tasks' frames; None where no run has come far.

    Of each task those runs count that have a return at its first and last frames, by their
    evaluations, or their training episodes where these begin later.
    """
    tasks = []
    for result in results:
        each = _on_share(result, name, share)
        if not each.shape[1]:
            return None
        tasks.append(np.asarray(result.reference.normalize(each)))
    return estimate(interquartile_mean, tasks, resamples=_RESAMPLES)


def _on_share(result: TaskResult, name: str, share: Numbers) -> Numbers:
    """``[K, R]``: returns of the runs that have come to the task's frames."""
    runs = [run.record.measured for run in result.teams[name].runs]
    runs = [run for run in runs if run.end >= 0.9 * result.frames]
    if not runs:
        return np.empty((len(share), 0))
    ends = np.array([min(run.end, result.frames) for run in runs])
    starts = np.array([run.frames[0] for run in runs])
    columns = [
        on_grid([run], start + share * (end - start))[:, 0]
        for run, start, end in zip(runs, starts, ends)
    ]
    return np.stack(columns, 1)
