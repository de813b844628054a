"""The benchmark of games with known answers: its environment, its rows, and a tiny run."""

import importlib
from pathlib import Path

import pytest
import torch

from torchrl_marl.learners.algorithms import ALGORITHMS

pytestmark = pytest.mark.learning

FOLDER = Path(__file__).parents[1] / "benchmarks"


@pytest.fixture
def exact_games(monkeypatch):
    monkeypatch.syspath_prepend(FOLDER)
    return importlib.import_module("exact_games")


def test_every_algorithm_for_discrete_actions_is_included(exact_games):
    names = {player.algorithm for player in exact_games.players()}
    assert names == set(ALGORITHMS.names()) - {"random"}


@pytest.mark.parametrize(
    ("game", "acts", "earned"),
    [
        ("climbing", [[[0, 0], [0, 1], [2, 1]]], [11.0, -30.0, 0.0]),
        ("penalty", [[[0, 2], [1, 1], [2, 2]]], [-100.0, 2.0, 10.0]),
        ("two-step", [[[0, 1], [1, 1], [1, 0]], [[1, 0], [1, 1], [0, 1]]], [7.0, 8.0, 1.0]),
    ],
)
def test_teams_play_independent_games(exact_games, game, acts, earned):
    payoff, best = exact_games.games()[game]
    assert payoff.max() == best
    world = exact_games.make_env(payoff, 3, 1)
    td, total = world.reset(), torch.zeros(3)
    for step in acts:
        for i, actions in enumerate(step):
            td[f"team_{i}", "action"] = torch.tensor([actions])
        td = world.step(td)["next"]
        for i in range(3):
            assert torch.equal(td[f"team_{i}", "reward"][0, 0], td[f"team_{i}", "reward"][0, 1])
            total[i] += td[f"team_{i}", "reward"][0, 0, 0]
    assert total.tolist() == earned
    assert bool(td["terminated"].all())


@pytest.mark.parametrize("name", ["happo", "maddpg", "iql"])
def test_play_returns_team_returns_and_seconds(exact_games, name):
    payoff, _ = exact_games.games()["two-step"]
    returns, seconds = exact_games.play(payoff, exact_games.Player(name), n_teams=2, n_batches=3)
    assert set(returns) <= {7.0, 0.0, 1.0, 8.0}
    assert len(returns) == 2 and seconds > 0


@pytest.mark.parametrize(("weight", "best"), [(0.05, 11.0), (1.0, 5.0)])
def test_small_negative_weight_solves_the_climbing_game(exact_games, weight, best):
    """On uniform data IQL finds the optimum if the weight is below 1/7."""
    payoff, _ = exact_games.games()["climbing"]
    trusting = exact_games.Player("iql", {"negative_weight": weight})
    returns, _ = exact_games.play(payoff, trusting, n_teams=3, n_batches=50)
    assert returns == [best] * 3
