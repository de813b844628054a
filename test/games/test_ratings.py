"""Ratings: by hand, independent of the order of games, and with calibrated intervals."""

import math

import pytest
import torch

from torchrl_marl.games import bradley_terry, interval


def drawn(strengths, n_games, generator):
    """Wins of players of known strengths, ``[A, A]``."""
    chance = 1 / (1 + 10 ** ((strengths - strengths.unsqueeze(1)) / 400))
    upper = torch.binomial(torch.full_like(chance, n_games), chance, generator=generator).triu(1)
    return upper + (n_games - upper).triu(1).mT


def test_two_players_by_hand():
    """Odds of 3 to 1: 400 log10(3) points apart; the error of log-odds is (1/30 + 1/10)^(1/2)."""
    wins = torch.tensor([[0, 30], [10, 0]])
    rating, error = bradley_terry(wins, prior=0.0, anchor=1)
    assert rating.tolist() == pytest.approx([400 * math.log10(3), 0.0])
    points = 400 / math.log(10) * (1 / 30 + 1 / 10) ** 0.5
    assert error.tolist() == pytest.approx([points, 0.0])
    centered = bradley_terry(wins, prior=0.0)
    assert centered.rating.tolist() == pytest.approx([200 * math.log10(3), -200 * math.log10(3)])
    assert centered.error.tolist() == pytest.approx([points / 2] * 2)


def test_draws_count_half_and_the_diagonal_is_ignored():
    wins, draws = torch.tensor([[0, 30], [10, 0]]), torch.tensor([[0, 20], [20, 0]])
    same = bradley_terry(torch.tensor([[99, 40], [20, 7]]), prior=0.0)
    torch.testing.assert_close(bradley_terry(wins, draws, prior=0.0), same)


def test_ratings_do_not_depend_on_the_order_of_players():
    wins = drawn(torch.randn(5, dtype=torch.float64) * 200, 20, None)
    order = torch.randperm(5)
    rating, error = bradley_terry(wins)
    again = bradley_terry(wins[order][:, order])
    torch.testing.assert_close(again.rating, rating[order])
    torch.testing.assert_close(again.error, error[order])


def test_unbeaten_player_needs_the_prior_for_a_finite_rating():
    wins = torch.tensor([[0, 100, 100], [0, 0, 50], [0, 50, 0]])
    rating, error = bradley_terry(wins)
    assert rating.isfinite().all() and rating[0] > rating[1] + 500 and error[0] > error[1]
    assert rating[1] == pytest.approx(rating[2].item())
    with pytest.raises(ValueError, match="the likelihood has no maximum"):
        bradley_terry(wins, prior=0.0)


def test_player_without_games_is_average_and_uncertain():
    wins = torch.tensor([[0, 5, 0], [5, 0, 0], [0, 0, 0]])
    rating, error = bradley_terry(wins)
    assert rating.abs().max() < 1e-9
    assert error[2] > error[0]


def test_rating_intervals_cover_the_true_strengths():
    """Eight players of known strengths, each pair 40 games: 95 % intervals cover 90 to 99 %."""
    generator = torch.Generator().manual_seed(0)
    strengths = torch.linspace(-300, 300, 8, dtype=torch.float64)
    covered = []
    for _ in range(200):
        low, high = bradley_terry(drawn(strengths, 40, generator)).interval()
        covered.append((low <= strengths) & (strengths <= high))
    assert 0.90 <= torch.stack(covered).double().mean() <= 0.99


def test_intervals_of_win_rates():
    low, high = interval(torch.tensor([0, 10, 0]), torch.tensor([0, 10, 10]))
    assert low[0] == 0 and high[0] == 1
    assert low[2] == 0 and high[1] == 1
    z = 1.959963984540054
    assert high[2].item() == pytest.approx(z**2 / (10 + z**2))
    assert low[1].item() == pytest.approx(10 / (10 + z**2))


@pytest.mark.parametrize(("wins", "games"), [(0.5, 0.5), (0.2, 0.5), (3.0, 8.0)])
def test_ends_of_an_interval_are_one_quantile_from_the_win_rate(wins, games):
    """Wilson's ends p are the roots of (wins / games - p)^2 = z^2 p (1 - p) / games."""
    z, rate = 1.959963984540054, wins / games
    counts = torch.tensor([[wins], [games]], dtype=torch.float64)
    ends = torch.cat(interval(*counts))
    assert ends.tolist() == sorted(ends.tolist())
    error = (rate - ends) ** 2 - z**2 * ends * (1 - ends) / games
    assert error.abs().max() < 1e-12 and ends.diff() > 0.1


def test_counts_of_wrong_shape_are_refused():
    with pytest.raises(ValueError, match=r"wins has shape \[2, 3\]"):
        bradley_terry(torch.ones(2, 3))
    with pytest.raises(ValueError, match=r"draws has shape \[3, 3\], expected \[2, 2\]"):
        bradley_terry(torch.ones(2, 2), torch.ones(3, 3))


if __name__ == "__main__":
    pytest.main([__file__])
