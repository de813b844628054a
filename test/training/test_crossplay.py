"""Cross-play tables: entries by hand, seats, ratings, and invalid players."""

import csv
import re
from pathlib import Path

import pytest
import torch
from tensordict import TensorDict
from torchrl.data import Categorical, Unbounded
from torchrl.envs import TransformedEnv

import torchrl_marl
from torchrl_marl import AgentSpec, TeamSpec
from torchrl_marl.apps import players
from torchrl_marl.apps.cli import main as cli
from torchrl_marl.collectors import TeamPolicy
from torchrl_marl.envs import VmasEnv
from torchrl_marl.envs.remember import Remember
from torchrl_marl.envs.toy import Echo, Kuhn, MatchingLevers, Nim, SpeakerListener, ZeroSum
from torchrl_marl.envs.transforms import with_dense_groups
from torchrl_marl.errors import ConfigError, SpecError
from torchrl_marl.modules import CommunicationConfig, TeamNetworkConfig, make_actor
from torchrl_marl.training.crossplay import cross_play, partner_score, seats_of

pytestmark = pytest.mark.runs

BIASED = [[0.0, -1, 2], [1, 0, -1], [-2, 1, 0]]


def always(*actions):
    """Always plays one given action in each group."""

    def act(td):
        for name, action in zip(names_of(td), actions * 2):
            td[name, "action"] = torch.full(td[name].batch_size, action)
        return td

    return act


def names_of(td):
    return [name for name in ("first", "second", "agents") if name in td.keys()]


def test_lazily_stacked_agents_equal_padded_ones():
    """A speaker and a listener form one group, which is lazily stacked."""
    found, settings = [], {"continuous_speech": True, "one_group": True, "max_steps": 4}
    for dense in (lambda env: env, with_dense_groups):
        env = dense(SpeakerListener(6, seed=0, **settings))
        torch.manual_seed(0)
        players = [make_actor(TeamSpec.from_env(env).groups["team"]) for _ in range(2)]
        found.append(cross_play(players, players, env, episodes=4)["returns"])
    assert torch.equal(*found)


def test_entries_of_the_table_equal_the_payoff():
    env = ZeroSum(7, payoff=BIASED, seed=0)
    pure = [always(action) for action in range(3)]
    table = cross_play(pure, pure[:2], env, episodes=5, swap=False)
    payoff = torch.tensor(BIASED)[:, :2]
    assert (table["games"] == 5).all()
    torch.testing.assert_close(table["returns"], payoff.double())
    assert torch.equal(table["wins"], 5 * (payoff > 0))
    assert torch.equal(table["draws"], 5 * (payoff == 0))


def test_players_swap_seats():
    """The first seat always earns 1."""
    env = ZeroSum(7, payoff=[[1.0, 1.0], [1.0, 1.0]], seed=0)
    table = cross_play([always(0)], [always(0), always(1)], env, episodes=5)
    assert table["games"].tolist() == [[6, 6]]  # one more, so that both seats have equally many
    assert table["wins"].tolist() == [[3, 3]] and table["returns"].tolist() == [[0.0, 0.0]]
    unlike = ZeroSum(4, payoff=[[1.0, 2.0, 3.0], [1.0, 1.0, 1.0]], seed=0)
    assert cross_play([always(0, 2)], [always(1, 2)], unlike, 3)["returns"].tolist() == [[3.0]]
    with pytest.raises(ConfigError, match="players cannot swap seats"):
        cross_play([always(0)], [always(0)], unlike, 3, swap=True)


def test_partners_control_half_of_the_team_each():
    env = MatchingLevers(5, seed=0)
    levers = [always(action) for action in range(3)]
    table = cross_play(levers, levers, env, episodes=4)
    assert torch.equal(table["returns"], 8 * torch.eye(3, dtype=torch.float64))
    assert (table["draws"] == table["games"]).all() and players.standing(table) is None


