"""Cost of a population's members together, against a single member.

python benchmarks/populations.py learn --write
python benchmarks/populations.py iteration --write
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

import report

MAX_STEPS = 100
TEXTS = {
    "learn": """MAPPO's update on batches of VMAS balance, 3 agents, 100 steps of so many envs a
        member, five minibatches, one epoch, networks of two layers of 64. *One by one* is the time
        of one member, times their number: the ordinary learner, which knows of no population.
        All alternate in one process.""",
    "iteration": """Collecting and learning on VMAS balance, 3 agents, 100 steps of so many envs a
        member, five minibatches, six epochs, networks of two layers of 64; one member is the
        ordinary learner. All alternate in one process.""",
}


def loop_of(n_members: int, num_envs: int, epochs: int, execution: str) -> tuple[Any, Any]:
    """A learner of so many members, and its collector."""
    import torch

    from torchrl_marl import TeamSpec
    from torchrl_marl.collectors import RolloutCollector, TeamPolicy
    from torchrl_marl.envs import VmasEnv
    from torchrl_marl.learners import OnPolicyConfig
    from torchrl_marl.learners.members import learner_of_members
    from torchrl_marl.learners.on_policy import OnPolicyLearner

    torch.manual_seed(0)
    env = VmasEnv("balance", num_envs=n_members * num_envs, max_steps=MAX_STEPS, seed=0)
    groups = TeamSpec.from_env(env).groups
    config = OnPolicyConfig(minibatch_size=num_envs * MAX_STEPS // 5, num_epochs=epochs)
    learner: Any
    if n_members == 1:
        learner = OnPolicyLearner(groups, config, execution=execution)
    else:
        learner = learner_of_members(groups, config, n_members=n_members, execution=execution)
    policy = TeamPolicy(learner.actors.values())
    frames = n_members * num_envs * MAX_STEPS
    return learner, RolloutCollector(env, policy, frames_per_batch=frames, execution=execution)


def measure(args: argparse.Namespace) -> list[list[str]]:
    """A row for every number of members."""
    whole_iteration = args.section == "iteration"
    runs: dict[str, Callable[[], Any]] = {}
    numbers = {}
    for n_members in [1, *args.members]:
        loop = loop_of(n_members, args.envs, 6 if whole_iteration else 1, args.execution)
        name = report.count_of(n_members, "member")
        numbers[name] = n_members
        runs[name] = _iteration(*loop) if whole_iteration else _learning(*loop)
    timings = report.alternate(runs, args.rounds, seconds=args.seconds, warmup=2, shortest=0.0)
    one = report.count_of(1, "member")
    return [
        [
            name,
            f"{1e3 * timings.median(name):.0f}",
            f"{n_members * args.envs * MAX_STEPS / timings.median(name):,.0f}",
            timings.ratio_text(one, name),
            f"{n_members * timings.median(one) / timings.median(name):.2f}",
            str(timings.rounds()),
        ]
        for name, n_members in numbers.items()
    ]


def _iteration(learner: Any, collector: Any) -> Callable[[], Any]:
    return lambda: learner.learn(collector.rollout())


def _learning(learner: Any, collector: Any) -> Callable[[], Any]:
    batch = collector.rollout()
    return lambda: learner.learn(batch)


def main() -> None:
    """Measures and reports."""
    parser = report.parser(__doc__, threads=(1,))
    parser.add_argument("section", choices=TEXTS)
    parser.add_argument("--members", type=int, nargs="+", default=[8, 64])
    parser.add_argument("--envs", type=int, default=8, help="environments of each member")
    parser.add_argument("--execution", choices=["eager", "compile", "cudagraph"], default="eager")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--seconds", type=float, default=60.0, help="time limit of the rounds")
    args = parser.parse_args()
    if args.quick:
        args.write, args.rounds, args.members = False, 2, [2, 3]
    header = ["", "ms", "frames/s of all", "times one member", "times one by one", "rounds"]
    sections = [
        (
            f"{report.count_of(args.envs, 'env')} a member, {args.execution}, "
            f"{report.count_of(n, 'thread')}",
            report.markdown_table(header, rows),
        )
        for n, rows in report.for_each_number_of_threads(measure, args.threads, args).items()
    ]
    name = f"populations_{args.section}_{args.envs}_{args.execution}"
    title = f"A population's {args.section}"
    report.publish(name, title, sections, {}, TEXTS[args.section], write=args.write)


if __name__ == "__main__":
    main()
