"""The whole training loop of a recipe against the same recipe written on TorchRL's classes.

    python benchmarks/training_loop.py --write

Collect, estimate advantages, update; no evaluation, no logging. Default recipe
(``vmas_balance_mappo``) with its batch, epochs, minibatches, networks and fused Adam in all rows:

- *TorchRL*: written like TorchRL's own MAPPO example: ``torchrl.envs.VmasEnv``, ``Collector``,
  ``MultiAgentMLP``, ``ProbabilisticActor`` with ``TanhNormal``, ``MAPPOLoss`` with
  ``PopArtValueNorm`` and ``MultiAgentGAE`` once a batch, a ``TensorDictReplayBuffer`` that is
  sampled without replacement; ``StepCounter`` for the time limit, so that it truncates;
- *TorchRL, tuned*: faster variants: the time limit from VMAS (which then counts as a termination,
  as in TorchRL's tutorials), plain indexing instead of the buffer, the loop instead of the
  vectorized GAE, ``functional=False``, ``use_td_params=False``, no value norm;
- *torchrl_marl*: our collector and learner in a plain loop;
- *torchrl_marl, train*: one step of ``torchrl_marl.train``, with checks, episode statistics,
  ``metrics.csv`` and the recipe's schedules; the other rows have constant learning rates.
"""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

import report
from loops import Form, Loop, OurLoop, TorchRLLoop, TrainLoop

if TYPE_CHECKING:
    from torchrl_marl.training.config import TrainConfig

BASELINES = ("TorchRL", "TorchRL, tuned")
OURS = "torchrl_marl"
TRAIN = "torchrl_marl, train"


def make_loops(config: TrainConfig) -> dict[str, Loop]:
    """All candidates, each from the same seed."""
    import torch

    made: dict[str, Loop] = {}
    for name in (*BASELINES, OURS, TRAIN):
        torch.manual_seed(config.seed)
        if name in BASELINES:
            made[name] = TorchRLLoop(config, Form(tuned=name == "TorchRL, tuned"))
        else:
            made[name] = {OURS: OurLoop, TRAIN: TrainLoop}[name](config)
    return made


def mean_returns(config: TrainConfig, loops: dict[str, Loop], episodes: int) -> dict[str, float]:
    """What each policy earns by its likeliest actions, on the same episodes."""
    from torchrl_marl import TeamSpec
    from torchrl_marl.envs import make_env
    from torchrl_marl.training.evaluation import evaluate

    env = make_env(config.env, seed=1, num_envs=episodes)
    team = TeamSpec.from_env(env)
    return {
        name: evaluate(env, loop.policy, team, episodes=episodes, seed=1)["return_mean"]
        for name, loop in loops.items()
    }


def measure(args: argparse.Namespace) -> list[list[str]]:
    """A row for every candidate."""
    from torchrl_marl.recipes import load_config

    overrides = {"env.num_envs": 8, "frames_per_batch": 160, "learner.minibatch_size": 80}
    config = load_config(args.recipe, overrides if args.quick else {})
    loops = make_loops(config)
    episodes = 8 if args.quick else 200
    before = mean_returns(config, loops, episodes)
    timings = report.alternate(
        {name: loop.iterate for name, loop in loops.items()},
        args.rounds,
        seconds=args.seconds,
        warmup=2,
    )
    after = mean_returns(config, loops, episodes)
    rows = []
    for name, loop in loops.items():
        seconds = timings.median(name)
        rows.append(
            [
                name,
                f"{config.frames_per_batch / seconds:,.0f}",
                *(timings.ratio_text(name, baseline) for baseline in BASELINES),
                *(_median_ms(loop.seconds[half]) for half in ("collect", "learn")),
                f"{before[name]:.1f} to {after[name]:.1f}",
                timings.rounds(),
            ]
        )
        loop.close()
    return rows


def _median_ms(seconds: list[float]) -> str:
    return f"{1e3 * sorted(seconds)[len(seconds) // 2]:.0f}" if seconds else ""


def main() -> None:
    """Measures and reports."""
    parser = report.parser(__doc__)
    parser.add_argument("--recipe", default="vmas_balance_mappo")
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--seconds", type=float, default=180.0, help="time limit of the rounds")
    args = parser.parse_args()
    if args.quick:
        args.write = False
        args.rounds = 2
    header = ["", "frames/s", "times TorchRL", "times TorchRL, tuned", "collect, ms", "learn, ms"]
    header += ["return, untrained to last", "rounds"]
    measured = report.for_each_number_of_threads(measure, args.threads, args)
    report.publish(
        "training_loop",
        f"The training loop of {args.recipe}",
        [
            (report.count_of(n, "thread"), report.markdown_table(header, rows))
            for n, rows in measured.items()
        ],
        {"recipe": args.recipe},
        __doc__.split("\n\n", 2)[2]
        + """
        The loops alternate in one process, one iteration each in random order every round; frames/s
        are from the median time of an iteration, "times" is the median (and the quartiles) of the
        rounds' ratios. All four learn for the same number of iterations (the rounds and two before
        them); "return" is the mean of 200 episodes by the likeliest actions.""",
        write=args.write,
    )


if __name__ == "__main__":
    main()
