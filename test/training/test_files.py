"""Failed writes: full disks, simulated by /dev/full and a tiny tmpfs."""

import errno
import json
import os
import subprocess
from pathlib import Path

import pytest
import torch
from runs import assert_equal

from torchrl_marl.errors import UserError, WriteError
from torchrl_marl.training.checkpoint import latest_checkpoint, load_checkpoint, save_checkpoint
from torchrl_marl.training.files import append, explain_write_errors, open_atomically
from torchrl_marl.training.progress import write_summary
from torchrl_marl.training.recorder import CsvTable

STATE = {"weights": torch.arange(1000.0)}


@pytest.fixture
def small_disk(tmp_path):
    """A disk of 64 kB if one can be mounted."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(folder)]
    try:
        subprocess.run(mount, check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("no disk can be made here")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def test_files_are_written_completely_or_not_at_all(tmp_path):
    path = tmp_path / "a.txt"
    with open_atomically(path) as file:
        file.write("one")
        assert not path.exists()
    with pytest.raises(KeyError), open_atomically(path) as file:
        file.write("two")
        raise KeyError
    assert path.read_text() == "one"
    assert names(tmp_path) == ["a.txt"]


@pytest.mark.parametrize(
    ("number", "fix"),
    [
        (errno.ENOSPC, "No space left on device.*free some space"),
        (errno.EDQUOT, "free some space"),
        (errno.EROFS, "Read-only file system.*choose another folder"),
        (errno.EACCES, "Permission denied.*allow writing there"),
        (errno.EIO, "check the path and the disk"),
    ],
)
def test_system_errors_become_write_errors_with_a_fix(tmp_path, number, fix):
    with pytest.raises(WriteError, match=fix) as caught, explain_write_errors(tmp_path / "x.csv"):
        raise OSError(number, os.strerror(number))
    assert isinstance(caught.value, UserError)
    assert "x.csv" in str(caught.value)
    assert caught.value.errno == number


def test_undecodable_file_names_are_escaped(tmp_path):
    name = b"l\xe4uf".decode("utf-8", "surrogateescape")
    with open_atomically(tmp_path / "table.csv") as file:
        file.write(name)
    append(tmp_path / "table.csv", name)
    assert (tmp_path / "table.csv").read_text() == "l\\udce4uf" * 2


def test_other_errors_are_not_converted_to_write_errors(tmp_path):
    with pytest.raises(KeyError), explain_write_errors(tmp_path / "x"):
        raise KeyError
    with pytest.raises(UserError, match="ours"), explain_write_errors(tmp_path / "x"):
        raise UserError("ours")


def test_missing_folder_raises(tmp_path):
    with pytest.raises(WriteError, match="No such file"), open_atomically(tmp_path / "a" / "b"):
        pass
    (tmp_path / "file").touch()
    with pytest.raises(WriteError, match="Not a directory"):
        append(tmp_path / "file" / "b", "text")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full here")
def test_torch_save_on_a_full_disk_raises(tmp_path):
    """Torch raises its own error, which contains that of the system."""
    with (
        pytest.raises(WriteError, match="No space left on device"),
        explain_write_errors(tmp_path / "x"),
    ):
        with open("/dev/full", "wb") as file:
            torch.save({"weights": torch.zeros(100_000)}, file)


def test_checkpoint_on_a_full_disk_keeps_the_last_one(small_disk):
    save_checkpoint(small_disk, 1, STATE, keep=1)
    with pytest.raises(WriteError, match=r"iteration_000002\.pt.*No space left.*free some space"):
        save_checkpoint(small_disk, 2, {"weights": torch.zeros(100_000)}, keep=1)
    assert names(small_disk / "checkpoints") == ["iteration_000001.pt"]
    assert_equal(load_checkpoint(latest_checkpoint(small_disk))["weights"], STATE["weights"])
    save_checkpoint(small_disk, 2, STATE, keep=1)
    assert names(small_disk / "checkpoints") == ["iteration_000002.pt"]


def test_summary_of_a_diverged_run_is_strict_json(tmp_path):
    values = {"return_after": float("nan"), "evaluation": {"low": -float("inf"), "n": 3}}
    write_summary(tmp_path, values)

    def refuse(name):
        raise AssertionError(name)

    found = json.loads((tmp_path / "summary.json").read_text(), parse_constant=refuse)
    assert found == {"return_after": None, "evaluation": {"low": None, "n": 3}}


def test_partial_checkpoints_of_killed_processes_are_removed(tmp_path):
    path = save_checkpoint(tmp_path, 1, STATE, keep=2)
    path.with_name("iteration_000002.pt.part").write_bytes(b"half")
    save_checkpoint(tmp_path, 3, STATE, keep=2)
    assert names(path.parent) == ["iteration_000001.pt", "iteration_000003.pt"]


def test_table_on_a_full_disk_keeps_complete_rows(small_disk):
    """Rows are written until the disk is full. The file then ends with a complete row."""
    table = CsvTable(small_disk / "metrics.csv")
    row = {"iteration": 1, **{f"agents/value_{i}": i / 7 for i in range(200)}}
    with pytest.raises(WriteError, match=r"metrics\.csv.*No space left"):
        for i in range(1000):
            table.write({**row, "iteration": i})
    lines = (small_disk / "metrics.csv").read_text().splitlines(keepends=True)
    assert len(lines) == i + 1  # the head, and all rows but the last
    assert all(line.endswith("\n") and line.count(",") == 200 for line in lines)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full here")
def test_table_header_is_written_after_a_failed_first_row(tmp_path):
    table = CsvTable(tmp_path / "metrics.csv")
    table.path = Path("/dev/full")
    with pytest.raises(WriteError):
        table.write({"iteration": 1})
    table.path = tmp_path / "metrics.csv"
    table.write({"iteration": 1})
    assert table.path.read_text().split() == ["iteration", "1"]


@pytest.mark.parametrize("half", ["iteration,fra", "iteration,frames", "iteration,frames\r\n"])
def test_table_with_a_partial_header_is_restarted(tmp_path, half):
    path = tmp_path / "metrics.csv"
    path.write_text(half)
    table = CsvTable(path, keep_iterations=0)
    table.write({"iteration": 1, "frames": 80})
    assert path.read_text().split() == ["iteration,frames", "1,80"]


@pytest.mark.parametrize("rest", ["3,2", "3,", "3", "\0\0\0\0", "²,3\r\n", '"', "\udcff"])
def test_partial_row_is_removed(tmp_path, rest):
    path = tmp_path / "metrics.csv"
    path.write_bytes(
        b"iteration,frames\r\n1,80\r\n2,160\r\n" + rest.encode(errors="surrogateescape")
    )
    table = CsvTable(path, keep_iterations=2)
    table.write({"iteration": 3, "frames": 240})
    assert path.read_text().split() == ["iteration,frames", "1,80", "2,160", "3,240"]
