"""Tables of other libraries' evaluations: only ends of rows end rows."""

import csv

import pytest

from torchrl_marl.apps.reports.results import read_table
from torchrl_marl.errors import CheckpointError

HEAD = ["task", "algorithm", "seed", "frames", "return"]
NAMES = ["line\u2028apart", "two\nlines", 'a "quoted", name', "next\x85line", "form\x0cfeed"]


def write(path, rows, **options):
    with path.open("w", newline="", encoding="utf-8") as file:
        csv.writer(file, **options).writerows([HEAD, *rows])
    return path


@pytest.mark.parametrize("end", ["\n", "\r\n"])
@pytest.mark.parametrize("name", NAMES)
def test_a_name_may_hold_any_character(name, end, tmp_path):
    rows = [["grid", name, seed, frames, seed + frames] for seed in (0, 1) for frames in (0, 10)]
    found, left_out = read_table(write(tmp_path / "t.csv", rows, lineterminator=end))
    assert left_out == []
    assert list(found) == [("grid", name)]
    assert len(found["grid", name]) == 2


def test_lines_are_counted_as_an_editor_does(tmp_path):
    rows = [["grid", "two\nlines", 0, 0, 1.0], ["grid", "b", 0, "many", 1.0]]
    with pytest.raises(CheckpointError, match="broken in line 4, expected numbers"):
        read_table(write(tmp_path / "t.csv", rows))
