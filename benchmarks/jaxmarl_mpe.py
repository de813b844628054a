"""JaxMARL's IPPO, MAPPO and PQN in particle environments beside ours, at equal frames.

    python benchmarks/jaxmarl_mpe.py --write
    python benchmarks/jaxmarl_mpe.py --sides ippo_rnn mappo_rnn --seeds 0 --write

JaxMARL trains by ``jaxmarl_mpe_side.py`` in a virtual environment that is created for it, with the
settings of its own files for MPE. These files come from GitHub; ``--jaxmarl FOLDER`` uses a
checkout instead. Ours are runs of ``torchrl-marl suite mpe``. Both sides then play episodes by the
likeliest actions. With ``--results FOLDER`` a stopped comparison goes on where it was.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import foreign
import peers
import report
from jaxmarl_recipes import episodes_of
from jaxmarl_smax import COMMIT, NEEDS, ONE_THREAD, checkout

SCRIPT = Path(__file__).parent / "jaxmarl_mpe_side.py"
THEIRS = {
    "ippo_ff": "JaxMARL, `ippo_ff_mpe.py`",
    "ippo_rnn": "JaxMARL, `ippo_rnn_mpe.py`, memory",
    "mappo_rnn": "JaxMARL, `mappo_rnn_mpe.py`, memory",
    "pqn_vdn_ff": "JaxMARL, `pqn_vdn_ff.py`",
}
OURS = {
    "mappo": "torchrl_marl, `mappo`",
    "ippo": "torchrl_marl, `ippo`",
    "pqn": "torchrl_marl, `pqn`",
}
BATCH = 102_400  # frames; a multiple of the batches of both sides
Result = dict[str, Any]


def theirs(side: str, seed: int, path: Path, args: argparse.Namespace) -> Result:
    """Trains by JaxMARL's script, and returns what its process has written."""
    source = (args.jaxmarl or checkout(foreign.environments() / "jaxmarl_source")).resolve()
    options = {
        "--source": source,
        "--algorithm": side,
        "--task": f"MPE_{args.task}_v{args.version}",
        "--seed": seed,
        "--frames": args.frames,
        "--episodes": args.episodes,
        "--out": path.resolve(),
    }
    python = args.python or foreign.make_environment(foreign.environments() / "jaxmarl_smax", NEEDS)
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    environment |= {"OMP_NUM_THREADS": "1", "XLA_FLAGS": ONE_THREAD}
    return peers.train_by_script(python, SCRIPT, options, environment)


def ours(side: str, seed: int, path: Path, args: argparse.Namespace) -> Result:
    """Trains a run of the suite, and plays episodes with its policy."""
    from torchrl_marl.training import Run

    evaluation = {"every_frames": args.frames, "episodes": 2}
    settings = {"quick": args.quick, "frames": args.frames, "evaluation": evaluation}
    folder = path.with_suffix("")
    found = peers.train_by_suite("mpe", side, f"jaxmarl_{args.task}", seed, folder, **settings)
    earned = played(Run.load(found.folder), args.episodes)
    return {"return": earned, "training": found.summary["seconds"], "load": os.getloadavg()[0]}


def played(run: Any, episodes: int) -> float:
    """Returns an agent's mean return over the first episode of each copy."""
    import torch
    from torchrl.envs.utils import ExplorationType, set_exploration_type

    from torchrl_marl.envs import make_env

    env = make_env(replace(run.config.env, info=False), seed=12345, num_envs=episodes)
    with torch.no_grad(), set_exploration_type(ExplorationType.DETERMINISTIC):
        earned = episodes_of(env, run.policy)["return"]
    env.close()
    return earned


def result(side: str, seed: int, folder: Path, args: argparse.Namespace) -> Result:
    """Of one training, from an earlier call or from one now."""
    path = folder / f"{args.task}_{side}_{args.frames}_seed{seed}.json"
    train = theirs if side in THEIRS else ours
    what = f"{side} on {args.task}, seed {seed}"
    return peers.kept(path, what, lambda: train(side, seed, path, args))


