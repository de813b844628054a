"""``benchmarks/growth.py``: slopes, reused points, limits, and a tiny run of each sweep."""

import importlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[1] / "benchmarks"


@pytest.fixture
def growth(monkeypatch):
    monkeypatch.syspath_prepend(FOLDER)
    return importlib.import_module("growth")


@pytest.fixture
def slope(growth):
    return importlib.import_module("growth_tables").slope


@pytest.fixture
def arguments(growth, tmp_path):
    """Parsed arguments of one sweep with two sizes and a file of points."""

    def made(*words):
        file = ["--results", str(tmp_path / "points.jsonl"), "--memory", "8"]
        args = growth.parse_args(["--sweeps", "members", "--members", "4,2", *file, *words])
        args.code = "abc1234"
        return args

    return made


class Runs:
    """Replaces the measuring processes: each call returns the next result."""

    def __init__(self, *results):
        self.results, self.points = list(results), []

    def __call__(self, point, cache):
        self.points.append((point["scenario"], point["size"]))
        return self.results.pop(0) if self.results else {"values": {"operations": point["size"]}}


@pytest.mark.parametrize(
    ("sizes", "values", "expected"),
    [
        ([1, 2, 4, 8], [3, 6, 12, 24], 1.0),
        ([1, 2, 4, 8], [7, 7, 7, 7], 0.0),
        ([10, 100], [5, 500], 2.0),
        ([1, 2, 4, 8], [100, 90, 16, 64], 2.0),  # the lower half does not count
        ([8, 1, 4, 2], [64, 100, 16, 90], 2.0),  # in any order
        ([1, 4, 16, 64, 256], [9, 9, 1, 2, 4], 0.5),  # three of five points
        ([1, 2, 4, 8], [5, 10, None, 0], 1.0),  # None and 0 do not count
        ([1, 2, 4], [1, 1, 2], 1.0),  # two of three points
        ([1, 2, 4, 8, 16], [1, 1, 1, 2, 2], 0.5),  # a fit: x -1, 0, 1 and y 0, 1, 1
    ],
)
def test_slope_is_fitted_to_the_upper_half_of_sizes(slope, sizes, values, expected):
    assert slope(sizes, values) == pytest.approx(expected)


@pytest.mark.parametrize(("sizes", "values"), [([4], [2]), ([], []), ([1, 2], [None, 3])])
def test_slope_of_fewer_than_two_points_is_none(slope, sizes, values):
    assert slope(sizes, values) is None


def test_measured_points_are_reused(growth, arguments):
    args, runs = arguments(), Runs()
    first = growth.measure("members", growth.Points(args.results), args, runs)
    again = growth.measure("members", growth.Points(args.results), args, runs)
    assert runs.points == [("balance", 2), ("balance", 4)]
    assert first == again
    assert [result["values"]["operations"] for _, result in again] == [2, 4]


def test_interrupted_sweep_resumes(growth, arguments):
    args, runs = arguments(), Runs()
    growth.measure("members", growth.Points(args.results), args, runs)
    lines = args.results.read_text().splitlines(keepends=True)
    args.results.write_text(lines[0] + lines[1][:20])  # stopped while it wrote
    growth.measure("members", growth.Points(args.results), args, runs)
    assert runs.points[2:] == [("balance", 4)]
    growth.measure("members", growth.Points(args.results), args, runs)
    assert len(runs.points) == 3


@pytest.mark.parametrize("changed", ["code", "threads", "seconds", "fresh"])
def test_points_of_other_code_or_settings_are_not_reused(growth, arguments, changed):
    args, runs = arguments(), Runs()
    growth.measure("members", growth.Points(args.results), args, runs)
    setattr(
        args, changed, {"code": "def5678", "threads": 2, "seconds": 3.0, "fresh": True}[changed]
    )
    growth.measure("members", growth.Points(args.results, args.fresh), args, runs)
    assert len(runs.points) == 4


@pytest.mark.parametrize(
    ("failed", "option", "n_runs"),
    [
        ("time", ["--limit", "600"], 2),
        ("time", ["--limit", "601"], 3),
        ("memory", ["--memory", "8"], 2),
        ("memory", ["--memory", "9"], 3),
        ("error", [], 3),
    ],
)
def test_failed_point_is_repeated_with_higher_limits(growth, arguments, failed, option, n_runs):
    args, runs = arguments(), Runs({"failed": failed, "message": "no"})
    growth.measure("members", growth.Points(args.results), args, runs)
    args = arguments(*option)
    growth.measure("members", growth.Points(args.results), args, runs)
    assert len(runs.points) == n_runs


