"""The collector: TorchRL's batches, trajectories, options, resume in mid-episode."""

import copy

import pytest
import torch
from samples import assert_same
from tensordict import TensorDict
from tensordict.nn import TensorDictModule
from torchrl.collectors import Collector
from torchrl.data import LazyTensorStorage, ReplayBuffer
from torchrl.envs import ParallelEnv, SerialEnv, TransformedEnv
from torchrl.envs.transforms import RewardSum
from torchrl.envs.utils import ExplorationType

from torchrl_marl import TeamSpec
from torchrl_marl.collectors import RolloutCollector, TeamPolicy
from torchrl_marl.envs import VmasEnv
from torchrl_marl.envs.toy import Arena, TwoStepGame
from torchrl_marl.modules import NetworkConfig, make_actor


def make_arena(num_envs=4, **kwargs):
    settings = {"n_agents": 3, "years": 2, "lives": 2, "seed": 0} | kwargs
    return Arena(num_envs, **settings)


def make_balance(num_envs=4, max_steps=7):
    return VmasEnv("balance", num_envs=num_envs, max_steps=max_steps, seed=0)


def with_sum(env, group="agents"):
    keys = {"in_keys": [(group, "reward")], "out_keys": [(group, "episode_reward")]}
    return TransformedEnv(env, RewardSum(**keys))


def policy_of(env, seed=0):
    torch.manual_seed(seed)
    groups = TeamSpec.from_env(env).groups.values()
    return TeamPolicy(make_actor(group, NetworkConfig([8])) for group in groups)


def collect(collector, n, seed=0):
    torch.manual_seed(seed)
    return [collector.next() for _ in range(n)]


def assert_same_batches(one, other, but=()):
    assert len(one) == len(other)
    for a, b in zip(one, other):
        assert a.shape == b.shape
        keys = set(a.keys(True, True))
        assert keys == set(b.keys(True, True))
        for key in keys - set(but):
            assert_same(a[key], b[key], key)


WORLDS = {
    "arena": make_arena,
    "arena masked actions": lambda: make_arena(action_mask=True, n_groups=3),
    "balance": make_balance,
    "with sum": lambda: with_sum(make_arena()),
    "balance with sum": lambda: with_sum(make_balance()),
}


# --------------------------------------------------------------------------- against TorchRL's


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("world", WORLDS)
def test_batches_are_those_of_torchrls_collector(world):
    make = WORLDS[world]
    policy = policy_of(make())
    settings = {"frames_per_batch": 20, "total_frames": 80}
    ours = RolloutCollector(make(), policy, **settings)
    torch.manual_seed(0)
    one = list(ours)
    theirs = Collector(make(), copy.deepcopy(policy), **settings)
    torch.manual_seed(0)
    other = [batch.clone() for batch in theirs]
    theirs.shutdown()
    assert len(one) == len(other) == 4
    for a, b in zip(one, other):
        assert a.shape == b.shape == (4, 5)
        assert set(b.keys(True, True)) == set(a.keys(True, True))
        for key in set(a.keys(True, True)) - {("collector", "traj_ids")}:
            assert_same(a[key], b[key], key)
            assert a[key].dtype is b[key].dtype
    # The numbers of trajectories differ; TorchRL cuts them at every agent's death, too.
    a, b = (torch.cat(x, 1)["collector", "traj_ids"].flatten() for x in (one, other))
    ours, torchrls = (x.unsqueeze(0) == x.unsqueeze(1) for x in (a, b))
    assert not bool((torchrls & ~ours).any())
    assert torch.equal(ours, torchrls) is ("balance" in world)


def test_it_is_the_envs_own_rollout():
    env, twin = make_arena(), make_arena()
    policy = policy_of(env)
    torch.manual_seed(1)
    batch = RolloutCollector(env, policy, frames_per_batch=40).next()
    torch.manual_seed(1)
    rollout = twin.rollout(10, policy, break_when_any_done=False, auto_reset=True)
    for key in rollout.keys(True, True):
        assert_same(batch[key], rollout[key], key)


@pytest.mark.parametrize(
    "make",
    [lambda: SerialEnv(2, make_arena), lambda: ParallelEnv(2, make_arena, mp_start_method="fork")],
    ids=["SerialEnv", "ParallelEnv"],
)
@pytest.mark.filterwarnings("ignore")
def test_torchrls_batched_envs(make):
    env = make()
    try:
        policy = policy_of(env)
        collector = RolloutCollector(env, policy, frames_per_batch=80)
        batch = collector.next()
        assert batch.shape == (2, 4, 10)
        assert batch["agents", "action"].shape == (2, 4, 10, 3)
        ids = batch["collector", "traj_ids"]
        assert ids.shape == (2, 4, 10)
        assert collector.state_dict()["env"] is None
        assert_ids_follow_the_episodes([batch.reshape(8, 10)])
    finally:
        collector.shutdown()
    assert env.is_closed


def test_torchrls_vmas_env():
    import torchrl.envs

    env = torchrl.envs.VmasEnv("balance", num_envs=4, max_steps=7, seed=0)
    collector = RolloutCollector(env, policy_of(env), frames_per_batch=40)
    batches = collect(collector, 3)
    assert_ids_follow_the_episodes(batches)
    assert batches[0]["agents", "observation"].shape == (4, 10, 3, 16)


