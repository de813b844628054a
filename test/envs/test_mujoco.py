"""MuJoCo robots as teams: equal to Gymnasium-Robotics bit for bit."""

import copy
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from tensordict import LazyStackedTensorDict
from torchrl.envs import TransformedEnv

from torchrl_marl import TeamSpec
from torchrl_marl.collectors import RolloutCollector, TeamPolicy
from torchrl_marl.envs import MujocoEnv, PadAgents, check_marl_env, make_env
from torchrl_marl.envs.mujoco.columns import read_columns
from torchrl_marl.envs.mujoco.engines import SCALES, advance
from torchrl_marl.envs.mujoco.rewards import Reward
from torchrl_marl.errors import ConfigError, MissingExtraError, SimulatorStateError
from torchrl_marl.learners import OnPolicyConfig, OnPolicyLearner
from torchrl_marl.recipes import read_config

mamujoco = pytest.importorskip("gymnasium_robotics").mamujoco_v1
mujoco = pytest.importorskip("mujoco")
gymnasium = pytest.importorskip("gymnasium")

E, STEPS = 3, 60
CASES = {
    "ant 2x4": {},
    "ant 2x4d": {"agent_obsk": 0},
    "ant 4x2": {"healthy_reward": 0.5, "contact_force_range": [-0.5, 2.0], "main_body": 2},
    "halfcheetah 2x3": {},
    "halfcheetah 6x1": {"agent_obsk": 2},
    "hopper 3x1": {"terminate_when_unhealthy": False},
    "humanoid 9|8": {},
    "manysegmentant 2x3": {},
    "manysegmentswimmer 10x2": {},
    "swimmer 2x1": {"forward_reward_weight": 3.0, "frame_skip": 2},
    "walker2d 2x3": {"exclude_current_positions_from_observation": False},
}
FALLING = {"ant 2x4", "humanoid 9|8", "walker2d 2x3"}  # in so many random steps


# ------------------------------------------------------- equal to Gymnasium-Robotics, to the bit


def upstream(env, conf, settings):
    """E environments of Gymnasium-Robotics, whose initial states the env takes over."""
    settings = {"agent_obsk": 1, **settings}
    made = [mamujoco.parallel_env(env.task.robot.scenario, conf, **settings) for _ in range(E)]
    for i, one in enumerate(made):
        one.reset(seed=i)
        for space in one.action_spaces.values():
            space.seed(i)
    data = [one.single_agent_env.unwrapped.data for one in made]
    start = np.stack([np.concatenate([d.qpos, d.qvel, 0 * d.qvel]) for d in data])
    at_rest = torch.zeros(E, env.task.model.nu, dtype=torch.float64)
    env.physics, env.fields = advance(torch.tensor(start), at_rest, as_it_is(E), "c", env._key, 0)
    return made


def as_it_is(num_envs):
    """No scales of the model's parameters."""
    return torch.zeros(num_envs, 0)


def same(found, expected):
    return torch.equal(found, torch.tensor(np.stack(expected)).float())


def with_actions(td, env, actions):
    """Writes the actions of all agents, by name."""
    rows = list(td.get("agent").unbind(1))
    for row, name in zip(rows, env.group_map["agent"]):
        row["action"] = torch.tensor(np.stack([one[name] for one in actions]))
    td["agent"] = LazyStackedTensorDict(*rows, stack_dim=1)
    return td if env.group_kinds["agent"].lazy else td.to_tensordict()


@pytest.mark.parametrize("case", CASES)
def test_episode_equals_gymnasium_robotics(case):
    (robot, conf), settings = case.split(), CASES[case]
    env = MujocoEnv(robot, E, agent_conf=conf, seed=0, **settings)
    td = env.reset()
    made = upstream(env, conf, settings)
    ends = 0
    for _ in range(STEPS):
        actions = [{a: s.sample() for a, s in one.action_spaces.items()} for one in made]
        found = env.step(with_actions(td, env, actions))["next"]
        steps = [one.step(action) for one, action in zip(made, actions)]
        for name, row in zip(env.group_map["agent"], found.get("agent").unbind(1)):
            assert same(row["observation"], [step[0][name] for step in steps])
            reward = torch.tensor([step[1][name] for step in steps])
            torch.testing.assert_close(row["reward"][:, 0].double(), reward, atol=1e-6, rtol=3e-7)
            assert row["terminated"][:, 0].tolist() == [step[2][name] for step in steps]
        assert same(found["state"], [one.state() for one in made])
        ends += int(found["terminated"].sum())
        physics, fields = env.physics, env.fields
        td = env.reset()  # both continue after falls
        env.physics, env.fields = physics, fields
    assert (ends > 0) == (case in FALLING)


