"""EPyMARL's own MAPPO on level-based foraging (LBF), beside ours: same environment, equal frames.

    python benchmarks/epymarl_lbf.py --write
    python benchmarks/epymarl_lbf.py --task lbf_10x10_3p_3f --frames 5000000 --write

EPyMARL trains by its own ``main.py`` with its file ``mappo.yaml``, in a virtual environment that is
created for it. Its files come from GitHub; ``--epymarl FOLDER`` uses a checkout instead. Ours are
runs of ``torchrl-marl suite foraging``: ``mappo_epymarl`` has EPyMARL's settings, ``mappo`` the
suite's own. With ``--results FOLDER`` a stopped comparison goes on where it was.
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

import foreign
import peers
import report

ADDRESS, COMMIT = (
    "https://github.com/uoe-agents/epymarl",
    "cbc38c09588064eab978501d0f12c2cf58fa7fc2",
)
NEEDS = (
    # Without torch, numpy, gymnasium and lbforaging, which are ours.
    ["--no-deps", "sacred", "docopt-ng", "jsonpickle", "munch", "GitPython", "gitdb", "smmap"]
    + ["colorama", "py-cpuinfo", "wrapt", "packaging", "PyYAML", "setuptools<70"],
)
SIDES = {
    "epymarl": "EPyMARL, `mappo.yaml`",
    "mappo_epymarl": "torchrl_marl, `mappo_epymarl`: EPyMARL's settings",
    "mappo": "torchrl_marl, `mappo`: the suite's settings",
    "mappo_16": "torchrl_marl, `mappo` with 16 envs, batches of 800, minibatches of 400",
}
SMALL = {"env.num_envs": 16, "frames_per_batch": 800, "learner.minibatch_size": 400}
TASKS = {
    "lbf_8x8_2p_2f_coop": "Foraging-8x8-2p-2f-coop-v3",
    "lbf_10x10_3p_3f": "Foraging-10x10-3p-3f-v3",
}
Result = dict[str, Any]


def train_epymarl(seed: int, scratch: Path, args: argparse.Namespace) -> Result:
    """Trains by EPyMARL, and returns its curve of tests."""
    source = (args.source or _checkout()).resolve()
    python = args.python or foreign.make_environment_over_ours(
        foreign.environments() / "epymarl", NEEDS
    )
    stand_in, records = scratch / "stand_in", scratch / "records"
    stand_in.mkdir(parents=True)
    (stand_in / "smaclite.py").touch()  # imported by each run, but not on PyPI
    settings = {
        "env_args.key": f"lbforaging:{TASKS[args.task]}",
        "env_args.time_limit": 50,
        "t_max": args.frames,
        "test_interval": args.evaluate_every,
        "test_nepisode": args.episodes,
        "use_cuda": False,
        "seed": seed,
    }
    words = [f"{key}={value}" for key, value in settings.items()]
    command = [python, "main.py", "--config=mappo", "--env-config=gymma", "-F", records, "with"]
    environment = {**os.environ, "PYTHONPATH": str(stand_in), "OMP_NUM_THREADS": "1"}
    environment["PYTHONWARNINGS"] = "ignore"  # Gymnasium warns in each step of lists of rewards
    begin = time.perf_counter()
    subprocess.run(
        [*command, *words], check=True, cwd=source / "src", env=environment, stdout=sys.stderr
    )
    return {
        "curve": _read_tests(next(records.glob("*/info.json"))),
        "seconds": time.perf_counter() - begin,
    }


def _checkout() -> Path:
    folder = foreign.environments() / "epymarl_source"
    return foreign.checkout(folder, ADDRESS, COMMIT, ["."], needed="src")


def _read_tests(path: Path) -> list[list[float]]:
    """Returns frames and return of each test."""
    found = json.loads(path.read_text(encoding="utf-8"))
    means = [x["value"] if isinstance(x, dict) else x for x in found["test_return_mean"]]
    return [list(point) for point in zip(found["test_return_mean_T"], means, strict=True)]


def train_ours(side: str, seed: int, path: Path, args: argparse.Namespace) -> Result:
    """Trains a run of the suite, and returns its curve."""
    evaluation = {"every_frames": args.evaluate_every, "count": None, "episodes": args.episodes}
    settings = {"quick": args.quick, "frames": args.frames, "evaluation": evaluation}
    side, own = ("mappo", SMALL) if side == "mappo_16" else (side, {})
    found = peers.train_by_suite(
        "foraging", side, args.task, seed, path.with_suffix(""), **settings, **own
    )
    with open(found.folder / "evaluation.csv", encoding="utf-8", newline="") as file:
        curve = [[float(row["frames"]), float(row["return_mean"])] for row in csv.DictReader(file)]
    return {"curve": curve[1:], "seconds": found.elapsed}


def train(side: str, seed: int, path: Path, args: argparse.Namespace) -> Result:
    """Trains EPyMARL's or ours, and returns its result."""
    if side == "epymarl":
        with tempfile.TemporaryDirectory() as scratch:
            found = train_epymarl(seed, Path(scratch), args)
    else:
        found = train_ours(side, seed, path, args)
    return {**found, "load": os.getloadavg()[0]}


