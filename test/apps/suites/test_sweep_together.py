"""Sweeps as one population: members are the runs of the grid; refused settings."""

import csv
import re

import pytest
import torch

from torchrl_marl.apps.cli.main import main
from torchrl_marl.apps.comparison import find_run_folders
from torchrl_marl.apps.reports.grouping import find_runs
from torchrl_marl.apps.suites.sweep import make_sweep, run_sweep
from torchrl_marl.errors import ConfigError
from torchrl_marl.learners.build import build_learners
from torchrl_marl.recipes import load_config
from torchrl_marl.runtime.random_state import RandomState
from torchrl_marl.training.checkpoint import load_latest
from torchrl_marl.training.config import PopulationConfig, read_run_config, seed_folders
from torchrl_marl.training.trainer import start_training
from torchrl_marl.training.training import Training

RECIPE, ENVS = "toy_arena_mappo", 4
SMALL = {
    "total_frames": 120,
    "frames_per_batch": 40,
    "execution": "eager",
    "env": {"num_envs": ENVS, "kwargs": {"n_agents": 2, "years": 2}},
    "learner": {
        "minibatch_size": 40,
        "num_epochs": 2,
        "actor": {"num_cells": [8]},
        "critic": {"num_cells": [8]},
    },
    "evaluation": {"episodes": 6},
    "checkpoint": {"every_iterations": 1},
}
GRID = {"learner.lr": [1e-3, 4e-3], "learner.gamma": [0.9, 0.99]}
TIMES = ("seconds", "frames_per_second")


def sweep(out, seeds=2, grid=GRID, **how):
    quiet = {"jobs": 0, "log": lambda text: None, "together": True}
    return run_sweep(RECIPE, grid, seeds=seeds, out=out, **quiet | how, **SMALL)


def table(path):
    with path.open(newline="") as file:
        return [{k: v for k, v in row.items() if k not in TIMES} for row in csv.DictReader(file)]


@pytest.mark.runs
def test_members_have_the_folders_and_settings_of_a_sweep(tmp_path):
    results = sweep(tmp_path / "out", seeds=[3, 0])
    plan = make_sweep(RECIPE, GRID, seeds=[3, 0], settings=SMALL)
    assert [result.state for result in results] == ["finished"] * 8
    for result, run in zip(results, plan.runs, strict=True):
        config = read_run_config(tmp_path / "out" / run.place)
        own, alone = config.learner, run.config.learner
        assert (own.lr, own.gamma, config.seed) == (alone.lr, alone.gamma, run.seed)
        assert own == alone and config.population == PopulationConfig()
        assert result.folder == tmp_path / "out" / run.place
    with (tmp_path / "out" / "results.csv").open(encoding="utf-8") as file:
        assert [row["folder"] for row in csv.DictReader(file)] == [
            run.place.as_posix() for run in plan.runs
        ]
    whole = tmp_path / "out" / RECIPE
    found = [folder.relative_to(whole).as_posix() for folder in seed_folders(whole)]
    assert found[:3] == ["lr=0.001_gamma=0.9/seed0", "lr=0.001_gamma=0.9/seed3", found[2]]
    assert len(found) == 8 and find_run_folders(whole) == seed_folders(whole)
    runs, left_out = find_runs(tmp_path / "out")
    assert len(runs) == 8 and not left_out
    one = find_run_folders(whole / "lr=0.004_gamma=0.9")
    assert [folder.name for folder in one] == ["seed0", "seed3"]


def test_member_learns_as_its_separate_run(tmp_path):
    """Each learns from its part of the envs, with the networks of its seed and combination."""
    plan = make_sweep(RECIPE, GRID, seeds=[3, 0], settings=SMALL)
    with pytest.MonkeyPatch.context() as patch:
        started = []

        def begin(self):
            started.append(self.config)
            raise ConfigError("only its settings are needed here.")

        patch.setattr(Training, "begin", begin)
        sweep(tmp_path / "out", seeds=[3, 0])
    (config,) = started
    training = start_training(load_config(config, {"folder": str(tmp_path / "again")}), None)
    training.begin()
    alone = []
    for run in plan.runs:
        with RandomState(run.seed).active():
            alone += build_learners(training.team, run.config.learner, device=training.device)
    for _ in range(3):
        row = training.step()
        for i, one in enumerate(alone):
            one.learn(row.batch[i * ENVS : (i + 1) * ENVS].clone())
    training.save()
    for run, one in zip(plan.runs, alone, strict=True):
        place = run.place.relative_to(RECIPE)
        state = load_latest(tmp_path / "again" / place)[1]["learners"][0]
        for name, value in one.state_dict().items():
            if isinstance(value, torch.Tensor) and value.is_floating_point():
                torch.testing.assert_close(state[name], value, rtol=0, atol=1e-6)
    training.close()