@pytest.mark.parametrize("robot", ["ant", "halfcheetah", "humanoid", "hopper"])
def test_initial_states_are_drawn_as_in_gymnasium(robot):
    # MuJoCo reserves 14 MB of addresses for each env. A process with 56 GB of them, for 4,000 envs
    # at once, cannot be forked afterwards.
    envs = [MujocoEnv(robot, 100, seed=seed) for seed in range(40)]
    for env in envs:
        env.reset()
    physics = torch.cat([env.physics for env in envs])
    own = gymnasium.make(f"{env.task.robot.scenario}-v5").unwrapped
    rows = [
        own.reset(seed=i) and np.concatenate([own.data.qpos, own.data.qvel]) for i in range(400)
    ]
    expected, found = np.stack(rows), physics[:, : len(rows[0])].numpy()
    noise = own._reset_noise_scale
    np.testing.assert_allclose(found.mean(0), expected.mean(0), atol=0.2 * noise)
    np.testing.assert_allclose(found.std(0), expected.std(0), rtol=0.2)
    np.testing.assert_allclose(np.abs(found).max(0), np.abs(expected).max(0), atol=2.0 * noise)


def test_partitions_not_upstream_have_one_agent_per_joint():
    whole = MujocoEnv("humanoid", 2, agent_conf="17x1", seed=0)
    assert len(whole.group_map["agent"]) == 17 and whole.task.agents[3].actuators == (3,)
    ant = MujocoEnv("ant", 2, agent_conf="8x1", seed=0).task
    legs = MujocoEnv("ant", 2, agent_conf="4x2", agent_obsk=0, seed=0).task
    joints = {agent.actuators[0]: set(agent.columns.where.tolist()) for agent in ant.agents}
    for leg in legs.agents:  # a joint sees its own leg, and all joints of the torso see the torso
        own = set(leg.columns.where.tolist())
        assert own <= joints[leg.actuators[0]] | joints[leg.actuators[1]]


@pytest.mark.parametrize("conf", ["4x2", "8x1"])
def test_agents_with_agent_obsk_none_observe_the_whole_state(conf):
    env = MujocoEnv("ant", 3, agent_conf=conf, agent_obsk=None, seed=0)
    near = MujocoEnv("ant", 3, agent_conf=conf, seed=0)
    td, other = env.rollout(5), near.rollout(5)
    state = td["state"].unsqueeze(2)
    n_agents = len(env.group_map["agent"])
    assert torch.equal(td["agent", "observation"], state.expand(-1, -1, n_agents, -1))
    assert [a.actuators for a in env.task.agents] == [a.actuators for a in near.task.agents]
    assert td["agent", "action"].shape == other["agent", "action"].shape


# ------------------------------------------------------------------------- rewards and columns


def own_ant(folder, *ranges):
    """Writes an ant whose first motors have given ranges; returns its file."""
    model = Path(gymnasium.__file__).parent / "envs" / "mujoco" / "assets" / "ant.xml"
    parts, written = model.read_text().split('ctrlrange="-1.0 1.0"'), folder / "ant.xml"
    ranges = [*ranges, *["-1 1"] * (8 - len(ranges))]
    motors = [f'{part}ctrlrange="{one}"' for part, one in zip(parts, ranges)]
    written.write_text("".join([*motors, parts[-1]]))
    return str(written)


