"""Leagues: stored players, matchmaking, results, and invalid settings."""

import pytest
import torch
from support.leagues import LEAGUE, SMALL, partners, player_files, players, settings_of, train
from support.runs import assert_equal, table

import torchrl_marl
from torchrl_marl.apps.cli.main import main
from torchrl_marl.errors import CheckpointError, ConfigError
from torchrl_marl.games import WEIGHTINGS
from torchrl_marl.recipes import load_config
from torchrl_marl.training import Run, iterate
from torchrl_marl.training.league import Stored, envs_of_seats
from torchrl_marl.training.pool import TABLE, networks_of, read_player
from torchrl_marl.training.sections import LeagueConfig
from torchrl_marl.training.trainer import start_training

# ----------------------------------------------------------------------------------------- players


def test_players_are_stored_exactly_and_listed(tmp_path):
    seen = {}
    for step in iterate(load_config("toy_kuhn_ippo", settings_of(tmp_path / "run"))):
        networks = networks_of(step.run.policy)
        seen[step.frames] = {a: {k: x.clone() for k, x in n.items()} for a, n in networks.items()}
    rows = players(tmp_path / "run")
    assert [row["frames"] for row in rows] == ["0", "128", "256", "384", "512"]
    assert [row["parent"] for row in rows] == ["", *(row["player"] for row in rows[:-1])]
    files = player_files(tmp_path / "run")
    for row, file in list(zip(rows, files))[1:]:
        assert_equal(read_player(file), seen[int(row["frames"])])
    weights = [next(iter(read_player(file)["first+second"].values())) for file in files]
    assert not torch.equal(weights[1], weights[2])
    found = Run.load(tmp_path / "run").players()
    assert list(found) == [row["player"] for row in rows]
    assert_equal(networks_of(found[rows[2]["player"]]), read_player(files[2]))


def test_league_without_stored_opponents_equals_self_play(tmp_path):
    train(tmp_path / "none", {"opponents": "none"})
    train(tmp_path / "self", {"opponents": "self"})
    assert not (tmp_path / "none" / TABLE).exists() and len(players(tmp_path / "self")) == 5
    plain, league = (table(tmp_path / name / "metrics.csv") for name in ("none", "self"))
    assert [{k: v for k, v in row.items() if k != "league/players"} for row in league] == plain
    assert "league/players" not in plain[0]


def test_least_drawn_player_is_replaced_after_its_episodes_end(tmp_path):
    training = start_training(load_config("toy_kuhn_ippo", settings_of(tmp_path / "run")), None)
    training.begin()
    league, free = training.league, 5
    assert league.matches.n_slots == free and league.settings.slots == 3
    while not training.done:
        training.step()
        used, stored = league.matches.in_use(training.collector.carry), league.slots
        assert all(stored[i] is not None for i in used)
        active = [own for own in stored if own is not None and own.active]
        assert len(active) <= 3 and max(own.frames for own in active) == league.stored_at
        may = torch.tensor([own is not None and own.active for own in stored])
        assert ((league.matches.chances > 0) == may).all()
        torch.testing.assert_close(league.matches.chances.sum(-1).float(), torch.ones(2))
        for i, own in enumerate(stored):
            if own is not None:
                file = read_player(league.pool.path(own.name))
                for one in league.matches.players:
                    assert_equal(one.copy_of(i), file[one.group.name])
    training.leave()


def test_players_in_use_are_not_overwritten(tmp_path):
    training = start_training(load_config("toy_kuhn_ippo", settings_of(tmp_path / "run")), None)
    training.begin()
    league = training.league
    for _ in range(2):
        training.step()
    everywhere = training.collector.carry.clone()
    for slot in range(5):  # every slot is played in some env
        for name in ("first", "second"):
            everywhere[name, "player"][league.matches.rows[slot]] = slot + 1
    league.slots = [Stored(f"p{i}", i, "", active=i < 3) for i in range(5)]
    before = [one.copy_of(i) for one in league.matches.players for i in range(5)]
    when = {"iteration": 9, "frames": 10_000}
    assert not league._store_player(training.policy, when, everywhere)
    after = [one.copy_of(i) for one in league.matches.players for i in range(5)]
    assert_equal(after, before)
    for name in ("first", "second"):  # episodes of the last player are over
        everywhere[name, "player"].masked_fill_(everywhere[name, "player"] == 5, 0)
    assert league._store_player(training.policy, when, everywhere)
    assert league.slots[4].frames == 10_000 and league.slots[4].active
    training.leave()


