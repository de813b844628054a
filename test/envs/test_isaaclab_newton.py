"""Isaac Lab 3.0 on Newton's physics, which needs neither Isaac Sim nor a GPU.

It pins other versions than ours, so it needs a separate environment: see
docs/environments/isaaclab.md.
"""

import contextlib
import sys
from pathlib import Path

import pytest
import torch
from contract import draw_actions, reset_some
from torchrl.envs import check_env_specs

import torchrl_marl
from torchrl_marl.envs import IsaacLabEnv, check_marl_env, make_env
from torchrl_marl.errors import ConfigError

pytest.importorskip("isaaclab_newton", reason="needs Isaac Lab 3.0")
pytestmark = pytest.mark.environments

PENDULUM = "Isaac-Pendulum-MARL-Direct"
HANDOVER = "Isaac-Shadow-Handover-Direct"
JOINTS = {
    "railCartJoint": "slider_to_cart",
    "cartPoleJoint": "cart_to_pole",
    "polePoleJoint": "pole_to_pendulum",
}
GROUND = """#usda 1.0
(
    defaultPrim = "World"
    metersPerUnit = 1
    upAxis = "Z"
)
def Xform "World"
{
    def Plane "CollisionPlane" (prepend apiSchemas = ["PhysicsCollisionAPI"])
    {
        uniform token axis = "Z"
    }
}
"""


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """Newton's own cart with two poles, with the joints' names of the task, and a plane."""
    folder = tmp_path_factory.mktemp("assets")
    examples = pytest.importorskip("newton.examples")
    robot = (Path(examples.__file__).parent / "assets" / "cartpole.usda").read_text()
    for theirs, task_s in JOINTS.items():
        robot = robot.replace(theirs, task_s)
    (folder / "robot.usda").write_text(robot)
    (folder / "ground.usda").write_text(GROUND)
    return {name: str(folder / f"{name}.usda") for name in ("robot", "ground")}


@pytest.fixture(scope="module")
def hands(files, tmp_path_factory):
    """Two Shadow hands, from the model that Gymnasium-Robotics ships."""
    pytest.importorskip("gymnasium_robotics")
    from shadow_hand import write

    hand = str(write(tmp_path_factory.mktemp("assets") / "hand.usda"))
    return {"right_robot": hand, "left_robot": hand, "ground": files["ground"]}


@contextlib.contextmanager
def pendulum(files, num_envs=5, name=PENDULUM, **kwargs):
    """One simulation a process: it is closed before another one is built."""
    kwargs = {"seed": 0, "action_scale": 1.0, "state": "world", "device": "cpu", **kwargs}
    env = make_env(f"isaaclab/{name}", num_envs=num_envs, usd_path=files, **kwargs)
    try:
        yield env
    finally:
        if not env.is_closed:
            env.close()


@pytest.fixture
def short(files):
    """Episodes of at most 12 steps, which are terminated or truncated."""
    with pendulum(files, 16, episode_length_s=0.2, max_cart_pos=0.1) as env:
        yield env


def steps(env, n, td=None):
    """Random steps with staggered ends of episodes."""
    td = env.reset() if td is None else td
    env.task.episode_length_buf[:] = torch.arange(env.num_envs) % 9
    for action in draw_actions(env, n):
        step, td = env.step_and_maybe_reset(td.clone(recurse=False).update(action))
        yield step, td


def test_named_task_runs_without_isaac_sim(files):
    with pendulum(files, 6) as env:
        assert type(env.task).__module__.startswith("isaaclab_tasks.")
        assert env.group_map == {"cart": ["cart"], "pendulum": ["pendulum"]}
        td = env.rollout(3)
        assert td["cart", "observation"].shape == (6, 3, 1, 4)
        assert td["next", "pendulum", "reward"].shape == (6, 3, 1, 1)
        joined = [td["next", group, "observation"].flatten(2) for group in env.group_map]
        assert torch.equal(td["next", "state"], torch.cat(joined, -1))
        check_env_specs(env)
    assert not {"omni", "isaacsim", "carb"} & set(sys.modules)


