"""Sample-efficiency curves: the interquartile mean over seeds in the course of training.

Shapes: K points of a curve, R runs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from torchrl_marl.reports.records import Numbers, Progress
from torchrl_marl.statistics import estimate, interquartile_mean

__all__ = ["POINTS", "Line", "line_of", "on_grid"]

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
    """Joins the curves of an algorithm's runs in one world.

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
        _mean(on_grid(runs, grid, column)) for column in ("agent_frames", "seconds")
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


def _mean(each: Numbers) -> Numbers:
    known = np.isfinite(each)
    total = np.where(known, each, 0).sum(1)
    return np.where(known.any(1), total / np.maximum(known.sum(1), 1), np.nan)
