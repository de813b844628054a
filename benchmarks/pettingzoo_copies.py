"""Copies of mpe2's simple_speaker_listener over processes: our PettingZooEnv, AgileRL, TorchRL.

    python benchmarks/pettingzoo_copies.py --write

Eight copies with continuous random actions, drawn outside the environment. The results are
TensorDicts, or arrays in AgileRL. Measured in random order in every round:

- ours, with 1, 2, 4 and 8 workers and in one process, by ``step_and_maybe_reset``;
- ours with 2 workers by ``env.rollout`` and by ``RolloutCollector``, which draw from the specs;
- AgileRL's ``AsyncPettingZooVecEnv``, one process a copy (``agilerl_copies.py``, in a virtual
  environment created for it, or in ``--agilerl-python``);
- TorchRL's ``ParallelEnv`` of its ``PettingZooWrapper``, one process a copy.
"""

from __future__ import annotations

import argparse
import functools
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import foreign
import report

if TYPE_CHECKING:
    from torchrl.envs import EnvBase

AGILERL = "AgileRL AsyncPettingZooVecEnv"
TORCHRL = "torchrl ParallelEnv(PettingZooWrapper)"
SCRIPT = Path(__file__).parent / "agilerl_copies.py"
WORLD = "mpe2/simple_speaker_listener_v4"


def our_name(n_workers: int) -> str:
    """Of a candidate of ours."""
    where = report.count_of(n_workers, "worker") if n_workers else "this process"
    return f"PettingZooEnv, {where}"


def make_ours(num_envs: int, n_workers: int) -> EnvBase:
    """Our environment."""
    from torchrl_marl.envs import PettingZooEnv

    settings: dict[str, Any] = {"num_envs": num_envs, "workers": n_workers, "seed": 0}
    return PettingZooEnv(WORLD, continuous_actions=True, **settings)


def make_wrapped() -> EnvBase:
    """One copy in TorchRL's wrapper."""
    from mpe2 import simple_speaker_listener_v4
    from torchrl.envs import PettingZooWrapper

    return PettingZooWrapper(simple_speaker_listener_v4.parallel_env(continuous_actions=True))


def stepping(env: EnvBase, n_steps: int) -> Callable[[], None]:
    """Random steps, drawn outside; goes on where the last piece of work ended."""
    import torch

    leaves = {key: env.full_action_spec[key].shape for key in env.action_keys}
    carry = env.reset()

    def work() -> None:
        nonlocal carry
        for _ in range(n_steps):
            for key, shape in leaves.items():
                carry.set(key, torch.rand(shape))
            _, carry = env.step_and_maybe_reset(carry)

    return work


def rolling(env: EnvBase, n_steps: int) -> Callable[[], None]:
    """``env.rollout`` with random actions."""
    return functools.partial(env.rollout, n_steps, break_when_any_done=False)


def collecting(env: EnvBase, n_steps: int) -> Callable[[], None]:
    """A batch of the collector with random actions."""
    from torchrl_marl.collectors import RolloutCollector

    collector = RolloutCollector(env, frames_per_batch=n_steps * env.batch_size.numel())
    return functools.partial(next, iter(collector))


def measure(args: argparse.Namespace, n_threads: int) -> tuple[list[list[Any]], str]:
    """The rows of the table, and the versions in AgileRL's environment."""
    from torchrl.envs import ParallelEnv

    python = args.agilerl_python or foreign.make_environment(
        foreign.environments() / "agilerl", foreign.AGILERL
    )
    options = {"--envs": args.envs, "--steps": args.steps}
    agilerl = foreign.Worker(python, SCRIPT, options, n_threads)
    parallel = ParallelEnv(args.envs, make_wrapped)
    ours = {n: make_ours(args.envs, n) for n in args.workers}
    few = ours[2 if 2 in ours else args.workers[0]]
    candidates = {our_name(n): stepping(env, args.steps) for n, env in ours.items()}
    candidates |= {
        "the same with 2 workers, env.rollout": rolling(few, args.steps),
        "the same with 2 workers, RolloutCollector": collecting(few, args.steps),
        AGILERL: agilerl,
        TORCHRL: stepping(parallel, args.steps),
    }
    timings = report.alternate(candidates, args.rounds, warmup=2, shortest=0)
    for env in (*ours.values(), parallel):
        env.close()
    agilerl.close()
    rows = [
        [
            name,
            f"{args.envs * args.steps / timings.median(name):,.0f}",
            timings.ratio_text(name, AGILERL),
            timings.ratio_text(name, TORCHRL),
        ]
        for name in candidates
    ]
    return rows, agilerl.versions


def main() -> None:
    """Measures and reports."""
    parser = report.parser(__doc__, threads=[1])
    parser.add_argument("--envs", type=int, default=8, help="copies of the environment")
    parser.add_argument("--workers", type=int, nargs="+", default=[2, 1, 4, 8, 0])
    parser.add_argument(
        "--steps", type=int, default=250, help="steps of all copies in a measurement"
    )
    parser.add_argument("--rounds", type=int, default=25)
    parser.add_argument("--agilerl-python", type=Path, help="Python of an environment with AgileRL")
    args = parser.parse_args()
    if args.quick:
        args.write = False
        args.steps, args.rounds = 10, 2
    header = ["", "env-steps/s", "times AgileRL", "times torchrl"]
    sections, theirs = [], ""
    for n in args.threads:
        rows, theirs = report.for_each_number_of_threads(measure, [n], args, n)[n]
        heading = f"{report.count_of(args.envs, 'copy').replace('copys', 'copies')}"
        sections.append(
            (f"{heading}, {report.count_of(n, 'thread')}", report.markdown_table(header, rows))
        )
    report.publish(
        "pettingzoo_copies",
        "Copies of a PettingZoo environment over processes",
        sections,
        {
            "environment": f"{WORLD}, continuous actions, episodes of 25 steps",
            "versions": f"pettingzoo {version('pettingzoo')}, mpe2 {version('mpe2')}",
            "AgileRL's environment": theirs,
            "a measurement": f"{args.steps} steps of all copies",
            "rounds": args.rounds,
        },
        """All candidates are there from the start, and wait without work while another is measured.
        Each makes one measurement a round, in random order; env-steps/s are from the median
        time, "times" is the median (and the quartiles) of the rounds' ratios. Random actions are
        drawn in the measured time, by torch for TensorDicts and by numpy for AgileRL, whose
        result is arrays; env.rollout and RolloutCollector draw them from the specs and also stack
        the steps to a batch. AgileRL gives the next episode's first observation in place of an
        episode's last, neither masks nor the root's flags; ours and TorchRL's give both. torch
        runs with the number of threads that is named, workers with one.""",
        write=args.write,
    )


if __name__ == "__main__":
    main()
