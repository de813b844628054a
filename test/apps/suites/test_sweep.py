"""Sweeps: the runs of the grid, their results, and launchers."""

import csv
import io
import json
import logging
import os
import re
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from torchrl_marl.apps.cli.main import main
from torchrl_marl.apps.jobs.slurm import make_executor
from torchrl_marl.apps.suites.board import Result, results_table
from torchrl_marl.apps.suites.folder import check_folder
from torchrl_marl.apps.suites.sweep import best_combination, make_sweep, parse_grid, run_sweep
from torchrl_marl.errors import ConfigError
from torchrl_marl.recipes import load_config
from torchrl_marl.settings import to_yaml
from torchrl_marl.training.training import Training

RECIPE = "toy_matrix_game_mappo"
# An import here would configure logging, which a run on Slurm avoids.
needs_submitit = pytest.mark.skipif(find_spec("submitit") is None, reason="needs submitit")
SHORT = {"total_frames": 512, "evaluation": {"both": False}}


def texts(*given):
    """Arguments of a sweep in this process."""
    return ["sweep", RECIPE, *given, "total_frames=512", "evaluation.both=false", "--jobs", "0"]


def test_parse_grid():
    grid, settings = parse_grid(
        ["learner.lr=1e-3,1e-2", "learner.actor.num_cells=[8,8],[16]", "seed_of=7", "a.b='x,y',z"]
    )
    assert grid == {
        "learner.lr": [0.001, 0.01],
        "learner.actor.num_cells": [[8, 8], [16]],
        "a.b": ["x,y", "z"],
    }
    assert settings == {"seed_of": 7}


def test_runs_are_ordered_by_seed_and_have_their_settings():
    grid = {"learner.lr": [1e-3, 1e-2], "learner.entropy_coeff": [0.0, 0.1]}
    runs = make_sweep(RECIPE, grid, seeds="1..2", settings={"total_frames": 2048}).runs
    found = [(r.seed, r.config.learner.lr, r.config.learner.entropy_coeff) for r in runs]
    once = [(1e-3, 0.0), (1e-3, 0.1), (1e-2, 0.0), (1e-2, 0.1)]
    assert found == [(seed, *own) for seed in (1, 2) for own in once]
    assert {run.config.total_frames for run in runs} == {2048}
    assert runs[0].place == Path(RECIPE, "lr=0.001_entropy_coeff=0.0", "seed1")
    assert len({run.place for run in runs}) == 8


def test_names_distinguish_actor_and_critic_settings():
    grid = {"learner.actor.num_cells": [[8], [16, 16]], "learner.critic.num_cells": [[8], [32]]}
    names = [run.algorithm for run in make_sweep(RECIPE, grid, seeds=1).runs]
    assert names[0] == "actor.num_cells=8_critic.num_cells=8"
    assert names[3] == "actor.num_cells=16,16_critic.num_cells=32"


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ([], "the grid is empty, expected a setting with several values"),
        (["learner.lr=1e-3"], "the grid is empty"),
        (["learner.lr=1e-3,,1e-2"], "empty value; drop a comma"),
        (["learner.lr=1e-3,0.001"], "learner.lr is 0.001, 0.001, expected different values"),
        (["learner.lr=1,0.1,1.0"], "learner.lr is 1, 0.1, 1.0, expected different values"),
        (["learner.lr=1e-3,1e-2", "learner.lr=1"], "learner.lr is given twice"),
        (["learner.lt=1e-3,1e-2"], "unknown setting 'learner.lt'"),
        (["learner.lr=1e-3,fast"], "learner.lr is 'fast', expected"),
        (["seed=0,1"], "seed cannot be given.*--seeds"),
        (["population.size=1,2"], "population.size cannot be given"),
    ],
)
def test_invalid_grids_are_refused_before_a_run_starts(given, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=message):
        grid, settings = parse_grid(given)
        run_sweep(RECIPE, grid, jobs=0, **settings)
    assert not list(tmp_path.iterdir())


