"""Spec of hybrid actions: discrete choices and continuous numbers in one vector."""

import copy
import pickle

import pytest
import torch
from torchrl.data import Bounded, Categorical, Composite, MultiCategorical, Unbounded

from torchrl_marl import AgentSpec, TeamSpec
from torchrl_marl.errors import SpecError
from torchrl_marl.specs import Hybrid
from torchrl_marl.specs.joining import can_join, join


def make_spec(*branches, high=1.0):
    return Hybrid(branches or (3, 2), Bounded(-high, high, (2,)))


def team_of(*actions):
    kinds = [AgentSpec(f"car_{i}", 2, Unbounded((4,)), spec) for i, spec in enumerate(actions)]
    return TeamSpec(kinds)


def test_action_is_in_spec_if_all_parts_are():
    spec = make_spec()
    rows = {
        (2.0, 1.0, 0.5, -1.0): True,
        (3.0, 1.0, 0.5, -1.0): False,  # the first choice has options 0, 1 and 2
        (-1.0, 1.0, 0.5, -1.0): False,
        (0.5, 1.0, 0.5, -1.0): False,
        (2.0, 1.0, 0.5, -1.5): False,
    }
    for row, expected in rows.items():
        assert spec.is_in(torch.tensor(row)) is expected, row
        assert spec.is_in(spec.project(torch.tensor(row)))
    assert not spec.is_in(torch.zeros(3)) and not spec.is_in(torch.zeros(4, dtype=torch.int64))
    assert spec.project(torch.tensor([7.0, -2.0, 0.5, 3.0])).tolist() == [2.0, 0.0, 0.5, 1.0]


def test_rand_draws_all_options_equally_often():
    drawn = make_spec().rand([3000])
    for choice, n in enumerate((3, 2)):
        share = drawn[:, choice].long().bincount(minlength=n) / 3000
        torch.testing.assert_close(share, torch.full((n,), 1 / n), atol=0.03, rtol=0)
    assert bool((drawn[:, 2:].abs() <= 1).all()) and drawn[:, 2].std() > 0.5


def test_shape_operations_keep_the_spec():
    spec = torch.stack([make_spec()] * 3, 0).expand(5, 3, 4)
    assert isinstance(spec, Hybrid) and spec.shape == (5, 3, 4)
    shapes = {
        (3, 4): [spec[0], spec.unbind(0)[1]],
        (5, 4): [spec[:, 1], spec.unbind(1)[0], spec.unbind(-2)[0]],
        (15, 4): [spec.reshape(15, 4), spec.flatten(0, 1)],
        (5, 1, 3, 4): [spec.unsqueeze(1), spec.unsqueeze(-3)],
        (5, 3, 4): [spec.unsqueeze(0).squeeze(), spec.unsqueeze(0).squeeze(0), spec.clone()],
        (3, 5, 3, 4): [spec.reshape(15, 4).unflatten(0, (5, 3)).expand(3, 5, 3, 4)],
    }
    for shape, found in shapes.items():
        for one in found:
            assert isinstance(one, Hybrid) and one.branches == (3, 2)
            assert tuple(one.shape) == shape == tuple(one.rand().shape)
    for copied in (copy.deepcopy(spec), pickle.loads(pickle.dumps(spec)), spec.to("cpu")):
        assert copied == spec
    assert spec != spec[0] and make_spec(3) != make_spec(2) != make_spec(2, high=2.0)
    assert make_spec() != make_spec().continuous
    assert spec.to(torch.float64).dtype is torch.float64
    leaf = Composite({"g": Composite({"action": spec[0]}, shape=(3,))}).expand(5)
    assert leaf["g", "action"] == spec


@pytest.mark.parametrize(
    "take", [lambda spec: spec[..., 0], lambda spec: spec.unbind(-1), lambda spec: spec.expand(5)]
)
def test_splitting_the_action_dim_raises(take):
    with pytest.raises((ValueError, IndexError), match="action|last dim|must end with 4"):
        take(make_spec())


@pytest.mark.parametrize(
    ("branches", "numbers", "message"),
    [
        ([], Bounded(-1, 1, (2,)), r"branches are \[\]"),
        (3, Bounded(-1, 1, (2,)), "branches are 3, expected"),
        ([2.5], Bounded(-1, 1, (2,)), r"branches are \[2.5\]"),
        ([3], None, "are NoneType, expected Bounded"),
        ([3], Categorical(3), "are Categorical"),
        ([3], MultiCategorical([3]), "are MultiCategorical"),
        ([3], Bounded(0, 4, (2,), dtype=torch.int64), "of torch.int64"),
        ([3], Unbounded(()), r"UnboundedContinuous \[\]"),
    ],
)
def test_invalid_parts_raise(branches, numbers, message):
    with pytest.raises(ValueError, match=message):
        Hybrid(branches, numbers)


def test_group_exposes_branches_and_bounds():
    group = team_of(make_spec(high=2.0)).groups["car_0"]
    assert group.hybrid and group.branches == (3, 2) and not group.discrete
    assert group.action_dim == 4 and group.action_dims == (4, 4) and group.action_padding is None
    low, high = group.action_bounds
    assert low.tolist() == [[-2.0, -2.0]] * 2 and high.tolist() == [[2.0, 2.0]] * 2
    assert group.choices == "hybrid, [3, 2] and 2 numbers"
    unbounded = team_of(Hybrid([3], Unbounded((1,)))).groups["car_0"]
    assert unbounded.action_bounds is None and unbounded.choices == "hybrid, [3] and 1 number"
    for other in (MultiCategorical([3, 2]), Categorical(3), Bounded(-1, 1, (2,))):
        assert not team_of(other).groups["car_0"].hybrid


def test_groups_with_equal_parts_are_joined():
    groups = team_of(make_spec(), make_spec(), make_spec(4, 2), make_spec(high=2.0)).groups
    first, *others = groups.values()
    assert [can_join(first, other) for other in others] == [True, False, False]
    joined = join([first, others[0]])
    assert joined.hybrid and joined.action_bounds[0].shape == (4, 2)


def test_different_hybrid_specs_in_one_group_raise():
    kinds = [AgentSpec("a", 1, Unbounded((4,)), make_spec())]
    kinds += [AgentSpec("b", 1, Unbounded((4,)), make_spec(4, 2))]
    with pytest.raises((ValueError, SpecError), match="Hybrid of torch.float32.*its own group"):
        _ = TeamSpec({"cars": kinds}).groups["cars"].padded_spec
