"""Policies trained with 4 agents, played with other numbers of agents.

    python benchmarks/numbers_of_agents.py --write

Trains navigation and sampling with 2, 4, 8 and 16 agents at equal frames. The policy of 4 agents is
played with each number, beside the policy that was trained with it. Finished runs are reused,
started ones resumed.
"""

from __future__ import annotations

import argparse
import statistics
from pathlib import Path
from typing import Any, NamedTuple

import report

TRAINED = 4


class Case(NamedTuple):
    """A scenario: its recipe, the settings that differ, and the frames."""

    recipe: str
    settings: dict[str, Any]
    frames: int


CASES = {
    "navigation": Case("vmas_navigation_mappo", {}, 600_000),
    "sampling": Case(  # settings of the suite `vmas`
        "vmas_balance_mappo",
        {
            "env": {
                "name": "sampling",
                "num_envs": 60,
                "kwargs": {
                    "shared_rew": False,
                    "n_gaussians": 3,
                    "lidar_range": 0.2,
                    "cov": 0.05,
                    "collisions": True,
                    "spawn_same_pos": False,
                },
            },
            "frames_per_batch": 6_000,
            "learner": {"lmbda": 0.9, "num_epochs": 10, "minibatch_size": 600},
        },
        300_000,
    ),
}


def train_or_find_run(scenario: str, n_agents: int, seed: int, args: argparse.Namespace) -> Path:
    """The folder of a run with so many agents, from an earlier call or from now."""
    from torchrl_marl.apps.jobs.jobs import train_or_resume
    from torchrl_marl.recipes import load_config

    case, folder = CASES[scenario], args.runs / f"{scenario}_agents{n_agents}_seed{seed}"
    if not (folder / "summary.json").is_file():
        overrides = {"seed": seed, "threads": 1, "logging.progress": False}
        overrides |= {"env.kwargs.n_agents": n_agents, "total_frames": args.frames or case.frames}
        train_or_resume(load_config(case.recipe, {**case.settings, **overrides}), folder)
    return folder


def returns_of(folder: Path, n_agents: int, episodes: int) -> float:
    """The mean return of an agent, by likeliest actions."""
    from torchrl_marl.training import Run

    run = Run.load(folder, settings={"env.kwargs.n_agents": n_agents})
    return run.evaluate(episodes=episodes, deterministic=True)["return_mean"]


def rows_of(scenario: str, args: argparse.Namespace) -> list[list[str]]:
    """A row for each number of agents: return of the policy of 4 agents, and of its own."""
    rows = []
    for n_agents in args.agents:
        own_returns, transferred_returns = [], []
        for seed in args.seeds:
            folder = train_or_find_run(scenario, n_agents, seed, args)
            own_returns.append(returns_of(folder, n_agents, args.episodes))
            four_agents_folder = train_or_find_run(scenario, TRAINED, seed, args)
            transferred_returns.append(returns_of(four_agents_folder, n_agents, args.episodes))
        rows.append(
            [
                str(n_agents),
                *(f"{statistics.fmean(x):.3f}" for x in (transferred_returns, own_returns)),
            ]
        )
    return rows


def main() -> None:
    """Trains, plays and reports."""
    parser = report.parser(__doc__, threads=(1,))
    parser.add_argument("--scenarios", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--agents", type=int, nargs="+", default=[2, 4, 8, 16])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--frames", type=int)
    parser.add_argument("--episodes", type=int, default=200)
    parser.add_argument("--runs", type=Path, default=Path("runs/numbers_of_agents"))
    args = parser.parse_args()
    args.frames = args.frames or (12_000 if args.quick else None)
    header = ["agents", f"return of the policy trained with {TRAINED}", "of one trained with it"]
    tables = [
        (scenario, report.markdown_table(header, rows_of(scenario, args)))
        for scenario in args.scenarios
    ]
    frames = [f"{name} {args.frames or CASES[name].frames:,}" for name in args.scenarios]
    report.publish(
        "numbers_of_agents",
        "Policies with other numbers of agents",
        tables,
        {
            "recipe": "navigation is vmas_navigation_mappo, sampling has the suite's settings",
            "frames": ", ".join(frames),
            "seeds": ", ".join(map(str, args.seeds)),
            "episodes": args.episodes,
        },
        """The return is the mean over the agents of a team and over the episodes, by the likeliest
        actions, from the same initial states for both policies.""",
        write=args.write,
    )


if __name__ == "__main__":
    main()
