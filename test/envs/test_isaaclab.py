"""Isaac Lab's own package, with stand-ins for the simulator below it, as it comes to a team."""

import gc
import math
import sys
from types import SimpleNamespace

import pytest
import torch
from contract import Case, EnvContract, asking_reset, draw_actions, reset_some
from isaac import tasks
from isaac.standins import HOW, isaac_lab, source_of_isaac_lab
from operations import CountOperations
from torchrl.data import Bounded, Categorical, Unbounded
from torchrl.envs import TransformedEnv

import torchrl_marl
from torchrl_marl.collectors import RolloutCollector
from torchrl_marl.envs import IsaacLabEnv, PadAgents, make_env
from torchrl_marl.envs.agents.life_cycle import GroupFlags
from torchrl_marl.envs.isaaclab.ends import Ends
from torchrl_marl.errors import ConfigError, SpecError, UserError
from torchrl_marl.recipes import read_config
from torchrl_marl.stacking import is_lazy

PENDULUM = "Isaac-Cart-Double-Pendulum-Direct-v0"
RECIPE = "isaaclab_cart_double_pendulum_mappo"
NAMES = [f"robot_{i}" for i in range(4)]


@pytest.fixture(scope="module")
def isaac():
    source = source_of_isaac_lab()
    if source is None:
        pytest.skip(HOW)
    pytest.importorskip("gymnasium")
    before = set(sys.modules)
    with isaac_lab(source) as simulator:
        yield SimpleNamespace(simulator=simulator, **vars(tasks.define()))
        gc.collect()
    left = {name.partition(".")[0] for name in set(sys.modules) - before}
    assert not left & {"isaaclab", "isaaclab_tasks", "omni", "pxr", "carb", "warp", "toml"}


def pendulum(isaac, num_envs=5, seed=0, max_steps=None, **kwargs):
    kwargs = {"action_scale": 1.0, "device": "cpu", **kwargs}
    return IsaacLabEnv(PENDULUM, num_envs=num_envs, seed=seed, max_steps=max_steps, **kwargs)


def task_of_robots(isaac, num_envs=5, **settings):
    cfg = isaac.RobotsCfg()
    cfg.scene.num_envs = num_envs
    for key, value in settings.items():
        setattr(cfg, key, value)
    return isaac.Robots(cfg)


def robots(isaac, num_envs=5, seed=0, max_steps=None, settings=None, **kwargs):
    task = task_of_robots(isaac, num_envs, **(settings or {}))
    kwargs = {"action_scale": 1.0, **kwargs}
    return IsaacLabEnv(task, seed=seed, max_steps=max_steps, **kwargs)


def convoy(isaac, num_envs=5, seed=0, max_steps=None, **kwargs):
    """Two trucks and a drone, which see and do more and less."""
    from gymnasium.spaces import Box

    settings = {
        "possible_agents": ["truck_0", "truck_1", "drone_0"],
        "observation_spaces": {"truck_0": 3, "truck_1": 3, "drone_0": 5},
        "action_spaces": {"truck_0": Box(-1, 1, (2,)), "truck_1": Box(-1, 1, (2,)), "drone_0": 1},
        "state_space": -1,
    }
    return robots(isaac, num_envs, seed, max_steps, settings, **kwargs)


