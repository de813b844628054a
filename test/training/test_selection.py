"""Selection in populations: parents of copies and their perturbation."""

import pytest
import torch

from torchrl_marl.training.evolution import Bounds, Fitness, perturb, tournament, truncation


def seeded(seed=0):
    return torch.Generator().manual_seed(seed)


def test_worst_members_become_copies_of_the_best():
    fitness = torch.tensor([4.0, 1.0, 8.0, 3.0, 7.0, 2.0, 6.0, 5.0])
    for seed in range(20):
        parent = truncation(fitness, 0.25, seeded(seed)).tolist()
        assert [parent[i] for i in (0, 2, 3, 4, 6, 7)] == [0, 2, 3, 4, 6, 7]
        assert {parent[1], parent[5]} <= {2, 4}
    drawn = [truncation(fitness, 0.25, seeded(seed))[1].item() for seed in range(200)]
    assert 70 < drawn.count(2) < 130


def test_at_least_one_member_is_replaced():
    assert truncation(torch.tensor([2.0, 1.0, 3.0]), 0.25).tolist() == [0, 2, 2]
    assert truncation(torch.tensor([2.0, 1.0]), 0.1).tolist() == [0, 0]


def test_share_of_zero_replaces_no_member_and_nan_is_worst():
    fitness = torch.tensor([1.0, torch.nan, 3.0, -torch.inf])
    assert truncation(fitness, 0.0).tolist() == [0, 1, 2, 3]
    assert truncation(fitness, 0.5, seeded())[0] == 0
    assert {truncation(fitness, 0.5, seeded(s))[1].item() for s in range(20)} == {0, 2}
    with pytest.raises(ValueError, match="share is 0.6"):
        truncation(fitness, 0.6)


def test_tournament_keeps_its_elite_and_prefers_the_fit():
    fitness = torch.arange(6.0)
    parents = torch.stack([tournament(fitness, 2, 1, seeded(seed)) for seed in range(500)])
    assert (parents[:, 5] == 5).all()
    counts = torch.bincount(parents[:, 0], minlength=6) / 500
    # The best of two draws from six is k with probability ((k + 1)^2 - k^2) / 36.
    expected = torch.tensor([2 * k + 1 for k in range(6)]) / 36
    torch.testing.assert_close(counts, expected, rtol=0, atol=0.06)
    with pytest.raises(ValueError, match="elite 7"):
        tournament(fitness, 2, 7)


def test_diverged_members_are_not_copied():
    """Of two draws from the three others, the best is 3, 4 or 5 with 1, 3 or 5 of 9."""
    fitness = torch.tensor([torch.nan, 5.0, 3.0, 4.0, torch.nan])
    parents = torch.stack([tournament(fitness, 2, 1, seeded(seed)) for seed in range(300)])
    counts = torch.bincount(parents[:, 0], minlength=5) / 300
    expected = torch.tensor([0.0, 5 / 9, 1 / 9, 3 / 9, 0.0])
    torch.testing.assert_close(counts, expected, rtol=0, atol=0.09)
    assert not torch.isin(parents, torch.tensor([0, 4])).any()
    alone = torch.tensor([torch.nan, 5.0, torch.nan, torch.nan])
    for seed in range(20):
        assert truncation(alone, 0.5, seeded(seed)).tolist() == [0, 1, 1, 1]
    lost = torch.full((3,), torch.nan)
    assert set(tournament(lost, 2, 1, seeded()).tolist()) <= {0, 1, 2}


def test_perturbed_copies_differ_by_a_factor_within_bounds():
    values, parent = torch.tensor([1.0, 2.0, 4.0, 0.5]), torch.tensor([0, 2, 2, 0])
    seen = set()
    for seed in range(40):
        new = perturb(values, parent, Bounds(0.5, 4.5), resample=0.0, generator=seeded(seed))
        assert new[0] == 1.0 and new[2] == 4.0
        seen.add((round(new[1].item(), 3), round(new[3].item(), 3)))
    assert seen == {(4.5, 1.25), (4.5, 0.8), (3.2, 1.25), (3.2, 0.8)}


def test_resampled_values_cover_the_whole_range():
    values, parent = torch.full((2000,), 1e-3), torch.zeros(2000, dtype=torch.int64)
    bounds = Bounds(1e-4, 1e-2, log=True)
    new = perturb(values, parent, bounds, resample=1.0, generator=seeded())[1:]
    assert new.min() < 1.2e-4 and new.max() > 9e-3
    assert new.log10().mean().item() == pytest.approx(-3.0, abs=0.05)
    plain = perturb(values, parent, Bounds(1e-4, 1e-2), resample=1.0, generator=seeded())[1:]
    assert plain.mean().item() == pytest.approx(5.05e-3, rel=0.05)


def test_fitness_excludes_episodes_that_run_at_a_selection():
    fitness, returns = Fitness(2), torch.tensor([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]])
    # Member 1 ends an episode with the batch, member 0 is in its second episode.
    fitness.update(returns, torch.tensor([[True, False, False], [False, False, True]]))
    fitness.begin()
    resumed = Fitness(2)
    resumed.load_state_dict(fitness.state_dict())
    for own in (fitness, resumed):
        own.update(returns, torch.tensor([[False, False, False], [False, True, False]]))
        assert own.episodes.tolist() == [0, 1] and own.total.tolist() == [0.0, 5.0]
        own.update(returns, torch.tensor([[True, False, True], [False, False, True]]))
        assert own.episodes.tolist() == [1, 2] and own.total.tolist() == [3.0, 11.0]


def test_fitness_of_a_trial_counts_episodes_from_its_start():
    fitness, returns = Fitness(2), torch.tensor([[1.0, 2.0], [3.0, 4.0]])
    fitness.update(returns, torch.tensor([[False, True], [True, False]]))
    fitness.begin([0])
    fitness.update(returns, torch.tensor([[False, True], [False, True]]))
    assert fitness.episodes.tolist() == [1, 2] and fitness.total.tolist() == [2.0, 7.0]
