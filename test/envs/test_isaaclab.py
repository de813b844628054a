"""IsaacLabEnv on Isaac Lab's own package, with stand-ins for the simulator below it."""

import importlib.metadata
import sys

import pytest
import torch
from contract import Case, EnvContract
from isaac_environments import (
    NAMES,
    PENDULUM,
    isaac_stand_ins,
    make_pendulum,
    make_robots,
    make_robots_task,
    values_of_first_env,
)
from torchrl.data import Bounded, Categorical, Unbounded
from torchrl.envs import TransformedEnv

import torchrl_marl
from torchrl_marl.collectors import RolloutCollector
from torchrl_marl.envs import IsaacLabEnv, PadAgents, make_env
from torchrl_marl.errors import ConfigError, SpecError, UserError
from torchrl_marl.recipes import read_config
from torchrl_marl.specs.groups import is_lazy

RECIPE = "isaaclab_cart_double_pendulum_mappo"


@pytest.fixture(scope="module")
def isaac():
    with isaac_stand_ins() as isaac:
        yield isaac


def convoy(isaac, num_envs=5, seed=0, max_steps=None, states=-1, **kwargs):
    """Two trucks and a drone with observations and actions of different sizes."""
    from gymnasium.spaces import Box

    settings = {
        "possible_agents": ["truck_0", "truck_1", "drone_0"],
        "observation_spaces": {"truck_0": 3, "truck_1": 3, "drone_0": 5},
        "action_spaces": {"truck_0": Box(-1, 1, (2,)), "truck_1": Box(-1, 1, (2,)), "drone_0": 1},
        "state_space": states,
    }
    return make_robots(isaac, num_envs, seed, max_steps, settings, **kwargs)


UNSAVED = {"saved": False, "rows": False}
ALL = {"all": ["truck_0", "truck_1", "drone_0"]}
CASES = {
    "pendulum": lambda isaac: Case(
        lambda *args: make_pendulum(isaac, *args, state="world"), agent_done=True, **UNSAVED
    ),
    "robots": lambda isaac: Case(
        lambda *args: make_robots(isaac, *args, state="world", action_clip=2.0, action_scale=None),
        agent_done=True,
        **UNSAVED,
    ),
    "convoy_lazy": lambda isaac: Case(
        lambda *args: convoy(isaac, *args, state="observations", group_map=ALL),
        agent_done=True,
        lazy=True,
        **UNSAVED,
    ),
    "convoy_padded": lambda isaac: Case(
        lambda *args: TransformedEnv(convoy(isaac, *args, group_map=ALL), PadAgents()),
        agent_done=True,
        state=False,
        **UNSAVED,
    ),
}


OWN_STATES = {"truck_0": 3, "truck_1": 3, "drone_0": 2}
CASES |= {
    "own_states_lazy": lambda isaac: Case(
        lambda *args: convoy(isaac, *args, state="world", states=OWN_STATES, group_map=ALL),
        agent_done=True,
        state=False,
        lazy=True,
        **UNSAVED,
    ),
}


@pytest.mark.environments
class TestContract(EnvContract):
    @pytest.fixture(scope="class", params=CASES)
    def case(self, isaac, request):
        return CASES[request.param](isaac)


# -------------------------------------------------------------------------------------- layout


def test_agents_of_an_isaac_lab_task_are_groups(isaac):
    env = make_pendulum(isaac, 6, state="world")
    assert type(env.task).__module__.startswith("isaaclab_tasks.")
    assert env.group_map == {"cart": ["cart"], "pendulum": ["pendulum"]}
    td = env.rollout(3)
    assert td["cart", "observation"].shape == (6, 3, 1, 4)
    assert td["next", "pendulum", "reward"].shape == (6, 3, 1, 1)
    assert td["state"].shape == td["next", "state"].shape == (6, 3, 7)
    joined = [td["next", group, "observation"].flatten(2) for group in env.group_map]
    assert torch.equal(td["next", "state"], torch.cat(joined, -1))
    again = make_env(f"isaaclab/{PENDULUM}", num_envs=6, seed=0, action_scale=1.0, state="world")
    assert torch.equal(again.reset()["state"], td["state"][:, 0])


