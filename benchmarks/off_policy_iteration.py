"""A whole iteration of MADDPG, MASAC and QMIX against BenchMARL's.

    python benchmarks/off_policy_iteration.py --write

An iteration collects 60 envs x 100 steps of VMAS `balance`, stores them, and makes 1,000 updates
from minibatches of 128; no evaluation, no logging. *BenchMARL* is 1.5.2 with its defaults for the
algorithm, in a virtual environment that this script creates. Its process makes one iteration in
turn. *torchrl_marl* is our collector and learner in a plain loop, both captured, with BenchMARL's
networks (two layers of 64, or of its own 256, Tanh).
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import report
from foreign import BENCHMARL, Worker, environments, make_environment

ALGORITHMS = ("maddpg", "masac", "qmix")
HERE = Path(__file__).parent
OURS, THEIRS = "torchrl_marl", "BenchMARL"


def make_config(algorithm: str, cells: int, args: argparse.Namespace) -> Any:
    """Our settings of an iteration of the same sizes."""
    from torchrl_marl.recipes import load_config

    q = algorithm == "qmix"
    networks = ("actor",) if q else ("actor", "critic")
    overrides = {
        "learner.algorithm": algorithm,
        "learner.learning_starts": 0,
        "learner.updates_per_frame": args.updates / args.frames,
        "learner.minibatch_size": args.minibatch,
        "env.num_envs": args.envs,
        "frames_per_batch": args.frames,
        **{f"learner.{name}.num_cells": [cells, cells] for name in networks},
    }
    return load_config("vmas_balance_mappo_discrete" if q else "vmas_balance_mappo", overrides)


def measure_case(algorithm: str, cells: int, args: argparse.Namespace) -> list[list[str]]:
    """Both sides at one size."""
    import torch
    from loops import OurLoop

    torch.manual_seed(0)
    config = make_config(algorithm, cells, args)
    loop = OurLoop(config, "eager" if args.quick else "compile")
    options = {
        "--algorithm": algorithm,
        "--envs": args.envs,
        "--frames": args.frames,
        "--epochs": args.updates,
        "--minibatch": args.minibatch,
        "--cells": cells,
        "--agents": config.env.kwargs.get("n_agents", 3),
    }
    script = HERE / "benchmarl_iteration.py"
    worker = Worker(args.python, script, options, torch.get_num_threads())
    try:
        timings = report.alternate(
            {THEIRS: worker, OURS: loop.iterate},
            args.rounds,
            seconds=args.seconds,
            warmup=2,
            shortest=0.0,
        )
    finally:
        worker.close()
    loop.close()
    args.versions = worker.versions
    return [
        [
            algorithm,
            f"2 x {cells}",
            name,
            f"{1e3 * timings.median(name):,.0f}",
            f"{args.frames / timings.median(name):,.0f}",
            timings.ratio_text(name, THEIRS),
            timings.rounds(),
        ]
        for name in (THEIRS, OURS)
    ]


def measure(args: argparse.Namespace) -> tuple[list[list[str]], str]:
    """The rows of the table, and BenchMARL's versions."""
    rows = [
        row
        for algorithm in args.algorithms
        for cells in args.cells
        for row in measure_case(algorithm, cells, args)
    ]
    return rows, args.versions


def main() -> None:
    """Measures and reports."""
    parser = report.parser(__doc__, threads=(1,))
    parser.add_argument("--algorithms", nargs="+", default=list(ALGORITHMS), choices=ALGORITHMS)
    parser.add_argument("--cells", type=int, nargs="+", default=[64, 256])
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--seconds", type=float, default=60.0, help="time limit of one case")
    args = parser.parse_args()
    args.envs, args.frames, args.updates, args.minibatch = 60, 6000, 1000, 128
    if args.quick:
        args.write, args.rounds, args.cells = False, 2, [16]
        args.envs, args.frames, args.updates, args.minibatch = 4, 80, 2, 16
    args.python = make_environment(environments() / "benchmarl", BENCHMARL)
    header = ["", "networks", "", "ms", "frames/s", f"times {THEIRS}", "rounds"]
    measured = report.for_each_number_of_threads(measure, args.threads, args)
    versions = ", ".join({of_theirs for _, of_theirs in measured.values()})
    sections = [
        (f"An iteration, {report.count_of(n, 'thread')}", report.markdown_table(header, rows))
        for n, (rows, _) in measured.items()
    ]
    report.publish(
        "off_policy_iteration",
        "An iteration of learning from stored steps",
        sections,
        {"BenchMARL's environment": versions},
        __doc__.split("\n\n", 2)[2]
        + """
        Both sides take turns, in random order every round; "times" is the median (and the
        quartiles) of the rounds' ratios.""",
        write=args.write,
    )


if __name__ == "__main__":
    main()