def test_motors_of_a_custom_model_keep_their_bounds(tmp_path):
    # Gymnasium-Robotics gives all actions the bounds of the first motor.
    own = own_ant(tmp_path, "-1 1", "-0.5 0.5", "0 2")
    single = gymnasium.make("Ant-v5", xml_file=own).action_space
    assert single.high.tolist() == [1, 0.5, 2, 1, 1, 1, 1, 1]

    env = MujocoEnv("ant", 2, seed=0, xml_file=own)
    space = env.full_action_spec["agent", "action"].space
    joints = [agent.actuators for agent in env.task.agents]  # the hip and the ankle of a leg
    assert space.low[0].tolist() == [single.low[list(leg)].tolist() for leg in joints]
    assert space.high[0].tolist() == [single.high[list(leg)].tolist() for leg in joints]
    assert env.group_kinds["agent"].lazy is False
    assert env.rollout(3)["agent", "observation"].shape[2:] == (4, 42)


def test_changed_model_file_is_read_again(tmp_path):
    highest = []
    for first in ("-1 1", "-0.5 0.5"):
        env = MujocoEnv("ant", 2, agent_conf="8x1", seed=0, xml_file=own_ant(tmp_path, first))
        highest.append(max(env.task.model.actuator_ctrlrange[0]))
    assert highest == [1.0, 0.5]


def test_reward_of_a_step_by_hand():
    reward = Reward(2.0, 0.5, 0.1, (-1.0, 1.0), (0.0, 0.25), healthy_reward=3.0)
    velocity, action = torch.tensor([[1.5], [1.5]]), torch.tensor([[1.0, 2.0], [0.0, 0.0]])
    healthy, forces = torch.tensor([[True], [False]]), torch.tensor([[5.0, -5.0, 0.5], [0.1, 0, 0]])
    # 2 * 1.5 + 3 - 0.5 * 5 - 0.1 * (1 + 1 + 0.25); 2 * 1.5 - 0.1 * 0.01
    assert reward.earned(velocity, action, healthy, forces).tolist() == [
        [pytest.approx(3.275)],
        [pytest.approx(2.999)],
    ]
    more = torch.tensor([[1.0, 1.0, 1.0], [0, 0, 0]])  # costs 0.3, more than the largest cost
    assert reward.earned(velocity, action, healthy, more)[0].item() == pytest.approx(3.25)


def test_robot_is_healthy_within_its_ranges():
    reward = Reward(healthy_z_range=(0.7, 2.0), healthy_angle_range=(-0.2, 0.2))
    qpos = torch.tensor([[0, 1.0, 0.1], [0, 0.6, 0.1], [0, 1.0, 0.3], [0, 1.0, float("nan")]])
    found = reward.healthy(qpos, torch.zeros(4, 3))
    assert found.flatten().tolist() == [True, False, False, False]
    broken = Reward(healthy_state_range=(-100.0, 100.0)).healthy(
        qpos[:1], torch.tensor([[0, 101.0]])
    )
    assert not broken.any()


def test_observation_columns_are_mapped_to_state_columns():
    class Robot:
        data = None

    robot, data = Robot(), mujoco.MjData(mujoco.MjModel.from_xml_string(PENDULUM))
    seen = read_columns(
        robot,
        data,
        ("qpos", "qvel"),
        lambda: {"a": np.r_[robot.data.qvel[1], np.clip(robot.data.qpos, -2, 3)]},
    )["a"]
    assert seen.where.tolist() == [3, 0, 1]
    assert seen.low.tolist() == [-np.inf, -2, -2] and seen.high.tolist() == [np.inf, 3, 3]
    with pytest.raises(ConfigError, match="the observation of a has numbers other than qpos, qvel"):
        read_columns(robot, data, ("qpos", "qvel"), lambda: {"a": 2 * robot.data.qvel})


PENDULUM = """<mujoco><worldbody><body><joint/><geom size="0.1"/><body pos="0 0 1"><joint/>
<geom size="0.1"/></body></body></worldbody></mujoco>"""


# ------------------------------------------------------------------------------- processes


def rollout(env, n_steps=5):
    torch.manual_seed(0)
    td = env.rollout(n_steps, break_when_any_done=False)
    return td["next", "state"], td["next", "agent", "reward"]


