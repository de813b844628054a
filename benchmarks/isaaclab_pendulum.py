"""Isaac Lab 3.0's pendulum on a CPU: our MAPPO against skrl's, at equal frames.

    python benchmarks/isaaclab_pendulum.py --write

Both train in the same number of envs, each with Isaac Lab's settings for skrl, and are then
evaluated on the same episodes. Isaac Lab pins other versions than ours, so both sides run by
``isaaclab_pendulum_side.py`` in a virtual environment created for them. The robot is the cart with
two poles that Newton ships.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import foreign
import report

ROOT = Path(__file__).parents[1]
SCRIPT = Path(__file__).parent / "isaaclab_pendulum_side.py"
ISAAC_LAB = ["--no-deps", "--ignore-requires-python", "-r", str(ROOT / ".ci" / "isaaclab.txt")]
INSTALLS = (ISAAC_LAB, ["--no-deps", "tensorboard", "skrl==2.1.1"])
SIDES = {"ours": "torchrl_marl MAPPO", "skrl": "skrl MAPPO", "random": "random actions"}
Result = dict[str, Any]


def result(side: str, seed: int, folder: Path, args: argparse.Namespace) -> Result:
    """Of one training, from an earlier run or from one now."""
    path = (folder / f"{side}_{args.envs}_{args.frames}_seed{seed}.json").resolve()
    if not path.is_file():
        print(f"{SIDES[side]}, seed {seed} ...", file=sys.stderr)
        options = {"--seed": seed, "--envs": args.envs, "--frames": args.frames, "--out": path}
        option_args = [str(word) for option in options.items() for word in option]
        environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
        environment["OMP_NUM_THREADS"] = "1"
        subprocess.run([args.python, str(SCRIPT), side, *option_args], check=True, env=environment)
    return json.loads(path.read_text(encoding="utf-8"))


def table(found: dict[str, list[Result]]) -> str:
    """A row for each side."""
    rows = []
    for side, results in found.items():
        returns = [result["return"] for result in results]
        spread = f"{min(returns):.2f} to {max(returns):.2f}" if len(returns) > 1 else ""
        times = [statistics.median(result[key] for result in results) for key in ("seconds", "cpu")]
        trained = [f"{seconds:.0f}" for seconds in times] if side != "random" else ["", ""]
        lasting = statistics.fmean(result["steps"] for result in results)
        mean = f"{statistics.fmean(returns):.2f}"
        rows.append([SIDES[side], mean, spread, f"{lasting:.0f}", *trained])
    header = ["", "return", "of the seeds", "steps of an episode", "seconds", "CPU-seconds"]
    return report.markdown_table(header, rows)


def publish(found: dict[str, list[Result]], args: argparse.Namespace) -> None:
    """Prints and writes."""
    report.publish(
        "isaaclab_pendulum",
        "Isaac Lab 3.0's pendulum on a CPU: our MAPPO and skrl's",
        [(f"After {args.frames:,} frames", table(found))],
        {
            "seeds": ", ".join(str(seed) for seed in args.seeds),
            "envs": args.envs,
            "threads of torch": 1,
            "versions of both": ", ".join(
                f"{name} {x}" for name, x in found["skrl"][0]["versions"].items()
            ),
            "load of the machine": ", ".join(
                f"{side} {result['load']:.1f}"
                for side, results in found.items()
                for result in results
            ),
        },
        f"""Both sides train in {args.envs} envs of Isaac-Pendulum-MARL-Direct on Newton's physics,
        with {args.frames:,} frames (steps of an env). skrl: its Runner with Isaac Lab's settings
        for MAPPO on this task, which are meant for 4,096 envs on a GPU. Ours: the recipe
        isaaclab_pendulum_mappo, which takes the rollouts of 16 steps, the epochs, the networks,
        the learning rate and its schedule from there; a minibatch is a whole rollout, as there.
        Settings of skrl were not tuned for this comparison. Ours were not either, but for one: in a
        first comparison of these seeds our actions were squashed into [-1, 1] by tanh, and the
        returns were 1.59 to 16.71. Now they are clipped. The rest is each side's own: skrl clips
        values, normalizes states and samples unbounded actions; ours has a Huber loss. Both play
        the first episode of each of 256 new envs by their likeliest action; random actions are
        uniform in [-1, 1]. The return is an agent's. Seconds are those of the training, without
        building the simulation; ours include its evaluations.
        The load
        is the machine's in the last minute of each training: other work ran beside, so seconds say
        little, and CPU-seconds more.""",
        write=args.write,
    )


def main() -> None:
    """Trains all and reports."""
    parser = report.parser(__doc__, threads=(1,))
    parser.add_argument("--seeds", type=int, nargs="+")
    parser.add_argument("--envs", type=int, default=64)
    parser.add_argument("--frames", type=int)
    parser.add_argument("--python", type=Path, help="Python of an environment with Isaac Lab, skrl")
    parser.add_argument("--results", type=Path, help="folder to keep and reuse results in")
    args = parser.parse_args()
    args.seeds = args.seeds or ([0] if args.quick else [0, 1, 2])
    args.frames = args.frames or (4096 if args.quick else 307_200)
    args.python = args.python or foreign.make_environment_over_ours(
        foreign.environments() / "isaaclab", INSTALLS
    )
    with tempfile.TemporaryDirectory() as scratch:
        folder = args.results or Path(scratch)
        folder.mkdir(parents=True, exist_ok=True)
        found: dict[str, list[Result]] = {side: [] for side in SIDES}
        for seed in args.seeds:
            for side in ("ours", "skrl"):
                found[side].append(result(side, seed, folder, args))
        found["random"].append(result("random", 0, folder, args))
    publish(found, args)


if __name__ == "__main__":
    main()
