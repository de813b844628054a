"""Each "coming from" page has a program of that library, an environment for it, and ours."""

import importlib
from pathlib import Path

ROOT = Path(__file__).parents[1]


def test_coming_from_pages_have_programs_and_environments(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    run = importlib.import_module("side_by_side")
    pages = {file.stem for file in (ROOT / "docs" / "coming_from").glob("*.md")}
    programs = {
        file.name.removesuffix("_program.py")
        for file in (ROOT / "benchmarks" / "coming_from").glob("*_program.py")
    }
    assert set(run.PEERS) == pages == programs
    for name in run.PEERS:
        assert "torchrl_marl.train(" in run.our_program(name)
