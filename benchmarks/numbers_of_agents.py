"""Policies of navigation trained with 4 agents, played with other numbers of agents.

    python benchmarks/numbers_of_agents.py --write

Trains the recipe with 2, 4, 8 and 16 agents at equal frames, and plays the policy of 4 agents with
each number, beside the policy that was trained with it. Finished runs are reused, started ones
resumed.
"""

from __future__ import annotations

import argparse
import statistics
from pathlib import Path
from typing import Any

import report

RECIPE = "vmas_navigation_mappo"
TRAINED = 4


def trained(n_agents: int, seed: int, args: argparse.Namespace) -> Path:
    """The folder of a run with so many agents, from an earlier call or from now."""
    from torchrl_marl.apps.jobs.jobs import train_or_resume
    from torchrl_marl.recipes import load_config

    folder = args.runs / f"agents{n_agents}_seed{seed}"
    if not (folder / "summary.json").is_file():
        settings: dict[str, Any] = {"env.kwargs.n_agents": n_agents, "total_frames": args.frames}
        settings |= {"seed": seed, "threads": 1, "logging.progress": False}
        train_or_resume(load_config(RECIPE, settings), folder)
    return folder


def returns_of(folder: Path, n_agents: int, episodes: int) -> float:
    """The mean return of an agent, by likeliest actions."""
    from torchrl_marl.training import Run

    run = Run.load(folder, settings={"env.kwargs.n_agents": n_agents})
    return run.evaluate(episodes=episodes, deterministic=True)["return_mean"]


def rows_of(args: argparse.Namespace) -> list[list[str]]:
    """A row for each number of agents: return of the policy of 4 agents, and of its own."""
    rows = []
    for n_agents in args.agents:
        own, moved = [], []
        for seed in args.seeds:
            folder = trained(n_agents, seed, args)
            own.append(returns_of(folder, n_agents, args.episodes))
            moved.append(returns_of(trained(TRAINED, seed, args), n_agents, args.episodes))
        rows.append([str(n_agents), *(f"{statistics.fmean(x):.3f}" for x in (moved, own))])
    return rows


def main() -> None:
    """Trains, plays and reports."""
    parser = report.parser(__doc__, threads=(1,))
    parser.add_argument("--agents", type=int, nargs="+", default=[2, 4, 8, 16])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--frames", type=int)
    parser.add_argument("--episodes", type=int, default=200)
    parser.add_argument("--runs", type=Path, default=Path("runs/numbers_of_agents"))
    args = parser.parse_args()
    args.frames = args.frames or (12_000 if args.quick else 600_000)
    header = ["agents", f"return of the policy trained with {TRAINED}", "of one trained with it"]
    report.publish(
        "numbers_of_agents",
        "A policy of navigation with other numbers of agents",
        [(RECIPE, report.markdown_table(header, rows_of(args)))],
        {
            "recipe": f"{RECIPE}, with n_agents as in the table, otherwise unchanged",
            "frames": f"{args.frames:,}",
            "seeds": ", ".join(map(str, args.seeds)),
            "episodes": args.episodes,
        },
        """The return is the mean over the agents of a team and over the episodes, by the likeliest
        actions, from the same initial states for both policies.""",
        write=args.write,
    )


if __name__ == "__main__":
    main()
