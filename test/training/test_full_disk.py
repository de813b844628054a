"""Runs on full or read-only disks: a short error, and the last checkpoint stays valid."""

import subprocess

import pytest
from runs import assert_same_run, small_config

from torchrl_marl.apps.cli.main import main
from torchrl_marl.apps.plotting import learning_curve
from torchrl_marl.errors import CheckpointError, WriteError
from torchrl_marl.training import Run, iterate, train
from torchrl_marl.training.trainer import resume

pytestmark = pytest.mark.runs

SETTINGS = {"checkpoint.every_iterations": 1, "evaluation.episodes": 1}


@pytest.fixture
def disk(tmp_path):
    """A disk of 8 MB if one can be mounted."""
    folder = tmp_path / "disk"
    folder.mkdir()
    try:
        mount("size=8m", "tmpfs", folder)
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("no disk can be made here")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


def mount(options, *what):
    command = ["mount", "-t", "tmpfs", "-o", options, *map(str, what)]
    subprocess.run(command, check=True, capture_output=True)


def fill(disk):
    filler = disk / "filler"
    with filler.open("wb", buffering=0) as file, pytest.raises(OSError, match="No space"):
        while True:
            file.write(bytes(4096))
    return filler


def test_run_resumes_exactly_after_a_full_disk(tmp_path, disk):
    whole = train(small_config(folder=str(tmp_path / "whole"), **SETTINGS))
    config = small_config(folder=str(disk / "run"), **SETTINGS)
    with pytest.raises(WriteError, match="No space left on device.*free some space"):
        for iteration in iterate(config):
            if iteration.number == 3:
                filler = fill(disk)
    folder = disk / "run"
    names = {path.name for path in folder.rglob("*")}
    assert not any(name.endswith(".part") for name in names)
    assert "iteration_000003.pt" in names
    assert Run.load(folder).evaluate(2)["episodes"] == 2  # evaluation writes nothing
    filler.unlink()
    with (folder / "metrics.csv").open("a") as file:
        file.write("4,32")  # as a killed process leaves it
    assert_same_run(whole.folder, resume(folder).folder)


def test_population_resumes_exactly_after_a_full_disk(tmp_path, disk):
    settings = {**SETTINGS, "population.size": 2}
    whole = train(small_config(folder=str(tmp_path / "whole"), **settings))
    with pytest.raises(WriteError, match="No space left on device.*free some space"):
        for iteration in iterate(small_config(folder=str(disk / "run"), **settings)):
            if iteration.number == 3:
                filler = fill(disk)
    assert not list((disk / "run").rglob("*.part"))
    filler.unlink()
    again = resume(disk / "run")
    for one, other in zip(whole.folders, again.folders, strict=True):
        assert_same_run(one, other)


def test_start_on_a_full_disk_can_be_repeated(disk):
    config = small_config(folder=str(disk / "run"), total_frames=80)
    filler = fill(disk)
    with pytest.raises(WriteError, match=r"config\.yaml.*No space left"):
        train(config)
    filler.unlink()
    assert train(config).summary["frames"] == 80


def test_plot_on_a_full_disk_only_warns(disk, monkeypatch):
    from torchrl_marl.runs import draw

    run = train(small_config(folder=str(disk / "run"), total_frames=80))
    fill(disk)
    with pytest.warns(UserWarning, match=r"learning_curve\.png.*No space left"):
        draw(run.folder)
    assert not list(run.folder.glob("*.part"))


def test_read_only_run_is_evaluated_but_not_written(disk, tmp_path, capsys):
    run = train(small_config(folder=str(disk / "run"), total_frames=80))
    mount("remount,ro", "tmpfs", disk)
    folder = str(run.folder)
    for command in (["plot"], ["train", "--resume"]):
        capsys.readouterr()
        assert main([*command, folder]) == 2, command
        error = capsys.readouterr().err.splitlines()[-1]
        assert error.startswith("torchrl-marl: error: ")
        assert "Read-only file system" in error
    assert main(["plot", folder, "--out", str(tmp_path / "new" / "curve.png")]) == 0
    assert (tmp_path / "new" / "curve.png").stat().st_size > 1000
    assert Run.load(folder).evaluate(2)["episodes"] == 2
    with pytest.raises(CheckpointError, match="cannot be written"):
        resume(folder)


@pytest.mark.parametrize("out", ["file/curve.png", "folder.png"])
def test_plot_to_an_invalid_path_raises(tmp_path, out):
    run = train(small_config(folder=str(tmp_path / "run"), total_frames=80))
    (tmp_path / "file").touch()
    (tmp_path / "folder.png").mkdir()
    with pytest.raises(WriteError, match="cannot be written"):
        learning_curve(run.folder, path=tmp_path / out)
    assert not list(tmp_path.glob("*.part"))


def test_search_resumes_after_a_full_disk(disk, capsys):
    pytest.importorskip("optuna")
    out = disk / "tuned"
    settings = ["total_frames=40", "frames_per_batch=40", "execution=eager", "env.num_envs=4"]
    settings += ["learner.minibatch_size=20", "learner.num_epochs=1", "evaluation.episodes=2"]
    tune = ["tune", "toy_arena_mappo", "learner.lr=1e-4..1e-2:log", *settings, "--together", "2"]
    filler = fill(disk)
    assert main([*tune, "--trials", "4", "--out", str(out)]) == 2
    error = capsys.readouterr().err
    assert f"{str(out / 'study.log')!r} cannot be written (No space left on device)" in error
    filler.unlink()
    assert main([*tune, "--trials", "4", "--out", str(out)]) == 0
    assert len((out / "trials.csv").read_text().splitlines()) == 5
