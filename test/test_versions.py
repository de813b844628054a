"""``.ci/versions.py``, which tests versions of Python and torch: commands, records, messages."""

import importlib.util
import runpy
from pathlib import Path
from subprocess import CompletedProcess

import pytest

ROOT = Path(__file__).parents[1]
if not (ROOT / ".ci").is_dir():
    pytest.skip("this is no checkout", allow_module_level=True)
SPEC = importlib.util.spec_from_file_location("versions", ROOT / ".ci" / "versions.py")
versions = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(versions)


def pair(tmp_path, **ends):
    """A pair with fake commands; a word in the command selects the exit status and stderr."""
    made = versions.Pair("3.12", "2.13.0", tmp_path, tmp_path / "package.whl")

    def shell(environment, command):
        (end,) = (end for word, end in ends.items() if word in command)
        return CompletedProcess(command, end[0], "", end[1])

    made.shell = shell
    return made


def test_every_extra_has_commands(monkeypatch):
    monkeypatch.setattr("setuptools.setup", lambda **kwargs: None)
    extras = runpy.run_path(str(ROOT / "setup.py"))["EXTRAS"]
    assert set(versions.EXTRAS) == set(extras) - {"docs", "test", "all"}


def test_missing_extra_must_be_named_in_the_last_line(tmp_path):
    sentence = "torchrl-marl: error: optuna is not installed; run: pip install '.[tune]' in x\n"
    pair(tmp_path, tune=(2, f"a warning\n{sentence}")).refuses("tune")
    for end in ((0, ""), (1, f"Traceback (most recent call last)\n{sentence}"), (2, "error: no\n")):
        with pytest.raises(versions.Failed, match=r"without \[tune\]"):
            pair(tmp_path, tune=end).refuses("tune")
    with pytest.raises(versions.Failed, match=r"without \[plot\].*\[tune\]"):
        pair(tmp_path, plot=(2, sentence)).refuses("plot")
    pair(tmp_path, ARGCOMPLETE=(1, "")).refuses("completion")


def test_failure_is_recorded_and_the_next_part_is_tested(tmp_path, monkeypatch):
    monkeypatch.setattr(versions, "RECORD", tmp_path / "versions.csv")
    no_compiler = (2, "a warning\ntorchrl-marl: error: no compiler\n")
    made = pair(tmp_path, compile=no_compiler, run=(0, ""), tune=(0, ""))
    monkeypatch.setattr(made, "make_base", lambda: made.folder.mkdir())
    monkeypatch.setattr(made, "make_extra", lambda extra: made.folder)
    monkeypatch.setattr(versions.shutil, "rmtree", lambda folder: None)
    versions.test_pair(made, ["compile", "tune"], keep=False)
    found = {key[2]: row["result"] for key, row in versions.read_record().items()}
    (command,) = versions.COMPILE
    assert found == {
        "compile": f"failed: `{command}`: torchrl-marl: error: no compiler",
        "tune": "passed",
    }


def test_recorded_results_are_sorted_and_replaced(tmp_path, monkeypatch):
    monkeypatch.setattr(versions, "RECORD", tmp_path / "versions.csv")
    for python, part, result in (
        ("3.12", "vmas", "failed: x"),
        ("3.12", "core", "passed"),
        ("3.11", "export", "passed"),
        ("3.12", "vmas", "passed"),
    ):
        versions.record(python, "2.13.0", part, result)
    found = [(*key, row["result"]) for key, row in versions.read_record().items()]
    assert found == [
        ("3.11", "2.13.0", "export", "passed"),
        ("3.12", "2.13.0", "core", "passed"),
        ("3.12", "2.13.0", "vmas", "passed"),
    ]


def test_paths_of_this_machine_are_not_recorded(monkeypatch):
    monkeypatch.setattr(versions.tempfile, "gettempdir", lambda: "/somewhere")
    assert versions.last_line("x\nOSError: '/somewhere/a/b' is full\nbye\n") == (
        "OSError: '/a/b' is full"
    )
    assert versions.last_line("") == ""
