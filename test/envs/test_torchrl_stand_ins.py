"""TorchRL's environments of SMAC, Melting Pot and Unity, with stand-ins for the environments."""

import pytest
import torch
from torchrl_environments import Engine, MeltingPot, Smac, StarCraft, Substrate, Unity

from torchrl_marl import TeamSpec
from torchrl_marl.envs import make_env
from torchrl_marl.envs.torchrl.env import adapt
from torchrl_marl.errors import ConfigError


def test_smac():
    game = StarCraft(limit=4)
    with pytest.warns(UserWarning, match="cannot be seeded"):
        env = make_env(Smac(env=game), seed=0)
    td = env.rollout(8, break_when_any_done=False)
    assert td["next", "truncated"][0].flatten().tolist() == [False, False, False, True] * 2
    assert not td["next", "terminated"].any()
    assert td["next", "agents", "mask"][0, :4, 0].tolist() == [True, False, False, False]
    assert td["next", "agents", "mask"][0, :, 1:].all()
    assert td["next", "agents", "terminated"][0, :4, 0, 0].tolist() == [False, True, True, True]
    assert td["next", "agents", "reward"][0, 1].flatten().tolist() == [1.0] * 3
    assert td["state"].shape == (1, 8, 7)
    assert all(sent[0] == 0 for sent in game.sent[2:4])  # the no-op of dead agents
    won = adapt(Smac(env=StarCraft(limit=9), categorical_actions=False))
    assert won.rollout(6)["next", "terminated"].flatten().tolist() == [False] * 5 + [True]
    assert TeamSpec.from_env(env).groups["agents"].n_actions == 4


def test_meltingpot():
    env = adapt(MeltingPot(env=Substrate()))
    td = env.rollout(6, break_when_any_done=False)
    assert td["next", "truncated"][0].flatten().tolist() == [False, False, True] * 2
    assert td["next", "agents", "reward"].dtype == torch.float32
    assert td["next", "agents", "reward"][0, 2].flatten().tolist() == [3.0, -3.0]
    assert td["agents", "observation", "RGB"].shape == (1, 6, 2, 4, 4, 3)
    assert TeamSpec.from_env(env).state_spec is None  # an image is no state


@pytest.mark.parametrize("late", [False, True])
def test_unity(late):
    engine = Engine(late)
    env = adapt(Unity(env=engine, categorical_actions=True))
    td = env.rollout(8, break_when_any_done=False)
    end = "truncated" if late else "terminated"
    assert td["next", end][0].flatten().tolist() == [False, False, False, True] * 2
    assert td["next", "group_0", end][0, :4, 0, 0].tolist() == [False, True, True, True]
    assert td["next", "group_0", "mask"][0, :4, 0].tolist() == [True, False, False, False]
    assert td["next", "group_0", "reward"][0, :4, :, 0].tolist() == [
        [1.5, 1.5],
        [1.5, 1.5],
        [0.0, 1.5],
        [0.0, 1.5],
    ]
    assert td["group_0", "observation"].shape == (1, 8, 2, 2)
    assert (td["group_0", "action"] < 2).all()  # the third choice is never legal
    assert [sorted(sent) for sent in engine.sent[:4]] == [[0, 1], [0, 1], [1], [1]]


def test_unity_action_spaces():
    env = adapt(Unity(env=Engine(False, branches=(), continuous=2)))
    assert env.rollout(3)["group_0", "action"].shape == (1, 3, 2, 2)
    env = adapt(Unity(env=Engine(False, branches=(2, 3)), categorical_actions=True))
    assert env.rollout(3)["group_0", "action"].shape == (1, 3, 2, 2)
    env = adapt(Unity(env=Engine(False)))  # one-hot, by default
    action = env.rollout(3)["group_0", "action"]
    assert action.shape == (1, 3, 2, 3) and (action[..., 2] == 0).all()
    assert adapt(Unity(env=Engine(False, branches=(2, 3)))).rollout(3).shape == (1, 3)
    with pytest.raises(ConfigError, match="expected discrete or continuous actions"):
        adapt(Unity(env=Engine(False, continuous=2)))