@pytest.mark.parametrize("robot", ["ant", "hopper"])
def test_results_do_not_depend_on_threads(robot):
    threads, found = torch.get_num_threads(), []
    try:
        for n in (1, 3):
            torch.set_num_threads(n)
            found.append(rollout(MujocoEnv(robot, 7, seed=0)))
    finally:
        torch.set_num_threads(threads)
    assert all(torch.equal(x, y) for x, y in zip(*found))


def test_envs_are_independent():
    env = MujocoEnv("ant", 4, seed=0)
    env.reset()
    torques = torch.full((4, 8), 0.3, dtype=torch.float64)
    first = advance(env.physics, torques, as_it_is(4), "c", env._key, 5)
    second = advance(env.physics[[2, 1, 0, 3]].clone(), torques, as_it_is(4), "c", env._key, 5)
    assert all(torch.equal(x[[2, 1, 0, 3]], y) for x, y in zip(first, second))


@pytest.mark.parametrize("robot", ["ant", "halfcheetah"])
def test_graphs_equal_eager_bit_for_bit(robot):
    batches = []
    for execution in ("eager", "trace"):
        torch.manual_seed(0)
        env = TransformedEnv(MujocoEnv(robot, 4, seed=0), PadAgents())
        learner = OnPolicyLearner(TeamSpec.from_env(env).groups, OnPolicyConfig())
        policy = TeamPolicy(learner.actors.values())
        collector = RolloutCollector(env, policy, frames_per_batch=32, execution=execution)
        steps = iter(collector)
        batches.append([next(steps).clone() for _ in range(2)])
    for eager, traced in zip(*batches):
        for key in [("next", "state"), ("next", "agent", "reward"), ("agent", "observation")]:
            assert torch.equal(eager[key], traced[key])


FRESH = """
import json, sys, torch
from torchrl_marl.envs.mujoco.engines import SCALES, advance
physics, torques, key = json.load(sys.stdin)
physics, torques = torch.tensor(physics).double(), torch.tensor(torques).double()
found = advance(physics, torques, torch.zeros(2, 0), "c", key, 2)[0]
print(json.dumps(found.tolist()))
"""


def test_engine_is_rebuilt_from_its_key_in_a_new_process(tmp_path):
    env = MujocoEnv("swimmer", 2, seed=0, forward_reward_weight=2.0)
    env.reset()
    given = env.physics.float().double(), torch.full((2, 2), 0.5).double()
    done = subprocess.run(
        [sys.executable, "-c", FRESH],
        input=json.dumps([*(x.tolist() for x in given), env._key]),
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env={**os.environ, "PYTHONWARNINGS": "ignore"},
    )
    assert done.returncode == 0, done.stderr
    found = torch.tensor(json.loads(done.stdout), dtype=torch.float64)
    assert torch.equal(found, advance(*given, as_it_is(2), "c", env._key, 2)[0])
    assert not list(tmp_path.iterdir())  # MuJoCo writes warnings into the current folder


