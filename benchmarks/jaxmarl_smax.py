"""JaxMARL's IPPO, MAPPO and PQN on SMAX beside ours: same maps, equal frames, one core each.

    python benchmarks/jaxmarl_smax.py --write
    python benchmarks/jaxmarl_smax.py --map 6h_vs_8z --frames 9994240 --write

JaxMARL trains by ``jaxmarl_smax_side.py`` in a virtual environment that is created for it, with the
settings of its own files for SMAX. These files come from GitHub; ``--jaxmarl FOLDER`` uses a
checkout instead. Ours are runs of ``torchrl-marl suite smax``. Both sides then play battles to
their end by the likeliest actions. With ``--results FOLDER`` a stopped comparison goes on where it
was.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import foreign
import peers
import report
from jaxmarl_recipes import episodes_of

SCRIPT = Path(__file__).parent / "jaxmarl_smax_side.py"
ADDRESS = "https://github.com/FLAIROx/JaxMARL"
COMMIT = "c793d095618c6d3edfb5632802348f57b70a4b94"
NEEDS = (["jaxmarl==0.2.0", "flax", "optax", "six", "distrax", "pyyaml"],)
THEIRS = {
    "ippo_rnn": "JaxMARL, `ippo_rnn_smax.py`",
    "mappo_rnn": "JaxMARL, `mappo_rnn_smax.py`",
    "pqn_vdn_rnn": "JaxMARL, `pqn_vdn_rnn.py`",
}
OURS = {
    "rmappo": "torchrl_marl, `rmappo`: settings of `mappo_rnn_smax.py`",
    "rpqn": "torchrl_marl, `rpqn`: settings of `pqn_vdn_rnn.py`",
    "mappo": "torchrl_marl, `mappo`: no memory, the suite's settings",
}
ONE_THREAD = "--xla_cpu_multi_thread_eigen=false intra_op_parallelism_threads=1"
BATCH = 128 * 128  # frames of a batch of both sides
Result = dict[str, Any]


# ------------------------------------------------------------------------------------- JaxMARL's


def checkout(folder: Path) -> Path:
    """JaxMARL's scripts at the commit, from GitHub; the package does not have them."""
    if not (folder / "baselines").is_dir():
        folder.mkdir(parents=True, exist_ok=True)
        git = ["git", "-C", str(folder)]
        subprocess.run([*git, "init", "--quiet"], check=True)
        fetch = [*git, "fetch", "--quiet", "--depth", "1", "--filter=blob:none", ADDRESS, COMMIT]
        subprocess.run(fetch, check=True)
        subprocess.run([*git, "checkout", "FETCH_HEAD", "--", "baselines"], check=True)
    return folder


def theirs(side: str, seed: int, path: Path, args: argparse.Namespace) -> Result:
    """Trains by JaxMARL's script, and returns what its process has written."""
    source = (args.jaxmarl or checkout(foreign.environments() / "jaxmarl_source")).resolve()
    options = {
        "--source": source,
        "--algorithm": side,
        "--map": args.map,
        "--seed": seed,
        "--frames": args.frames,
        "--battles": args.battles,
        "--out": path.resolve(),
    }
    python = args.python or foreign.make_environment(foreign.environments() / "jaxmarl_smax", NEEDS)
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    environment |= {"OMP_NUM_THREADS": "1", "XLA_FLAGS": ONE_THREAD}
    return peers.train_by_script(python, SCRIPT, options, environment)


# ------------------------------------------------------------------------------------------ ours


def ours(side: str, seed: int, path: Path, args: argparse.Namespace) -> Result:
    """Trains a run of the suite, and plays battles with its policy."""
    from torchrl_marl.training import Run

    evaluation = {"every_frames": args.frames, "episodes": 2}
    settings = {"quick": args.quick, "frames": args.frames, "evaluation": evaluation}
    found = peers.train_by_suite("smax", side, args.map, seed, path.with_suffix(""), **settings)
    won = battles_won(Run.load(found.folder), args.battles)
    return {"won": won, "training": found.summary["seconds"], "load": os.getloadavg()[0]}


