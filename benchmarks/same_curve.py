"""One recipe trained eagerly and as graphs, with the same seeds: comparison of learning curves.

    python benchmarks/same_curve.py --write

Trains each seed twice by ``torchrl_marl.train``, with ``execution=eager`` and with
``execution=compile``, and evaluates during training. Numbers differ in the last bit and starts are
drawn in another order, so the curves agree only within the noise between seeds.
"""

from __future__ import annotations

import argparse
import csv
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

import report

RECIPE = "vmas_balance_mappo"
HEADER = ("", "execution", "return", "untrained", "training, s", "frames/s")
QUICK = {
    "total_frames": 1_600,
    "frames_per_batch": 800,
    "env.num_envs": 8,
    "learner.minibatch_size": 200,
    "evaluation.episodes": 8,
}


def train(seed: int, execution: str, folder: Path, args: argparse.Namespace) -> dict[str, Any]:
    """Trains one seed; its summary and its curve."""
    import torchrl_marl

    report.be_quiet()
    overrides: dict[str, Any] = dict(QUICK) if args.quick else {}
    if args.frames and not args.quick:
        overrides["total_frames"] = args.frames
    evaluation_frames = 400 if args.quick else args.every
    overrides |= {
        "evaluation.every_frames": evaluation_frames,
        "logging.progress": sys.stderr.isatty(),
    }
    run = torchrl_marl.train(
        args.recipe, seed=seed, folder=str(folder), execution=execution, **overrides
    )
    with (folder / "evaluation.csv").open(encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    curve = [(int(row["frames"]), float(row["return_mean"])) for row in rows]
    return {**run.summary, "execution": execution, "curve": curve}


def rows_of(runs: list[dict[str, Any]]) -> list[list[str]]:
    """A row for every run, and for the mean of each execution."""
    rows = [[f"seed {run['seed']}", run["execution"], *_cells([run])] for run in runs]
    for execution in ("eager", "compile"):
        execution_runs = [run for run in runs if run["execution"] == execution]
        rows.append(["mean", execution, *_cells(execution_runs)])
    return rows


def _cells(runs: list[dict[str, Any]]) -> list[str]:
    keys = {"return_after": ".2f", "return_before": ".2f", "seconds": ".0f"}
    keys["frames_per_second"] = ",.0f"
    return [
        format(statistics.mean(run[key] for run in runs), format_spec)
        for key, format_spec in keys.items()
    ]


def draw(runs: list[dict[str, Any]], path: Path, recipe: str) -> None:
    """Both executions' curves, a thin line a seed and a thick one for the mean."""
    import matplotlib

    matplotlib.use("agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(7, 4), layout="constrained")
    for execution, color in (("eager", "tab:gray"), ("compile", "tab:blue")):
        curves = [run["curve"] for run in runs if run["execution"] == execution]
        for curve in curves:
            axes.plot(*zip(*curve), color=color, linewidth=0.8, alpha=0.5)
        mean = [(points[0][0], statistics.mean(y for _, y in points)) for points in zip(*curves)]
        axes.plot(*zip(*mean), color=color, linewidth=2.5, label=f"execution={execution}")
    axes.set(xlabel="frames", ylabel="return of an episode", title=recipe)
    axes.legend()
    figure.savefig(path, dpi=130)


def main() -> None:
    """Trains and reports."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--recipe", default=RECIPE)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--frames", type=int, help="frames of a run; default: the recipe's")
    parser.add_argument("--every", type=int, default=96_000, help="frames between evaluations")
    parser.add_argument("--quick", action="store_true", help="tiny sizes, as a smoke test")
    parser.add_argument("--write", action="store_true", help="write table and picture to results")
    args = parser.parse_args()
    args.write = args.write and not args.quick
    runs = []
    with tempfile.TemporaryDirectory() as folder:
        for seed in args.seeds:
            for execution in ("compile", "eager"):
                print(f"training seed {seed}, {execution} ...", file=sys.stderr)
                where = Path(folder) / f"{execution}{seed}"
                runs.append(train(seed, execution, where, args))
        picture = Path(folder) / "curve.png"
        if args.write:
            picture = report.file_name("same_curve", "png", "cpu")
        draw(runs, picture, args.recipe)
    sections = [("Return and time", report.markdown_table(HEADER, rows_of(runs)))]
    if args.write:
        sections.append(("Learning curves", f"![learning curves]({picture.name})"))
    report.publish(
        "same_curve",
        f"{args.recipe}, eager and compiled",
        sections,
        {"recipe": args.recipe, "frames": f"{runs[0]['frames']:,}"},
        """Each seed is trained twice, one run after the other, evaluated on 200 episodes (as the
        recipe says) by the likeliest actions. "training, s" is collecting and learning, without
        evaluation; that of compile contains recording and compiling.""",
        write=args.write,
    )


if __name__ == "__main__":
    main()