def test_cart_moves_in_the_direction_of_its_action(files):
    """A cart's observation starts with its position and its velocity."""
    with pendulum(files, 8) as env:
        td = env.reset()
        assert (td["cart", "observation"][..., 0] == 0).all()
        push = torch.tensor([1.0, -1.0]).repeat(4).view(8, 1, 1)
        for _ in range(4):
            td["cart", "action"], td["pendulum", "action"] = push, torch.zeros(8, 1, 1)
            _, td = env.step_and_maybe_reset(td)
        moved = td["cart", "observation"][:, 0, :2]
        assert (moved.sign() == push[..., 0].expand(8, 2)).all()


def test_environment_passes_check_marl_env(short):
    report = check_marl_env(short, n_steps=40)
    assert "another seed gives the same play" not in report


def test_last_observation_equals_final_obs_of_isaac_lab(files):
    settings = {"episode_length_s": 0.2, "max_cart_pos": 0.1, "compute_final_obs": True}
    ends = torch.zeros(2, dtype=torch.int64)
    with pendulum(files, 16, **settings) as env:
        for step, td in steps(env, 40):
            done = step["next", "done"].squeeze(-1)
            for name in ("cart", "pendulum"):
                last, first = step["next", name, "observation"][:, 0], td[name, "observation"][:, 0]
                assert torch.equal(last[~done], first[~done])
                if done.any():
                    final = env.task.extras[name]["final_obs"]
                    assert torch.equal(last[done], final[done])
                    assert (last[done] != first[done]).any(-1).all()
            ends += torch.stack([step["next", key].sum() for key in ("terminated", "truncated")])
    assert (ends > 5).all()  # both kinds of ends occurred


def test_equal_seeds_give_equal_episodes_and_others_do_not(short):
    def play(seed):
        short.set_seed(seed, static_seed=True)
        return torch.stack([td["state"] for _, td in steps(short, 20)])

    first = play(3)
    assert torch.equal(play(3), first)
    assert not torch.equal(play(4), first)


def test_partial_reset_resets_only_the_given_envs(short):
    td = [td for _, td in steps(short, 3)][-1]
    before, length = td["state"].clone(), short.task.episode_length_buf.clone()
    begun = torch.zeros(16, dtype=torch.bool)
    begun[[1, 6]] = True
    after = reset_some(short, td, [1, 6])
    assert torch.equal(after["state"][~begun], before[~begun])
    assert (after["state"][begun] != before[begun]).any(-1).all()
    assert (after["cart", "observation"][begun, 0, :2] == 0).all()  # place and velocity
    assert torch.equal(short.task.episode_length_buf, length.masked_fill(begun, 0))


def test_every_observation_has_the_noise_of_the_task(files):
    """Of resets, partial resets, steps and last steps."""
    from isaaclab.utils.noise import ConstantNoiseCfg, NoiseModelCfg
    from isaaclab_tasks.core.pendulum import PendulumMARLEnv, PendulumMARLEnvCfg
    from isaaclab_tasks.utils.hydra import resolve_presets

    cfg = resolve_presets(PendulumMARLEnvCfg())
    cfg.scene.num_envs, cfg.sim.device, cfg.episode_length_s = 5, "cpu", 0.1
    cfg.scene.robot.spawn.usd_path, cfg.scene.ground.spawn.usd_path = files.values()
    noise = NoiseModelCfg(noise_cfg=ConstantNoiseCfg(bias=100.0, operation="add"))
    cfg.observation_noise_model = {"cart": noise}
    env = IsaacLabEnv(PendulumMARLEnv(cfg), seed=0, action_scale=1.0, state="world")
    with contextlib.closing(env):
        td = env.reset()
        seen = [td, reset_some(env, td, [1, 3])]
        for step, td in steps(env, 12, seen[-1]):
            seen += [step["next"], td]
        seen = torch.stack([td["state"] for td in seen])
    assert ((seen[..., :4] - 100).abs() < 50).all()  # once, not twice
    assert (seen[..., 4:].abs() < 50).all()


