"""VmasEnv: equal to VMAS and to TorchRL's VmasEnv, and its additions."""

import warnings

import pytest
import torch
import torchrl.envs
from contract import asking_reset, draw_actions, reset_some
from torchrl.envs.utils import step_mdp

vmas = pytest.importorskip("vmas")

from torchrl_marl.envs import VmasEnv  # noqa: E402
from torchrl_marl.envs.vmas.library import scenario_arguments, scenario_names  # noqa: E402
from torchrl_marl.errors import ConfigError, SimulatorStateError  # noqa: E402
from torchrl_marl.runtime.random_state import offset_seed  # noqa: E402

AGENTS = ("agents", "observation")
QUICK = [
    *("balance", "circle_trajectory", "diff_drive", "dispersion", "drone", "dropout", "goal"),
    *("het_mass", "kinematic_bicycle", "line_trajectory", "navigation", "simple"),
    *("simple_adversary", "simple_crypto", "simple_push", "simple_reference", "simple_spread"),
    *("simple_speaker_listener", "transport", "vel_control", "wheel", "wind_flocking"),
]
TAG = ["adversary_0", "adversary_1", "adversary_2", "agent_0"]


def stepped(env, n=2):
    td = env.reset()
    for action in draw_actions(env, n):
        td = step_mdp(env.step(td.update(action)))
    return td


@pytest.mark.parametrize("scenario", ["balance", "navigation", "simple_spread"])
def test_full_reset_and_steps_equal_vmas(scenario):
    env = VmasEnv(scenario, num_envs=6, seed=4)
    stock = vmas.make_env(scenario, 6)
    expected, td = stock.reset(seed=offset_seed(4)), env.reset()
    assert torch.equal(td[AGENTS], torch.stack(expected, 1))
    for action in draw_actions(env, 10):
        td = step_mdp(env.step(td.update(action)), exclude_reward=False)
        observations, rewards, dones, _ = stock.step(list(action["agents", "action"].unbind(1)))
        assert torch.equal(td[AGENTS], torch.stack(observations, 1))
        assert torch.equal(td["agents", "reward"].squeeze(-1), torch.stack(rewards, 1))
        assert torch.equal(td["terminated"].squeeze(-1), dones)


def test_env_and_policy_with_the_same_seed_draw_different_numbers():
    """Stock VMAS seeds the global generator by ``torch.manual_seed`` and draws from it."""
    env = VmasEnv("simple_spread", num_envs=6, seed=4)
    stock = vmas.make_env("simple_spread", 6)
    for _ in range(2):
        seen, known = env.reset()[AGENTS], torch.stack(stock.reset(seed=4), 1)
        assert not (seen == known)[..., :2].any()  # where the agents are
        torch.manual_seed(4)
        own = torch.get_rng_state()
        env.set_seed(4)
        assert torch.equal(torch.get_rng_state(), own)
        assert not torch.equal(env.random_state.state_dict()["torch"], own)


def test_drop_in_replacement_for_the_vmas_env_of_torchrl():
    kwargs = {"num_envs": 4, "seed": 0, "continuous_actions": False, "n_agents": 3}
    ours, theirs = VmasEnv("balance", **kwargs), torchrl.envs.VmasEnv("balance", **kwargs)
    assert ours.group_map == theirs.group_map
    assert ours.full_action_spec == theirs.full_action_spec
    assert ours.full_observation_spec == theirs.full_observation_spec
    assert ours.full_reward_spec == theirs.full_reward_spec
    found, expected = ours.rollout(2), theirs.rollout(2)
    extra = {"truncated", ("next", "truncated")}
    assert set(found.keys(True, True)) - extra == set(expected.keys(True, True))


def test_time_limit_truncates():
    env = VmasEnv("balance", num_envs=4, seed=0, max_steps=3)
    td = env.rollout(3, break_when_any_done=False)["next"]
    ended = td["terminated"].any(1)
    assert torch.equal(td["truncated"][:, -1], ~ended)
    assert not td["truncated"][:, :-1].any()


