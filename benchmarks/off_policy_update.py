"""Updates from a replay buffer: MADDPG, MATD3, MASAC and QMIX against TorchRL's losses.

    python benchmarks/off_policy_update.py --write

An update draws a minibatch from a replay buffer of 200,000 steps of `balance` (three agents). It
computes losses and gradients, clips these, and updates parameters (Adam) and targets:

- *TorchRL*: as its recipes and BenchMARL write it: ``TensorDictReplayBuffer``, ``DDPGLoss``,
  ``TD3Loss``, ``SACLoss`` or ``QMixerLoss``, ``clip_grad_norm_``, ``Adam``, ``SoftUpdate``;
- *TorchRL, tuned*: with fused Adam and ``use_td_params=False``;
- *TorchRL, compiled*: tuned, and its losses through ``torch.compile``;
- *torchrl_marl, eager* and *captured*: our learner, operation by operation, and as one graph.

The second table uses a replay buffer of one million steps: uniform and prioritized replay.
"""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

import report
from torchrl_off_policy import GROUP, TorchRLUpdate, with_flags_of_agents

if TYPE_CHECKING:
    from tensordict import TensorDictBase

    from torchrl_marl.learners.off_policy import OffPolicyLearner
    from torchrl_marl.specs import TeamSpec

# How TorchRL's side is written.
BASELINES: dict[str, dict[str, bool]] = {
    "TorchRL": {"tuned": False},
    "TorchRL, tuned": {"tuned": True},
    "TorchRL, compiled": {"tuned": True, "compiled": True},
}
EAGER, CAPTURED = "torchrl_marl, eager", "torchrl_marl, captured"
ALGORITHMS = ("maddpg", "matd3", "masac", "qmix")
N_ENVS, N_STEPS, N_UPDATES = 60, 100, 20


def collect(discrete: bool, args: argparse.Namespace) -> tuple[TeamSpec, TensorDictBase]:
    """Steps of random actions."""
    import torch

    from torchrl_marl import TeamSpec
    from torchrl_marl.collectors import RolloutCollector, TeamPolicy
    from torchrl_marl.envs import VmasEnv
    from torchrl_marl.modules import RandomActor

    torch.manual_seed(0)
    n_envs, n_steps = (4, 20) if args.quick else (N_ENVS, N_STEPS)
    env = VmasEnv(
        "balance",
        num_envs=n_envs,
        max_steps=N_STEPS,
        continuous_actions=not discrete,
        device=args.device,
        seed=0,
    )
    team = TeamSpec.from_env(env)
    policy = TeamPolicy([RandomActor(team.groups[GROUP]).to(args.device)])
    return team, RolloutCollector(env, policy, frames_per_batch=n_envs * n_steps).rollout()


def make_config(algorithm: str, cells: int, size: int, rows: int, alpha: float = 0.0) -> Any:
    """The settings of a learner that updates when it is told to."""
    from torchrl_marl.recipes import load_config

    q = algorithm == "qmix"
    networks = ("actor",) if q else ("actor", "critic")
    overrides = {
        "learner.algorithm": algorithm,
        "learner.learning_starts": 0,
        "learner.updates_per_frame": 1e-9,
        "learner.minibatch_size": size,
        "learner.replay.capacity": rows,
        "learner.replay.alpha": alpha,
        "env.num_envs": 4,
        "frames_per_batch": 80,
        **{f"learner.{name}.num_cells": [cells, cells] for name in networks},
    }
    recipe = "vmas_balance_mappo_discrete" if q else "vmas_balance_mappo"
    return load_config(recipe, overrides).learner


