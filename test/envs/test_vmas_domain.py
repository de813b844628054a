"""Masses, drag, forces and gravity of VMAS scenarios that each episode draws."""

import pytest
import torch
from contract import asking_reset, assert_same
from graph_batches import assert_equal
from torchrl.envs.utils import step_mdp

from torchrl_marl.collectors import RolloutCollector
from torchrl_marl.envs import make_env
from torchrl_marl.errors import ConfigError

vmas = pytest.importorskip("torchrl_marl.envs.vmas")
RANGES = {
    "agent_mass": [0.5, 2.0, "log"],
    "landmark_mass": [0.5, 2.0],
    "agent_drag": [0.5, 1.5],
    "agent_force": [0.8, 1.2],
    "gravity": [0.5, 1.5],
}


def balance(num_envs=4, ranges=None, max_steps=6, **kwargs):
    env = vmas.VmasEnv("balance", num_envs=num_envs, seed=0, max_steps=max_steps, **kwargs)
    env.randomize(ranges or {})
    return env


def speeds(env, ranges, n_steps=1, force=0.5):
    """Speeds of the first agent after steps with a force to the right, ``[E]``."""
    env.randomize(ranges)
    td = env.reset()
    for _ in range(n_steps):
        td["agents", "action"] = torch.zeros_like(env.rand_action()["agents", "action"])
        td["agents", "action"][..., 0] = force
        td = step_mdp(env.step(td))
    return env._env.agents[0].state.vel[:, 0].clone()


# ---------------------------------------------------------------------------------- physics


def test_physics_by_hand():
    """A step of 0.1 s: a force of 0.5 speeds a mass of 1 up by 0.05; drag takes a quarter."""
    env = vmas.VmasEnv("simple_spread", num_envs=5, seed=0, n_agents=1, obs_agents=False)
    action = env._env.agents[0].u_multiplier * 0.5 * 0.1
    assert speeds(env, {}).tolist() == pytest.approx([action] * 5)
    assert speeds(env, {"agent_mass": 2.0}).tolist() == pytest.approx([action / 2] * 5)
    drawn = speeds(env, {"agent_mass": [0.5, 2.0]})
    factors = env.domain_parameters["agent_mass"][:, 0]
    assert torch.allclose(drawn, action / factors) and factors.unique().numel() == 5
    drawn = speeds(env, {"agent_force": [0.5, 1.5]})
    assert torch.allclose(drawn, action * env.domain_parameters["agent_force"][:, 0])
    drawn = speeds(env, {"agent_drag": [0.5, 1.5]}, n_steps=2)
    drag = 0.25 * env.domain_parameters["agent_drag"][:, 0]
    assert torch.allclose(drawn, action * (1 - drag) + action)


def test_gravity_by_hand():
    env = balance(3, {"gravity": [0.5, 1.5]})
    env.reset()
    world = env._env.world
    total = [x.gravity + world._gravity for x in world.entities if x.gravity is not None]
    factors = env.domain_parameters["gravity"]
    assert len(total) == 5 and factors.shape == (3, 5)  # agents, ball and beam
    for i, gravity in enumerate(total):
        assert torch.allclose(gravity, factors[:, i : i + 1] * torch.tensor([0.0, -0.05]))


def test_friction_by_hand():
    env = vmas.VmasEnv("give_way", num_envs=3, seed=0)
    env.randomize({"agent_friction": [0.5, 2.0]})
    env.reset()
    factors = env.domain_parameters["agent_friction"]
    found = torch.cat([agent.linear_friction for agent in env._env.agents], 1)
    assert torch.allclose(found, 0.1 * factors) and factors.unique().numel() == 6


def test_factors_of_one_have_no_effect():
    """Fixed factors of 1 and no randomization give equal rollouts bit for bit."""
    runs = [balance(ranges=x) for x in ({}, dict.fromkeys(RANGES, [1, 1]), RANGES)]
    runs[2].randomize({})
    found = []
    for env in runs:
        env.set_seed(1)
        torch.manual_seed(0)
        found.append(env.rollout(8, break_when_any_done=False))
    assert_same(found[0], found[1])
    assert_same(found[0], found[2])


# ---------------------------------------------------------------------- resets and snapshots


def attributes_of(env):
    """Each parameter's factors as the entities have them, ``[E, n]``."""
    domain, n = env._env.domain, env.num_envs
    found = {}
    for name, parameters in domain.parameters.items():
        factors = []
        for one in parameters:
            less = 0.0 if one.less is None else one.less
            value = (getattr(one.holder, one.attribute) + less) / one.nominal
            factors.append(value.nan_to_num().view(n, -1).amax(-1))
        found[name] = torch.stack(factors, -1)
    return found


def assert_in_step(env):
    """The entities have the factors of ``domain_parameters``, within the ranges."""
    for name, factors in attributes_of(env).items():
        expected = env.domain_parameters[name]
        assert torch.allclose(factors, expected), name
        low, high, *_ = RANGES[name]
        assert low <= expected.min() and expected.max() <= high
        assert expected.unique().numel() == expected.numel()


