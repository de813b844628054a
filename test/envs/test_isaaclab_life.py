"""Isaac Lab's tasks: last observations, done flags and partial resets."""

import math

import pytest
import torch
from contract import asking_reset, draw_actions, reset_some
from isaac_environments import (
    NAMES,
    isaac_stand_ins,
    make_pendulum,
    make_robots,
    make_robots_task,
    values_of_first_env,
)
from operations import CountOperations

from torchrl_marl.envs import IsaacLabEnv
from torchrl_marl.envs.agents.life_cycle import GroupFlags
from torchrl_marl.envs.isaaclab.simulation import Ends

pytestmark = pytest.mark.environments


@pytest.fixture(scope="module")
def isaac():
    with isaac_stand_ins() as isaac:
        yield isaac


# ------------------------------------------------------------------------------- last observations


class Twin:
    """The same simulation without resets; it is set to the start of each new episode."""

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


def test_last_observation_equals_a_simulation_without_resets(isaac):
    env = make_pendulum(isaac, 16, state="world", episode_length_s=0.2, max_cart_pos=0.1)
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
    assert (ends > 5).all()  # both kinds of ends occurred


def test_last_observation_has_the_noise_of_the_task(isaac):
    from isaaclab.utils.noise import ConstantNoiseCfg, NoiseModelCfg

    noise = NoiseModelCfg(noise_cfg=ConstantNoiseCfg(bias=100.0, operation="add"))
    settings = {"observation_noise_model": {"robot_1": noise}, "state_space": -1}
    env = make_robots(isaac, max_steps=2, settings=settings, state="world")
    td = env.rollout(4, break_when_any_done=False)["next"]
    number = td["robot", "observation"][..., 2]  # constant without the noise
    assert number[..., 1].tolist() == [[101.0] * 4] * 5
    assert number[..., 2].tolist() == [[2.0] * 4] * 5
    assert torch.equal(td["state"], td["robot", "observation"].flatten(2))
    # So have first observations, after full and partial resets.
    first = env.reset()
    assert first["robot", "observation"][:, 1, 2].tolist() == [101.0] * 5
    begun = reset_some(env, first, [1, 3])
    assert begun["robot", "observation"][:, 1, 2].tolist() == [101.0] * 5
    assert torch.equal(begun["state"], begun["robot", "observation"].flatten(1))


def test_previous_observation_repeats_without_terminal_ones(isaac):
    env = make_robots(isaac, max_steps=3, terminal_observations=False)
    asked, observe = [], env.task._get_observations
    env.task._get_observations = lambda: asked.append(0) or observe()
    td = env.rollout(3, break_when_any_done=False)
    assert len(asked) == 1 + 3
    assert td["next", "done"][:, -1].all()
    seen, after = td["robot", "observation"], td["next", "robot", "observation"]
    assert torch.equal(after[:, :2], seen[:, 1:])
    assert torch.equal(after[:, 2], seen[:, 2])


def test_earlier_outputs_are_not_overwritten(isaac):
    env = make_robots(isaac, max_steps=4, state="world")
    td, given = env.reset(), []
    given.append((td, td.clone()))
    for action in draw_actions(env, 12):
        step, td = env.step_and_maybe_reset(td.clone(recurse=False).update(action))
        given += [(x, x.clone()) for x in (step, td)]
    td = reset_some(env, td, [1, 3])
    for kept, copy in given:
        assert (kept == copy).all()


# ---------------------------------------------------------------------------------- life cycle


def test_done_flags_by_hand():
    """Two agents in six envs: earlier flags, flags of the task, and the expected result."""
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
    # Agents alive at a time limit are bootstrapped, agents that ended before are not.
    assert agents.mask.int().tolist() == [[1, 0], [0, 0], [0, 1], [0, 0], [1, 1], [0, 0]]
    assert agents.truncated[..., 0].int().tolist() == [
        [0, 0],
        [0, 0],
        [0, 1],
        [0, 1],
        [1, 1],
        [0, 0],
    ]


