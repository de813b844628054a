"""Evaluation of a trained run on the episodes of BenchMARL's side, ``benchmarl_vmas.py``.

    python benchmarks/vmas_episodes.py suite_vmas/balance/mappo/seed0 --out episodes

plays 200 episodes with the likeliest actions in TorchRL's own VmasEnv with the same seed, and
writes ``TASK_ALGORITHM_seedN.json`` for each run: the return of every episode, over all steps and
to its end, its length, and a checksum of each start, which shows that both sides played the same.
"""

from __future__ import annotations

import argparse
import json
import warnings
from pathlib import Path
from typing import Any

EVALUATION_SEED = 10_000
EPISODES = 200


def play(folder: Path, episodes: int = EPISODES) -> dict[str, Any]:
    """What a run's last checkpoint earns in each of these episodes.

    Args:
        folder (Path): of the run.
        episodes (int): how many, each in an env of its own.
    """
    import torch
    import torchrl.envs
    from torchrl.envs.utils import ExplorationType, set_exploration_type, step_mdp

    from torchrl_marl.envs.remember import with_memory
    from torchrl_marl.runtime.random_state import RandomState
    from torchrl_marl.training.run import Run

    torch.set_num_threads(1)
    run = Run.load(folder, device="cpu")
    config = run.config.env
    with RandomState(EVALUATION_SEED).active():
        env = torchrl.envs.VmasEnv(
            config.name,
            num_envs=episodes,
            max_steps=config.max_steps,
            continuous_actions=config.continuous_actions,
            seed=EVALUATION_SEED,
            clamp_actions=True,
            **config.kwargs,
        )
        groups = list(env.group_map)
        env = with_memory(env, run.policy)
    deterministic = set_exploration_type(ExplorationType.DETERMINISTIC)
    with RandomState(EVALUATION_SEED).active(), torch.no_grad(), deterministic:
        env.set_seed(EVALUATION_SEED)
        state = env.reset()
        starts = sum(state[group, "observation"].flatten(1).sum(1) for group in groups)
        running = torch.ones(env.batch_size, dtype=torch.bool)
        total = to_done = length = torch.zeros(env.batch_size)
        for _ in range(config.max_steps):
            state = env.step(run.policy(state))
            rewards = [state["next", group, "reward"].squeeze(-1) for group in groups]
            reward = torch.cat(rewards, -1).mean(-1)
            total, to_done = total + reward, to_done + torch.where(running, reward, 0.0)
            length = length + running
            running = running & ~state["next", "done"].squeeze(-1)
            state = step_mdp(state)
    found = {
        "episode_reward": total,
        "episode_reward_to_done": to_done,
        "episode_length": length,
    }
    return {
        "library": "torchrl_marl",
        "task": config.name,
        "seed": run.config.seed,
        "frames": run.frames,
        "seconds_training": run.summary.get("seconds"),
        "execution": run.config.execution,
        "device": run.config.device,
        "evaluation": {"episodes": episodes, "seed": EVALUATION_SEED, "steps": config.max_steps},
        "episodes": {
            name: [round(x, 4) for x in values.tolist()] for name, values in found.items()
        },
        "starts": [round(x, 4) for x in starts.tolist()],
    }


def main() -> None:
    """Plays with each run and writes."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("runs", type=Path, nargs="+", help="folders of a suite on VMAS")
    parser.add_argument("--episodes", type=int, default=EPISODES)
    parser.add_argument("--out", type=Path, required=True, help="folder for the results")
    args = parser.parse_args()
    warnings.filterwarnings("ignore")
    args.out.mkdir(parents=True, exist_ok=True)
    for run in args.runs:
        path = args.out / f"{'_'.join(run.resolve().parts[-3:])}.json"
        path.write_text(json.dumps(play(run, args.episodes)) + "\n", encoding="utf-8")
        print(path)


if __name__ == "__main__":
    main()
