"""Running statistics, by hand."""

import pytest
import torch
from torchrl.modules import PopArtValueNorm

from torchrl_marl.modules import ObservationNorm, ValueNorm

NAN = float("nan")


def test_value_norm_is_the_identity_before_the_first_update():
    norm = ValueNorm()
    x = torch.tensor([[-3.0], [0.0], [1e6]])
    assert torch.equal(norm.normalize(x), x)
    assert torch.equal(norm.denormalize(x), x)
    assert norm.scale().item() == 1.0


def test_value_norm_by_hand():
    norm = ValueNorm(decay=0.9)
    norm.update(torch.tensor([[1.0], [3.0]]))  # debiased: mean 2, mean square 5, variance 1
    assert norm.denormalize(torch.tensor([[0.0], [1.0]])).flatten().tolist() == pytest.approx(
        [2.0, 3.0], rel=1e-5
    )
    norm.update(torch.tensor([[7.0], [9.0]]))
    # weights 0.09 and 0.1 of 0.19: mean (0.09 * 2 + 0.1 * 8) / 0.19
    mean = (0.09 * 2 + 0.1 * 8) / 0.19
    square = (0.09 * 5 + 0.1 * 65) / 0.19
    scale = (square - mean**2) ** 0.5
    assert norm.scale().item() == pytest.approx(scale, rel=1e-5)
    assert norm.normalize(torch.tensor([mean + 2 * scale])).item() == pytest.approx(2.0, rel=1e-4)


@pytest.mark.parametrize("poison", [NAN, 1e9, float("inf")])
@pytest.mark.parametrize("trailing", [True, False])
def test_value_norm_counts_the_living(poison, trailing):
    target = torch.tensor([[1.0, poison], [3.0, 5.0]]).unsqueeze(-1)
    mask = torch.tensor([[True, False], [True, True]])
    norm, expected = ValueNorm(decay=0.5), ValueNorm(decay=0.5)
    norm.update(target, mask.unsqueeze(-1) if trailing else mask)
    expected.update(torch.tensor([1.0, 3.0, 5.0]).view(-1, 1))
    for name, value in norm.state_dict().items():
        torch.testing.assert_close(value, expected.state_dict()[name])


def test_value_norm_stays_where_nobody_lives():
    norm = ValueNorm(decay=0.5)
    nobody = torch.zeros(2, 2, dtype=torch.bool)
    norm.update(torch.full((2, 2, 1), NAN), nobody)
    assert norm.scale().item() == 1.0
    assert norm.debiasing_term.item() == 0.0
    norm.update(torch.tensor([[1.0], [3.0]]))
    before = {name: value.clone() for name, value in norm.state_dict().items()}
    norm.update(torch.full((2, 2, 1), 7.0), nobody)
    for name, value in norm.state_dict().items():
        assert torch.equal(value, before[name])


def test_value_norm_of_equal_targets_stays_finite():
    norm = ValueNorm()
    norm.update(torch.full((5, 1), 4.0))
    assert norm.scale().item() == pytest.approx(1e-5**0.5, rel=1e-3)
    assert bool(norm.normalize(torch.tensor([4.0, 5.0])).isfinite().all())


def test_value_norm_is_torchrls_without_masks():
    ours, theirs = ValueNorm(decay=0.8), PopArtValueNorm(beta=0.8)
    for seed in range(4):
        target = 5 + 3 * torch.randn(20, 2, 1, generator=torch.Generator().manual_seed(seed))
        ours.update(target)
        theirs.update(target)
    x = torch.linspace(-5, 20, 7).unsqueeze(-1)
    torch.testing.assert_close(ours.normalize(x), theirs.normalize(x))
    torch.testing.assert_close(ours.denormalize(x), theirs.denormalize(x))


@pytest.mark.parametrize("masked", [True, False])
def test_observation_norm_has_the_exact_moments_of_all_batches(masked):
    norm = ObservationNorm(4)
    generator = torch.Generator().manual_seed(0)
    living = []
    for size in (3, 50, 1, 17):
        x = 1e3 + torch.randn(size, 5, 3, 4, generator=generator) * torch.tensor([1.0, 2, 3, 4])
        mask = None
        if masked:
            mask = torch.rand(size, 5, 3, generator=generator) < 0.6
            living.append(x[mask])
            x = torch.where(mask.unsqueeze(-1), x, NAN)
        else:
            living.append(x.reshape(-1, 4))
        norm.update(x, mask)
    rows = torch.cat(living).double()
    assert norm.count.item() == len(rows)
    torch.testing.assert_close(norm.mean, rows.mean(0), rtol=1e-12, atol=1e-9)
    torch.testing.assert_close(norm.variance, rows.var(0, correction=0), rtol=1e-9, atol=1e-9)


def test_observation_norm_stays_where_nobody_lives():
    norm = ObservationNorm(1)
    nobody = torch.zeros(2, 3, dtype=torch.bool)
    norm.update(torch.full((2, 3, 1), NAN), nobody)
    assert (norm.count.item(), norm.mean.item(), norm.variance.item()) == (0.0, 0.0, 1.0)
    norm.update(torch.tensor([[[1.0], [3.0], [NAN]]]), torch.tensor([[True, True, False]]))
    norm.update(torch.full((2, 3, 1), NAN), nobody)
    assert (norm.count.item(), norm.mean.item(), norm.variance.item()) == (2.0, 2.0, 1.0)


def test_observation_norm_clips_and_keeps_the_type():
    norm = ObservationNorm(1, clip=2.0)
    norm.update(torch.tensor([[[1.0], [3.0]]]))
    out = norm(torch.tensor([[2.0], [3.0], [100.0], [-100.0]]))
    assert out.dtype is torch.float32
    torch.testing.assert_close(
        out.flatten(), torch.tensor([0.0, 1.0, 2.0, -2.0]), atol=1e-4, rtol=0
    )


def test_observation_norm_is_saved():
    norm, other = ObservationNorm(2), ObservationNorm(2)
    norm.update(torch.randn(10, 3, 2))
    other.load_state_dict(norm.state_dict())
    x = torch.randn(5, 2)
    assert torch.equal(norm(x), other(x))
    assert not list(norm.parameters())
