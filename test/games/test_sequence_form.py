"""Sequence-form games: by hand, and against the matrix of all pure strategies."""

import itertools

import pytest
import torch

from torchrl_marl.envs.toy import Kuhn
from torchrl_marl.games import SequenceForm


def kuhn():
    """Kuhn poker by its rules; information sets are cards times two places, as in Kuhn.bets."""
    parents, leaves, payoff = torch.zeros(2, 6, dtype=torch.int64), [], []

    def after(card, place, bet):
        return 1 + 2 * (2 * card + place) + bet

    for a, b in itertools.permutations(range(3), 2):
        parents[0, 2 * a + 1] = after(a, 0, 0)  # the first's second move follows on its pass
        high = 1.0 if a > b else -1.0
        ends = [
            (after(a, 0, 0), after(b, 0, 0), high),
            (after(a, 1, 0), after(b, 0, 1), -1.0),
            (after(a, 1, 1), after(b, 0, 1), 2 * high),
            (after(a, 0, 1), after(b, 1, 0), 1.0),
            (after(a, 0, 1), after(b, 1, 1), 2 * high),
        ]
        leaves += [end[:2] for end in ends]
        payoff += [end[2] / 6 for end in ends]
    legal = torch.ones(2, 6, 2, dtype=torch.bool)
    return SequenceForm(parents, legal, torch.tensor(leaves).mT, torch.tensor(payoff).double())


def test_kuhn_poker_equals_its_matrix_of_pure_strategies():
    game, env = kuhn(), Kuhn(1)
    assert len(game.levels) == 2
    for seed in range(5):
        generator = torch.Generator().manual_seed(seed)
        bets = torch.rand(2, 3, 2, generator=generator, dtype=torch.float64)
        policy = torch.stack([1 - bets.flatten(1), bets.flatten(1)], -1)
        assert game.nash_conv(policy) == pytest.approx(env.nash_conv(bets), abs=1e-6)
    third = torch.tensor([[[1 / 9, 0], [0, 4 / 9], [1 / 3, 1]], [[1 / 3, 0], [0, 1 / 3], [1, 1]]])
    policy = torch.stack([1 - third.double().flatten(1), third.double().flatten(1)], -1)
    assert game.value(policy) == pytest.approx(-1 / 18, abs=1e-7)
    assert game.best_responses(policy).tolist() == pytest.approx([-1 / 18, 1 / 18], abs=1e-7)


def test_illegal_actions_are_ignored():
    game = SequenceForm(
        parents=torch.zeros(2, 1, dtype=torch.int64),
        legal=torch.tensor([[[True, True, False]], [[True, False, True]]]),
        leaves=torch.tensor([[1, 1, 2, 2], [1, 3, 1, 3]]),
        payoff=torch.tensor([-1.0, -2.0, -3.0, -4.0]),
    )
    policy = torch.tensor([[[0.5, 0.5, 9.0]], [[1.0, 9.0, 0.0]]])
    assert game.value(policy) == -2.0
    # All payoffs of the first player are below the 0 of illegal actions.
    assert game.best_responses(policy).tolist() == [-1.0, 3.0]


def test_wrong_shapes_and_cycles_are_refused():
    parents = torch.zeros(2, 2, dtype=torch.int64)
    legal = torch.ones(2, 2, 2, dtype=torch.bool)
    leaves, payoff = torch.ones(2, 3, dtype=torch.int64), torch.ones(3)
    with pytest.raises(ValueError, match=r"payoff \[2\] do not fit; expected \[2, I\]"):
        SequenceForm(parents, legal, leaves, payoff[:2])
    with pytest.raises(ValueError, match="parents form a cycle"):
        SequenceForm(torch.tensor([[3, 1], [0, 0]]), legal, leaves, payoff)


if __name__ == "__main__":
    pytest.main([__file__])


def coin_game():
    """The first sees a coin, heads or tails; both then choose a side. Heads count half of tails."""
    legal = torch.ones(2, 2, 2, dtype=torch.bool)
    legal[1, 1] = False  # the second player sees nothing, so it has one set less
    rows = list(itertools.product((0, 1), (0, 1), (0, 1)))
    leaves = torch.tensor([[1 + 2 * coin + a, 1 + b] for coin, a, b in rows]).mT
    payoff = torch.tensor([(1 + coin) / 2 * (1.0 if a == b else -1.0) for coin, a, b in rows])
    return SequenceForm(torch.zeros(2, 2, dtype=torch.int64), legal, leaves, payoff)


def test_players_may_have_different_numbers_of_information_sets():
    policy = torch.tensor([[[0.5, 0.5], [1.0, 0.0]], [[0.75, 0.25], [0.0, 0.0]]])
    # By hand: after heads the first is even, so the second looks at tails only, and wins 1.
    assert coin_game().value(policy) == 0.5
    assert coin_game().best_responses(policy).tolist() == [0.75, 1.0]
    assert coin_game().nash_conv(policy) == 1.75


def test_invalid_policies_and_games_are_refused():
    game, policy = kuhn(), torch.full((2, 6, 2), 0.5)
    for wrong in (policy * 2, policy - 1, policy * torch.nan):
        with pytest.raises(ValueError, match="policy is not a distribution"):
            game.nash_conv(wrong)
    with pytest.raises(ValueError, match=r"policy has shape \[2, 1, 2\], expected \[2, 6, 2\]"):
        game.value(policy[:, :1])
    parts = (game.parents, game.legal, game.leaves, game.payoff)
    for i, value, match in (
        (0, game.parents + 13, "parents has sequences outside 0 to 12"),
        (2, game.leaves - 9, "leaves has sequences outside 0 to 12"),
        (3, game.payoff * torch.nan, "payoff has entries that are not finite"),
    ):
        with pytest.raises(ValueError, match=match):
            SequenceForm(*parts[:i], value, *parts[i + 1 :])


def test_kuhn_refuses_invalid_probabilities():
    for wrong in (torch.full((2, 1, 2), 0.5), torch.full((2, 3, 2), 1.5)):
        with pytest.raises(ValueError, match="probabilities of bets"):
            Kuhn(1).nash_conv(wrong)
