"""make_env: from a config to an environment."""

import pytest
import torch

from torchrl_marl.envs import EnvConfig, VmasEnv, make_env
from torchrl_marl.envs.toy import TOY_ENVS, Arena
from torchrl_marl.errors import ConfigError


def test_vmas():
    pytest.importorskip("vmas")
    config = EnvConfig(num_envs=4, max_steps=7, state="observations", kwargs={"n_agents": 2})
    env = make_env(config, seed=3)
    assert isinstance(env, VmasEnv)
    assert env.batch_size == (4,)
    td = env.rollout(7, break_when_any_done=False)
    assert td["agents", "observation"].shape[2] == 2
    assert "state" in td.keys()
    assert ("agents", "info") not in td.keys(True)
    assert td["next", "truncated"].any()
    again = make_env(config, seed=3).reset()
    assert torch.equal(again["state"], td["state"][:, 0])
    assert make_env(config, seed=3, num_envs=2).batch_size == (2,)


@pytest.mark.parametrize("name", TOY_ENVS)
def test_toys(name):
    config = EnvConfig(library="toy", name=name, num_envs=3, max_steps=None)
    env = make_env(config, seed=0)
    assert type(env) is TOY_ENVS[name]
    assert env.max_steps is None
    assert env.rollout(4).batch_size[0] == 3


def test_arena_has_continuous_and_discrete_actions():
    for continuous in (True, False):
        config = EnvConfig(library="toy", name="arena", continuous_actions=continuous)
        env = make_env(config, seed=0, num_envs=2)
        assert isinstance(env, Arena)
        assert env.team.groups["agents"].discrete != continuous


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"library": "vma"}, "did you mean 'vmas'"),
        (
            {"library": "toy", "name": "arna"},
            "unknown toy environment 'arna'; did you mean 'arena'",
        ),
        ({"library": "toy", "name": "arena", "kwargs": {"n_agent": 2}}, "did you mean 'n_agents'"),
        ({"library": "toy", "name": "arena", "kwargs": {"num_envs": 2}}, "set env.num_envs"),
        ({"name": "blance"}, "did you mean 'balance'"),
        ({"kwargs": {"n_agent": 2}}, "did you mean 'n_agents'"),
        ({"kwargs": {"num_envs": 2}}, "no argument 'num_envs'"),
        ({"state": "everything"}, "expected observations or null"),
    ],
)
def test_invalid_config_raises(config, message):
    with pytest.raises(ConfigError, match=message):
        make_env(EnvConfig(**config), seed=0, num_envs=2)