def test_robots_of_one_kind_are_one_group(isaac):
    env = make_robots(isaac, state="world")
    assert env.group_map == {"robot": NAMES}
    td = env.rollout(4)
    # Observation: position, step, number. State: the positions of all.
    assert torch.equal(td["robot", "observation"][..., 0], td["state"])
    assert td["robot", "observation"][2, 3, :, 1].tolist() == [3.0] * 4
    assert td["robot", "observation"][2, 3, :, 2].tolist() == [0.0, 1.0, 2.0, 3.0]
    # A robot that ended before the others gets no more reward.
    living = ~td["robot", "done"].squeeze(-1)
    earned = torch.where(living, td["next", "state"], 0.0)
    assert torch.equal(td["next", "robot", "reward"].squeeze(-1), earned)
    assert living.any()


def test_different_robots_get_own_groups_or_a_heterogeneous_one(isaac):
    sizes = dict.fromkeys(NAMES, 3) | {"robot_3": 4}
    env = make_robots(isaac, settings={"observation_spaces": sizes})
    assert env.group_map == {name: [name] for name in NAMES}
    env = convoy(isaac, group_map=ALL, state="world")
    td = env.rollout(3)
    assert is_lazy(td["all"])
    assert [x["observation"].shape[-1] for x in td["all"].unbind(-1)] == [3, 3, 5]
    assert torch.equal(td["state"], torch.cat([x["observation"] for x in td["all"].unbind(-1)], -1))
    env = convoy(isaac)
    assert env.group_map == {"truck": ["truck_0", "truck_1"], "drone": ["drone_0"]}


def test_robots_have_agent_states(isaac):
    """A size for each agent in the task's state_space, and a dict from its state()."""
    env = convoy(isaac, state="world", states=OWN_STATES)
    assert env.group_map == {"truck": ["truck_0", "truck_1"], "drone": ["drone_0"]}
    assert env.team.state_spec is None
    td = env.rollout(3)
    place = torch.cat([td[group, "observation"][..., 0] for group in ("truck", "drone")], -1)
    x, y, z = place.unbind(-1)
    assert torch.equal(td["truck", "state"][:, :, 0], torch.stack([x, x - y, x - z], -1))
    assert torch.equal(td["drone", "state"][:, :, 0], torch.stack([z, z - y], -1))
    # With states of different sizes, trucks are groups of one; in one group they are two kinds.
    sizes = OWN_STATES | {"truck_1": 1}
    split = ["truck_0", "truck_1", "drone"]
    assert list(convoy(isaac, state="world", states=sizes).group_map) == split
    env = convoy(isaac, state="world", states=sizes, group_map=ALL)
    assert [x["state"].shape[-1] for x in env.reset()["all"].unbind(-1)] == [3, 1, 2]
    # A state that is not requested has no effect.
    assert list(convoy(isaac, states=sizes).group_map) == ["truck", "drone"]


def test_last_agent_state_is_that_before_the_reset(isaac):
    env = make_robots(
        isaac, max_steps=2, state="world", settings={"state_space": dict.fromkeys(NAMES, 1)}
    )
    td = env.rollout(4, break_when_any_done=False)
    ended = td["next", "done"].squeeze(-1)
    assert ended.any()
    after = td["next", "robot", "state"]
    assert torch.equal(after[..., 0], td["next", "robot", "observation"][..., 0])
    assert (after[:, 1] != td["robot", "state"][:, 2]).all()