def test_player_is_stored_as_soon_as_all_others_are_beaten(tmp_path):
    training = start_training(
        load_config(
            "toy_kuhn_ippo",
            settings_of(tmp_path / "run", {"snapshot_every": 10_000, "snapshot_at": 0.7}),
        ),
        None,
    )
    training.begin()
    league = training.league
    assert not league._snapshot_is_due(9_999) and league._snapshot_is_due(10_000)
    league.results.sums[:] = torch.tensor([70.0, 0.0, 100.0, 0.0]).double().view(4, 1, 1)
    assert not league._snapshot_is_due(500)  # 142 of 202 over both seats is less than 0.7029...
    league.results.sums[0] = 72.0
    assert league._snapshot_is_due(500)
    training.leave()


# ----------------------------------------------------------------------------------------- results


@pytest.mark.parametrize("world", ["opponents", "partners"])
def test_league_results_equal_a_count_by_game(world, tmp_path):
    config = settings_of(tmp_path / "run", {"snapshot_every": 100_000}, total_frames=320)
    recipe, seats = "toy_kuhn_ippo", [("first", 0), ("second", 0)]
    if world == "partners":
        recipe, seats = "toy_matrix_game_mappo", [("agents", 0), ("agents", 1)]
        config["league"] |= {"opponents": "none", "partners": "uniform"}
        config["env"] = {"library": "toy", "name": "matching_levers", "num_envs": 16}
    training = start_training(load_config(recipe, config), None)
    training.begin()
    batches = []
    while not training.done:
        batches.append(training.step().batch)
    league, batch = training.league, torch.cat(batches, 1)
    counts = [[0, 0, 0, 0.0], [0, 0, 0, 0.0]]
    for env in range(8, 16):  # the first half is self-play
        seat, total = int(env >= 12), [0.0, 0.0]
        for t in range(batch.shape[1]):
            step = batch[env, t]
            for i, (group, agent) in enumerate(seats):
                total[i] += float(step["next", group, "reward"][agent])
            if bool(step["next", "done"]):
                own, other = total[seat], total[1 - seat]
                for k, value in enumerate((own > other, own == other, 1, own)):
                    counts[seat][k] += float(value)
                total = [0.0, 0.0]
    assert sum(c[2] for c in counts) > 10
    # Every later game discounts by 0.99. With one player the sums are a weighted count.
    decayed = torch.zeros(4, 2).double()
    row = 0
    for one in batches:
        done = one["next", "done"].squeeze(-1)[8:]
        games = torch.stack([done[:4].sum(), done[4:].sum()]).double()
        decayed[2] = decayed[2] * 0.99**games + games
        row += int(games.sum())
    assert row == sum(c[2] for c in counts)
    torch.testing.assert_close(league.results.sums[2, :, 0], decayed[2])
    training.leave()
    metrics = table(tmp_path / "run" / "metrics.csv")
    assert sum(float(row["league/games"]) for row in metrics) == row
    name = "league/win_rate" if world == "opponents" else "league/return"
    means = sum(float(r[name] or 0) * float(r["league/games"]) for r in metrics)
    expected = sum(c[0] + c[1] / 2 if world == "opponents" else c[3] for c in counts)
    assert means == pytest.approx(expected, rel=1e-4)


def test_return_of_a_group_is_that_of_the_learning_policy(tmp_path):
    config = settings_of(tmp_path / "run", total_frames=64)
    training = start_training(load_config("toy_kuhn_ippo", config), None)
    training.begin()
    step = training.step()
    batch, done = step.batch, step.batch["next", "done"].squeeze(-1)
    for name, envs in (("first", range(12)), ("second", [*range(8), *range(12, 16)])):
        found = []
        for env in envs:
            total = 0.0
            for t in range(batch.shape[1]):
                total += float(batch["next", name, "reward"][env, t])
                if done[env, t]:
                    found.append(total)
                    total = 0.0
        expected = sum(found) / len(found)
        assert step.metrics[f"{name}/episode_reward"] == pytest.approx(expected, abs=1e-5)
    training.leave()


# ---------------------------------------------------------------------------------- from the start


