"""The collector: parity with TorchRL's, trajectories, and the joint policy."""

import copy

import pytest
import torch
from collected import WORLDS, collect, make_arena, make_balance, policy_of, with_sum
from samples import assert_same
from tensordict.nn import TensorDictModule
from torchrl.collectors import Collector
from torchrl.envs import ParallelEnv, SerialEnv

from torchrl_marl import TeamSpec
from torchrl_marl.collectors import RolloutCollector, TeamPolicy
from torchrl_marl.envs.toy import TwoStepGame
from torchrl_marl.modules import make_actor

# --------------------------------------------------------------------------- against TorchRL's


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("world", WORLDS)
def test_batches_match_torchrl_collector(world):
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


def test_batch_matches_env_rollout():
    env, twin = make_arena(), make_arena()
    policy = policy_of(env)
    torch.manual_seed(1)
    batch = RolloutCollector(env, policy, frames_per_batch=40).next()
    torch.manual_seed(1)
    rollout = twin.rollout(10, policy, break_when_any_done=False, auto_reset=True)
    for key in rollout.keys(True, True):
        assert_same(batch[key], rollout[key], key)


@pytest.mark.processes
@pytest.mark.parametrize(
    "make",
    [lambda: SerialEnv(2, make_arena), lambda: ParallelEnv(2, make_arena, mp_start_method="fork")],
    ids=["SerialEnv", "ParallelEnv"],
)
@pytest.mark.filterwarnings("ignore")
def test_torchrl_batched_envs(make):
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


def test_torchrl_vmas_env():
    import torchrl.envs

    env = torchrl.envs.VmasEnv("balance", num_envs=4, max_steps=7, seed=0)
    collector = RolloutCollector(env, policy_of(env), frames_per_batch=40)
    batches = collect(collector, 3)
    assert_ids_follow_the_episodes(batches)
    assert batches[0]["agents", "observation"].shape == (4, 10, 3, 16)


# ------------------------------------------------------------------------------- trajectories


def assert_ids_follow_the_episodes(batches):
    """An id changes after the root's done and only there; ids are unique."""
    batch = torch.cat([b.select(("next", "done"), ("collector", "traj_ids")) for b in batches], 1)
    ids = batch["collector", "traj_ids"]
    done = batch["next", "done"].squeeze(-1)
    assert torch.equal(ids[:, 1:] != ids[:, :-1], done[:, :-1])
    assert bool(done[:, :-1].any())
    episodes = ids.shape[0] + done[:, :-1].sum()
    assert len(ids.unique()) == episodes


def test_death_of_an_agent_does_not_start_a_trajectory():
    collector = RolloutCollector(make_arena(), None, frames_per_batch=12)
    batches = collect(collector, 8)
    deaths = sum((b["next", "agents", "done"].any(-2) & ~b["next", "done"]).sum() for b in batches)
    assert deaths > 10
    assert_ids_follow_the_episodes(batches)
    batch = torch.cat(batches, 1)
    # A dead agent stays dead until the end of the episode.
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


def test_batch_is_not_overwritten_by_the_next_batch():
    for make in (make_arena, make_balance, lambda: with_sum(make_balance())):
        env = make()
        collector = RolloutCollector(env, policy_of(env), frames_per_batch=20)
        first = collector.next()
        copied = first.clone()
        collect(collector, 3)
        for key in copied.keys(True, True):
            assert_same(first[key], copied[key], key)


def test_batches_are_consecutive():
    collector = RolloutCollector(make_balance(), None, frames_per_batch=20)
    one, two = collect(collector, 2)
    end, start = one[:, -1]["next"], two[:, 0]
    assert not end["done"].any()
    assert torch.equal(end["agents", "observation"], start["agents", "observation"])


# ----------------------------------------------------------------------------- the joint policy


def test_team_policy_combines_actors():
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


def test_two_step_episode_by_hand():
    """Choose 1, then 1 and 1: 0, 8, 0, 8, with done after every second step."""

    def act(observation):
        return torch.ones(observation.shape[:-1], dtype=torch.int64)

    policy = TensorDictModule(act, [("agents", "observation")], [("agents", "action")])
    batch = RolloutCollector(TwoStepGame(2), policy, frames_per_batch=10).next()
    assert batch["next", "agents", "reward"][0, :, 0, 0].tolist() == [0.0, 8.0, 0.0, 8.0, 0.0]
    assert batch["next", "done"][0, :, 0].tolist() == [False, True, False, True, False]
    assert batch["collector", "traj_ids"].tolist() == [[0, 0, 2, 2, 4], [1, 1, 3, 3, 5]]