def test_invalid_arguments_are_refused():
    refused = [
        ("ants", {}, "did you mean 'ant'"),
        ("ant", {"agent_conf": "5x5"}, "use env.kwargs.agent_conf=4x2, 2x4, 2x4d or 8x1."),
        ("halfcheetah", {"agent_conf": "1x6"}, "use env.kwargs.agent_conf=6x1 or 2x3."),
        ("manysegmentant", {"agent_conf": "x"}, "use env.kwargs.agent_conf=2x3"),
        ("ant", {"agent_obsk": -1}, "agent_obsk is -1, expected 0 or more"),
        ("ant", {"agent_obsk": True}, "agent_obsk is True, expected a whole number or None"),
        ("ant", {"agent_obsk": 1.5}, "agent_obsk is 1.5, expected a whole number or None"),
        ("ant", {"healthy_rewad": 2.0}, "did you mean 'healthy_reward'"),
        ("ant", {"healthy_reward": np.ones(2)}, "must be plain values"),
        (
            "ant",
            {"frame_skip": "two"},
            "frame_skip of mujoco/ant is 'two', expected a whole number",
        ),
        ("ant", {"frame_skip": -3}, "is -3, expected a whole number, 1 or more"),
        ("ant", {"healthy_z_range": 0.5}, "healthy_z_range of mujoco/ant is 0.5, expected two num"),
        (
            "ant",
            {"contact_force_range": [1, -1]},
            r"\[1, -1\], expected two numbers, the lower first",
        ),
        (
            "ant",
            {"ctrl_cost_weight": "0.5"},
            "ctrl_cost_weight of mujoco/ant is '0.5', expected a n",
        ),
        (
            "ant",
            {"healthy_reward": None},
            "healthy_reward of mujoco/ant is None, expected a number",
        ),
        ("ant", {"terminate_when_unhealthy": "no"}, "is 'no', expected true or false"),
        ("ant", {"reset_noise_scale": -1}, "is -1, expected a number, 0 or more"),
        ("ant", {"max_episode_steps": 10}, "does not read max_episode_steps; use env.max_steps"),
        (
            "ant",
            {"include_cfrc_ext_in_observation": False},
            "agents observe parts .*; leave it out",
        ),
        ("ant", {"main_body": "tors"}, "Valid names: .*'torso'"),
        (
            "ant",
            {"xml_file": "no.xml"},
            "give xml_file an absolute path, or one that begins with ./",
        ),
        ("manysegmentant", {"agent_conf": "0x3"}, "is '0x3', expected agents x segments"),
        ("manysegmentswimmer", {"agent_conf": "1x1"}, "'agent_conf': '1x1'"),
        ("ant", {"engine": "bullet"}, "expected c or warp"),
        ("ant", {"device": "meta"}, "engine=c simulates on the CPU"),
    ]
    for robot, arguments, sentence in refused:
        with pytest.raises(ConfigError, match=sentence):
            MujocoEnv(robot, 2, **arguments)


def test_missing_mujoco_error_names_the_extra_of_the_engine(monkeypatch):
    for package in ("gymnasium_robotics", "mujoco_warp"):
        monkeypatch.setitem(sys.modules, package, None)
    for engine, extra in (("c", "mujoco"), ("warp", "warp")):
        with pytest.raises(MissingExtraError, match=rf"pip install '\.\[{extra}\]'"):
            MujocoEnv("hopper", 2, agent_conf="3x1", agent_obsk=3, engine=engine)


def test_robots_and_arguments_in_recipes():
    env = make_env("mujoco/ant", num_envs=2, agent_conf="2x4", seed=0)
    assert len(env.group_map["agent"]) == 2 and env.max_steps == 1000
    config = read_config("mujoco_ant_mappo", {"env.kwargs.engine": "warp"})
    assert config.env.kwargs == {"engine": "warp"}
    with pytest.raises(ConfigError, match="did you mean 'ant'"):
        make_env("mujoco/aunt", num_envs=2)
    with pytest.raises(ConfigError, match="use env=mujoco/ant"):
        make_env("mamujoco/Ant", num_envs=2)


def test_environment_passes_check_marl_env():
    assert "keeps the rules" in str(check_marl_env(MujocoEnv("hopper", 5, seed=0, max_steps=20)))


# ----------------------------------------------------------------------- domain randomization


def scaled(model, mass=1.0, friction=1.0, damping=1.0, strength=1.0, gravity=1.0):
    """A copy of a model with other parameters."""
    model = copy.copy(model)
    model.body_mass[:] *= mass
    model.body_inertia[:] *= mass
    model.geom_friction[:, 0] *= friction
    model.dof_damping[:] *= damping
    model.actuator_gear[:] *= strength
    model.opt.gravity[:] *= gravity
    mujoco.mj_setConst(model, mujoco.MjData(model))
    return model