@pytest.mark.runs
def test_league_starts_with_imported_players(tmp_path):
    train(tmp_path / "old", {"opponents": "self"}, seed=3)
    old = tmp_path / "old"
    start = ["random", str(old), str(player_files(old)[1])]
    league = {"start_with": start, "snapshot_every": None, "self_play": 0.0}
    run = train(tmp_path / "new", {**league, "opponents": "uniform"})
    rows = players(tmp_path / "new")
    assert [row["kind"] for row in rows] == ["random", "imported", "imported"]
    assert rows[2]["player"] == "start1_000000128"
    found = read_player(player_files(tmp_path / "new")[0])
    assert_equal(found, networks_of(Run.load(old).policy))
    assert float(table(run.folder / "metrics.csv")[-1]["league/players"]) == 3
    train(tmp_path / "folder", {**league, "start_with": [str(old / "players")], "slots": 8})
    assert len(players(tmp_path / "folder")) == 5
    three = {"start_with": [*map(str, player_files(old)[:3])], "slots": 3, "snapshot_every": 128}
    with pytest.raises(ConfigError, match="expected at least 4: 3 players .*, and 1 can be stored"):
        train(tmp_path / "full", three)


@pytest.mark.runs
def test_imported_players_and_snapshots_have_different_names(tmp_path):
    train(tmp_path / "old", {"opponents": "self"}, total_frames=128)
    start = [str(tmp_path / "old" / "players")]
    train(tmp_path / "new", {"start_with": start}, total_frames=256)
    torchrl_marl.resume(tmp_path / "new", total_frames=512)
    files = player_files(tmp_path / "new")
    assert [file.stem for file in files[:3]] == [
        "start0_000000000",
        "start1_000000128",
        "000000128",
    ]
    old = player_files(tmp_path / "old")
    assert_equal(read_player(files[1]), read_player(old[1]))
    parents = [row["parent"] for row in players(tmp_path / "new")]
    assert parents == [*start, *start, "", "000000128", "000000256", "000000384"]
    assert main(["league", str(tmp_path / "new"), "--episodes", "2"]) == 0


def test_partners_take_seats_of_one_team(tmp_path):
    partners(tmp_path / "a", {"partners": "self"}, seed=1)
    run = partners(
        tmp_path / "b",
        {"start_with": [str(tmp_path / "a")], "snapshot_every": None, "self_play": 0.0},
    )
    rows = table(run.folder / "metrics.csv")
    assert all(float(row["league/games"]) > 0 for row in rows if row["league/return"])
    assert float(rows[-1]["league/players"]) == 1


# ----------------------------------------------------------------------------------- bad input


@pytest.mark.parametrize(
    ("league", "sentence"),
    [
        ({"opponents": "nash", "seats": {"a": "first", "b": ["second", "first"]}}, "in 2 seats"),
        ({"partners": "uniform"}, "expected one of them to be none"),
        ({"opponents": "none", "start_with": ["random"]}, "so that they are never played"),
        ({"opponents": "self", "snapshot_at": 0.5}, "but stored players are not played"),
        ({"start_with": ["random", "random"]}, "start_with has 'random' twice"),
        ({"slots": 100_000}, "expected from 1 to 1000"),
        ({"exploiters": 3, "exploited": 0.5}, "slots is 3, expected at least 4: 0 .* 4 can be"),
        ({"exploiters": 1, "exploited": 0.0}, "league.exploited is 0 of 16 envs for 1 exploiters"),
        ({"exploiters": 1, "exploited": 1.0}, "change league.exploited"),
        ({"exploiters": 1, "opponents": "self"}, "use league.opponents=pfsp"),
        (
            {"exploiters": 1, "snapshot_every": None, "start_with": ["random"]},
            "where league.snapshot_every is null: .*use league.snapshot_every=100000",
        ),
        ({"self_play": 1.0}, "leaves no envs for stored players"),
        ({"snapshot_every": None}, "no player is stored"),
        ({"snapshot_every": None, "start_with": ["random"], "snapshot_at": 0.7}, "largest number"),
        ({"seats": {"a": ["first"], "b": ["secnd"]}}, "did you mean 'second'"),
        ({"seats": {"a": ["first", "second"]}}, "has 1 seat, a, expected two or more"),
        ({"seats": {"a": ["first"], "b": ["first"]}}, "is in 2 seats"),
        ({"start_with": ["nowhere"]}, "is not a run folder"),
        ({"start_with": ["heuristic"]}, "has no heuristic"),
    ],
)
def test_invalid_league_settings_raise(league, sentence, tmp_path):
    with pytest.raises((ConfigError, CheckpointError), match=sentence):
        train(tmp_path / "run", league)