def test_agents_receive_messages_only_from_their_player():
    """One pulls the lever of the number of teammates it hears, the other pulls lever 1."""
    env = MatchingLevers(5, seed=0)

    def hears(td):
        heard = td["agents", "mask"].sum(-1, keepdim=True) - 1
        td["agents", "action"] = heard.expand(td["agents"].batch_size)
        return td

    table = cross_play([hears, always(1)], [hears, always(1)], env, episodes=4)
    assert table["returns"].tolist() == [[8, 0], [0, 8]]


def test_communication_without_mask_raises():
    env = VmasEnv("balance", num_envs=4, max_steps=5, n_agents=4, seed=0)
    group = TeamSpec.from_env(env).groups["agents"]
    talks = TeamNetworkConfig(num_cells=[8], communication=CommunicationConfig("commnet"))
    talking, silent = (TeamPolicy([make_actor(group, own)]) for own in (talks, None))
    cross_play([silent], [silent], env, episodes=2)
    with pytest.raises(ConfigError, match="'agents' communicate, and the environment has no mask"):
        cross_play([silent], [talking], env, episodes=2)


def test_turn_based_game_is_played_to_its_end():
    """In Nim the optimal player wins from either seat unless the heap is already lost."""
    env = Nim(64, stones=3, most=3, seed=0)

    def takes(count):
        def act(td):
            for name in ("first", "second"):
                heap = td[name, "observation"].argmax(-1)
                td[name, "action"] = (count(heap) - 1).clamp_min(0)
            return td

        return act

    best, one = takes(lambda heap: heap), takes(torch.ones_like)
    table = cross_play([best], [one], env, episodes=400)
    # It always wins as the first player, and as the second with heaps of 2 and 3.
    assert table["wins"].item() / 400 == pytest.approx(5 / 6, abs=0.06)


def test_each_player_acts_once_per_step_on_its_rows():
    env, calls = ZeroSum(12, seed=0), []

    def noted(number):
        act = always(0)
        return lambda td: calls.append((number, len(td))) or act(td)

    cross_play([noted(0), noted(1)], [noted(2)], env, episodes=6)
    assert sorted(calls) == [(0, 6), (1, 6), (2, 12)]


def test_players_keep_separate_hidden_states():
    """One pulls levers 0, 1, 2, 3, 0, ..., the other 0, 2, 0, 2, ..., by their hidden counts."""
    env = TransformedEnv(MatchingLevers(9, seed=0), Remember({"agents": 1}))

    def counts(by):
        def act(td):
            hidden = td["agents", "hidden"]
            td["agents", "action"] = hidden.squeeze(-1).long() % 4
            return td.set(("next", "agents", "hidden"), hidden + by)

        return act

    players_ = [counts(1), counts(2)]
    table = cross_play(players_, players_, env, episodes=4)
    assert table["returns"].tolist() == [[8, 2], [2, 8]]


def test_more_games_than_envs():
    env = ZeroSum(4, payoff=BIASED, seed=0)
    pure = [always(action) for action in range(3)]
    one = cross_play(pure, pure, env, episodes=3)
    all_at_once = cross_play(pure, pure, ZeroSum(100, payoff=BIASED, seed=0), episodes=3)
    assert all(torch.equal(one[key], all_at_once[key]) for key in one.keys())


def sides(count):
    spec = Unbounded((1,)), Categorical(2)
    return TeamSpec([AgentSpec(f"side{i}", 1, *spec) for i in range(count)])


def test_envs_with_invalid_seats_raise():
    with pytest.raises(
        ConfigError, match="the environment has 3 groups .* expected two sides or one"
    ):
        seats_of(sides(3))
    with pytest.raises(ConfigError, match="the environment has one agent, expected two or more"):
        seats_of(sides(1))
    halves = seats_of(TeamSpec.from_env(Echo(2, n_agents=3)))
    assert [own["agents"].tolist() for own in halves.agents] == [[0, 1], [2]]
    with pytest.raises(ConfigError, match="one side has no players"):
        cross_play([], [always(0)], Kuhn(2), 1)
    with pytest.raises(ConfigError, match="episodes is 0, expected 1 or more"):
        cross_play([always(0)], [always(0)], Kuhn(2), 0)


# ------------------------------------------------------------------------------------ standing


