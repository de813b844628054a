"""The sampler for TorchRL's buffers, compared to TorchRL's on segment trees written in Python."""

import io

import numpy as np
import pytest
import torch
from tensordict import TensorDict
from torchrl.data import LazyTensorStorage, ReplayBuffer, TensorDictReplayBuffer
from torchrl.data.replay_buffers.samplers import PrioritizedSampler, prioritized

from torchrl_marl.contrib import TreeSampler

C = 60


class Segments:
    """A Python version of TorchRL's compiled segment trees."""

    def __init__(self, capacity):
        self.values = torch.full((capacity,), self.neutral, dtype=torch.float64)

    def __getitem__(self, index):
        return self.values[index].float()

    def __setitem__(self, index, value):
        self.values[index] = torch.as_tensor(value).double()


class Sums(Segments):
    neutral = 0.0

    def query(self, left, right):
        return self.values[left:right].sum().item()

    def scan_lower_bound(self, mass):
        return torch.from_numpy(np.searchsorted(self.values.cumsum(0).numpy(), mass))


class Minima(Segments):
    neutral = float("inf")

    def query(self, left, right):
        return self.values[left:right].amin().item()


@pytest.fixture(autouse=True)
def _segment_trees(monkeypatch):
    for name in ("Fp32", "Fp64"):
        monkeypatch.setattr(prioritized, f"SumSegmentTree{name}", Sums)
        monkeypatch.setattr(prioritized, f"MinSegmentTree{name}", Minima)


def make_buffer(sampler, storage=None, **kwargs):
    storage = LazyTensorStorage(C) if storage is None else storage  # an empty storage is falsy
    return TensorDictReplayBuffer(
        storage=storage, sampler=sampler, priority_key="td_error", **kwargs
    )


def both(*args, **kwargs):
    return [make_buffer(kind(C, *args, **kwargs)) for kind in (TreeSampler, PrioritizedSampler)]


def some_rows(n):
    return TensorDict({"x": torch.randn(n, 2), "y": torch.arange(n)}, [n])


