"""Minibatches of shards hold the same frames in one process and in several."""

import copy

import pytest
import torch
from meadow import make_meadow
from rank_cases import SHARDS, Case, E, T, flat_parameters, learners_of

from torchrl_marl.collectors import RolloutCollector, TeamPolicy
from torchrl_marl.errors import ConfigError
from torchrl_marl.learners.shards import ShardOrder


def drawn(own, n_frames, batches=2, total=4, seed=3, first=0):
    """For each batch and epoch the minibatches, as (shard, frame of the shard)."""
    order = ShardOrder(own, total, seed)
    order.drawn = first
    of_shard = n_frames // len(own)
    return [
        [
            [{(own[i // of_shard], i % of_shard) for i in part.tolist()} for part in epoch]
            for epoch in order.epochs(n_frames, 8, n_epochs=2)
        ]
        for _ in range(batches)
    ]


def test_minibatches_do_not_depend_on_the_split_of_shards():
    whole = drawn(range(4), 20)
    parts = [drawn(range(2), 10), drawn(range(2, 3), 5), drawn(range(3, 4), 5)]
    for batch, *of_parts in zip(whole, *parts):
        for epoch, *own in zip(batch, *of_parts):
            assert epoch == [set().union(*pieces) for pieces in zip(*own)]
            assert sorted(set().union(*epoch)) == [(s, i) for s in range(4) for i in range(5)]
            assert [len(part) for part in epoch] == [8, 8, 4]


def test_orders_differ_between_epochs_batches_and_seeds():
    (batch, later), other = drawn(range(4), 20), drawn(range(4), 20, seed=4)
    orders = [str(epoch) for epoch in (*batch, *later, *other[0])]
    assert len(set(orders)) == len(orders)
    first = [{i for s, i in part if s == 0} for part in batch[0]]
    second = [{i for s, i in part if s == 1} for part in batch[0]]
    assert first != second


def test_order_resumes_exactly():
    assert drawn(range(4), 20)[1:] == drawn(range(4), 20, batches=1, first=1)


@pytest.mark.parametrize(
    ("n_frames", "size", "message"),
    [
        (20, 6, "a minibatch has 6 frames .* multiple of the number of its shards, 4; use"),
        (18, 8, "a batch has 18 frames"),
    ],
)
def test_sizes_that_shards_do_not_divide_raise(n_frames, size, message):
    with pytest.raises(ConfigError, match=message):
        next(ShardOrder(range(4), 4, 0).epochs(n_frames, size, n_epochs=1))


def test_learner_of_shards_resumes_exactly_without_global_draws():
    case = Case(iterations=2, actions="unbounded")
    ones = [learners_of(case, range(SHARDS))[0] for _ in range(2)]
    env = make_meadow(E, "two", actions="unbounded")
    collector = RolloutCollector(env, TeamPolicy(ones[0].actors.values()), frames_per_batch=E * T)
    batches = [collector.rollout() for _ in range(2)]
    state = torch.get_rng_state()
    ones[0].learn(batches[0].clone())
    assert torch.equal(state, torch.get_rng_state())
    saved = copy.deepcopy(ones[0].state_dict())  # an optimizer keeps the given tensors
    ones[1].load_state_dict(saved)
    for one in ones:
        one.learn(batches[1].clone())
    assert torch.equal(flat_parameters(ones[:1])[0], flat_parameters(ones[1:])[0])
    assert ones[1].state_dict()["_extra_state"]["drawn"] == 2