UNSAVED = {"saved": False, "rows": False}
ALL = {"all": ["truck_0", "truck_1", "drone_0"]}
CASES = {
    "pendulum": lambda isaac: Case(
        lambda *args: pendulum(isaac, *args, state="world"), agent_done=True, **UNSAVED
    ),
    "robots": lambda isaac: Case(
        lambda *args: robots(isaac, *args, state="world", action_clip=2.0, action_scale=None),
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


class TestContract(EnvContract):
    @pytest.fixture(scope="class", params=CASES)
    def case(self, isaac, request):
        return CASES[request.param](isaac)


# -------------------------------------------------------------------------------------- layout


def test_isaac_labs_own_task_has_its_agents_as_groups(isaac):
    env = pendulum(isaac, 6, state="world")
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
    env = robots(isaac, state="world")
    assert env.group_map == {"robot": NAMES}
    td = env.rollout(4)
    # What each sees: where it is, the step, its number. The state: where all are.
    assert torch.equal(td["robot", "observation"][..., 0], td["state"])
    assert td["robot", "observation"][2, 3, :, 1].tolist() == [3.0] * 4
    assert td["robot", "observation"][2, 3, :, 2].tolist() == [0.0, 1.0, 2.0, 3.0]
    # A robot that ended alone earns nothing more.
    living = ~td["robot", "done"].squeeze(-1)
    earned = torch.where(living, td["next", "state"], 0.0)
    assert torch.equal(td["next", "robot", "reward"].squeeze(-1), earned)
    assert living.any()


def test_robots_that_differ_are_alone_or_one_heterogeneous_group(isaac):
    sizes = dict.fromkeys(NAMES, 3) | {"robot_3": 4}
    env = robots(isaac, settings={"observation_spaces": sizes})
    assert env.group_map == {name: [name] for name in NAMES}
    env = convoy(isaac, group_map=ALL, state="world")
    td = env.rollout(3)
    assert is_lazy(td["all"])
    assert [x["observation"].shape[-1] for x in td["all"].unbind(-1)] == [3, 3, 5]
    assert torch.equal(td["state"], torch.cat([x["observation"] for x in td["all"].unbind(-1)], -1))
    env = convoy(isaac)
    assert env.group_map == {"truck": ["truck_0", "truck_1"], "drone": ["drone_0"]}


def test_discrete_actions_reach_the_task_as_it_takes_them(isaac):
    settings = {"action_spaces": {name: {3} for name in NAMES}}
    env = robots(isaac, settings=settings, action_scale=None)
    assert env.full_action_spec["robot", "action"].shape == (5, 4)
    assert isinstance(env.full_action_spec["robot", "action"], Categorical)
    env.rollout(2)
    assert env.task.actions["robot_2"].shape == (5, 1)
    assert env.task.actions["robot_2"].dtype == torch.int64


def test_dict_observations_are_stacked_leaf_by_leaf(isaac):
    from gymnasium.spaces import Box, Dict

    space = Dict({"pose": Box(-9, 9, (2,)), "goal": Box(-9, 9, (1,))})
    task = task_of_robots(isaac)
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


# ---------------------------------------------------------------------------------- last seen


class Twin:
    """The same simulation, which is never reset: told where each new episode begins."""

    def __init__(self, isaac, env):
        self.own = env.task.robot.data
        cfg = type(env.task.cfg)()
        cfg.scene.num_envs, cfg.sim.device, cfg.state_space = env.num_envs, "cpu", -1
        task = type("Endless", (type(env.task),), {"_get_dones": self.no_end})
        self.task = task(cfg)
        self.follow(torch.ones(env.num_envs, dtype=torch.bool))

    @staticmethod
    def no_end(task):
        none = torch.zeros(task.num_envs, dtype=torch.bool)
        task.joint_pos, task.joint_vel = task.robot.data.joint_pos, task.robot.data.joint_vel
        return {"cart": none, "pendulum": none}, {"cart": none, "pendulum": none}

    def follow(self, begun):
        data = self.task.robot.data
        data.joint_pos[begun], data.joint_vel[begun] = (
            self.own.joint_pos[begun],
            self.own.joint_vel[begun],
        )

    def step(self, td):
        seen = self.task.step({name: td[name, "action"][:, 0] for name in ("cart", "pendulum")})
        return seen[0], self.task.state()


def test_the_last_observation_is_that_of_a_world_that_never_resets(isaac):
    env = pendulum(isaac, 16, state="world", episode_length_s=0.2, max_cart_pos=0.1)
    td = env.reset()
    env.task.episode_length_buf = torch.arange(16) % 9  # the ends are staggered
    twin, ends = Twin(isaac, env), torch.zeros(2, dtype=torch.int64)
    for _ in range(40):
        step, td = env.step_and_maybe_reset(env.rand_action(td))
        seen, state = twin.step(step)
        done = step["next", "done"].squeeze(-1)
        for name in ("cart", "pendulum"):
            assert torch.equal(step["next", name, "observation"][:, 0], seen[name])
            assert torch.equal(td[name, "observation"][~done, 0], seen[name][~done])
            assert (td[name, "observation"][done, 0] != seen[name][done]).any(-1).all()
        assert torch.equal(step["next", "state"], state)
        ends += torch.stack([step["next", key].sum() for key in ("terminated", "truncated")])
        twin.follow(done)
    assert (ends > 5).all()  # episodes of both ends were there


def test_the_last_observation_has_the_tasks_noise(isaac):
    from isaaclab.utils.noise import ConstantNoiseCfg, NoiseModelCfg

    noise = NoiseModelCfg(noise_cfg=ConstantNoiseCfg(bias=100.0, operation="add"))
    settings = {"observation_noise_model": {"robot_1": noise}, "state_space": -1}
    env = robots(isaac, max_steps=2, settings=settings, state="world")
    td = env.rollout(4, break_when_any_done=False)["next"]
    number = td["robot", "observation"][..., 2]  # constant without the noise
    assert number[..., 1].tolist() == [[101.0] * 4] * 5
    assert number[..., 2].tolist() == [[2.0] * 4] * 5
    assert torch.equal(td["state"], td["robot", "observation"].flatten(2))


def test_a_task_that_is_asked_once_repeats_the_observation_before_the_last(isaac):
    env = robots(isaac, max_steps=3, terminal_observations=False)
    asked, observe = [], env.task._get_observations
    env.task._get_observations = lambda: asked.append(0) or observe()
    td = env.rollout(3, break_when_any_done=False)
    assert len(asked) == 1 + 3
    assert td["next", "done"][:, -1].all()
    seen, after = td["robot", "observation"], td["next", "robot", "observation"]
    assert torch.equal(after[:, :2], seen[:, 1:])
    assert torch.equal(after[:, 2], seen[:, 2])


def test_what_was_given_is_not_written_to_later(isaac):
    env = robots(isaac, max_steps=4, state="world")
    td, given = env.reset(), []
    given.append((td, td.clone()))
    for action in draw_actions(env, 12):
        step, td = env.step_and_maybe_reset(td.clone(recurse=False).update(action))
        given += [(x, x.clone()) for x in (step, td)]
    td = reset_some(env, td, [1, 3])
    for kept, copy in given:
        assert (kept == copy).all()


# ---------------------------------------------------------------------------------- life cycle


def test_ends_by_hand():
    """Two agents in six envs: what they were, what the task says, and what is meant by it."""
    none, dead, late = (False, False), (True, False), (False, True)
    rows = [  # before (terminated, truncated), now (terminated, timed out), of each agent
        ((none, none), (none, dead), (0, 0, 0)),  # the second dies
        ((dead, none), (none, dead), (1, 0, 1)),  # the first had died: all terminated
        ((dead, none), (none, late), (1, 1, 0)),  # one dead, one late: truncated
        ((none, late), (dead, none), (1, 1, 0)),  # one was late, one dies: truncated
        ((none, none), (late, late), (1, 1, 0)),  # all are late
        ((none, none), (dead, dead), (1, 0, 1)),  # all die
    ]
    before, now = (torch.tensor([row[i] for row in rows]) for i in (0, 1))
    flags = GroupFlags(before[..., :1], before[..., 1:], ~before.any(-1))
    ends = Ends.of(flags, now[..., :1], now[..., 1:])
    expected = torch.tensor([row[2] for row in rows], dtype=torch.bool)
    assert torch.equal(ends.over.squeeze(1), expected[:, 0])
    root, agents = ends.flags(ends.over)
    assert torch.equal(root.truncated.squeeze(1), expected[:, 1])
    assert torch.equal(root.terminated.squeeze(1), expected[:, 2])
    # Who lives up to a time limit is bootstrapped from, who ended before is not.
    assert agents.mask.int().tolist() == [[1, 0], [0, 0], [0, 1], [0, 0], [1, 1], [0, 0]]
    assert agents.truncated[..., 0].int().tolist() == [
        [0, 0],
        [0, 0],
        [0, 1],
        [0, 1],
        [1, 1],
        [0, 0],
    ]


def told(env, n, key, group="robot"):
    """What the first env says of its agents in ``n`` steps."""
    td = env.rollout(n, break_when_any_done=False)["next"]
    x = td[group, key] if group else td[key]
    return x[0].reshape(n, -1).int().tolist()


SCRIPTS = {
    # Agent -> step -> end; flags are up in that step only. Then: root's end, how, and the masks.
    "one dies, the others go on to the time limit": (
        {"robot_0": {2: "terminated"}},
        (5, "truncated", [[1] * 4, [0, 1, 1, 1], [0, 1, 1, 1], [0, 1, 1, 1], [0, 1, 1, 1]]),
    ),
    "all die, one after the other": (
        {name: {i + 1: "terminated"} for i, name in enumerate(NAMES)},
        (4, "terminated", [[0, 1, 1, 1], [0, 0, 1, 1], [0, 0, 0, 1], [0] * 4]),
    ),
    "all die at once": (
        {name: {2: "terminated"} for name in NAMES},
        (2, "terminated", [[1] * 4, [0] * 4]),
    ),
    "one dies, the others are timed out by themselves": (
        {"robot_0": {1: "terminated"}, **{name: {3: "timed out"} for name in NAMES[1:]}},
        (3, "truncated", [[0, 1, 1, 1], [0, 1, 1, 1], [0, 1, 1, 1]]),
    ),
    "one is timed out early": (
        {"robot_1": {2: "timed out"}},
        (5, "truncated", [[1] * 4, [1, 0, 1, 1], [1, 0, 1, 1], [1, 0, 1, 1], [1, 0, 1, 1]]),
    ),
}


@pytest.mark.parametrize("script, expected", SCRIPTS.values(), ids=SCRIPTS)
def test_agents_end_alone_and_the_episode_as_all_of_them(isaac, script, expected):
    last, how, masks = expected

    def env():
        return robots(isaac, settings={"script": script, "episode_length_s": 6.0})

    n = last + 1
    ends = [0] * n
    ends[last - 1] = 1
    assert told(env(), n, "done", None) == [[x] for x in ends]
    assert told(env(), n, how, None) == [[x] for x in ends]
    assert told(env(), last, "mask") == masks
    # An agent's end stays up to the reset, and the next episode has all agents again.
    terminated = {name for name, ends in script.items() if "terminated" in ends.values()}
    assert told(env(), last, "terminated")[-1] == [int(name in terminated) for name in NAMES]
    assert told(env(), last, "done")[-1] == [1] * 4
    assert told(env(), n, "done")[last] == told(env(), n, "done")[0]


def test_isaac_lab_itself_would_not_end_such_an_episode(isaac):
    """Why ours does: see the mixed ends above."""
    ends = {"robot_0": {1: "terminated"}, **{name: {3: "timed out"} for name in NAMES[1:]}}
    task = task_of_robots(isaac, script=ends)
    task.reset()
    action = {name: torch.zeros(5, 1) for name in NAMES}
    assert not any(task.step(action) and task.reset_buf.any() for _ in range(20))


def test_a_time_limit_of_ours_is_truncated_and_the_tasks_own_holds_too(isaac):
    assert told(robots(isaac, max_steps=3, settings={"script": {}}), 4, "truncated", None) == [
        *([0], [0], [1], [0])
    ]
    settings = {"script": {}, "episode_length_s": 3.0}
    env = robots(isaac, max_steps=50, settings=settings)
    assert told(env, 4, "truncated", None) == [[0], [1], [0], [1]]


def test_nothing_that_the_dead_do_reaches_the_task(isaac):
    env = robots(isaac, settings={"script": {"robot_2": {1: "terminated"}}})
    td = env.rollout(2)[:, -1]["next"]
    poison = torch.full((5, 4, 1), 0.5)
    poison[:, 2] = math.nan
    before = env.task.x.clone()
    env.step(td.exclude("next").set(("robot", "action"), poison))
    assert torch.equal(env.task.x[:, 2], before[:, 2])
    assert (env.task.actions["robot_2"] == 0).all()
    assert torch.allclose(env.task.x[:, 1], before[:, 1] + 0.15)


def test_an_agent_that_appears_late_waits_until_then(isaac):
    settings = {"joins": {"robot_3": 2}, "script": {name: {4: "terminated"} for name in NAMES[:3]}}
    env = robots(isaac, settings=settings)
    td = env.rollout(4, break_when_any_done=False)
    assert td["robot", "mask"][0].int().tolist() == [[1, 1, 1, 0]] * 2 + [[1] * 4] * 2
    assert (td["robot", "observation"][:, :2, 3] == 0).all()
    assert (td["next", "robot", "reward"][:, 0, 3] == 0).all()
    assert not td["next", "done"].any()
    # Without the one that has not come, all are terminated.
    settings["joins"] = {"robot_3": 9}
    td = robots(isaac, settings=settings).rollout(4)["next"]
    assert td["terminated"][:, -1].all()


def test_a_reset_from_outside_begins_these_envs_only(isaac):
    env = robots(isaac, state="world", settings={"script": {"robot_1": {1: "terminated"}}})
    td = env.rollout(2)[:, -1]["next"].exclude("next")
    before = td.clone()
    after = reset_some(env, td, [0, 3])
    begun = torch.tensor([True, False, False, True, False])
    assert torch.equal(after["state"][~begun], before["state"][~begun])
    assert (after["state"][begun] != before["state"][begun]).all()
    assert after["robot", "mask"].all(-1).tolist() == begun.tolist()
    assert env.task.episode_length_buf.tolist() == [0, 2, 2, 0, 2]


def test_a_reset_takes_as_many_operations_for_any_number_of_envs(isaac):
    env, counts = robots(isaac, 9, state="world"), set()
    td = env.rollout(2)[:, -1]["next"].exclude("next")
    for envs in ([2, 3], [3, 4, 8], list(range(1, 9))):
        asked = asking_reset(env, td, envs)
        with CountOperations() as operations:
            env._reset(asked)
        counts.add(operations.count)
    assert len(counts) == 1


# ------------------------------------------------------------------------------------- actions


def test_unbounded_actions_are_scaled_or_clipped(isaac):
    env = robots(isaac, action_scale={"robot": 20.0, "robot_1": 3.0})
    spec = env.full_action_spec["robot", "action"]
    assert isinstance(spec, Bounded)
    assert (spec.space.high == 1).all() and (spec.space.low == -1).all()
    td = env.reset()
    env.step(td.set(("robot", "action"), torch.full((5, 4, 1), 0.5)))
    assert [env.task.actions[name][0].item() for name in NAMES] == [10.0, 1.5, 10.0, 10.0]
    env = robots(isaac, action_scale=None, action_clip=2.0)
    assert isinstance(env.full_action_spec["robot", "action"], Unbounded)
    action = torch.tensor([[-7.0], [-1.0], [1.5], [9.0]]).expand(5, 4, 1)
    env.step(env.reset().set(("robot", "action"), action))
    assert [env.task.actions[name][0].item() for name in NAMES] == [-2.0, -1.0, 1.5, 2.0]
    assert action[0].flatten().tolist() == [-7.0, -1.0, 1.5, 9.0]


# --------------------------------------------------------------------------------- the wrapper


def test_wrapping_again_replaces_and_closing_restores(isaac):
    task = task_of_robots(isaac, script={})
    first = IsaacLabEnv(task, action_scale=1.0, max_steps=2)
    assert told(first, 3, "done", None) == [[0], [1], [0]]
    second = IsaacLabEnv(task, action_scale=1.0, max_steps=4)
    assert told(second, 4, "done", None) == [[0], [0], [0], [1]]
    second.close()
    assert task._is_closed and second.is_closed
    assert not {"_reset_idx", "_get_dones"} & set(vars(task))


def test_one_simulation_a_process_suffices(isaac, monkeypatch, tmp_path):
    """As with Isaac Sim; the recipe learns on the stand-in's physics."""
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


def test_an_environment_of_ones_own_trains(isaac, tmp_path):
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


def test_our_collector_plays_it(isaac):
    env = robots(isaac, 6, max_steps=4)
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
    "no such agent": ({"group_map": {"a": ["robot_9"]}}, "'robot_9'"),
    "an agent without a group": ({"group_map": {"a": NAMES[:3]}}, "'robot_3' has no group"),
    "no such argument": ({"max_step": 3}, "did you mean 'max_steps'"),
    "no steps": ({"max_steps": 0}, "max_steps is 0"),
    "another device": ({"device": "cuda:0"}, "the task given runs on cpu"),
}


@pytest.mark.parametrize("kwargs, message", REFUSED.values(), ids=REFUSED)
def test_bad_arguments_are_refused(isaac, kwargs, message):
    with pytest.raises(ConfigError, match=message):
        robots(isaac, **kwargs)


def test_other_environments_and_numbers_are_refused(isaac):
    task = task_of_robots(isaac)
    with pytest.raises(ConfigError, match="num_envs is 3, but the task given has 5"):
        IsaacLabEnv(task, num_envs=3, action_scale=1.0)
    with pytest.raises(ConfigError, match="a dict, expected one of Isaac Lab's"):
        IsaacLabEnv({}, action_scale=1.0)
    with pytest.raises(ConfigError, match="the task runs on cpu"):
        IsaacLabEnv(task, action_scale=1.0).to("cuda")
    assert IsaacLabEnv(task, action_scale=1.0).to("cpu").num_envs == 5
    with pytest.raises(ConfigError, match="all of this task's are bounded"):
        settings = {"action_spaces": {name: {3} for name in NAMES}}
        robots(isaac, settings=settings, action_scale=1.0)


def test_a_task_that_breaks_its_word_is_refused(isaac):
    env = robots(isaac)
    env.task._get_observations = lambda: {name: torch.zeros(5, 2) for name in NAMES}
    with pytest.raises(SpecError, match=r"'robot_0' has shape \[5, 2\], expected \[5, 3\]"):
        env.reset()
    env = robots(isaac)
    env.reset()
    seen = env.task._get_observations()
    env.task._get_observations = lambda: {**seen, "robot_7": seen["robot_0"]}
    with pytest.raises(SpecError, match="'robot_7', which is not among its agents"):
        env.rand_step(env.reset())


def test_tasks_and_settings_by_name(isaac):
    with pytest.raises(ConfigError, match=f"did you mean '{PENDULUM}'"):
        IsaacLabEnv("Isaac-Cart-Double-Pendulum-v0", num_envs=2)
    with pytest.raises(ConfigError, match="did you mean 'episode_length_s'"):
        pendulum(isaac, episode_length=2)
    with pytest.raises(ConfigError, match="does not take max_cart_pos='far'"):
        pendulum(isaac, max_cart_pos="far")
    env = pendulum(isaac, episode_length_s=1, sim={"dt": 0.01})
    assert (env.task.cfg.episode_length_s, env.task.cfg.sim.dt) == (1.0, 0.01)
    assert env.task.max_episode_length == 50


def test_without_isaac_lab_the_error_says_what_to_do(monkeypatch):
    pytest.importorskip("gymnasium")
    monkeypatch.setitem(sys.modules, "isaaclab_tasks", None)
    with pytest.raises(UserError, match="AppLauncher") as caught:
        make_env("isaaclab/Isaac-Nothing-v0", action_scale=1.0)
    assert isinstance(caught.value, ImportError)
    assert "isaaclab_tasks cannot be imported" in str(caught.value)
    assert read_config(RECIPE).env.kwargs == {"action_scale": 1.0}
