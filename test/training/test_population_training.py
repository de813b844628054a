"""Training of populations: run folders, exact resume, and diverged members."""

import contextlib
import csv
import json

import pytest
import torch

import torchrl_marl
from torchrl_marl.apps.cli.main import main
from torchrl_marl.apps.players import standing
from torchrl_marl.apps.reports.curves import read_run
from torchrl_marl.apps.reports.grouping import extract_record
from torchrl_marl.errors import CheckpointError, ConfigError
from torchrl_marl.recipes import load_config
from torchrl_marl.training import Run, cross_play, resume
from torchrl_marl.training.checkpoint import load_latest
from torchrl_marl.training.config import read_run_config
from torchrl_marl.training.evaluation import EVALUATION_SEED
from torchrl_marl.training.member import PopulationRun
from torchrl_marl.training.trainer import resume_training, start_training

SMALL = {
    "total_frames": 160,
    "frames_per_batch": 40,
    "execution": "eager",
    "env": {"num_envs": 4, "kwargs": {"n_agents": 2, "years": 2}},
    "learner": {
        "minibatch_size": 20,
        "num_epochs": 2,
        "actor": {"num_cells": [8]},
        "critic": {"num_cells": [8]},
    },
    "evaluation": {"episodes": 6, "every_frames": 80},
    "logging": {"progress": False},
}
VARY = {"learner.lr": [1e-3, 2e-3, 3e-3], "learner.gamma": {"low": 0.9, "high": 0.98}}
TIMES = ("seconds", "frames_per_second")


def train(folder, size=3, vary=None, **settings):
    population = {"size": size, "vary": VARY if vary is None else vary}
    return torchrl_marl.train(
        "toy_arena_mappo", folder=str(folder), population=population, **SMALL | settings
    )


def table(path):
    with path.open(newline="") as file:
        return [{k: v for k, v in row.items() if k not in TIMES} for row in csv.DictReader(file)]


@pytest.mark.runs
def test_members_leave_ordinary_run_folders(tmp_path):
    run = train(tmp_path / "all", seed=5)
    assert isinstance(run, PopulationRun) and run.frames == 160
    assert [folder.name for folder in run.folders] == ["seed5", "seed6", "seed7"]
    gammas = set()
    for i, (folder, member) in enumerate(zip(run.folders, run.members)):
        config = read_run_config(folder)
        assert config.seed == 5 + i and config.population.size == 1
        assert config.learner.lr == pytest.approx(VARY["learner.lr"][i])
        gammas.add(round(config.learner.gamma, 6))
        rows = table(folder / "metrics.csv")
        assert [row["frames"] for row in rows] == ["40", "80", "120", "160"]
        assert float(rows[0]["agents/lr"]) == pytest.approx(config.learner.lr, rel=1e-5)
        assert member.frames == 160 and member.evaluate(episodes=6)["episodes"] == 6
        assert [row["frames"] for row in table(folder / "evaluation.csv")] == ["0", "80", "160"]
        assert member.summary["return_after"] > -1
    assert gammas == {0.9, 0.94, 0.98}
    returns = [member.summary["return_after"] for member in run.members]
    assert run.summary["return_after"] == pytest.approx(sum(returns) / 3)
    assert run.summary["frames"] == 160 and run.summary["members"] == 3
    means = table(tmp_path / "all" / "metrics.csv")
    own = [
        float(table(folder / "metrics.csv")[-1]["agents/episode_reward"]) for folder in run.folders
    ]
    assert float(means[-1]["agents/episode_reward"]) == pytest.approx(sum(own) / 3, rel=1e-4)
    assert float(means[-1]["agents/best"]) == pytest.approx(max(own), rel=1e-4)
    assert means[-1]["agents/best_seed"] == str(5 + own.index(max(own)))


@pytest.mark.runs
def test_member_resumes_alone(tmp_path):
    train(tmp_path / "all")
    one = resume(tmp_path / "all" / "seed1")
    assert one.summary["frames"] == 160
    more = torchrl_marl.resume(tmp_path / "all" / "seed1", total_frames=240)
    assert more.summary["frames"] == 240
    assert [row["frames"] for row in table(tmp_path / "all" / "seed1" / "metrics.csv")][-1] == "240"
    with pytest.raises(
        CheckpointError, match="seed1' was trained further alone, to iteration_000006"
    ):
        torchrl_marl.resume(tmp_path / "all", total_frames=400)


