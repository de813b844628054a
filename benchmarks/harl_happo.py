"""HARL's own HAPPO on our MuJoCo robots, beside ours: same environment, equal frames.

    python benchmarks/harl_happo.py --write
    python benchmarks/harl_happo.py --task humanoid_17x1 --frames 200000 --write

HARL trains by ``harl_side.py`` in a virtual environment that is created for it, with its tuned
settings. Its files come from GitHub; ``--harl FOLDER`` uses a checkout instead. Ours are runs of
``torchrl-marl suite robots``: ``happo_harl`` has HARL's settings, ``happo`` the suite's own. Both
sides are evaluated on the same episodes with deterministic actions.
"""

from __future__ import annotations

import argparse
import csv
import os
import statistics
from pathlib import Path
from typing import Any

import foreign
import peers
import report

SCRIPT = Path(__file__).parent / "harl_side.py"
ADDRESS, COMMIT = "https://github.com/PKU-MARL/HARL", "d539bad20f677bc4ce9fa200fa5de31b5f0b9d37"
NEEDS = (
    # Without numpy and others, which are ours.
    ["--no-deps", "tensorboardX", "setproctitle", "pyyaml", "absl-py", "protobuf", "packaging"],
)
WITHOUT = ":(exclude)harl/envs/dexhands/DexterousHands"  # meshes of hands
SIDES = {
    "harl": "HARL's HAPPO",
    "harl_state": "HARL's HAPPO, each agent observes the state",
    "happo_harl": "torchrl_marl, `happo_harl`: HARL's settings",
    "happo": "torchrl_marl, `happo`: the suite's settings",
}
TASKS = {
    "ant_4x2": ("mujoco/ant", "4x2", "Ant-v2-4x2"),
    "humanoid_17x1": ("mujoco/humanoid", "17x1", "Humanoid-v2-17x1"),
}
Result = dict[str, Any]


# --------------------------------------------------------------------------------------- HARL's


def checkout() -> Path:
    """Returns HARL's files, from GitHub; pip would leave its tuned settings out."""
    folder = foreign.environments() / "harl_source"
    return foreign.checkout(folder, ADDRESS, COMMIT, [".", WITHOUT], needed="setup.py")


def train_harl(side: str, seed: int, path: Path, args: argparse.Namespace) -> Result:
    """Trains HARL's HAPPO, and returns what its script has written."""
    env, agent_conf, tuned = TASKS[args.task]
    source = (args.source or checkout()).resolve()
    options = {
        "--config": source / "tuned_configs" / "mamujoco" / tuned / "happo" / "config.json",
        "--env": env,
        "--agent-conf": agent_conf,
        "--view": "state" if side == "harl_state" else "own",
        "--seed": seed,
        "--frames": args.frames,
        "--evaluate-every": args.evaluate_every,
        "--episodes": args.episodes,
        "--out": path.resolve(),
    }
    environment = {**os.environ, "PYTHONPATH": str(source), "OMP_NUM_THREADS": "1"}
    python = args.python or foreign.make_environment_over_ours(
        foreign.environments() / "harl", NEEDS
    )
    return peers.train_by_script(python, SCRIPT, options, environment)


# ----------------------------------------------------------------------------------------- ours


def train(side: str, seed: int, path: Path, args: argparse.Namespace) -> Result:
    """Trains HARL's or ours, and returns its result."""
    return (train_harl if side.startswith("harl") else train_ours)(side, seed, path, args)


def train_ours(side: str, seed: int, path: Path, args: argparse.Namespace) -> Result:
    """Trains a run of the suite, and returns its curve."""
    evaluation = {"every_frames": args.evaluate_every, "episodes": args.episodes}
    settings = {"quick": args.quick, "frames": args.frames, "evaluation": evaluation}
    found = peers.train_by_suite("robots", side, args.task, seed, path.with_suffix(""), **settings)
    with open(found.folder / "evaluation.csv", encoding="utf-8", newline="") as file:
        curve = [{k: float(x) for k, x in row.items() if x} for row in csv.DictReader(file)]
    return {"curve": curve, "seconds": found.summary["seconds"], "load": os.getloadavg()[0]}