@pytest.mark.parametrize(
    ("scenario", "goal"),
    [
        ("simple_push", lambda env: env.world.agents[0].goal),
        ("simple_adversary", lambda env: env.world.agents[0].goal),
        ("simple_reference", lambda env: env.world.agents[0].goal_b),
        ("simple_speaker_listener", lambda env: env.world.agents[0].goal_b),
    ],
)
def test_partial_reset_keeps_goals_of_running_envs(scenario, goal):
    # These scenarios choose their goal object, for all envs, in a full reset.
    env = VmasEnv(scenario, num_envs=6, seed=0)
    td = stepped(env)
    running = [0, 2, 3, 5]
    for _ in range(6):
        before, where = goal(env._env), goal(env._env).state.pos.clone()
        after = reset_some(env, td, [1, 4])
        assert goal(env._env) is before
        assert torch.equal(before.state.pos[running], where[running])
        for key in (k for k in td.keys(True, True) if k[-1] == "observation"):
            assert torch.equal(td[key][running], after[key][running])
        td = after


@pytest.mark.parametrize(
    ("scenario", "num_envs", "kwargs"),
    [
        ("balance", 3, {"n_agents": 3}),
        ("balance", 2, {"n_agents": 3}),
        ("balance", 1, {}),
        ("navigation", 12, {"n_agents": 2}),
        ("navigation", 4, {"n_agents": 4}),
        ("simple_spread", 3, {}),
        ("simple_tag", 4, {}),
    ],
)
def test_num_envs_may_equal_another_dimension(scenario, num_envs, kwargs):
    env = VmasEnv(scenario, num_envs=num_envs, seed=0, **kwargs)
    td = stepped(env)
    chosen = list(range(0, num_envs, 2))
    running = [i for i in range(num_envs) if i not in chosen]
    before = env.snapshot()["simulator", "batched"]
    for _ in range(2):
        after_reset = reset_some(env, td, chosen)
    after = env.snapshot()["simulator", "batched"]
    for key, x in before.items():
        assert x.shape[0] == num_envs
        assert torch.equal(x[running], after[key][running]), key
    assert not after_reset["done"].any()


def test_partial_resets_have_the_distribution_of_full_resets():
    def goals(env):
        return env._env.scenario.package.goal.state.pos

    env = VmasEnv("balance", num_envs=2000, seed=0)
    td = env.reset()
    full = goals(env).clone()
    for half in (range(1000), range(1000, 2000)):
        td = reset_some(env, td, list(half))
    partial = goals(env)
    assert not (full == partial).all(-1).any()
    torch.testing.assert_close(full.mean(0), partial.mean(0), atol=0.08, rtol=0)
    torch.testing.assert_close(full.std(0), partial.std(0), atol=0.05, rtol=0)
    torch.testing.assert_close(full.amin(0), partial.amin(0), atol=0.02, rtol=0)
    torch.testing.assert_close(full.amax(0), partial.amax(0), atol=0.02, rtol=0)


def test_repeated_resets_of_one_env_differ():
    env = VmasEnv("balance", num_envs=3, seed=0)
    td, seen = env.reset(), []
    for _ in range(8):
        td = reset_some(env, td, [1])
        seen.append(tuple(td[AGENTS][1].flatten().tolist()))
    assert len(set(seen)) == 8


class Remembers(vmas.make_env("balance", 1).scenario.__class__):
    """Observations are noisy and have a memory, in place and in a new tensor."""

    def make_world(self, batch_dim, device, **kwargs):
        self.looks, self.history = torch.zeros(batch_dim), torch.zeros(batch_dim, 3)
        self.pair = torch.zeros(batch_dim, 2)
        self.view = self.pair[:, 1]
        return super().make_world(batch_dim, device, **kwargs)

    def observation(self, agent):
        if agent is self.world.agents[0]:
            self.looks += 1
            self.history = torch.cat([self.history[:, 1:], self.looks.unsqueeze(-1)], 1)
        noise = torch.randn_like(self.history)
        return torch.cat([super().observation(agent), self.history, noise], -1)


class RemembersInAView(Remembers):
    def observation(self, agent):
        self.view += 1
        return super().observation(agent)


class BeginsAnew(Remembers):
    """Clears its memory, since graphs refuse initial states that depend on earlier ones."""

    def reset_world_at(self, env_index=None):
        super().reset_world_at(env_index)
        rows = slice(None) if env_index is None else env_index
        self.looks[rows], self.history[rows] = 0, 0


