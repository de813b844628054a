"""Data-parallel processes against a single one: equality of learning, and speed.

python benchmarks/ranks.py equality --write
python benchmarks/ranks.py speed --write
"""

from __future__ import annotations

import argparse
import csv
import os
import runpy
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import report

EQUALITY = """One process and several train the same run of four shards, executed alike; each
    collects for itself, so that the smallest difference may grow from batch to batch. Compared are
    all parameters at the end: the norm of the difference, in parts of the norm of what one process
    has learned, and the largest difference of a statistic of values or observations, relative to
    it. *Stock* averages the gradients of two processes, whose losses and statistics are their own,
    as data parallelism does in general (without a limit of the KL divergence, by which they would
    stop apart)."""
SPEED = """Milliseconds of an iteration (collecting and learning), from `metrics.csv`, but for the
    first two; one thread a process, on two cores, in turn. One process and two train the same
    run of two shards; a process alone may also leave the environments in one piece, and step them
    together. The ratios are those of the rounds: their median and range."""
SHARDS = ["distributed.collectors=2"]
RECIPES = {
    "toy_arena_mappo": ["env.kwargs.n_groups=2", "learner.target_kl=0.01"],
    "vmas_navigation_mappo": [
        "env.num_envs=32",
        "frames_per_batch=1600",
        "learner.minibatch_size=400",
    ],
}
ENVIRONMENT_SETTINGS = {
    "vmas_navigation_mappo": [],
    "vmas_balance_mappo": [],
    "pettingzoo_simple_spread_mappo": ["env.workers=0"],
    # 2 ms of Python for each copy and step, as simulators that are run copy by copy.
    "toy_arena_mappo": [
        "env.library=benchmarks/busy_world.py:BusyArena",
        "env.name=BusyArena",
        "env.num_envs=16",
        "frames_per_batch=400",
        "learner.minibatch_size=200",
    ],
}


def train(folder: Path, ranks: int, settings: list[str], stock: bool = False) -> None:
    """Trains in a process of its own, or in several by torchrun."""
    args = ["train", *settings, f"folder={folder}", "logging.progress=false", "threads=1"]
    program = [__file__, "--stock", *args] if stock else ["-m", "torchrl_marl", *args]
    launcher = [sys.executable]
    if ranks > 1:
        launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        launcher += ["--local-addr", "127.0.0.1", "--nproc-per-node", str(ranks)]
    variables = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    done = subprocess.run(
        [*launcher, *program], env={**os.environ, **variables}, capture_output=True, text=True
    )
    if done.returncode:
        raise RuntimeError(done.stderr[-2000:])


def train_without_masks(args: list[str]) -> None:
    """Trains as data parallelism does that knows of no masks: averages of the ranks' gradients."""
    import contextlib

    import torch
    import torch.distributed as dist

    from torchrl_marl.learners.clipping import GradientClip
    from torchrl_marl.runtime.ranks import Ranks

    scale = GradientClip.scale

    def average_then_scale(clip: GradientClip, gradients: Any) -> Any:
        present_gradients = [x for x in gradients if x is not None]
        flat = torch.cat([x.reshape(-1) for x in present_gradients])
        dist.all_reduce(flat)
        parts = (flat / dist.get_world_size()).split([x.numel() for x in present_gradients])
        for x, part in zip(present_gradients, parts):
            x.copy_(part.view_as(x))
        return scale(clip, gradients)

    GradientClip.scale = average_then_scale  # type: ignore[method-assign]
    Ranks.active = lambda self: contextlib.nullcontext()  # type: ignore[method-assign]
    sys.argv = ["torchrl_marl", *args]
    runpy.run_module("torchrl_marl", run_name="__main__")


def parameters_of_run(folder: Path) -> tuple[Any, Any, Any]:
    """The parameters before and after a run, and its statistics, each in one row."""

    from torchrl_marl.training.checkpoint import all_checkpoints, load_checkpoint

    rows = []
    for path in (all_checkpoints(folder)[0], all_checkpoints(folder)[-1]):
        learner_states = load_checkpoint(path)["learners"]
        tensors = {
            f"{i}.{k}": x
            for i, one in enumerate(learner_states)
            for k, x in one.items()
            if _is_tensor(x)
        }
        named = [(k.rpartition(".")[2], x.double().reshape(-1)) for k, x in tensors.items()]
        rows.append([_row(named, of_norms) for of_norms in (False, True)])
    return rows[0][0], rows[1][0], rows[1][1]


def _row(named: list[tuple[str, Any]], of_norms: bool) -> Any:
    import torch

    statistics = ("running", "debias", "mean", "variance", "count")
    return torch.cat([x for name, x in named if name.startswith(statistics) == of_norms])


def _is_tensor(value: Any) -> bool:
    import torch

    return isinstance(value, torch.Tensor)


def equality(args: argparse.Namespace) -> list[tuple[str, str]]:
    """A table for each recipe: how far from one process the others end."""
    sections = []
    with tempfile.TemporaryDirectory() as made:
        for recipe in args.recipes or RECIPES:
            rows = _equality_of(recipe, Path(made) / recipe, args)
            header = ["", "parameters, of what was learned", "statistics, relative"]
            heading = f"{recipe}, {args.iterations} iterations"
            sections.append((heading, report.markdown_table(header, rows)))
    return sections