def counted(wins, games=10):
    wins = torch.tensor(wins)
    draws = torch.where(torch.eye(len(wins), dtype=torch.bool), games, 0)
    games = torch.full_like(wins, games)
    returns = (2 * wins + draws - games).double() / games
    leaves = {"wins": wins, "draws": draws, "games": games, "returns": returns}
    return TensorDict(leaves, wins.shape)


def test_standing_counts_wins_in_rows_and_columns():
    found = players.standing(counted([[0, 8], [4, 0]]))
    # The first won 8 of 10 in its row, and 6 of 10 in its column.
    assert found.won[0, 1].item() == pytest.approx(0.7)
    assert found.earned[0, 1].item() == pytest.approx(0.4)
    points = found.ratings.rating[0] - found.ratings.rating[1]
    assert 100 < points < 147  # 400 log10(7 / 3) without the prior
    assert found.weight.tolist() == pytest.approx([1, 0], abs=1e-6)


def test_single_player_has_no_opponent_to_be_ranked_by():
    table = counted([[3]])
    assert players.standing(table) is None
    assert "nan" not in players.standing_text(["a"], table, None)


def test_cyclic_players_have_equal_ratings_and_nash_weights():
    found = players.standing(counted([[0, 10, 0], [0, 0, 10], [10, 0, 0]]))
    torch.testing.assert_close(found.ratings.rating, torch.zeros(3).double(), atol=1e-6, rtol=0)
    torch.testing.assert_close(found.weight, torch.full((3,), 1 / 3).double())
    text = players.standing_text(["a", "b", "c"], counted([[0, 10], [0, 0]]), found)
    head = ["player", "earned", "Nash", "average", "won", "rating", "95", "%"]
    assert text.splitlines()[0].split() == head


def test_heat_map_draws_any_folder_names(tmp_path):
    """Names may look like formulas or hold bytes that are not UTF-8."""
    names = ["a$\\fr$b", "$x_$", b"l\xe4uf".decode("utf-8", "surrogateescape")]
    table = counted([[0, 10, 0], [0, 0, 10], [10, 0, 0]])
    players.heat_map(names, table, players.standing(table), path=tmp_path / "map.png")
    players.write_table(tmp_path, names, table, None)
    assert (tmp_path / "map.png").stat().st_size > 1000


def test_nash_average_weighs_losses_by_their_size():
    """The first player wins two games of three by 1 each and loses the third by 4."""
    table = counted([[0, 20], [10, 0]], games=30)
    table["returns"] = torch.tensor([[0.0, -2 / 3], [2 / 3, 0.0]], dtype=torch.float64)
    found = players.standing(table)
    assert found.ratings.rating[0] > 50 and found.earned[0, 1] == -found.earned[1, 0]
    assert found.earned[1, 0].item() == pytest.approx(2 / 3)
    assert found.weight.tolist() == pytest.approx([0, 1], abs=1e-6)


def test_nash_average_has_an_interval():
    """Two players that cannot be distinguished, and a third that loses to both."""
    table = counted([[0, 6, 10], [5, 0, 10], [0, 0, 0]])
    table["error"] = torch.full((3, 3), 0.3, dtype=torch.float64)
    found = players.standing(table)
    low, high = found.weight_interval
    assert found.weight.tolist() == pytest.approx([1, 0, 0], abs=1e-6)
    assert low.tolist() == pytest.approx([0, 0, 0], abs=1e-6)
    assert high.tolist() == pytest.approx([1, 1, 0], abs=1e-6)
    again = players.standing(table).weight_interval
    assert torch.equal(low, again[0]) and torch.equal(high, again[1])
    text = players.standing_text(["a", "b", "c"], table, found)
    assert re.search(r"a +\+0.\d+ +1.00 +0.00 to 1.00", text)
    # With more games the first is surely better. With one game each there is no interval.
    table["error"] = torch.full((3, 3), 0.01, dtype=torch.float64)
    assert players.standing(table).weight_interval[0].tolist() == pytest.approx([1, 0, 0], abs=1e-6)
    table["error"] = torch.full((3, 3), torch.nan, dtype=torch.float64)
    assert players.standing(table).weight_interval is None