def test_envs_of_seats_with_too_few_envs_raise():
    with pytest.raises(ConfigError, match="leaves 0 to 2 seats"):
        envs_of_seats(4, 2, 0.9)
    for envs, seats, share in ((64, 2, 0.5), (10, 3, 0.0), (100, 3, 0.3)):
        found = envs_of_seats(envs, seats, share)
        assert sum(found) == envs and max(found[1:]) - min(found[1:]) <= (share == 0.0)


def test_league_with_one_team_or_other_learners_raises(tmp_path):
    with pytest.raises(
        ConfigError, match="the environment has one team, 'agents'; use league.partners"
    ):
        partners(tmp_path / "a", {"opponents": "pfsp", "partners": "none"})
    with pytest.raises(ConfigError, match="population.size=1"):
        train(tmp_path / "b", population={"size": 2})
    with pytest.raises(ConfigError, match="learner.algorithm is 'qmix', but a league"):
        load_config("toy_echo_rqmix", {"league": LEAGUE})
    with pytest.raises(ConfigError, match="unshare_at=null"):
        load_config("toy_kuhn_ippo", {"league": LEAGUE, "learner": {"unshare_at": 0.5}})


def test_communication_between_seats_raises(tmp_path):
    talk = {**SMALL["learner"], "actor": {"num_cells": [8], "communication": "commnet"}}
    with pytest.raises(ConfigError, match="seats agent_0, agent_1 would hear .*communication=none"):
        partners(tmp_path / "a", learner=talk)
    partners(tmp_path / "b", {"partners": "self"}, learner=talk)
    env = {"num_envs": 16, "kwargs": {"n_groups": 2}}
    two = {"recipe": "toy_arena_mappo", "env": env, "learner": talk}
    train(tmp_path / "c", **two)  # each side communicates within itself
    talk["actor"]["communication"] = {"kind": "commnet", "across_groups": True}
    with pytest.raises(ConfigError, match="agents_0, agents_1 would .*across_groups=false"):
        train(tmp_path / "d", **two)


def test_player_with_other_networks_raises(tmp_path):
    other = {"learner": {**SMALL["learner"], "actor": {"num_cells": [4]}}}
    train(tmp_path / "old", {"opponents": "none"}, **other)
    with pytest.raises(ConfigError, match=r"does not fit this run's networks: .* has shape"):
        train(tmp_path / "new", {"start_with": [str(tmp_path / "old")]})


def test_all_weightings_are_accepted():
    assert set(WEIGHTINGS) == {"squared", "linear", "variance"}
    for name in WEIGHTINGS:
        assert (
            load_config("toy_kuhn_ippo", {"league": {"weighting": name}}).league.weighting == name
        )
    assert LeagueConfig().match == "none" and not LeagueConfig().enabled


# ------------------------------------------------------------------------------------ command line


@pytest.mark.runs
def test_league_command_rates_the_players_of_a_run(tmp_path, capsys):
    train(tmp_path / "run")
    assert main(["league", str(tmp_path / "run"), "--players", "3", "--episodes", "4"]) == 0
    out = capsys.readouterr().out
    assert "Nash average" in out and "now" in out and "random" in out
    made = tmp_path / "run" / "league"
    rows = table(made / "ratings.csv")
    assert [row["player"] for row in rows] == [
        "000000000",
        "000000256",
        "000000512 = now",  # stored in the last iteration
        "random",
    ]
    weights = [
        [float(row[key]) for key in ("nash_low", "nash_average", "nash_high")] for row in rows
    ]
    assert all(0 <= low <= high <= 1 for low, _, high in weights)
    assert sum(weight for _, weight, _ in weights) == pytest.approx(1)
    for name in ("crossplay.png", "ratings.png"):
        assert (made / name).read_bytes()[:4] == b"\x89PNG"
    file = str(player_files(tmp_path / "run")[1])
    options = ["--episodes", "4", "--out", str(tmp_path)]
    assert main(["crossplay", file, str(tmp_path / "run"), *options]) == 0
    last = str(player_files(tmp_path / "run")[-1])
    capsys.readouterr()
    assert main(["crossplay", last, str(tmp_path / "run"), *options]) == 2
    assert "have the same weights, expected two policies or more" in capsys.readouterr().err


def test_league_command_without_stored_players_raises(tmp_path, capsys):
    train(tmp_path / "run", {"opponents": "none"}, total_frames=64)
    assert main(["league", str(tmp_path / "run")]) == 2
    assert "has no stored players (players.csv); train it with" in capsys.readouterr().err
