"""Conversion of lazy stacks to their padded form and back."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tensordict import LazyStackedTensorDict, TensorDict
from torchrl.data import Bounded, Categorical, Composite, MultiCategorical, OneHot, Unbounded

from torchrl_marl.specs.groups import is_lazy
from torchrl_marl.specs.stacking import (
    Padding,
    pad,
    pad_group,
    pad_specs,
    paddings_of,
    unpad,
    unpad_group,
    unpad_specs,
)

BATCHES = [(), (4,), (4, 5)]


@st.composite
def shapes(draw):
    """Shapes of some agents' leaves with equal ndim; an agent may have no leaf."""
    ndim = draw(st.integers(0, 3))
    one = st.tuples(*[st.integers(1, 4)] * ndim)
    own = draw(st.lists(st.one_of(one, st.none()), min_size=1, max_size=5))
    own[draw(st.integers(0, len(own) - 1))] = draw(one)
    return tuple(own)


# ------------------------------------------------------------------------------------- tensors


@settings(deadline=None, max_examples=60)
@given(shapes(), st.sampled_from(BATCHES))
def test_padding_is_lossless(shapes, batch):
    padding = Padding(shapes)
    values = [None if shape is None else torch.randn((*batch, *shape)) for shape in shapes]
    padded = pad(values, padding)
    assert padded.shape == (*batch, len(shapes), *padding.largest)
    assert not padded[..., ~padding.mask()].any() if padding.largest else True
    n_own = sum(1 if s is None else torch.Size(s).numel() for s in shapes if s is not None)
    assert int(padding.mask().sum()) == n_own
    poisoned = torch.where(padding.mask(), padded, torch.nan)
    for value, own in zip(values, unpad(poisoned, padding)):
        assert (own is None) == (value is None)
        assert value is None or torch.equal(value, own)


def test_unpadded_entries_are_views():
    padded = torch.zeros(4, 2, 3)
    first, second = unpad(padded, Padding(((2,), (3,))))
    first += 1
    second += 2
    assert padded[0].tolist() == [[1, 1, 0], [2, 2, 2]]


def test_gradients_go_to_own_entries_only():
    values = [torch.ones(4, 2, requires_grad=True), torch.ones(4, 3, requires_grad=True)]
    padding = Padding(((2,), (3,)))
    pad(values, padding).square().sum().backward()
    assert all((value.grad == 2).all() for value in values)
    padded = torch.ones(4, 2, 3, requires_grad=True)
    sum(own.sum() for own in unpad(padded, padding)).backward()
    assert torch.equal(padded.grad[0] > 0, padding.mask())


def test_values_that_do_not_match_the_padding_raise():
    with pytest.raises(ValueError, match=r"shapes \[\(2,\), \(3, 1\)\], expected one number of"):
        Padding(((2,), (3, 1)))
    with pytest.raises(ValueError, match=r"agent 1 has shape \(2,\), expected \(3,\)"):
        pad([torch.zeros(4, 2), torch.zeros(4, 2)], Padding(((2,), (3,))))
    with pytest.raises(ValueError, match=r"agent 0 has shape None, expected \(2,\)"):
        pad([None, torch.zeros(4, 3)], Padding(((2,), (3,))))


# -------------------------------------------------------------------------------------- groups


def make_member(batch, o, image=None, extra=False):
    """An agent that observes o numbers and an image, with an optional extra leaf."""
    seen = {"vector": torch.randn(*batch, o)}
    if image is not None:
        seen["image"] = torch.randint(9, (*batch, 3, *image))
    leaves = {
        "observation": seen,
        "reward": torch.randn(*batch, 1),
        "mask": torch.ones(batch).bool(),
    }
    if extra:
        leaves["memory"] = torch.randn(*batch, 7)
    return TensorDict(leaves, batch)


def make_group(batch, members=((2, (4, 4), True), (3, (2, 5), False), (2, (4, 4), True))):
    rows = [make_member(batch, *member) for member in members]
    return LazyStackedTensorDict(*rows, stack_dim=len(batch))


