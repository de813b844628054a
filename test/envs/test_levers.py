"""The lever game: reference returns; an agent observes only its own index."""

import math

import pytest
import torch
from torch.nn.functional import one_hot

from torchrl_marl.envs import check_marl_env
from torchrl_marl.envs.toy import Levers
from torchrl_marl.errors import ConfigError


def mean_reward(env, pull, n_steps=40):
    """Mean reward, and its error, where agents pull ``pull(who)``; each step is an episode."""
    td, rewards = env.reset(), []
    for _ in range(n_steps):
        who = td["agents", "observation"].argmax(-1)
        transition, td = env.step_and_maybe_reset(td.set(("agents", "action"), pull(who)))
        assert transition["next", "terminated"].all()
        rewards.append(transition["next", "agents", "reward"].mean((1, 2)))
    rewards = torch.cat(rewards)
    return rewards.mean(), 4 * rewards.std() / math.sqrt(len(rewards))


def test_levers_by_hand():
    env = Levers(3, n_agents=3, pool=3, seed=0)
    td = env.reset()
    td["agents", "action"] = torch.tensor([[0, 0, 0], [2, 0, 2], [1, 2, 0]])
    reward = env.step(td)["next", "agents", "reward"]
    expected = torch.tensor([1 / 3, 2 / 3, 1.0]).view(3, 1, 1).expand(3, 3, 1)
    torch.testing.assert_close(reward, expected)


@pytest.mark.parametrize("kwargs", [{}, {"n_agents": 3, "pool": 10}], ids=str)
def test_returns_match_the_reference_values(kwargs):
    env = Levers(500, seed=0, **kwargs)
    torch.manual_seed(0)
    players = {
        "random_return": lambda who: torch.randint(env.n_agents, who.shape),
        "silent_return": lambda who: who % env.n_agents,
        "optimal_return": lambda who: who.argsort(-1).argsort(-1),
    }
    for name, pull in players.items():
        mean, error = mean_reward(env, pull)
        assert abs(mean - getattr(env, name)) <= error + 1e-6, name
    assert env.random_return < env.silent_return < env.optimal_return


def test_teams_are_drawn_uniformly_without_replacement():
    env = Levers(3000, n_agents=3, pool=4, seed=1)
    who = env.reset()["agents", "observation"].argmax(-1)
    assert (one_hot(who, 4).sum(1) <= 1).all()
    counts = one_hot(who, 4).float().mean(0)  # of each place
    assert (counts - 1 / 4).abs().max() < 4 * math.sqrt(3 / 16 / 3000)


def test_environment_passes_check_marl_env():
    check_marl_env(Levers(3, n_agents=2, pool=7, seed=0))


def test_invalid_arguments_are_refused():
    with pytest.raises(ConfigError, match="pool is 4, expected 5 or more"):
        Levers(2, pool=4)
    with pytest.raises(ConfigError, match="n_agents is 1, expected 2 or more"):
        Levers(2, n_agents=1)


if __name__ == "__main__":
    pytest.main([__file__])
