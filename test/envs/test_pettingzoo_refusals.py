"""Invalid outputs of PettingZoo's environments, and invalid arguments."""

import gymnasium.spaces as spaces
import numpy as np
import pytest
from played import rollout_of_ones, step_values
from scripted import BOX, Script

from torchrl_marl.envs import PettingZooEnv
from torchrl_marl.errors import ConfigError, MissingExtraError, NonFiniteError, SpecError


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_non_finite_error_names_the_copy_and_the_agent(value):
    world = Script("bob_0 bob_1", [{}, {"shows": {"bob_1": value}}])
    with pytest.raises(NonFiniteError, match="observation of agent 'bob_1' in copy 0"):
        rollout_of_ones(world, 3)
    world = Script("bob_0 bob_1", [{}, {"earns": {"bob_0": value}}])
    with pytest.raises(NonFiniteError, match="reward of agent 'bob_0' in copy 0"):
        rollout_of_ones(world, 3)


def test_non_finite_state_error_names_the_copy():
    class Stateful(Script):
        def state(self):
            return np.array([0.0, np.inf if self.t == 2 else 1.0])

    with pytest.raises(NonFiniteError, match="the state of copy 0"):
        rollout_of_ones(Stateful("bob_0", [{}]), 3, max_steps=5, state="world")


def test_observations_of_dead_agents_are_not_checked():
    world = Script(
        "bob_0 bob_1", [{"agents": "bob_0", "dies": "bob_1", "shows": {"bob_1": np.nan}}]
    )
    assert rollout_of_ones(world, 3, max_steps=3)["next", "bob", "mask"][0, -1].tolist() == [
        True,
        False,
    ]


def test_changing_spaces_are_refused():
    class Growing(Script):
        def observation_space(self, agent):
            return spaces.Box(-100, 100, (2 + (self.episodes > 2),))

    with pytest.raises(SpecError, match="spaces of agent 'bob_0'.*new episode.*pad"):
        rollout_of_ones(Growing("bob_0", [{"agents": "", "dies": "bob_0"}]), 3)


def test_observation_of_wrong_shape_is_refused():
    class Wrong(Script):
        def _observe_agents(self, agents):
            return {a: np.zeros(3) for a in agents}

    with pytest.raises(SpecError, match=r"observation of agent 'bob_0' has shape \[3\].*\[2\]"):
        rollout_of_ones(Wrong("bob_0", [{}]), 1)


@pytest.mark.parametrize(
    "space, value, words",
    [
        (spaces.Box(0, 9, (2,), np.int32), np.array([1.0, 0.5]), "has a 0.5 of float64.*int32"),
        (spaces.Box(0, 255, (2,), np.uint8), np.array([44, 300]), "has a 300 of int64.*uint8"),
        (spaces.Box(0, 255, (2,), np.uint8), [-1, 0], "has a -1 of int64.*uint8"),
        (spaces.MultiDiscrete([2, 2]), np.array([np.nan, 0]), "has a nan of float64"),
        (spaces.Dict({"x": BOX, "y": BOX}), {"x": np.zeros(2)}, "has no 'y' .only 'x'.*its space"),
        (spaces.Dict({"x": BOX}), np.zeros(2), "has no 'x' .ndarray"),
    ],
)
def test_observation_outside_its_space_is_refused(space, value, words):
    world = Script("bob_0", [{}], observation={"bob_0": space})
    world._observe_agents = lambda agents: dict.fromkeys(agents, value)
    with pytest.raises(SpecError, match=f"observation.* of agent 'bob_0' {words}"):
        rollout_of_ones(world, 1)


def test_integer_observations_of_another_dtype_are_accepted():
    world = Script("bob_0", [{}], observation={"bob_0": spaces.Box(0, 255, (2,), np.uint8)})
    assert rollout_of_ones(world, 2, max_steps=2)["next", "bob", "observation"].tolist() == [
        [[[0, 1]], [[0, 2]]]
    ]


def test_non_scalar_rewards_are_refused():
    world = Script("bob_0 bob_1", [{"earns": {"bob_0": [1.5], "bob_1": np.array(2)}}])
    assert step_values(rollout_of_ones(world, 1, max_steps=1)["next"], "bob", "reward") == [
        [1.5, 2.0]
    ]
    world = Script("bob_0 bob_1", [{"earns": {"bob_0": 1.0, "bob_1": np.ones(2)}}])
    with pytest.raises(SpecError, match=r"the reward of agent 'bob_1' has shape \[2\]"):
        rollout_of_ones(world, 1)


