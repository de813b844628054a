"""Speed of two versions of the code on the same runs, measured in alternation.

    python benchmarks/same_speed.py --base main

Checks out ``--base`` in a separate folder and starts a process of each version. For each case both
build the run, and then alternate between a number of iterations of either. The table has the
median of the rounds' ratios: 1.02 means that this version is 2 % faster. Ranks are one launch of
``torchrun`` each, and the times of their iterations come from its ``metrics.csv``.
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import report
from same_bits import checked_out

BALANCE = {"recipe": "vmas_balance_mappo", "env.num_envs": 64, "frames_per_batch": 6_400}
ARENA = {"recipe": "toy_arena_qmix", "learner.learning_starts": 800}
TALKING = {"recipe": "toy_echo_rmappo_talk"}
CASES: dict[str, dict[str, Any]] = {
    "MAPPO": {**BALANCE, "learner.minibatch_size": 1_600},
    "MAPPO, compiled": {**BALANCE, "learner.minibatch_size": 1_600, "execution": "compile"},
    "QMIX": ARENA,
    "QMIX, compiled": {**ARENA, "execution": "compile"},
    "MADDPG": {"recipe": "vmas_navigation_maddpg", "learner.learning_starts": 1_000},
    "memory and words": TALKING,
    "population of 8": {**BALANCE, "env.num_envs": 16, "frames_per_batch": 1_600}
    | {"learner.minibatch_size": 400, "population.size": 8},
    "population of 8, replay": {**ARENA, "population.size": 8},
    "league": {"recipe": "toy_kuhn_ippo", "league.opponents": "pfsp"},
    "two shards": {**BALANCE, "learner.minibatch_size": 1_600, "distributed.collectors": 2},
}
PLAIN = {"execution": "eager", "threads": 1, "total_frames": 10**9}
QUIET = {"evaluation.episodes": 2, "logging.progress": False}
RANKS = "two ranks"
WORKER = """
import json, sys, tempfile, time, warnings
warnings.simplefilter("ignore")
import torchrl_marl
steps = None
for line in sys.stdin:
    word, given = json.loads(line)
    began = time.perf_counter()
    if word == "begin":
        folder = tempfile.mkdtemp() + "/run"
        recipe = given.pop("recipe")
        steps = torchrl_marl.iterate(recipe, folder=folder, **given)
        for _ in range(3):
            next(steps)
    elif word == "run":
        for _ in range(given):
            next(steps)
    else:
        steps.close()
    print("\\n@", time.perf_counter() - began, flush=True)
"""


class Side:
    """A process of one version that trains a case by some iterations at a time."""

    def __init__(self, checkout: Path) -> None:
        self.checkout = checkout
        self.process = subprocess.Popen(
            [sys.executable, "-P", "-c", WORKER],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=variables(checkout),
            text=True,
        )

    def ask(self, command: str, argument: Any = None) -> float:
        """Returns the seconds that something took."""
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.write(json.dumps([command, argument]) + "\n")
        self.process.stdin.flush()
        for line in self.process.stdout:
            if line.startswith("@"):
                return float(line[1:])
        raise SystemExit(f"{self.checkout}: a run failed; run the case by itself to see why")


def variables(checkout: Path) -> dict[str, str]:
    """The environment of a version's processes."""
    return {**os.environ, "PYTHONPATH": str(checkout), "OMP_NUM_THREADS": "1"}


def timed(
    sides: list[Side], settings: dict[str, Any], seconds: float, rounds: int
) -> report.Timings:
    """Returns each version's seconds of a block of iterations, in each round."""
    for side in sides:
        side.ask("begin", {**PLAIN, **QUIET, **settings})
    once = max(side.ask("run", 1) for side in sides)
    block = max(1, round(seconds / (2 * rounds * once)))
    seconds_of_versions: dict[str, list[float]] = {"base": [], "this": []}
    for n in range(rounds):
        turns = list(zip(seconds_of_versions, sides))
        for name, side in turns if n % 2 == 0 else reversed(turns):
            seconds_of_versions[name].append(side.ask("run", block) / block)
    for side in sides:
        side.ask("end")
    return report.Timings(seconds_of_versions)


def timed_ranks(checkouts: list[Path], rounds: int) -> report.Timings:
    """Returns the median seconds of an iteration by two ranks of ``torchrun``, in each round."""
    seconds_of_versions: dict[str, list[float]] = {"base": [], "this": []}
    for n in range(rounds):
        turns = list(zip(seconds_of_versions, checkouts))
        for name, checkout in turns if n % 2 == 0 else reversed(turns):
            seconds_of_versions[name].append(seconds_of_ranks(checkout))
    return report.Timings(seconds_of_versions)


def seconds_of_ranks(checkout: Path) -> float:
    """Trains by two ranks, and returns the median seconds of its last iterations."""
    settings = {**PLAIN, **QUIET, **BALANCE, "learner.minibatch_size": 1_600}
    settings |= {"total_frames": 12 * 6_400, "distributed.collectors": 2}
    recipe = settings.pop("recipe")
    with tempfile.TemporaryDirectory() as folder:
        setting_args = [f"{key}={json.dumps(value)}" for key, value in settings.items()]
        subprocess.run(
            [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", "--standalone"]
            + ["-m", "torchrl_marl", "train", recipe, f"folder={folder}/run", *setting_args],
            env=variables(checkout),
            cwd=folder,
            check=True,
            capture_output=True,
        )
        with (Path(folder) / "run" / "metrics.csv").open() as file:
            clock = [float(row["seconds"]) for row in csv.DictReader(file)]
    return statistics.median(b - a for a, b in zip(clock[3:], clock[4:]))


def main() -> None:
    """Times both versions and prints the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--base", default="main", help="git revision to compare with")
    parser.add_argument("--only", nargs="+", choices=[*CASES, RANKS], default=[*CASES, RANKS])
    parser.add_argument(
        "--seconds", type=float, default=40, help="seconds of a case, for both versions"
    )
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--write", action="store_true", help="write the table to results")
    args = parser.parse_args()
    this_checkout, rows, began = Path(__file__).resolve().parents[1], [], time.perf_counter()
    with tempfile.TemporaryDirectory() as work, checked_out(args.base, Path(work)) as base:
        sides = [Side(base), Side(this_checkout)]
        for name in args.only:
            if name == RANKS:
                times = timed_ranks([base, this_checkout], max(2, args.rounds // 3))
            else:
                times = timed(sides, dict(CASES[name]), args.seconds, args.rounds)
            milliseconds = (f"{1e3 * times.median(side):.4g}" for side in ("base", "this"))
            rows.append([name, *milliseconds, times.ratio_text("this", "base")])
            print(*rows[-1], file=sys.stderr)
        for side in sides:
            side.process.stdin.close()
            side.process.wait()
    report.publish(
        "same_speed",
        "An iteration of two versions, in alternation",
        [("Results", report.markdown_table(("run", "base, ms", "this, ms", "ratio"), rows))],
        {"base": args.base, "threads of torch": 1, "seconds": round(time.perf_counter() - began)},
        """Two processes, one of each version, take turns; a ratio above 1 says that this version is
        faster. Median of the rounds' ratios, with quartiles.""",
        write=args.write,
    )


if __name__ == "__main__":
    main()
