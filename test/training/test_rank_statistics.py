"""Statistics that are summed over ranks equal those of the whole batch."""

import pytest
import torch
from threads import run_on_thread_ranks

from torchrl_marl.functional import masked_moments, masked_standardize
from torchrl_marl.functional.statistics import PerGroup
from torchrl_marl.modules import ObservationNorm, ValueNorm
from torchrl_marl.runtime.ranks import SINGLE_PROCESS, current

MEMBERSHIP = torch.tensor([[1.0, 0.0], [1.0, 0.0], [0.0, 1.0]])


@pytest.fixture
def whole():
    """Values of 12 steps of 3 agents, few of which are alive in the first steps."""
    torch.manual_seed(0)
    mask = torch.rand(12, 3) < torch.linspace(0.1, 0.9, 12).unsqueeze(-1)
    mask[:4, 2] = False
    return 5 + torch.randn(12, 3, 1), mask


def parts_of(whole, sizes=(4, 3, 5)):
    return list(zip(*(x.split(sizes) for x in whole)))


@pytest.mark.parametrize("membership", [None, MEMBERSHIP])
@pytest.mark.parametrize("masked", [True, False])
def test_moments_and_any_over_ranks_equal_the_whole(whole, membership, masked):
    per = PerGroup(membership)

    def found(part):
        value, mask = part
        return torch.stack([*per.moments(value, mask if masked else None), per.any(mask)])

    expected = found(whole)
    for own in run_on_thread_ranks(found, *parts_of(whole)):
        torch.testing.assert_close(own, expected)


@pytest.mark.parametrize("membership", [None, MEMBERSHIP])
def test_means_with_the_total_count_sum_to_the_whole(whole, membership):
    per = PerGroup(membership)
    count = sum(per.number(*part) for part in parts_of(whole))
    assert count.sum() == whole[1].sum()
    total = sum(per.mean(*part, count) for part in parts_of(whole))
    torch.testing.assert_close(total, per.mean(*whole))
    torch.testing.assert_close(per.number(whole[0]).sum(), torch.tensor(36.0))


@pytest.mark.parametrize("exclude", [(), (-2,)])
@pytest.mark.parametrize("membership", [None, MEMBERSHIP])
def test_standardized_values_over_ranks_equal_the_whole(whole, membership, exclude):
    per = PerGroup(membership)
    expected = per.standardize(*whole, exclude)
    found = run_on_thread_ranks(lambda part: per.standardize(*part, exclude), *parts_of(whole))
    torch.testing.assert_close(torch.cat(found), expected)
    first = parts_of(whole)[0]
    assert not torch.allclose(per.standardize(*first, exclude), expected[:4])


def test_functions_use_only_given_ranks(whole):
    apart = [masked_moments(*part) for part in parts_of(whole)]
    found = run_on_thread_ranks(lambda part: masked_moments(*part), *parts_of(whole))
    assert all(torch.equal(x, y) for one, two in zip(apart, found) for x, y in zip(one, two))
    expected = masked_standardize(*whole)
    found = run_on_thread_ranks(
        lambda part: masked_standardize(*part, ranks=current()), *parts_of(whole)
    )
    torch.testing.assert_close(torch.cat(found), expected)


@pytest.mark.parametrize("kinds", [(), (0, 0, 1)])
def test_observation_norm_over_ranks_equals_the_whole(whole, kinds):
    def found(part):
        norm = ObservationNorm(1, kinds=kinds)
        norm.update(*part)
        norm.update(part[0] * 2)
        return torch.cat([x.reshape(-1) for x in (norm.count, norm.mean, norm.variance)])

    expected = found(whole)
    for own in run_on_thread_ranks(found, *parts_of(whole)):
        torch.testing.assert_close(own, expected)


def test_value_norm_over_ranks_with_a_fully_masked_part(whole):
    def found(part):
        norm = ValueNorm(membership=MEMBERSHIP)
        norm.update(*part)
        return torch.stack([norm.running_mean, norm.running_mean_sq, norm.debiasing_term])

    nobody = torch.zeros(4, 3, dtype=torch.bool)
    mask = torch.cat([nobody, whole[1][4:]])
    expected = found((whole[0], mask))
    assert bool((expected[2] > 0).all())
    for own in run_on_thread_ranks(found, *parts_of((whole[0], mask))):
        torch.testing.assert_close(own, expected)


def test_ranks_are_current_only_while_learning():
    assert current() is SINGLE_PROCESS
    assert run_on_thread_ranks(lambda part: current().size, 0, 0) == [2, 2]
    assert current() is SINGLE_PROCESS and SINGLE_PROCESS.row_of_rank(torch.ones(2)).shape == (1, 2)
