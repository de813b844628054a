"""JaxMARL's environments: invalid arguments are refused, missing packages are named."""

import importlib.util

import pytest
from contract import base_of
from jax_environments import SMAX, SPREAD, spread
from torchrl.envs.utils import MarlGroupMapType

from torchrl_marl.envs import JaxMarlEnv
from torchrl_marl.errors import ConfigError, MissingExtraError, SpecError

jax = pytest.importorskip("jax")
jaxmarl = pytest.importorskip("jaxmarl")

pytestmark = pytest.mark.environments


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"world": "MPE_simple_spred_v3"}, "did you mean 'MPE_simple_spread_v3'"),
        ({"world": SMAX, "scenario": "3n"}, "no scenario '3n'; did you mean '3m'"),
        ({"world": "overcooked", "layout": "cramped_rom"}, "did you mean 'cramped_room'"),
        ({"world": SPREAD, "n_agents": 2}, "no argument 'n_agents'; did you mean 'num_agents'"),
        ({"world": SMAX, "n_allies": 2}, "cannot be built with .*n_allies"),
        ({"world": SPREAD, "state": "worlds"}, "state is 'worlds'"),
        ({"world": "hanabi", "state": "world"}, "has no state for a central critic"),
        ({"world": SPREAD, "shaped_reward": 1.0}, "shaped_reward is 1.0, but"),
        ({"world": SPREAD, "max_steps": 0}, "max_steps is 0"),
        ({"world": object()}, "the environment is a object"),
        ({"world": SPREAD, "group_map": {"a": ["agent_0", "agent_1"]}}, "'agent_2' has no group"),
        ({"world": SPREAD, "group_map": {"a": ["agnt_0"]}}, "did you mean 'agent_0'"),
        ({"world": SPREAD, "group_map": {"a": ["agent_0"] * 2}}, "'agent_0' twice"),
    ],
)
def test_invalid_arguments_are_refused(arguments, message):
    with pytest.raises(ConfigError, match=message):
        JaxMarlEnv(arguments.pop("world"), num_envs=2, **arguments)


class Strange:
    """Returns observations under names that are not its agents."""

    agents = ["a", "b"]

    def reset(self, key):
        return {"x": jax.numpy.zeros(2), "y": jax.numpy.zeros(2)}, jax.numpy.zeros(())

    def step_env(self, key, state, actions): ...


def test_environment_without_observations_by_agent_is_refused():
    with pytest.raises(
        SpecError, match=r"'Strange' returns its observations as a dict of \['x', 'y'"
    ):
        JaxMarlEnv(Strange(), num_envs=2)
    with pytest.raises(ConfigError, match="num_agents cannot be applied to an environment"):
        JaxMarlEnv(jaxmarl.make(SPREAD), num_envs=2, num_agents=2)


@pytest.mark.parametrize(
    ("package", "world", "error", "line"),
    [
        ("jaxmarl", SPREAD, MissingExtraError, r"'\.\[jaxmarl\]'"),
        ("brax", "ant_4x2", ConfigError, r"'jaxmarl\[mabrax\]'"),
    ],
)
def test_missing_package_error_has_a_pip_line(package, world, error, line, monkeypatch):
    found = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == package else found(name)
    )
    with pytest.raises(error, match=f"pip install {line}"):
        JaxMarlEnv(world, num_envs=2)


def test_snapshot_of_another_environment_is_refused():
    first, second = spread(num_envs=2), spread(num_envs=2, num_agents=2)
    with pytest.raises(RuntimeError, match="does not fit"):
        base_of(second).restore(first.snapshot())


def test_all_agents_in_one_group():
    env = spread(num_envs=2, group_map=MarlGroupMapType.ALL_IN_ONE_GROUP)
    assert env.group_map == {"agents": ["agent_0", "agent_1", "agent_2"]}


def test_package_required_by_an_environment_is_named():
    with pytest.raises(ConfigError, match=r"requires the jaxrobotarium package.*; install it\."):
        JaxMarlEnv("JaxRobotarium_rware", num_envs=2)
