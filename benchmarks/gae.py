"""Generalized advantage estimation: ours against TorchRL's loop and TorchRL's vectorized default.

    python benchmarks/gae.py --write

At ``[E, 100, 4, 1]`` with 2 % ends, half of them terminations. The masked row masks 20 % of the
agent steps. TorchRL's functions take no mask and get the same tensors without one.
"""

from __future__ import annotations

import argparse

import report

GAMMA, LMBDA = 0.99, 0.95
CANDIDATES = ("ours", "ours, masked", "TorchRL, loop", "TorchRL, vectorized")


def draw(num_envs: int, n_steps: int, n_agents: int) -> dict:
    """A batch of rewards, values, ends and a mask."""
    import torch

    torch.manual_seed(0)
    shape = (num_envs, n_steps, n_agents, 1)
    done = (torch.rand(num_envs, n_steps, 1, 1) < 0.02).expand(shape).contiguous()
    half = (torch.rand(num_envs, n_steps, 1, 1) < 0.5).expand(shape)
    return {
        "reward": torch.randn(shape),
        "value": torch.randn(shape),
        "next_value": torch.randn(shape),
        "done": done,
        "terminated": done & half,
        "mask": torch.rand(shape[:-1]) > 0.2,
    }


def measure(args: argparse.Namespace) -> list[list[str]]:
    """A row for every size and candidate."""
    return [row for num_envs in args.envs for row in measure_size(num_envs, args)]


def measure_size(num_envs: int, args: argparse.Namespace) -> list[list[str]]:
    """The rows of one size."""
    import torch
    from torchrl.objectives.value.functional import (
        generalized_advantage_estimate,
        vec_generalized_advantage_estimate,
    )

    from torchrl_marl.functional import gae

    batch = draw(num_envs, args.steps, args.agents)
    names = ("reward", "value", "next_value", "done", "terminated")
    ours = [batch[name] for name in names]
    torchrl_inputs = [
        batch[name] for name in ("value", "next_value", "reward", "done", "terminated")
    ]
    settings = {"gamma": GAMMA, "lmbda": LMBDA}
    candidates = dict(
        zip(
            CANDIDATES,
            (
                lambda: gae(*ours, **settings),
                lambda: gae(*ours, **settings, mask=batch["mask"]),
                lambda: generalized_advantage_estimate(GAMMA, LMBDA, *torchrl_inputs, time_dim=-3),
                lambda: vec_generalized_advantage_estimate(
                    GAMMA, LMBDA, *torchrl_inputs, time_dim=-3
                ),
            ),
        )
    )
    with torch.no_grad():
        exact = generalized_advantage_estimate(
            GAMMA,
            LMBDA,
            *(x.double() if x.is_floating_point() else x for x in torchrl_inputs),
            time_dim=-3,
        )[0]
        errors = {
            name: (run()[0] - exact).abs().max().item()
            for name, run in candidates.items()
            if "masked" not in name
        }
        timings = report.alternate(candidates, args.rounds, seconds=args.seconds, warmup=3)
    return [
        [
            f"{num_envs:,}",
            name,
            f"{1e3 * timings.median(name):.2f}",
            *(timings.ratio_text(name, other) for other in CANDIDATES[2:]),
            timings.rounds(),
            f"{errors[name]:.0e}" if name in errors else "",
        ]
        for name in CANDIDATES
    ]


def main() -> None:
    """Measures and reports."""
    parser = report.parser(__doc__)
    parser.add_argument("--envs", type=int, nargs="+", default=[256, 1024, 4096])
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--agents", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=200)
    parser.add_argument("--seconds", type=float, default=20.0, help="time limit of one size")
    args = parser.parse_args()
    if args.quick:
        args.write = False
        args.envs, args.rounds = [64], 2
    header = ["envs", "", "ms", "times TorchRL's loop", "times vectorized", "rounds", "error"]
    measured = report.for_each_number_of_threads(measure, args.threads, args)
    report.publish(
        "gae",
        "Generalized advantage estimation",
        [
            (report.count_of(n, "thread"), report.markdown_table(header, rows))
            for n, rows in measured.items()
        ],
        {"shape": f"[envs, {args.steps}, {args.agents}, 1], float32"},
        """All four are timed in one process, one after the other in random order every round (a
        short one several times in a row); milliseconds are medians over the rounds, "times" is the
        median (and the quartiles) of the rounds' ratios: how many times faster than the baseline.
        The error is the largest difference of the advantages from TorchRL's loop in float64,
        without a mask. TorchRL's functions are called with time_dim=-3 and take no mask.""",
        write=args.write,
    )


if __name__ == "__main__":
    main()