def test_population_resumes_exactly(tmp_path):
    whole = train(tmp_path / "whole")
    train(tmp_path / "half", total_frames=80)
    half = torchrl_marl.resume(tmp_path / "half", total_frames=160)
    first, again = (load_latest(run.folder)[1]["learners"][0] for run in (whole, half))
    for name, value in first.items():
        if isinstance(value, torch.Tensor):
            assert torch.equal(value, again[name]), name
    for one, other in zip([whole.folder, *whole.folders], [half.folder, *half.folders]):
        assert table(one / "metrics.csv") == table(other / "metrics.csv")
    for one, other in zip(whole.folders, half.folders):
        assert table(one / "evaluation.csv")[-1] == table(other / "evaluation.csv")[-1]


@pytest.mark.runs
def test_one_graph_captures_all_members(tmp_path):
    config = load_config(
        "toy_arena_mappo",
        {"folder": str(tmp_path / "all"), "population": {"size": 3, "vary": VARY}, **SMALL}
        | {"execution": "trace"},
    )
    training = start_training(config, None)
    training.begin()
    for _ in range(3):
        training.step()
    assert training.collector.execution == "trace"
    [learner] = training.learners
    assert len(learner.updates.programs) == 1
    training.end()
    training.close()
    assert len(table(tmp_path / "all" / "seed2" / "metrics.csv")) == 3


@pytest.mark.runs
def test_diverged_member_is_frozen_and_others_continue(tmp_path, capsys):
    run = train(tmp_path / "all", vary={"learner.lr": [1e-3, 1e30, 1e-3]})
    assert "member seed1 is frozen" in capsys.readouterr().err
    assert table(run.folder / "metrics.csv")[-1]["diverged"] == "1"
    assert [member.frames for member in run.members] == [160] * 3
    # A frozen member has no return: null in the summary, a note in the report.
    summary = json.loads((run.members[1].folder / "summary.json").read_text())
    assert summary["return_after"] is None and summary["return_before"] is not None
    others = [run.members[i].summary["return_after"] for i in (0, 2)]
    assert run.summary["return_after"] == pytest.approx(sum(others) / 2)
    record = extract_record(read_run(run.members[1].folder))
    assert any("has diverged" in note for note in record.notes)
    well = train(tmp_path / "well", vary={"learner.lr": [1e-3, 1e-3, 1e-3]})
    for i in (0, 2):
        for x, y in zip(*(r.members[i].policy.parameters() for r in (run, well)), strict=True):
            assert torch.isfinite(x).all() and x.shape == y.shape


@pytest.mark.runs
def test_command_line_trains_seeds_together(tmp_path, capsys):
    settings = ["total_frames=80", "frames_per_batch=40", "execution=eager", "env.num_envs=4"]
    settings += ["learner.minibatch_size=20", "evaluation.episodes=4", "logging.progress=false"]
    folder = tmp_path / "all"
    command = ["train", "toy_arena_mappo", "--seeds", "3..5", "--together", f"folder={folder}"]
    assert main([*command, *settings]) == 0
    assert "return by seed" in capsys.readouterr().out
    assert main(["plot", str(folder), "--out", str(tmp_path / "curve.png")]) == 0
    assert (tmp_path / "curve.png").exists()
    assert main(["evaluate", str(folder)]) == 2
    assert "give one of them" in capsys.readouterr().err
    assert main(["evaluate", str(folder / "seed4")]) == 0


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--together"], "add --seeds 0..7"),
        (["--seeds", "0,2", "--together"], "use --seeds 0..1"),
        (["--seeds", "4..2"], "a larger last one"),
        (["--seeds", "0..3", "--together", "seed=1"], "drop seed="),
        (["--seeds", "0..3", "--together", "population.size=2"], "drop population.size"),
        (["--seeds", "0..3", "--together", "learner=happo"], "expected one of mappo, ippo"),
        (["--seeds", "0..3", "--together", "stop_at_return=3"], "stop_at_return"),
        (["population.size=2", "population.vary.learner.lr=[1.0]"], "expected 2 numbers"),
        (["population.size=2", "population.vary.learner.num_epochs=[1,2]"], "num_epochs"),
        (["population.size=2", "population.vary.learner.lr=[-1.0,1.0]"], "learner.lr"),
        (["population.size=2", "population.vary.learner.lr={low: 0, high: 1, log: true}"], "log"),
        (["population.vary.learner.lr=[1.0]"], "population.size is 1"),
        (
            ["population.size=2", "population.vary.learner.lr={low:1e-3,high: 1}"],
            "after each colon",
        ),
        (
            ["population.size=2", "population.vary.learner.lr=[0.1,0.2]", "groups.humans.lr=1"],
            "groups.humans.lr is given",
        ),
    ],
)
def test_invalid_population_settings_raise(arguments, words, capsys):
    assert main(["train", "toy_arena_mappo", *arguments]) == 2
    text = capsys.readouterr().err
    assert words in text and text.count("\n") == 1


