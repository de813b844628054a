"""Normalized scores, sample efficiency, and aggregates over tasks.

Shapes: K points of a curve or thresholds of a profile, R runs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import permutations
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from torchrl_marl.apps.reports.curves import REWARD
from torchrl_marl.apps.reports.grouping import (
    Numbers,
    Progress,
    Record,
    Task,
    mean_of_known,
)
from torchrl_marl.errors import ConfigError, quoted
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
    "AlgorithmResult",
    "CurveWithInterval",
    "RunScore",
    "TaskResult",
    "aggregates_of",
    "default_curves",
    "evaluate_task",
    "read_references",
]

_REFERENCES_FILE = Path(__file__).with_name("references.yaml")
_ENTRY_KEYS = {"task", "settings", "random", "best", "source"}


@dataclass(frozen=True)
class Reference:
    """Return of a task's random policy and best known return, with sources; None if unknown."""

    random: float | None
    random_source: str
    best: float | None
    best_source: str

    @property
    def why_none(self) -> str:
        """The reason why returns cannot be normalized; empty if they can."""
        if self.random is None:
            return "no run has measured the random policy"
        if self.best is None or self.best <= self.random:
            return f"no known return is better than the random policy's {self.random:.4g}"
        return ""

    def normalize(self, returns: Any) -> Any:
        """Scales returns: the random policy's return becomes 0, the best known return 1."""
        assert self.random is not None and self.best is not None
        return (returns - self.random) / (self.best - self.random)


def read_references(path: Path | None = None) -> list[Mapping[str, Any]]:
    """Reads the entries of a file such as ``references.yaml``.

    Args:
        path (Path, optional): file to read; default: the file in the package.

    Raises:
        ConfigError: the file cannot be read, or does not hold such entries.
    """
    path = _REFERENCES_FILE if path is None else path
    try:
        entries = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, yaml.YAMLError) as error:
        raise ConfigError(
            f"the references {str(path)!r} cannot be read: {str(error).splitlines()[0]}."
        ) from None
    for entry in entries if isinstance(entries, list) else [None]:
        if isinstance(entry, dict) and "world" in entry:  # the key's name before 0.2
            entry["task"] = entry.pop("world")
        keys = set(entry) if isinstance(entry, dict) else set()
        if not {"task", "source"} <= keys <= _ENTRY_KEYS:
            raise ConfigError(
                f"the references {str(path)!r} hold {str(entry)[:80]!r}, expected entries with "
                f"task, source and some of {', '.join(sorted(_ENTRY_KEYS - {'task', 'source'}))}; "
                "see torchrl_marl/apps/reports/references.yaml."
            )
        _check_entry(path, entry or {})
    return list(entries)


def _check_entry(path: Path, entry: Mapping[str, Any]) -> None:
    """Refuses values of wrong types; YAML reads ``1e3`` as a text."""
    for key, value in entry.items():
        if key in ("task", "source"):
            right, expected = isinstance(value, str), "a text"
        elif key == "settings":
            right, expected = value is None or isinstance(value, Mapping), "settings"
        else:
            number = isinstance(value, (int, float)) and not isinstance(value, bool)
            right, expected = value is None or (number and np.isfinite(value)), "a finite number"
        if not right:
            raise ConfigError(
                f"the references {str(path)!r} have {key}={quoted(value)} for "
                f"{quoted(entry['task'])}, expected {expected}; change it."
            )


def find_reference(
    task: Task, ends: Mapping[str, Sequence[float]], entries: Sequence[Mapping[str, Any]]
) -> Reference:
    """Finds the reference returns of a task: the random policy's and the best known.

    Values in the entries take precedence. Otherwise the random policy's return is the mean of what
    the runs measured. The best known return is then the heuristic's mean return or the best run's
    return, whichever is higher.

    Args:
        task (Task): task with its runs.
        ends (mapping): scores of each algorithm's runs.
        entries (list of mappings): entries of :func:`read_references`.
    """
    entry = _find_entry(task, entries)
    random, random_source = entry.get("random"), entry.get("source", "")
    if random is None:
        random, random_source = _mean_of_runs(task, "return_random", "random actions")
    best, best_source = entry.get("best"), entry.get("source", "")
    if best is None:
        best, best_source = _mean_of_runs(task, "return_heuristic", "the library's heuristic")
        name = max(ends, key=lambda name: max(ends[name]), default=None)
        if name is not None and (best is None or max(ends[name]) > best):
            best, best_source = max(ends[name]), f"the best run of this report, of {name}"
    return Reference(random, random_source, best, best_source)


def _find_entry(task: Task, entries: Sequence[Mapping[str, Any]]) -> Mapping[str, Any]:
    library, own = task.settings.get("env.library"), task.settings.get("env.name")
    name = f"{library}/{own}" if library else own  # tables do not name a library
    for entry in entries:
        wanted = entry.get("settings") or {}
        if entry["task"] == name and all(task.settings.get(k) == x for k, x in wanted.items()):
            return entry
    return {}