def test_standard_errors_of_returns():
    """1,000 games of a fair coin with payoffs -1 and 1 have an error of 1 / sqrt(999)."""
    env = ZeroSum(500, payoff=[[1.0, -1.0], [-1.0, 1.0]], max_steps=1, seed=0)
    table = cross_play([env.rand_action], [env.rand_action], env, 1000)
    mean = table["returns"][0, 0]
    expected = ((1 - mean**2) / 999).sqrt()
    torch.testing.assert_close(table["error"][0, 0], expected)


def test_different_sides_have_no_ratings():
    text = players.standing_text(["a", "b"], counted([[0, 1], [2, 0]]), None, "return as cat")
    assert [line.split() for line in text.splitlines()] == [
        ["return", "as", "cat", "1", "2"],
        ["1", "a", "0.00", "-0.80"],
        ["2", "b", "-0.60", "0.00"],
    ]
    with pytest.raises(ConfigError, match="expected the same players on both sides"):
        players.standing(counted([[0, 8], [4, 0]])[:1])


def test_self_play_and_cross_play_scores_of_partners():
    """With itself (8 + 6 + 7) / 3, with others (1 + 2 + 3 + 4 + 5 + 6) / 6.

    Resamples of three players have two different ones in most cases: then the mean is that of a
    pair, which is 2, 3.5 or 5. Three times the same player has no score with others.
    """
    returns = torch.tensor([[8.0, 1.0, 2.0], [3.0, 6.0, 4.0], [5.0, 6.0, 7.0]])
    text = players.standing_text(["a", "b", "c"], TensorDict({"returns": returns}, [3, 3]), None)
    expected = "with itself 7.00 (6.00 to 8.00), with others 3.50 (2.00 to 5.00)"
    assert text.splitlines()[-1] == expected
    alone = TensorDict({"returns": returns[:1, :1]}, [1, 1])
    assert "others" not in players.standing_text(["a"], alone, None)


def test_cross_play_score_excludes_self_play_in_resamples():
    """Returns with themselves never enter the score with others."""
    score = partner_score(torch.full((5, 5), 2.0).fill_diagonal_(1e9))
    assert (score.cross_play.value, score.cross_play.low, score.cross_play.high) == (2, 2, 2)
    two = partner_score(torch.tensor([[3.0, 1.0], [2.0, 5.0]]))
    assert (two.self_play.value, two.cross_play.value) == (4.0, 1.5)
    assert two.self_play.has_interval and "two players are one pair" in two.cross_play.why_none
    with pytest.raises(ConfigError, match=r"shape \[1, 1\], expected two players or more"):
        partner_score(torch.ones(1, 1))


def test_diverged_player_has_nan_score():
    returns = torch.tensor([[8.0, 1.0, 2.0], [3.0, 6.0, 4.0], [5.0, 6.0, 7.0]])
    returns[2], returns[:, 2] = torch.nan, torch.nan
    table = TensorDict({"returns": returns}, [3, 3])
    text = players.standing_text(["a", "b", "c"], table, None)
    assert text.splitlines()[-1] == "with itself nan, with others nan"
    returns[2, 2] = 7.0
    score = partner_score(returns)
    assert score.self_play.value == 7.0 and score.self_play.has_interval
    assert score.cross_play.why_none == "a return is not finite"


# ---------------------------------------------------------------------------------- the command


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    folder, made = tmp_path_factory.mktemp("runs"), {}
    small = {
        "total_frames": 64,
        "frames_per_batch": 64,
        "threads": 1,
        "logging": {"progress": False},
        "evaluation": {"episodes": 2},
    }
    sizes = {"actor": {"num_cells": [4]}, "critic": {"num_cells": [4]}, "minibatch_size": 32}
    for name, world in (
        ("a", "kuhn"),
        ("b", "kuhn"),
        ("nim", "nim"),
        ("levers", "matching_levers"),
    ):
        learner = {"algorithm": "ippo", "bootstrap": "agent", **sizes}
        learner["actor"] = {"num_cells": [4 if name == "a" else 6]}
        env = {"library": "toy", "name": world, "num_envs": 8, "continuous_actions": False}
        torchrl_marl.train({"env": env, "learner": learner, **small, "folder": str(folder / name)})
        made[name] = str(folder / name)
    return made