# ------------------------------------------------------------------------------- trajectories


def assert_ids_follow_the_episodes(batches):
    """A number changes after the root's done, and only there; none comes twice."""
    batch = torch.cat([b.select(("next", "done"), ("collector", "traj_ids")) for b in batches], 1)
    ids = batch["collector", "traj_ids"]
    done = batch["next", "done"].squeeze(-1)
    assert torch.equal(ids[:, 1:] != ids[:, :-1], done[:, :-1])
    assert bool(done[:, :-1].any())
    episodes = ids.shape[0] + done[:, :-1].sum()
    assert len(ids.unique()) == episodes


def test_an_agents_death_starts_no_trajectory():
    collector = RolloutCollector(make_arena(), None, frames_per_batch=12)
    batches = collect(collector, 8)
    deaths = sum((b["next", "agents", "done"].any(-2) & ~b["next", "done"]).sum() for b in batches)
    assert deaths > 10
    assert_ids_follow_the_episodes(batches)
    batch = torch.cat(batches, 1)
    # A death is not undone before the episode's end.
    dead, done = batch["next", "agents", "done"], batch["next", "done"]
    came_back = dead[:, :-1] & ~dead[:, 1:]
    assert torch.equal(came_back.any(-2), (came_back & done[:, :-1].unsqueeze(-2)).any(-2))


@pytest.mark.parametrize("each", [True, False])
def test_reset_at_each_iter(each):
    collector = RolloutCollector(
        make_balance(max_steps=7), None, frames_per_batch=20, reset_at_each_iter=each
    )
    batches = collect(collector, 3)
    ids = torch.stack([b["collector", "traj_ids"] for b in batches])
    if not each:
        assert_ids_follow_the_episodes(batches)
        return
    assert not torch.cat([b["next", "done"] for b in batches]).any()  # 5 steps of 7
    assert len(ids.unique()) == 12
    assert bool((ids == ids[..., :1]).all())


def test_a_batch_is_not_overwritten_by_the_next():
    for make in (make_arena, make_balance, lambda: with_sum(make_balance())):
        env = make()
        collector = RolloutCollector(env, policy_of(env), frames_per_batch=20)
        first = collector.next()
        copied = first.clone()
        collect(collector, 3)
        for key in copied.keys(True, True):
            assert_same(first[key], copied[key], key)


def test_one_batch_goes_on_where_the_last_ended():
    collector = RolloutCollector(make_balance(), None, frames_per_batch=20)
    one, two = collect(collector, 2)
    end, start = one[:, -1]["next"], two[:, 0]
    assert not end["done"].any()
    assert torch.equal(end["agents", "observation"], start["agents", "observation"])


# ------------------------------------------------------------------------------------ options


def test_frames():
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
def test_frames_that_cannot_be(settings):
    with pytest.raises(ValueError, match="frames_per_batch is .* total_frames"):
        RolloutCollector(make_arena(), frames_per_batch=settings[0], total_frames=settings[1])


def test_an_env_may_be_made_by_a_function():
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


def test_a_replay_buffer_is_filled():
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


def test_init_random_frames():
    collector = RolloutCollector(
        make_arena(), constant_policy(), frames_per_batch=20, init_random_frames=30
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


def test_the_policy_is_run_without_gradients():
    env = make_arena()
    batch = RolloutCollector(env, policy_of(env), frames_per_batch=8).next()
    assert not any(x.requires_grad for x in batch.values(True, True))


def test_set_seed_starts_anew():
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
        # In place: an optimizer that holds the parameters goes on with them.
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
    collect(collector, 2, seed=5)  # saving is no view on what goes on
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


def test_iterating_goes_on_after_a_resume():
    collector = RolloutCollector(make_arena(), frames_per_batch=12, total_frames=48)
    iterator = iter(collector)
    next(iterator)
    state = collector.state_dict()
    assert len(list(iterator)) == 3
    assert collector.next() is None
    collector.load_state_dict(state)
    assert len(list(collector)) == 3


# ----------------------------------------------------------------------------- the joint policy


def test_team_policy():
    env = make_arena(n_groups=3)
    groups = TeamSpec.from_env(env).groups
    actors = [make_actor(group) for group in groups.values()]
    td = TeamPolicy(actors)(env.reset())
    for group in groups.values():
        assert td[group.action_key].shape == (4, 1)
    with pytest.raises(ValueError, match="'agents_0'.*more than once"):
        TeamPolicy([actors[0], actors[0]])
    with pytest.raises(ValueError, match="nothing"):
        TeamPolicy([])


def test_a_two_step_episode_by_hand():
    """Choose 1, then 1 and 1: 0, 8, 0, 8, with done after every second step."""

    def act(observation):
        return torch.ones(observation.shape[:-1], dtype=torch.int64)

    policy = TensorDictModule(act, [("agents", "observation")], [("agents", "action")])
    batch = RolloutCollector(TwoStepGame(2), policy, frames_per_batch=10).next()
    assert batch["next", "agents", "reward"][0, :, 0, 0].tolist() == [0.0, 8.0, 0.0, 8.0, 0.0]
    assert batch["next", "done"][0, :, 0].tolist() == [False, True, False, True, False]
    assert batch["collector", "traj_ids"].tolist() == [[0, 0, 2, 2, 4], [1, 1, 3, 3, 5]]