def _mean_of_runs(task: Task, key: str, what: str) -> tuple[float | None, str]:
    found = [x for x in (record.summarized(key) for record in task.records) if x is not None]
    runs = f"{len(found)} run{'s' * (len(found) != 1)}"
    return (float(np.mean(found)), f"{what}, measured by {runs}") if found else (None, "")


_MIN_EVALUATIONS = 4  # fewest evaluations that make a curve


@dataclass(frozen=True)
class RunScore:
    """A run's score: its return at the number of frames at which the task's runs are compared."""

    record: Record
    score: float
    frames: float
    agent_frames: float
    seconds: float
    at_equal_frames: bool
    """False if no measurement is near; the score is then interpolated, or the nearest beyond."""
    end: float
    """Last measured return of the run."""
    groups: dict[str, float]
    """Return of each group at those frames; empty for a task with one group."""


@dataclass(frozen=True)
class AlgorithmResult:
    """Results of one algorithm in one task: scores of the seeds, estimates and curves."""

    algorithm: str
    runs: list[RunScore]
    iqm: Estimate
    mean: Estimate
    median: Estimate
    evaluation: CurveWithInterval | None
    training: CurveWithInterval | None
    groups: dict[str, Estimate]
    """Interquartile mean of each group's return; empty for a task with one group."""

    @property
    def scores(self) -> list[float]:
        """Scores of the runs."""
        return [run.score for run in self.runs]


@dataclass(frozen=True)
class TaskResult:
    """Comparison of the algorithms of a task."""

    task: Task
    frames: float
    """Number of frames at which runs are compared."""
    equal: bool
    """True if every run has a measurement near those frames."""
    reference: Reference
    teams: dict[str, AlgorithmResult]
    improvements: dict[tuple[str, str], Estimate]
    """Pair of algorithms -> probability that a run of the first beats one of the second."""

    @property
    def runs(self) -> list[RunScore]:
        """The runs of all algorithms."""
        return [run for team in self.teams.values() for run in team.runs]

    @property
    def best(self) -> str:
        """The algorithm with the greatest interquartile mean."""
        return max(self.teams, key=lambda name: self.teams[name].iqm.value)

    def normalized(self, algorithm: str) -> list[float]:
        """Returns the normalized scores of an algorithm: 0 is random, 1 the best known."""
        return [float(self.reference.normalize(x)) for x in self.teams[algorithm].scores]


def evaluate_task(task: Task, references: Sequence[Mapping[str, Any]]) -> TaskResult:
    """Computes the results of a task.

    Args:
        task (Task): task with its runs.
        references (list of mappings): entries of :func:`read_references`.
    """
    frames = _common_frames(task)
    scored = {
        name: [_score_run(record, frames) for record in seeds]
        for name, seeds in task.algorithms.items()
    }
    ends = {name: [run.score for run in runs] for name, runs in scored.items()}
    teams = {name: _team_result(name, runs) for name, runs in scored.items()}
    return TaskResult(
        task,
        frames,
        all(run.at_equal_frames for runs in scored.values() for run in runs),
        find_reference(task, ends, references),
        teams,
        improvements({name: [np.array(scores)] for name, scores in ends.items()}),
    )


def default_curves(result: TaskResult) -> str:
    """Returns which curves of a task are shown first: ``evaluation`` or ``training``.

    The evaluations are shown first, unless they have few points.
    """
    teams = result.teams.values()
    if all(
        t.evaluation is not None and len(t.evaluation.frames) >= _MIN_EVALUATIONS for t in teams
    ):
        return "evaluation"
    return "training" if all(t.training is not None for t in teams) else "evaluation"


def improvements(
    scores: Mapping[str, Sequence[np.ndarray]],
) -> dict[tuple[str, str], Estimate]:
    """Estimates, for each pair of algorithms, the probability that the first is better.

    Args:
        scores (mapping): algorithm -> scores in each task; all have the same tasks.
    """
    return {
        (one, other): estimate(probability_of_improvement, scores[one], scores[other])
        for one, other in permutations(scores, 2)
    }


def _team_result(name: str, runs: list[RunScore]) -> AlgorithmResult:
    scores = [[run.score for run in runs]]
    return AlgorithmResult(
        name,
        runs,
        estimate(interquartile_mean, scores),
        estimate(mean, scores),
        estimate(median, scores),
        average_curves([run.record.evaluation for run in runs]),
        average_curves([run.record.training for run in runs]),
        {
            group: estimate(interquartile_mean, [[run.groups[group] for run in runs]])
            for group in runs[0].groups
            if all(group in run.groups for run in runs)
        },
    )


