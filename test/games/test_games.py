"""Matchmaking, equilibria and rankings: by hand, by their axioms, and against OpenSpiel."""

import json
import math
from pathlib import Path

import pytest
import torch

from torchrl_marl import games
from torchrl_marl.contrib import alpha_rank

STORED = json.loads((Path(__file__).parent / "openspiel.json").read_text(encoding="utf-8"))
"""OpenSpiel's answers, written by ``benchmarks/games.py --store`` (open_spiel 2.0.2)."""
OURS = {
    "nash_average": lambda **given: games.nash_average(**given)[0],
    "nash": lambda **given: torch.cat([x.reshape(-1) for x in games.nash(**given)]),
    "alpha_rank": alpha_rank,
    "elo": lambda **given: games.bradley_terry(**given, prior=0.0).rating,
    "exploitability": lambda **given: games.exploitability(**given).view(1),
}
ROCK_PAPER_SCISSORS = torch.tensor([[0.0, -1, 1], [1, 0, -1], [-1, 1, 0]])


def double(*values):
    return torch.tensor(values, dtype=torch.float64)


def close(found, expected, **kwargs):
    torch.testing.assert_close(found, torch.as_tensor(expected, dtype=torch.float64), **kwargs)


@pytest.mark.parametrize("name", STORED)
def test_results_equal_stored_openspiel_values(name):
    assert len(STORED[name]) >= 5
    for case in STORED[name]:
        given = {k: torch.tensor(v) if isinstance(v, list) else v for k, v in case["given"].items()}
        given = {k: v.double() if torch.is_tensor(v) else v for k, v in given.items()}
        close(OURS[name](**given), case["answer"], rtol=0, atol=1e-6)


# --------------------------------------------------------------------------------- matchmaking


def test_pfsp_by_hand():
    rate = torch.tensor([0.0, 0.5, 1.0])
    close(games.pfsp(rate), [0.8, 0.2, 0.0])
    close(games.pfsp(rate, "linear"), [2 / 3, 1 / 3, 0.0])
    close(games.pfsp(rate, "variance"), [0.0, 1.0, 0.0])


def test_excluded_opponents_get_zero_probability():
    rate = torch.tensor([[0.2, math.nan, 0.6], [1.0, math.nan, 1.0]])
    may = torch.tensor([True, False, True])
    close(games.pfsp(rate, "linear", may.expand(2, -1)), [[2 / 3, 0.0, 1 / 3], [0.5, 0.0, 0.5]])


def test_pfsp_without_candidates_is_refused():
    may = torch.tensor([[True, False], [False, False]])
    with pytest.raises(ValueError, match="no player may be drawn, expected one or more candidates"):
        games.pfsp(torch.rand(2, 2), candidates=may)
    close(games.pfsp(torch.ones(2, 2), candidates=may[:1].expand(2, -1)), [[1.0, 0.0]] * 2)


def test_unknown_weighting_is_refused():
    with pytest.raises(ValueError, match=r"unknown weighting 'square'; did you mean 'squared'\?"):
        games.pfsp(torch.ones(2), "square")


def test_smoothed_win_rates_by_hand():
    counts = torch.tensor([[3, 0, 0], [1, 0, 0], [5, 0, 1]])
    close(games.smoothed(*counts), [4.5 / 7, 0.5, 1 / 3])


# --------------------------------------------------------------------------------- equilibria


def test_equilibria_by_hand():
    """A biased rock-paper-scissors, where rock's win pays double: (1/4, 1/2, 1/4)."""
    biased = torch.tensor([[0.0, -1, 2], [1, 0, -1], [-2, 1, 0]])
    row, column, value = games.nash(biased)
    close(row, [0.25, 0.5, 0.25])
    close(column, [0.25, 0.5, 0.25])
    close(value, 0.0, rtol=0, atol=1e-12)
    saddle = games.nash(torch.tensor([[4.0, 2.0], [3.0, 1.0], [0.0, 5.0]]))  # 2nd row is dominated
    close(saddle.row, [5 / 7, 0.0, 2 / 7])
    close(saddle.column, [3 / 7, 4 / 7])
    close(saddle.value, 20 / 7)


def test_most_uniform_equilibrium_is_found():
    close(games.nash(torch.zeros(3, 2)).row, [1 / 3] * 3)
    # Two of the same rows share what one has; a third that ties elsewhere is bounded by a column.
    close(games.nash(torch.tensor([[1.0, -1], [-1, 1], [-1, 1]])).row, [0.5, 0.25, 0.25])
    row, column, value = games.nash(torch.tensor([[0.0, 1.0], [0.0, -3.0]]))
    # The row may play the second up to 1/4 of the time; 1/4 is as even as it gets.
    close(row, [0.75, 0.25], rtol=0, atol=1e-9)
    close(column, [1.0, 0.0], rtol=0, atol=1e-9)
    assert value.abs() < 1e-9


