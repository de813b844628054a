"""Cost of an iteration of two algorithms in one environment, against the sum of its parts.

    python benchmarks/mixed_iteration.py --write

Steps of ``torchrl_marl.train`` on VMAS `simple_tag`, with the recipe's settings, of four runs in
turn: both groups learn, predators by MAPPO and the prey by an off-policy algorithm; only the
predators learn; only the prey learns; no group learns. Groups that do not learn take random
actions. The sum of the parts is the second plus the third minus the fourth, since both contain the
collecting.
"""

from __future__ import annotations

import argparse
from typing import Any

import report

RECIPE = "vmas_simple_tag_mappo"
BOTH, PREDATORS, PREY, NOBODY = "both", "predators", "prey", "nobody"
ALGORITHMS = ("maddpg", "masac")


def make_loops(algorithm: str, args: argparse.Namespace) -> dict[str, Any]:
    """A training for each part, past its first batch."""
    import torch
    from loops import TrainLoop

    from torchrl_marl.recipes import load_config

    prey = {"algorithm": algorithm, "learning_starts": 0, "replay": {"capacity": 100_000}}
    random_algorithm = {"algorithm": "random"}
    overrides: dict[str, Any] = {"execution": "eager" if args.quick else "compile"}
    if args.quick:
        overrides |= {"env.num_envs": 8, "frames_per_batch": 400, "learner.minibatch_size": 100}
        prey |= {"updates_per_frame": 0.01, "minibatch_size": 32}
    loops = {}
    for name, groups in {
        BOTH: {"agent": prey},
        PREDATORS: {"agent": random_algorithm},
        PREY: {"agent": prey, "adversary": random_algorithm},
        NOBODY: {"agent": random_algorithm, "adversary": random_algorithm},
    }.items():
        torch.manual_seed(0)
        loops[name] = TrainLoop(load_config(RECIPE, {**overrides, "groups": groups}))
    return loops


def measure(args: argparse.Namespace) -> list[list[str]]:
    """A row for each algorithm of the prey."""
    import statistics

    rows = []
    for algorithm in args.algorithms:
        loops = make_loops(algorithm, args)
        timings = report.alternate(
            {name: loop.iterate for name, loop in loops.items()},
            args.rounds,
            seconds=args.seconds,
            warmup=3,
            shortest=0.0,
        )
        for loop in loops.values():
            loop.close()
        seconds = timings.seconds
        ratios = [
            both_seconds / (one + other - nobody_seconds)
            for both_seconds, one, other, nobody_seconds in zip(
                *(seconds[x] for x in (BOTH, PREDATORS, PREY, NOBODY))
            )
        ]
        milliseconds = [f"{1e3 * timings.median(name):,.0f}" for name in loops]
        ratio = f"{statistics.median(ratios):.3f}"
        rows.append([algorithm, *milliseconds, ratio, timings.rounds()])
    return rows


def main() -> None:
    """Measures and reports."""
    parser = report.parser(__doc__, threads=(1,))
    parser.add_argument(
        "--algorithms", nargs="+", default=list(ALGORITHMS), help="algorithms of the prey"
    )
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--seconds", type=float, default=60.0, help="time limit of an algorithm")
    args = parser.parse_args()
    if args.quick:
        args.write, args.rounds = False, 2
    header = ["the prey", *(f"{name} learn, ms" for name in (BOTH, PREDATORS, PREY, NOBODY))]
    header += ["times the sum of the parts", "rounds"]
    report.publish(
        "mixed_iteration",
        "Two algorithms in one environment",
        [
            (f"An iteration, {report.count_of(n, 'thread')}", report.markdown_table(header, rows))
            for n, rows in report.for_each_number_of_threads(measure, args.threads, args).items()
        ],
        {"recipe": RECIPE},
        __doc__.split("\n\n", 2)[2]
        + """
        All four take turns in one process, in random order every round; milliseconds are medians,
        the last ratio is the median of the rounds' ratios.""",
        write=args.write,
    )


if __name__ == "__main__":
    main()
