"""Background compile: its result is used, it ends with its parent, and it may fail."""

import dataclasses
import signal
import subprocess
import sys
import time

import pytest
from torch._inductor import config

from torchrl_marl.capture import stored
from torchrl_marl.recipes import load_config
from torchrl_marl.settings import to_yaml
from torchrl_marl.training import background_compile
from torchrl_marl.training.background_compile import BackgroundCompile
from torchrl_marl.training.folder import RunFolder
from torchrl_marl.training.training import Training

pytestmark = pytest.mark.processes

SETTINGS = {
    "execution": "compile",
    "total_frames": 16,
    "frames_per_batch": 8,
    "env": {"num_envs": 2, "max_steps": 4, "kwargs": {"n_agents": 2}},
    "evaluation": {"episodes": 1},
    "learner": {
        "minibatch_size": 8,
        "num_epochs": 1,
        "actor": {"num_cells": [4]},
        "critic": {"num_cells": [4]},
        "loss_critic_type": "l2",
        "max_grad_norm": None,
        "normalize_advantage": "none",
        "value_norm": False,
    },
}


class World:
    """An environment that can be captured."""

    captured = None


@pytest.fixture
def many_cores(monkeypatch, tmp_path):
    monkeypatch.setenv("TORCHINDUCTOR_COMPILE_THREADS", "2")
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "cache"))
    # Skip the four compilations that test for vector instructions.
    monkeypatch.setenv("TORCHINDUCTOR_VEC_ISA_OK", "1")
    with config.patch(compile_threads=2):
        yield


@pytest.fixture
def commands(monkeypatch):
    """Folders for which a background compile was started."""
    found = []
    monkeypatch.setattr(background_compile, "_start_process", lambda folder: found.append(folder))
    return found


def config_of(folder, **changed):
    settings = {**SETTINGS, **changed}
    return load_config("vmas_balance_mappo", {**settings, "folder": str(folder)})


def test_background_compile_starts_only_for_compiled_library_envs(tmp_path, many_cores, commands):
    BackgroundCompile(tmp_path, config_of(tmp_path / "run"), World())
    assert commands == [tmp_path]
    for changed in ({"execution": "eager"}, {"execution": "trace"}):
        BackgroundCompile(tmp_path, config_of(tmp_path / "run", **changed), World())
    BackgroundCompile(tmp_path, config_of(tmp_path / "run"), object())
    own = config_of(tmp_path / "run")
    own = dataclasses.replace(own, env=dataclasses.replace(own.env, library="own"))
    BackgroundCompile(tmp_path, own, World())
    assert commands == [tmp_path]


def test_no_background_compile_on_one_core(tmp_path, many_cores, commands):
    with config.patch(compile_threads=1):
        BackgroundCompile(tmp_path, config_of(tmp_path / "run"), World())
    assert not commands


def test_cached_updates_are_not_compiled_again(tmp_path, many_cores, commands):
    BackgroundCompile(tmp_path, config_of(tmp_path / "run"), World()).learned()
    same = config_of(tmp_path / "other", seed=3, total_frames=80)
    BackgroundCompile(tmp_path, same, World())
    assert len(commands) == 1
    other = config_of(tmp_path / "run", learner={**SETTINGS["learner"], "minibatch_size": 4})
    BackgroundCompile(tmp_path, other, World())
    assert len(commands) == 2


def test_background_compiled_update_is_used(tmp_path, many_cores, monkeypatch):
    training = Training(config_of(tmp_path / "run"), folder_of(tmp_path / "run"), None)
    second = BackgroundCompile(training.folder, training.config, training.env)
    process = second.process
    second.wait()
    assert process.returncode == 0
    monkeypatch.setattr(stored, "_compile_graph", pytest.fail)
    training.collector.execution = "trace"  # the step is not tested here
    training.learn_once()
    training._run_folder.release()


def folder_of(path):
    """A run folder with its settings."""
    folder = RunFolder.new(config_of(path))
    (folder.path / "config.yaml").write_text(to_yaml(config_of(path)))
    return folder


def test_failed_background_compile_is_ignored(tmp_path, many_cores):
    second = BackgroundCompile(tmp_path / "nothing", config_of(tmp_path / "run"), World())
    process = second.process
    second.wait()
    assert process.returncode == 1 and second.process is None
    second.close()


def test_background_process_ends_with_its_parent(tmp_path):
    script = (
        "import sys, time\n"
        "from pathlib import Path\n"
        "from torchrl_marl.training import background_compile\n"
        "print(background_compile._start_process(Path(sys.argv[1])).pid, flush=True)\n"
        "time.sleep(60)\n"
    )
    folder = folder_of(tmp_path / "run")
    command = [sys.executable, "-c", script, str(folder.path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as first:
        second = int(first.stdout.readline())
        assert is_running(second)
        first.send_signal(signal.SIGKILL)
    for _ in range(200):
        if not is_running(second):
            break
        time.sleep(0.1)
    assert not is_running(second)
    folder.release()


def is_running(pid):
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False