def test_env_object_with_a_population_raises(tmp_path):
    with pytest.raises(ConfigError, match="leave env out|of your own"):
        world = torchrl_marl.envs.toy.Arena(4, seed=0)
        torchrl_marl.train("toy_arena_mappo", env=world, population={"size": 2})


def test_member_that_diverges_immediately_is_frozen(tmp_path, capsys):
    run = train(tmp_path / "all", vary={"learner.lr": [1e-3, 1e30, 1e-3]}, total_frames=80)
    assert "member seed1 is frozen from 40 frames" in capsys.readouterr().err
    rows = [table(folder / "metrics.csv") for folder in (run.folder, *run.folders)]
    healthy = [float(rows[i][-1]["agents/episode_reward"]) for i in (1, 3)]
    assert float(rows[0][-1]["agents/episode_reward"]) == pytest.approx(sum(healthy) / 2, rel=1e-4)
    known = [member.summary["return_after"] for member in run.members]
    assert run.summary["return_after"] == pytest.approx((known[0] + known[2]) / 2)


@pytest.mark.runs
def test_population_folder_is_locked_during_training(tmp_path):
    own = {"folder": str(tmp_path / "all"), "population": {"size": 3, "vary": VARY}, **SMALL}
    training = start_training(load_config("toy_arena_mappo", own), None)
    training.begin()
    training.step()
    training.save()
    for folder in (training.folder, training.folder / "seed1"):
        with pytest.raises(CheckpointError, match=f"{folder.name}' is in use"):
            resume(folder)
    training.close()
    one = Run.load(tmp_path / "all" / "seed1")  # a member in use locks the population
    with start_again(one.folder), pytest.raises(CheckpointError, match="seed1' is in use"):
        resume(tmp_path / "all")
    assert resume(tmp_path / "all").frames == 160


@contextlib.contextmanager
def start_again(folder):
    training = resume_training(folder, None)
    try:
        yield training
    finally:
        training.close()


@pytest.mark.runs
def test_population_folder_does_not_load_as_a_run(tmp_path):
    run = train(tmp_path / "all", total_frames=40)
    with pytest.raises(CheckpointError, match="population of 3"):
        Run.load(run.folder)


EVOLVING = {
    "method": "pbt",
    "every_frames": 40,
    "least_episodes": 1,
    "worst": 0.34,
    "resample": 0.0,
}


def test_evolution_replaces_the_worst_member_by_the_best(tmp_path):
    run = train(tmp_path / "all", evolution=EVOLVING)
    rows = table(run.folder / "evolution.csv")
    assert len(rows) % 3 == 0 and rows
    by_iteration = {}
    for row in rows:
        by_iteration.setdefault(row["iteration"], []).append(row)
    lr = dict(zip("012", VARY["learner.lr"]))
    for selection in by_iteration.values():
        fitness = {row["seed"]: float(row["fitness"]) for row in selection}
        order = sorted(fitness, key=fitness.get)
        parents = {row["seed"]: row["parent"] for row in selection}
        assert parents == {**{seed: seed for seed in order[1:]}, order[0]: order[-1]}
        for row in selection:
            expected = [lr[row["parent"]]]
            if row["parent"] != row["seed"]:
                expected = [min(max(expected[0] * f, 1e-3), 3e-3) for f in (0.8, 1.25)]
            assert any(float(row["lr"]) == pytest.approx(x, rel=1e-4) for x in expected)
        lr = {row["seed"]: float(row["lr"]) for row in selection}
    longer = torchrl_marl.resume(run.folders[1], total_frames=200)
    assert longer.summary["frames"] == 200
    for folder, value in zip(run.folders[:1], lr.values()):
        assert read_run_config(folder).learner.lr == pytest.approx(value, rel=1e-4)
        used = float(table(folder / "metrics.csv")[-1]["agents/lr"])
        assert used == pytest.approx(value, rel=1e-4)


def test_evolution_without_a_selection_warns(tmp_path, capsys):
    run = train(tmp_path / "all", total_frames=80, evolution=EVOLVING | {"every_frames": 80})
    assert "every_frames is 80 and total_frames 80: no selection" in capsys.readouterr().err
    assert not (run.folder / "evolution.csv").exists()


