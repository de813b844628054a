"""Masked statistics: by hand, with an empty mask, and with NaN or large masked values."""

import math

import pytest
import torch

from torchrl_marl.functional import masked_mean, masked_moments, masked_standardize

POISON = [float("nan"), 1e9, float("inf")]
MASK = torch.tensor([[True, False, True], [False, False, True]])


@pytest.mark.parametrize("poison", [0.0, *POISON])
def test_masked_mean_and_moments(poison):
    value = torch.where(MASK, torch.tensor([[1.0, 0, 2], [0, 0, 6]]), poison)
    assert masked_mean(value, MASK) == 3
    assert masked_mean(value, MASK, dim=0).tolist() == [1, 0, 4]
    assert masked_mean(value, MASK, dim=-1).tolist() == [1.5, 6]
    mean, variance = masked_moments(value, MASK)
    assert (mean, variance) == (3, pytest.approx((4 + 1 + 9) / 3))
    mean, variance = masked_moments(value, MASK, dim=1, keepdim=True)
    assert mean.tolist() == [[1.5], [6]]
    assert variance.tolist() == [[0.25], [0]]


@pytest.mark.parametrize("poison", [0.0, *POISON])
@pytest.mark.parametrize("dim", [None, 0, 1])
def test_masked_standardize(poison, dim):
    value = torch.where(MASK, torch.tensor([[1.0, 0, 2], [0, 0, 6]]), poison)
    found = masked_standardize(value, MASK, dim)
    assert (found[~MASK] == 0).all()
    assert masked_mean(found, MASK).abs() < 1e-6
    if dim is None:
        assert found[MASK].std(unbiased=False) == pytest.approx(1, abs=1e-4)


def test_all_true_mask_changes_no_statistic():
    value = torch.randn(4, 5, 3, 1)
    for mask in (torch.ones(4, 5, 3, dtype=torch.bool), torch.ones(4, 5, 3, 1, dtype=torch.bool)):
        for dim in (None, -2, (0, 1)):
            torch.testing.assert_close(masked_mean(value, mask, dim), masked_mean(value, None, dim))
            assert torch.equal(
                masked_standardize(value, mask, dim), masked_standardize(value, None, dim)
            )
    mean, variance = masked_moments(value)
    assert mean == pytest.approx(value.mean().item(), abs=1e-6)
    assert variance == pytest.approx(value.var(unbiased=False).item(), rel=1e-5)


def test_all_false_mask_gives_zero():
    nobody = torch.zeros(2, 3, dtype=torch.bool)
    value = torch.full((2, 3, 1), math.nan)
    assert masked_mean(value, nobody) == 0
    assert (masked_standardize(value, nobody) == 0).all()
    assert [x.item() for x in masked_moments(value, nobody)] == [0, 0]


@pytest.mark.parametrize("poison", POISON)
def test_masked_values_have_no_effect_on_gradients(poison):
    def gradient(value):
        value = value.clone().requires_grad_()
        (masked_standardize(value, MASK).square().sum() + masked_mean(value, MASK)).backward()
        return value.grad

    clean = torch.tensor([[1.0, 0, 2], [0, 0, 6]])
    found = gradient(torch.where(MASK, clean, poison))
    assert torch.equal(found[MASK], gradient(clean)[MASK])
    assert (found[~MASK] == 0).all()


def test_invalid_masks_raise():
    value = torch.zeros(2, 3, 1)
    with pytest.raises(ValueError, match="expected torch.bool"):
        masked_mean(value, torch.ones(2, 3))
    for shape in [(3,), (2, 1), (3, 2), (2, 3, 2), (1, 2, 3, 1)]:
        with pytest.raises(ValueError, match="does not fit"):
            masked_mean(value, torch.ones(shape, dtype=torch.bool))
