"""Agents that die early are credited with later rewards of the team, by critics of each kind."""

import pytest
import torch
from support.tiers import second_tier_cases
from tensordict import TensorDict
from torchrl.data import Categorical, Unbounded

from torchrl_marl import AgentSpec, TeamSpec
from torchrl_marl.collectors import RolloutCollector
from torchrl_marl.collectors.team import TeamPolicy
from torchrl_marl.envs import MarlEnv
from torchrl_marl.learners import OnPolicyConfig, OnPolicyLearner
from torchrl_marl.modules import CriticConfig, NetworkConfig

STEPS, GAMMA = 20, 0.99
RETURN = sum(GAMMA**t for t in range(STEPS))  # 18.21


class Relic(MarlEnv):
    """The team earns 1 a step for 20 steps; all but the first agent die in the first step."""

    def __init__(self, num_envs, n_agents=2, groups=1, **kwargs):
        super().__init__(num_envs, **kwargs)
        self.names = [f"car_{i}" for i in range(groups)]
        for name in self.names:
            self.register_agent(AgentSpec(name, n_agents, Unbounded((1,)), Categorical(2)))
        self.register_state(Unbounded((1,)))
        self.n = n_agents

    def _reset(self, tensordict):
        self.time = torch.zeros(self.num_envs, 1)
        return self._team()

    def _step(self, tensordict):
        self.time = self.time + 1
        ends = torch.arange(self.n) > 0
        ends = ends.view(1, -1, 1) | (self.time >= STEPS).unsqueeze(-1)
        ones = torch.ones(self.num_envs, self.n, 1)
        return self._team(reward=ones, terminated=ends.expand_as(ones))

    def _team(self, **entries):
        seen = (self.time / STEPS).unsqueeze(1).expand(-1, self.n, 1)
        own = {"observation": seen, **entries}
        return TensorDict({**{name: dict(own) for name in self.names}, "state": self.time / STEPS})


def credit(groups=1, iterations=15, **settings):
    """Value targets of a first step after training, ``[N]`` of each group."""
    torch.manual_seed(0)
    env = Relic(16, groups=groups, seed=0)
    # Batches end in mid-episode.
    small = NetworkConfig([32])
    settings = {"critic": CriticConfig([32, 32]), **settings}
    config = OnPolicyConfig(
        actor=small, lr=1e-2, gamma=GAMMA, minibatch_size=60, num_epochs=4, **settings
    )
    team = TeamSpec.from_env(env)
    learner = OnPolicyLearner(team.groups, config, team=team)
    policy = TeamPolicy(learner.actors.values())
    collector = RolloutCollector(env, policy, frames_per_batch=16 * 15)
    found = []
    for _ in range(iterations):
        batch = collector.next()
        learner.learn(batch)
        first = batch["car_0", "mask"].all(-1)
        if first.any():
            rows = [batch[name, "value_target"][first].mean(0) for name in env.names]
            found.append(torch.cat(rows).flatten())
    return torch.stack(found[-4:]).mean(0)


@pytest.mark.parametrize(
    "settings",
    [
        {"algorithm": "mappo"},
        *second_tier_cases(
            "learning",
            {"algorithm": "ippo"},
            {"algorithm": "mappo", "central_input": "state"},
            {"algorithm": "mappo", "critic": CriticConfig([32, 32], architecture="attention")},
        ),
        {"algorithm": "ippo", "groups": 2},
    ],
    ids=["mappo", "ippo", "state", "attention", "two groups as one"],
)
def test_values_of_dead_agents_converge_to_the_team_return(settings):
    assert round(RETURN, 2) == 18.21
    found = credit(**settings)
    assert (found - RETURN).abs().max() < 0.25, found
