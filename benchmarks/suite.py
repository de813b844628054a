"""The VMAS suite against BenchMARL 1.5.2's MAPPO with its own defaults, at equal frames.

    python benchmarks/suite.py --write
    python benchmarks/suite.py --ours suite_vmas --theirs benchmarl --write

Our runs are those of ``torchrl-marl suite vmas``, with the suite's table of settings. Theirs are
made by ``benchmarl_vmas.py`` in a virtual environment. Existing results are reused: run folders
``TASK/ALGORITHM/seedN`` under ``--ours`` and files ``TASK_seedN.json`` under ``--theirs``. Both
sides are evaluated on the same 200 episodes with the likeliest actions.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

import foreign
import report
from vmas_episodes import EPISODES, EVALUATION_SEED, play

BENCHMARL = Path(__file__).parent / "benchmarl_vmas.py"
TASKS = ["balance", "navigation", "sampling", "dispersion", "wheel", "reverse_transport"]
RETURN = "episode_reward_to_done"
BATCH = 6_000  # BenchMARL's
EQUAL = 0.02  # the two sides collect in batches of different sizes
SAME = 1e-2  # two numbers of a start; float32 sums, in another order


# ------------------------------------------------------------------------------------- both sides


def run_ours(args: argparse.Namespace) -> None:
    """Trains what is missing of the suite."""
    from torchrl_marl.apps.suites import run_suite

    run_suite(
        "vmas",
        algorithms=args.algorithm,
        tasks=args.tasks,
        seeds=args.seeds,
        frames=args.frames,
        out=args.ours,
        resume=(args.ours / "suite.json").is_file(),
        jobs=args.jobs,
    )


def our_result(task: str, seed: int, args: argparse.Namespace) -> dict[str, Any]:
    """A run's episodes, played once and kept beside the suite."""
    place = (task, args.algorithm, f"seed{seed}")
    path = args.ours / "episodes" / f"{'_'.join(place)}.json"
    if not path.is_file():
        path.parent.mkdir(exist_ok=True)
        path.write_text(json.dumps(play(args.ours.joinpath(*place), args.episodes)) + "\n")
    found = json.loads(path.read_text(encoding="utf-8"))
    check(path, (found["evaluation"]["seed"], len(found["starts"])), args)
    return found


