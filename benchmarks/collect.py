"""Collecting VMAS balance with environments whose episodes end at different times.

    python benchmarks/collect.py --write

One untrained policy plays 3 agents, at most 100 steps an episode. The packages fall at different
times, so most steps reset a few environments. Measured in alternation, in one process:

- TorchRL's ``Collector`` on ``torchrl.envs.VmasEnv``, which resets these in a loop over envs;
- TorchRL's ``Collector`` on our ``VmasEnv``;
- our ``RolloutCollector`` on our ``VmasEnv``, with the scenario's info as in TorchRL, and without
  as in our recipes.

A second table counts the tensor operations of resetting some of the environments.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import report

if TYPE_CHECKING:
    from torchrl.envs import EnvBase

SCENARIO = {"n_agents": 3}
MAX_STEPS = 100
BASELINE = "Collector(torchrl VmasEnv)"
WITH_INFO = "RolloutCollector(our VmasEnv)"
OURS = "RolloutCollector(our VmasEnv, info=False)"


def make_envs(num_envs: int) -> dict[str, EnvBase]:
    """The environment of each candidate."""
    import torchrl.envs

    from torchrl_marl.envs import VmasEnv

    settings: dict[str, Any] = {"num_envs": num_envs, "max_steps": MAX_STEPS, "seed": 0, **SCENARIO}
    return {
        BASELINE: torchrl.envs.VmasEnv("balance", **settings),
        "Collector(our VmasEnv, info=False)": VmasEnv("balance", info=False, **settings),
        WITH_INFO: VmasEnv("balance", info=True, **settings),
        OURS: VmasEnv("balance", info=False, **settings),
    }


class Candidate:
    """A collector, and how often its environments are done."""

    def __init__(self, name: str, env: EnvBase, policy: Any, n_steps: int) -> None:
        from torchrl.collectors import Collector

        from torchrl_marl.collectors import RolloutCollector

        frames = n_steps * env.batch_size.numel()
        if name.startswith("Collector"):
            self.collector = Collector(env, policy, frames_per_batch=frames, total_frames=-1)
        else:
            self.collector = RolloutCollector(env, policy, frames_per_batch=frames)
        self.batches = iter(self.collector)
        self.frames = frames
        self.done_rates: list[float] = []

    def collect(self) -> None:
        """One batch."""
        batch = next(self.batches)
        self.done_rates.append(batch["next", "done"].float().mean().item())


def measure(args: argparse.Namespace) -> list[list[str]]:
    """Rows of frames per second."""
    return [row for num_envs in args.envs for row in measure_size(num_envs, args)]


def measure_size(num_envs: int, args: argparse.Namespace) -> list[list[str]]:
    """The rows of one number of environments."""
    import torch

    from torchrl_marl import TeamSpec
    from torchrl_marl.modules import make_actor

    torch.manual_seed(0)
    envs = make_envs(num_envs)
    policy = make_actor(TeamSpec.from_env(envs[OURS]).groups["agents"])
    candidates = {name: Candidate(name, env, policy, args.steps) for name, env in envs.items()}
    # After an episode's length, the environments are no longer in step with one another.
    warmup = 2 if args.quick else -(-(MAX_STEPS + 20) // args.steps)
    timings = report.alternate(
        {name: candidate.collect for name, candidate in candidates.items()},
        args.rounds,
        seconds=args.seconds,
        warmup=warmup,
    )
    rows = []
    for name, candidate in candidates.items():
        rates = candidate.done_rates[warmup:]
        rows.append(
            [
                f"{num_envs:,}",
                name,
                f"{candidate.frames / timings.median(name):,.0f}",
                timings.ratio_text(name, BASELINE),
                f"{100 * sum(rates) / len(rates):.2f} %",
                timings.rounds(),
            ]
        )
        candidate.collector.shutdown()
    return rows


def count_resets(args: argparse.Namespace) -> list[list[str]]:
    """Rows of tensor operations, and in brackets those that wait for a value."""
    import torch

    torch.manual_seed(0)
    envs = make_envs(args.counted_envs)
    resetters = {name: Resetter(envs[name]) for name in (BASELINE, OURS)}
    rows = []
    for count in args.resets:
        # The second of two such resets needs new starts for all; the next finds them drawn.
        resetters[OURS].reset_last()
        resetters[OURS].reset_last()
        with_new_starts = resetters[OURS].count(count)
        with_drawn_starts = resetters[OURS].count(count)
        rows.append(
            [f"{count}", resetters[BASELINE].count(count), with_new_starts, with_drawn_starts]
        )
    return rows


class Resetter:
    """Resets some of the environments, and counts."""

    def __init__(self, env: EnvBase) -> None:
        self.env = env
        env.reset()
        env.rand_step()

    def reset_last(self) -> None:
        """Resets the last environment."""
        self._reset(slice(-1, None))

    def count(self, count: int) -> str:
        """Operations of resetting the first ``count`` environments."""
        return count_operations(lambda: self._reset(slice(0, count)))

    def _reset(self, rows: slice) -> None:
        import torch
        from tensordict import TensorDict

        chosen = torch.zeros(*self.env.batch_size, 1, dtype=torch.bool)
        chosen[rows] = True
        self.env.reset(TensorDict({"_reset": chosen}, self.env.batch_size))


def count_operations(run: Callable[[], Any]) -> str:
    """Number of ATen operations, and in brackets of those that read a value off a tensor."""
    from torch.utils._python_dispatch import TorchDispatchMode

    class Counter(TorchDispatchMode):
        operations = reads = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            self.operations += 1
            self.reads += "local_scalar_dense" in str(func)
            return func(*args, **(kwargs or {}))

    with Counter() as counter:
        run()
    return f"{counter.operations:,} ({counter.reads:,})"


def main() -> None:
    """Measures and reports."""
    parser = report.parser(__doc__)
    parser.add_argument("--envs", type=int, nargs="+", default=[1024, 64])
    parser.add_argument("--steps", type=int, default=25, help="steps of a batch")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--seconds", type=float, default=90.0, help="time limit of one size")
    parser.add_argument(
        "--counted-envs", type=int, default=1024, help="environments of the second table"
    )
    parser.add_argument("--resets", type=int, nargs="+", default=[1, 10, 100, 512])
    args = parser.parse_args()
    if args.quick:
        args.write = False
        args.envs, args.steps, args.rounds = [32], 5, 2
        args.counted_envs, args.resets = 32, [1, 10]
    header = ["envs", "", "frames/s", "times the first", "done, per env and step"]
    header.append("rounds")
    measured = report.for_each_number_of_threads(measure, args.threads, args)
    sections = [
        (f"Frames per second, {report.count_of(n, 'thread')}", report.markdown_table(header, rows))
        for n, rows in measured.items()
    ]
    header = ["envs to reset", "torchrl VmasEnv", "ours, starts at hand", "ours, new starts drawn"]
    counted = report.for_each_number_of_threads(count_resets, [1], args)[1]
    sections.append(
        (
            f"Tensor operations of resetting some of {args.counted_envs:,} envs "
            "(in brackets: those that read a value off a tensor, a wait on a GPU)",
            report.markdown_table(header, counted),
        )
    )
    report.publish(
        "collect",
        "Collecting balance, episodes ending at different times",
        sections,
        {
            "environment": f"VMAS balance, 3 agents, at most {MAX_STEPS} steps an episode",
            "policy": "untrained, 64 and 64 cells, tanh; the same module in all rows",
            "batch": f"{args.steps} steps",
        },
        """All four collect in one process, one batch each in random order every round, after a
        warm-up that is longer than an episode, so that episodes end at different times; frames/s
        are from the median time of a batch, "times" is the median (and the quartiles) of the
        rounds' ratios. The share of steps that end an episode must agree between the rows.
        torchrl's VmasEnv has the time limit from VMAS and always computes the scenario's info.
        Operations are those that torch dispatches (TorchDispatchMode), views included, in env.reset
        with a "_reset" entry; our env draws new starts for all envs at once and hands them out
        until one is asked for twice.""",
        write=args.write,
    )


if __name__ == "__main__":
    main()