def test_space_without_a_fixed_shape_is_refused():
    world = Script("bob_0", [{}], observation={"bob_0": spaces.Sequence(BOX)})
    world._observe_agents = lambda agents: dict.fromkeys(agents, ())
    with pytest.raises(SpecError, match="'bob_0'.*Sequence.*wrap"):
        PettingZooEnv(world)


def test_endless_environment_needs_a_time_limit(monkeypatch):
    monkeypatch.setattr("torchrl_marl.envs.pettingzoo.instance.ENDLESS", 20)
    with pytest.raises(ConfigError, match="^Copy 0 of Script: an episode did not end in 20"):
        rollout_of_ones(Script("bob_0", [{}]), 30)
    assert rollout_of_ones(Script("bob_0", [{}]), 30, max_steps=25)["next", "truncated"].sum() == 1
    world = Script("bob_0", [{}])
    world.max_cycles = 25
    assert rollout_of_ones(world, 24).shape == (1, 24)


@pytest.mark.parametrize(
    "name, words",
    [
        ("mpe2/simple_sprad_v3", "did you mean 'mpe2/simple_spread_v3'"),
        ("sisl/pursuit_v4", "did you mean 'sisl/pursuit-v5'"),
        ("connect_four", "did you mean 'classic/connect_four-v3'"),
        ("nowhere/land", "unknown PettingZoo environment 'nowhere/land'"),
        ("mpe2", "'mpe2' is not an environment.*'mpe2/simple_"),
        ("sisl", "'sisl' is not an environment.*'sisl/multiwalker-v"),
    ],
)
def test_unknown_name_suggests_the_nearest(name, words):
    with pytest.raises(ConfigError, match=words):
        PettingZooEnv(name)


def test_missing_package_error_has_a_pip_line(monkeypatch):
    find_spec = __import__("importlib.util").util.find_spec
    gone = {"mpe2", "magent2"}
    monkeypatch.setattr(
        "importlib.util.find_spec", lambda name, *a: None if name in gone else find_spec(name, *a)
    )
    with pytest.raises(MissingExtraError, match=r"pip install '\.\[pettingzoo\]'"):
        PettingZooEnv("mpe2/simple_spread_v3")
    with pytest.raises(ConfigError, match="pip install magent2"):
        PettingZooEnv("magent2/battle_v4")
    gone.add("pettingzoo")
    with pytest.raises(MissingExtraError, match="PettingZoo is not installed"):
        PettingZooEnv("sisl/pursuit-v5")


@pytest.mark.parametrize(
    "wrong",
    [{"max_steps": 2.5}, {"max_steps": True}, {"max_steps": 0}, {"num_envs": 1.5}, {"workers": -1}],
)
def test_non_integer_arguments_are_refused(wrong):
    name, value = next(iter(wrong.items()))
    with pytest.raises(ConfigError, match=f"{name} is {value}, expected a whole number"):
        PettingZooEnv("mpe2/simple_spread_v3", **wrong)


def test_invalid_arguments_are_refused():
    with pytest.raises(ConfigError, match="n_agents"):
        PettingZooEnv("mpe2/simple_spread_v3", n_agents=3)
    with pytest.raises(ConfigError, match="n_agents with a name or a factory only"):
        PettingZooEnv(Script("bob_0", [{}]), n_agents=3)
    with pytest.raises(ConfigError, match="backend='aec'"):
        PettingZooEnv("classic/connect_four-v3", backend="parallel")
    with pytest.raises(ConfigError, match="expected a name"):
        PettingZooEnv(3)
    with pytest.raises(ConfigError, match="state is 'all'"):
        PettingZooEnv("mpe2/simple_spread_v3", state="all")
    with pytest.raises(ConfigError, match="'reset' or|without reset|callable"):
        PettingZooEnv(dict)


def test_vmas_environment_is_not_taken_for_pettingzoo():
    """It has ``agents``, ``reset`` and ``step``, too."""
    from vmas import make_env as make_vmas

    from torchrl_marl import train

    env = make_vmas("balance", num_envs=2, seed=0)
    with pytest.raises(ConfigError, match="a Environment, expected a name such as 'vmas/balance'"):
        train("vmas_balance_mappo", env=env)
