"""Goals in football: trained runs against VMAS's scripted players.

Run: python benchmarks/football_goals.py suite_vmas/football/mappo/seed0 ... [--write]

Plays 200 episodes of each run with the likeliest actions and with sampled ones, and 200 with random
actions, from the same starts. An episode ends with a goal, which pays the sides 100 and -100, more
than any other step. The last reward thus shows the scoring side.
"""

from __future__ import annotations

import warnings
from pathlib import Path

import report
import torch
import torchrl.envs
from torchrl.envs.utils import ExplorationType, set_exploration_type, step_mdp

from torchrl_marl.runtime.random_state import RandomState
from torchrl_marl.training import Run

EPISODES, SEED, GOAL = 200, 10_000, 50.0


@torch.no_grad()
def play(run: Run, exploration: ExplorationType, policy=None) -> tuple[list[float], float]:
    """Returns the reward with which each episode ended (0: by time), and its mean length."""
    config = run.config.env
    with RandomState(SEED).active(), set_exploration_type(exploration):
        env = torchrl.envs.VmasEnv(
            config.name,
            num_envs=EPISODES,
            max_steps=config.max_steps,
            seed=SEED,
            clamp_actions=True,
            **config.kwargs,
        )
        [group] = env.group_map
        state = env.reset()
        running, last = torch.ones(EPISODES, dtype=torch.bool), torch.zeros(EPISODES)
        length = torch.zeros(EPISODES)
        for _ in range(config.max_steps):
            state = env.step(env.rand_action(state) if policy is None else policy(state))
            reward = state["next", group, "reward"].squeeze(-1).mean(-1)
            ended = state["next", "terminated"].squeeze(-1)
            last = torch.where(running & ended, reward, last)
            length += running
            running &= ~state["next", "done"].squeeze(-1)
            state = step_mdp(state)
    return last.tolist(), length.mean().item()


def row(name: str, last: list[float], length: float) -> list[str]:
    """A row of the table."""
    ours, theirs = sum(x > GOAL for x in last), sum(x < -GOAL for x in last)
    return [name, f"{ours}", f"{theirs}", f"{len(last) - ours - theirs}", f"{length:.0f}"]


def main() -> None:
    """Plays and reports."""
    warnings.simplefilter("ignore")
    parser = report.parser(__doc__, threads=(1,))
    parser.add_argument("runs", nargs="+", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(1)
    rows = []
    for folder in args.runs:
        run = Run.load(folder, device="cpu")
        frames, learner = run.frames / 1e6, run.config.learner.algorithm
        name = f"{learner}, seed {run.config.seed}, {frames:.1f} million frames"
        likeliest = play(run, ExplorationType.DETERMINISTIC, run.policy)
        drawn = play(run, ExplorationType.RANDOM, run.policy)
        rows += [row(name, *likeliest), row(f"{name}, drawn actions", *drawn)]
    rows.append(row("random actions", *play(run, ExplorationType.RANDOM)))
    header = ["who plays", "goals", "goals against", "neither", "steps of an episode"]
    task = ", ".join(f"{key} {value}" for key, value in run.config.env.kwargs.items())
    report.publish(
        "football_goals",
        "Goals against VMAS's own player",
        [(f"{EPISODES} episodes", report.markdown_table(header, rows))],
        {"football": task, "limit": f"{run.config.env.max_steps} steps"},
        __doc__.split("\n\n", 2)[2],
        write=args.write,
    )


if __name__ == "__main__":
    main()
