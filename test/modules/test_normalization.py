"""Running statistics, by hand."""

import pytest
import torch
from samples import assert_same
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
def test_value_norm_ignores_masked_targets(poison, trailing):
    target = torch.tensor([[1.0, poison], [3.0, 5.0]]).unsqueeze(-1)
    mask = torch.tensor([[True, False], [True, True]])
    norm, expected = ValueNorm(decay=0.5), ValueNorm(decay=0.5)
    norm.update(target, mask.unsqueeze(-1) if trailing else mask)
    expected.update(torch.tensor([1.0, 3.0, 5.0]).view(-1, 1))
    for name, value in norm.state_dict().items():
        torch.testing.assert_close(value, expected.state_dict()[name])


def test_value_norm_is_unchanged_by_fully_masked_batch():
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


def test_shift_moves_mean_and_keeps_variance():
    norm = ValueNorm(decay=0.9)
    norm.shift(torch.tensor(5.0))  # before the first update it stays the identity
    assert norm.denormalize(torch.tensor([2.0])).item() == 2.0
    for targets in ([1.0, 3.0], [4.0, 10.0]):
        norm.update(torch.tensor(targets).unsqueeze(-1))
    mean, scale = norm.denormalize(torch.zeros(1)), norm.scale().clone()
    norm.shift(torch.tensor(5.0))
    torch.testing.assert_close(norm.denormalize(torch.zeros(1)), mean + 5.0)
    torch.testing.assert_close(norm.scale(), scale)


@pytest.mark.parametrize("centered", [False, True])
def test_scale_of_returns_far_from_zero_equals_a_loop_in_double_precision(centered):
    """Returns approach 1000 +- 1, as in a task with a reward of 1 in each of many steps."""
    norm, generator = ValueNorm(), torch.Generator().manual_seed(0)
    mean = square = total = 0.0
    for step in range(3000):
        target = 1000 * (1 - 0.99 ** (step / 5)) + torch.randn(64, 1, generator=generator)
        if centered and total:
            by = target.mean() - mean / total
            norm.shift(by)
            shifted = mean / total + by.item()
            square += total * (shifted**2 - (mean / total) ** 2)
            mean = total * shifted
        norm.update(target)
        exact = target.double()
        mean += 0.01 * (exact.mean().item() - mean)
        square += 0.01 * (exact.square().mean().item() - square)
        total += 0.01 * (1 - total)
    scale = (square / total - (mean / total) ** 2) ** 0.5
    assert norm.scale().item() == pytest.approx(scale, rel=1e-3)
    assert norm.scale().dtype == norm.denormalize(torch.zeros(1)).dtype == torch.float32


def test_value_norm_of_equal_targets_stays_finite():
    norm = ValueNorm()
    norm.update(torch.full((5, 1), 4.0))
    assert norm.scale().item() == pytest.approx(1e-5**0.5, rel=1e-3)
    assert bool(norm.normalize(torch.tensor([4.0, 5.0])).isfinite().all())


def test_value_norm_equals_torchrl_without_masks():
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


def test_observation_norm_is_unchanged_by_fully_masked_batch():
    norm = ObservationNorm(1)
    nobody = torch.zeros(2, 3, dtype=torch.bool)
    norm.update(torch.full((2, 3, 1), NAN), nobody)
    assert (norm.count.item(), norm.mean.item(), norm.variance.item()) == (0.0, 0.0, 1.0)
    norm.update(torch.tensor([[[1.0], [3.0], [NAN]]]), torch.tensor([[True, True, False]]))
    norm.update(torch.full((2, 3, 1), NAN), nobody)
    assert (norm.count.item(), norm.mean.item(), norm.variance.item()) == (2.0, 2.0, 1.0)


def test_observation_norm_clips_and_keeps_dtype():
    norm = ObservationNorm(1, clip=2.0)
    norm.update(torch.tensor([[[1.0], [3.0]]]))
    out = norm(torch.tensor([[2.0], [3.0], [100.0], [-100.0]]))
    assert out.dtype is torch.float32
    torch.testing.assert_close(
        out.flatten(), torch.tensor([0.0, 1.0, 2.0, -2.0]), atol=1e-4, rtol=0
    )


def test_observation_norm_state_dict():
    norm, other = ObservationNorm(2), ObservationNorm(2)
    norm.update(torch.randn(10, 3, 2))
    other.load_state_dict(norm.state_dict())
    x = torch.randn(5, 2)
    assert torch.equal(norm(x), other(x))
    assert not list(norm.parameters())


# ----------------------------------------------------------------------- parts, kinds of agents

INDEX = [0, 0, 1, 2, 2]
PARTS = torch.eye(3)[INDEX]


