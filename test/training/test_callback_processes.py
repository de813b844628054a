"""Callbacks on the command line, on several ranks, and in runs that have none."""

import csv
import os
import subprocess
import sys
from pathlib import Path

import pytest
from rank_runs import arena_config
from ranked import on_ranks
from runs import table

import torchrl_marl
from torchrl_marl import Callback
from torchrl_marl.runs import resume
from torchrl_marl.training.checkpoint import latest_checkpoint, load_checkpoint

pytestmark = pytest.mark.processes

OWN = """
from torchrl_marl import Callback

class Stopping(Callback):
    def on_update(self, control, batch, metrics):
        if control.iteration == 2:
            control.stop("two updates")
        return {"own/iteration": control.iteration}

class Broken(Callback):
    def on_update(self, control, batch, metrics):
        raise RuntimeError("a bug")
"""
SMALL = [
    *("total_frames=320", "frames_per_batch=80", "env.num_envs=8", "threads=1"),
    *("learner.minibatch_size=40", "evaluation.episodes=2", "logging.progress=false"),
    *("execution=eager", "checkpoint.every_iterations=1"),
]


def command(folder, *words):
    """Exit status, output and errors of the command line, in a folder."""
    path = f"{Path(torchrl_marl.__file__).parents[1]}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"
    done = subprocess.run(
        [sys.executable, "-m", "torchrl_marl", *words],
        env={**os.environ, "PYTHONPATH": path},
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=240,
    )
    return done.returncode, done.stdout, done.stderr


def test_callbacks_on_the_command_line(tmp_path):
    (tmp_path / "own.py").write_text(OWN)
    words = ["train", "toy_arena_mappo", "folder=run", *SMALL]
    code, _, errors = command(tmp_path, *words, "callbacks=own:Stopping")
    assert code == 0 and "ends after 160 frames: Stopping: two updates." in errors
    with (tmp_path / "run/metrics.csv").open(newline="") as file:
        assert [row["own/iteration"] for row in csv.DictReader(file)] == ["1", "2"]
    assert '"stopped": "Stopping: two updates"' in (tmp_path / "run/summary.json").read_text()
    words[2] = "folder=broken"
    code, _, errors = command(tmp_path, *words, "callbacks=[own.py:Broken]")
    assert code == 2 and errors.strip().count("\n") == 0
    assert (
        "torchrl-marl: error: callback Broken failed in on_update after 80 frames: RuntimeError: "
        "a bug (own.py, line 12); fix it, and resume the run from iteration_000000.pt: "
        "torchrl-marl train --resume broken." in errors
    )
    (tmp_path / "own.py").write_text(OWN.replace('raise RuntimeError("a bug")', "pass"))
    assert command(tmp_path, "train", "--resume", "broken")[0] == 0


def test_run_without_callbacks_imports_no_callback_modules(tmp_path):
    text = (
        "import sys, torchrl_marl\n"
        f"torchrl_marl.train('toy_arena_mappo', folder={str(tmp_path / 'run')!r}, "
        "total_frames=80, frames_per_batch=80, env={'num_envs': 8}, execution='eager', "
        "learner={'minibatch_size': 40}, evaluation={'episodes': 2}, logging={'progress': False})\n"
        "known = [name for name in sys.modules if name.startswith('torchrl_marl.training.c')]\n"
        "print('torchrl_marl.training.config' in known, [x for x in known if 'callback' in x or "
        "'changes' in x])"
    )
    path = str(Path(torchrl_marl.__file__).parents[1])
    done = subprocess.run(
        [sys.executable, "-c", text],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
    )
    assert done.stdout.splitlines()[-1] == "True []", done.stderr


class OnTheFirst(Callback):
    """Counts its calls, changes the learning rate and stops the run."""

    def __init__(self):
        self.calls = 0

    def on_batch(self, control, batch):
        self.calls += 1
        if control.iteration == 1:
            control.change("lr", 1e-4)

    def on_update(self, control, batch, metrics):
        if control.iteration == 3:
            control.stop("three updates")
        return {"own/calls": self.calls, "own/ended": metrics["episodes"]}

    def state_dict(self):
        return {"calls": self.calls}

    def load_state_dict(self, state):
        self.calls = state["calls"]


def run_of_a_rank(folder):
    own = OnTheFirst()
    run = torchrl_marl.train(arena_config(folder / "run", total_frames=400), callbacks=[own])
    found = own.calls, run.frames, run.summary["stopped"]
    run = resume(folder / "run", callbacks=[OnTheFirst()], total_frames=480)
    return (*found, run.frames)


def test_callbacks_run_on_first_rank_and_others_follow(tmp_path):
    """Also after resuming."""
    reason = "OnTheFirst: three updates"
    found = on_ranks(2, run_of_a_rank, tmp_path, joined=False)
    assert found == [(3, 240, reason, 480), (0, 240, reason, 480)]
    state = load_checkpoint(latest_checkpoint(tmp_path / "run"))
    assert state["callbacks"]["own"][0]["calls"] == state["iteration"] == 6
    assert state["learners"][0]["_extra_state"]["optimizer"]["param_groups"][0]["lr"] == 1e-4
    # If a rank had not followed, its networks and the summed metrics would differ.
    alone = torchrl_marl.train(
        arena_config(tmp_path / "alone", total_frames=240), callbacks=[OnTheFirst()]
    )
    rows, others = (table(folder / "metrics.csv") for folder in (tmp_path / "run", alone.folder))
    for row, other in zip(rows, others, strict=False):
        learned = [name for name in row if name.endswith(("/loss_critic", "/lr"))]
        for name in (*learned, "own/calls", "own/ended"):
            assert float(row[name]) == pytest.approx(float(other[name]), rel=1e-3)
