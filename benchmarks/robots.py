"""Sampling of MuJoCo robots: MujocoEnv against copies of Gymnasium-Robotics in PettingZooEnv.

    python benchmarks/robots.py --write

The collector takes batches of 64 envs with an untrained MAPPO policy. ``MujocoEnv`` is measured
eagerly and compiled. ``PettingZooEnv`` has its copies in this process, and in workers. Both make
the same bits of physics.
"""

from __future__ import annotations

import argparse
import functools
from collections.abc import Callable
from importlib.metadata import version
from typing import Any

import report

TASKS = {"halfcheetah": "2x3", "ant": "4x2"}
COPIES = "PettingZooEnv, this process"


def make_collector(env: Any, execution: Any, steps: int) -> Callable[[], Any]:
    """A batch of the collector with an untrained policy."""
    import torch

    from torchrl_marl import TeamSpec
    from torchrl_marl.collectors import RolloutCollector, TeamPolicy
    from torchrl_marl.learners import OnPolicyConfig, OnPolicyLearner

    torch.manual_seed(0)
    learner = OnPolicyLearner(TeamSpec.from_env(env).groups, OnPolicyConfig())
    policy = TeamPolicy(learner.actors.values())
    frames = steps * env.batch_size.numel()
    collector = RolloutCollector(env, policy, frames_per_batch=frames, execution=execution)
    return functools.partial(next, iter(collector))


def measure(robot: str, args: argparse.Namespace, n_threads: int) -> list[list[Any]]:
    """The rows of a robot's table."""
    from torchrl_marl.envs import make_env

    common = {"num_envs": args.envs, "agent_conf": TASKS[robot], "seed": 0}
    upstream = {"ant": "Ant", "halfcheetah": "HalfCheetah"}[robot]
    envs = {
        "MujocoEnv, compiled": (make_env(f"mujoco/{robot}", **common), "compile"),
        "MujocoEnv, eager": (make_env(f"mujoco/{robot}", **common), "eager"),
    }
    for workers in (0, n_threads):
        where = report.count_of(workers, "worker") if workers else "this process"
        copies = make_env(f"pettingzoo/gymnasium_robotics/{upstream}", workers=workers, **common)
        envs[f"PettingZooEnv, {where}"] = (copies, "eager")
    candidates = {name: make_collector(*made, args.steps) for name, made in envs.items()}
    timings = report.alternate(candidates, args.rounds, warmup=2, shortest=0)
    frames = args.envs * args.steps
    rows = [
        [name, f"{frames / timings.median(name):,.0f}", timings.ratio_text(name, COPIES)]
        for name in candidates
    ]
    for env, _ in envs.values():
        env.close()
    return rows


def main() -> None:
    """Measures and reports."""
    parser = report.parser(__doc__)
    parser.add_argument("--envs", type=int, default=64)
    parser.add_argument("--steps", type=int, default=50, help="steps of a batch")
    parser.add_argument("--rounds", type=int, default=15)
    args = parser.parse_args()
    if args.quick:
        args.write = False
        args.envs, args.steps, args.rounds = 4, 5, 2
    sections = []
    for robot, conf in TASKS.items():
        for n in args.threads:
            rows = report.for_each_number_of_threads(measure, [n], robot, args, n)[n]
            table = report.markdown_table(["", "frames/s", f"times {COPIES}"], rows)
            sections.append((f"{robot} {conf}, {report.count_of(n, 'thread')}", table))
    packages = ("mujoco", "gymnasium", "gymnasium-robotics")
    report.publish(
        "robots",
        "Sampling of MuJoCo robots",
        sections,
        {
            "envs": f"{args.envs}, batches of {args.steps} steps, {args.rounds} rounds",
            "packages": ", ".join(f"{name} {version(name)}" for name in packages),
        },
        """All candidates wait without work while another is measured. Each takes a batch a round,
        in random order. Frames/s are from the median time, ratios are medians of the rounds'
        ratios with their quartiles. Envs whose episode ends are reset within a batch. torch and
        MuJoCo run with the named number of threads; each worker has one.""",
        write=args.write,
    )


if __name__ == "__main__":
    main()
