"""Runs that are killed or stopped before their first checkpoint, and their resume."""

import functools
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from leagues import settings_of as league_settings
from runs import assert_same_run, small_config, table

from torchrl_marl.apps.cli import main as cli
from torchrl_marl.apps.console import print_stopped
from torchrl_marl.recipes import load_config
from torchrl_marl.runs import resume
from torchrl_marl.training import train, training
from torchrl_marl.training.folder import RunFolder
from torchrl_marl.training.interruption import Terminated
from torchrl_marl.training.trainer import iterate
from torchrl_marl.training.training import Training

pytestmark = pytest.mark.processes

SUPPORT = Path(__file__).parents[1] / "support"
EVOLVING = {
    "evolution.method": "pbt",
    "evolution.every_frames": 80,
    "evolution.least_episodes": 0,
    "population.size": 2,
    "population.vary": {"learner.lr": {"low": 1e-4, "high": 1e-2}},
}
# A script that kills itself at a given place, for each kind of run.
KILLED = """
import os, sys
sys.path.insert(0, sys.argv[1])
from test_early_end import config_of
from torchrl_marl.training import population, train, training
folder, kind, where = sys.argv[2:]

def end(*args, **kwargs):
    if where == "checkpoint":
        os.makedirs(folder + "/checkpoints", exist_ok=True)
        open(folder + "/checkpoints/iteration_000000.pt.part", "wb").write(b"half")
    os._exit(9)

if where == "checkpoint":
    training.save_checkpoint = end
else:
    training.Training.open = end
    training.build_learners = population.build_population = end
train(config_of(kind, folder))
"""


def config_of(kind, folder):
    more = {
        "population": {"population.size": 2},
        "evolution": EVOLVING,
        "shards": {"distributed.collectors": 2, "execution": "eager"},
    }
    if kind == "league":
        return load_config("toy_kuhn_ippo", league_settings(folder))
    return small_config(folder=str(folder), total_frames=240, **more.get(kind, {}))


def tables(folder):
    """The tables of a run and of its members, without times."""
    return {
        str(path.relative_to(folder)): table(path)
        for path in sorted(Path(folder).glob("**/*.csv"))
        if path.parent.name != "league"
    }


@functools.cache
def whole(kind):
    folder = Path(tempfile.mkdtemp()) / "run"
    train(config_of(kind, folder))
    return folder


@pytest.mark.parametrize("where", ["building", "checkpoint"])
@pytest.mark.parametrize("kind", ["single", "population", "evolution", "league", "shards"])
def test_run_killed_before_its_first_checkpoint_restarts(kind, where, tmp_path, capsys):
    folder = tmp_path / "run"
    script = [sys.executable, "-c", KILLED, str(Path(__file__).parent), str(folder), kind, where]
    done = subprocess.run(script, capture_output=True, text=True, cwd=SUPPORT)
    assert done.returncode == 9, done.stderr
    assert {".lock", "config.yaml"} <= {path.name for path in folder.iterdir()}
    resume(folder)
    assert "has no checkpoint yet, and starts over" in capsys.readouterr().err
    assert tables(folder) == tables(whole(kind))
    assert not list(folder.rglob("*.part"))
    for own in ("", *(path.name for path in folder.glob("seed*"))):
        if (folder / own / "evaluation.csv").exists():
            assert_same_run(whole(kind) / own, folder / own)


def test_partial_config_is_replaced_by_a_new_run(tmp_path):
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / ".lock").write_text("1 there")
    (folder / "config.yaml.part").write_text("seed: ")
    train(config_of("single", folder))
    assert not (folder / "config.yaml.part").exists()


# --------------------------------------------------------------------- immediate stops


def twice():
    signal.raise_signal(signal.SIGINT)
    signal.raise_signal(signal.SIGINT)


@pytest.fixture
def interruptible():
    """Ctrl-C interrupts, also if a shell started the tests in the background."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("interruptible")
@pytest.mark.parametrize("when", ["learning", "measuring", "building"])
def test_second_ctrl_c_prints_the_resume_command(when, tmp_path, monkeypatch, capsys):
    """With a checkpoint, before the first one, and before the run has files."""
    folder = tmp_path / "run"
    resumed = f"torchrl-marl train --resume {folder}"
    if when == "learning":
        monkeypatch.setattr(Training, "step", lambda self: twice())
        said = f"stopped at once; resume from the last checkpoint with: {resumed}"
    elif when == "measuring":
        monkeypatch.setattr(Training, "evaluate", lambda self: twice())
        said = f"stopped before the first checkpoint; start again with: {resumed}"
    else:  # one is enough
        monkeypatch.setattr(training, "build_learners", lambda *a, **k: twice())
        said = "stopped; nothing was saved, so start again."
    configs = "torchrl_marl.apps.cli.main._configs_of_seeds"
    monkeypatch.setattr(configs, lambda *a: [config_of("", folder)])
    assert cli.main(["train", "toy_arena_mappo", f"folder={folder}"]) == 130
    assert f"torchrl-marl: {said}\n" in capsys.readouterr().err
    assert folder.exists() == (when != "building")
    monkeypatch.undo()
    if folder.exists():
        RunFolder(folder).release()
        assert_same_run(whole("single"), resume(folder).folder)


def test_sigterm_during_setup_prints_the_resume_command(tmp_path, monkeypatch, capsys):
    folder = tmp_path / "run"
    for _ in iterate(config_of("single", folder)):
        break
    monkeypatch.setattr(
        training, "build_learners", lambda *a, **k: (_ for _ in ()).throw(Terminated())
    )
    assert cli.main(["train", "--resume", str(folder)]) == 143
    assert "stopped at once; resume from the last checkpoint with: " in capsys.readouterr().err
    RunFolder(folder).release()


@pytest.mark.parametrize(
    ("command", "saved", "said"),
    [
        ("suite", True, "stopped and saved; resume with the same command and --resume."),
        ("sweep", True, "stopped and saved; resume with the same command and --resume."),
        ("tune", False, "stopped at once; resume with the same command."),
        ("train", True, "stopped and saved; resume with: torchrl-marl train --resume run"),
    ],
)
def test_message_after_a_stop_names_the_resume_command(command, saved, said, capsys):
    print_stopped(Path("run"), saved, command=command)
    assert capsys.readouterr().err == f"\ntorchrl-marl: {said}\n"
