"""Multi-discrete and multi-binary actions of PettingZoo's environments."""

import numpy as np
import pytest
import torch
from gymnasium.spaces import Box, Dict, MultiBinary, MultiDiscrete
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
    """The most in an episode is ten; random play earns five with two positions a dial."""
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


def test_algorithms_without_multi_discrete_actions_are_refused(tmp_path):
    settings = {**SMALL, "learner": {"algorithm": "iql", "learning_starts": 320}}
    with pytest.raises(ConfigError, match=r"multi-discrete, \[2, 3\]"):
        torchrl_marl.train("toy_arena_mappo", env=Dials, folder=tmp_path / "run", **settings)


class MaskedDials(Dials):
    """Dials of which some positions are locked; all but the right one is locked on one dial."""

    def __init__(self, where="info", flat=True, binary=False):
        super().__init__(binary)
        self.where, self.flat, self.played = where, flat, []

    def observation_space(self, agent):
        seen = super().observation_space(agent)
        mask = Box(0, 1, (sum(self.sizes),), np.int8)
        return Dict({"observation": seen, "action_mask": mask}) if self.where != "info" else seen

    def _masks(self, agent):
        first, second = self.goals[agent]
        masks = np.arange(self.sizes[0]) == first, np.ones(self.sizes[1], bool)
        masks[1][(second + 1) % self.sizes[1]] = False
        return np.concatenate(masks) if self.flat else masks

    def _with_masks(self, observed):
        if self.where == "info":
            return observed, {a: {"action_mask": self._masks(a)} for a in observed}
        masks = {a: self._masks(a).astype(np.int8) for a in observed}
        return {a: {"observation": x, "action_mask": masks[a]} for a, x in observed.items()}, {
            a: {} for a in observed
        }

    def reset(self, seed=None, options=None):
        return self._with_masks(super().reset(seed, options)[0])

    def step(self, actions):
        for agent, action in actions.items():
            masks = np.split(self._masks(agent), [self.sizes[0]]) if self.flat else None
            masks = self._masks(agent) if masks is None else masks
            assert all(mask[choice] for mask, choice in zip(masks, action)), (agent, action)
            self.played.append(action)
        observed, *rest, _ = super().step(actions)
        observed, infos = self._with_masks(observed)
        return observed, *rest, infos


@pytest.mark.parametrize(
    "kwargs",
    [{}, {"flat": False}, {"where": "observation"}, {"binary": True}],
    ids=["infos", "a tuple", "observations", "binary"],
)
def test_action_masks_of_multi_discrete_actions(kwargs, tmp_path):
    """The environment refuses illegal choices, also of random actions."""
    env = PettingZooEnv(lambda: MaskedDials(**kwargs), num_envs=3, seed=0)
    (group,) = torchrl_marl.TeamSpec.from_env(env).groups.values()
    sizes = (2, 2) if kwargs.get("binary") else (2, 3)
    assert group.branches == sizes and group.n_options == sum(sizes)
    td = env.rollout(12, break_when_any_done=False)
    legal = td[group.action_mask_key]
    assert legal.shape[-1] == sum(sizes) and legal.dtype is torch.bool
    assert bool((legal.sum(-1) == sum(sizes) - 2).all())
    run = torchrl_marl.train(
        "toy_arena_mappo",
        env=lambda: MaskedDials(**kwargs),
        folder=tmp_path / "run",
        **{**SMALL, "total_frames": 640},
    )
    assert run.summary["return_random"] > 6  # one dial has no choice left
