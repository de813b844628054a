"""Robots of mjlab as teams, on MuJoCo Warp on a CPU.

mjlab pins another MuJoCo than ours, so it needs a separate environment: see
docs/environments/mjlab.md. Kernels are compiled once, in half a minute.
"""

import math

import numpy as np
import pytest
import torch
from contract import Case, EnvContract, draw_actions

import torchrl_marl
from torchrl_marl import TeamSpec
from torchrl_marl.collectors import RolloutCollector, TeamPolicy
from torchrl_marl.envs import MjlabEnv, make_env
from torchrl_marl.envs.mjlab.engine import advance, simulation_of
from torchrl_marl.envs.scene import scene, stage
from torchrl_marl.learners import OnPolicyConfig, OnPolicyLearner

mujoco = pytest.importorskip("mujoco")
pytest.importorskip("mjlab", reason="needs mjlab")
pytestmark = pytest.mark.environments

Q, J = 19, 12  # positions and joints of a Go1
NORTH = math.pi / 2


def pair(num_envs, seed=0, max_steps=None, **kwargs):
    """Two robots side by side."""
    kwargs = {"n_agents": 2, "formation": "line", "cone": "pyramidal", **kwargs}
    return MjlabEnv("formation", num_envs, seed=seed, max_steps=max_steps, **kwargs)


@pytest.mark.parametrize(
    "case", [pytest.param(Case(pair, agent_done=True), id="pair")], scope="class"
)
class TestContract(EnvContract):
    pass


def robots_of(env):
    """Positions of all robots ``[E, N, 7 + J]``, which may be written to."""
    return env.physics[:, : len(env._offsets) * (7 + env.scenery.n_joints)].unflatten(
        1, (len(env._offsets), -1)
    )


def speeds_of(env):
    """Velocities of all robots ``[E, N, 6 + J]``, which may be written to."""
    n, size = len(env._offsets), len(env._offsets) * (7 + env.scenery.n_joints)
    end = size + n * (6 + env.scenery.n_joints)
    return env.physics[:, size:end].unflatten(1, (n, -1))


def placed(env, places, headings=None):
    """A reset, after which the robots stand still at these places in all envs."""
    td = env.reset()
    robots = robots_of(env)
    robots[:] = env._start
    robots[..., :2] = torch.tensor(places)
    half = torch.zeros(len(places)) if headings is None else torch.tensor(headings) / 2
    robots[..., 3], robots[..., 6] = half.cos(), half.sin()
    return td


def stand(env, td, n=1):
    """Steps in which all robots aim at their default posture."""
    for _ in range(n):
        td["robot", "action"] = torch.zeros_like(env.action)
        td = env.step(td)["next"]
    return td


# ------------------------------------------------------------------------------------ physics


def test_step_equals_mujoco():
    """MuJoCo's own engine, from states that standing and random play have reached."""
    env = MjlabEnv("formation", 3, seed=0)
    td = stand(env, env.reset(), 5)
    for action in draw_actions(env, 6):
        td = env.step(td.exclude(("robot", "reward")).update(action))["next"]
    model, substeps = env.scenery.model, env.scenery.substeps
    targets = 0.1 * torch.randn(3, model.nu) + torch.tensor(model.key_ctrl[0]).float()
    found, _ = advance(env.physics, targets, env._key)
    for row, control, after in zip(env.physics, targets, found):
        data = mujoco.MjData(model)
        data.qpos, data.qvel, data.qacc_warmstart = np.split(
            row.double().numpy(), [model.nq, model.nq + model.nv]
        )
        data.ctrl = control.numpy()
        mujoco.mj_step(model, data, substeps)
        np.testing.assert_allclose(after[: model.nq], data.qpos, atol=2e-3)
        assert np.abs(data.qpos - row[: model.nq].numpy()).max() > 0.02  # it has moved