def _common_frames(task: Task) -> float:
    """Returns the largest number of frames that a finished run of every algorithm has reached.

    Algorithms without a finished run do not count, unless no algorithm has one.
    """
    finished = [
        max(ends)
        for seeds in task.algorithms.values()
        if (ends := [record.measured.end for record in seeds if record.finished])
    ]
    reached = [max(record.measured.end for record in seeds) for seeds in task.algorithms.values()]
    return min(finished or reached)


def _score_run(record: Record, frames: float) -> RunScore:
    """Reads a run's curve at the nearest measurement, or between two if none is near."""
    measured = record.measured
    place = measured.at(frames)
    at = frames if place is None else float(measured.frames[place])
    at = float(np.clip(at, measured.frames[0], measured.end))

    return RunScore(
        record,
        _value_at(measured.frames, measured.returns, at),
        at,
        _value_at(measured.frames, measured.agent_frames, at),
        _value_at(measured.frames, measured.seconds, at),
        place is not None,
        float(measured.returns[-1]),
        _group_returns(record, at),
    )


def _value_at(frames: Numbers, values: Numbers, at: float) -> float:
    """Returns a curve's last value at given frames; without one, that between its neighbors."""
    (same,) = np.nonzero(frames == at)
    return float(values[same[-1]] if len(same) else np.interp(at, frames, values))


def _group_returns(record: Record, frames: float) -> dict[str, float]:
    table = record.run.evaluation if record.is_evaluated else record.run.training
    columns = [name for name in table if name.endswith(REWARD)]
    found = {
        name.removesuffix(REWARD): _value_at(table["frames"], table[name], frames)
        for name in columns
    }
    known = {name: value for name, value in found.items() if np.isfinite(value)}
    return known if len(known) > 1 else {}


POINTS = 80
"""Maximum number of points in a curve."""
_RESAMPLES = 2000


@dataclass(frozen=True)
class CurveWithInterval:
    """Curve over frames with its interval, ``[K]`` each; without an interval, bounds are NaN.

    ``agent_frames`` and ``seconds`` are means over the runs at those frames.
    """

    frames: Numbers
    agent_frames: Numbers
    seconds: Numbers
    value: Numbers
    low: Numbers
    high: Numbers
    runs: Numbers
    """Number of runs that have a return, at each point."""
    each: Numbers
    """Return of each run at each point, ``[K, R]``; NaN if the run has none there."""


def average_curves(runs: Sequence[Progress], points: int = POINTS) -> CurveWithInterval | None:
    """Joins the curves of an algorithm's runs in one task.

    A run's curve is interpolated linearly between measurements. The line ends at the
    point after which fewer than half of the runs continue.

    Args:
        runs (list of Progress): curves of the seeds.
        points (int): maximum number of points of the line.
    """
    runs = [run for run in runs if len(run)]
    if not runs:
        return None
    grid = np.unique(np.concatenate([run.frames for run in runs]))
    each = interpolate_at(runs, grid)
    grid = grid[np.isfinite(each).sum(1) * 2 >= len(runs)]
    if not len(grid):
        return None
    grid = grid[
        np.unique(np.linspace(0, len(grid) - 1, min(points, len(grid))).round().astype(int))
    ]
    each = interpolate_at(runs, grid)
    value, low, high = _estimate_points(each)
    agent_frames, seconds = (
        mean_of_known(interpolate_at(runs, grid, column), 1)
        for column in ("agent_frames", "seconds")
    )
    return CurveWithInterval(
        grid, agent_frames, seconds, value, low, high, np.isfinite(each).sum(1).astype(float), each
    )


def interpolate_at(runs: Sequence[Progress], grid: Numbers, column: str = "returns") -> Numbers:
    """Interpolates the runs' curves at the given frames, ``[K, R]``; NaN outside a run's frames.

    Args:
        runs (list of Progress): curves of the seeds.
        grid (array): frames, ``[K]``.
        column (str): ``returns``, ``agent_frames`` or ``seconds``.
    """
    columns = [
        np.interp(grid, run.frames, getattr(run, column), left=np.nan, right=np.nan) for run in runs
    ]
    return np.stack(columns, 1)


def _estimate_points(each: Numbers) -> tuple[Numbers, Numbers, Numbers]:
    """Estimates each point of a curve from the runs that have a return at its frames."""
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
"""Statistics of normalized scores, by name in a report."""

_CURVE_POINTS = 60


