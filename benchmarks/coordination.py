"""Self-play and cross-play of suites' runs, with and without Other-Play.

Run: python benchmarks/coordination.py suite_coordination [suite_other ...] [--write]

The folders are those of `torchrl-marl suite` with the suite coordination. Each pair of seeds plays
together, half of the episodes with swapped seats. "with itself" is the mean over the seeds,
"with others" that over ordered pairs of different seeds. In brackets are 95 % bootstrap intervals
over the seeds. "return" is that of the last evaluation, with the likeliest actions. Seeds that were
trained with --together share their seconds. Two cores run this and other work.
"""

from __future__ import annotations

import csv
import json
import statistics
from pathlib import Path

import report

from torchrl_marl.settings import flatten, normalized
from torchrl_marl.training.config import TrainConfig, read_run_config


def rows_of(path: Path) -> list[dict[str, str]]:
    """Returns the rows of a CSV file."""
    with path.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def with_interval(row: dict[str, str], name: str) -> str:
    """Formats a mean with its interval, if it has one."""
    value, low, high = (row[name + end] for end in ("", "_low", "_high"))
    interval = f" ({float(low):.2f} to {float(high):.2f})" if low else ""
    return f"{float(value):.2f}{interval}"


def table_rows_of(folder: Path) -> list[tuple[str, list[str]]]:
    """Returns the task and the row of the table for each task and algorithm of a suite."""
    runs, found = rows_of(folder / "results.csv"), []
    for row in rows_of(folder / "crossplay.csv"):
        runs_of_algorithm = [
            x for x in runs if (x["task"], x["algorithm"]) == (row["task"], row["algorithm"])
        ]
        runs_of_algorithm = [x for x in runs_of_algorithm if x["state"] == "finished"]
        config = read_run_config(folder / runs_of_algorithm[0]["folder"])
        name = row["algorithm"].removesuffix("_other_play")
        name += " with Other-Play" if config.env.other_play else ""
        total = statistics.fmean(float(x["seconds"]) for x in runs_of_algorithm)
        ends = statistics.fmean(float(x["return_after"]) for x in runs_of_algorithm)
        scores = [with_interval(row, one) for one in ("self_play", "cross_play")]
        counts = [f"{config.total_frames:,}", row["seeds"], row["episodes"]]
        found.append((row["task"], [name, *counts, f"{ends:.2f}", *scores, f"{total:.0f}"]))
    return found


def settings_of(folder: Path) -> str:
    """Returns the settings that the user gave for all runs of a suite."""
    suite = json.loads((folder / "suite.json").read_text(encoding="utf-8"))
    user_settings = flatten(normalized(TrainConfig, suite["settings"]))
    text = " ".join(f"{key}={value}" for key, value in user_settings.items())
    return f"tasks={','.join(suite['tasks'])} algorithms={','.join(suite['algorithms'])} {text}"


def main() -> None:
    """Reads the suites and reports."""
    parser = report.parser(__doc__, threads=(1,))
    parser.add_argument("suites", nargs="+", type=Path)
    args = parser.parse_args()
    lines = [line for folder in args.suites for line in table_rows_of(folder)]
    header = ["algorithm", "frames", "seeds", "episodes a pair", "return"]
    header += ["with itself", "with others", "seconds a seed"]
    tables = [
        (
            task,
            report.markdown_table(header, [row for line_task, row in lines if line_task == task]),
        )
        for task in dict.fromkeys(task for task, _ in lines)
    ]
    report.publish(
        "coordination",
        "Coordination with strangers: self-play and cross-play",
        tables,
        {f"suite {folder.name}": settings_of(folder) for folder in args.suites},
        __doc__.split("\n\n", 2)[2],
        write=args.write,
    )


if __name__ == "__main__":
    main()
