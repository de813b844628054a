"""Leagues resume exactly, and modified files are refused."""

import shutil

import pytest
import torch
from support.leagues import EXPLOITED, player_files, players, settings_of, train
from support.runs import assert_equal, final_state, table
from support.tiers import second_tier_cases

import torchrl_marl
from torchrl_marl.collectors.team import carry_from_dict
from torchrl_marl.errors import CheckpointError
from torchrl_marl.recipes import load_config
from torchrl_marl.training import Run, iterate
from torchrl_marl.training.pool import TABLE


@pytest.mark.parametrize(
    "match", ["pfsp", "exploited", *second_tier_cases("runs", "latest", "nash")]
)
def test_league_resumes_exactly(match, tmp_path):
    league = EXPLOITED if match == "exploited" else {"opponents": match}
    train(tmp_path / "whole", league)
    for step in iterate(load_config("toy_kuhn_ippo", settings_of(tmp_path / "parts", league))):
        if step.number == 4:
            break
    torchrl_marl.resume(tmp_path / "parts")
    for name in ("metrics.csv", TABLE):
        assert table(tmp_path / "whole" / name) == table(tmp_path / "parts" / name)
    whole, parts = (final_state(tmp_path / name) for name in ("whole", "parts"))
    for name in ("league", "learners", "collector", "tracker", "random"):
        assert_equal(whole[name], parts[name], name)
    carried = carry_from_dict(whole["collector"]["carry"], torch.Size([16]), "cpu")
    assert carried["first", "player"].any() and carried["second", "player"].any()


@pytest.mark.runs
def test_players_stored_after_the_last_checkpoint_are_dropped(tmp_path):
    train(tmp_path / "whole")
    run = tmp_path / "run"
    shutil.copytree(tmp_path / "whole", run)
    for path in sorted((run / "checkpoints").glob("*.pt"))[-4:]:
        path.unlink()
    torchrl_marl.resume(run)
    assert players(run) == players(tmp_path / "whole")


@pytest.mark.runs
def test_modified_player_file_is_refused(tmp_path):
    train(tmp_path / "run", total_frames=256)
    other, *_, path = player_files(tmp_path / "run")
    state = torch.load(path, weights_only=True)
    content = path.read_bytes()
    path.write_bytes(content[:-100] + b"x" + content[-99:])
    with pytest.raises(CheckpointError, match="is not a stored player, or is damaged"):
        torchrl_marl.resume(tmp_path / "run", total_frames=512)
    path.write_bytes(other.read_bytes())  # valid, but of another player
    with pytest.raises(CheckpointError, match="was changed: its SHA-256"):
        torchrl_marl.resume(tmp_path / "run", total_frames=512)
    path.write_bytes(content)
    assert_equal(torch.load(path, weights_only=True), state)
    torchrl_marl.resume(tmp_path / "run", total_frames=512)


@pytest.mark.runs
def test_players_table_with_missing_rows_is_refused(tmp_path):
    train(tmp_path / "run", total_frames=256)
    path = tmp_path / "run" / TABLE
    text = path.read_text()
    for left in (None, "", text.splitlines()[0] + "\n"):
        path.unlink() if left is None else path.write_text(left)
        with pytest.raises(CheckpointError, match=r"players\.csv"):
            torchrl_marl.resume(tmp_path / "run", total_frames=512)
    path.write_text(text)
    first = player_files(tmp_path / "run")[0]
    content = first.read_bytes()
    first.write_bytes(player_files(tmp_path / "run")[1].read_bytes())
    with pytest.raises(CheckpointError, match="SHA-256 differs from the one in players.csv"):
        Run.load(tmp_path / "run").players()
    first.write_bytes(content)
    torchrl_marl.resume(tmp_path / "run", total_frames=512)
