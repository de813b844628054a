"""The echo environment: correct answers and reference returns."""

import pytest
import torch

from torchrl_marl.envs import check_marl_env
from torchrl_marl.envs.toy import Echo
from torchrl_marl.errors import ConfigError

CASES = [
    {"hop": 0},
    {"hop": 1},
    {"hop": 2, "lag": 0},
    {"hop": 0, "late_spawn": 2, "years": 3},
    {"hop": 1, "late_spawn": 1, "years": 4},
    {"n_agents": 3, "n_symbols": 2, "lag": 1, "max_steps": 5},
]


@pytest.mark.parametrize("kwargs", CASES, ids=str)
def test_returns_match_the_reference_values(kwargs):
    env = Echo(400, seed=0, **kwargs)

    def rewards(act):
        td, total, ended = env.reset(), 0, torch.zeros(400, 1, dtype=torch.bool)
        while not ended.all():
            td = env.step(act(td))["next"]
            total = total + torch.where(ended, 0.0, td["agents", "reward"].mean(1))
            ended = ended | td["done"]
        return total

    def name_right(td):
        return td.set(("agents", "action"), env.answers[..., 0].clamp_min(0))

    best = rewards(name_right)
    torch.testing.assert_close(best, torch.full_like(best, env.optimal_return))
    torch.manual_seed(0)
    returns = rewards(env.rand_action)
    error = 4 * returns.std() / len(returns) ** 0.5
    assert abs(returns.mean() - env.random_return) < error


def test_answers_by_hand():
    env = Echo(1, n_agents=3, n_symbols=4, lag=1, hop=1, years=1, seed=0)  # agent 0 dies first
    seen = []
    td = env.reset()
    for _ in range(3):
        seen.append(td["agents", "observation"][0, :, :4].argmax(-1).tolist())
        asked = env.answers[0, :, -1].tolist()
        td = env.step(env.rand_action(td))["next"]
        # The next living agent's symbol; 0 if alone; dead agents are not asked.
        living = [i for i in range(3) if len(seen) <= i + 1]
        for place, agent in enumerate(living):
            other = living[(place + 1) % len(living)]
            assert asked[agent] == (seen[-1][other] if other != agent else 0)
        assert all(asked[agent] == 0 for agent in range(3) if agent not in living)


def test_no_reward_before_the_lag():
    env = Echo(2, lag=2, hop=0, seed=0)
    td = env.reset()
    for _ in range(2):
        assert (env.answers[..., 0] == -1).all()
        td = env.step(env.rand_action(td))["next"]
        assert (td["agents", "reward"] == 0).all()
    assert (env.answers[..., 0] >= 0).all()


def test_environment_passes_check_marl_env():
    check_marl_env(Echo(3, late_spawn=2, years=3, hop=1, seed=0))


def test_invalid_arguments_are_refused():
    with pytest.raises(ConfigError, match="n_symbols is 1, expected 2 or more"):
        Echo(2, n_symbols=1)


if __name__ == "__main__":
    pytest.main([__file__])
