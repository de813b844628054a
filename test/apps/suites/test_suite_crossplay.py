"""Suites that are scored by cross-play with runs of other seeds."""

import csv
import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from torchrl_marl.apps.cli.main import main
from torchrl_marl.apps.suites import make_plan, run_suite, strangers
from torchrl_marl.apps.suites.board import read_result
from torchrl_marl.apps.suites.strangers import play_other_seeds
from torchrl_marl.errors import ConfigError
from torchrl_marl.training import evaluation

pytestmark = pytest.mark.runs

TABLE = """
score: crossplay
common:
  total_frames: 64
  frames_per_batch: 32
  threads: 1
  execution: eager
  env: {library: toy, name: matching_levers, num_envs: 8, max_steps: null,
        continuous_actions: false, kwargs: {rounds: 1}}
  learner: {minibatch_size: 32, num_epochs: 1, actor: {num_cells: [4]}, critic: {num_cells: [4]}}
  evaluation: {episodes: 6, count: 1}
algorithms:
  ippo: {}
  other_play: {learner: {algorithm: ippo}, env: {other_play: true}}
tasks:
  levers: {}
"""


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.yaml").write_text(TABLE)
    return tmp_path


PLAN = {"algorithms": "ippo", "seeds": 3}


def rows(path):
    with open(path, newline="") as file:
        return list(csv.DictReader(file))


@pytest.fixture
def played(monkeypatch):
    """The number of players of each cross-play table that was computed."""
    numbers, own = [], strangers.cross_play

    def counted(first, second, *args, **kwargs):
        numbers.append(len(first))
        return own(first, second, *args, **kwargs)

    monkeypatch.setattr(strangers, "cross_play", counted)
    return numbers


def test_suite_cross_plays_all_seeds(played, capsys):
    assert main(["suite", "mine.yaml", "seeds=3", "--jobs", "0"]) == 0
    found = rows("suite_mine/crossplay.csv")
    assert [(row["algorithm"], row["seeds"]) for row in found] == [
        ("ippo", "3"),
        ("other_play", "3"),
    ]
    text = capsys.readouterr().out
    assert "task    algorithm   seeds" in text and "with others" in text
    for row in found:
        folder = Path("suite_mine", "levers", row["algorithm"])
        record = json.loads((folder / "crossplay.json").read_text())
        returns = torch.tensor(record["returns"])
        assert (record["seeds"], record["episodes"]) == ([0, 1, 2], 6)
        apart = ~torch.eye(3, dtype=torch.bool)
        assert float(row["self_play"]) == pytest.approx(returns.diagonal().mean().item())
        assert float(row["cross_play"]) == pytest.approx(returns[apart].mean().item())
        pairs = rows(folder / "crossplay.csv")
        assert [float(pair["return_mean"]) for pair in pairs] == pytest.approx(returns.flatten())
        assert {pair["games"] for pair in pairs} == {"6"}
    assert played == [3, 3]
    # Existing results are not computed again; a new seed is added.
    assert main(["suite", "mine.yaml", "--resume", "--jobs", "0"]) == 0
    assert rows("suite_mine/crossplay.csv") == found and played == [3, 3]
    options = ["algorithms=ippo", "seeds=4", "--resume", "--jobs", "0"]
    assert main(["suite", "mine.yaml", *options]) == 0
    assert played == [3, 3, 4]
    # Other rows are kept, and so are seeds that a call does not select.
    assert [row["seeds"] for row in rows("suite_mine/crossplay.csv")] == ["4", "3"]
    assert main(["suite", "mine.yaml", "algorithms=ippo", "seeds=2,3", *options[2:]]) == 0
    assert played == [3, 3, 4]
    assert [row["seeds"] for row in rows("suite_mine/crossplay.csv")] == ["4", "3"]


def test_broken_record_is_recomputed_and_one_seed_is_skipped(played):
    lines = []
    options = {"algorithms": "ippo", "jobs": 0, "log": lines.append}
    run_suite("mine.yaml", seeds=1, **options)
    assert lines[-1] == "levers ippo: one finished seed, which has no other to play with"
    assert not Path("suite_mine/crossplay.csv").exists()
    run_suite("mine.yaml", seeds=2, resume=True, **options)
    record = Path("suite_mine/levers/ippo/crossplay.json")
    known = record.read_text()
    record.write_text(known[:40])
    run_suite("mine.yaml", seeds=2, resume=True, **options)
    assert record.read_text() == known and played == [2, 2]


def test_table_with_a_diverged_player_is_resumed(played, monkeypatch):
    counted = strangers.cross_play

    def diverged(*args, **kwargs):
        table = counted(*args, **kwargs)
        table["returns"][0], table["returns"][:, 0] = torch.nan, torch.nan
        return table

    monkeypatch.setattr(strangers, "cross_play", diverged)
    options = {"algorithms": "ippo", "jobs": 0, "seeds": 2}
    run_suite("mine.yaml", **options)
    Path("suite_mine/crossplay.csv").unlink()
    record = json.loads(Path("suite_mine/levers/ippo/crossplay.json").read_text())
    assert record["returns"][0] == [None, None]
    run_suite("mine.yaml", resume=True, **options)
    [row] = rows("suite_mine/crossplay.csv")
    assert row["cross_play"] == row["self_play"] == "nan" and row["self_play_low"] == ""
    assert played == [2]