def test_best_combination_has_the_highest_mean():
    plan = make_sweep(RECIPE, {"learner.lr": [1e-3, 1e-2, 1e-1]}, seeds=2)
    returns = {"lr=0.001": [1.0, 3.0], "lr=0.01": [2.0, 2.5], "lr=0.1": [None, None]}
    results = []
    for run in plan.runs:
        reached = returns[run.algorithm][run.seed]
        summary = {} if reached is None else {"return_after": reached, "frames": 1}
        results.append(Result(run, Path(), "failed" if reached is None else "finished", summary))
    assert best_combination(results) == ("lr=0.01", 2.25)
    assert best_combination(results[2::3]) is None
    # A combination with a diverged seed is not the best; the table shows that seed.
    results[1].summary["return_after"] = None
    assert best_combination(results)[0] == "lr=0.001"
    row = next(line for line in results_table(results).splitlines() if "lr=0.01 " in line)
    assert row.split()[2:7] == ["2", "of", "2", "nan", "2.5"]


class TestCommand:
    pytestmark = pytest.mark.runs

    def test_sweep_trains_resumes_and_reports(self, tmp_path, monkeypatch, capsys):
        monkeypatch.chdir(tmp_path)
        grid = ["learner.lr=1e-3,1e-2"]
        assert main(texts(*grid, "--seeds", "0", "--dry-run")) == 0
        assert not list(tmp_path.iterdir())
        assert main(texts(*grid, "--seeds", "0")) == 0
        printed = capsys.readouterr().out
        assert re.search(r"^best: lr=[0-9.]+, return", printed, re.M)
        out = tmp_path / f"sweep_{RECIPE}"
        before = {path: path.stat().st_mtime_ns for path in out.rglob("summary.json")}
        assert len(before) == 2
        for more in ([], ["--dry-run"]):
            assert main(texts(*grid, "--seeds", "0", *more)) == 2  # the folder is taken
            assert "add --resume" in capsys.readouterr().err
        other = [*grid, "learner.gamma=0.5", "--seeds", "0", "--resume", "--dry-run"]
        assert main(texts(*other)) == 2
        assert "learner.gamma" in capsys.readouterr().err
        assert main(texts(*grid, "--seeds", "0,1", "--resume")) == 0
        after = {path: path.stat().st_mtime_ns for path in out.rglob("summary.json")}
        assert len(after) == 4 and before.items() <= after.items()
        with (out / "results.csv").open(encoding="utf-8") as file:
            rows = [(row["algorithm"], row["seed"], row["state"]) for row in csv.DictReader(file)]
        assert rows == [
            (f"lr={lr}", str(seed), "finished") for seed in (0, 1) for lr in (0.001, 0.01)
        ]

    def test_failed_run_does_not_stop_the_others(self, tmp_path, capsys):
        """An invalid payoff is only detected when the environment is built."""
        out = str(tmp_path / "out")
        given = ["env.kwargs.payoff=coordination,[[1,2],[3]]", "--seeds", "0", "--out", out]
        code = main(texts(*given))
        error = capsys.readouterr().err
        summaries = list(Path(out).rglob("summary.json"))
        assert code == 2 and len(summaries) == 1
        assert "1 of 2 runs did not finish" in error

    def test_run_of_a_sweep_equals_a_single_run(self, tmp_path):
        from torchrl_marl import train

        (found,) = run_sweep(
            RECIPE,
            {"learner.lr": [1e-2, 3e-3]},
            seeds=[3],
            jobs=0,
            out=tmp_path / "sweep",
            log=lambda text: None,
            **SHORT,
        )[:1]
        alone = train(RECIPE, folder=tmp_path / "alone", seed=3, learner={"lr": 1e-2}, **SHORT)
        summary = json.loads((found.folder / "summary.json").read_text())
        assert summary["return_after"] == alone.summary["return_after"]