def test_discrete_actions_are_passed_in_the_format_of_the_task(isaac):
    settings = {"action_spaces": {name: {3} for name in NAMES}}
    env = make_robots(isaac, settings=settings, action_scale=None)
    assert env.full_action_spec["robot", "action"].shape == (5, 4)
    assert isinstance(env.full_action_spec["robot", "action"], Categorical)
    env.rollout(2)
    assert env.task.actions["robot_2"].shape == (5, 1)
    assert env.task.actions["robot_2"].dtype == torch.int64


def test_dict_observations_are_stacked_leaf_by_leaf(isaac):
    from gymnasium.spaces import Box, Dict

    space = Dict({"pose": Box(-9, 9, (2,)), "goal": Box(-9, 9, (1,))})
    task = make_robots_task(isaac)
    task.observation_spaces = dict.fromkeys(NAMES, space)
    seen = task._get_observations
    task._get_observations = lambda: {
        name: {"pose": x[:, :2], "goal": x[:, 2]} for name, x in seen().items()
    }
    env = IsaacLabEnv(task, action_scale=1.0, seed=0, max_steps=3, state="observations")
    td = env.rollout(5, break_when_any_done=False)
    assert td["next", "robot", "observation", "pose"].shape == (5, 5, 4, 2)
    assert td["next", "robot", "observation", "goal"].shape == (5, 5, 4, 1)
    assert td["state"].shape == (5, 5, 12)


# ------------------------------------------------------------------------------------- actions


def test_unbounded_actions_are_scaled_or_clipped(isaac):
    env = make_robots(isaac, action_scale={"robot": 20.0, "robot_1": 3.0})
    spec = env.full_action_spec["robot", "action"]
    assert isinstance(spec, Bounded)
    assert (spec.space.high == 1).all() and (spec.space.low == -1).all()
    td = env.reset()
    env.step(td.set(("robot", "action"), torch.full((5, 4, 1), 0.5)))
    assert [env.task.actions[name][0].item() for name in NAMES] == [10.0, 1.5, 10.0, 10.0]
    env = make_robots(isaac, action_scale=None, action_clip=2.0)
    assert isinstance(env.full_action_spec["robot", "action"], Unbounded)
    action = torch.tensor([[-7.0], [-1.0], [1.5], [9.0]]).expand(5, 4, 1)
    env.step(env.reset().set(("robot", "action"), action))
    assert [env.task.actions[name][0].item() for name in NAMES] == [-2.0, -1.0, 1.5, 2.0]
    assert action[0].flatten().tolist() == [-7.0, -1.0, 1.5, 9.0]


# --------------------------------------------------------------------------------- the wrapper


def test_wrapping_again_replaces_patches_and_close_restores(isaac):
    task = make_robots_task(isaac, script={})
    first = IsaacLabEnv(task, action_scale=1.0, max_steps=2)
    assert values_of_first_env(first, 3, "done", None) == [[0], [1], [0]]
    second = IsaacLabEnv(task, action_scale=1.0, max_steps=4)
    assert values_of_first_env(second, 4, "done", None) == [[0], [0], [0], [1]]
    second.close()
    assert task._is_closed and second.is_closed
    assert not {"_reset_idx", "_get_dones"} & set(vars(task))


@pytest.mark.environments
def test_training_works_with_one_simulation_per_process(isaac, monkeypatch, tmp_path):
    """Isaac Sim allows no more; the recipe learns on the stand-in's physics."""
    monkeypatch.setattr(isaac.simulator.SimulationContext, "exclusive", True)
    isaac.simulator.SimulationContext.clear_instance()
    cells = {"num_cells": [32, 32]}
    overrides = {
        "total_frames": 24_576,
        "frames_per_batch": 2048,
        "env": {"num_envs": 128},
        "learner": {"lr": 0.003, "minibatch_size": 1024, "actor": cells, "critic": cells},
        "evaluation": {"episodes": 128},
        "logging": {"progress": False},
        "folder": str(tmp_path / "run"),
    }
    run = torchrl_marl.train(read_config(RECIPE, overrides))
    assert run.summary["return_after"] > run.summary["return_before"] + 40
    assert isaac.simulator.SimulationContext.instance() is None  # it was closed