def test_colliding_robots_get_equal_contact_forces():
    """Head on: heads reach 0.3 m ahead, so 0.61 m apart they hit within a step of 20 ms."""
    env = pair(2, spacing=2.0)
    td = placed(env, [[0.0, 0.0], [0.61, 0.0]], [0.0, math.pi])
    robots_of(env)[1, 1, 0] = 2.0
    speeds_of(env)[..., 0] = torch.tensor([1.0, -1.0])
    td = stand(env, td)
    assert (env.force[0] > 10).all() and env.force[0, 0] == env.force[0, 1]
    assert (env.force[1] == 0).all()
    touching, apart = speeds_of(env)[0, :, 0], speeds_of(env)[1, :, 0]
    assert touching[0] < apart[0] - 0.3 and touching[1] > apart[1] + 0.3  # both are slowed down
    assert (td["robot", "reward"][0, 0] < td["robot", "reward"][1, 0]).all()


def test_moving_robot_pushes_a_standing_one():
    env = pair(2, spacing=2.0)
    td = placed(env, [[0.0, 0.0], [0.7, 0.0]])
    robots_of(env)[1, 1, 0] = 3.0
    speeds_of(env)[:, 0, 0] = 3.0
    before = robots_of(env)[:, 1, 0].clone()
    stand(env, td, 10)
    gone = robots_of(env)[:, 1, 0] - before
    assert gone[0] > gone[1] + 0.02 and abs(gone[1]) < 0.05


def test_contact_forces_belong_to_the_robots_that_touch():
    """0 and 2 of three robots touch; 1 stands far away."""
    env = pair(1, n_agents=3)
    td = placed(env, [[0.0, 0.0], [0.0, 5.0], [0.45, 0.0]], [0.0, 0.0, math.pi])
    stand(env, td)
    force = env.force.flatten()
    assert force[0] == force[2] > 1 and force[1] == 0


def test_envs_are_independent():
    first, second = pair(3), pair(3)
    td_first, td_second = first.reset(), second.reset()
    robots_of(second)[1, :, :2] = torch.tensor([[0.0, 0.0], [0.4, 0.0]])
    speeds_of(second)[1] += 1.0
    actions = draw_actions(first, 12)
    for action in actions:
        td_first = first.step(td_first.exclude(("robot", "reward")).update(action))["next"]
        td_second = second.step(td_second.exclude(("robot", "reward")).update(action))["next"]
    assert torch.equal(first.physics[[0, 2]], second.physics[[0, 2]])
    assert torch.equal(td_first["state"][[0, 2]], td_second["state"][[0, 2]])
    assert not torch.equal(first.physics[1], second.physics[1])


# ------------------------------------------------------------- observations, rewards, the end


