"""Synthetic run folders of suites: seeds whose returns rise to a level of their algorithm."""

import functools
import json
import tempfile
from pathlib import Path

import numpy as np

from torchrl_marl.recipes import load_config, save_config

HEAD = "iteration,frames,agent_frames,seconds,frames_per_second,agents/episode_reward"
EVALUATED = "iteration,frames,seconds,return_mean,return_std,length_mean,episodes"

# Task -> return of the random policy and best return.
TASKS = {
    "balance": (-8.8, 46.0),
    "navigation": (-0.4, 3.1),
    "transport": (-0.1, 5.2),
    "wheel": (-4.0, 1.5),
    "dispersion": (0.2, 2.6),
}
# Algorithm -> reached fraction of the best return, and spread over seeds.
ALGORITHMS = {"mappo": (0.93, 0.04), "ippo": (0.86, 0.09)}
MORE = {"masac": (0.7, 0.2), "maddpg": (0.55, 0.15), "qmix": (0.45, 0.1)}


@functools.cache
def config_text(recipe, settings):
    """The config.yaml of a run with seed 0 and settings given as JSON."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "config.yaml"
        save_config(load_config(recipe, json.loads(settings)), path)
        return path.read_text()


def write_run(
    folder,
    returns,
    *,
    recipe="toy_arena_mappo",
    seed=0,
    frames=None,
    random=0.0,
    finished=True,
    agents=3,
    second=0.01,
    training=True,
    **settings,
):
    """A run folder with the given returns of evaluations, and a training row for all but one."""
    frames = [1000 * i for i in range(len(returns))] if frames is None else list(frames)
    folder = Path(folder)
    folder.mkdir(parents=True)
    settings = {"total_frames": max(int(frames[-1]), 100_000), **settings}
    text = config_text(recipe, json.dumps(settings))
    (folder / "config.yaml").write_text(text.replace("\nseed: 0 ", f"\nseed: {seed} "))
    evaluated = [EVALUATED] + [
        f"{i},{frame},{frame * second},{value},1,100,50"
        for i, (frame, value) in enumerate(zip(frames, returns))
    ]
    trained = [HEAD] + [
        f"{i},{frame},{frame * agents},{frame * second},{1 / second},{value}"
        for i, (frame, value) in enumerate(zip(frames, returns))
        if i
    ]
    if training:
        (folder / "metrics.csv").write_text("\n".join(trained) + "\n")
    (folder / "evaluation.csv").write_text("\n".join(evaluated) + "\n")
    if finished:
        end = None if np.isnan(returns[-1]) else float(returns[-1])
        summary = {"return_random": random, "return_heuristic": None, "return_after": end}
        (folder / "summary.json").write_text(json.dumps({**summary, "frames": int(frames[-1])}))
    return folder


def write_suite(folder, tasks=tuple(TASKS), algorithms=None, seeds=5, points=25, frames=480_000):
    """Run folders ``<folder>/<task>/<algorithm>/seed<k>``, as in suites."""
    algorithms = algorithms or ALGORITHMS
    for i, task in enumerate(tasks):
        random, best = TASKS[task]
        for j, (name, (level, spread)) in enumerate(algorithms.items()):
            for seed in range(seeds):
                draw = np.random.default_rng([i, j, seed])
                end = random + (best - random) * draw.normal(level, spread)
                when = np.linspace(0, frames, points).round()
                rise = 1 - np.exp(-when / frames * draw.uniform(3, 6))
                returns = random + (end - random) * rise
                returns = returns + draw.normal(0, 0.015 * (best - random), points)
                write_run(
                    folder / task / name / f"seed{seed}",
                    returns.round(4),
                    seed=seed,
                    frames=when.astype(int),
                    random=random,
                    second=0.0001 * (1 + j),
                    recipe="vmas_balance_mappo",
                    **{"env.name": task, "learner.algorithm": name}
                    | ({"env.continuous_actions": False} if name == "qmix" else {}),
                )
    return folder
