"""Discounts with horizons beyond a time limit: IPPO on simple_spread's episodes of 25 steps.

Run: python benchmarks/discounts.py [--frames 245760] [--seeds 0 1] [--write]

JaxMARL's version of MPE's `simple_spread` ends by its time limit only, so the value of an
episode's last observation is bootstrapped. Three discounts are compared, with normalized values,
normalized and centered values, and neither. All other settings are those of
`docs/coming_from/jaxmarl.md`. The worst moment is the minimum of the iterations' mean returns of
sampled actions after the first tenth of training.
"""

from __future__ import annotations

import csv
import tempfile
import warnings
from pathlib import Path

import report

import torchrl_marl

RECIPE = "jaxmarl_simple_spread_mappo"
DISCOUNTS = (0.9, 0.95, 0.99)
VALUES = {
    "normalized": {"value_norm": True},
    "and centered": {"value_norm": True, "value_centering": True},
    "neither": {"value_norm": False},
}


def train_and_summarize(
    gamma: float, values: str, seed: int, frames: int, folder: Path
) -> list[float]:
    """Returns the return at the end, that at the worst moment, and a random policy's."""
    learner = {
        "algorithm": "ippo",
        "gamma": gamma,
        **VALUES[values],
        "lmbda": 0.95,
        "lr_schedule": "constant",
        "num_epochs": 4,
        "minibatch_size": 2048,
        "entropy_coeff": 0.01,
    }
    run = torchrl_marl.train(
        RECIPE,
        seed=seed,
        threads=1,
        total_frames=frames,
        frames_per_batch=8192,
        env={"num_envs": 64},
        learner=learner,
        evaluation={"episodes": 100},
        logging={"progress": False},
        folder=str(folder / f"{gamma}_{values}_{seed}"),
    )
    with (run.folder / "metrics.csv").open(newline="") as file:
        returns = [float(row["agent/episode_reward"]) for row in csv.DictReader(file)]
    worst = min(returns[len(returns) // 10 :])
    return [run.summary["return_after"], worst, run.summary["return_random"]]


def main() -> None:
    """Trains with each discount and reports."""
    warnings.simplefilter("ignore")
    parser = report.parser(__doc__, threads=(1,))
    parser.add_argument("--frames", type=int, default=245_760)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1])
    args = parser.parse_args()
    if args.quick:
        args.write, args.frames, args.seeds = False, 16_384, [0]
    rows, random = [], 0.0
    with tempfile.TemporaryDirectory() as folder:
        for gamma in DISCOUNTS:
            for values in VALUES:
                summaries = [
                    train_and_summarize(gamma, values, seed, args.frames, Path(folder))
                    for seed in args.seeds
                ]
                after, worst, _ = (
                    ", ".join(f"{x:.1f}" for x in column) for column in zip(*summaries)
                )
                random = summaries[0][-1]
                rows.append([f"{gamma}", values, after, worst])
                print(rows[-1], flush=True)
    header = ["discount", "values", "return at the end", "at the worst moment"]
    section = (
        f"{args.frames:,} frames, seeds {', '.join(map(str, args.seeds))}",
        report.markdown_table(header, rows) + f"\n\nRandom actions earn {random:.1f}.",
    )
    report.publish(
        "discounts",
        "Discounts that look past a time limit",
        [section],
        {"steps of an episode": 25},
        __doc__.split("\n\n", 2)[2],
        write=args.write,
    )


if __name__ == "__main__":
    main()
