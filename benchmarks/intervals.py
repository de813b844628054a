"""Coverage of intervals over seeds, and the time of a report over 50 runs.

python benchmarks/intervals.py --write
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import report

from torchrl_marl.apps.reports import write_report
from torchrl_marl.training.statistics import (
    estimate,
    interquartile_mean,
    probability_of_improvement,
)

sys.path.insert(0, str(Path(__file__).parent.parent / "test" / "support"))
from reported import TASKS, write_suite  # noqa: E402

SEEDS = (2, 3, 4, 5, 8, 10, 20)


def interval_coverage(seeds: int, n_tasks: int, repeats: int) -> list[str]:
    """Shares of repetitions in which 95 % intervals hold the truth, of normal scores."""
    truth_in_interval = np.zeros(2)
    for repeat in range(repeats):
        random = np.random.default_rng([seeds, n_tasks, repeat])
        one, other = (list(random.normal(size=(n_tasks, seeds))) for _ in range(2))
        options = {"resamples": 1000, "seed": repeat}
        mean = estimate(interquartile_mean, one, **options)
        better = estimate(probability_of_improvement, one, other, **options)
        truth_in_interval += (mean.low <= 0 <= mean.high, better.low <= 0.5 <= better.high)
    return [str(n_tasks), str(seeds), *(f"{share:.1%}" for share in truth_in_interval / repeats)]


def time_report() -> list[str]:
    """Seconds and bytes of a report of 50 made-up runs of 80 evaluations each."""
    with tempfile.TemporaryDirectory() as folder:
        write_suite(Path(folder) / "suite", TASKS, seeds=5, points=80)
        began = time.perf_counter()
        found = write_report(Path(folder) / "suite", Path(folder) / "report")
        seconds = time.perf_counter() - began
        size = (Path(folder) / "report" / "report.html").stat().st_size
    return [str(len(found.runs)), f"{seconds:.1f}", f"{size / 1e6:.2f}"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=2000, help="repetitions of each interval")
    parser.add_argument("--write", action="store_true", help="write the table to results")
    args = parser.parse_args()
    report.be_quiet()
    rows = [interval_coverage(n, n_tasks, args.repeats) for n_tasks in (1, 5) for n in SEEDS]
    head = ["tasks", "seeds", "interquartile mean", "probability of improvement"]
    report.publish(
        "intervals",
        "Intervals over seeds, and what a report takes",
        [
            ("Intervals of 95 % that hold the truth", report.markdown_table(head, rows)),
            (
                "A report",
                report.markdown_table(["runs", "seconds", "MB of its page"], [time_report()]),
            ),
        ],
        {},
        f"""Scores are normally distributed, each seed's drawn again in each of {args.repeats:,}
        repetitions; intervals are percentiles over 1,000 resamples of the seeds of each task. The
        report is of 50 made-up runs, two algorithms in five tasks, 80 evaluations each, with its
        pictures.""",
        write=args.write,
    )


if __name__ == "__main__":
    main()
