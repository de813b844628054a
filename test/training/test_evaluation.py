"""Evaluation: whole episodes, the first of each env, with separate generators."""

import random

import numpy as np
import pytest
import torch
from tensordict import TensorDict
from tensordict.nn import TensorDictModule
from torchrl.data import Bounded, Categorical, Unbounded

from torchrl_marl import AgentSpec, TeamSpec
from torchrl_marl.envs import MarlEnv
from torchrl_marl.envs.toy import Arena, MatrixGame, TwoStepGame
from torchrl_marl.errors import ConfigError
from torchrl_marl.modules import make_actor
from torchrl_marl.training import evaluate


class Lengths(MarlEnv):
    """Env i plays an episode of ``lengths[i]`` steps, then episodes of 1 step.

    The two cats earn 1 a step of env 0, 2 of env 1, ...; the dog 10 times that.
    """

    def __init__(self, lengths, **kwargs):
        super().__init__(len(lengths), **kwargs)
        self.lengths = torch.tensor(lengths)
        bounded = Bounded(-1, 1, (1,))
        self.register_agent(AgentSpec("cat", 2, Unbounded((1,)), bounded))
        self.register_agent(AgentSpec("dog", 1, Unbounded((1,)), bounded))
        self.left = self.lengths.clone()

    def _observe(self):
        shape = (self.num_envs, 1, 1)
        return TensorDict(
            {
                "cat": {"observation": torch.zeros(shape).repeat(1, 2, 1)},
                "dog": {"observation": torch.zeros(shape)},
            }
        )

    def _reset(self, tensordict):
        fresh = tensordict is None or tensordict.get("_reset", None) is None
        self.left = self.lengths.clone() if fresh else torch.ones_like(self.lengths)
        return self._observe()

    def _step(self, tensordict):
        self.left = self.left - 1
        out = self._observe()
        reward = torch.arange(1.0, self.num_envs + 1).view(-1, 1, 1)
        out["cat", "reward"] = reward.repeat(1, 2, 1)
        out["dog", "reward"] = 10 * reward
        out["terminated"] = (self.left <= 0).unsqueeze(-1)
        return out


def measure(env, policy=None, **kwargs):
    return evaluate(env, policy, TeamSpec.from_env(env), **{"episodes": 4} | kwargs)


def test_first_episode_of_each_env_is_counted():
    result = measure(Lengths([5, 1, 2, 3]), episodes=4)
    assert result["length_mean"] == (5 + 1 + 2 + 3) / 4
    sums = [5 * 1, 1 * 2, 2 * 3, 3 * 4]
    assert result["cat/episode_reward"] == sum(sums) / 4
    assert result["dog/episode_reward"] == 10 * sum(sums) / 4
    # Mean over all agents: two cats and a dog.
    returns = torch.tensor([x * (2 * 1 + 10) / 3 for x in sums])
    assert result["return_mean"] == pytest.approx(returns.mean().item())
    assert result["return_std"] == pytest.approx(returns.std(correction=0).item())
    assert result["episodes"] == 4


@pytest.mark.parametrize(("episodes", "lengths"), [(1, [5]), (2, [5, 1]), (3, [5, 1, 2])])
def test_fewer_episodes_than_envs_use_the_first_envs(episodes, lengths):
    mean = measure(Lengths([5, 1, 2, 30]), episodes=episodes)["length_mean"]
    assert mean == pytest.approx(sum(lengths) / len(lengths))


@pytest.mark.parametrize("episodes", [5, 6, 7])
def test_more_episodes_than_envs_reset_all_envs(episodes):
    result = measure(Lengths([5, 1]), episodes=episodes)
    expected = ([5, 1] * 4)[:episodes]
    assert result["length_mean"] == pytest.approx(sum(expected) / episodes)
    assert result["episodes"] == episodes


def test_dead_agents_are_left_out_of_the_return():
    """Only agents that are alive get the team reward. Dead agents do not count as 0."""
    env = Arena(16, n_agents=2, years=2, lives=9, seed=0)

    def act(observation):
        return observation[..., :4].argmax(-1)

    policy = TensorDictModule(act, [("agents", "observation")], [("agents", "action")])
    result = measure(env, policy, episodes=16)
    # 2 steps of both, 2 of one: 1 + 1 + 0.5 + 0.5 for agents that are alive
    assert result["return_mean"] == env.optimal_return == 3.0
    assert result["return_std"] == 0.0
    assert result["length_mean"] == 4.0


