"""Several worlds together: normalized scores of algorithms that all have been trained in them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np

from torchrl_marl.reports.lines import on_grid
from torchrl_marl.reports.records import Numbers
from torchrl_marl.reports.scores import WorldResult, improvements
from torchrl_marl.statistics import (
    Estimate,
    estimate,
    interquartile_mean,
    mean,
    median,
    optimality_gap,
    score_distribution,
)

__all__ = ["STATISTICS", "Aggregate", "aggregates_of", "profile_of"]

STATISTICS = {
    "IQM": interquartile_mean,
    "median": median,
    "mean": mean,
    "optimality gap": optimality_gap,
}
"""What is estimated of normalized scores."""

_POINTS = 60
_RESAMPLES = 2000


@dataclass(frozen=True)
class Aggregate:
    """Some algorithms on all worlds that they have in common."""

    worlds: list[str]
    estimates: dict[str, dict[str, Estimate]]
    """Algorithm -> statistic -> estimate."""
    thresholds: Numbers
    profiles: dict[str, Estimate]
    """Share of runs above each threshold."""
    share: Numbers
    """Share of each world's frames, at the points of the curves."""
    curves: dict[str, Estimate]
    improvements: dict[tuple[str, str], Estimate]
    seeds: dict[str, list[int]]
    """Runs of each algorithm in each world."""
    scores: dict[str, list[Numbers]]
    """Normalized, of each algorithm in each world."""

    @property
    def algorithms(self) -> list[str]:
        """By their interquartile mean, the best first."""
        return sorted(self.estimates, key=lambda name: -self.estimates[name]["IQM"].value)


def aggregates_of(results: Sequence[WorldResult]) -> list[Aggregate]:
    """Aggregates the algorithms that share several worlds.

    First those of the most worlds, then with each that has fewer, on the fewer worlds. Those that
    share too few worlds with them stand among themselves, so that no algorithm is left out that
    has several worlds.

    A report on one world has the same figures of that one.

    Args:
        results (list of WorldResult): those that cannot be normalized do not count.
    """
    usable = {result.world.name: result for result in results if not result.reference.why_none}
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
        _aggregate([usable[name] for name in worlds], algorithms) for worlds, algorithms in blocks
    ]


def _blocks(
    order: Sequence[str], having: Mapping[str, set[str]], fewest: int
) -> list[tuple[list[str], list[str]]]:
    """Worlds that algorithms share, and the most of these, of more and more algorithms."""
    blocks: dict[tuple[str, ...], list[str]] = {}
    for i in range(1, len(order) + 1):
        worlds = set.intersection(*(having[name] for name in order[:i]))
        if len(worlds) >= fewest:
            blocks[tuple(sorted(worlds))] = list(order[:i])
    several = {worlds: own for worlds, own in blocks.items() if len(own) > 1} or blocks
    return [(list(worlds), algorithms) for worlds, algorithms in several.items()]


def profile_of(scores: Sequence[np.ndarray], thresholds: Numbers) -> Estimate:
    """Estimates a performance profile with its band.

    Args:
        scores (list of arrays): normalized, of each world.
        thresholds (array): ``[K]``.
    """
    distribution = partial(score_distribution, thresholds=thresholds)
    return estimate(distribution, scores, resamples=_RESAMPLES)


def _aggregate(results: Sequence[WorldResult], algorithms: Sequence[str]) -> Aggregate:
    scores = {
        name: [np.array(result.normalized(name)) for result in results] for name in algorithms
    }
    every = np.concatenate([x for tasks in scores.values() for x in tasks])
    thresholds = np.linspace(min(0.0, every.min()), max(1.0, every.max()), 101).round(4)
    share = np.linspace(0, 1, _POINTS)
    curves = {name: _curve(results, name, share) for name in algorithms}
    return Aggregate(
        [result.world.name for result in results],
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


def _curve(results: Sequence[WorldResult], name: str, share: Numbers) -> Estimate | None:
    """Estimates the curve over the share of the worlds' frames; None where no run has come far.

    Of each world those runs count that have a return at its first and last frames, by their
    evaluations, or their training episodes where these begin later.
    """
    tasks = []
    for result in results:
        each = _on_share(result, name, share)
        if not each.shape[1]:
            return None
        tasks.append(np.asarray(result.reference.normalize(each)))
    return estimate(interquartile_mean, tasks, resamples=_RESAMPLES)


def _on_share(result: WorldResult, name: str, share: Numbers) -> Numbers:
    """``[K, R]``: returns of the runs that have come to the world's frames."""
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