@pytest.mark.parametrize(
    ("make", "execution"),
    [(Remembers, "eager"), (RemembersInAView, "eager"), (BeginsAnew, "trace")],
)
def test_partial_reset_does_not_observe_running_envs_again(make, execution):
    env = VmasEnv(make(), num_envs=6, seed=0, n_agents=2, execution=execution)
    td = stepped(env, 2)
    looks = env._env.scenario.looks.clone()
    for begun in ([1, 4], [1], [0, 1, 5]):
        running = [i for i in range(6) if i not in begun]
        td = step_mdp(env.step(td.update(draw_actions(env, 1)[0])))
        # Past EnvBase.reset, as transforms call it: they would see the rows that it leaves out.
        given = env._reset(asking_reset(env, td, begun))
        assert torch.equal(given[AGENTS][running], td[AGENTS][running])
        assert not (given[AGENTS][begun] == td[AGENTS][begun])[..., -3:].any()
        looks += 1
        assert env._execution == execution
        scenario = env._env.scenario
        assert torch.equal(scenario.looks[running], looks[running])
        if execution == "eager":
            looks[begun] += 1  # one observation at the end of the step, one at the reset
            assert torch.equal(scenario.looks, looks)
            assert scenario.view.data_ptr() == scenario.pair[:, 1].data_ptr()
        looks = scenario.looks.clone()
        assert torch.equal(scenario.history[:, -1], looks)
        td = env.reset(td) if "_reset" in td.keys() else td.update(given)


def test_partial_reset_of_a_lazy_group_keeps_running_envs():
    env = VmasEnv("simple_tag", num_envs=4, seed=0, group_map={"all": TAG})
    td = stepped(env)
    given = env._reset(asking_reset(env, td, [2]))["all"]
    for before, after in zip(td["all"].unbind(1), given.unbind(1)):
        same = (before["observation"] == after["observation"]).all(-1)
        assert same.tolist() == [True, True, False, True]


def test_scenario_with_unreadable_state_is_reset_env_by_env():
    env = VmasEnv("road_traffic", num_envs=2, seed=0, n_agents=4)
    td = env.rand_step(env.reset())["next"]
    with pytest.warns(UserWarning, match="road_traffic: envs are reset one by one"):
        after = reset_some(env, td, [1])
    assert torch.equal(after[AGENTS][0], td[AGENTS][0])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        env._reset(asking_reset(env, td, [0]))
    with pytest.raises(SimulatorStateError):
        env.snapshot()


def test_info_on_request():
    without = VmasEnv("balance", num_envs=3, seed=0, info=False)
    with_info = VmasEnv("balance", num_envs=3, seed=0, info=True)
    assert ("agents", "info") not in without.rollout(2).keys(True)
    assert ("agents", "info") in with_info.rollout(2).keys(True)
    action = draw_actions(without, 1)[0]
    first, second = (env.step(env.reset().update(action)) for env in (without, with_info))
    assert torch.equal(first["next", "agents", "reward"], second["next", "agents", "reward"])


def test_central_state():
    env = VmasEnv("balance", num_envs=3, seed=0, state="observations", n_agents=2)
    td = env.rollout(2)
    assert torch.equal(td["next", "state"], td["next", "agents", "observation"].flatten(2))
    own = VmasEnv("balance", num_envs=3, state=lambda env: env.world.agents[0].state.pos)
    assert own.rollout(2)["state"].shape == (3, 2, 2)
    with pytest.raises(ConfigError, match=r"returned shape \(3,\), expected \[3, S\]"):
        VmasEnv("balance", num_envs=3, state=lambda env: env.world.agents[0].state.pos[:, 0])
    with pytest.raises(ConfigError, match="state is 'all'"):
        VmasEnv("balance", num_envs=3, state="all")


def test_invalid_arguments_are_refused():
    with pytest.raises(ConfigError, match="no argument 'n_agent'; did you mean 'n_agents'"):
        VmasEnv("balance", num_envs=2, n_agent=9)
    with pytest.raises(ConfigError, match="unknown VMAS scenario 'blance'; did you mean 'balance'"):
        VmasEnv("blance", num_envs=2)
    with pytest.raises(ConfigError, match="num_envs is 0"):
        VmasEnv("balance", num_envs=0)
    with pytest.raises(ConfigError, match="no scenario file"):
        VmasEnv("there/is/none.py", num_envs=2)


@pytest.mark.parametrize(
    "batch_size, words",
    [
        ((3,), "does not match"),
        ((4, 2), "is not compatible with"),
        ((4, 1, 1), "is not compatible"),
    ],
)
def test_wrong_batch_size_raises_the_error_of_torchrl_and_ours(batch_size, words):
    found = []
    for cls in (torchrl.envs.VmasEnv, VmasEnv):
        with pytest.raises(TypeError, match=f"^Batch size used in constructor {words}") as caught:
            cls("balance", num_envs=4, batch_size=batch_size)
        found.append(caught.value)
    theirs, ours = found
    assert str(theirs) in str(ours) and isinstance(ours, ConfigError)
    assert f"batch_size is {batch_size}, expected (4,)" in str(ours)