def paddings(group):
    rows = group.unbind(group.ndim - 1)
    ndim = group.ndim - 1

    def spec(td):
        return Composite({
            key: spec(x) if isinstance(x, TensorDict) else Unbounded(x.shape[ndim:], dtype=x.dtype)
            for key, x in td.items()
        })  # fmt: skip

    return paddings_of([spec(row) for row in rows])


def assert_same_members(one, other):
    assert one.batch_size == other.batch_size
    for a, b in zip(one.unbind(one.ndim - 1), other.unbind(other.ndim - 1)):
        assert set(a.keys(True, True)) == set(b.keys(True, True))
        assert all(torch.equal(x, b[key]) and x.dtype == b[key].dtype
                   for key, x in a.items(True, True))  # fmt: skip


@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize("known", [True, False])
def test_pad_and_unpad_group_round_trip(batch, known):
    group = make_group(batch)
    dense = pad_group(group, paddings(group) if known else None)
    assert not is_lazy(dense)
    assert dense.batch_size == (*batch, 3)
    assert dense["observation", "vector"].shape == (*batch, 3, 3)
    assert dense["observation", "image"].shape == (*batch, 3, 3, 4, 5)
    assert dense["observation", "image"].dtype == torch.int64
    assert dense["memory"].shape == (*batch, 3, 7)
    assert (dense["memory"][..., 1, :] == 0).all()
    assert dense["mask"].shape == (*batch, 3)
    back = unpad_group(dense, paddings(group))
    assert is_lazy(back)
    assert back.stack_dim == len(batch)
    assert_same_members(group, back)


def test_pad_group_of_lazy_stacks_over_time():
    """As from a rollout: lazy groups, stacked in a dim before the agents."""
    steps = [make_group((4,)) for _ in range(5)]
    for rollout in (torch.stack(steps, 1), LazyStackedTensorDict.lazy_stack(steps, 1)):
        dense = pad_group(rollout)
        assert dense.batch_size == (4, 5, 3)
        for t, step in enumerate(steps):
            assert_same_members(step, unpad_group(dense[:, t], paddings(step)))
        assert_same_members(rollout, unpad_group(dense, paddings(steps[0])))


def test_dim_names_are_kept():
    parent = TensorDict({"team": make_group((4, 5))}, [4, 5], names=[None, "time"])
    dense = pad_group(parent["team"])
    assert dense.names == parent["team"].names
    parent["team"] = dense
    assert parent["team"].names[1] == "time"
    assert unpad_group(parent["team"], {}).names == [None, "time", None]


def test_dense_group_is_returned_unchanged():
    dense = TensorDict({"observation": torch.zeros(4, 2, 3)}, [4, 2])
    assert pad_group(dense) is dense
    members = unpad_group(dense, {}).unbind(1)
    assert [member["observation"].shape for member in members] == [(4, 3), (4, 3)]
    assert members[0]["observation"].data_ptr() == dense["observation"].data_ptr()


# --------------------------------------------------------------------------------------- specs


SOME = torch.tensor([True, False, True])
SPECS = {
    "unbounded": [Unbounded((2,)), Unbounded((3,)), Unbounded((2,))],
    "double": [Unbounded((2,), dtype=torch.float64), Unbounded((3,), dtype=torch.float64)],
    "integers": [Unbounded((2,), dtype=torch.int64), Unbounded((3,), dtype=torch.int64)],
    "bounded": [Bounded(-1, 1, (2,)), Bounded(-2, 3, (3,))],
    "bytes": [Bounded(0, 255, (3, 4, 4), dtype=torch.uint8),
              Bounded(0, 255, (3, 2, 8), dtype=torch.uint8)],
    "bounds": [Bounded(-1, 1, (2,)), Bounded(-2, 3, (2,))],
    "half_bounded": [Unbounded((2,)), Bounded(-2, 3, (3,))],
    "categorical": [Categorical(2), Categorical(4)],
    "categorical_shape": [Categorical(2, shape=(2,)), Categorical(4, shape=(2,))],
    "masked": [Categorical(3, mask=SOME), Categorical(4)],
    "equal_masked": [Categorical(3, mask=SOME), Categorical(3, mask=SOME)],
    "one_hot": [OneHot(2), OneHot(4)],
    "masked_one_hot": [OneHot(3, mask=SOME), OneHot(4)],
    "flags": [Categorical(2, shape=(1,), dtype=torch.bool)] * 2,
    "equal": [Unbounded((2,)), Unbounded((2,))],
    "several": [MultiCategorical([2, 3])] * 2,
}  # fmt: skip