@pytest.mark.environments
def test_custom_isaac_lab_task_trains(isaac, tmp_path):
    env = convoy(isaac, 8, group_map=ALL, max_steps=6)
    run = torchrl_marl.train(
        "toy_arena_mappo",
        env=env,
        total_frames=160,
        frames_per_batch=80,
        learner={"minibatch_size": 40, "num_epochs": 1},
        evaluation={"episodes": 8},
        logging={"progress": False},
        folder=str(tmp_path / "run"),
    )
    assert run.summary["frames"] == 160


def test_rollout_collector_on_isaac_lab(isaac):
    env = make_robots(isaac, 6, max_steps=4)
    collector = RolloutCollector(env, frames_per_batch=60, total_frames=120)
    batches = list(collector)
    assert [batch.shape for batch in batches] == [(6, 10)] * 2
    ids = batches[0]["collector", "traj_ids"]
    assert (ids[:, 4] != ids[:, 3]).all()
    assert "env" in collector.state_dict() and collector.state_dict()["env"] is None


# ------------------------------------------------------------------------------------ bad input

REFUSED = {
    "no range": ({"action_scale": None}, "robot_0' is unbounded and has no range"),
    "two ranges": ({"action_clip": 1.0}, "two ranges"),
    "a range of nobody": ({"action_scale": {"robt": 1.0}}, "did you mean 'robot'"),
    "no number": ({"action_scale": -1.0}, "action_scale is -1.0, expected a number above 0"),
    "no such state": ({"state": "all"}, "expected 'observations', 'world' or None"),
    "no state": ({"state": "world", "settings": {"state_space": 0}}, "state_space is 0"),
    "states of some": (
        {"state": "world", "settings": {"state_space": {"robot_0": 2}}},
        r"the keys \['robot_0'\], expected its agents",
    ),
    "no such agent": ({"group_map": {"a": ["robot_9"]}}, "'robot_9'"),
    "an agent without a group": ({"group_map": {"a": NAMES[:3]}}, "'robot_3' has no group"),
    "no such argument": ({"max_step": 3}, "did you mean 'max_steps'"),
    "no steps": ({"max_steps": 0}, "max_steps is 0"),
    "another device": ({"device": "cuda:0"}, "the given task runs on cpu"),
}


@pytest.mark.parametrize("kwargs, message", REFUSED.values(), ids=REFUSED)
def test_invalid_arguments_are_refused(isaac, kwargs, message):
    with pytest.raises(ConfigError, match=message):
        make_robots(isaac, **kwargs)


def test_mismatched_tasks_num_envs_and_devices_are_refused(isaac):
    task = make_robots_task(isaac)
    with pytest.raises(ConfigError, match="num_envs is 3, but the given task has 5"):
        IsaacLabEnv(task, num_envs=3, action_scale=1.0)
    with pytest.raises(ConfigError, match="a dict, expected an Isaac Lab"):
        IsaacLabEnv({}, action_scale=1.0)
    with pytest.raises(ConfigError, match="the task runs on cpu"):
        IsaacLabEnv(task, action_scale=1.0).to("cuda")
    assert IsaacLabEnv(task, action_scale=1.0).to("cpu").num_envs == 5
    with pytest.raises(ConfigError, match="all of this task's are bounded"):
        settings = {"action_spaces": {name: {3} for name in NAMES}}
        make_robots(isaac, settings=settings, action_scale=1.0)


def test_observations_that_contradict_the_spaces_raise(isaac):
    env = make_robots(isaac)
    env.task._get_observations = lambda: {name: torch.zeros(5, 2) for name in NAMES}
    with pytest.raises(SpecError, match=r"'robot_0' has shape \[5, 2\], expected \[5, 3\]"):
        env.reset()
    env = make_robots(isaac)
    env.reset()
    seen = env.task._get_observations()
    env.task._get_observations = lambda: {**seen, "robot_7": seen["robot_0"]}
    with pytest.raises(SpecError, match="'robot_7', which is not among its agents"):
        env.rand_step(env.reset())


