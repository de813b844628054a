"""Tables of other libraries' evaluations: names with newlines, line numbers, the old column."""

import codecs
import csv
from pathlib import Path

import pytest

from torchrl_marl.apps.reports.aggregates import read_references
from torchrl_marl.apps.reports.page import write_report
from torchrl_marl.apps.reports.results import make_report, read_table
from torchrl_marl.errors import CheckpointError, ConfigError

HEAD = ["task", "algorithm", "seed", "frames", "return"]
NAMES = ["line\u2028apart", "two\nlines", 'a "quoted", name', "next\x85line", "form\x0cfeed"]


def write(path, rows, **options):
    with path.open("w", newline="", encoding="utf-8") as file:
        csv.writer(file, **options).writerows([HEAD, *rows])
    return path


@pytest.mark.parametrize("end", ["\n", "\r\n"])
@pytest.mark.parametrize("name", NAMES)
def test_names_with_special_characters_are_read(name, end, tmp_path):
    rows = [["grid", name, seed, frames, seed + frames] for seed in (0, 1) for frames in (0, 10)]
    found, left_out = read_table(write(tmp_path / "t.csv", rows, lineterminator=end))
    assert left_out == []
    assert list(found) == [("grid", name)]
    assert len(found["grid", name]) == 2


def test_error_names_the_line_of_the_file(tmp_path):
    rows = [["grid", "two\nlines", 0, 0, 1.0], ["grid", "b", 0, "many", 1.0]]
    with pytest.raises(CheckpointError, match="broken in line 4, expected a task"):
        read_table(write(tmp_path / "t.csv", rows))


def test_table_with_the_old_column_world_is_read(tmp_path):
    text = write(tmp_path / "t.csv", [["grid", "a", 0, 9, 1.0]]).read_text()
    (tmp_path / "t.csv").write_text(text.replace("task", "world"))
    assert list(read_table(tmp_path / "t.csv")[0]) == [("grid", "a")]


def test_references_with_the_old_key_world_are_read(tmp_path):
    (tmp_path / "r.yaml").write_text("- {world: toy/arena, best: 6, source: mine}\n")
    entry = {"task": "toy/arena", "best": 6, "source": "mine"}
    assert read_references(tmp_path / "r.yaml") == [entry]


def test_references_apply_to_a_task_of_a_table(tmp_path):
    """A return of 7 is halfway between 2 and 12."""
    table = write(tmp_path / "t.csv", [["my grid", "a", seed, 9, 7.0] for seed in (0, 1)])
    (tmp_path / "r.yaml").write_text("- {task: my grid, random: 2, best: 12, source: mine}\n")
    [result] = make_report([table], references=tmp_path / "r.yaml").tasks
    assert result.normalized("a") == [0.5, 0.5]


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("best: 1e3, source: mine", "have best='1e3' for 'toy/arena', expected a finite number"),
        ("best: .nan, source: mine", "have best=nan for 'toy/arena', expected a finite number"),
        ("random: true, source: mine", "have random=True for 'toy/arena', expected a finite"),
        ("best: 6, source: 2022", "have source=2022 for 'toy/arena', expected a text"),
        ("best: 6, source: mine, settings: [a]", r"have settings=.* expected settings; change it"),
    ],
)
def test_references_of_wrong_types_are_refused(text, sentence, tmp_path):
    (tmp_path / "r.yaml").write_text(f"- {{task: toy/arena, {text}}}\n")
    with pytest.raises(ConfigError, match=sentence):
        read_references(tmp_path / "r.yaml")


def test_byte_order_mark_is_skipped(tmp_path):
    text = write(tmp_path / "t.csv", [["grid", "a", 0, 9, 1.0]]).read_bytes()
    (tmp_path / "t.csv").write_bytes(codecs.BOM_UTF8 + text)
    assert list(read_table(tmp_path / "t.csv")[0]) == [("grid", "a")]


def test_report_does_not_overwrite_its_input_table(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "t.csv", [["grid", "a", seed, 9, 1.0] for seed in (0, 1)])
    write_report("t.csv", raw="raw.json")
    before = Path("report/evaluations.csv").read_bytes()
    for given, raw in (("report/evaluations.csv", None), (tmp_path / "raw.json", "raw.json")):
        with pytest.raises(ConfigError, match="is read and would be overwritten by the report"):
            write_report([given], raw=raw)
    assert Path("report/evaluations.csv").read_bytes() == before
    write_report("report/evaluations.csv", "other")
    write_report("t.csv")  # an earlier report is replaced


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("a,b,0,9,31,4\n", "has 6 cells in line 2 and 5 columns"),  # 31.4 with a decimal comma
        ("a,b,0,9,31.4\na,b,0\n", "has 3 cells in line 3 and 5 columns"),
        ("a,b,0,9,31.4\na,b,0,19\n", "has 4 cells in line 3 and 5 columns"),
    ],
)
def test_rows_need_a_cell_for_each_column(text, sentence, tmp_path):
    (tmp_path / "t.csv").write_text("task,algorithm,seed,frames,return\n" + text)
    with pytest.raises(CheckpointError, match=sentence):
        read_table(tmp_path / "t.csv")


def test_row_cut_in_an_optional_column_is_refused(tmp_path):
    """Of the line `a,b,0,9,31.4,True` only `a,b,0,9,3` is left."""
    (tmp_path / "t.csv").write_text("task,algorithm,seed,frames,return,finished\na,b,0,9,3")
    with pytest.raises(CheckpointError, match="has 5 cells in line 2 and 6 columns"):
        read_table(tmp_path / "t.csv")


@pytest.mark.parametrize("head", ["task,algorithm,seed,frames,return,return", "task,world"])
def test_columns_that_are_there_twice_are_refused(head, tmp_path):
    head = head if "seed" in head else f"{head},algorithm,seed,frames,return"
    (tmp_path / "t.csv").write_text(f"{head}\na,b,0,9,1,5\n")
    with pytest.raises(CheckpointError, match=r"has two columns '(return|task)'"):
        read_table(tmp_path / "t.csv")


@pytest.mark.parametrize("end", ["", "\n"])
def test_note_says_that_the_last_number_may_be_cut(end, tmp_path):
    """Without its newline, 3 may be what is left of 31.4."""
    rows = "task,algorithm,seed,frames,return\ngrid,a,0,9,1\ngrid,a,1,9,3"
    (tmp_path / "t.csv").write_text(rows + end)
    notes_of = {one.run.seed: one.notes for one in read_table(tmp_path / "t.csv")[0]["grid", "a"]}
    cut = ("ends in line 3 without a newline; the last number may be cut",)
    assert notes_of == {0: (), 1: () if end else cut}
