"""Returns of the recipes of QMIX, VDN, IQL and PQN, with three seeds.

    python benchmarks/value_recipes.py --write

Trains each recipe, with its seeds in one program if the algorithm supports that, and reads the
mean return of the evaluation after training, with the likeliest actions. For SMAX it plays 500
battles, by the functions of ``benchmarks/jaxmarl_recipes.py``.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

import jaxmarl_recipes
import report

RECIPES = (
    "toy_two_step_game_qmix",
    "toy_two_step_game_vdn",
    "toy_arena_qmix",
    "toy_echo_rqmix",
    "vmas_simple_spread_qmix",
    "vmas_simple_spread_vdn",
    "vmas_simple_spread_iql",
    "vmas_simple_spread_pqn",
    "vmas_balance_qmix",
    "vmas_simple_tag_mappo_iql",
    "jaxmarl_simple_spread_pqn",
    "jaxmarl_smax_3m_qmix",
    "jaxmarl_smax_3m_pqn",
    "jaxmarl_smax_2s3z_pqn",
    "jaxmarl_switch_riddle_rpqn",
)
QUICK = {
    "total_frames": 1_600,
    "frames_per_batch": 800,
    "env": {"num_envs": 8},
    "learner": {"minibatch_size": 32},
    "evaluation": {"episodes": 8},
}


def train(recipe: str, seeds: list[int], runs: Path, quick: bool) -> None:
    """Trains the seeds of a recipe that have no run folder yet: ``<runs>/<recipe>/seed<n>``."""
    import torchrl_marl
    from torchrl_marl.errors import ConfigError

    report.be_quiet()
    folder = runs / recipe
    missing = [n for n in seeds if not (folder / f"seed{n}" / "summary.json").exists()]
    settings: dict[str, Any] = {**(QUICK if quick else {}), "logging": {"progress": False}}
    if len(missing) > 1 and missing == [*range(missing[0], missing[0] + len(missing))]:
        together = {"population": {"size": len(missing)}, "seed": missing[0]}
        try:
            torchrl_marl.train(recipe, folder=str(folder), **settings, **together)
            return
        except ConfigError as error:
            print(f"one by one, since {error}", file=sys.stderr)
            shutil.rmtree(folder, ignore_errors=True)
    for n in missing:
        torchrl_marl.train(recipe, seed=n, folder=str(folder / f"seed{n}"), **settings)


def measure_run(recipe: str, folder: Path, episodes: int) -> tuple[str, float, float]:
    """Measures a run: its policy, and random actions beside it."""
    from torchrl_marl.training.run import Run

    if "smax" in recipe:
        return jaxmarl_recipes.measure_policies(Run.load(folder), recipe, episodes)[0]
    summary = json.loads((folder / "summary.json").read_text(encoding="utf-8"))
    return "return", summary["return_after"], summary["return_random"]


def row(recipe: str, seeds: list[int], runs: Path, episodes: int) -> list[str]:
    """The recipe's line in the table."""
    folders = [runs / recipe / f"seed{n}" for n in seeds]
    finished = [run_folder for run_folder in folders if (run_folder / "summary.json").exists()]
    if not finished:
        return [recipe, *["-"] * (len(seeds) + 4)]
    found = {run_folder: measure_run(recipe, run_folder, episodes) for run_folder in finished}
    (quantity, *_), trained_returns = found[finished[0]], [x for _, x, _ in found.values()]
    frames = json.loads((finished[0] / "summary.json").read_text(encoding="utf-8"))["frames"]
    seed_cells = [
        f"{found[run_folder][1]:.4g}" if run_folder in found else "-" for run_folder in folders
    ]
    random_return = statistics.mean(x for _, _, x in found.values())
    return [
        recipe,
        f"{frames:,}",
        quantity,
        *seed_cells,
        f"{statistics.mean(trained_returns):.4g}",
        f"{random_return:.4g}",
    ]


def main() -> None:
    """Trains and reports."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--recipes", nargs="+", default=list(RECIPES), choices=list(RECIPES))
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument(
        "--episodes", type=int, default=500, help="battles of the evaluation of SMAX"
    )
    parser.add_argument("--runs", help="folder to keep and reuse run folders in")
    parser.add_argument("--measure-only", action="store_true", help="only measure existing runs")
    parser.add_argument("--quick", action="store_true", help="tiny sizes, as a smoke test")
    parser.add_argument("--write", action="store_true", help="write the table to results")
    args = parser.parse_args()
    runs = Path(args.runs or tempfile.mkdtemp())
    try:
        rows = []
        for recipe in args.recipes:
            if not args.measure_only:
                print(f"training {recipe} ...", file=sys.stderr)
                train(recipe, args.seeds, runs, args.quick)
            rows.append(row(recipe, args.seeds, runs, 8 if args.quick else args.episodes))
    finally:
        if args.runs is None:
            shutil.rmtree(runs, ignore_errors=True)
    header = ("recipe", "frames", "measured", *(f"seed {n}" for n in args.seeds))
    report.publish(
        "value_recipes",
        "What the recipes of values of actions reach",
        [("Results", report.markdown_table((*header, "mean", "random"), rows))],
        {"threads of torch and of JAX": 1},
        """Returns are those of the evaluation after training (`summary.json`), by the likeliest
        actions; "won" is the share of 500 battles. Seeds of QMIX, VDN and IQL are trained in one
        program, those of PQN and of two algorithms one after the other. Settings are the recipes',
        tuned before mixers and values started as PyMARL's do, but for the learning rate of the
        arena's, which was lowered afterwards.""",
        write=args.write and not args.quick,
    )


if __name__ == "__main__":
    main()