def assert_alike(own, theirs):
    """Priorities, the highest of them, and weights of the same rows are the same."""
    values = own.sampler._sum_tree.tree.values
    torch.testing.assert_close(values.float(), theirs.sampler._sum_tree.values.float())
    torch.testing.assert_close(
        torch.as_tensor(own.sampler.default_priority),
        torch.as_tensor(theirs.sampler.default_priority),
    )
    index, info = own.sampler.sample(own._storage, 32)
    priority = theirs.sampler._sum_tree[index] / theirs.sampler._min_tree.query(0, len(theirs))
    expected = priority.pow(-theirs.sampler.beta)
    torch.testing.assert_close(info["priority_weight"], expected.float(), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("within", [False, True])
@pytest.mark.parametrize(("alpha", "beta"), [(0.0, 0.4), (0.6, 0.4), (1.0, 1.0)])
def test_sampler_matches_prioritized_sampler_of_torchrl(alpha, beta, within):
    own, theirs = both(alpha, beta, eps=1e-6, max_priority_within_buffer=within)
    for step in range(6):
        rows = some_rows(25)
        own.extend(rows), theirs.extend(rows)
        assert_alike(own, theirs)
        index = torch.randperm(len(own))[:16]
        error = 10 ** torch.randn(16)
        own.update_priority(index, error), theirs.update_priority(index, error)
        assert_alike(own, theirs)
        if step == 3 and alpha:
            own.sampler.alpha = theirs.sampler.alpha = 0.3
            assert_alike(own, theirs)


@pytest.mark.parametrize("reduction", ["max", "min", "mean", "median"])
def test_trajectory_priorities_are_reduced_as_in_torchrl(reduction):
    own, theirs = both(0.7, 0.5, reduction=reduction)
    rows, error = TensorDict({"x": torch.randn(20, 5, 2)}, [20, 5]), torch.rand(20, 5)
    for buffer in (own, theirs):
        buffer.extend(rows)
        sample = buffer[:20].clone()
        sample["index"] = torch.arange(20).unsqueeze(1).expand(20, 5)
        sample["td_error"] = error
        buffer.update_tensordict_priority(sample)
    assert_alike(own, theirs)


@pytest.mark.parametrize("capacity", [1, 128, 129, 20_000])
def test_least_priority_is_tracked(capacity):
    sampler = TreeSampler(capacity, 1.0, 0.4, eps=0.0)
    for _ in range(20):
        index = torch.randint(capacity, (min(capacity, 64),))  # some come twice
        sampler.update_priority(index, torch.rand(len(index)) + 0.1)
        values = sampler._sum_tree.tree.values
        assert sampler._min_tree.least == values[values > 0].amin()
    other = TreeSampler(capacity, 1.0, 0.4)
    other.load_state_dict(sampler.state_dict())
    assert all(map(torch.equal, sampler._min_tree._levels, other._min_tree._levels))


def test_priority_of_zero_raises():
    buffer = make_buffer(TreeSampler(C, 1.0, 0.4, eps=0.0))
    buffer.extend(some_rows(5))
    buffer.update_priority(torch.arange(2), torch.zeros(2))
    with pytest.raises(RuntimeError, match="the least priority is 0.0, expected a number above 0"):
        buffer.sample(4)


def test_keys_of_a_sample_match_torchrl():
    own, theirs = both(0.7, 0.5, eps=1e-6)
    rows = some_rows(30)
    for buffer in (own, theirs):
        buffer.extend(rows)
    ours, other = own.sample(8), theirs.sample(8)
    assert set(ours.keys()) == set(other.keys()) and "priority_weight" in ours.keys()
    for key in ours.keys():
        assert (ours[key].shape, ours[key].dtype) == (other[key].shape, other[key].dtype), key
    assert torch.equal(rows["x"][ours["index"]], ours["x"])


def test_rows_are_drawn_in_proportion_to_priorities():
    own, _ = both(0.5, 1.0, eps=0.0)
    own.extend(some_rows(C))
    error = torch.rand(C) + 0.01
    own.update_priority(torch.arange(C), error)
    drawn = torch.cat([own.sample(500)["y"] for _ in range(100)])
    expected = error.sqrt() / error.sqrt().sum() * 50_000
    counts = torch.bincount(drawn, minlength=C)
    assert ((counts - expected).square() / expected).mean() < 1.6


def test_generator_of_the_buffer_is_used():
    def draw():
        buffer = make_buffer(TreeSampler(C, 0.6, 0.4), generator=torch.Generator().manual_seed(5))
        buffer.extend(some_rows(30))
        return buffer.sample(16)["index"]

    first = draw()
    torch.rand(7)
    assert torch.equal(first, draw())


def test_storages_of_two_dims():
    buffer = make_buffer(TreeSampler(C, 0.6, 0.4), LazyTensorStorage(C, ndim=2), dim_extend=0)
    buffer.extend(TensorDict({"x": torch.arange(40).view(10, 4)}, [10, 4]))
    sample = buffer.sample(16)
    sample["td_error"] = torch.rand(16)
    buffer.update_tensordict_priority(sample)
    assert torch.isfinite(sample["priority_weight"]).all()


def test_saved_sampler_resumes_exactly(tmp_path):
    def filled(alpha=0.6, beta=0.4):
        torch.manual_seed(0)
        buffer = make_buffer(TreeSampler(C, alpha, beta))
        buffer.extend(some_rows(40))
        buffer.update_priority(torch.arange(20), torch.rand(20) * 5)
        return buffer

    def go_on(buffer):
        torch.manual_seed(1)
        buffer.extend(some_rows(30))
        return buffer.sample(32)

    buffer = filled()
    file = io.BytesIO()
    torch.save(buffer.sampler.state_dict(), file)
    file.seek(0)
    buffer.sampler.dumps(tmp_path)
    expected = go_on(buffer)
    for load in (
        lambda sampler: sampler.load_state_dict(torch.load(file, weights_only=True)),
        lambda sampler: sampler.loads(tmp_path),
    ):
        other = filled(0.1, 0.9)
        load(other.sampler)
        found = go_on(other)
        for key in found.keys():
            assert torch.equal(found[key], expected[key]), key


def test_plain_buffers():
    buffer = ReplayBuffer(storage=LazyTensorStorage(C), sampler=TreeSampler(C, 1.0, 1.0))
    buffer.add(TensorDict({"x": torch.zeros(())}, []))
    buffer.add(TensorDict({"x": torch.ones(())}, []))
    buffer.update_priority(torch.tensor([0, 1]), priority=torch.tensor([0, 1000]))
    sample, info = buffer.sample(10, return_info=True)
    assert sample["x"].tolist() == [1.0] * 10
    assert torch.equal(info["index"], torch.ones(10, dtype=torch.long))
    torch.testing.assert_close(info["priority_weight"], torch.full((10,), 1e-11))


def test_invalid_arguments_raise():
    with pytest.raises(ValueError, match="alpha is -1, expected 0 or more"):
        TreeSampler(C, -1, 0.4)
    with pytest.raises(ValueError, match="beta is -1, expected 0 or more"):
        TreeSampler(C, 0.4, -1)
    with pytest.raises(ValueError, match="alpha is nan, expected 0 or more, and finite"):
        TreeSampler(C, float("nan"), 0.4)
    with pytest.raises(RuntimeError, match="empty storage"):
        TreeSampler(C, 0.4, 0.4).sample(LazyTensorStorage(C), 4)
    with pytest.raises(ValueError, match="the state is of a capacity of 60, expected 50"):
        TreeSampler(50, 0.4, 0.4).load_state_dict(TreeSampler(C, 0.4, 0.4).state_dict())
    storage = LazyTensorStorage(C)
    storage.set(torch.arange(5), some_rows(5))
    with pytest.raises(RuntimeError, match="the least priority is inf, expected a number above 0"):
        TreeSampler(C, 0.4, 0.4).sample(storage, 4)