def test_failed_point_is_a_row_of_the_table(growth, arguments):
    args = arguments("--members", "1,2,4,8")
    grown = [{"values": {"operations": 5 * n, "kernels": 3}} for n in (1, 2, 4)]
    runs = Runs(*grown, {"failed": "time"})
    found = growth.measure("members", growth.Points(args.results), args, runs)
    sweep, lines = growth.SWEEPS["members"], {"balance": found}
    text = growth.table(sweep, found, growth.measures_with_values(sweep, lines))
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines()]
    assert rows[0] == ["members", "operations", "kernels"]
    assert rows[2:] == [
        *(["1", "5", "3"], ["2", "10", "3"], ["4", "20", "3"]),
        ["8", "not within 600 s", "-"],
        ["slope", "1.00", "0.00"],
    ]


@pytest.mark.parametrize(
    ("program", "expected"),
    [
        ("import time; time.sleep(60)", {"failed": "time"}),
        ("import os, signal; os.kill(os.getpid(), signal.SIGKILL)", {"failed": "memory"}),
        ("print('{\"values\": {}}')", {"values": {}}),
        ("raise ValueError('no')", {"failed": "error", "message": "ValueError: no"}),
    ],
)
def test_outcome_of_a_process_becomes_a_result(growth, monkeypatch, tmp_path, program, expected):
    script = tmp_path / "point.py"
    script.write_text(program)
    monkeypatch.setattr(growth, "POINTS", script)
    limit = 1 if "sleep" in program else 60
    assert growth.run_point({"threads": 1, "limit": limit}, str(tmp_path)) == expected


def test_terminated_script_terminates_its_point(tmp_path):
    """A point writes its process id and waits; the script gets SIGTERM as from ``kill``."""
    said = tmp_path / "id"
    (tmp_path / "point.py").write_text(
        f"import os, pathlib, time; pathlib.Path({str(said)!r}).write_text(str(os.getpid()))\n"
        "time.sleep(60)"
    )
    program = (
        "import pathlib, sys\n"
        f"sys.path.insert(0, {str(FOLDER)!r})\n"
        "import growth\n"
        f"growth.POINTS = pathlib.Path({str(tmp_path / 'point.py')!r})\n"
        "growth.main()"
    )
    words = ["--sweeps", "rows", "--results", str(tmp_path / "points.jsonl")]
    script = subprocess.Popen([sys.executable, "-c", program, *words])
    wait_until(lambda: said.exists() and said.read_text())
    script.terminate()
    assert script.wait(60) == 128 + signal.SIGTERM
    with pytest.raises(ProcessLookupError):
        os.kill(int(said.read_text()), 0)


def wait_until(condition):
    for _ in range(1200):
        if condition():
            return
        time.sleep(0.05)
    raise AssertionError("not within a minute")


def test_point_over_the_memory_limit_fails_with_memory(growth, tmp_path):
    """A limit of 2 GiB, and a buffer of 8 GiB."""
    point = {"sweep": "rows", "scenario": "in memory", "size": 20_000_000, "quick": True}
    settings = {"threads": 1, "seconds": 0.1, "execution": "trace", "limit": 60, "memory": 2}
    assert growth.run_point({**point, **settings}, str(tmp_path)) == {"failed": "memory"}


@pytest.mark.processes
@pytest.mark.parametrize(
    ("sweep", "scenario", "measures"),
    [
        ("agents", "simple_spread", {"operations", "sampling"}),
        ("envs", "balance", {"operations", "sampling", "training"}),
        ("groups", "navigation", {"operations", "sampling", "training"}),
        ("members", "balance", {"operations", "sampling", "training"}),
        ("rows", "memory-mapped", {"fill", "add", "sample", "stored"}),
    ],
)
def test_tiny_sweep_measures_draws_and_prints(
    growth, monkeypatch, tmp_path, capsys, sweep, scenario, measures
):
    file = tmp_path / "points.jsonl"
    words = ["growth.py", "--quick", "--sweeps", sweep, "--scenarios", scenario]
    monkeypatch.setattr(sys, "argv", [*words, "--results", str(file)])
    growth.main()
    [line] = file.read_text().splitlines()
    values = json.loads(line)["result"]["values"]
    assert all(values[name] > 0 for name in {*measures, "memory"})
    assert "| slope" in capsys.readouterr().out
    growth.draw(
        growth.SWEEPS[sweep],
        {scenario: [(json.loads(line)["point"], {"values": values})]},
        tmp_path / "growth.png",
    )
    assert (tmp_path / "growth.png").stat().st_size > 0