def test_partial_reset_draws_only_for_its_envs():
    env = balance(ranges=RANGES)
    td = env.reset()
    assert_in_step(env)
    before = env.domain_parameters.clone()
    for _ in range(2):  # the second draw is from the bank
        env.reset(asking_reset(env, td, [1, 2]))
        assert_in_step(env)
        for name, x in env.domain_parameters.items():
            assert (x != before[name]).all(1).tolist() == [False, True, True, False]


def test_snapshot_reproduces_draws():
    env = balance(ranges=RANGES)
    td = step_mdp(env.rollout(9, break_when_any_done=False)[:, -1])
    saved, runs = env.snapshot(), []
    for _ in range(2):
        env.restore(saved)
        torch.manual_seed(0)
        options = {"break_when_any_done": False, "auto_reset": False, "tensordict": td.clone()}
        runs.append((env.rollout(9, **options), env.domain_parameters.clone()))
    assert_same(*(run for run, _ in runs))
    assert all(map(torch.equal, *(x.values() for _, x in runs)))


def test_seeds_reproduce_draws():
    env, runs = balance(ranges=RANGES), []
    for seed in (1, 1, 2):
        env.set_seed(seed)
        env.rollout(8, break_when_any_done=False)
        runs.append(env.domain_parameters["agent_mass"].clone())
    assert torch.equal(runs[0], runs[1]) and not torch.equal(runs[0], runs[2])


def test_partial_reset_of_scenario_with_a_layout_for_each_env():
    env = vmas.VmasEnv("passage", num_envs=3, seed=0, max_steps=2)
    env.randomize({"agent_mass": [0.5, 1.5]})
    td = env.reset()
    before = env.domain_parameters["agent_mass"]
    env.reset(asking_reset(env, td, [2]))
    same = (env.domain_parameters["agent_mass"] == before).all(1)
    assert same.tolist() == [True, True, False]


# ----------------------------------------------------------------------------------- graphs


def push(td):
    return td.set(("agents", "action"), (td["agents", "observation"][..., :2] * 9).sin())


def collector_of(execution, n_steps, max_steps):
    env = balance(ranges=RANGES, max_steps=max_steps, info=False)
    options = {"frames_per_batch": 4 * n_steps, "execution": execution}
    return RolloutCollector(env, push, **options)


def test_graph_equals_eager_bit_for_bit():
    eager, graph = (collector_of(x, 4, 50) for x in ("eager", "trace"))
    for _ in range(2):
        assert_equal(eager.rollout(), graph.rollout())
    assert graph.execution == "trace"


def test_graph_draws_for_each_new_episode():
    collector = collector_of("trace", 5, 3)
    known = []
    for _ in range(2):
        collector.rollout()
        assert_in_step(collector.env)
        known.append(collector.env.domain_parameters["agent_mass"].clone())
    assert collector.execution == "trace" and not (known[0] == known[1]).any()


def test_compiled_step_draws_for_each_new_episode():
    """Also for single steps, whose graphs have a separate pool."""
    env = balance(ranges=RANGES, max_steps=2, execution="eager")
    env._execution = "trace"
    td = env.reset()
    before = env.domain_parameters.clone()
    for _ in range(2):
        _, td = env.step_and_maybe_reset(push(td))
    assert env._execution == "trace" and env._graphs is not None
    assert_in_step(env)
    assert not (env.domain_parameters["agent_mass"] == before["agent_mass"]).any()


# --------------------------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("scenario", "ranges", "message"),
    [
        ("balance", {"agent_mas": 1}, "did you mean 'agent_mass'\\? it has agent_mass, agent_drag"),
        ("balance", {"agent_friction": 1}, "balance has no parameter 'agent_friction'"),
        ("balance", {"agent_max_speed": [1, 2]}, "since VMAS compares it with all envs at once"),
        ("balance", {"agent_mass": [0, 1]}, "agent_mass has factors from 0, expected positive"),
        ("diff_drive", {"agent_mass": [1, 2]}, "agent_mass cannot differ between envs"),
        ("het_mass", {"agent_mass": [1, 2]}, "since the scenario sets it at each reset"),
    ],
)
def test_invalid_ranges_raise(scenario, ranges, message):
    env = vmas.VmasEnv(scenario, num_envs=2)
    with pytest.raises(ConfigError, match=message):
        env.randomize(ranges)
    assert env.domain_parameters.is_empty()


def test_randomize_setting_of_make_env():
    ranges = {"agent_mass": 2.0, "action_delay": [1, 2]}
    env = make_env("vmas/balance", num_envs=2, max_steps=3, randomize=ranges)
    assert env.rollout(4)["agents", "action_delay"].min() >= 1
    assert [agent.mass for agent in env.base_env._env.agents] == [2.0] * 3
