"""The two tiers: CI knows every part of the second tier, and reaches all of them in time."""

import importlib.util
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SPEC = importlib.util.spec_from_file_location("second_tier", ROOT / ".ci" / "second_tier.py")
second_tier = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(second_tier)
PARTS = set(second_tier.TOUCHED_BY)
START = second_tier.COLLECTION


@pytest.fixture
def cost(monkeypatch):
    """Every part takes 100 seconds, and has one test file named like it."""
    seconds = dict.fromkeys(PARTS, 100.0)
    monkeypatch.setattr(second_tier, "seconds_of_parts", lambda: seconds)
    files = {part: {f"test/test_{part}.py"} for part in PARTS}
    monkeypatch.setattr(second_tier, "files_of_parts", lambda: files)
    return seconds


def test_every_marker_is_a_part():
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    markers = settings["tool"]["pytest"]["ini_options"]["markers"]
    assert {x.partition(":")[0] for x in markers if ": part" in x} == PARTS


def test_parts_touched_by_a_change_run_first(cost):
    record = dict.fromkeys(PARTS, 0) | {"ray": 9, "tutorials": 9, "browser": 9}
    changed = ["torchrl_marl/collectors/ray.py", "test/test_browser.py"]
    assert second_tier.choose_parts(record, changed, START + 2 * 130.0) == ["browser", "ray"]


def test_parts_not_run_for_longest_run_next(cost):
    record = {part: 10 + i for i, part in enumerate(sorted(PARTS))} | {"wheel": 1, "pages": 2}
    assert second_tier.choose_parts(record, [], START + 3 * 130.0) == ["wheel", "pages", "browser"]


def test_part_over_the_time_budget_is_skipped(cost):
    cost["browser"] = 1000.0
    assert "browser" not in second_tier.choose_parts(dict.fromkeys(PARTS, 0), [], START + 260.0)


def test_every_part_runs_within_five_landings(cost):
    """Each landing has a fifth of the total time, and touches the same part."""
    record, ran = dict.fromkeys(PARTS, 0), set()
    for landing in range(1, 6):
        seconds = START + 130.0 * (len(PARTS) // 5 + 2)
        chosen = second_tier.choose_parts(record, ["docs/index.md"], seconds)
        record |= dict.fromkeys(chosen, landing)
        ran |= set(chosen)
    assert ran == PARTS


def test_record_round_trips(tmp_path):
    path = tmp_path / "record.csv"
    path.write_text("part,commits,day\nray,3,2026-01-01\n", encoding="utf-8")
    second_tier.write_record(path, ["pages", "wheel"], 7)
    assert second_tier.read_record(path) == dict.fromkeys(PARTS, 0) | {
        "ray": 3,
        "pages": 7,
        "wheel": 7,
    }


def test_durations_name_tests_that_exist():
    for place in {row["test"] for row in second_tier.durations()}:
        file, *names = place.split("::")
        text = (ROOT / file).read_text(encoding="utf-8")
        known = not names or names[0] in text  # methods may be inherited
        assert known or file.startswith("torchrl_marl"), place
