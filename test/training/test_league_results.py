"""Results of a league, payoffs and matchmaking probabilities, worked out by hand."""

import pytest
import torch

from torchrl_marl import TeamSpec
from torchrl_marl.envs.toy import ZeroSum
from torchrl_marl.training.crossplay import Payoffs
from torchrl_marl.training.league_results import Results, matchmaking, outcomes
from torchrl_marl.training.sections import LeagueConfig

BIASED = [[0.0, -1, 2], [1, 0, -1], [-2, 1, 0]]


def always(action):
    """Always plays one action on both sides."""

    def act(td):
        for name in ("first", "second"):
            td[name, "action"] = torch.full(td[name].batch_size, action)
        return td

    return act


def test_payoff_of_the_opponent_is_the_negative():
    env = ZeroSum(8, payoff=BIASED, seed=0)
    payoffs = Payoffs(TeamSpec.from_env(env), lambda: env, episodes=2, seed=0)
    for action, name in enumerate("abc"):
        payoffs.add(name, always(action), list("abc")[:action])
    assert payoffs.table(list("abc")).tolist() == BIASED
    assert payoffs.table(["c", "a"]).tolist() == [[0.0, -2.0], [2.0, 0.0]]


@pytest.mark.parametrize("payoff", [BIASED, [[2.0, 1.0], [0.0, 3.0], [1.0, 5.0]]])
def test_payoffs_of_registered_players(payoff):
    """Scripted players, for example. On different sides a player against itself may not earn 0."""
    env = ZeroSum(8, payoff=payoff, seed=0)
    payoffs = Payoffs(TeamSpec.from_env(env), lambda: env, episodes=2, seed=0)
    for action, name in enumerate("abc"[: len(payoff[0])]):
        payoffs.register(name, always(action))
    n = len(payoff[0])
    assert payoffs.table(list("abc"[:n])).tolist() == payoff[:n]
    payoffs.add("d", always(0), ["b"])
    found = payoffs.table(["b", "d"]).tolist()
    assert found == [[payoff[1][1], payoff[1][0]], [payoff[0][1], payoff[0][0]]]


def test_nash_matchmaking_samples_the_equilibrium_of_the_other_seat():
    """Row 0 with probability 1/4 and both columns with 1/2 give 1.5 everywhere."""
    settings, may = LeagueConfig(opponents="nash"), torch.tensor([True, False, True])
    payoff = torch.tensor([[3.0, 0.0], [1.0, 2.0]], dtype=torch.float64)
    chances = matchmaking(settings, torch.zeros(2, 3), may, [0, 1, 2], lambda places: payoff)
    expected = torch.tensor([[0.5, 0.0, 0.5], [0.25, 0.0, 0.75]], dtype=torch.float64)
    torch.testing.assert_close(chances, expected, rtol=0, atol=1e-6)


def test_old_games_are_discounted_by_newer_ones():
    results, new = Results(1, 2), torch.zeros(4, 1, 2, dtype=torch.float64)
    new[:, 0, 0] = torch.tensor([3.0, 1.0, 5.0, 10.0])  # wins, draws, games, return
    results.update(new)
    new[:, 0, 0] = torch.tensor([1.0, 0.0, 2.0, -4.0])
    results.update(new)
    old = 0.99**2
    expected = [3 * old + 1, old, 5 * old + 2, 10 * old - 4]
    assert results.sums[:, 0, 0].tolist() == pytest.approx(expected)
    assert results.win_rate[0].tolist() == pytest.approx(
        [(3 * old + 1 + old / 2 + 1) / (5 * old + 4), 0.5]
    )


def test_results_of_three_games_by_seat_and_player():
    returns = torch.tensor([[[2.0], [1.0], [0.0]], [[1.0], [1.0], [3.0]]])  # seat, env, step
    done, player = torch.ones(3, 1, dtype=torch.bool), torch.tensor([[0], [1], [1]])
    found = outcomes(returns, done, player, torch.tensor([0, 0, 1]), 2)
    wins, draws, games, total = found.tolist()
    assert wins == [[1.0, 0.0], [0.0, 1.0]]
    assert draws == [[0.0, 1.0], [0.0, 0.0]]
    assert games == [[1.0, 1.0], [0.0, 1.0]]
    assert total == [[2.0, 1.0], [0.0, 3.0]]
