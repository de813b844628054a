"""Learning from recorded episodes of balance and navigation, beside what was recorded.

    python benchmarks/imitation.py --write

MAPPO is trained once per seed. Its policy is recorded with sampled actions, on balance at three
stages of the training, as OG-MARL's datasets (Poor, Medium, Good) are. Another dataset of balance
is the heuristic's; that of navigation needs a solver that is not installed. From each, behavior
cloning and two offline algorithms are trained. DAgger copies the same policies in the environment.
MAPPO is then trained with and without a start from the clone of the heuristic, or of MAPPO.
Finished runs and datasets are kept and reused, started runs resumed.
"""

from __future__ import annotations

import argparse
import csv
import json
import statistics
from pathlib import Path
from typing import Any

import report

QUALITIES = {
    "balance": {"poor": 0.1, "medium": 0.3, "good": 1.0},
    "navigation": {"good": 1.0},
}
CLONED = {"balance": "heuristic", "navigation": "good"}  # the start of MAPPO
DIGITS = {"balance": 1, "navigation": 2}  # of returns
METHODS: dict[str, dict[str, Any]] = {
    "dagger": {"learner": {"algorithm": "bc", "actor": {"num_cells": [128, 128]}}},
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
    from torchrl_marl.apps.jobs.jobs import train_or_resume
    from torchrl_marl.recipes import load_config

    if not (folder / "summary.json").is_file():
        quiet = {"threads": 1, "logging": {"progress": False}}
        train_or_resume(load_config(recipe, {**quiet, **settings}), folder)
    return folder


def env_of(task: str) -> dict[str, Any]:
    """Returns the environment of a task's recipe, with episodes of at most 100 steps."""
    from torchrl_marl.recipes import load_config

    env = load_config(f"vmas_{task}_mappo").env
    return {"name": env.name, "kwargs": env.kwargs, "max_steps": 100}


def experts_of(task: str, seed: int, args: argparse.Namespace) -> dict[str, Path | str]:
    """Returns the policies to record: runs of MAPPO, and the heuristic where there is one."""
    from torchrl_marl.recipes import load_config

    recipe, found = f"vmas_{task}_mappo", {}
    batch = load_config(recipe).frames_per_batch
    for name, share in QUALITIES[task].items():
        frames = max(1, round(share * args.online / batch)) * batch
        folder = args.runs / task / f"mappo_{name}_seed{seed}"
        found[name] = train(recipe, folder, seed=seed, total_frames=frames, env={"max_steps": 100})
    return found | ({"heuristic": "heuristic"} if CLONED[task] == "heuristic" else {})


def dataset_of(expert: Path | str, task: str, folder: Path, seed: int, episodes: int) -> Path:
    """Records a dataset, or finds that of an earlier call."""
    from torchrl_marl.apps.record import record

    if not folder.exists():
        record_kwargs = {"settings": {"env.max_steps": 100}} if expert == "heuristic" else {}
        recipe = (f"vmas_{task}_mappo",) if expert == "heuristic" else ()
        record(expert, folder, *recipe, episodes=episodes, seed=seed, **record_kwargs)
    return folder


def return_of(folder: Path) -> float:
    """Returns the mean return of a run after training, over whole episodes by likeliest actions."""
    return json.loads((folder / "summary.json").read_text(encoding="utf-8"))["return_after"]


def with_span(values: list[float], digits: int) -> str:
    """Formats the mean, with the least and the greatest value if there are several."""
    mean, least, most = (f"{f(values):.{digits}f}" for f in (statistics.fmean, min, max))
    return mean if len(values) == 1 else f"{mean} ({least} to {most})"


def offline_rows(task: str, args: argparse.Namespace) -> list[list[str]]:
    """Returns a row for each dataset: its return, and the returns of what was learned from it."""
    found: dict[str, dict[str, list[float]]] = {}
    for seed in args.seeds:
        for name, expert in experts_of(task, seed, args).items():
            folder = args.runs / task / f"data_{name}_seed{seed}"
            data = dataset_of(expert, task, folder, seed, args.recorded)
            info = json.loads((data / "dataset.json").read_text(encoding="utf-8"))
            row = found.setdefault(name, {})
            row.setdefault("recorded", []).append(info["returns"]["mean"])
            for method, settings in METHODS.items():
                source = {"expert": None, "folder": str(data)}
                if method == "dagger":
                    source = {"expert": str(expert), "folder": None}
                overrides = {"data": source, "env": env_of(task), "seed": seed, **settings}
                folder = args.runs / task / f"{method}_{name}_seed{seed}"
                run = train("vmas_balance_bc", folder, total_frames=args.frames, **overrides)
                row.setdefault(method, []).append(return_of(run))
    return [
        [name, *(with_span(returns, DIGITS[task]) for returns in row.values())]
        for name, row in found.items()
    ]


def warm_rows(task: str, args: argparse.Namespace) -> list[list[str]]:
    """Returns rows of MAPPO's evaluations with and without a start from a clone."""
    curves: dict[str, list[list[float]]] = {"from new networks": [], "from the clone": []}
    frames: list[str] = []
    for seed in args.warm_seeds.get(task, args.seeds):
        clone = args.runs / task / f"bc_{CLONED[task]}_seed{seed}"
        for name, start in zip(curves, (None, str(clone))):
            run = train(
                f"vmas_{task}_mappo",
                args.runs / task / f"{'warm' if start else 'cold'}_seed{seed}",
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
        [
            n_frames,
            *(
                with_span([curve[i] for curve in seed_curves], DIGITS[task])
                for seed_curves in curves.values()
            ),
        ]
        for i, n_frames in enumerate(frames)
    ]


def main() -> None:
    """Trains, records, plays and reports."""
    parser = report.parser(__doc__, threads=(1,))
    parser.add_argument("--tasks", nargs="+", default=list(QUALITIES), choices=QUALITIES)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--start", nargs="*", default=[], help="seeds of MAPPO: balance=0,1")
    parser.add_argument("--online", type=int, help="frames of MAPPO")
    parser.add_argument("--frames", type=int, help="steps read by an offline run")
    parser.add_argument("--recorded", type=int, default=200, help="episodes of a dataset")
    parser.add_argument("--runs", type=Path, default=Path("runs/imitation"))
    args = parser.parse_args()
    args.warm_seeds = {}
    for text in args.start:
        task, _, seeds = text.partition("=")
        args.warm_seeds[task] = [int(seed) for seed in seeds.split(",")]
    args.online = args.online or (96_000 if args.quick else 600_000)
    args.frames = args.frames or (3_000 if args.quick else 60_000)
    offline = ["policy", "recorded", "DAgger", "behavior cloning", "TD3+BC", "implicit Q-learning"]
    warm = ["frames", "from new networks", "from the clone"]
    report.publish(
        "imitation",
        "Learning from recorded episodes",
        [
            (f"{task}: {name}", report.markdown_table(heads, rows(task, args)))
            for task in args.tasks
            for name, heads, rows in (
                ("return of policies", offline, offline_rows),
                (f"MAPPO from the clone of {CLONED[task]}", warm, warm_rows),
            )
        ],
        {
            "task": "VMAS, three agents, episodes of at most 100 steps",
            "datasets": f"{args.recorded} episodes each, sampled actions of MAPPO",
            "MAPPO": f"the task's recipe, {args.online:,} frames for Good, 0.3 of them for "
            "Medium, 0.1 for Poor",
            "other runs": f"{args.frames:,} steps read, or played by DAgger; "
            f"{round(0.1 * args.frames):,} updates of DAgger and behavior cloning, "
            f"{round(0.3 * args.frames):,} of the others; bc_alpha 2.5, expectile 0.7, beta 3",
            "seeds": ", ".join(map(str, args.seeds))
            + "".join(f"; MAPPO from a clone, {text}" for text in args.start),
            "episodes": "200, as in the recipes",
        },
        """Mean over seeds, with the least and the greatest in brackets, by the likeliest actions,
        from the same initial states. The recorded actions are sampled. bc_alpha, expectile and
        beta are the papers'. The actor's learning rate and the number of updates were raised after
        a look at the heuristic's dataset.""",
        write=args.write,
    )


if __name__ == "__main__":
    main()