def table(found: dict[str, list[Result]]) -> str:
    """A row for each side."""
    rows = []
    for side, each in found.items():
        earned = [one["return"] for one in each]
        seconds = [one["training"] + one.get("compiling", 0.0) for one in each]
        of_seeds = ", ".join(f"{x:.2f}" for x in earned)
        figures = [f"{statistics.fmean(earned):.2f}", ", ".join(f"{x:,.0f}" for x in seconds)]
        rows.append([{**THEIRS, **OURS}[side], of_seeds, *figures])
    return report.markdown_table(["", "return, each seed", "mean", "seconds, each seed"], rows)


def publish(found: dict[str, list[Result]], args: argparse.Namespace) -> None:
    """Prints and writes."""
    versions = next(
        (one["versions"] for each in found.values() for one in each if "versions" in one), {}
    )
    named = {"versions on JaxMARL's side": ", ".join(f"{k} {x}" for k, x in versions.items())}
    loads = [f"{side} {one['load']:.1f}" for side, each in found.items() for one in each]
    report.publish(
        f"jaxmarl_mpe_{args.task}",
        f"JaxMARL and ours on MPE's {args.task}",
        [(f"Return of an agent after {args.frames:,} frames", table(found))],
        {
            **({"JaxMARL": f"commit {COMMIT}", **named} if versions else {}),
            "seeds": ", ".join(str(seed) for seed in args.seeds),
            "threads of torch and of JAX": 1,
            "load of the machine": ", ".join(loads),
        },
        METHOD.format(episodes=args.episodes),
        write=args.write and not args.quick,
    )


METHOD = """Both sides train in JaxMARL's environment, with discrete actions. A return is the sum of
an agent's rewards in the first 25 steps of an episode: the mean over the agents and {episodes}
episodes, by the likeliest actions. Training episodes have 25 steps with ours, 26 with JaxMARL's.
Seconds are those of compiling, collecting and learning. Other work may run on the machine (see the
load).

Theirs are JaxMARL's scripts with its files for MPE. Only the environment, the seed and the frames
are changed, and evaluations in between are left out. These settings are its authors' for 10 M
frames. Ours are those of the suite, which were tuned for about a million frames."""


def main() -> None:
    """Trains all and reports."""
    parser = report.parser(__doc__, threads=(1,))
    parser.add_argument("--task", default="simple_spread", help="environment of MPE")
    parser.add_argument("--version", type=int, default=3, help="its version in JaxMARL")
    parser.add_argument(
        "--sides",
        nargs="+",
        choices=[*THEIRS, *OURS],
        default=["ippo_ff", "pqn_vdn_ff", "mappo", "ippo", "pqn"],
    )
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--frames", type=int, help=f"a multiple of {BATCH:,}; default: 2,048,000")
    parser.add_argument("--episodes", type=int, default=1000)
    parser.add_argument("--jaxmarl", type=Path, help="folder with a checkout of JaxMARL")
    parser.add_argument("--python", type=Path, help="Python of an environment for JaxMARL")
    parser.add_argument("--results", type=Path, help="folder to keep and reuse results in")
    args = parser.parse_args()
    args.frames = args.frames or (BATCH if args.quick else 2_048_000)
    args.episodes = 8 if args.quick else args.episodes
    if args.frames % BATCH:
        raise SystemExit(f"--frames is no multiple of {BATCH:,}, the frames of a batch.")
    os.environ.setdefault("XLA_FLAGS", ONE_THREAD)
    with tempfile.TemporaryDirectory() as scratch:
        folder = args.results or Path(scratch)
        folder.mkdir(parents=True, exist_ok=True)
        found = {
            side: [result(side, seed, folder, args) for seed in args.seeds] for side in args.sides
        }
    publish(found, args)


if __name__ == "__main__":
    main()
