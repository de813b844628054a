"""Options of the collector, and resuming."""

import pytest
import torch
from collected import WORLDS, collect, make_arena, make_balance, policy_of
from samples import assert_same
from tensordict import TensorDict
from tensordict.nn import TensorDictModule
from torchrl.data import LazyTensorStorage, ReplayBuffer
from torchrl.envs.utils import ExplorationType

from torchrl_marl.collectors import RolloutCollector


def assert_same_batches(one, other, but=()):
    assert len(one) == len(other)
    for a, b in zip(one, other):
        assert a.shape == b.shape
        keys = set(a.keys(True, True))
        assert keys == set(b.keys(True, True))
        for key in keys - set(but):
            assert_same(a[key], b[key], key)


# ------------------------------------------------------------------------------------ options


def test_frames_per_batch_and_total_frames():
    env = make_arena()
    collector = RolloutCollector(env, None, frames_per_batch=10, total_frames=25)
    assert collector.frames_per_batch == 12  # whole steps of 4 envs
    assert [b.shape for b in collector] == [(4, 3)] * 3
    assert collector.frames == 36
    assert collector.next() is None
    with pytest.raises(StopIteration):
        next(collector)
    endless = RolloutCollector(env, None, frames_per_batch=4)
    assert all(endless.next() is not None for _ in range(20))
    assert next(endless).shape == (4, 1)


@pytest.mark.parametrize("settings", [(0, -1), (4, 0), (-3, 4), (4, -2)])
def test_invalid_numbers_of_frames_raise(settings):
    with pytest.raises(ValueError, match="frames_per_batch is .* total_frames"):
        RolloutCollector(make_arena(), frames_per_batch=settings[0], total_frames=settings[1])


def test_env_may_be_a_function():
    assert RolloutCollector(make_arena, frames_per_batch=8).next().shape == (4, 2)


def test_postproc_and_storing_device():
    seen = []

    def double(batch):
        seen.append(batch)
        return torch.cat([batch, batch])

    collector = RolloutCollector(
        make_arena(), frames_per_batch=8, postproc=double, storing_device="cpu"
    )
    assert collector.next().shape == (8, 2)
    assert ("collector", "traj_ids") in seen[0].keys(True)
    assert seen[0].device == torch.device("cpu")


def test_replay_buffer_is_filled():
    buffer = ReplayBuffer(storage=LazyTensorStorage(100), batch_size=8)
    collector = RolloutCollector(
        make_arena(), frames_per_batch=8, total_frames=24, replay_buffer=buffer
    )
    assert list(collector) == [None] * 3
    assert len(buffer) == 24
    assert buffer.sample()["agents", "observation"].shape == (8, 3, 6)


def constant_policy():
    def act(observation):
        return torch.full(observation.shape[:-1], 2)

    return TensorDictModule(act, [("agents", "observation")], [("agents", "action")])


@pytest.mark.parametrize("frames", [30, 40])
def test_init_random_frames(frames):
    """Two batches of 20 frames start before the limit."""
    collector = RolloutCollector(
        make_arena(), constant_policy(), frames_per_batch=20, init_random_frames=frames
    )
    batches = collect(collector, 4)
    constant = [bool((b["agents", "action"] == 2).all()) for b in batches]
    assert constant == [False, False, True, True]


@pytest.mark.parametrize("mode", ["RANDOM", "DETERMINISTIC"])
def test_exploration_type(mode):
    env = make_balance()
    policy = policy_of(env)
    collector = RolloutCollector(
        env, policy, frames_per_batch=20, exploration_type=ExplorationType[mode]
    )
    batch = collector.next()
    likeliest = batch["agents", "loc"].tanh()
    same = torch.isclose(batch["agents", "action"], likeliest, atol=1e-4)
    assert bool(same.all()) is (mode != "RANDOM")


def test_policy_runs_without_gradients():
    env = make_arena()
    batch = RolloutCollector(env, policy_of(env), frames_per_batch=8).next()
    assert not any(x.requires_grad for x in batch.values(True, True))


def test_set_seed_restarts_with_new_trajectory_ids():
    env = make_balance()
    collector = RolloutCollector(env, policy_of(env), frames_per_batch=40)
    collector.set_seed(3)
    one = collect(collector, 2)
    collector.set_seed(3)
    two = collect(collector, 2)
    collector.set_seed(4)
    other = collect(collector, 2)
    assert_same_batches(one, two, but={("collector", "traj_ids")})
    assert not torch.equal(one[0]["agents", "observation"], other[0]["agents", "observation"])
    ids = torch.cat([b["collector", "traj_ids"].flatten() for b in (*one, *two)])
    assert not set(ids[:80].tolist()) & set(ids[80:].tolist())


def test_update_policy_weights():
    env = make_balance()
    policy, other = policy_of(env), policy_of(env, seed=1)
    collector = RolloutCollector(env, policy, frames_per_batch=8)

    def equal():
        return all(torch.equal(a, b) for a, b in zip(policy.parameters(), other.parameters()))

    collector.update_policy_weights_()
    assert not equal()
    collector.update_policy_weights_(other)
    assert equal()
    for weights in (other.state_dict(), TensorDict.from_module(other)):
        with torch.no_grad():
            for parameter in policy.parameters():
                parameter.zero_()
        optimized = list(policy.parameters())
        collector.update_policy_weights_(weights)
        assert equal()
        # In place, so that optimizers keep their parameters.
        assert all(a is b for a, b in zip(optimized, policy.parameters()))
        assert all(a is not b for a, b in zip(policy.parameters(), other.parameters()))


def test_shutdown():
    env = make_arena()
    collector = RolloutCollector(env, frames_per_batch=8)
    collector.shutdown()
    assert env.is_closed
    collector.shutdown()


# ------------------------------------------------------------------------------------- resume


@pytest.mark.parametrize("world", WORLDS)
def test_resume_in_mid_episode(world, tmp_path):
    make = WORLDS[world]
    policy = policy_of(make())
    whole = collect(RolloutCollector(make(), policy, frames_per_batch=12), 6)
    assert any(b["next", "done"].any() for b in whole[3:])
    collector = RolloutCollector(make(), policy, frames_per_batch=12)
    collect(collector, 3)
    running = not whole[2]["next", "done"][:, -1].all()
    assert running
    torch.save(collector.state_dict(), tmp_path / "state.pt")
    generator = torch.get_rng_state()
    collect(collector, 2, seed=5)  # later steps do not change the saved state
    state = torch.load(tmp_path / "state.pt", weights_only=True)
    other = RolloutCollector(make(), policy_of(make(), seed=7), frames_per_batch=12)
    collect(other, 2, seed=9)
    other.load_state_dict(state)
    torch.set_rng_state(generator)
    assert other.frames == 36
    rest = [other.next() for _ in range(3)]
    assert_same_batches(whole[3:], rest)


def test_state_before_the_first_batch():
    env = make_arena()
    collector = RolloutCollector(env, frames_per_batch=12)
    state = collector.state_dict()
    other = RolloutCollector(make_arena(), frames_per_batch=12)
    other.load_state_dict(state)
    assert other.frames == 0
    assert other.next().shape == (4, 3)


def test_iteration_continues_after_load_state_dict():
    collector = RolloutCollector(make_arena(), frames_per_batch=12, total_frames=48)
    iterator = iter(collector)
    next(iterator)
    state = collector.state_dict()
    assert len(list(iterator)) == 3
    assert collector.next() is None
    collector.load_state_dict(state)
    assert len(list(collector)) == 3