@pytest.mark.parametrize("masked", [True, False])
@pytest.mark.parametrize("trailing", [True, False])
def test_value_norm_with_membership_equals_separate_norms(masked, trailing):
    norm = ValueNorm(decay=0.8, membership=PARTS)
    alone = [ValueNorm(decay=0.8) for _ in range(3)]
    index = torch.tensor(INDEX)
    x = torch.randn(4, 5, 1)
    assert_same(norm.denormalize(x), x)
    for step in range(4):
        target = torch.randn(6, 7, 5, 1) * torch.tensor(INDEX).view(-1, 1) * 3 + 10 * step
        mask = torch.rand(6, 7, 5) < 0.6 if masked else None
        if masked:
            mask[..., index == step % 3] = False  # no agent of a part is alive
            target = torch.where(mask.unsqueeze(-1), target, [NAN, 1e9][step % 2])
        norm.update(target, mask.unsqueeze(-1) if masked and trailing else mask)
        for part, own in enumerate(alone):
            rows = index == part
            own.update(target[..., rows, :], None if mask is None else mask[..., rows])
            for there, back in (
                (norm.normalize(x), own.normalize(x)),
                (norm.denormalize(x), own.denormalize(x)),
                (norm.scale().expand(5, 1), own.scale().expand(5, 1)),
            ):
                torch.testing.assert_close(there[..., rows, :], back[..., rows, :])
    assert len({round(x, 3) for x in norm.scale().flatten().tolist()}) == 3
    torch.testing.assert_close(norm.normalize(norm.denormalize(x)), x, rtol=1e-4, atol=1e-4)


def test_nan_targets_stay_within_their_part():
    norm, clean = ValueNorm(membership=PARTS), ValueNorm(membership=PARTS)
    target = torch.randn(6, 5, 1)
    clean.update(target)
    target[0, 2] = NAN
    norm.update(target)
    others = [0, 1, 3, 4]
    assert_same(norm.scale()[others], clean.scale()[others])
    assert norm.scale()[2].isnan().all()


def test_value_norm_of_parts_state_dict():
    norm, other = ValueNorm(membership=PARTS), ValueNorm(membership=PARTS)
    norm.update(torch.randn(10, 5, 1))
    other.load_state_dict(norm.state_dict())
    x = torch.randn(4, 5, 1)
    assert_same(norm.denormalize(x), other.denormalize(x))
    assert "membership" not in norm.state_dict()


@pytest.mark.parametrize("masked", [True, False])
@pytest.mark.parametrize("poison", [NAN, 1e9])
def test_observation_norm_of_kinds_equals_separate_norms(masked, poison):
    norm = ObservationNorm(4, kinds=INDEX)
    alone = [ObservationNorm(4) for _ in range(3)]
    index = torch.tensor(INDEX)
    for step in range(4):
        x = torch.randn(6, 7, 5, 4) * (1 + index.view(-1, 1)) + 10 * step
        mask = torch.rand(6, 7, 5) < 0.6 if masked else None
        if masked:
            mask[..., index == step % 3] = False
            x = torch.where(mask.unsqueeze(-1), x, poison)
        norm.update(x, mask)
        seen = torch.randn(2, 5, 4) * 20
        for kind, own in enumerate(alone):
            rows = index == kind
            own.update(x[..., rows, :], None if mask is None else mask[..., rows])
            assert_same(norm.count[kind], own.count)
            assert_same(norm.mean[kind], own.mean)
            assert_same(norm.variance[kind], own.variance)
            assert_same(norm(seen)[:, rows], own(seen)[:, rows])


def test_kinds_may_come_in_any_order():
    norm, other = ObservationNorm(2, kinds=[1, 0, 1]), ObservationNorm(2, kinds=[0, 1, 0])
    x = torch.randn(6, 3, 2) * torch.tensor([1.0, 5.0, 1.0]).view(-1, 1)
    norm.update(x)
    other.update(x)
    torch.testing.assert_close(norm(x), other(x))


def test_one_kind_has_no_dim_of_kinds():
    norm, plain = ObservationNorm(2, kinds=[0, 0, 0]), ObservationNorm(2)
    x = torch.randn(6, 3, 2)
    norm.update(x)
    plain.update(x)
    assert norm.mean.shape == (2,)
    assert_same(norm(x), plain(x))


def test_wrong_number_of_agents_raises():
    norm = ObservationNorm(2, kinds=[0, 1])
    with pytest.raises(ValueError, match="3 agents, expected 2"):
        norm.update(torch.zeros(4, 3, 2))


@pytest.mark.parametrize("n", [1, 2])
def test_unbatched_team(n):
    """``[N, F]``: one row of agents."""
    norm, batched = (ObservationNorm(2, kinds=list(range(n))) for _ in range(2))
    x = torch.randn(n, 2)
    norm.update(x)
    batched.update(x.unsqueeze(0))
    for name, value in norm.state_dict().items():
        assert_same(value, batched.state_dict()[name])