def test_differences_to_torchrl_are_those_in_the_readme():
    """Specs, data and attributes, with one more key: ``truncated``."""

    def looked_at(cls, scenario):
        env = cls(scenario, num_envs=3, max_steps=2, seed=0)
        td = env.rollout(4, break_when_any_done=False, return_contiguous=False)
        specs = [getattr(env, f"full_{part}_spec") for part in ("observation", "action", "reward")]
        specs = [dict(spec.items(True, True)) for spec in specs]
        names = ("group_map", "het_specs", "het_specs_map", "agent_names", "scenario_name")
        names += ("n_agents", "num_envs", "available_envs", "action_keys", "reward_keys")
        shapes = {str(k): (x.shape, x.dtype) for k, x in td.items(True, True)}
        env.close()
        return shapes, specs, [getattr(env, name) for name in names], env.done_keys

    for scenario in ("balance", "simple_tag", "simple_world_comm"):
        theirs, ours = (looked_at(cls, scenario) for cls in (torchrl.envs.VmasEnv, VmasEnv))
        assert ours[1:3] == theirs[1:3]
        assert theirs[3] == ["done", "terminated"] and ours[3] == [*theirs[3], "truncated"]
        own = {"truncated", "('next', 'truncated')"}
        assert {key: x for key, x in ours[0].items() if key not in own} == theirs[0]
        assert own <= ours[0].keys()


def test_arguments_of_all_scenarios_can_be_read():
    assert {"balance", "navigation", "transport", "simple_spread"} <= set(scenario_names())
    known = {name: scenario_arguments(name) for name in scenario_names()}
    assert {"n_agents", "package_mass"} <= known["balance"]
    assert all(names is None or isinstance(names, frozenset) for names in known.values())


def test_custom_scenario_object():
    class Scenario(vmas.make_env("balance", 1).scenario.__class__):
        def reward(self, agent):
            return super().reward(agent) + 1000

    env = VmasEnv(Scenario(), num_envs=3, seed=0, n_agents=2)
    assert (env.rollout(2)["next", "agents", "reward"] > 900).all()
    assert env.group_map["agents"] == ["agent_0", "agent_1"]
    reset_some(env, env.reset(), [0])


def test_attributes_changed_later_survive_a_reset():
    env = VmasEnv("balance", num_envs=4, seed=0)
    env._env.scenario.package_mass = 123.0
    snapshot = env.snapshot()
    env._env.scenario.package_mass = 5.0
    reset_some(env, env.reset(), [0])
    assert env._env.scenario.package_mass == 5.0
    env.restore(snapshot)
    assert env._env.scenario.package_mass == 123.0


def test_partial_reset_draws_a_layout_for_each_env():
    env = VmasEnv("passage", num_envs=12, max_steps=100, seed=0)
    td = env.reset()
    td["_reset"] = torch.arange(12).view(-1, 1) % 12 != 0
    env.reset(td)
    walls = [x for x in env._env.world.landmarks if "passage" in x.name]
    places = torch.stack([wall.state.pos[1:] for wall in walls])
    assert not torch.equal(places, places[:, :1].expand_as(places))


@pytest.mark.parametrize("scenario", QUICK)
def test_set_seed_overrides_the_first_seed_and_the_history(scenario):
    """The wind of wind_flocking continues across episodes; no reset writes it."""
    fresh, used = (VmasEnv(scenario, num_envs=3, seed=seed, max_steps=3) for seed in (5, 1))
    played(used)
    used.set_seed(5)
    expected, found = played(fresh), played(used)
    for key, x in expected.items(True, True):
        torch.testing.assert_close(found.get(key), x, rtol=0, atol=0, equal_nan=True, msg=str(key))


def played(env, n=4):
    torch.manual_seed(0)
    return env.rollout(n, break_when_any_done=False)


def test_invalid_snapshot_is_refused():
    with pytest.raises(SimulatorStateError, match=r"VmasEnv.restore: found .* without 'of'"):
        VmasEnv("balance", num_envs=1).restore({})


def test_snapshot_of_another_team_is_refused():
    three, four = (VmasEnv("balance", num_envs=2, seed=0, n_agents=n) for n in (3, 4))
    with pytest.raises(SimulatorStateError, match="does not fit"):
        four.restore(three.snapshot())