@pytest.mark.runs
def test_sweep_resumes_exactly_with_more_runs(tmp_path):
    whole = sweep(tmp_path / "whole")
    with pytest.MonkeyPatch.context() as patch:
        step = Training.step

        def fail(self):
            if self.iteration == 2:
                raise RuntimeError("the power is off")
            return step(self)

        patch.setattr(Training, "step", fail)
        half = sweep(tmp_path / "half")
    assert [one.state for one in half] == ["failed"] * 8 and "power" in half[0].error
    lines = []
    again = sweep(tmp_path / "half", seeds=3, resume=True, together=False, log=lines.append)
    assert [one.state for one in again] == ["finished"] * 12
    assert lines[0] == "trained alone, since the program of the others has begun: 4 runs"
    for one, other in zip(whole, again[:8], strict=True):
        for name in ("metrics.csv", "evaluation.csv"):
            assert table(one.folder / name) == table(other.folder / name)
        first, second = (load_latest(run.folder)[1]["learners"][0] for run in (one, other))
        for name, value in first.items():
            if isinstance(value, torch.Tensor):
                assert torch.equal(value, second[name]), name


def test_separate_runs_are_not_joined_by_a_population(tmp_path):
    grid = {"learner.lr": [1e-3, 4e-3]}
    sweep(tmp_path / "out", seeds=1, grid=grid, together=False)
    with pytest.raises(ConfigError, match="seed0' was trained alone, .* leave --together out"):
        sweep(tmp_path / "out", seeds=2, grid=grid, resume=True)


@pytest.mark.parametrize(
    ("method", "entry"),
    [("save", "return_before"), ("save", "return_after"), ("save_members", "return_after")],
)
def test_killed_sweep_resumes_without_missing_checkpoints(tmp_path, monkeypatch, method, entry):
    """It is killed after an evaluation, and before the checkpoint that follows."""
    save = getattr(Training, method)

    def killed(self, *state):
        if entry in self.run.summary:
            raise RuntimeError("killed")
        save(self, *state)

    with monkeypatch.context() as patch:
        patch.setattr(Training, method, killed)
        assert {one.state for one in sweep(tmp_path / "out", seeds=1)} == {"failed"}
    for one in sweep(tmp_path / "out", seeds=1, resume=True):
        rows = table(one.folder / "evaluation.csv")
        assert [row["iteration"] for row in rows] == ["0", "3"]
        assert "return_after" in load_latest(one.folder)[1]["summary"]


def test_sweep_with_callbacks_resumes(tmp_path, monkeypatch):
    text = "from torchrl_marl import Callback\n\n\nclass Nothing(Callback):\n    pass\n"
    (tmp_path / "calls.py").write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    own = {"grid": {"learner.lr": [1e-3, 1e-2]}, "seeds": 1}
    settings = {**SMALL, "callbacks": ["calls:Nothing"]}
    for resume in (False, True):
        (first, _) = run_sweep(
            RECIPE, **own, out=tmp_path / "out", resume=resume, jobs=0, together=True, **settings
        )
        assert first.finished


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (
            ["toy_arena_mappo", "learner.actor.num_cells=[8],[16]"],
            "learner.actor.num_cells cannot differ between runs of one program, since only "
            "learner.lr, .* may; leave --together out",
        ),
        (
            ["toy_matrix_game_happo", "learner.lr=1e-3,1e-2"],
            "learner.algorithm is 'happo', whose runs cannot be one program",
        ),
        (
            ["toy_arena_mappo", "learner.lr=1e-3,1e-2", "groups.agents.lr=1e-4"],
            "learner.lr cannot differ .*, since groups.agents overrides it",
        ),
        (
            ["toy_arena_mappo", "learner.lr=1e-3,1e-2", "stop_at_return=3"],
            "--together makes the runs members of a population: stop_at_return is 3",
        ),
        (
            ["toy_speaker_listener_mappo_pbt", "learner.lr=1e-3,1e-2"],
            "evolution.method is 'pbt', but population.folders is given",
        ),
    ],
)
def test_settings_that_exclude_together_are_refused(given, words, tmp_path, capsys):
    for more in ([], ["--dry-run"]):
        assert main(["sweep", *given, "--together", "--out", str(tmp_path / "out"), *more]) == 2
        assert re.search(words, capsys.readouterr().err)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("folders", "words"),
    [
        (["a/seed0"], "population.folders has 1 different names, expected 2"),
        (["a/seed0", "a/seed0"], "has 1 different names, expected 2"),
        (["../seed0", "a/seed0"], "has '../seed0', expected a name such as seed3"),
        (["/seed0", "a/seed0"], "has '/seed0'"),
        (["a/b/seed0", "a/seed0"], "has 'a/b/seed0'"),
        (["a/first", "a/seed0"], "has 'a/first'"),
    ],
)
def test_invalid_population_folders_are_refused(folders, words):
    with pytest.raises(ConfigError, match=words):
        load_config(RECIPE, {"population": {"size": 2, "folders": folders}})
