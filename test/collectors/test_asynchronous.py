"""Fragments of asynchronous collection: order, policy versions, and drops, without Ray."""

import torch
from tensordict import TensorDict
from torch import nn

from torchrl_marl.collectors.asynchronous import AsynchronousCollector
from torchrl_marl.collectors.sharded import ShardResult


class Scripted:
    """Actors of one shard each that finish in a given order; a fragment holds its weights."""

    def __init__(self, order, n=2):
        self.order, self.actors, self.makers = list(order), [None] * n, [None] * n
        self.own = [range(i, i + 1) for i in range(n)]
        self.counters = {"collector_restarts": 0, "episodes_lost": 0}
        self.calls, self.begun = {}, 0
        self.journals = []

    def play(self, a, entry):
        self.begun += 1
        self.calls[self.begun] = a, entry
        return self.begun

    def first(self, calls):
        next_actor = self.order.pop(0)
        return next(call for call in calls if self.calls[call][0] == next_actor)

    def take_from_actor(self, a, call, journal):
        actor, entry = self.calls.pop(call)
        assert actor == a and journal.entries[0] is entry
        self.journals.append(journal)
        batch = TensorDict({"weight": entry.weights["weight"].expand(3, 4).clone()}, [3, 4])
        batch["collector", "traj_ids"] = torch.arange(3).unsqueeze(1).expand(3, 4).clone()
        return [ShardResult(batch, {"life": 0, "collector": {}, "fragment": call})]

    def load(self, states):
        self.loaded = states
        return [True] * len(states)


def collector_of(order, max_lag=1):
    policy = nn.Linear(1, 1, bias=False)
    policy.weight = nn.Parameter(torch.zeros(1, 1))
    return AsynchronousCollector(Scripted(order), policy, max_lag=max_lag), policy


def rollout(collector, policy):
    """Collects a batch, then sets the policy's weight to the number of batches."""
    batch = collector.rollout()
    with torch.no_grad():
        policy.weight.fill_(float(collector.version))
    shards = (batch["collector", "traj_ids"][::3, 0] % 2).tolist()
    versions = batch["collector", "policy_version"][::3, 0].tolist()
    assert torch.equal(batch["weight"], batch["collector", "policy_version"].float())
    assert batch.shape == (6, 4)
    return list(zip(shards, versions))


def test_fast_actor_gives_several_fragments():
    collector, policy = collector_of([0, 0, 0, 1, 1, 0])
    assert rollout(collector, policy) == [(0, 0), (0, 0)]
    # Both fragments started before the first update.
    assert rollout(collector, policy) == [(0, 0), (1, 0)]
    assert rollout(collector, policy) == [(1, 1), (0, 1)]
    assert (collector.frames, collector.version) == (72, 3)
    assert collector.counters["fragments_dropped"] == 0


def test_fragments_older_than_max_lag_are_dropped_and_counted():
    collector, policy = collector_of([0, 0, 0, 0, 1, 0, 0, 1, 0])
    assert rollout(collector, policy) == [(0, 0), (0, 0)]
    assert rollout(collector, policy) == [(0, 0), (0, 1)]
    # The fragment of actor 1 started two batches ago.
    assert rollout(collector, policy) == [(0, 1), (0, 2)]
    assert collector.counters["fragments_dropped"] == 1
    assert rollout(collector, policy) == [(1, 2), (0, 2)]


def test_shards_resume_from_their_last_fragments():
    collector, policy = collector_of([0, 1, 0, 0, 1, 1], max_lag=4)
    for _ in range(3):
        rollout(collector, policy)
    journals = collector.placement.journals
    assert [j.keep_records for j in journals] == [False, False, True, True, True, True]
    assert [own["fragment"] for own in journals[3].snapshots] == [3, 2]
    state = collector.state_dict()
    other, policy = collector_of([1, 0])
    assert other.load_state_dict(state) is False
    assert [own["fragment"] for own in other.placement.loaded] == [5, 7]
    assert (other.frames, other.version) == (72, 3)
    with torch.no_grad():
        policy.weight.fill_(3.0)  # as the learner restores it
    assert rollout(other, policy) == [(1, 3), (0, 3)]
