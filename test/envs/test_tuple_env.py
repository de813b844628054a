"""Gymnasium environments with tuple spaces (RWARE, LBF) through PettingZooEnv."""

import copy

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces

from torchrl_marl.envs import PettingZooEnv, check_marl_env, make_env
from torchrl_marl.envs.pettingzoo.tuple_env import TupleEnv, _make_registered
from torchrl_marl.errors import ConfigError, SpecError

RWARE, LBF = "pettingzoo/rware/rware-tiny-2ag-v2", "pettingzoo/lbforaging/Foraging-5x5-2p-1f-v3"


class Counting(gymnasium.Env):
    """Agent i sees (i, step) and earns its action; the episode ends as scripted."""

    metadata = {"render_modes": []}
    render_mode = None

    def __init__(self, ends_at=3, max_steps=3, shared=False, n_agents=2, n_observed=2):
        self.observation_space = spaces.Tuple([spaces.Box(-9, 9, (2,))] * n_observed)
        self.action_space = spaces.Tuple([spaces.Discrete(5)] * n_agents)
        self.max_steps, self.ends_at, self.shared, self.n = max_steps, ends_at, shared, n_observed

    def _seen(self):
        return tuple(np.array([i, self.step_], np.float32) for i in range(self.n))

    def reset(self, seed=None, options=None):
        super().reset(seed=seed)
        self.step_ = 0
        return self._seen(), {}

    def step(self, actions):
        self.step_ += 1
        rewards = float(sum(actions)) if self.shared else list(actions)
        return self._seen(), rewards, self.step_ >= self.ends_at, False, {"n": self.step_}


def played(world, *actions):
    env = TupleEnv(world)
    env.reset(seed=0)
    return [env.step(dict(zip(env.possible_agents, a))) for a in actions]


def test_tuple_entries_are_agents():
    [(seen, earned, *_, infos)] = played(Counting(), (3, 4))
    assert earned == {"agent_0": 3.0, "agent_1": 4.0} and infos["agent_1"] == {"n": 1}
    assert [x.tolist() for x in seen.values()] == [[0, 1], [1, 1]]


def test_scalar_reward_goes_to_each_agent():
    assert played(Counting(shared=True), (3, 4))[0][1] == {"agent_0": 7.0, "agent_1": 7.0}


def test_common_reward_is_the_sum():
    for shared in (False, True):  # a scalar is the team's reward already
        env = TupleEnv(Counting(shared=shared), common_reward=True)
        env.reset(seed=0)
        assert env.step({"agent_0": 3, "agent_1": 4})[1] == {"agent_0": 7.0, "agent_1": 7.0}


def test_common_reward_of_a_registered_environment():
    pytest.importorskip("lbforaging")
    name = "pettingzoo/lbforaging/Foraging-5x5-2p-3f-v3"
    found = []
    for common in (False, True):
        env = make_env(name, num_envs=4, seed=0, common_reward=common, continuous_actions=False)
        torch.manual_seed(0)
        found.append(env.rollout(200, break_when_any_done=False)["next", "agent", "reward"])
    own, both = found
    assert own.sum() > 0  # some food was taken
    assert torch.allclose(both, own.sum(2, keepdim=True).expand_as(own))


def test_published_environments_are_registered():
    from torchrl_marl.envs.pettingzoo.tuple_env import PACKAGES, named

    for package, ids in PACKAGES.items():
        pytest.importorskip(package)
        assert all(named(f"{package}/{own_id}") is not None for own_id in ids)


@pytest.mark.parametrize("ends_at, max_steps, cut", [(3, 3, True), (2, 3, False), (2, None, False)])
def test_termination_at_the_own_time_limit_is_truncated(ends_at, max_steps, cut):
    *_, last = played(Counting(ends_at, max_steps), *[(0, 0)] * ends_at)
    terminated, truncated = last[2]["agent_0"], last[3]["agent_0"]
    assert (terminated, truncated) == (not cut, cut)


def test_gymnasium_object_becomes_a_team():
    env = make_env(Counting(), num_envs=2, seed=0)
    td = env.rollout(6, break_when_any_done=False)
    reward, action = td["next", "agent", "reward"][..., 0], td["agent", "action"]
    assert torch.equal(reward, action.to(reward.dtype))
    assert td["next", "truncated"][:, :, 0].tolist() == [[False, False, True] * 2] * 2
    assert not td["next", "terminated"].any()


def test_unequal_tuples_are_refused():
    with pytest.raises(SpecError, match="expected a Tuple with one space for each of the 2 agents"):
        TupleEnv(Counting(n_observed=3))


def test_too_few_observations_are_refused():
    world = Counting()
    env = TupleEnv(world)
    world.n = 1
    with pytest.raises(SpecError, match="returned 1 observations"):
        env.reset(seed=0)


@pytest.mark.parametrize("name", [RWARE, LBF])
def test_real_environments_pass_check_marl_env(name):
    pytest.importorskip(name.split("/")[1])
    report = check_marl_env(make_env(name, num_envs=2, seed=0, kwargs={}), n_steps=60)
    assert "keeps the rules: 2 agents in 1 group" in report


@pytest.mark.parametrize("name, limit", [("rware-tiny-2ag-v2", 500), ("Foraging-5x5-2p-1f-v3", 50)])
def test_wrapped_environment_equals_the_gymnasium_one(name, limit):
    package = "rware" if "rware" in name else "lbforaging"
    pytest.importorskip(package)
    ours, theirs = TupleEnv(_make_registered(package, name)), _make_registered(package, name)
    assert ours.max_steps == limit
    seen, _ = ours.reset(seed=7)
    twin, _ = theirs.reset(seed=7)
    rng = np.random.default_rng(0)
    for _ in range(limit):
        assert all(map(np.array_equal, seen.values(), twin))
        acts = rng.integers(0, 5, 2)
        seen, earned, ended, cut, _ = ours.step(dict(zip(ours.possible_agents, acts)))
        twin, rewards, over, *_ = theirs.step(tuple(acts))
        assert list(earned.values()) == rewards
        assert (ended["agent_0"] or cut["agent_0"]) == over
        if over:
            break


def test_seeds_of_lbf_do_not_depend_on_the_last_episode():
    pytest.importorskip("lbforaging")
    env = TupleEnv(_make_registered("lbforaging", "Foraging-5x5-4p-1f-v3"))
    other = copy.deepcopy(env)
    for _ in range(3):
        other.reset(seed=3)
    for seed in range(40):
        first, second = env.reset(seed=seed)[0], other.reset(seed=seed)[0]
        assert all(map(np.array_equal, first.values(), second.values()))
        env.reset(seed=100 + seed)


def test_results_do_not_depend_on_workers():
    pytest.importorskip("rware")
    batches = []
    for workers in (0, 1):
        env = PettingZooEnv(RWARE.split("/", 1)[1], num_envs=2, workers=workers, seed=0)
        torch.manual_seed(0)
        batches.append(env.rollout(20)["next", "agent", "observation"])
        env.close()
    assert torch.equal(*batches)


def test_unknown_id_suggests_a_known_one():
    pytest.importorskip("rware")
    with pytest.raises(ConfigError, match="did you mean 'rware-tiny-2ag-v2'"):
        make_env("pettingzoo/rware/rware-tiny-2ag-v9", num_envs=1)


def test_missing_package_error_has_a_pip_line(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    from torchrl_marl.envs.pettingzoo.tuple_env import named

    with pytest.raises(ConfigError, match="pip install rware"):
        named("rware/rware-tiny-2ag-v2")
