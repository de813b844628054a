"""Writes `rliable`'s statistics of a few scores as data for the tests of `statistics`.

    python -m venv /path/to/venv && /path/to/venv/bin/pip install rliable "pandas<3"
    /path/to/venv/bin/python benchmarks/rliable_statistics.py

It needs a separate environment, since `rliable` imports `arch`, which pandas 3 breaks. It needs
nothing of this project.
"""

from __future__ import annotations

import importlib.metadata
import json
from pathlib import Path

import numpy as np
from rliable import library, metrics

FILE = Path(__file__).resolve().parent.parent / "test" / "rliable.json"
SHAPES = {"5 seeds, 4 tasks": (5, 4), "3 seeds, 1 task": (3, 1), "10 seeds, 6 tasks": (10, 6)}
THRESHOLDS = [0.0, 0.25, 0.5, 0.75, 1.0]
REPEATS = 20_000


def answers(scores: np.ndarray, others: np.ndarray) -> dict[str, dict[str, object]]:
    """Each statistic of rliable: its value and its interval of 95 %."""
    of_one = {
        "interquartile_mean": metrics.aggregate_iqm,
        "mean": metrics.aggregate_mean,
        "median": metrics.aggregate_median,
        "optimality_gap": metrics.aggregate_optimality_gap,
    }
    found = {
        name: library.get_interval_estimates(
            {"x": scores}, lambda x, f=function: np.array([f(x)]), reps=REPEATS
        )
        for name, function in of_one.items()
    }
    found["probability_of_improvement"] = library.get_interval_estimates(
        {"x": [scores, others]},
        lambda x, y: np.array([metrics.probability_of_improvement(x, y)]),
        reps=2_000,
    )
    found["score_distribution"] = library.create_performance_profile(
        {"x": scores}, np.array(THRESHOLDS), reps=REPEATS
    )
    return {
        name: {"value": value["x"].tolist(), "interval": interval["x"].tolist()}
        for name, (value, interval) in found.items()
    }


def main() -> None:
    np.random.seed(0)  # rliable draws from numpy's own generator
    stored = []
    for name, (seeds, tasks) in SHAPES.items():
        scores = np.random.normal(0.6, 0.3, (seeds, tasks)).round(3)
        others = np.random.normal(0.5, 0.3, (seeds + 1, tasks)).round(3)
        others[0] = scores[0]  # ties
        stored.append(
            {"name": name, "scores": scores.tolist(), "others": others.tolist()}
            | answers(scores, others)
        )
    versions = {name: importlib.metadata.version(name) for name in ("rliable", "arch", "numpy")}
    answer = {"versions": versions, "thresholds": THRESHOLDS, "cases": stored}
    FILE.write_text(json.dumps(answer, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