@pytest.mark.parametrize("name", SCALES)
def test_each_env_has_the_parameters_of_its_episode(name):
    env = MujocoEnv("ant", E, seed=0)
    env.reset()
    factors, torques = torch.tensor([0.5, 1.0, 1.7]), torch.full((E, 8), 0.4, dtype=torch.float64)
    scales = torch.ones(E, len(SCALES))
    scales[:, SCALES.index(name)] = factors
    physics = env.physics
    for _ in range(20):
        physics, _ = advance(physics, torques, scales, "c", env._key, 5)
    for i, factor in enumerate(factors.tolist()):
        model = scaled(env.task.model, **{name: factor})
        data = mujoco.MjData(model)
        data.qpos[:], data.qvel[:] = env.physics[i, :15], env.physics[i, 15:29]
        for _ in range(20):
            data.ctrl[:] = 0.4
            mujoco.mj_step(model, data, 5)
        assert physics[i, :15].tolist() == data.qpos.tolist()
    assert not torch.equal(physics[0], physics[2])
    back, _ = advance(env.physics, torques, torch.ones(E, len(SCALES)), "c", env._key, 5)
    assert torch.equal(back, advance(env.physics, torques, as_it_is(E), "c", env._key, 5)[0])


def test_partial_reset_draws_parameters_only_for_its_envs():
    env = MujocoEnv("hopper", 4, seed=0)
    env.randomize({"mass": [0.7, 1.3]})
    td = env.reset()
    drawn = env.domain_parameters["mass"]
    assert ((drawn >= 0.7) & (drawn <= 1.3)).all() and drawn.unique().numel() == 4
    td["_reset"] = torch.tensor([True, False, False, True]).unsqueeze(-1)
    env.reset(td)
    kept = env.domain_parameters["mass"] == drawn
    assert kept.tolist() == [False, True, True, False]
    with pytest.raises(ConfigError, match="mass, friction, damping, strength, gravity"):
        env.randomize({"weight": 2.0})


@pytest.mark.parametrize(
    ("ranges", "message"),
    [
        ({"mass": [-1, 1]}, r"mass has factors from -1, expected positive ones, such as mass=\["),
        ({"mass": 0}, "mass has factors from 0, expected positive ones"),
        ({"friction": [-0.5, 1]}, "friction has factors from -0.5, expected 0 or more"),
        ({"gravity": 1.0, "damping": -1}, "damping has factors from -1, expected 0 or more"),
        ({"strength": [-1, 1]}, "strength has factors from -1, expected 0 or more"),
    ],
)
def test_invalid_factors_are_refused(ranges, message):
    with pytest.raises(ConfigError, match=message):
        make_env("mujoco/hopper", num_envs=2, seed=0, randomize=ranges)


def test_zero_factors_and_negative_gravity_are_accepted():
    env = MujocoEnv("hopper", 2, seed=0)
    env.randomize({"friction": [0, 1], "gravity": [-1, 1], "strength": 0.0})
    assert (env.domain_parameters["strength"] == 0).all()


def test_restoring_scaled_models_needs_the_same_randomization():
    scaled, plain = (MujocoEnv("hopper", 2, seed=seed) for seed in (0, 1))
    scaled.randomize({"mass": [1.5, 2.0]})
    td = scaled.reset()
    td = scaled.rand_action(td)
    snapshot = scaled.snapshot()
    plain.reset()
    before = plain.physics.clone()
    with pytest.raises(SimulatorStateError, match="call randomize with its ranges before restore"):
        plain.restore(snapshot)
    assert torch.equal(plain.physics, before)
    plain.randomize({"mass": [1.5, 2.0]})
    plain.restore(snapshot)
    seen = [env.step(td.clone())["next", "state"] for env in (scaled, plain)]
    assert torch.equal(*seen)


# ----------------------------------------------------------------------------------- drawing


@pytest.mark.parametrize("robot", ["hopper", "manysegmentswimmer"])
def test_robot_is_drawn_without_a_display(robot, monkeypatch):
    monkeypatch.delenv("MUJOCO_GL", raising=False)
    monkeypatch.delenv("DISPLAY", raising=False)
    env = MujocoEnv(robot, 2, seed=0)
    env.rollout(5)
    limbs = [shape for shape in env.scene(1) if shape.name.startswith("geom")]
    half = env.stage().half_size[0]
    assert len(limbs) == (env.task.model.geom_bodyid > 0).sum()
    assert all(abs(limb.x) < half and limb.length > 0 for limb in limbs)
    first, second = (limb.color for limb in limbs[:2])
    assert first != second  # a limb has the color of its agent, the torso has its own