def test_equilibrium_with_a_margin_and_price_of_zero():
    """The column plays its third strategy; the row's limit on the fourth is met without force.

    By symmetry p3 = p4 = (1 - 3 p2) / 4 with p0 = (1 + p2) / 2, and the entropy's derivative in p2
    is 0 where sqrt(p0) p2 = p3^1.5.
    """
    payoff = torch.tensor([[2.0, 2, 1, 2], [1, -2, -1, -1], [-1, 2, 1, -1], [0, -1, 1, 1]])
    payoff = torch.cat([payoff, torch.tensor([[0.0, 1, 1, -1]])]) / 2
    row, column, value = games.nash(payoff)
    close(column, [0.0, 0, 1, 0], rtol=0, atol=1e-9)
    close(value, 0.5)
    p = row[2]
    expected = torch.stack([(1 + p) / 2, 0 * p, p, (1 - 3 * p) / 4, (1 - 3 * p) / 4])
    close(row, expected, rtol=0, atol=1e-8)
    close(row[0].sqrt() * p, row[3] ** 1.5, rtol=0, atol=1e-8)


@pytest.mark.parametrize("seed", range(6))
def test_no_player_gains_in_an_equilibrium(seed):
    generator = torch.Generator().manual_seed(seed)
    size = (1 + 2 * seed, 8 - seed)
    payoff = torch.randint(-3, 4, size, generator=generator)
    row, column, value = games.nash(payoff)
    assert games.nash_conv(payoff, row, column) < 1e-9
    again = games.nash(payoff * 1000 + 7)  # the scale does not matter
    close(again.row, row, rtol=0, atol=1e-8)
    close(again.value, 1000 * value + 7)


def test_nash_average_ignores_copies_and_losers():
    """Balduzzi et al., 2018, section 3: invariance to redundancy, and players that lose to all."""
    weight, score = games.nash_average(ROCK_PAPER_SCISSORS)
    close(weight, [1 / 3] * 3)
    who = torch.tensor([0, 0, 1, 2])  # rock twice
    twice, same = games.nash_average(ROCK_PAPER_SCISSORS[who][:, who])
    close(twice, [1 / 6, 1 / 6, 1 / 3, 1 / 3])
    close(same, [0.0] * 4, rtol=0, atol=1e-12)
    better = torch.tensor([[0.0, 0.5], [-0.5, 0.0]])
    close(games.nash_average(better)[0], [1.0, 0.0], rtol=0, atol=1e-9)


def test_invalid_strategies_are_refused():
    even = torch.full((3,), 1 / 3)
    for wrong in (torch.ones(3), torch.tensor([2.0, -1, 0]), even * torch.nan):
        with pytest.raises(ValueError, match="column is not a distribution"):
            games.nash_conv(ROCK_PAPER_SCISSORS, even, wrong)
    with pytest.raises(ValueError, match=r"row has shape \[2\], expected \[3\]"):
        games.exploitability(ROCK_PAPER_SCISSORS, torch.full((2,), 0.5), even)


def test_invalid_payoff_matrices_are_refused():
    with pytest.raises(ValueError, match="payoff is not antisymmetric"):
        games.nash_average(torch.ones(2, 2))
    with pytest.raises(ValueError, match=r"payoff has shape \[2, 3\], expected \[players"):
        alpha_rank(torch.ones(2, 3))
    with pytest.raises(ValueError, match=r"payoff has shape \[3\], expected a matrix"):
        games.nash(torch.ones(3))
    with pytest.raises(ValueError, match="payoff has entries that are not finite"):
        games.nash(torch.full((2, 2), math.nan))


# ------------------------------------------------------------------------------------ ranking


def test_alpha_rank_by_hand():
    """The first of two players always earns 1: odds of exp(m * alpha) or less."""
    close(alpha_rank(torch.zeros(4, 4)), [0.25] * 4)
    payoff = torch.tensor([[1.0, 1.0], [0.0, 0.0]])
    # Take-overs are geometric sums; their ratio is exp((m - 1) * alpha).
    first, second = alpha_rank(payoff, alpha=0.5, population=5)
    assert (first / second).item() == pytest.approx(math.exp(0.5 * 4))


def test_alpha_rank_is_stable_for_large_alpha():
    beaten = torch.nn.functional.pad(ROCK_PAPER_SCISSORS, (0, 1, 0, 1), value=1.0)
    beaten[3] = -1.0
    close(alpha_rank(beaten, alpha=1e4), [1 / 3, 1 / 3, 1 / 3, 0.0], rtol=0, atol=1e-9)


if __name__ == "__main__":
    pytest.main([__file__])