def test_observations_by_hand():
    """The formation's middle is (0, 0), its slots (0, 0.5) and (0, -0.5); 1 looks north."""
    env = pair(1, spacing=1.0)
    placed(env, [[0.0, 0.5], [0.3, -0.7]], [0.0, NORTH])
    env.twist[:] = torch.tensor([1.0, 0.4])
    robots_of(env)[0, 1, 7] += 0.2  # the first joint
    speeds = speeds_of(env)
    speeds[0, 1, :6] = torch.tensor([1.0, 2.0, 3.0, 0.1, 0.2, 0.3])
    speeds[0, 1, 6] = 0.7
    env.action[0, 1, 0] = 0.9
    output = env._observe(env.robots())
    zero, one = output["robot"]["observation"][0].split(1)
    parts = [3, 3, 3, J, J, J, 2, 1, 2, 2, 2, 2, 1]
    velocity, spin, gravity, joints, joint_speeds, action, *rest = one[0].split(parts)
    # Its x is the world's y, and its y is against the world's x.
    torch.testing.assert_close(velocity, torch.tensor([2.0, -1.0, 3.0]))
    torch.testing.assert_close(spin, torch.tensor([0.1, 0.2, 0.3]))
    torch.testing.assert_close(gravity, torch.tensor([0.0, 0.0, -1.0]))
    for found, value in ((joints, 0.2), (joint_speeds, 0.7), (action, 0.9)):
        torch.testing.assert_close(found[0].item(), value, atol=1e-6, rtol=0)
        assert (found[1:].abs() < 1e-6).all()
    command, turn, place, angle, mate, mate_velocity, upright = rest
    # Its slot moves with 1 + 0.4 * 0.5, and lies 0.3 m west and 0.2 m north.
    torch.testing.assert_close(command, torch.tensor([0.2, -1.2 + 0.3]))
    torch.testing.assert_close(turn, torch.tensor([0.4 - 0.5]))
    torch.testing.assert_close(place, torch.tensor([0.2, 0.3]))
    torch.testing.assert_close(angle, torch.tensor([-1.0, 0.0]), atol=1e-6, rtol=0)
    torch.testing.assert_close(mate, torch.tensor([1.2, 0.3]))
    torch.testing.assert_close(mate_velocity, torch.tensor([-2.0, 1.0]))
    assert upright.item() == pytest.approx(1)
    torch.testing.assert_close(zero[0, -5:], torch.tensor([0.3, -1.2, 1.0, 2.0, 1.0]))
    assert output["state"][0, -2:].tolist() == pytest.approx([1.0, 0.4])
    # Of each robot: what it sees of itself, place, height and angle, in the formation's frame.
    height = output["state"][0, :-2].view(2, -1)[1, -5:]
    torch.testing.assert_close(
        height, torch.tensor([0.3, -0.7, float(env._start[2]), -1.0, 0.0]), atol=1e-6, rtol=0
    )


def test_rotations_equal_mjlab():
    from mjlab.utils.lab_api.math import quat_apply_inverse

    env = pair(3)
    env.reset()
    robots_of(env)[..., 3:7] = torch.randn(3, 2, 4)
    robots_of(env)[..., 3:7] /= robots_of(env)[..., 3:7].norm(dim=-1, keepdim=True)
    speeds_of(env)[..., :3] = torch.randn(3, 2, 3)
    robots, quaternion = env.robots(), robots_of(env)[..., 3:7]
    down = torch.tensor([0.0, 0.0, -1.0]).expand(3, 2, 3)
    torch.testing.assert_close(robots.gravity, quat_apply_inverse(quaternion, down))
    torch.testing.assert_close(robots.own_velocity, quat_apply_inverse(quaternion, robots.velocity))


def test_actuators_move_the_joints_of_their_actions():
    """Each action moves its own joint, toward its sign."""
    env = pair(J, n_agents=1, action_scale=1.0)
    td = placed(env, [[0.0, 0.0]])
    robots_of(env)[..., 2] = 1.0  # in the air
    td["robot", "action"] = torch.eye(J).unsqueeze(1)
    for _ in range(3):
        td = env.step(td)["next"].set(("robot", "action"), torch.eye(J).unsqueeze(1))
    moved = env.robots().joints.squeeze(1)
    assert torch.equal(moved.argmax(1), torch.arange(J)) and (moved.diagonal() > 0.03).all()


def test_fallen_robot_is_terminated_and_the_episode_continues():
    env = pair(2)
    td = placed(env, [[0.0, 0.6], [0.0, -0.6]])
    side = torch.tensor([math.cos(0.7), math.sin(0.7), 0.0, 0.0])  # 80 degrees to the right
    robots_of(env)[0, 1, 2:7] = torch.cat([torch.tensor([0.3]), side])
    td = stand(env, td)
    assert td["robot", "terminated"].squeeze(-1).tolist() == [[False, True], [False, False]]
    assert td["robot", "mask"].tolist() == [[True, False], [True, True]]
    assert not td["done"].any()
    # Actions of the fallen robot have no effect, and its reward is 0.
    twin, given = pair(2), env.snapshot()
    twin.restore(given)
    action = draw_actions(env, 1)[0]
    other = action.clone()
    action["robot", "action"][0, 1], other["robot", "action"][0, 1] = torch.nan, 0.0
    found = env.step(td.clone().update(action))["next"]
    assert torch.equal(env.physics, twin.physics) is False
    twin.step(td.clone().update(other))
    assert torch.equal(env.physics, twin.physics)
    assert found["robot", "reward"][0, 1] == 0 and found["robot", "reward"][0, 0] != 0
    assert found["state"].isfinite().all()
    # Once all have fallen, the episode ends and the next one starts.
    robots_of(env)[0, 0, 3:7] = side
    td = found.exclude(("robot", "reward")).update(draw_actions(env, 1)[0])
    step, td = env.step_and_maybe_reset(td)
    assert step["next", "terminated"].squeeze(-1).tolist() == [True, False]
    assert td["robot", "mask"].all() and not td["done"].any()
    last, first = step["next", "robot", "observation"][0], td["robot", "observation"][0]
    assert (last[..., 8] > -0.5).all() and (first[..., 8] < -0.99).all()  # gravity: lying, standing


