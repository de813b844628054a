"""Datasets of three qualities on balance: behavior cloning and TD3+BC beside what was recorded.

    python benchmarks/imitation.py --write

MAPPO is trained once per seed. Its policy is recorded at three stages of the training, with sampled
actions, as OG-MARL's datasets (Poor, Medium, Good) are. A fourth dataset is the heuristic's. From
each, behavior cloning and TD3+BC are trained. MAPPO is then trained with and without a start from
the cloned heuristic. Finished runs and datasets are kept and reused.
"""

from __future__ import annotations

import argparse
import csv
import json
import statistics
from pathlib import Path
from typing import Any

import report

STEPS = {"env.max_steps": 100}
BATCH = 9600  # frames of the recipe's batch
QUALITIES = {"poor": 0.1, "medium": 0.3, "good": 1.0}
OFFLINE: dict[str, dict[str, Any]] = {
    "bc": {"learner": {"algorithm": "bc", "actor": {"num_cells": [128, 128]}}},
    "td3_bc": {
        "execution": "compile",
        "learner": {
            "algorithm": "td3_bc",
            "actor": {"num_cells": [128, 128]},
            "critic": {"num_cells": [128, 128]},
            "actor_lr": 1e-3,
            "updates_per_frame": 0.3,
            "normalize_observations": True,
        },
    },
    "iql_offline": {
        "execution": "compile",
        "learner": {
            "algorithm": "iql_offline",
            "actor": {"num_cells": [128, 128]},
            "critic": {"num_cells": [128, 128]},
            "actor_lr": 1e-3,
            "updates_per_frame": 0.3,
            "normalize_observations": True,
        },
    },
}


def train(recipe: str, folder: Path, **settings: Any) -> Path:
    """Trains a run, unless an earlier call has; returns its folder."""
    import torchrl_marl

    if not (folder / "summary.json").is_file():
        quiet = {"threads": 1, "logging": {"progress": False}}
        torchrl_marl.train(recipe, folder=folder, **quiet, **settings)
    return folder


def datasets_of(seed: int, args: argparse.Namespace) -> dict[str, Path]:
    """Records the datasets of a seed, or finds those of an earlier call."""
    from torchrl_marl.apps.record import record

    found: dict[str, Path] = {}
    for name, share in QUALITIES.items():
        frames = max(1, round(share * args.online / BATCH)) * BATCH
        run = train(
            "vmas_balance_mappo",
            args.runs / f"mappo_{name}_seed{seed}",
            seed=seed,
            total_frames=frames,
            env={"max_steps": 100},
        )
        found[name] = args.runs / f"data_{name}_seed{seed}"
        if not found[name].exists():
            record(run, found[name], episodes=args.recorded, seed=seed)
    found["heuristic"] = args.runs / f"data_heuristic_seed{seed}"
    if not found["heuristic"].exists():
        how = {"episodes": args.recorded, "seed": seed, "settings": STEPS}
        record("heuristic", found["heuristic"], "vmas_balance_mappo", **how)
    return found


def return_of(folder: Path, episodes: int) -> float:
    """Returns the mean return of a run over whole episodes, by likeliest actions."""
    from torchrl_marl.training import Run

    return Run.load(folder).evaluate(episodes=episodes, deterministic=True)["return_mean"]


def with_span(values: list[float]) -> str:
    """Formats the mean, with the least and the greatest value."""
    return f"{statistics.fmean(values):.1f} ({min(values):.1f} to {max(values):.1f})"


def offline_rows(args: argparse.Namespace) -> list[list[str]]:
    """Returns a row for each dataset: its return, and the returns of what was learned from it."""
    found: dict[str, dict[str, list[float]]] = {}
    for seed in args.seeds:
        for name, data in datasets_of(seed, args).items():
            row = found.setdefault(name, {"recorded": [], **{word: [] for word in OFFLINE}})
            about = json.loads((data / "dataset.json").read_text(encoding="utf-8"))
            row["recorded"].append(about["returns"]["mean"])
            for word, settings in OFFLINE.items():
                own = {"data": {"expert": None, "folder": str(data)}, "seed": seed, **settings}
                folder = args.runs / f"{word}_{name}_seed{seed}"
                run = train("vmas_balance_bc", folder, total_frames=args.frames, **own)
                row[word].append(return_of(run, args.episodes))
    return [[name, *map(with_span, row.values())] for name, row in found.items()]


def warm_rows(args: argparse.Namespace) -> list[list[str]]:
    """Returns rows of MAPPO's evaluations with and without a start from the cloned heuristic."""
    curves: dict[str, list[list[float]]] = {"from new networks": [], "from the clone": []}
    frames: list[str] = []
    for seed in args.seeds:
        clone = args.runs / f"bc_heuristic_seed{seed}"
        for name, start in zip(curves, (None, str(clone))):
            run = train(
                "vmas_balance_mappo",
                args.runs / f"{'warm' if start else 'cold'}_seed{seed}",
                seed=seed,
                total_frames=args.online // 2,
                env={"max_steps": 100},
                learner={"actor": {"num_cells": [128, 128]}},
                evaluation={"every_frames": args.online // 10},
                init_from=start,
                init=["actor"] if start else None,
            )
            with (run / "evaluation.csv").open(encoding="utf-8") as file:
                rows = list(csv.DictReader(file))
            curves[name].append([float(row["return_mean"]) for row in rows])
            frames = [f"{int(row['frames']):,}" for row in rows]
    return [
        [at, *(with_span([curve[i] for curve in own]) for own in curves.values())]
        for i, at in enumerate(frames)
    ]


def main() -> None:
    """Trains, records, plays and reports."""
    parser = report.parser(__doc__, threads=(1,))
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--online", type=int, help="frames of MAPPO")
    parser.add_argument("--frames", type=int, help="steps read by an offline run")
    parser.add_argument("--recorded", type=int, default=200, help="episodes of a dataset")
    parser.add_argument("--episodes", type=int, default=200, help="episodes of an evaluation")
    parser.add_argument("--runs", type=Path, default=Path("runs/imitation"))
    args = parser.parse_args()
    args.online = args.online or (96_000 if args.quick else 600_000)
    args.frames = args.frames or (3_000 if args.quick else 60_000)
    offline = ["dataset", "recorded", "behavior cloning", "TD3+BC", "implicit Q-learning"]
    warm = ["frames", "MAPPO from new networks", "MAPPO from the cloned heuristic"]
    report.publish(
        "imitation",
        "Learning from recorded episodes of balance",
        [
            ("Return of policies", report.markdown_table(offline, offline_rows(args))),
            ("MAPPO from a clone", report.markdown_table(warm, warm_rows(args))),
        ],
        {
            "task": "VMAS balance, three agents, episodes of at most 100 steps",
            "datasets": f"{args.recorded} episodes each, sampled actions of MAPPO",
            "MAPPO": f"vmas_balance_mappo, {args.online:,} frames for Good, 0.3 of them for "
            "Medium, 0.1 for Poor",
            "offline runs": f"{args.frames:,} steps read; 6,000 updates of behavior cloning, "
            f"{round(0.3 * args.frames):,} of the others; bc_alpha 2.5, expectile 0.7, beta 3",
            "seeds": ", ".join(map(str, args.seeds)),
            "episodes": args.episodes,
        },
        """Mean over seeds, with the least and the greatest in brackets, by the likeliest actions,
        from the same initial states. bc_alpha, expectile and beta are the papers'. The actor's
        learning rate and the number of updates were raised after a look at the heuristic's
        dataset.""",
        write=args.write,
    )


if __name__ == "__main__":
    main()