# --------------------------------------------------------------------------------------- report


def table(found: dict[str, list[Result]], frames: int) -> str:
    """A row for each side."""
    rows = []
    for side, results in found.items():
        last = [result["curve"][-1] for result in results]
        seconds = statistics.fmean(result["seconds"] for result in results)
        low, high = min(x["return_min"] for x in last), max(x["return_max"] for x in last)
        means = [statistics.fmean(x[key] for x in last) for key in ("return_mean", "length_mean")]
        speed = f"{frames / seconds:,.0f}"
        figures = [*(f"{x:,.0f}" for x in means), f"{low:,.0f} to {high:,.0f}"]
        rows.append([SIDES[side], *figures, f"{seconds:.0f}", speed])
    header = ["", "return", "steps of an episode", "returns of the episodes", "seconds", "frames/s"]
    return report.markdown_table(header, rows)


def curves(found: dict[str, list[Result]]) -> str:
    """Mean return of each evaluation; a column for each number of frames."""
    frames = [int(point["frames"]) for point in next(iter(found.values()))[0]["curve"]]
    rows = []
    for side, results in found.items():
        points = zip(*(result["curve"] for result in results), strict=True)
        means = (statistics.fmean(x["return_mean"] for x in point) for point in points)
        rows.append([SIDES[side], *(f"{mean:,.0f}" for mean in means)])
    return report.markdown_table(["frames", *(f"{n:,}" for n in frames)], rows)


def publish(found: dict[str, list[Result]], args: argparse.Namespace) -> None:
    """Prints and writes."""
    versions = {
        k: x for results in found.values() for k, x in results[0].get("versions", {}).items()
    }
    named = ", ".join(f"{k} {x}" for k, x in versions.items())
    report.publish(
        f"harl_happo_{args.task}",
        f"HARL's HAPPO and ours, {args.task}",
        [(f"After {args.frames:,} frames", table(found, args.frames)), ("Curves", curves(found))],
        {
            **({"HARL": f"commit {COMMIT}", "versions on HARL's side": named} if versions else {}),
            "seeds": ", ".join(str(seed) for seed in args.seeds),
            "threads of torch": 1,
            "load of the machine": ", ".join(
                f"{side} {result['load']:.1f}"
                for side, results in found.items()
                for result in results
            ),
        },
        METHOD.format(episodes=args.episodes),
        write=args.write and not args.quick,
    )


METHOD = """All sides train in our environment, with the same physics, rewards and time limit of
1,000 steps. Each is evaluated on the same {episodes} whole episodes with deterministic actions.
Seconds are those of collecting and learning, without evaluations; ours include compiling. Other
work ran on the machine, so seconds say little.

HARL: its OnPolicyHARunner with its tuned settings of the task. Only the device (a CPU), the threads
(one), the frames and the seed are changed. The settings were made for 10 M frames, not for so few.
Its agents observe what ours do. With the state, each agent also observes its index, and all is
standardized, as in HARL's own environment.

Ours: `happo_harl` has HARL's sizes of networks, epochs, clipping, schedule and first standard
deviation. It differs by its normalization of observations (running statistics, not a layer norm)
and its actions (tanh). HARL also has a layer norm behind each hidden layer, and clips no actions:
torques beyond the limits only cost. `happo` has the suite's settings, in 40 envs. Neither was tuned
for this comparison."""


def main() -> None:
    """Trains all and reports."""
    parser = report.parser(__doc__, threads=(1,))
    parser.add_argument("--task", choices=list(TASKS), default="ant_4x2")
    parser.add_argument("--evaluate-every", type=int, help="frames; default: a quarter of all")
    args = peers.arguments(
        parser,
        "HARL",
        [*SIDES],
        [*SIDES],
        seeds=[0],
        frames=400_000,
        batch=4_000,
        episodes=("--episodes", 32),
    )
    args.evaluate_every = args.evaluate_every or max(4_000, args.frames // 4)
    found = peers.results(args.task, train, args)
    publish(found, args)


if __name__ == "__main__":
    main()