def test_returns_of_random_and_optimal_policies():
    env = MatrixGame(5000, payoff="climbing")
    random_return = measure(env, None, episodes=5000)["return_mean"]
    assert random_return == pytest.approx(env.random_return, abs=0.6)

    def zero(observation):
        return torch.zeros(observation.shape[:-1], dtype=torch.int64)

    best = TensorDictModule(zero, [("agents", "observation")], [("agents", "action")])
    assert measure(MatrixGame(3), best, episodes=7)["return_mean"] == 11.0


def test_deterministic_and_stochastic_evaluation():
    env = TwoStepGame(64)
    torch.manual_seed(0)
    actor = make_actor(TeamSpec.from_env(env).groups["agents"])
    assert measure(env, actor, episodes=64)["return_std"] == 0.0
    stochastic = measure(env, actor, episodes=64, deterministic=False)
    assert stochastic["return_std"] > 1.0
    assert stochastic == measure(env, actor, episodes=64, deterministic=False)
    assert stochastic != measure(env, actor, episodes=64, deterministic=False, seed=1)


@pytest.mark.parametrize("deterministic", [True, False])
@pytest.mark.parametrize("fails", [True, False])
def test_evaluation_does_not_change_global_generators(deterministic, fails):
    env = Arena(4, seed=0, max_steps=5)
    actor = make_actor(TeamSpec.from_env(env).groups["agents"])

    def draw():
        return torch.rand(3).tolist(), np.random.rand(3).tolist(), random.random()

    def seed():
        torch.manual_seed(0)
        np.random.seed(0)
        random.seed(0)

    seed()
    expected = draw()
    seed()
    settings = {"deterministic": deterministic, "longest": 2 if fails else 100}
    if fails:
        with pytest.raises(ConfigError):
            measure(env, actor, **settings)
    else:
        measure(env, actor, **settings)
    assert draw() == expected


def test_result_depends_only_on_the_seed():
    env = Arena(8, seed=0, max_steps=9)
    torch.manual_seed(0)
    actor = make_actor(TeamSpec.from_env(env).groups["agents"])
    first = measure(env, actor, episodes=8, seed=3, deterministic=False)
    env.rollout(5)
    torch.rand(5)
    assert measure(env, actor, episodes=8, seed=3, deterministic=False) == first
    other = Arena(8, seed=77, max_steps=9)
    assert measure(other, actor, episodes=8, seed=3, deterministic=False) == first
    assert measure(env, actor, episodes=8, seed=4, deterministic=False) != first


def test_no_gradients_are_kept():
    env = Arena(4, max_steps=5)
    actor = make_actor(TeamSpec.from_env(env).groups["agents"])
    measure(env, actor)
    assert all(p.grad is None for p in actor.parameters())


class Endless(MatrixGame):
    def _step(self, tensordict):
        out = super()._step(tensordict)
        out["terminated"] = torch.arange(self.num_envs).view(-1, 1) > 1
        return out


def test_invalid_or_endless_episodes_raise():
    with pytest.raises(ConfigError, match="episodes is 0"):
        measure(MatrixGame(2), episodes=0)
    with pytest.raises(ConfigError, match="2 episodes did not end in 20 steps.*max_steps"):
        measure(Endless(4), episodes=4, longest=20)
    assert measure(Endless(4, max_steps=6), episodes=4)["length_mean"] == (6 + 6 + 1 + 1) / 4


def test_discrete_and_continuous_groups_together():
    class Mixed(Lengths):
        def __init__(self):
            super().__init__([2, 3])
            self.register_agent(AgentSpec("owl", 1, Unbounded((1,)), Categorical(3)))

        def _observe(self):
            out = super()._observe()
            out["owl"] = {"observation": torch.zeros(self.num_envs, 1, 1)}
            return out

        def _step(self, tensordict):
            out = super()._step(tensordict)
            out["owl", "reward"] = -torch.ones(self.num_envs, 1, 1)
            return out

    result = measure(Mixed(), episodes=2)
    assert result["owl/episode_reward"] == -2.5