def _equality_of(recipe: str, folder: Path, args: argparse.Namespace) -> list[list[str]]:
    from torchrl_marl.recipes import load_config

    frames = load_config(recipe, RECIPES[recipe]).frames_per_batch * args.iterations
    settings = [recipe, *RECIPES[recipe], "distributed.collectors=4", f"total_frames={frames}"]
    settings += ["learner.normalize_observations=true", "checkpoint.keep=2", "env.max_steps=50"]
    settings += ["checkpoint.every_iterations=0", "evaluation.episodes=8"]
    cases = [
        ("2 processes", 2, ["execution=eager"]),
        ("4 processes", 4, ["execution=eager"]),
        ("2 processes, traced", 2, ["execution=trace"]),
        ("2 processes, compiled", 2, ["execution=compile"]),
        ("2 processes, stock", 2, ["execution=eager", "learner.target_kl=null"]),
    ]
    one_process_runs: dict[str, tuple[Any, Any, Any]] = {}
    rows = []
    for name, ranks, extra_settings in cases:
        if args.cases and name not in args.cases:
            continue
        if ranks > args.ranks or ("compiled" in name and args.quick):
            continue
        settings_text = ", ".join(extra_settings)
        if settings_text not in one_process_runs:
            train(folder / settings_text, 1, [*settings, *extra_settings])
            one_process_runs[settings_text] = parameters_of_run(folder / settings_text)
        initial, expected, of_norms = one_process_runs[settings_text]
        train(folder / name, ranks, [*settings, *extra_settings], stock="stock" in name)
        _, found, norms = parameters_of_run(folder / name)
        deviation = (found - expected).norm() / (expected - initial).norm()
        drift = ((norms - of_norms).abs() / of_norms.abs().clamp_min(1e-3)).max()
        rows.append([name, f"{deviation:.1e}", f"{drift:.1e}"])
        print(rows[-1], file=sys.stderr)
    return rows


def speed(args: argparse.Namespace) -> list[tuple[str, str]]:
    """Returns a row for each environment: an iteration of one process and of two."""
    rows = []
    one = ["distributed.collectors=null"]
    modes = {"in one piece": (1, one), "2 shards": (1, SHARDS), "2 processes": (2, SHARDS)}
    for recipe in args.recipes or ENVIRONMENT_SETTINGS:
        seconds: dict[str, list[float]] = {mode: [] for mode in modes}
        for _ in range(args.rounds):
            for mode, (ranks, extra_settings) in modes.items():
                with tempfile.TemporaryDirectory() as temporary:
                    run = Path(temporary) / "run"
                    seconds[mode].append(_iteration(recipe, run, ranks, extra_settings, args))
        against = [
            _ratio(seconds[mode], seconds["2 processes"]) for mode in ("in one piece", "2 shards")
        ]
        medians = [f"{1e3 * statistics.median(of_mode):,.0f}" for of_mode in seconds.values()]
        rows.append([recipe, *medians, *against])
        print(rows[-1], file=sys.stderr)
    header = ["", "1 process in one piece, ms", "1 process, 2 shards", "2 processes"]
    header += ["times one piece", "times 2 shards"]
    heading = f"Two processes on two cores, {args.execution}"
    return [(heading, report.markdown_table(header, rows))]


def _ratio(ones: list[float], others: list[float]) -> str:
    ratios = [one / other for one, other in zip(ones, others)]
    return f"{statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"


def _iteration(
    recipe: str, folder: Path, ranks: int, extra_settings: list[str], args: argparse.Namespace
) -> float:
    from torchrl_marl.recipes import load_config

    frames = (
        load_config(recipe, ENVIRONMENT_SETTINGS.get(recipe, [])).frames_per_batch * args.iterations
    )
    settings = [
        recipe,
        *ENVIRONMENT_SETTINGS.get(recipe, []),
        f"total_frames={frames}",
        "evaluation.episodes=4",
    ]
    settings += [f"execution={args.execution}", "checkpoint.every_iterations=0", *extra_settings]
    settings += ["evaluation.every_frames=null"]
    train(folder, ranks, settings)
    with (folder / "metrics.csv").open() as file:
        seconds = [float(row["seconds"]) for row in csv.DictReader(file)]
    between = [b - a for a, b in zip(seconds, seconds[1:])]
    return statistics.median(between[1:])


def main() -> None:
    """Measures and reports."""
    if sys.argv[1:2] == ["--stock"]:
        train_without_masks(sys.argv[2:])
        return
    parser = report.parser(__doc__, threads=(1,))
    parser.add_argument("what", choices=["equality", "speed"])
    parser.add_argument("--recipes", nargs="+", help="recipes; default: those of the result files")
    parser.add_argument("--cases", nargs="+", help="selected rows of the equality table")
    parser.add_argument("--iterations", type=int, help="iterations; default: 50, or 8 for speed")
    parser.add_argument("--rounds", type=int, default=3, help="for speed")
    parser.add_argument("--ranks", type=int, default=4, help="largest number of processes")
    parser.add_argument("--execution", default="eager", help="for speed")
    args = parser.parse_args()
    args.iterations = args.iterations or (50 if args.what == "equality" else 8)
    if args.quick:
        args.write, args.rounds, args.iterations, args.ranks = False, 1, 4, 2
        args.recipes = args.recipes or ["toy_arena_mappo"]
    measure, text = (equality, EQUALITY) if args.what == "equality" else (speed, SPEED)
    title = "Several processes that learn as one"
    report.publish(f"ranks_{args.what}", title, measure(args), {}, text, write=args.write)


if __name__ == "__main__":
    main()
