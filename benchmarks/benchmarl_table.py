"""Converts BenchMARL's runs to a table for `torchrl-marl report`, to compare them with ours.

    python benchmarks/benchmarl_table.py balance_seed0.json wheel_seed0.json --out benchmarl.csv
    torchrl-marl report runs/vmas benchmarl.csv

The files are those of `benchmarl_vmas.py`. A return is that of an episode up to its end, as in our
evaluations. Tasks have their VMAS names.
"""

from __future__ import annotations

import argparse
import csv
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

COLUMNS = ["task", "algorithm", "seed", "frames", "seconds", "return"]


def rows_of(run: Mapping[str, Any]) -> Iterator[list[Any]]:
    """A row for each evaluation of a run."""
    algorithm = f"BenchMARL {str(run['settings']['algorithm']).upper()}"
    for point in run["curve"]:
        counters = [point["frames"], point["seconds_training"]]
        yield [run["task"], algorithm, run["seed"], *counters, point["episode_reward_to_done"]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("runs", nargs="+", type=Path, help="files of benchmarl_vmas.py")
    parser.add_argument("--out", type=Path, default=Path("benchmarl.csv"))
    args = parser.parse_args()
    runs = [json.loads(path.read_text(encoding="utf-8")) for path in args.runs]
    with args.out.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(COLUMNS)
        for run in runs:
            writer.writerows(rows_of(run))


if __name__ == "__main__":
    main()
