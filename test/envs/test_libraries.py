"""The registry of environment libraries, to which users add their own."""

import dataclasses
import sys
import types
from dataclasses import dataclass
from importlib.metadata import EntryPoint

import pytest
import torch
from torchrl.data import Bounded, Unbounded

from torchrl_marl import AgentSpec, train
from torchrl_marl.envs import MarlEnv, check_marl_env, make_env
from torchrl_marl.envs.libraries import (
    LIBRARIES,
    Library,
    environment_rows,
    find_library,
    library_of,
    register_library,
)
from torchrl_marl.errors import ConfigError
from torchrl_marl.recipes import load_config
from torchrl_marl.settings import Count


# A complete custom library of environments.
class Corridor(MarlEnv):
    """Two agents walk along a corridor; the nearer to its end, the better."""

    def __init__(self, name, num_envs, length=5, **kwargs):
        super().__init__(num_envs, **kwargs)
        self.environment_name, self.length = name, length
        self.register_agent(AgentSpec("walker", 2, Unbounded((1,)), Bounded(-1, 1, (1,))))

    def _reset(self, tensordict):
        self.place = torch.rand(self.num_envs, 2, 1)
        return {"walker": {"observation": self.place}}

    def _step(self, tensordict):
        self.place = (self.place + tensordict["walker", "action"]).clamp(0, self.length)
        return {"walker": {"observation": self.place, "reward": self.place / self.length}}


@dataclass(frozen=True)
class CorridorArguments:
    """Arguments of the adapter."""

    length: Count = 5
    """Steps from one end to the other."""


def check(config):
    if config.name != "straight":
        raise ConfigError(f"unknown corridor {config.name!r}; use env.name=straight.")


CORRIDORS = Library(
    "corridors to walk along",
    f"{__name__}:Corridor",
    settings=("num_envs", "max_steps"),
    states=(),
    environments=lambda: ["straight"],
    own_limit=False,
    check=check,
    arguments=f"{__name__}:CorridorArguments",
)


@pytest.fixture
def corridors():
    register_library("corridors", CORRIDORS)
    yield
    LIBRARIES.remove("corridors")


def settings(tmp_path, **kwargs):
    return {
        "env": {"library": "corridors", "name": "straight", "num_envs": 8, "max_steps": 10},
        "total_frames": 160,
        "frames_per_batch": 80,
        "learner": {"minibatch_size": 40},
        "evaluation": {"episodes": 2},
        "logging": {"progress": False},
        "folder": str(tmp_path / "run"),
        **kwargs,
    }


@pytest.mark.usefixtures("corridors")
class TestOnesOwn:
    def test_environment_is_built_by_name(self):
        env = make_env("corridors/straight", num_envs=3, seed=0, max_steps=4, length=7)
        assert (type(env), env.length, env.environment_name) == (Corridor, 7, "straight")
        check_marl_env(env)

    def test_environment_trains(self, tmp_path):
        run = train("vmas_balance_mappo", **settings(tmp_path))
        assert run.config.env.library == "corridors"
        assert run.summary["frames"] == 160
        again = type(run).load(run.folder).evaluate(episodes=2)
        assert again["return_mean"] == run.evaluate(episodes=2)["return_mean"]

    def test_environment_is_listed(self):
        assert ("corridors", "straight") in environment_rows()

    @pytest.mark.parametrize(
        ("texts", "message"),
        [
            (["env.name=bent"], "unknown corridor 'bent'; use env.name=straight."),
            (["env.kwargs.length=0"], "env.kwargs.length is 0, expected 1 or more"),
            (["env.kwargs.length=long"], "env.kwargs.length is 'long', expected an integer"),
            (["env.info=true"], "env.info is true, which is read only where env.library is vmas"),
            (["env.group_map={a: [walker_0]}"], "env.group_map is .* which is read only where"),
            (["env.state=observations"], "expected null, since corridors environments decide"),
            (["env.library=corridor"], "did you mean 'corridors'"),
        ],
    )
    def test_settings_are_checked(self, tmp_path, texts, message):
        base = {**settings(tmp_path), "recipe": "corridor"}
        with pytest.raises(ConfigError, match=message):
            load_config(base, texts)

    @pytest.mark.parametrize("unlisted", [False, True])
    def test_environments_that_are_not_listed(self, tmp_path, unlisted):
        other = dataclasses.replace(CORRIDORS, check=None, unlisted=unlisted)
        LIBRARIES.remove("corridors")
        register_library("corridors", other)
        base = {**settings(tmp_path), "recipe": "corridor"}
        if unlisted:
            assert load_config(base, ["env.name=bent"]).env.name == "bent"
        else:
            with pytest.raises(
                ConfigError, match="unknown environment 'bent' of corridors; expected on"
            ):
                load_config(base, ["env.name=bent"])

    def test_registering_the_same_name_again_raises(self):
        with pytest.raises(ConfigError, match="'corridors' is registered already"):
            register_library("corridors", Library("others", "other:Env"))


def test_libraries_from_package_entry_points(monkeypatch):
    module = types.ModuleType("corridor_package")
    module.LIBRARY, module.SOMETHING = CORRIDORS, 3
    monkeypatch.setitem(sys.modules, "corridor_package", module)

    def points(group):
        assert group == "torchrl_marl.libraries"
        places = {"halls": "LIBRARY", "walls": "SOMETHING", "gone": "NOWHERE"}
        return [EntryPoint(n, f"corridor_package:{p}", group) for n, p in places.items()]

    monkeypatch.setattr("torchrl_marl.settings.registry.entry_points", points)
    assert make_env("halls/straight", num_envs=2, seed=0).num_envs == 2
    with pytest.raises(ConfigError, match="'walls' is 3, expected a torchrl_marl.envs.libraries"):
        find_library("walls")
    with pytest.raises(ConfigError, match="'gone' needs corridor_package:NOWHERE, which cannot"):
        find_library("gone")


def test_unknown_library_raises():
    with pytest.raises(ConfigError, match="'vmass'; did you mean 'vmas'.*expected one of vmas"):
        make_env("vmass/balance")


def test_library_of_an_environment_object():
    class World:
        possible_agents = ["a"]

        def reset(self): ...

        def step(self, actions): ...

    class OfJax:
        def step_env(self): ...

    assert library_of(World()) == library_of(World) == library_of(lambda: World()) == "pettingzoo"
    assert library_of(OfJax()) == "jaxmarl"
    assert library_of(3) is library_of("world") is library_of(Corridor) is None


@pytest.mark.parametrize(
    ("library", "name", "text", "message"),
    [
        ("jaxmarl", "overcooked", "shaped_reward=much", "shaped_reward is 'much', expected a num"),
        ("jaxmarl", "overcooked", "shaped_reward_steps=0", "expected 1 or more"),
        ("pettingzoo", "mpe2/simple_spread_v3", "backend=serial", "expected auto, parallel or aec"),
        ("isaaclab", "Isaac-X", "terminal_observations=3", "expected true or false"),
    ],
)
def test_arguments_of_an_adapter_are_type_checked(library, name, text, message):
    texts = [f"env.library={library}", f"env.name={name}", f"env.kwargs.{text}"]
    with pytest.raises(ConfigError, match=message):
        load_config("vmas_balance_mappo", texts)
