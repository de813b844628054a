"""The figures of each algorithm in each world: scores at equal frames, and what they say."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import permutations
from typing import Any

import numpy as np

from torchrl_marl.reports.grouping import World
from torchrl_marl.reports.lines import Line, line_of
from torchrl_marl.reports.records import REWARD, Record
from torchrl_marl.reports.references import Reference, find_reference
from torchrl_marl.statistics import (
    Estimate,
    estimate,
    interquartile_mean,
    mean,
    median,
    probability_of_improvement,
)

__all__ = ["Scored", "Team", "WorldResult", "improvements", "result_of", "shown_by"]

_FINE = 4  # evaluations from which on they make a curve


@dataclass(frozen=True)
class Scored:
    """A run's score: its measured return at the frames at which the world's runs are compared."""

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
    """Each group's return there, of a world of several."""


@dataclass(frozen=True)
class Team:
    """An algorithm in a world: its seeds' scores, estimates and curves."""

    algorithm: str
    runs: list[Scored]
    iqm: Estimate
    mean: Estimate
    median: Estimate
    evaluation: Line | None
    training: Line | None
    groups: dict[str, Estimate]
    """Interquartile mean of each group's return, of a world of several."""

    @property
    def scores(self) -> list[float]:
        """Of each run."""
        return [run.score for run in self.runs]


@dataclass(frozen=True)
class WorldResult:
    """A world's algorithms, compared."""

    world: World
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


def result_of(world: World, references: Sequence[Mapping[str, Any]]) -> WorldResult:
    """Works out the figures of a world.

    Args:
        world (World): with its runs.
        references (list of mappings): what returns are normalized by.
    """
    frames = _common_frames(world)
    scored = {
        name: [_scored(record, frames) for record in seeds]
        for name, seeds in world.algorithms.items()
    }
    ends = {name: [run.score for run in runs] for name, runs in scored.items()}
    teams = {name: _team(name, runs) for name, runs in scored.items()}
    return WorldResult(
        world,
        frames,
        all(run.at_equal_frames for runs in scored.values() for run in runs),
        find_reference(world, ends, references),
        teams,
        improvements({name: [np.array(scores)] for name, scores in ends.items()}),
    )


def shown_by(result: WorldResult) -> str:
    """``evaluation`` or ``training``: which curves of a world are shown first.

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


def _common_frames(world: World) -> float:
    """Returns the most frames that every algorithm has come to with a finished run.

    Where none has finished, with any run.
    """
    finished = [
        max(ends)
        for seeds in world.algorithms.values()
        if (ends := [record.measured.end for record in seeds if record.finished])
    ]
    anyhow = [max(record.measured.end for record in seeds) for seeds in world.algorithms.values()]
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
