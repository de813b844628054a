"""Training of the default recipe, vmas_balance_mappo, from start to end.

    python benchmarks/default_recipe.py --write

Trains seeds 0, 1 and 2 in turn by ``torchrl_marl.train``. Reports the return of 200 episodes with
the likeliest actions after at most 1.5 million frames, those of the random policy and VMAS's
heuristic, and the seconds of training. Draws the learning curve.
"""

from __future__ import annotations

import argparse
import shutil
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import report

RECIPE = "vmas_balance_mappo"
FRAMES = 1_500_000
HEADER = (
    "",
    "return",
    "untrained",
    "random",
    "heuristic",
    "frames",
    "training, s",
    "with evaluation, s",
    "frames/s",
)
QUICK = {
    "total_frames": 1_600,
    "frames_per_batch": 800,
    "env": {"num_envs": 8},
    "learner": {"minibatch_size": 200},
    "evaluation": {"episodes": 8},
}


def train(seed: int, folder: Path, args: argparse.Namespace) -> dict[str, Any]:
    """Trains one seed; its summary, and the time of the whole command."""
    import torchrl_marl

    report.be_quiet()
    overrides: dict[str, Any] = dict(QUICK) if args.quick else {}
    overrides["logging"] = {"progress": sys.stderr.isatty()}
    if args.threads is not None:
        overrides["threads"] = args.threads
    began = time.perf_counter()
    run = torchrl_marl.train(args.recipe, seed=seed, folder=str(folder), **overrides)
    total_seconds = time.perf_counter() - began
    return {**run.summary, "whole": total_seconds, "threads": run.config.threads}


def rows_of(summaries: list[dict[str, Any]]) -> list[list[str]]:
    """A row for every seed, and their mean."""
    columns = {
        "return_after": ".2f",
        "return_before": ".2f",
        "return_random": ".2f",
        "return_heuristic": ".2f",
        "frames": ",.0f",
        "seconds": ".0f",
        "whole": ".0f",
        "frames_per_second": ",.0f",
    }
    rows = []
    for summary in summaries:
        cells = [_cell(summary[key], style) for key, style in columns.items()]
        rows.append([f"seed {summary['seed']}", *cells])
    means = [_mean(summaries, key) for key in columns]
    cells = [_cell(mean, style) for mean, style in zip(means, columns.values())]
    return [*rows, ["mean", *cells]]


def _mean(summaries: list[dict[str, Any]], key: str) -> float | None:
    values = [summary[key] for summary in summaries]
    return None if None in values else statistics.mean(values)


def _cell(value: float | None, style: str) -> str:
    return "-" if value is None else format(value, style)


def main() -> None:
    """Trains and reports."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--recipe", default=RECIPE)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--threads", type=int, help="torch's threads; default: the recipe's")
    parser.add_argument("--runs", type=Path, help="folder for the run folders")
    parser.add_argument("--quick", action="store_true", help="tiny sizes, as a smoke test")
    parser.add_argument("--write", action="store_true", help="write table and picture to results")
    args = parser.parse_args()
    args.write = args.write and not args.quick

    runs = Path(tempfile.mkdtemp()) if args.runs is None else args.runs
    folders = [runs / f"seed{seed}" for seed in args.seeds]
    try:
        summaries = []
        for seed, folder in zip(args.seeds, folders):
            print(f"training seed {seed} ...", file=sys.stderr)
            summaries.append(train(seed, folder, args))
        sections = [("Return and time", report.markdown_table(HEADER, rows_of(summaries)))]
        picture = draw(folders, args)
    finally:
        if args.runs is None:
            shutil.rmtree(runs, ignore_errors=True)
    if args.write:
        sections.append(("Learning curve", f"![learning curve]({picture.name})"))
    frames = max(summary["frames"] for summary in summaries)
    if frames > FRAMES:
        sections.append(("Note", f"{frames:,} frames are more than the {FRAMES:,} allowed."))
    report.publish(
        args.recipe if args.recipe != RECIPE else "default_recipe",
        f"The recipe {args.recipe}",
        sections,
        {
            "recipe": f"{args.recipe}, {'tiny' if args.quick else 'unchanged'}",
            "threads of torch": summaries[0]["threads"],
        },
        """Each seed is trained by `torchrl_marl.train`, one after the other. "return" is the mean
        over 200 episodes (of 100 steps at most; mean over the agents of the summed reward) by the
        likeliest actions; "training" is the time of collecting and learning, "with evaluation" that
        of the whole call, with evaluations before and after, of random and heuristic policies too,
        checkpoints and the picture. The dots of the learning curve are the evaluations, the line is
        the return of the sampled actions in training.""",
        write=args.write,
    )


def draw(folders: list[Path], args: argparse.Namespace) -> Path:
    """Draws all seeds as one curve, into the results where they are written."""
    from torchrl_marl.apps.plotting import learning_curve

    report_name = args.recipe if args.recipe != RECIPE else "default_recipe"
    path = report.file_name(report_name, "png")
    if not args.write:
        path = folders[0].parent / path.name
    learning_curve(folders, path=path)
    return path


if __name__ == "__main__":
    main()