def battles_won(run: Any, battles: int) -> float:
    """Returns the share of battles won, of the first battle of each copy."""
    import torch
    from torchrl.envs.utils import ExplorationType, set_exploration_type

    from torchrl_marl.envs import make_env, with_memory

    env = make_env(replace(run.config.env, info=True), seed=12345, num_envs=battles)
    env = with_memory(env, run.policy)
    with torch.no_grad(), set_exploration_type(ExplorationType.DETERMINISTIC):
        won = episodes_of(env, run.policy)["won"]
    env.close()
    return won


# ---------------------------------------------------------------------------------------- report


def result(side: str, seed: int, folder: Path, args: argparse.Namespace) -> Result:
    """Of one training, from an earlier call or from one now."""
    path = folder / f"{args.map}_{side}_{args.frames}_seed{seed}.json"
    train = theirs if side in THEIRS else ours
    return peers.kept(
        path, f"{side} on {args.map}, seed {seed}", lambda: train(side, seed, path, args)
    )


def table(found: dict[str, list[Result]], frames: int) -> str:
    """A row for each side."""
    rows = []
    for side, each in found.items():
        won = [one["won"] for one in each]
        seconds = statistics.fmean(x["training"] + x.get("compiling", 0.0) for x in each)
        of_seeds = ", ".join(f"{x:.3f}" for x in won)
        name = {**THEIRS, **OURS}[side]
        figures = [f"{statistics.fmean(won):.3f}", f"{seconds:,.0f}", f"{frames / seconds:,.0f}"]
        rows.append([name, of_seeds, *figures])
    return report.markdown_table(["", "won, each seed", "mean", "seconds", "frames/s"], rows)


def publish(found: dict[str, list[Result]], args: argparse.Namespace) -> None:
    """Prints and writes."""
    versions = next(
        (one["versions"] for each in found.values() for one in each if "versions" in one), {}
    )
    named = {"versions on JaxMARL's side": ", ".join(f"{k} {x}" for k, x in versions.items())}
    report.publish(
        f"jaxmarl_smax_{args.map}",
        f"JaxMARL and ours on SMAX {args.map}",
        [(f"Battles won after {args.frames:,} frames", table(found, args.frames))],
        {
            **({"JaxMARL": f"commit {COMMIT}", **named} if versions else {}),
            "seeds": ", ".join(str(seed) for seed in args.seeds),
            "threads of torch and of JAX": 1,
            "load of the machine": ", ".join(
                f"{side} {one['load']:.1f}" for side, each in found.items() for one in each
            ),
        },
        METHOD.format(battles=args.battles),
        write=args.write and not args.quick,
    )


METHOD = """Both sides train in JaxMARL's `HeuristicEnemySMAX` with 128 copies and its defaults,
which JaxMARL's settings repeat (`see_enemy_actions`, `walls_cause_death`, `attack_mode="closest"`).
Each then plays {battles} battles to their end by the likeliest actions, the first of each copy.
Random actions win none. Seconds are those of compiling, collecting and learning. Other work may run
on the other core (see the load).

Theirs are JaxMARL's scripts with its files for SMAX. Only the map, the seed and the frames are
changed, and evaluations in between are left out. These settings are its authors' for 10 M frames.
`rmappo` and `rpqn` have the same numbers, as far as our settings can say them; `rpqn` has layer
norm in place of batch norm. `mappo` was tuned by us on 3m and 2s3z."""


def main() -> None:
    """Trains all and reports."""
    parser = report.parser(__doc__, threads=(1,))
    parser.add_argument("--map", default="5m_vs_6m")
    parser.add_argument(
        "--sides",
        nargs="+",
        choices=[*THEIRS, *OURS],
        default=["ippo_rnn", "mappo_rnn", "rmappo", "mappo"],
    )
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--frames", type=int, help=f"a multiple of {BATCH:,}; default: 9,994,240")
    parser.add_argument("--battles", type=int, default=500)
    parser.add_argument("--jaxmarl", type=Path, help="folder with a checkout of JaxMARL")
    parser.add_argument("--python", type=Path, help="Python of an environment for JaxMARL")
    parser.add_argument("--results", type=Path, help="folder to keep and reuse results in")
    args = parser.parse_args()
    args.frames = args.frames or (BATCH if args.quick else 9_994_240)
    args.battles = 8 if args.quick else args.battles
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