def make_learner(
    config: Any, team: TeamSpec, batch: TensorDictBase, rows: int, execution: str
) -> OffPolicyLearner:
    """A learner whose store is full."""
    import torch

    from torchrl_marl.learners import build_learners

    torch.manual_seed(0)
    [learner] = build_learners(team, config, execution=execution)
    for _ in range(-(-rows // batch.numel())):
        learner.learn(batch)
    return learner


def measure_algorithm(
    algorithm: str, cells: int, size: int, args: argparse.Namespace
) -> list[list[str]]:
    """A row for every candidate of one algorithm and size."""
    import torch
    from loops import reset_compiler

    team, batch = collect(algorithm == "qmix", args)
    rows = batch.numel() if args.quick else 200_000
    config = make_config(algorithm, cells, size, rows)
    group = team.groups[GROUP]
    steps = with_flags_of_agents(batch, group.n_agents)
    steps = torch.cat([steps] * -(-rows // len(steps)))[:rows]
    candidates: dict[str, Any] = {}
    failed: dict[str, str] = {}
    reset_compiler()
    for name, form in BASELINES.items():
        if args.quick and form.get("compiled"):
            continue
        torch.manual_seed(0)
        update = TorchRLUpdate(steps, group, config, **form)
        try:
            update()
        except Exception as error:  # what torch cannot compile is said, not hidden
            if not form.get("compiled"):
                raise
            failed[name] = f"failed: {type(error).__name__}"
            continue
        candidates[name] = lambda update=update: [update() for _ in range(N_UPDATES)]
    for name, execution in ((EAGER, "eager"), (CAPTURED, args.execution)):
        if args.quick and name == CAPTURED:
            continue
        learner = make_learner(config, team, batch, rows, execution)
        candidates[name] = lambda x=learner: x.updates.run(x.replay, N_UPDATES)
    timings = report.alternate(candidates, args.rounds, seconds=args.seconds, warmup=2)
    measured = [
        [
            algorithm,
            f"2 x {cells}",
            f"{size:,}",
            name,
            f"{1e6 * timings.median(name) / N_UPDATES:,.0f}",
            *(timings.ratio_text(name, x) if x in candidates else "" for x in BASELINES),
            timings.rounds(),
        ]
        for name in candidates
    ]
    blank = [""] * (len(BASELINES) + 1)
    head = [algorithm, f"2 x {cells}", f"{size:,}"]
    return measured + [[*head, name, text, *blank] for name, text in failed.items()]


def measure_priorities(algorithm: str, args: argparse.Namespace) -> list[list[str]]:
    """Updates of rows drawn uniformly and by priority, of a full store of a million."""
    team, batch = collect(algorithm == "qmix", args)
    rows, size = (batch.numel(), 16) if args.quick else (1_000_000, 128)
    execution = "eager" if args.quick else args.execution
    learners = {
        name: make_learner(
            make_config(algorithm, 64, size, rows, alpha), team, batch, rows, execution
        )
        for name, alpha in (("uniform", 0.0), ("prioritized", 0.6))
    }
    candidates = {
        name: lambda x=learner: x.updates.run(x.replay, N_UPDATES)
        for name, learner in learners.items()
    }
    timings = report.alternate(candidates, args.rounds, seconds=args.seconds, warmup=2)
    return [
        [
            algorithm,
            name,
            f"{1e6 * timings.median(name) / N_UPDATES:,.0f}",
            f"{1 / timings.ratio(name, 'uniform'):.2f}",
            f"{learner.replay.bytes_per_row:,}",
            timings.rounds(),
        ]
        for name, learner in learners.items()
    ]


def measure(args: argparse.Namespace) -> tuple[list[list[str]], list[list[str]]]:
    """The rows of both tables."""
    sizes = [(cells, size) for size in args.minibatches for cells in (64, 256)]
    sizes = [(16, 16)] if args.quick else sizes
    updates = [
        row
        for algorithm in args.algorithms
        for cells, size in sizes
        for row in measure_algorithm(algorithm, cells, size, args)
    ]
    priorities = [row for x in args.algorithms for row in measure_priorities(x, args)]
    return updates, priorities


def main() -> None:
    """Measures and reports."""
    parser = report.parser(__doc__, threads=(1,))
    parser.add_argument("--algorithms", nargs="+", default=list(ALGORITHMS), choices=ALGORITHMS)
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--execution", choices=("compile", "cudagraph"))
    parser.add_argument("--minibatches", type=int, nargs="+", default=[128])
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--seconds", type=float, default=10.0, help="time limit of one comparison")
    args = parser.parse_args()
    args.execution = args.execution or ("compile" if args.device == "cpu" else "cudagraph")
    if args.quick:
        args.write, args.rounds = False, 2
    updates = ["", "networks", "minibatch", "", "us an update"]
    updates += [*(f"times {name}" for name in BASELINES), "rounds"]
    priorities = ["", "drawn", "us an update", "times uniform's time", "bytes a step", "rounds"]
    sections = []
    for n, (first, second) in report.for_each_number_of_threads(
        measure, args.threads, args
    ).items():
        threads = report.count_of(n, "thread")
        sections += [
            (f"An update, {threads}", report.markdown_table(updates, first)),
            (f"By priority, of 1,000,000 steps, {threads}",
             report.markdown_table(priorities, second)),
        ]  # fmt: skip
    report.publish(
        "off_policy_update",
        "Updates from stored steps",
        sections,
        {"steps stored": "200,000, and 1,000,000 for the second table"},
        __doc__.split("\n\n", 2)[2]
        + f"""
        All candidates of an algorithm and size alternate in one process, {N_UPDATES} updates each
        in random order every round; microseconds are medians over the rounds, "times" is the
        median (and the quartiles) of the rounds' ratios. Ours handle more: agents that may die, and
        who has a next step; actors learn from the critics as they were before the update.""",
        write=args.write,
        device=args.device,
    )


if __name__ == "__main__":
    main()
