"""Transitions of a team, and a replay buffer that has wrapped around."""

import torch
from tensordict import TensorDict

from torchrl_marl.learners import TeamReplay

E, S, GAMMA = 4, 40, 0.9
KEYS = [
    ("agents", "observation"),
    ("agents", "action"),
    ("agents", "mask"),
    ("next", "agents", "observation"),
    ("next", "agents", "reward"),
    ("next", "agents", "mask"),
    ("next", "terminated"),
]


def random_batch(n_steps, n_envs=E, n_agents=3):
    """Random steps, of which about one in ten ends an episode; masks may be inconsistent."""

    def agents():
        return {
            "observation": torch.randn(n_envs, n_steps, n_agents, 5),
            "mask": torch.rand(n_envs, n_steps, n_agents) < 0.8,
        }

    terminated = torch.rand(n_envs, n_steps, 1) < 0.07
    done = terminated | (torch.rand(n_envs, n_steps, 1) < 0.05)
    action = torch.randint(9, (n_envs, n_steps, n_agents))
    next_data = {**agents(), "reward": torch.randn(n_envs, n_steps, n_agents, 1)}
    flags = {"done": done, "terminated": terminated}
    source = {"agents": {**agents(), "action": action}, "next": {"agents": next_data, **flags}}
    return TensorDict(source, [n_envs, n_steps])


def make_wrapped_replay(priority=None, n_batches=9, length=7):
    """A buffer that wrapped around in the middle of a batch, and its content in order of time."""
    replay = TeamReplay(S, E, KEYS, priority)
    history = [random_batch(length) for _ in range(n_batches)]
    for batch in history:
        replay.extend(batch)
    return replay, torch.cat(history, 1)[:, -S:]
