"""Initial states drawn in advance: each is used once, with the simulator's distribution."""

import json

import pytest
import torch
from tensordict import TensorDict

from torchrl_marl.envs import VmasEnv
from torchrl_marl.errors import CaptureError
from torchrl_marl.simulator.packing import TensorDictLayout, begin_episodes

E = 4


@pytest.fixture
def env():
    return VmasEnv("navigation", num_envs=E, seed=0, max_steps=5, info=False, n_agents=2)


def begin(pool, env, ended):
    state = env.captured().state
    carry = {k: torch.zeros_like(x[0]) for k, x in pool.tensors["carry"].items()}
    state, carry, used = begin_episodes(torch.tensor(ended), state, carry, pool.tensors)
    pool.tensors["used"] = used
    return state, carry


def test_ended_envs_get_separate_starts_and_others_continue(env):
    env.rollout(2)
    before = env.captured().state
    pool = env.reset_pool()
    pool.prepare()
    state, carry = begin(pool, env, [True, False, False, True])
    assert pool.tensors["used"].tolist() == [1, 0, 0, 1]
    for x, y in zip(before, state):
        assert torch.equal(x[:, 1:3], y[:, 1:3])
    env.captured().state = state
    env.rollout(1, auto_reset=True)  # the state can be stepped from
    observation = carry["agents", "observation"]
    assert observation[[0, 3]].any() and not observation[[1, 2]].any()


def test_observations_match_the_starts(env):
    pool = env.reset_pool()
    pool.prepare()
    state, carry = begin(pool, env, [True] * E)
    env.captured().state = state
    agents = env._env.agents
    seen = torch.stack([env._env.scenario.observation(agent) for agent in agents], 1)
    assert torch.equal(carry["agents", "observation"], seen)


def test_starts_are_unique_until_the_pool_is_empty(env):
    pool = env.reset_pool()
    pool.prepare()
    seen = [begin(pool, env, [True] * E)[1]["agents", "observation"] for _ in range(pool.depth)]
    rows = torch.stack(seen).flatten(0, 1).flatten(1)
    assert len(rows.unique(dim=0)) == len(rows)


def test_exhausted_env_reuses_its_own_starts_with_a_warning(env):
    pool = env.reset_pool()
    pool.prepare()
    depth = pool.depth
    key = ("agents", "observation")
    seen = [begin(pool, env, [True, False, False, False])[1][key][0] for _ in range(depth + 2)]
    # Its own first starts are reused rather than those of another env.
    assert torch.equal(seen[0], seen[depth]) and torch.equal(seen[1], seen[depth + 1])
    with pytest.warns(UserWarning, match=f"ended {depth + 2} times.* of its {depth} starts"):
        pool.prepare()
    assert not pool.tensors["used"].any()
    fresh = begin(pool, env, [True, False, False, False])[1][key][0]
    assert not any(torch.equal(fresh, x) for x in seen)
    for _ in range(depth + 1):
        begin(pool, env, [True, False, False, False])
    pool.prepare()  # warns once


def test_refill_replaces_only_used_starts(env):
    pool = env.reset_pool()
    pool.prepare()
    before = pool.tensors["carry"]["agents", "observation"].clone()
    for start in before[:3]:
        found = begin(pool, env, [True, False, False, True])[1]["agents", "observation"]
        assert torch.equal(found[[0, 3]], start[[0, 3]])
    pool.refill(3)
    after = pool.tensors["carry"]["agents", "observation"]
    assert torch.equal(before[3:], after[3:])
    assert (before[:3] != after[:3]).flatten(2).any(-1).all()


def test_large_states_have_fewer_starts():
    env = VmasEnv("navigation", num_envs=20_000, seed=0, info=False, n_agents=2)
    assert env.reset_pool().depth == 8


def test_pool_is_refilled_before_it_runs_out(env):
    pool = env.reset_pool()
    pool.prepare()
    for _ in range(3):
        for _ in range(3):
            begin(pool, env, [True] * E)
        pool.prepare()
        left = pool.depth - int(pool.tensors["used"].max())
        assert left >= 3


def test_starts_have_the_distribution_of_simulator_resets():
    env = VmasEnv("navigation", num_envs=200, seed=1, info=False, n_agents=2)
    pool = env.reset_pool()
    pool.prepare()
    drawn = pool.tensors["carry"]["agents", "observation"].flatten(0, 1)
    own = torch.cat([env.reset()["agents", "observation"] for _ in range(pool.depth)])
    assert drawn.shape == own.shape
    error = own.std(0) / len(own) ** 0.5
    assert ((drawn.mean(0) - own.mean(0)).abs() < 6 * error + 1e-6).all()
    assert torch.allclose(drawn.std(0), own.std(0), rtol=0.1, atol=0.01)


def test_pool_resumes_from_its_state_dict(env):
    pool = env.reset_pool()
    pool.prepare()
    begin(pool, env, [True, False, True, False])
    saved = pool.state_dict()
    expected = [begin(pool, env, [True] * E)[1]["agents", "observation"] for _ in range(2)]
    other = VmasEnv("navigation", num_envs=E, seed=7, max_steps=5, info=False, n_agents=2)
    again = other.reset_pool()
    again.load_state_dict(saved)
    again.prepare()
    found = [begin(again, other, [True] * E)[1]["agents", "observation"] for _ in range(2)]
    assert all(torch.equal(x, y) for x, y in zip(expected, found))
    about = json.loads(saved["pool"]["about"])
    about["written"].append(["world", "a tensor of all envs"])  # as earlier versions saved it
    again.load_state_dict({**saved, "pool": {**saved["pool"], "about": json.dumps(about)}})
    assert again.state_dict()["pool"]["about"] == saved["pool"]["about"]
    again.load_state_dict({})
    again.prepare()
    assert not torch.equal(begin(again, other, [True] * E)[1]["agents", "observation"], found[0])


def test_starts_are_discarded_when_the_structure_changes(env):
    pool = env.reset_pool()
    pool.discard_if_other_structure("one goal")
    pool.prepare()
    drawn = pool.tensors["carry"]["agents", "observation"].clone()
    pool.discard_if_other_structure("one goal")
    pool.prepare()
    assert torch.equal(pool.tensors["carry"]["agents", "observation"], drawn)
    again = env.reset_pool()
    again.load_state_dict(pool.state_dict())
    again.discard_if_other_structure("one goal")
    assert not again.is_stale
    for one in (pool, again):
        one.discard_if_other_structure("another goal")
        assert one.is_stale and one.state_dict() == {"pool": {}, "drawn_for": "another goal"}
        one.prepare()
        assert not torch.equal(one.tensors["carry"]["agents", "observation"], drawn)


def test_changed_simulator_settings_apply_to_starts():
    env = VmasEnv("navigation", num_envs=E, seed=0, info=False, n_agents=2)
    pool = env.reset_pool()
    env._env.scenario.world_spawning_x = 1e-4
    env._env.scenario.min_distance_between_entities = 0.0
    pool.prepare()
    assert pool.tensors["carry"]["agents", "observation"][..., 0].abs().max() <= 1e-4


def test_layout_refuses_lazy_groups():
    members = [TensorDict({"x": torch.zeros(3, n)}, [3]) for n in (1, 2)]
    td = TensorDict({"team": TensorDict.lazy_stack(members, 1)}, [3])
    with pytest.raises(CaptureError, match="'team' is stacked lazily; .*PadAgents"):
        TensorDictLayout(td)