def test_states_that_contradict_the_state_space_raise(isaac):
    env = make_robots(isaac, state="world", settings={"state_space": dict.fromkeys(NAMES, 2)})
    states = env.task._get_states()
    for wrong, message in {
        "whole": (env.task.x, "its state is a Tensor, expected a dict"),
        "short": ({**states, "robot_0": torch.zeros(5, 1)}, r"the state of 'robot_0' has shape"),
        "foreign": ({**states, "robot_7": states["robot_0"]}, "'robot_7', which is not among"),
        "missing": ({"robot_0": states["robot_0"]}, "its state lacks 'robot_1'"),
    }.values():
        env.task._get_states = lambda wrong=wrong: wrong
        with pytest.raises(SpecError, match=message):
            env.reset()


def test_task_names_and_settings_are_checked(isaac):
    with pytest.raises(ConfigError, match=f"did you mean '{PENDULUM}'"):
        IsaacLabEnv("Isaac-Cart-Double-Pendulum-v0", num_envs=2)
    with pytest.raises(ConfigError, match="did you mean 'episode_length_s'"):
        make_pendulum(isaac, episode_length=2)
    with pytest.raises(ConfigError, match="does not take max_cart_pos='far'"):
        make_pendulum(isaac, max_cart_pos="far")
    with pytest.raises(ConfigError, match=f"is '{PENDULUM}' in the Isaac Lab that is installed"):
        IsaacLabEnv("Isaac-Pendulum-MARL-Direct", num_envs=2)
    env = make_pendulum(isaac, episode_length_s=1, sim={"dt": 0.01})
    assert (env.task.cfg.episode_length_s, env.task.cfg.sim.dt) == (1.0, 0.01)
    assert env.task.max_episode_length == 50


def test_usd_path_replaces_the_file_of_the_robot(isaac, tmp_path):
    """In 2.3 the robot is beside the scene, and the ground is no asset."""
    with pytest.raises(ConfigError, match="there is no file"):
        make_pendulum(isaac, usd_path=str(tmp_path / "robot.usd"))
    (tmp_path / "robot.usd").write_text("")
    env = make_pendulum(isaac, usd_path=str(tmp_path / "robot.usd"))
    assert env.task.cfg.robot_cfg.spawn.usd_path == str(tmp_path / "robot.usd")
    with pytest.raises(ConfigError, match=r"no asset 'ground'.*expected one of \['robot'\]"):
        make_pendulum(isaac, usd_path={"ground": str(tmp_path / "robot.usd")})
    with pytest.raises(ConfigError, match="usd_path is for tasks by name"):
        make_robots(isaac, usd_path=str(tmp_path / "robot.usd"))


@pytest.mark.parametrize(
    "version, advice", [(None, "Isaac Lab 3.0"), ("2.3.2", "AppLauncher"), ("3.0.0", "needs no")]
)
def test_missing_isaac_lab_error_gives_advice(monkeypatch, version, advice):
    """The launcher is named only for versions that need one."""
    pytest.importorskip("gymnasium")

    def installed(name):
        if version is None:
            raise importlib.metadata.PackageNotFoundError(name)
        return version

    monkeypatch.setattr(importlib.metadata, "version", installed)
    monkeypatch.setitem(sys.modules, "isaaclab_tasks", None)
    with pytest.raises(UserError, match=advice) as caught:
        make_env("isaaclab/Isaac-Nothing-v0", action_scale=1.0)
    assert isinstance(caught.value, ImportError)
    assert "isaaclab_tasks cannot be imported" in str(caught.value)
    assert ("AppLauncher" in str(caught.value)) == (version == "2.3.2")
    assert read_config(RECIPE).env.kwargs == {"action_scale": 1.0}