@pytest.mark.parametrize("specs", SPECS.values(), ids=SPECS)
def test_pad_and_unpad_specs_round_trip(specs):
    members = [Composite(x=spec, nested=Composite(y=spec)) for spec in specs]
    dense = pad_specs(members)
    assert dense.shape == (len(specs),)
    back = unpad_specs(dense, paddings_of(members))
    for member, own in zip(members, back):
        for key in ("x", ("nested", "y")):
            assert own[key] == member[key]
            assert own[key].dtype == member[key].dtype
    # Samples of the agents are in the padded spec, and samples of the padded spec in theirs.
    drawn = LazyStackedTensorDict(*[member.rand() for member in members], stack_dim=0)
    assert dense.is_in(pad_group(drawn, paddings_of(members)))
    for _ in range(20):
        for member, row in zip(members, unpad_group(dense.rand(), paddings_of(members)).unbind(0)):
            assert member.is_in(row)


def test_padded_entries_have_one_value():
    dense = pad_specs([Composite(x=Bounded(-1, 1, (2,))), Composite(x=Bounded(1, 3, (3,)))])["x"]
    assert dense.space.low.tolist() == [[-1, -1, 0], [1, 1, 1]]
    assert dense.space.high.tolist() == [[1, 1, 0], [3, 3, 3]]
    index = pad_specs([Composite(x=Categorical(2)), Composite(x=Categorical(4))])["x"]
    assert index.mask.tolist() == [[True, True, False, False], [True] * 4]
    assert not index.is_in(torch.tensor([2, 0]))
    assert index.is_in(torch.tensor([1, 3]))


def test_pad_specs_with_missing_leaves():
    members = [
        Composite(x=Unbounded((2,)), y=Bounded(-1, 1, (3,)), z=Categorical(4)),
        Composite(x=Unbounded((2,))),
    ]
    dense = pad_specs(members)
    assert dense["y"].space.high.tolist() == [[1, 1, 1], [0, 0, 0]]
    assert dense["z"].mask.tolist() == [[True] * 4, [True, False, False, False]]
    back = unpad_specs(dense, paddings_of(members))
    assert [set(own.keys()) for own in back] == [{"x", "y", "z"}, {"x"}]
    assert back[0] == members[0]


@pytest.mark.parametrize(
    ("one", "other", "message"),
    [
        (
            Bounded(-1, 1, (2,)),
            Categorical(2, shape=(2,)),
            "BoundedContinuous of torch.float32 and",
        ),
        (Unbounded((2,)), Unbounded((3,), dtype=torch.float64), "expected one type and dtype"),
        (Categorical(3), Categorical(3, dtype=torch.int32), "put each kind into its own group"),
        (OneHot(3), Categorical(3, shape=(3,), dtype=torch.bool), "OneHot of torch.bool"),
        (MultiCategorical([2, 3]), MultiCategorical([2, 4]), "expected one type"),
    ],
)
def test_pad_specs_of_incompatible_specs_raises(one, other, message):
    with pytest.raises(ValueError, match=message) as error:
        pad_specs([Composite(a=one), Composite(a=other)], "group 'team'")
    assert "group 'team': 'a' is" in str(error.value)


def test_pad_specs_of_different_ndim_raises():
    with pytest.raises(ValueError, match="expected one number of dims"):
        pad_specs([Composite(a=Unbounded((2,))), Composite(a=Unbounded((2, 1)))])
