"""Tuning by Optuna: trials as populations, going on, and the best as a recipe."""

import csv

import pytest

from torchrl_marl.cli import main
from torchrl_marl.errors import ConfigError
from torchrl_marl.recipes import load_config
from torchrl_marl.tuning import Choice, parse_choice

SMALL = [
    "total_frames=40",
    "frames_per_batch=40",
    "execution=eager",
    "env.num_envs=4",
    "learner.minibatch_size=20",
    "learner.num_epochs=1",
    "evaluation.episodes=2",
    "logging.progress=false",
]


def rows_of(folder):
    with (folder / "trials.csv").open(newline="") as file:
        return list(csv.DictReader(file))


def test_trials_are_populations_and_the_best_is_a_recipe(tmp_path, capsys):
    pytest.importorskip("optuna")
    out = tmp_path / "tuned"
    command = ["tune", "toy_arena_mappo", "learner.lr=1e-4..1e-2:log", "learner.gamma=0.8..0.99"]
    options = ["--together", "2", "--out", str(out), *SMALL]
    assert main([*command, "--trials", "4", *options]) == 0
    assert str(out / "best.yaml") in capsys.readouterr().out
    rows = rows_of(out)
    assert [row["trial"] for row in rows] == ["0", "1", "2", "3"]
    assert all(1e-4 <= float(row["learner.lr"]) <= 1e-2 for row in rows)
    assert all((out / row["folder"] / "metrics.csv").exists() for row in rows)
    best = max(rows, key=lambda row: float(row["return"]))
    config = load_config(str(out / "best.yaml"))
    assert config.learner.lr == pytest.approx(float(best["learner.lr"]), rel=1e-4)
    assert config.learner.gamma == pytest.approx(float(best["learner.gamma"]), rel=1e-4)
    assert config.population.size == 1
    # The same command goes on where it was.
    assert main([*command, "--trials", "6", *options]) == 0
    assert rows_of(out)[:4] == rows and len(rows_of(out)) == 6


@pytest.mark.parametrize(
    ("text", "choice"),
    [
        ("learner.lr=1e-4..1e-2:log", Choice("learner.lr", 1e-4, 1e-2, True)),
        ("learner.entropy_coeff=0..0.05", Choice("learner.entropy_coeff", 0.0, 0.05)),
        ("learner.gamma=0.5..0.99", Choice("learner.gamma", 0.5, 0.99)),
        ("learner.lr=1e-3", None),
        ("folder=../there", None),
    ],
)
def test_ranges_are_read(text, choice):
    assert parse_choice(text) == choice


@pytest.mark.parametrize(
    "text",
    [
        "learner.lr=1e-2..1e-4",
        "learner.lr=0..1:log",
        "learner.lr=a..b",
        "learner.lr=1..2:lin",
        "learner.num_epochs=1..9",
    ],
)
def test_ranges_that_are_none_are_refused(text):
    with pytest.raises(ConfigError, match="expected"):
        parse_choice(text)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["toy_arena_mappo"], "nothing is tuned"),
        (["toy_arena_mappo", "learner.lr=0.1..0.2", "--together", "1"], "two or more at once"),
        (["toy_arena_qmix", "learner.lr=0.1..0.2"], "expected mappo or ippo"),
        (["toy_arena_mappo", "learner.gamma=0.5..1.5"], "learner.gamma"),
    ],
)
def test_what_cannot_be_tuned_is_refused(arguments, words, capsys, tmp_path):
    pytest.importorskip("optuna")
    assert main(["tune", *arguments, "--out", str(tmp_path / "out")]) == 2
    assert words in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
