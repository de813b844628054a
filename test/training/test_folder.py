"""Run folders: unique, locked during training, and reusable after a failed start."""

import errno
import os
import signal
import subprocess
import sys
import warnings

import pytest
from runs import small_config

from torchrl_marl.errors import CheckpointError, ConfigError
from torchrl_marl.recipes import read_config, recipe_names, save_config
from torchrl_marl.training import folder as folders
from torchrl_marl.training.folder import RunFolder, check_folder


def test_runs_started_in_the_same_second_get_own_folders(tmp_path, monkeypatch):
    class Clock(folders.datetime):
        @classmethod
        def now(cls):
            return cls(2026, 11, 21, 12, 0, 0)

    monkeypatch.setattr(folders, "datetime", Clock)
    monkeypatch.chdir(tmp_path)
    found = [RunFolder.new(small_config()) for _ in range(3)]
    names = [folder.path.name for folder in found]
    base = "toy_arena_mappo_seed0_20261121-120000"
    assert names == [base, f"{base}_2", f"{base}_3"]
    assert all(folder.path.is_dir() for folder in found)


def test_folder_is_locked_until_released(tmp_path):
    first = RunFolder(tmp_path)
    with pytest.raises(CheckpointError, match="in use by another training of this process"):
        RunFolder(tmp_path)
    first.release()
    second = RunFolder(tmp_path)
    with pytest.raises(CheckpointError):
        RunFolder(tmp_path)
    del second  # garbage collected without release
    RunFolder(tmp_path).release()
    assert list(tmp_path.iterdir()) == []


HOLD = (
    "import sys, time\nfrom pathlib import Path\n"
    "from torchrl_marl.training.folder import RunFolder\n"
    "folder = RunFolder(Path(sys.argv[1]))\nprint('has it', flush=True)\ntime.sleep(60)"
)


def test_folder_is_locked_until_other_process_is_killed(tmp_path):
    command = [sys.executable, "-c", HOLD, str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout.readline() == "has it\n"
        with pytest.raises(
            CheckpointError, match=f"in use by process {holder.pid} on .* try again"
        ):
            RunFolder(tmp_path)
        holder.send_signal(signal.SIGKILL)
        holder.wait()
        RunFolder(tmp_path).release()


def test_forked_child_does_not_keep_the_lock(tmp_path):
    folder = RunFolder(tmp_path)
    (read, write), (alive, live) = os.pipe(), os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Python 3.12 warns of torch's threads
        child = os.fork()
    if child == 0:
        os.write(live, b"x")
        os.read(read, 1)
        os._exit(0)
    os.read(alive, 1)
    try:
        os.close(folder.release.detach()[2][0])  # as if the parent had been killed
        RunFolder(tmp_path).release()
    finally:
        os.write(write, b"x")
        os.waitpid(child, 0)


def test_drive_without_locks_warns_and_is_used(tmp_path, monkeypatch):
    def flock(descriptor, how):
        raise OSError(errno.ENOTSUP, "Operation not supported")

    monkeypatch.setattr(folders.fcntl, "flock", flock)
    with pytest.warns(UserWarning, match="cannot be locked .Operation not supported."):
        RunFolder(tmp_path).release()


def test_only_folders_of_failed_starts_are_overwritten(tmp_path):
    config = small_config(folder=str(tmp_path / "run"))
    check_folder(config)
    run = tmp_path / "run"
    run.mkdir()
    (run / ".lock").write_text("1 there")
    check_folder(config)  # a killed start leaves only its lock
    save_config(config, run / "config.yaml")
    (run / "evaluation.csv").write_text("iteration\n0\n")
    check_folder(config)
    folder = RunFolder.new(config)
    assert not (run / "evaluation.csv").exists()
    folder.release()
    for name in ("summary.json", "checkpoints/iteration_000000.pt"):
        (run / name).parent.mkdir(exist_ok=True)
        (run / name).write_text("x")
        with pytest.raises(ConfigError, match="exists; choose another .* --resume"):
            check_folder(config)
        (run / name).unlink()
    check_folder(config)
    text = (run / "config.yaml").read_text()
    (run / "config.yaml").write_text("# my notes\n" + text)  # a recipe of the user's own
    with pytest.raises(ConfigError, match="exists; choose another"):
        RunFolder.new(config)
    assert (run / "config.yaml").read_text() == "# my notes\n" + text


@pytest.mark.parametrize("name", recipe_names())
def test_failed_start_of_every_recipe_is_recognized(name, tmp_path):
    config = read_config(name, {"folder": str(tmp_path)})
    save_config(config, tmp_path / "config.yaml")
    check_folder(config)


def test_failed_start_removes_its_folder_unless_it_holds_other_files(tmp_path):
    config = small_config(folder=str(tmp_path / "a" / "run"))
    folder = RunFolder.new(config)
    save_config(config, folder.path / "config.yaml")
    folder.give_up()
    assert not folder.path.exists()
    folder = RunFolder.new(config)
    (folder.path / "precious.txt").write_text("mine")
    folder.give_up()
    assert (folder.path / "precious.txt").exists()


def test_folder_that_cannot_be_created_or_written_raises(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="cannot be created .Not a directory.; choose another"):
        RunFolder.new(small_config(folder=str(tmp_path / "file" / "run")))
    with pytest.raises(CheckpointError, match="cannot be written"):
        RunFolder(tmp_path / "gone")