@pytest.mark.runs
def test_evolution_resumes_exactly(tmp_path):
    settings = {"evolution": EVOLVING, "total_frames": 240}
    whole = train(tmp_path / "whole", **settings)
    train(tmp_path / "half", **settings | {"total_frames": 120})
    half = torchrl_marl.resume(tmp_path / "half", total_frames=240)
    # The last iteration of a run makes no selection.
    assert table(whole.folder / "evolution.csv")[:3] == table(half.folder / "evolution.csv")[:3]
    stopped = tmp_path / "stopped"
    population = {"size": 3, "vary": VARY}
    own = {"folder": str(stopped), "population": population, **SMALL | settings}
    config = load_config("toy_arena_mappo", own)
    for iteration in torchrl_marl.iterate(config):
        if iteration.number == 3:
            break
    torchrl_marl.resume(stopped)
    assert table(whole.folder / "evolution.csv") == table(stopped / "evolution.csv")
    for one, other in zip(whole.folders, sorted(stopped.glob("seed*"))):
        assert table(one / "metrics.csv") == table(other / "metrics.csv")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["evolution.method=pbt"], "population.size is 1"),
        (["population.size=4", "evolution.worst=0.7"], "evolution.worst"),
        (
            ["population.size=4", "evolution.method=tournament", "evolution.elite=9"],
            "evolution.elite is 9",
        ),
        (
            ["population.size=4", "evolution.method=tournament", "evolution.elite=4"],
            "expected less than population.size, 4",
        ),
        (["population.size=4", "evolution.factors=[0.0]"], "factors"),
        (["population.size=4", "evolution.method=pbf"], "did you mean 'pbt'"),
        (["population.size=4", "evolution.every_frames=40"], "evolution.method is not none"),
        (
            ["population.size=4", "evolution.method=pbt", "evolution.drawn=3"],
            "evolution.method is tournament",
        ),
    ],
)
def test_invalid_evolution_settings_raise(arguments, words, capsys):
    assert main(["train", "toy_arena_mappo", *arguments]) == 2
    assert words in capsys.readouterr().err


KUHN = {
    "total_frames": 768,
    "frames_per_batch": 256,
    "execution": "eager",
    "env": {"num_envs": 64},
    "learner": {
        "num_epochs": 2,
        "minibatch_size": 128,
        "actor": {"num_cells": [8], "sharing": "group"},
        "critic": {"num_cells": [8], "sharing": "group"},
    },
    "evaluation": {"episodes": 40},
    "logging": {"progress": False},
    "population": {"size": 3, "vary": {"learner.lr": [1e-3, 1e-2, 3e-2]}},
    "evolution": {"method": "pbt", "every_frames": 512, "fitness": "rating"},
}


@pytest.mark.runs
def test_members_are_rated_by_games_against_each_other(tmp_path):
    config = load_config("toy_kuhn_ippo", {**KUHN, "folder": str(tmp_path / "all")})
    training = start_training(config, None)
    training.begin()
    training.step()
    training.saved_at = None
    training.save()
    policies = [Run.load(member.folder).policy for member in training.results.members]
    env = training.environments.evaluation
    seed = config.seed + EVALUATION_SEED + 1
    found = standing(cross_play(policies, policies, env, 13, seed=seed))
    assert torch.equal(training.parts["evolution"].rate(training.iteration), found.ratings.rating)
    while not training.done:
        training.step()
    training.end()
    training.close()
    rows = table(tmp_path / "all" / "evolution.csv")
    ratings = [float(row["fitness"]) for row in rows]
    assert len(rows) == 3 and sum(ratings) == pytest.approx(0.0, abs=0.01)
    assert rows[ratings.index(min(ratings))]["parent"] == rows[ratings.index(max(ratings))]["seed"]


@pytest.mark.runs
@pytest.mark.parametrize(
    ("recipe", "words"),
    [("toy_arena_mappo", "has 1 group"), ("toy_speaker_listener_mappo_pbt", "is a draw")],
)
def test_rating_fitness_without_wins_raises(tmp_path, recipe, words, capsys):
    own = ["population.size=2", "evolution.method=pbt", "evolution.fitness=rating"]
    own += ["execution=eager", "env.num_envs=8", "frames_per_batch=80", "total_frames=80"]
    own += ["evaluation.episodes=2", "learner.minibatch_size=40", "logging.progress=false"]
    assert main(["train", recipe, f"folder={tmp_path / 'all'}", *own]) == 2
    assert words in capsys.readouterr().err.splitlines()[-1]
