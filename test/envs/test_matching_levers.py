"""The matching-levers game has its reference returns."""

import pytest
import torch

from torchrl_marl import TeamSpec
from torchrl_marl.envs.toy import MatchingLevers
from torchrl_marl.errors import ConfigError
from torchrl_marl.training.evaluation import evaluate


def returns(env, act):
    return evaluate(env, act, TeamSpec.from_env(env), episodes=env.num_envs)["return_mean"]


def partners(env, first, second):
    """A policy by two functions of the partner's last lever, which is -1 at first."""

    def act(td):
        seen = td["agents", "observation"]
        last = torch.where(seen.sum(-1) > 0, seen.argmax(-1), -1)
        td["agents", "action"] = torch.stack([first(last[:, 0]), second(last[:, 1])], 1)
        return td

    return lambda td: act(td)


def keeps(lever):
    return lambda last: torch.full_like(last, lever)


@pytest.mark.parametrize("kwargs", [{}, {"n_levers": 3, "rounds": 5}, {"max_steps": 3}])
def test_returns_match_the_reference_values(kwargs):
    env = MatchingLevers(8, seed=0, **kwargs)
    assert returns(env, partners(env, keeps(2), keeps(2))) == env.optimal_return
    assert returns(env, partners(env, keeps(2), keeps(1))) == 0
    copies = [
        returns(env, partners(env, lambda last: last.clamp_min(0), keeps(k)))
        for k in range(env.n_levers)
    ]
    assert sum(copies) / env.n_levers == pytest.approx(env.adaptive_return)
    chance = MatchingLevers(4000, seed=0, **kwargs)
    assert returns(chance, None) == pytest.approx(env.random_return, abs=0.1)


def test_observation_is_the_last_lever_of_the_partner():
    env = MatchingLevers(1)
    td = env.reset()
    assert (td["agents", "observation"] == 0).all()
    td["agents", "action"] = torch.tensor([[1, 3]])
    td = env.step(td)["next"]
    assert td["agents", "observation"].argmax(-1).tolist() == [[3, 1]]
    assert td["agents", "reward"].flatten().tolist() == [0, 0]


def test_invalid_arguments_are_refused():
    for wrong in ({"n_levers": 1}, {"rounds": 0}):
        with pytest.raises(ConfigError, match="expected 2 or more levers and 1 or more rounds"):
            MatchingLevers(2, **wrong)


if __name__ == "__main__":
    pytest.main([__file__])