@dataclass(frozen=True)
class Aggregate:
    """Results of a set of algorithms over all tasks that these algorithms share."""

    tasks: list[str]
    estimates: dict[str, dict[str, Estimate]]
    """Algorithm -> statistic -> estimate."""
    thresholds: Numbers
    profiles: dict[str, Estimate]
    """Algorithm -> fraction of runs above each threshold."""
    share: Numbers
    """Fraction of each task's frames, at the points of the curves."""
    curves: dict[str, Estimate]
    improvements: dict[tuple[str, str], Estimate]
    seeds: dict[str, list[int]]
    """Numbers of runs of each algorithm, by task."""
    scores: dict[str, list[Numbers]]
    """Normalized scores of each algorithm, by task."""

    @property
    def algorithms(self) -> list[str]:
        """Algorithms sorted by interquartile mean, the best first."""
        return sorted(self.estimates, key=lambda name: -self.estimates[name]["IQM"].value)


def aggregates_of(results: Sequence[TaskResult]) -> list[Aggregate]:
    """Aggregates the algorithms that share several tasks.

    The first aggregate has the algorithms with the most tasks. Each further aggregate adds
    algorithms with fewer tasks, and covers the tasks that all its algorithms share. Algorithms that
    share too few tasks with the first ones form separate aggregates. So every algorithm with
    several tasks is in an aggregate. A report on a single task has one aggregate.

    Args:
        results (list of TaskResult): results of tasks; those that cannot be normalized are
            skipped.
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
        blocks += _shared_task_blocks(left, having, fewest)
        shown = {name for _, algorithms in blocks for name in algorithms}
        left = [name for name in left if name not in shown]
    return [
        _aggregate_tasks([usable[name] for name in tasks], algorithms)
        for tasks, algorithms in blocks
    ]


def _shared_task_blocks(
    order: Sequence[str], having: Mapping[str, set[str]], fewest: int
) -> list[tuple[list[str], list[str]]]:
    """Returns pairs of shared tasks and their algorithms, sorted by number of algorithms."""
    blocks: dict[tuple[str, ...], list[str]] = {}
    for i in range(1, len(order) + 1):
        tasks = set.intersection(*(having[name] for name in order[:i]))
        if len(tasks) >= fewest:
            blocks[tuple(sorted(tasks))] = list(order[:i])
    several = {tasks: own for tasks, own in blocks.items() if len(own) > 1} or blocks
    return [(list(tasks), algorithms) for tasks, algorithms in several.items()]


def performance_profile(scores: Sequence[np.ndarray], thresholds: Numbers) -> Estimate:
    """Estimates a performance profile and its confidence band.

    Args:
        scores (list of arrays): normalized scores of each task.
        thresholds (array): thresholds, ``[K]``.
    """
    distribution = partial(score_distribution, thresholds=thresholds)
    return estimate(distribution, scores, resamples=_RESAMPLES)


def _aggregate_tasks(results: Sequence[TaskResult], algorithms: Sequence[str]) -> Aggregate:
    scores = {
        name: [np.array(result.normalized(name)) for result in results] for name in algorithms
    }
    every = np.concatenate([x for tasks in scores.values() for x in tasks])
    thresholds = np.linspace(min(0.0, every.min()), max(1.0, every.max()), 101).round(4)
    share = np.linspace(0, 1, _CURVE_POINTS)
    curves = {name: _aggregate_curve(results, name, share) for name in algorithms}
    return Aggregate(
        [result.task.name for result in results],
        {
            name: {what: estimate(statistic, tasks) for what, statistic in STATISTICS.items()}
            for name, tasks in scores.items()
        },
        thresholds,
        {name: performance_profile(tasks, thresholds) for name, tasks in scores.items()},
        share,
        {name: curve for name, curve in curves.items() if curve is not None},
        improvements(scores),
        {name: [len(x) for x in tasks] for name, tasks in scores.items()},
        scores,
    )


def _aggregate_curve(results: Sequence[TaskResult], name: str, share: Numbers) -> Estimate | None:
    """Estimates the curve over the fraction of frames; None if a task has no complete run.

    A run is complete if it has returns up to the frames of the comparison; other runs do not count.
    Returns are those of evaluations or, for a run without evaluations, of training episodes.
    """
    tasks = []
    for result in results:
        each = _interpolate_by_share(result, name, share)
        if not each.shape[1]:
            return None
        tasks.append(np.asarray(result.reference.normalize(each)))
    return estimate(interquartile_mean, tasks, resamples=_RESAMPLES)


def _interpolate_by_share(result: TaskResult, name: str, share: Numbers) -> Numbers:
    """Interpolates the returns, ``[K, R]``, of the runs that have reached the task's frames."""
    runs = [run.record.measured for run in result.teams[name].runs]
    runs = [x for x in runs if x.frames[0] <= result.frames and x.end >= 0.9 * result.frames]
    if not runs:
        return np.empty((len(share), 0))
    ends = np.array([min(run.end, result.frames) for run in runs])
    starts = np.array([run.frames[0] for run in runs])
    columns = [
        interpolate_at([run], start + share * (end - start))[:, 0]
        for run, start, end in zip(runs, starts, ends)
    ]
    return np.stack(columns, 1)