def table(found: dict[str, list[Result]], frames: int) -> str:
    """A row for each side."""
    rows = []
    for side, results in found.items():
        ends = [result["curve"][-1][1] for result in results]
        seconds = statistics.fmean(result["seconds"] for result in results)
        of_seeds = ", ".join(f"{x:.3f}" for x in ends)
        figures = [f"{statistics.fmean(ends):.3f}", f"{seconds:,.0f}", f"{frames / seconds:,.0f}"]
        rows.append([SIDES[side], of_seeds, *figures])
    return report.markdown_table(["", "return, each seed", "mean", "seconds", "frames/s"], rows)


def curves(found: dict[str, list[Result]], every: int) -> str:
    """Mean return of the seeds at each evaluation."""
    rows, n_points = [], min(len(x["curve"]) for results in found.values() for x in results)
    for side, results in found.items():
        points = zip(*(result["curve"][:n_points] for result in results), strict=True)
        rows.append([SIDES[side], *(f"{statistics.fmean(x[1] for x in p):.3f}" for p in points)])
    return report.markdown_table(
        ["frames", *(f"{every * (i + 1):,}" for i in range(n_points))], rows
    )


METHOD = """All sides train on LBF of `lbforaging` 2.0.0, ours in the library `foraging`, which
equals it. A return is the team's, at most 1: the mean over {episodes} episodes of sampled actions,
as EPyMARL's MAPPO plays its tests. Seconds are those of the whole process with its evaluations, and
with compiling. EPyMARL steps ten environments in ten processes besides its own; ours run in one.

EPyMARL has its settings of the file, which its authors chose for LBF and RWARE at 20 million
frames. It imports `smaclite`, which no package index has; an empty module stands in for it, since
LBF does not use it. `mappo_epymarl` has GAE in place of 5-step returns, standardizes returns
instead of rewards, and has no target network. `mappo` was tuned by us on LBF 15x15-3p-5f. Its
smaller batches were tried once on this task."""


def publish(found: dict[str, list[Result]], args: argparse.Namespace) -> None:
    """Prints and writes."""
    loads = [f"{side} {x['load']:.1f}" for side, results in found.items() for x in results]
    report.publish(
        f"epymarl_{args.task}",
        f"EPyMARL's MAPPO and ours, {args.task}",
        [
            (f"Return after {args.frames:,} frames", table(found, args.frames)),
            ("Curves, mean of the seeds", curves(found, args.evaluate_every)),
        ],
        {
            "EPyMARL": f"commit {COMMIT}",
            "seeds": ", ".join(map(str, args.seeds)),
            "threads of torch": 1,
            "load of the machine": ", ".join(loads),
        },
        METHOD.format(episodes=args.episodes),
        write=args.write and not args.quick,
    )


def main() -> None:
    """Trains all and reports."""
    parser = report.parser(__doc__, threads=(1,))
    parser.add_argument("--task", choices=list(TASKS), default="lbf_8x8_2p_2f_coop")
    parser.add_argument("--evaluate-every", type=int, help="frames; default: an eighth of all")
    args = peers.arguments(
        parser,
        "EPyMARL",
        [*SIDES],
        [*SIDES],
        seeds=[0],
        frames=1_024_000,
        batch=16_000,
        episodes=("--episodes", 200),
    )
    args.evaluate_every = args.evaluate_every or max(16_000, args.frames // 8)
    found = peers.results(args.task, train, args)
    publish(found, args)


if __name__ == "__main__":
    main()
