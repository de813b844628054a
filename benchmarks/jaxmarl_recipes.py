"""Results of the recipes on JaxMARL's environments.

    python benchmarks/jaxmarl_recipes.py --write

Trains each recipe by ``torchrl_marl.train``, seed by seed, and plays 500 episodes with the
likeliest actions, and with random actions for comparison. Reports the share of battles won in SMAX,
the reward without shaping in Overcooked, and the return of an agent in simple_spread, also in
mpe2's version of it through PettingZooEnv.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import shutil
import statistics
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import report

HEADER = ("recipe", "seed", "measured", "after", "random", "goal", "frames", "training, s")
GOALS = {
    "jaxmarl_smax_3m_mappo": "0.9",
    "jaxmarl_smax_3m_rmappo": "0.9",
    "jaxmarl_smax_2s3z_mappo": "0.8",
    "jaxmarl_simple_spread_mappo": "-10.5",
    "jaxmarl_smax_3m_pqn": "0.9",
    "jaxmarl_smax_2s3z_pqn": "0.95",
    "jaxmarl_simple_spread_pqn": "-9.5",
    "jaxmarl_overcooked_cramped_room_ippo": "",
}
TWIN = "mpe2/simple_spread_v3"
QUICK = {
    "total_frames": 1_600,
    "frames_per_batch": 800,
    "env": {"num_envs": 8},
    "learner": {"minibatch_size": 200},
    "evaluation": {"episodes": 8},
}


def make_env(recipe: str, num_envs: int, **changes: Any) -> Any:
    """Returns the recipe's environment, with the measured quantity in its info."""
    from dataclasses import replace

    import torchrl_marl.envs
    from torchrl_marl.recipes import load_config

    config = replace(load_config(recipe).env, info=True, **changes)
    return torchrl_marl.envs.make_env(config, seed=12345, num_envs=num_envs)


def play_episodes(env: Any, act: Callable[..., Any]) -> dict[str, float]:
    """Means over the first episode of each env: an agent's return, and the battles won."""
    import torch

    (group,) = env.group_map
    running = torch.ones(env.batch_size, dtype=torch.bool)
    returns, won = torch.zeros(env.batch_size), torch.zeros(env.batch_size)
    carry = env.reset()
    while bool(running.any()):
        step, carry = env.step_and_maybe_reset(act(carry))
        after = step["next"]
        returns += running * after[group, "reward"].mean(1).squeeze(-1)
        info = after[group].get("info", None)
        if info is not None and "won" in info.keys():
            won += running * info["won"][:, 0, 0]
        running &= ~after["done"].squeeze(-1)
    return {"return": returns.mean().item(), "won": won.mean().item()}


def measure_policies(run: Any, recipe: str, n: int) -> list[tuple[str, float, float]]:
    """What is measured, of the policy and of random actions."""
    import torch
    from torchrl.envs.utils import ExplorationType, set_exploration_type

    from torchrl_marl.envs import with_memory

    envs = {"": with_memory(make_env(recipe, n), run.policy)}
    if "spread" in recipe:
        changes = {"library": "pettingzoo", "name": TWIN, "workers": 2, "max_steps": None}
        envs[f", in {TWIN}"] = make_env(recipe, n, **changes)
    rows = []
    for suffix, env in envs.items():
        # Without what is for training only, such as a shaped reward.
        measured = getattr(env, "measured", contextlib.nullcontext)
        with torch.no_grad(), set_exploration_type(ExplorationType.DETERMINISTIC), measured():
            trained_means, random_means = (
                play_episodes(env, run.policy),
                play_episodes(env, env.rand_action),
            )
        key = "won" if "smax" in recipe else "return"
        rows.append((key + suffix, trained_means[key], random_means[key]))
        env.close()
    return rows


def train(recipe: str, seed: int, args: argparse.Namespace) -> list[list[str]]:
    """Trains one seed; its rows."""
    import torchrl_marl

    report.be_quiet()
    folder = Path(args.runs) / recipe / f"seed{seed}"
    overrides: dict[str, Any] = dict(QUICK) if args.quick else {}
    overrides["logging"] = {"progress": sys.stderr.isatty()}
    if args.frames is not None:
        overrides["total_frames"] = args.frames
    run = torchrl_marl.train(recipe, seed=seed, folder=str(folder), **overrides)
    rows = []
    for quantity, trained_mean, random_mean in measure_policies(
        run, recipe, 8 if args.quick else args.episodes
    ):
        numbers = [f"{trained_mean:.3f}", f"{random_mean:.3f}", GOALS[recipe]]
        spent = [f"{run.summary['frames']:,}", f"{run.summary['seconds']:.0f}"]
        rows.append([recipe, str(seed), quantity, *numbers, *spent])
    return rows


def means_of(rows: list[list[str]]) -> list[list[str]]:
    """A row of means for each thing measured."""
    groups: dict[tuple[str, str], list[list[str]]] = {}
    for row in rows:
        groups.setdefault((row[0], row[2]), []).append(row)
    means = []
    for (recipe, quantity), seed_rows in groups.items():
        numbers = [f"{statistics.mean(float(row[i]) for row in seed_rows):.3f}" for i in (3, 4)]
        seconds = statistics.mean(float(row[7]) for row in seed_rows)
        means.append([recipe, "mean", quantity, *numbers, *seed_rows[0][5:7], f"{seconds:.0f}"])
    return means


def main() -> None:
    """Trains and reports."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--recipes", nargs="+", default=list(GOALS), choices=list(GOALS))
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--frames", type=int, help="frames of each run; default: the recipe's")
    parser.add_argument("--episodes", type=int, default=500, help="episodes of the evaluation")
    parser.add_argument("--runs", help="folder for the run folders")
    parser.add_argument("--quick", action="store_true", help="tiny sizes, as a smoke test")
    parser.add_argument("--write", action="store_true", help="write the table to results")
    args = parser.parse_args()
    # JAX takes as many threads as torch.
    os.environ.setdefault(
        "XLA_FLAGS", "--xla_cpu_multi_thread_eigen=false intra_op_parallelism_threads=1"
    )
    kept, args.runs = args.runs, args.runs or tempfile.mkdtemp()
    try:
        rows = []
        for recipe in args.recipes:
            for seed in args.seeds:
                print(f"training {recipe}, seed {seed} ...", file=sys.stderr)
                rows += train(recipe, seed, args)
    finally:
        if kept is None:
            shutil.rmtree(args.runs, ignore_errors=True)
    report.publish(
        "jaxmarl_recipes",
        "Results of the recipes on JaxMARL's environments",
        [("Results", report.markdown_table(HEADER, rows + means_of(rows)))],
        {"episodes": args.episodes, "threads of torch and of JAX": 1},
        """Each recipe is trained by `torchrl_marl.train`, one run after the other, and measured in
        new episodes by the likeliest actions. "won" is the share of battles won; "return" the mean
        over agents and episodes of the summed reward, in Overcooked without the shaped one.""",
        write=args.write and not args.quick,
    )


if __name__ == "__main__":
    main()
