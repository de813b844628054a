"""Training and report of the comparisons with JaxMARL, for MPE, SMAX and Overcooked.

JaxMARL trains by a script in a virtual environment that is created for it. Its own scripts and
settings come from GitHub. Ours are runs of a suite.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import foreign
import peers
import report
from jaxmarl_recipes import play_episodes

__all__ = ["publish", "seconds", "train_ours", "train_theirs"]

ADDRESS = "https://github.com/FLAIROx/JaxMARL"
COMMIT = "c793d095618c6d3edfb5632802348f57b70a4b94"
NEEDS = (["jaxmarl==0.2.0", "flax", "optax", "six", "distrax", "pyyaml"],)
ONE_THREAD = "--xla_cpu_multi_thread_eigen=false intra_op_parallelism_threads=1"
Result = dict[str, Any]


# ------------------------------------------------------------------------------------- training


def checkout() -> Path:
    """Returns JaxMARL's scripts, from GitHub; the package does not have them."""
    folder = foreign.environments() / "jaxmarl_source"
    return foreign.checkout(folder, ADDRESS, COMMIT, ["baselines"], needed="baselines")


def train_theirs(
    script: Path,
    side: str,
    seed: int,
    path: Path,
    args: argparse.Namespace,
    script_options: Mapping[str, Any],
) -> Result:
    """Trains by JaxMARL, and returns what its process has written.

    Args:
        script (Path): what runs in JaxMARL's environment.
        side (str): algorithm.
        seed (int): random seed.
        path (Path): file of the result.
        args (Namespace): from :func:`peers.arguments`.
        script_options (mapping): options that only this script has.
    """
    source = (args.source or checkout()).resolve()
    options = {
        "--source": source,
        "--algorithm": side,
        "--seed": seed,
        "--frames": args.frames,
        "--out": path.resolve(),
    }
    python = args.python or foreign.make_environment(foreign.environments() / "jaxmarl_smax", NEEDS)
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    environment |= {"OMP_NUM_THREADS": "1", "XLA_FLAGS": ONE_THREAD}
    return peers.train_by_script(python, script, {**options, **script_options}, environment)


def train_ours(
    suite: str,
    task: str,
    measured: str,
    side: str,
    seed: int,
    path: Path,
    args: argparse.Namespace,
    *,
    sampled: bool = False,
) -> Result:
    """Trains a run of a suite, and plays episodes with its policy.

    Args:
        suite, task (str): where to train.
        measured (str): ``return`` or ``won``, what the result reports of the episodes.
        side, seed, path, args: as in :func:`train_theirs`; the run's folder lies beside the file.

    Keyword Args:
        sampled (bool): whether to play with sampled actions instead of the likeliest ones.
    """
    from torchrl_marl.training import Run

    os.environ.setdefault("XLA_FLAGS", ONE_THREAD)  # JAX takes as many threads as torch
    evaluation = {"count": None, "every_frames": args.frames, "episodes": 2}
    settings = {"quick": args.quick, "frames": args.frames, "evaluation": evaluation}
    found = peers.train_by_suite(suite, side, task, seed, path.with_suffix(""), **settings)
    mean = mean_of_episodes(Run.load(found.folder), args.episodes, measured, sampled=sampled)
    return {measured: mean, "training": found.summary["seconds"], "load": os.getloadavg()[0]}


def mean_of_episodes(run: Any, episodes: int, measured: str, *, sampled: bool = False) -> float:
    """Returns a mean over the first episode of each copy, without a shaped reward.

    Args:
        run (Run): trained run.
        episodes (int): number of copies.
        measured (str): ``return`` of an agent, or ``won``, the share of battles won.

    Keyword Args:
        sampled (bool): whether to play with sampled actions instead of the likeliest ones.
    """
    import torch
    from torchrl.envs.utils import ExplorationType, set_exploration_type

    from torchrl_marl.envs import make_env, with_memory
    from torchrl_marl.training.evaluation import own_rewards

    config = replace(run.config.env, info=measured == "won")
    env = with_memory(make_env(config, seed=12345, num_envs=episodes), run.policy)
    kind = ExplorationType.RANDOM if sampled else ExplorationType.DETERMINISTIC
    torch.manual_seed(12345)
    with torch.no_grad(), set_exploration_type(kind), own_rewards(env):
        mean = play_episodes(env, run.policy)[measured]
    env.close()
    return mean


# --------------------------------------------------------------------------------------- report


def seconds(one: Result) -> float:
    """Returns the seconds of compiling, collecting and learning."""
    return one["training"] + one.get("compiling", 0.0)


def publish(
    report_name: str,
    title: str,
    section: tuple[str, str],
    method: str,
    found: Mapping[str, Sequence[Result]],
    args: argparse.Namespace,
) -> None:
    """Prints the report, and writes it with ``--write``.

    Args:
        report_name (str): the result's name.
        title (str): its heading.
        section (tuple): heading of the table, and the table.
        method (str): how it was measured.
        found (mapping): side -> results.
        args (Namespace): from :func:`peers.arguments`.
    """
    runs = [(side, result) for side, of_seeds in found.items() for result in of_seeds]
    versions = next((result["versions"] for _, result in runs if "versions" in result), {})
    named = {"versions on JaxMARL's side": ", ".join(f"{k} {x}" for k, x in versions.items())}
    report.publish(
        report_name,
        title,
        [section],
        {
            **({"JaxMARL": f"commit {COMMIT}", **named} if versions else {}),
            "seeds": ", ".join(str(seed) for seed in args.seeds),
            "threads of torch and of JAX": 1,
            "load of the machine": ", ".join(
                f"{side} {result['load']:.1f}" for side, result in runs
            ),
        },
        method,
        write=args.write and not args.quick,
    )
