"""Samples of the sum tree: distribution, against a linear search, drift, and in a graph."""

import pytest
import torch

from torchrl_marl.capture import capture, count_syncs
from torchrl_marl.functional.sum_tree import SumTree


def filled(values, width=16):
    tree = SumTree(len(values), width)
    tree.set(torch.arange(len(values)), values)
    return tree


def some_values(n, share=0.5):
    """Values of very different sizes, many of them 0."""
    return 10 ** (4 * torch.rand(n, dtype=torch.float64) - 2) * (torch.rand(n) < share)


def uniform(*shape):
    return torch.rand(*shape, dtype=torch.float64)


def walk(values, number):
    """Index at which the cumulative sum of the values exceeds a number."""
    total = 0.0
    for i, value in enumerate(values):
        total += value
        if total > number:
            return i
    raise AssertionError("the number is not below the sum")


# ----------------------------------------------------------------------------- by hand


def test_samples_worked_out_by_hand():
    tree = filled(torch.tensor([1.0, 0.0, 2.0, 5.0, 0.0]), width=2)
    assert tree.total == 8
    assert tree.sample(torch.tensor([0, 0.12, 0.125, 0.37, 0.375, 0.99]).double()).tolist() == [
        *(0, 0),
        *(2, 2),
        *(3, 3),
    ]


def test_repeated_index_takes_its_largest_value():
    tree = filled(torch.ones(40))
    tree.set(torch.tensor([7, 7, 7]), torch.tensor([0.25, 0.5, 0.125]))
    assert tree[torch.tensor([7])] == 0.5
    assert tree.total == 39.5


@pytest.mark.parametrize(("first", "n"), [(0, 5000), (17, 300), (4999, 1), (160, 16), (3, 0)])
def test_fill_equals_set_of_the_same_range(first, n):
    one, other = filled(values := some_values(5000)), filled(values)
    new = some_values(n)
    one.fill(first, new)
    other.set(torch.arange(first, first + n), new)
    assert all(map(torch.equal, one.tensors, other.tensors))


@pytest.mark.parametrize("capacity", [1, 2, 15, 16, 17, 255, 256, 257])
def test_capacities_around_powers_of_the_width(capacity):
    tree = filled(torch.arange(1, capacity + 1))
    assert tree.total == capacity * (capacity + 1) / 2
    drawn = tree.sample(uniform(20_000))
    assert drawn.min() >= 0 and drawn.max() < capacity
    assert drawn.unique().numel() > capacity / 2
    assert tree.sample(torch.zeros(1).double()) == 0
    assert tree.sample(torch.ones(1).double()) == capacity - 1


# ------------------------------------------------------------------------ distribution


@pytest.mark.parametrize("width", [2, 16, 64])
def test_samples_equal_a_linear_search_in_python(width):
    values = some_values(1000)
    numbers = uniform(500)
    drawn = filled(values, width).sample(numbers).tolist()
    total = sum(values.tolist())
    assert drawn == [walk(values.tolist(), number * total) for number in numbers.tolist()]


def test_samples_follow_the_distribution_of_values():
    n, values = 2_000_000, some_values(1000)
    counts = torch.bincount(filled(values).sample(uniform(n)), minlength=1000)
    expected = values / values.sum() * n
    common = expected > 5  # the others are too few for the statistic
    chi2 = ((counts - expected).square() / expected)[common].sum() / common.sum()
    assert counts[values == 0].sum() == 0
    assert 0.8 < chi2 < 1.2


def test_equal_values_of_a_million_rows_are_sampled_uniformly():
    """float32 numbers are multiples of 2^-24: too coarse, 16 or 17 of them for each row."""
    n, rows = 2_000_000, 1_000_000
    tree = filled(torch.ones(rows))
    first, last = uniform(n // 2) / 1000, 1 - uniform(n // 2) / 1000
    drawn = tree.sample(torch.cat([first, last]))
    counts = torch.bincount(drawn, minlength=rows)
    ends = torch.cat([counts[:1000], counts[-1000:]]).double()
    assert ends.sum() == n
    assert ((ends - 1000).square() / 1000).mean() < 1.2


def test_zero_values_are_never_sampled_at_borders():
    values = torch.zeros(4096, dtype=torch.float64)
    values[torch.randperm(4096)[:300]] = some_values(300, share=1.0) + 1e-9
    tree = filled(values)
    borders = values.cumsum(0) / values.sum()
    near = [borders, borders.nextafter(torch.zeros(()).double()), borders + 1e-17]
    drawn = tree.sample(torch.cat([*near, torch.ones(1).double()]).clamp(0, 1))
    assert (values[drawn] > 0).all()


def test_nan_values_give_indices_in_range():
    """The learner reports a diverged run, so the tree must not raise an index error."""
    tree = filled(torch.ones(100))
    tree.set(torch.tensor([3]), torch.tensor([float("nan")]))
    drawn = tree.sample(uniform(64))
    assert drawn.min() >= 0 and drawn.max() < 100
    empty = SumTree(100).sample(uniform(64))
    assert empty.min() >= 0 and empty.max() < 100


def test_sums_do_not_drift():
    tree = filled(some_values(1000))
    for _ in range(2000):
        tree.set(torch.randint(1000, (64,)), some_values(64, share=0.9))
    again = filled(tree.values)
    for one, other in zip(tree.tensors, again.tensors):
        assert torch.equal(one, other)
    assert abs(tree.total - tree.values.sum()) < 1e-12 * tree.total


# --------------------------------------------------------------------------- in a graph


@pytest.mark.parametrize("execution", ["trace", "compile"])
def test_captured_graph_equals_eager_calls(execution):
    eager, own = filled(values := some_values(5000)), filled(values)

    def step(numbers, value, *held):
        index = own.sample(numbers)
        own.set(index, value)
        return index, own.total.clone(), own[index]

    before = [x.clone() for x in own.tensors]
    program = capture(step, uniform(64), torch.rand(64), *own.tensors, name="", execution=execution)
    for x, value in zip(own.tensors, before):  # recording made a step
        x.copy_(value)
    for _ in range(20):
        numbers, value = uniform(64), torch.rand(64)
        index, total, read = program(numbers, value, *own.tensors)
        drawn = eager.sample(numbers)
        eager.set(drawn, value)
        assert torch.equal(index, drawn)
        assert torch.equal(total, eager.total) and torch.equal(read, eager[drawn])
    for one, other in zip(own.tensors, eager.tensors):
        assert torch.equal(one, other)


def test_no_host_synchronization():
    tree = filled(torch.ones(1000))
    numbers, value = uniform(64), torch.rand(64)
    with count_syncs() as syncs:
        tree.set(tree.sample(numbers), value)
    assert not syncs, syncs


# ----------------------------------------------------------------------------- bad input


def test_invalid_arguments_raise():
    tree = SumTree(8)
    with pytest.raises(ValueError, match="numbers are torch.float32 of shape .2,., expected torch"):
        tree.sample(torch.rand(2))
    with pytest.raises(ValueError, match=r"index has shape \(2,\) and value \(2, 1\), expected"):
        tree.set(torch.arange(2), torch.rand(2, 1))
    with pytest.raises(ValueError, match="capacity is 0 and width 16, expected at least 1 and 2"):
        SumTree(0)
    with pytest.raises(ValueError, match="values from 5 to 9 exceed the capacity 8"):
        tree.fill(5, torch.rand(4))