class TestSlurm:
    """With submitit, whose cluster ``local`` runs jobs as processes of this machine."""

    pytestmark = [pytest.mark.processes, needs_submitit]

    def given(self, tmp_path, *more):
        out = ["--out", str(tmp_path / "out"), "--seeds", "0", "--launcher", "slurm"]
        return [*texts(*more)[:-2], "--jobs", "2", *out]

    def test_slurm_jobs_train_and_fail_independently(self, tmp_path, capsys):
        grid = "env.kwargs.payoff=coordination,[[1,2],[3]]"
        assert main([*self.given(tmp_path, grid), "--slurm", "cluster=local"]) == 2
        shown = capsys.readouterr()
        assert "1 of 2 runs did not finish" in shown.err
        assert len(list((tmp_path / "out").rglob("summary.json"))) == 1
        assert list((tmp_path / "out" / "logs").glob("*_log.out"))
        failed = [line for line in shown.out.splitlines() if ": failed: " in line]
        assert len(failed) == 1 and "payoff" in failed[0]

    @pytest.mark.parametrize(
        "option",
        [
            [],
            ["--slurm", "cluster=local", "--slurm", "rooms=3"],
            ["--slurm", "cluster=local", "--slurm", "timeout_min=soon"],
        ],
    )
    def test_slurm_options_are_checked_before_writing(self, option, tmp_path, capsys):
        assert main([*self.given(tmp_path, "learner.lr=1e-3,1e-2"), *option]) == 2
        assert "Slurm cannot be used with these options" in capsys.readouterr().err
        assert not list(tmp_path.iterdir())


def test_slurm_options_require_the_slurm_launcher(tmp_path, capsys):
    given = texts("learner.lr=1e-3,1e-2", "--out", str(tmp_path / "out"))
    assert main([*given, "--slurm", "timeout_min=60"]) == 2
    assert "slurm has timeout_min, but launcher is 'processes'" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


@needs_submitit
def test_logging_handlers_of_other_libraries_stay_open(tmp_path, monkeypatch):
    """The logging configuration of submitit would close them."""
    for name in [name for name in sys.modules if name.partition(".")[0] == "submitit"]:
        monkeypatch.delitem(sys.modules, name)
    closed, handler = [], logging.StreamHandler(io.StringIO())
    monkeypatch.setattr(handler, "close", lambda: closed.append(True))
    make_executor(tmp_path, {"cluster": "local"})
    assert not closed and "SUBMITIT_LOG_LEVEL" not in os.environ


@pytest.mark.ray
def test_ray_launcher_resumes_started_runs(tmp_path, monkeypatch):
    pytest.importorskip("ray")
    given = {"seeds": 1, "out": tmp_path / "out", "log": lambda text: None, **SHORT}
    grid = {"learner.lr": [1e-3, 1e-2]}

    def fail(self):
        raise RuntimeError("the power is off")

    with monkeypatch.context() as patch:
        patch.setattr(Training, "step", fail)
        results = run_sweep(RECIPE, grid, jobs=0, **given)
    assert [result.state for result in results] == ["failed", "failed"]
    results = run_sweep(RECIPE, grid, launcher="ray", resume=True, **given)
    assert [result.state for result in results] == ["finished", "finished"]


@pytest.mark.parametrize(
    ("given", "written"),
    [
        ({"init_from": "first"}, {"init_from": "first@512"}),
        ({"init_from": "first"}, {"init_from": "first/heavy@512"}),  # its last stage
        (
            {"learner.algorithm": "bc", "data.folder": "recorded"},
            {"data.folder": str(Path("recorded").absolute())},
        ),
    ],
)
def test_settings_that_a_run_completes_do_not_prevent_resuming(tmp_path, given, written):
    plan = make_sweep(RECIPE, {"learner.lr": [1e-3, 1e-2]}, seeds=1, settings=given)
    for run in plan.runs:
        (tmp_path / run.place).mkdir(parents=True)
        completed = load_config(run.config, written)
        (tmp_path / run.place / "config.yaml").write_text(to_yaml(completed))
    check_folder(tmp_path, plan, resume=True)


def test_unknown_launcher_raises(tmp_path):
    with pytest.raises(ConfigError, match="launcher is 'slrum', did you mean 'slurm'"):
        run_sweep(RECIPE, {"learner.lr": [1e-3, 1e-2]}, out=tmp_path / "x", launcher="slrum")


@pytest.mark.parametrize("setting", [{"seed": 4}, {"folder": "x"}, {"population.size": 4}])
def test_settings_that_the_sweep_controls_are_refused(setting):
    """``seed=4`` would be ignored silently, and all runs would share the folder."""
    with pytest.raises(ConfigError, match="the sweep sets it for each run"):
        make_sweep("toy_arena_mappo", {"learner.lr": [1e-3, 1e-2]}, settings=setting)


def test_brackets_within_quotes_are_literal():
    assert parse_grid(["env.name='[a',b"])[0] == {"env.name": ["[a", "b"]}