SCRIPTS = {
    # Agent -> step -> end, set in that step only. Then: last step, flag of the root, and masks.
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
def test_done_flags_of_agents_and_of_the_episode(isaac, script, expected):
    last, how, masks = expected

    def env():
        return make_robots(isaac, settings={"script": script, "episode_length_s": 6.0})

    n = last + 1
    ends = [0] * n
    ends[last - 1] = 1
    assert values_of_first_env(env(), n, "done", None) == [[x] for x in ends]
    assert values_of_first_env(env(), n, how, None) == [[x] for x in ends]
    assert values_of_first_env(env(), last, "mask") == masks
    # An agent's flag stays set until the reset; the next episode has all agents again.
    terminated = {name for name, ends in script.items() if "terminated" in ends.values()}
    assert values_of_first_env(env(), last, "terminated")[-1] == [
        int(name in terminated) for name in NAMES
    ]
    assert values_of_first_env(env(), last, "done")[-1] == [1] * 4
    assert values_of_first_env(env(), n, "done")[last] == values_of_first_env(env(), n, "done")[0]


def test_isaac_lab_itself_does_not_end_mixed_episodes(isaac):
    """The reason for our own done flags: see the mixed ends above."""
    ends = {"robot_0": {1: "terminated"}, **{name: {3: "timed out"} for name in NAMES[1:]}}
    task = make_robots_task(isaac, script=ends)
    task.reset()
    action = {name: torch.zeros(5, 1) for name in NAMES}
    assert not any(task.step(action) and task.reset_buf.any() for _ in range(20))


def test_own_time_limit_and_that_of_the_task_truncate(isaac):
    assert values_of_first_env(
        make_robots(isaac, max_steps=3, settings={"script": {}}), 4, "truncated", None
    ) == [*([0], [0], [1], [0])]
    settings = {"script": {}, "episode_length_s": 3.0}
    env = make_robots(isaac, max_steps=50, settings=settings)
    assert values_of_first_env(env, 4, "truncated", None) == [[0], [1], [0], [1]]


def test_actions_of_dead_agents_do_not_reach_the_task(isaac):
    env = make_robots(isaac, settings={"script": {"robot_2": {1: "terminated"}}})
    td = env.rollout(2)[:, -1]["next"]
    poison = torch.full((5, 4, 1), 0.5)
    poison[:, 2] = math.nan
    before = env.task.x.clone()
    env.step(td.exclude("next").set(("robot", "action"), poison))
    assert torch.equal(env.task.x[:, 2], before[:, 2])
    assert (env.task.actions["robot_2"] == 0).all()
    assert torch.allclose(env.task.x[:, 1], before[:, 1] + 0.15)


def test_late_agent_is_masked_until_it_appears(isaac):
    settings = {"joins": {"robot_3": 2}, "script": {name: {4: "terminated"} for name in NAMES[:3]}}
    env = make_robots(isaac, settings=settings)
    td = env.rollout(4, break_when_any_done=False)
    assert td["robot", "mask"][0].int().tolist() == [[1, 1, 1, 0]] * 2 + [[1] * 4] * 2
    assert (td["robot", "observation"][:, :2, 3] == 0).all()
    assert (td["next", "robot", "reward"][:, 0, 3] == 0).all()
    assert not td["next", "done"].any()
    # The episode is terminated without the agent that has not appeared.
    settings["joins"] = {"robot_3": 9}
    td = make_robots(isaac, settings=settings).rollout(4)["next"]
    assert td["terminated"][:, -1].all()


def test_partial_reset_resets_only_the_given_envs(isaac):
    env = make_robots(isaac, state="world", settings={"script": {"robot_1": {1: "terminated"}}})
    td = env.rollout(2)[:, -1]["next"].exclude("next")
    before = td.clone()
    after = reset_some(env, td, [0, 3])
    begun = torch.tensor([True, False, False, True, False])
    assert torch.equal(after["state"][~begun], before["state"][~begun])
    assert (after["state"][begun] != before["state"][begun]).all()
    assert after["robot", "mask"].all(-1).tolist() == begun.tolist()
    assert env.task.episode_length_buf.tolist() == [0, 2, 2, 0, 2]


def test_number_of_reset_operations_is_independent_of_num_envs(isaac):
    env, counts = make_robots(isaac, 9, state="world"), set()
    td = env.rollout(2)[:, -1]["next"].exclude("next")
    for envs in ([2, 3], [3, 4, 8], list(range(1, 9))):
        asked = asking_reset(env, td, envs)
        with CountOperations() as operations:
            env._reset(asked)
        counts.add(operations.count)
    assert len(counts) == 1


def test_task_events_randomize_only_envs_that_are_reset(isaac):
    """Isaac Lab's own randomization runs in each reset, only in the envs that it resets."""
    from isaaclab.managers import EventTermCfg

    def draw_mass(task, env_ids, low, high):
        task.mass[env_ids] = low + (high - low) * torch.rand(len(env_ids))

    params = {"low": 1.0, "high": 3.0}
    events = {"mass": EventTermCfg(func=draw_mass, mode="reset", params=params)}
    task = make_robots_task(isaac, 3, events=events)
    task.mass = torch.zeros(3)
    env = IsaacLabEnv(task, seed=0, action_scale=1.0)
    td = env.reset()
    masses = task.mass.clone()
    assert masses.unique().numel() == 3 and masses.min() >= 1 and masses.max() <= 3
    env.reset(asking_reset(env, td, [1]))
    assert (task.mass != masses).tolist() == [False, True, False]