def trained(folder, name, env, frames=320, **learner):
    """Two iterations."""
    run = torchrl_marl.train(
        f"isaaclab_{name}_mappo",
        env=env,
        total_frames=frames,
        frames_per_batch=frames // 2,
        device="cpu",
        learner={"minibatch_size": frames // 4, "num_epochs": 1, **learner},
        evaluation={"episodes": 8},
        logging={"progress": False},
        folder=str(folder / "run"),
    )
    assert run.summary["frames"] == frames


def test_pendulum_trains(files, tmp_path):
    env = {"num_envs": 8, "kwargs": {"usd_path": files, "episode_length_s": 0.2}}
    trained(tmp_path, "pendulum", env)


def test_two_hands_pass_check_marl_env(hands):
    with pendulum(hands, 3, HANDOVER, episode_length_s=0.2) as env:
        assert env.group_map == {"right_hand": ["right_hand"], "left_hand": ["left_hand"]}
        td = env.reset()
        assert td["left_hand", "observation"].shape == (3, 1, 157)
        assert td["state"].shape == (3, 290)
        check_marl_env(env, n_steps=20)


def test_motor_closes_the_fingers_of_its_hand(hands):
    """The last four of 20 motors pull tendons, each through two joints of a finger."""
    with pendulum(hands, 2, HANDOVER) as env:
        td = env.reset()
        td["right_hand", "action"] = torch.zeros(2, 1, 20)
        td["left_hand", "action"] = torch.zeros(2, 1, 20)
        td["right_hand", "action"][..., 16:], td["left_hand", "action"][..., 16:] = 1.0, -1.0
        for _ in range(15):
            td = env.step_and_maybe_reset(td)[1].update(td.select(*env.action_keys))
        right, left = env.task.right_hand, env.task.left_hand
        joints = [right.find_joints(f"rh_{finger}J(1|2)")[0] for finger in ("FF", "MF", "RF")]
        bent = [hand.data.joint_pos.torch[:, joints].sum(-1) for hand in (right, left)]
    assert (bent[0] > 1.5).all() and (bent[1] < 0.5).all()  # measured: above 2.1, below 0.1


def test_two_hands_train_with_agent_states(hands, tmp_path):
    from isaaclab_tasks.core.handover.handover_env import HandoverEnv
    from isaaclab_tasks.core.handover.handover_env_cfg import HandoverEnvCfg
    from isaaclab_tasks.utils.hydra import resolve_presets

    class OwnStates(HandoverEnv):
        def _get_states(self):
            seen = self._get_observations()
            return {"right_hand": super()._get_states(), "left_hand": seen["left_hand"]}

    cfg = resolve_presets(HandoverEnvCfg())
    cfg.scene.num_envs, cfg.sim.device, cfg.episode_length_s = 4, "cpu", 0.1
    cfg.state_space = {"right_hand": 290, "left_hand": 157}
    for asset, file in hands.items():
        getattr(cfg.scene, asset).spawn.usd_path = file
    env = IsaacLabEnv(OwnStates(cfg), seed=0, action_scale=1.0, state="world")
    with contextlib.closing(env):
        td = env.reset()
        assert td["right_hand", "state"].shape == (4, 1, 290)
        assert td["left_hand", "state"].shape == (4, 1, 157)
        trained(tmp_path, "handover", env, 80, central_input="agent_state")


REFUSED = {
    "a name of 2.3": ({"name": "Isaac-Cart-Double-Pendulum-Direct-v0"}, f"is '{PENDULUM}' in"),
    "no such name": ({"name": "Isaac-Pendulum-MARL"}, f"did you mean '{PENDULUM}'"),
    "no such file": ({"usd_path": "robot.usd"}, "there is no file 'robot.usd' for 'robot'"),
    "no such asset": ({"usd_path": {"cart": "a"}}, "expected one of ['ground', 'robot']"),
    "no such setting": ({"episode_length": 2}, "did you mean 'episode_length_s'"),
    "no such value": ({"max_cart_pos": "far"}, "does not take max_cart_pos='far'"),
}


@pytest.mark.parametrize("kwargs, message", REFUSED.values(), ids=REFUSED)
def test_invalid_arguments_are_refused(kwargs, message):
    kwargs = {"name": PENDULUM, "num_envs": 2, "action_scale": 1.0, "device": "cpu", **kwargs}
    with pytest.raises(ConfigError) as caught:
        IsaacLabEnv(kwargs.pop("name"), **kwargs)
    assert message in str(caught.value)
