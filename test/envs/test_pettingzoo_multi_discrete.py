"""Multi-discrete and multi-binary actions of PettingZoo's environments."""

import numpy as np
import pytest
import torch
from gymnasium.spaces import Box, MultiBinary, MultiDiscrete
from pettingzoo import ParallelEnv

import torchrl_marl
from torchrl_marl.envs.pettingzoo import PettingZooEnv
from torchrl_marl.errors import ConfigError

SMALL = {
    "threads": 1,
    "total_frames": 3200,
    "frames_per_batch": 320,
    "learner": {"minibatch_size": 80, "num_epochs": 4, "lr": 3e-3},
    "evaluation": {"episodes": 8, "both": False},
    "logging": {"progress": False},
}


class Dials(ParallelEnv):
    """Each agent earns 1 for each of two dials that it sets to the position it observes."""

    metadata = {"name": "dials"}
    render_mode = None

    def __init__(self, binary=False):
        self.sizes = (2, 2) if binary else (2, 3)
        self.space = MultiBinary(2) if binary else MultiDiscrete(self.sizes)
        self.possible_agents = ["dial_0", "dial_1"]
        self.rng = np.random.default_rng(0)

    def observation_space(self, agent):
        return Box(0.0, 1.0, (sum(self.sizes),), np.float32)

    def action_space(self, agent):
        return self.space

    def _observe(self):
        self.goals = {a: [self.rng.integers(n) for n in self.sizes] for a in self.agents}
        rows = {a: [np.eye(n)[g] for n, g in zip(self.sizes, self.goals[a])] for a in self.agents}
        return {agent: np.concatenate(row).astype(np.float32) for agent, row in rows.items()}

    def reset(self, seed=None, options=None):
        self.agents, self.t = list(self.possible_agents), 0
        return self._observe(), {agent: {} for agent in self.agents}

    def step(self, actions):
        for action in actions.values():
            assert self.space.contains(np.asarray(action, dtype=self.space.dtype)), action
        hits = {a: float(np.sum(np.equal(actions[a], self.goals[a]))) for a in self.agents}
        self.t += 1
        ends = dict.fromkeys(self.agents, self.t == 5)
        observed, infos = self._observe(), {agent: {} for agent in self.agents}
        return observed, hits, dict.fromkeys(ends, False), ends, infos


@pytest.mark.parametrize("binary", [False, True], ids=["MultiDiscrete", "MultiBinary"])
@pytest.mark.parametrize("algorithm", ["mappo", "happo"])
def test_each_dial_is_learned(binary, algorithm, tmp_path):
    """Ten are the most in an episode, five what a coin earns with two positions a dial."""
    learner = {**SMALL["learner"], "algorithm": algorithm}
    run = torchrl_marl.train(
        "toy_arena_mappo",
        env=lambda: Dials(binary),
        folder=tmp_path / "run",
        **{**SMALL, "learner": learner},
    )
    assert run.summary["return_after"] > 7.5 > 6 > run.summary["return_random"]


@pytest.mark.parametrize("binary", [False, True])
def test_branches(binary):
    env = PettingZooEnv(lambda: Dials(binary), num_envs=3, seed=0)
    (group,) = torchrl_marl.TeamSpec.from_env(env).groups.values()
    assert group.branches == ((2, 2) if binary else (2, 3))
    td = env.rand_action(env.reset())
    assert td[group.action_key].shape == (3, 2, 2) and td[group.action_key].dtype == torch.int64


def test_algorithms_of_single_choices_are_refused(tmp_path):
    settings = {**SMALL, "learner": {"algorithm": "iql", "learning_starts": 320}}
    with pytest.raises(ConfigError, match=r"multi-discrete, \[2, 3\]"):
        torchrl_marl.train("toy_arena_mappo", env=Dials, folder=tmp_path / "run", **settings)