def test_time_limit_truncates():
    env = pair(2, max_steps=3)
    td = env.reset()
    for i in range(3):
        step, td = env.step_and_maybe_reset(td.set(("robot", "action"), torch.zeros(2, 2, J)))
        assert step["next", "truncated"].all() == (i == 2)
    assert not step["next", "terminated"].any() and not step["next", "robot", "terminated"].any()
    assert pair(1).max_steps == 1000


def test_env_with_non_finite_physics_terminates():
    """The simulator has too little memory for the contacts of standing robots."""
    env = pair(2)
    td = stand(env, env.reset(), 3)
    data = simulation_of(env._key, 2, "cpu").wp_data
    limit, data.njmax = data.njmax, 1
    try:
        td = stand(env, td)
    finally:
        data.njmax = limit
    assert td["robot", "terminated"].all() and td["terminated"].all()
    assert td["robot", "observation"].isfinite().all() and env.physics.isfinite().all()


# ------------------------------------------------------------------------- graphs and training


def test_graphs_equal_eager_bit_for_bit():
    batches = []
    for execution in ("eager", "trace"):
        torch.manual_seed(0)
        env = pair(4)
        learner = OnPolicyLearner(TeamSpec.from_env(env).groups, OnPolicyConfig())
        policy = TeamPolicy(learner.actors.values())
        collector = RolloutCollector(env, policy, frames_per_batch=32, execution=execution)
        steps = iter(collector)
        batches.append([next(steps).clone() for _ in range(2)])
    for eager, traced in zip(*batches):
        for key in [("next", "state"), ("next", "robot", "reward"), ("robot", "observation")]:
            assert torch.equal(eager[key], traced[key])


def test_humanoids_stand():
    env = make_env("mjlab/formation", num_envs=1, robot="g1", n_agents=2, seed=0)
    td = stand(env, env.reset(), 10)
    assert td["robot", "observation"].shape == (1, 2, 16 + 3 * 29 + 5)
    assert not td["robot", "terminated"].any() and (td["robot", "reward"] > 0).all()


def test_scene_shows_robots_and_slots():
    env = pair(2)
    env.reset()
    names = [shape.name for shape in scene(env, 1)]
    assert {"slot 0", "slot 1", "robot 0", "robot 1"} <= set(names)
    assert stage(env).half_size == pytest.approx((2.1, 2.1))


def test_recipe_trains_and_resumes(tmp_path):
    """Two iterations on 4 environments, and two more after a stop."""
    small = {
        "env.num_envs": 4,
        "env.max_steps": 8,
        "env.kwargs.cone": "pyramidal",
        "frames_per_batch": 32,
        "learner.minibatch_size": 16,
        "learner.num_epochs": 1,
        "evaluation.episodes": 4,
        "logging.progress": False,
    }
    folder = str(tmp_path / "run")
    run = torchrl_marl.train("mjlab_formation_mappo", total_frames=64, folder=folder, **small)
    assert run.summary["frames"] == 64 and math.isfinite(run.summary["return_after"])
    resumed = torchrl_marl.resume(folder, total_frames=128)
    assert resumed.summary["frames"] == 128