def their_result(task: str, seed: int, frames: int, args: argparse.Namespace) -> dict[str, Any]:
    """BenchMARL's result, made where it is not there yet, in its own batches."""
    path = (args.theirs / f"{task}_seed{seed}.json").resolve()
    if not path.is_file():
        print(f"BenchMARL, {task}, seed {seed} ...", file=sys.stderr)
        python = foreign.make_environment(args.environment, foreign.BENCHMARL)
        options = {
            "--task": task,
            "--seed": seed,
            "--frames": -(-frames // BATCH) * BATCH,
            "--episodes": args.episodes,
            "--evaluate-every": max(frames // 10 // BATCH, 1) * BATCH,
            "--evaluation-seed": EVALUATION_SEED,
            "--out": path,
        }
        option_args = [str(word) for option in options.items() for word in option]
        environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
        environment["OMP_NUM_THREADS"] = "1"
        subprocess.run([python, str(BENCHMARL), *option_args], check=True, env=environment)
    found = json.loads(path.read_text(encoding="utf-8"))
    check(path, (found["settings"]["evaluation"]["seed"], len(found["starts"])), args)
    return {**found, "frames": found["curve"][-1]["frames"]}


def check(path: Path, found: tuple[int, int], args: argparse.Namespace) -> None:
    """Refuses a result of other episodes.

    Raises:
        SystemExit: naming the file and what is otherwise.
    """
    expected = (EVALUATION_SEED, args.episodes)
    if found != expected:
        raise SystemExit(
            f"{path} is of other episodes: their seed and number are {found}, expected {expected}; "
            "give --episodes, or remove the file."
        )


def check_alike(task: str, one: dict[str, Any], other: dict[str, Any]) -> None:
    """Refuses to compare after other frames, or in episodes that do not begin alike.

    Raises:
        SystemExit: naming the task.
    """
    frames = (one["frames"], other["frames"])
    if abs(frames[0] - frames[1]) > EQUAL * max(frames):
        raise SystemExit(
            f"{task}: the runs have {frames[0]:,} and {frames[1]:,} frames, expected as many on "
            "both sides; remove the results of one side, or give --frames."
        )
    gaps = [abs(a - b) for a, b in zip(one["starts"], other["starts"], strict=True)]
    if max(gaps) > SAME:
        raise SystemExit(
            f"{task}: the two sides played other episodes, expected the same starts (they differ "
            f"by up to {max(gaps):.3g}); evaluate both with the same versions of VMAS and torch."
        )


# ------------------------------------------------------------------------------------------ report


def mean_return(result: dict[str, Any]) -> float:
    """Mean return to the episodes' end."""
    return statistics.fmean(result["episodes"][RETURN])


def row(task: str, args: argparse.Namespace) -> dict[str, Any]:
    """Everything about a task."""
    from torchrl_marl.training.statistics import estimate, interquartile_mean, paired_difference

    our_results = [our_result(task, seed, args) for seed in args.seeds]
    their_results = [
        their_result(task, seed, our_results[0]["frames"], args) for seed in args.their_seeds
    ]
    for result in (*our_results, *their_results):
        check_alike(task, our_results[0], result)
    returns, reference = (
        [mean_return(one) for one in our_results],
        [mean_return(result) for result in their_results],
    )
    episodes = [
        [statistics.fmean(x) for x in zip(*(one["episodes"][RETURN] for one in side))]
        for side in (our_results, their_results)
    ]
    seconds = [
        statistics.fmean(one["seconds_training"] for one in side)
        for side in (our_results, their_results)
    ]
    return {
        "task": task,
        "frames": our_results[0]["frames"],
        "versions": their_results[0]["versions"],
        "ran": f"execution={our_results[0]['execution']}, device={our_results[0]['device']}",
        "iqm": estimate(interquartile_mean, [returns], resamples=1).value,
        "returns": returns,
        "theirs": reference,
        "paired": paired_difference(*episodes),
        "seconds": seconds,
    }


def spread(values: list[float]) -> str:
    """``mean (least to most)``."""
    mean = f"{statistics.fmean(values):.3f}"
    return mean if len(values) == 1 else f"{mean} ({min(values):.3f} to {max(values):.3f})"


def tables(rows: list[dict[str, Any]]) -> list[tuple[str, str]]:
    """Returns, and time."""
    returns = [
        [
            one["task"],
            f"{one['frames']:,}",
            f"{one['iqm']:.3f}",
            spread(one["returns"]),
            spread(one["theirs"]),
            f"{one['iqm'] - statistics.fmean(one['theirs']):+.3f}",
            f"{one['paired'].won:.0%}",
        ]
        for one in rows
    ]
    heads = [
        "task",
        "frames",
        "ours, IQM",
        "ours, mean",
        "BenchMARL",
        "IQM minus theirs",
        "episodes won",
    ]
    times = [
        [one["task"], f"{one['seconds'][0]:.0f}", f"{one['seconds'][1]:.0f}"]
        + [f"{one['seconds'][0] / one['seconds'][1]:.3f}"]
        for one in rows
    ]
    total = [sum(one["seconds"][side] for one in rows) for side in (0, 1)]
    times.append(["all", f"{total[0]:.0f}", f"{total[1]:.0f}", f"{total[0] / total[1]:.3f}"])
    better = sum(one["iqm"] > statistics.fmean(one["theirs"]) for one in rows)
    return [
        ("Return", report.markdown_table(heads, returns)),
        ("", f"Ours is higher on {better} of {len(rows)} tasks."),
        (
            "Seconds of training, one run",
            report.markdown_table(["task", "ours", "BenchMARL", "ours / theirs"], times),
        ),
    ]


def parse_args() -> argparse.Namespace:
    """Reads the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ours", type=Path, default=Path("suite_vmas"), help="folder of our suite")
    parser.add_argument(
        "--theirs", type=Path, default=Path("benchmarl"), help="folder of their results"
    )
    parser.add_argument("--tasks", nargs="+", default=TASKS)
    parser.add_argument("--algorithm", default="mappo", help="our algorithm")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2], help="our seeds")
    parser.add_argument("--their-seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--frames", type=int, help="frames of each run; default: the suite's")
    parser.add_argument("--episodes", type=int, default=EPISODES)
    parser.add_argument("--jobs", type=int, default=1, help="number of concurrent runs of ours")
    parser.add_argument("--made", action="store_true", help="train nothing, use existing runs")
    parser.add_argument(
        "--environment",
        type=Path,
        default=foreign.environments() / "benchmarl",
        help="folder of BenchMARL's virtual environment; created if missing",
    )
    parser.add_argument("--note", default="", help="sentence on the origin of the runs")
    parser.add_argument("--quick", action="store_true", help="tiny sizes, as a smoke test")
    parser.add_argument("--write", action="store_true", help="write the tables to results")
    args = parser.parse_args()
    if args.quick:
        args.tasks, args.seeds, args.frames = args.tasks[:1], [0], 6_000
        args.episodes, args.write = 20, False
        args.ours, args.theirs = args.ours / "quick", args.theirs / "quick"
    return args


def main() -> None:
    """Makes what is missing and reports."""
    args = parse_args()
    if not args.made:
        run_ours(args)
    report.be_quiet()
    rows = [row(task, args) for task in args.tasks]
    sections = tables(rows)
    joined = f"{sections[0][1]}\n\n{sections[1][1]}"
    report.publish(
        "suite",
        f"The VMAS suite's {args.algorithm.upper()} and BenchMARL's MAPPO",
        [("Return", joined), sections[2]],
        {
            "seeds": f"ours {args.seeds}, BenchMARL {args.their_seeds}",
            "ours ran": ", ".join(dict.fromkeys(one["ran"] for one in rows)),
            "BenchMARL's versions": ", ".join(f"{k} {v}" for k, v in rows[0]["versions"].items()),
        },
        f"""A return is the mean over {args.episodes} episodes of the agents' mean reward, summed to
        the episode's end. Both sides are evaluated in TorchRL's VmasEnv with the same seed, by the
        likeliest actions, and were seen to begin alike; the time of evaluating is not in the
        seconds, that of compiling is. IQM is the interquartile mean over our seeds; behind a mean
        stand the least and the most of the seeds. "Episodes won" is the share of the episodes in
        which our seeds earn more on average than theirs from the same start. Ours are by the
        suite's table of settings, which was tuned; BenchMARL has its own defaults for task,
        experiment, algorithm and model. {args.note}""",
        write=args.write,
    )


if __name__ == "__main__":
    main()
