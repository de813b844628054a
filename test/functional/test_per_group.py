"""Statistics by group: worked out by hand, and equal to those of each group alone."""

import math

import pytest
import torch

from torchrl_marl.functional import masked_moments
from torchrl_marl.functional.statistics import PerGroup

POISON = [math.nan, math.inf, -math.inf, 1e30]
INDEX = torch.tensor([0, 0, 1, 2, 2, 2])
PER = PerGroup(torch.eye(3, dtype=torch.float64)[INDEX])


def values(*batch, seed=0):
    generator = torch.Generator().manual_seed(seed)
    value = torch.randn(*batch, 6, dtype=torch.float64, generator=generator) * 3 + 1
    return value, torch.rand(*batch, 6, generator=generator) < 0.6


def test_statistics_worked_out_by_hand():
    value = torch.tensor([[1.0, 3, 5, 7, 9, 11], [3, 5, 7, 9, 11, 13]], dtype=torch.float64)
    mask = torch.tensor([[1, 0, 0, 1, 1, 0], [1, 0, 0, 0, 0, 1]]).bool()
    assert PER.mean(value).tolist() == [3, 6, 10]
    assert PER.mean(value, mask).tolist() == [2, 0, 29 / 3]
    mean, variance = PER.moments(value, mask)
    assert mean.tolist() == [2, 0, 29 / 3]
    assert variance.tolist() == pytest.approx([1, 0, 56 / 9])
    assert PER.sum(value).tolist() == [[4, 5, 27], [8, 7, 33]]
    assert PER.to_agents(torch.tensor([[1.0, 2, 3]])).tolist() == [[1, 1, 2, 3, 3, 3]]


@pytest.mark.parametrize("batch", [(), (4,), (2, 5)])
@pytest.mark.parametrize("trailing", [True, False])
@pytest.mark.parametrize("masked", [True, False])
def test_statistics_equal_those_of_each_group_alone(batch, trailing, masked):
    value, mask = values(*batch)
    mask = mask if masked else None
    given = value.unsqueeze(-1) if trailing else value
    masks = [mask] if mask is None else [mask, mask.unsqueeze(-1)]
    for given_mask in masks:
        mean = PER.mean(given, given_mask)
        again, variance = PER.moments(given, given_mask)
        assert mean.shape == variance.shape == (3,)
        assert torch.equal(mean, again)
        for group in range(3):
            own = group == INDEX
            one, two = masked_moments(value[..., own], None if mask is None else mask[..., own])
            torch.testing.assert_close(mean[group], one)
            torch.testing.assert_close(variance[group], two)
            torch.testing.assert_close(PER.sum(value)[..., group], value[..., own].sum(-1))


@pytest.mark.parametrize("poison", POISON)
@pytest.mark.parametrize("masked", [True, False])
def test_non_finite_values_affect_only_their_group(poison, masked):
    """In the value and in the gradient. Masked values have no effect at all."""

    def run(value, mask):
        value = value.clone().requires_grad_()
        mean, variance = PER.moments(value, mask)
        total = mean + variance + PER.mean(2 * value, mask)
        total[[0, 2]].sum().backward()
        return total.detach(), value.grad

    value, mask = values(4)
    mask[1, 2] = not masked
    poisoned = value.clone()
    poisoned[1, 2] = poison
    clean, gradient = run(value, mask)
    total, other = run(poisoned, mask)
    assert torch.equal(total[[0, 2]], clean[[0, 2]])
    assert torch.equal(total[1], clean[1]) is masked
    seen = slice(None) if masked else [0, 1, 3, 4, 5]
    assert torch.equal(gradient[:, seen], other[:, seen])
    spread = PER.to_agents(torch.tensor([[1.0, poison, 3.0]], dtype=torch.float64))
    assert spread[0, [0, 1, 3, 4, 5]].tolist() == [1, 1, 3, 3, 3]
    if masked:
        value[~mask] = poison
        assert torch.equal(run(value, mask)[0], clean)


def test_groups_without_alive_agents_give_zero():
    value = torch.full((2, 6, 1), math.nan, dtype=torch.float64)
    nobody = torch.zeros(2, 6, dtype=torch.bool)
    assert PER.mean(value, nobody).tolist() == [0, 0, 0]
    assert [x.tolist() for x in PER.moments(value, nobody)] == [[0] * 3] * 2


def test_invalid_values_and_masks_raise():
    with pytest.raises(ValueError, match=r"\(2, 5\), expected \[\*B, 6\] or \[\*B, 6, 1\]"):
        PER.mean(torch.zeros(2, 5, 1), None)
    with pytest.raises(ValueError, match="expected torch.bool"):
        PER.mean(torch.zeros(2, 6), torch.ones(2, 6))
    with pytest.raises(ValueError, match="does not fit"):
        PER.mean(torch.zeros(2, 6), torch.ones(3, 6).bool())