def test_crossplay_command_accepts_a_folder_of_seeds(capsys):
    run_suite("mine.yaml", algorithms="ippo", seeds=2, jobs=0, log=list)
    assert main(["crossplay", "suite_mine/levers/ippo", "--episodes", "4"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert main(["crossplay", "suite_mine"]) == 2
    assert main(["crossplay", "suite_mine/levers", "random"]) == 2
    for line, name in zip(capsys.readouterr().err.splitlines(), ("suite_mine", "levers")):
        assert f"{name}' is the folder of a suite" in line
        assert "such as suite_mine/levers/ippo." in line
    assert lines[0].split() == ["return", "with", "1", "2"]
    assert [line.split()[1] for line in lines[1:3]] == [
        f"suite_mine/levers/ippo/seed{seed}" for seed in (0, 1)
    ]


def test_run_without_usable_checkpoint_is_left_out_and_named(played):
    lines = []
    options = {"algorithms": "ippo", "jobs": 0, "log": lines.append, "seeds": 4}
    run_suite("mine.yaml", **options)
    shutil.rmtree("suite_mine/levers/ippo/seed1/checkpoints")
    [*_, last] = sorted(Path("suite_mine/levers/ippo/seed2/checkpoints").glob("*.pt"))
    last.write_bytes(last.read_bytes()[:-200])
    Path("suite_mine/levers/ippo/crossplay.json").unlink()
    lines.clear()
    run_suite("mine.yaml", resume=True, **options)
    left = [line for line in lines if line.startswith("left out of the cross-play: ")]
    assert "levers/ippo/seed1: run" in left[0] and "has no checkpoint yet" in left[0]
    assert "levers/ippo/seed2: run" in left[1] and "before the first frame" in left[1]
    record = json.loads(Path("suite_mine/levers/ippo/crossplay.json").read_text())
    assert len(left) == 2 and record["seeds"] == [0, 3] and played == [4, 2]


def test_failed_run_is_left_out_and_named(played):
    lines = []
    options = {"algorithms": "ippo", "jobs": 0, "log": lines.append, "seeds": 3}
    run_suite("mine.yaml", **options)
    found = [read_result(Path("suite_mine"), run) for run in make_plan("mine.yaml", **PLAN).runs]
    found[1] = replace(found[1], state="failed", summary={})
    lines.clear()
    play_other_seeds(found, Path("suite_mine"), log=lines.append)
    assert lines[0].endswith("since they did not finish: levers/ippo/seed1") and played == [3, 2]


def test_messages_of_runs_are_prefixed_with_the_run(monkeypatch, capsys):
    monkeypatch.setattr(
        evaluation, "describe_action_difference", lambda *pair: "drawn actions earn more"
    )
    given = ["suite", "mine.yaml", "algorithms=ippo", "seeds=2", "evaluation.both=true"]
    assert main([*given, "--jobs", "0"]) == 0
    lines = capsys.readouterr().out.splitlines()
    for seed in (0, 1):
        assert f"torchrl_marl: levers/ippo/seed{seed}: drawn actions earn more." in lines


def test_unknown_score_and_unsuitable_tasks_are_refused(here):
    with pytest.raises(ConfigError, match="score: 'crosplay', did you mean 'crossplay'"):
        (here / "mine.yaml").write_text(TABLE.replace("score: crossplay", "score: crosplay"))
        run_suite("mine.yaml", jobs=0)
    (here / "mine.yaml").write_text(
        TABLE.replace("matching_levers", "kuhn")
        .replace("{rounds: 1}", "{}")
        .replace("learner: {minibatch", "learner: {bootstrap: agent, minibatch")
    )
    with pytest.raises(ConfigError, match="score: crossplay, but .* has two sides"):
        run_suite("mine.yaml", algorithms="ippo", seeds=2, jobs=0, log=list)


def test_other_play_without_symmetries_is_refused_at_the_start(here, capsys):
    two = TABLE.replace(", kwargs: {rounds: 1}", "")
    two = two.replace("  levers: {}", "  levers: {env: {kwargs: {rounds: 1}}}")
    (here / "mine.yaml").write_text(two + "  games: {env: {name: matrix_game}}\n")
    for more in (["--dry-run"], ["--jobs", "0"]):
        assert main(["suite", "mine.yaml", "seeds=1", *more]) == 2
        found = capsys.readouterr().err
        assert "these tasks have no symmetries: games (toy/matrix_game); use tasks=levers" in found
        assert "toy/matching_levers" in found and not Path("suite_mine").exists()
    assert main(["suite", "mine.yaml", "tasks=levers", "--dry-run"]) == 0
    assert main(["suite", "mine.yaml", "algorithms=ippo", "--dry-run"]) == 0
    given = ["sweep", "toy_matrix_game_mappo", "learner.lr=1e-3,1e-2", "env.other_play=true"]
    assert main([*given, "--dry-run"]) == 2
    assert "no symmetries: toy_matrix_game_mappo (toy/matrix_game)" in capsys.readouterr().err


if __name__ == "__main__":
    pytest.main([__file__])