def test_command_prints_and_writes_tables(runs, capsys, tmp_path):
    who = [runs["a"], "random", runs["b"]]
    assert cli.main(["crossplay", *who, "--episodes", "6", "--out", str(tmp_path)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split()[:2] == ["player", "earned"] and len(lines) == 12
    with (tmp_path / "crossplay.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [(row["player"], row["other"]) for row in rows] == [(a, b) for a in who for b in who]
    assert {row["games"] for row in rows} == {"6"}
    with (tmp_path / "ratings.csv").open() as file:
        rated = list(csv.DictReader(file))
    assert sum(float(row["nash_average"]) for row in rated) == pytest.approx(1)
    assert (tmp_path / "crossplay.png").stat().st_size > 1000


def test_command_writes_to_a_new_folder_beside_the_runs(runs, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "crossplay.csv").write_text("mine")
    folder = Path(runs["a"]).parent
    for name in ("crossplay", "crossplay_2"):  # existing files are kept
        assert cli.main(["crossplay", runs["a"], runs["b"], "--episodes", "2"]) == 0
        names = sorted(path.name for path in (folder / name).iterdir())
        assert names == ["crossplay.csv", "crossplay.png", "ratings.csv"]
        assert str(folder / name / "crossplay.png") in capsys.readouterr().out
    assert [path.read_text() for path in tmp_path.iterdir()] == ["mine"]


def test_command_with_partners(runs, capsys, tmp_path):
    who = [runs["levers"], "random"]
    assert cli.main(["crossplay", *who, "--episodes", "2", "--out", str(tmp_path)]) == 0
    assert capsys.readouterr().out.splitlines()[0].split() == ["return", "with", "1", "2"]
    assert not (tmp_path / "ratings.csv").exists()


def test_cross_play_of_value_based_players(tmp_path, capsys):
    """Value-based players have no actor distribution. Runs with two algorithms work too."""
    sizes = {"num_cells": [4]}
    settings = {
        "env": {"name": "simple_tag", "num_envs": 4, "max_steps": 5, "continuous_actions": False},
        "learner": {"algorithm": "ippo", "actor": sizes, "critic": sizes, "minibatch_size": 32},
        "groups": {"agent": {"algorithm": "iql", "minibatch_size": 16, "learning_starts": 16}},
        "total_frames": 64,
        "frames_per_batch": 64,
        "threads": 1,
        "logging": {"progress": False},
        "evaluation": {"episodes": 2},
    }
    who = [str(tmp_path / f"seed{n}") for n in range(2)]
    for n, folder in enumerate(who):
        torchrl_marl.train({**settings, "seed": n, "folder": folder})
    who.append("random")
    assert cli.main(["crossplay", *who, "--episodes", "4", "--out", str(tmp_path / "out")]) == 0
    with (tmp_path / "out" / "crossplay.csv").open() as file:
        assert len(list(csv.DictReader(file))) == 9
    from torchrl_marl.training.entrants import find_players

    with pytest.raises(SpecError, match="expected actors of MAPPO, IPPO or HAPPO"):
        find_players(who[0])


@pytest.mark.parametrize(
    ("who", "said"),
    [
        (["a"], "found one player, .*, expected two or more"),
        (["a", "a"], "is given twice, expected every player once"),
        (["random", "heuristic"], "found no run among random, heuristic"),
        (["a", "nim"], "was trained in toy/nim and .* in toy/kuhn; expected runs of one env"),
        (["a", "heuristic"], "toy/kuhn has no heuristic that runs here; use random or a run"),
    ],
)
def test_invalid_players_give_a_one_line_error(runs, capsys, who, said, tmp_path):
    names = [runs.get(name, name) for name in who]
    assert cli.main(["crossplay", *names, "--out", str(tmp_path)]) == 2
    error = capsys.readouterr().err
    assert len(error.splitlines()) == 1 and re.search(said, error)


if __name__ == "__main__":
    pytest.main([__file__])
