"""The life cycle of a run: start, signals, checkpoints, resume, and evaluation."""

import fcntl
import json
import os
import pty
import random
import signal
import subprocess
import sys
import termios
import threading
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from runs import assert_equal, assert_same_run, final_state, small_config, table
from torchrl.data.replay_buffers.storages import LazyMemmapStorage, _signal_cleanup_handler

from torchrl_marl.envs.toy import Arena
from torchrl_marl.errors import CheckpointError, ConfigError
from torchrl_marl.recipes import load_config
from torchrl_marl.runs import resume
from torchrl_marl.training import Run, iterate, train, training
from torchrl_marl.training.interruption import Interruption, Terminated, terminable
from torchrl_marl.training.training import Training

pytestmark = pytest.mark.runs

ARENA = {"n_agents": 3, "years": 4, "lives": 2}


def at(folder, **overrides):
    return small_config(folder=str(folder), **{"env.kwargs": ARENA, **overrides})


def arena():
    return Arena(8, max_steps=13, **ARENA)


def stop_at(monkeypatch, iteration, what):
    """Call ``what`` within the step after a number of iterations."""
    plain = Training.step

    def step(self):
        if self.iteration == iteration:
            what()
        return plain(self)

    monkeypatch.setattr(Training, "step", step)


def power_cut():
    raise RuntimeError("power cut")


# ---------------------------------------------------------------------------------------- starts


@pytest.mark.parametrize("world", ["arena", "own", "balance", "trace"])
def test_checkpoint_is_saved_before_the_first_iteration(world, tmp_path, monkeypatch):
    recipe = "vmas_balance_mappo" if world == "balance" else "toy_arena_mappo"
    settings = {"execution": "trace"} if world == "trace" else {}

    def config(name):
        return small_config(recipe, folder=str(tmp_path / name), total_frames=240, **settings)

    def env():
        return arena() if world == "own" else None

    whole = train(config("whole"), env=env())
    with monkeypatch.context() as patch:
        stop_at(patch, 0, power_cut)
        with pytest.raises(RuntimeError, match="power cut"):
            train(config("cut"), env=env())
    assert final_state(tmp_path / "cut")["iteration"] == 0
    torch.rand(3)
    resumed = resume(tmp_path / "cut", env=env())
    assert_same_run(whole.folder, resumed.folder)


@pytest.mark.parametrize("again", ["train", "resume"])
def test_run_that_failed_before_its_first_checkpoint_restarts(again, tmp_path, monkeypatch):
    whole = train(at(tmp_path / "whole"))
    with monkeypatch.context() as patch:
        patch.setattr(Training, "save", lambda self: power_cut())
        with pytest.raises(RuntimeError):
            train(at(tmp_path / "run"))
    left = {path.name for path in (tmp_path / "run").iterdir()}
    assert {"config.yaml", "evaluation.csv"} <= left
    with pytest.raises(CheckpointError, match="no checkpoint yet.*--resume"):
        Run.load(tmp_path / "run")
    run = train(at(tmp_path / "run")) if again == "train" else resume(tmp_path / "run")
    assert_same_run(whole.folder, run.folder)


def test_failed_start_leaves_no_files(tmp_path, monkeypatch):
    monkeypatch.setattr(Training, "open", lambda self: power_cut())
    with pytest.raises(RuntimeError):
        train(at(tmp_path / "run"))
    assert list(tmp_path.iterdir()) == []


def test_finished_run_without_checkpoints_raises(tmp_path):
    run = train(at(tmp_path / "run", total_frames=80))
    for path in (run.folder / "checkpoints").iterdir():
        path.unlink()
    with pytest.raises(CheckpointError, match="its checkpoints are lost"):
        resume(run.folder)
    assert len(table(run.folder / "metrics.csv")) == 1


def test_run_folder_is_locked_during_training(tmp_path):
    config = at(tmp_path / "run")
    iterations = iterate(config)
    next(iterations)
    for use in (lambda: resume(tmp_path / "run"), lambda: train(at(tmp_path / "run"))):
        with pytest.raises((CheckpointError, ConfigError), match="in use|exists"):
            use()
    assert Run.load(tmp_path / "run").frames == 0  # loading needs no lock
    iterations.close()
    assert resume(tmp_path / "run").summary["frames"] == 480
    never_begun = iterate(at(tmp_path / "other"))
    with pytest.raises(CheckpointError, match="in use"):
        train(at(tmp_path / "other"))
    del never_begun
    assert train(at(tmp_path / "other")).frames == 480


def test_frames_beyond_total_frames_are_reported(tmp_path, capsys):
    run = train(at(tmp_path / "run", total_frames=200))
    assert run.summary["frames"] == 240
    said = "total_frames is 200; 240 are trained: 3 times 80."
    assert said in capsys.readouterr().err
    train(at(tmp_path / "other", total_frames=160))
    assert "total_frames" not in capsys.readouterr().err


# -------------------------------------------------------------------------------------- signals


@pytest.fixture(autouse=True)
def without_nohup():
    """The default handler of SIGHUP, which is ignored if the tests run under nohup."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, before)


@pytest.mark.parametrize(("number", "status"), [(signal.SIGTERM, 143), (signal.SIGHUP, 129)])
def test_sigterm_and_sighup_save_and_exit_with_their_status(
    number, status, tmp_path, monkeypatch, capsys
):
    whole = train(at(tmp_path / "whole"))
    before = signal.getsignal(number)

    def twice():  # process managers send it to a process and to its group
        signal.raise_signal(number)
        signal.raise_signal(number)

    with monkeypatch.context() as patch:
        stop_at(patch, 1, twice)
        with pytest.raises(Terminated) as caught:
            train(at(tmp_path / "cut"))
    assert (caught.value.code, caught.value.folder) == (status, tmp_path / "cut")
    assert signal.getsignal(number) == before
    assert f"stopping after this iteration ({number.name})" in capsys.readouterr().err
    assert final_state(tmp_path / "cut")["iteration"] == 2
    assert_same_run(whole.folder, resume(tmp_path / "cut").folder)


def test_sigterm_handler_of_torchrl_does_not_end_a_run(tmp_path, monkeypatch):
    """TorchRL sets it for the rest of the process with the first memory-mapped storage."""
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    LazyMemmapStorage(4).set(range(2), torch.zeros(2))
    signal.signal(signal.SIGTERM, _signal_cleanup_handler)  # set once in a process
    try:
        stop_at(monkeypatch, 1, lambda: signal.raise_signal(signal.SIGTERM))
        with pytest.raises(Terminated):
            train(at(tmp_path / "run"))
        assert signal.getsignal(signal.SIGTERM) is _signal_cleanup_handler
    finally:
        for number, one in zip((signal.SIGINT, signal.SIGTERM), before):
            signal.signal(number, one)
    assert final_state(tmp_path / "run")["iteration"] == 2


def test_user_handler_of_sigterm_is_kept(tmp_path, monkeypatch):
    seen = []
    before = signal.signal(signal.SIGTERM, lambda number, frame: seen.append(number))
    try:
        stop_at(monkeypatch, 1, lambda: signal.raise_signal(signal.SIGTERM))
        assert train(at(tmp_path / "run")).frames == 480
    finally:
        signal.signal(signal.SIGTERM, before)
    assert seen == [signal.SIGTERM]


def test_nohup_is_kept(tmp_path, monkeypatch):
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        stop_at(monkeypatch, 1, lambda: signal.raise_signal(signal.SIGHUP))
        assert train(at(tmp_path / "run")).frames == 480
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_second_signal_while_saving_waits_for_the_checkpoint(number, tmp_path, monkeypatch):
    plain = training.save_checkpoint

    def save(folder, iteration, state, keep):
        if iteration == 2:
            signal.raise_signal(number)
            signal.raise_signal(number)
        return plain(folder, iteration, state, keep)

    monkeypatch.setattr(training, "save_checkpoint", save)
    with pytest.raises((KeyboardInterrupt, Terminated)):
        train(at(tmp_path / "run", **{"checkpoint.every_iterations": 2}))
    assert final_state(tmp_path / "run")["iteration"] == 2
    assert len(table(tmp_path / "run" / "metrics.csv")) == 2


def test_signals_between_iterations_go_to_the_caller(tmp_path):
    handlers = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    iterations = iterate(at(tmp_path / "run"))
    next(iterations)
    assert signal.getsignal(signal.SIGINT) == handlers[0]
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
        with pytest.raises(Terminated):
            signal.raise_signal(signal.SIGTERM)
    finally:
        signal.signal(signal.SIGINT, before)
    next(iterations)  # the caller handled both and continues
    del iterations
    assert [signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM)] == handlers
    assert final_state(tmp_path / "run")["iteration"] == 2


def test_ctrl_c_while_closing_an_unfinished_run_is_raised(tmp_path):
    interruption = Interruption()
    with interruption, interruption.unbroken():
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt, match="run"):
        interruption.handle_signal(tmp_path / "run")
    assert not interruption.stop_requested
    with interruption, pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)


def test_interruption_contexts_may_exit_in_any_order():
    handlers = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    left_open, current = Interruption(), Interruption()
    left_open.__enter__()
    with current:
        left_open.__exit__()  # such as by the garbage collector
        signal.raise_signal(signal.SIGTERM)
    assert current.stop_requested and not left_open.stop_requested
    assert [signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM)] == handlers


def test_handler_that_outlives_its_context_has_the_default_effect():
    """TorchRL, for example, may restore the handler that it found at any time."""
    before = signal.getsignal(signal.SIGINT)
    try:
        with Interruption():
            found = signal.getsignal(signal.SIGINT)
        signal.signal(signal.SIGINT, found)
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    finally:
        signal.signal(signal.SIGINT, before)


def test_signals_after_another_thread_exits_the_last_context(tmp_path):
    handler = signal.getsignal(signal.SIGTERM)
    interruption = Interruption()
    with terminable():
        interruption.__enter__()
        thread = threading.Thread(target=interruption.__exit__)
        thread.start()
        thread.join()
        with pytest.raises(Terminated):
            signal.raise_signal(signal.SIGTERM)
    assert signal.getsignal(signal.SIGTERM) == handler


SUPPORT = Path(__file__).parents[1] / "support"
OPEN = """
import sys
from runs import small_config
from torchrl_marl.training import iterate
iterations = iterate(small_config(folder=sys.argv[1]))
next(iterations), next(iterations)
"""


# Modules such as JAX keep variables of a script until Python clears all modules.
HELD = "import threading; threading.current_thread().held = iterations"


@pytest.mark.parametrize("held", ["", HELD])
def test_script_that_leaves_a_run_open_saves_it(tmp_path, held):
    command = [sys.executable, "-c", OPEN + held, str(tmp_path / "run")]
    done = subprocess.run(command, capture_output=True, text=True, cwd=SUPPORT)
    assert (done.returncode, done.stderr) == (0, "")
    assert final_state(tmp_path / "run")["iteration"] == 2


def test_sigterm_ends_the_command_line_with_a_checkpoint(tmp_path):
    folder = tmp_path / "run"
    settings = [f"folder={folder}", "total_frames=6400000", "checkpoint.every_iterations=0"]
    settings.append("execution=eager")  # auto would choose compile for so many frames
    train = [sys.executable, "-m", "torchrl_marl", "train", "toy_arena_mappo"]
    with subprocess.Popen([*train, *settings], stderr=subprocess.PIPE, text=True) as process:
        while not (folder / "metrics.csv").exists() and process.poll() is None:
            time.sleep(0.05)
        process.terminate()
        _, err = process.communicate(timeout=120)
    assert process.returncode == 143
    assert f"stopped and saved; resume with: torchrl-marl train --resume {folder}" in err
    done = final_state(folder)["iteration"]
    assert done == len(table(folder / "metrics.csv")) >= 1


def test_closed_terminal_saves_and_ends_a_run(tmp_path):
    """After a hang-up, all output to the terminal fails."""
    folder = tmp_path / "run"
    command = f"toy_arena_mappo folder={folder} total_frames=6400000 execution=eager"
    train = [sys.executable, "-m", "torchrl_marl", "train", *command.split()]
    terminal, inner = pty.openpty()
    with subprocess.Popen(
        train,
        **dict.fromkeys(("stdin", "stdout", "stderr"), inner),
        start_new_session=True,
        preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),  # the terminal of the process
    ) as process:
        os.close(inner)
        while not (folder / "metrics.csv").exists() and process.poll() is None:
            time.sleep(0.05)
        os.close(terminal)
        try:
            assert process.wait(timeout=120) == 129
        finally:
            process.kill()
    done = final_state(folder)["iteration"]
    assert done == len(table(folder / "metrics.csv")) >= 1


# ------------------------------------------------------------------------ checkpoints by time


def test_checkpoints_every_minutes(tmp_path, monkeypatch):
    saved, now = [], [0.0]
    plain = training.save_checkpoint

    def save(folder, iteration, state, keep):
        saved.append(iteration)
        return plain(folder, iteration, state, keep)

    monkeypatch.setattr(training, "save_checkpoint", save)
    monkeypatch.setattr(training.time, "monotonic", lambda: now[0])
    config = at(tmp_path / "run", **{"checkpoint.every_minutes": 1.0})
    for _ in iterate(config):
        now[0] += 25  # late after three iterations
    assert saved == [0, 4, 6]


# ------------------------------------------------------------------------ resume with more frames


def test_resume_with_more_frames_equals_one_run(tmp_path, capsys):
    whole = train(at(tmp_path / "whole"))
    run = train(at(tmp_path / "run", total_frames=240))
    capsys.readouterr()
    longer = resume(run.folder, total_frames=480)
    assert "continues from 240 to 480 frames" in capsys.readouterr().err
    assert load_config(run.folder / "config.yaml").total_frames == 480
    assert table(whole.folder / "metrics.csv") == table(longer.folder / "metrics.csv")
    one, other = final_state(whole.folder), final_state(longer.folder)
    assert_equal(one["learners"], other["learners"])
    assert_equal(one["collector"], other["collector"])
    assert longer.summary["return_after"] == whole.summary["return_after"]
    summary = json.loads((run.folder / "summary.json").read_text())
    assert summary["frames"] == 480


def test_resume_of_a_finished_run_with_fewer_frames_raises(tmp_path, capsys):
    run = train(at(tmp_path / "run", total_frames=160))
    before = (run.folder / "config.yaml").read_text()
    assert resume(run.folder).frames == 160
    err = capsys.readouterr().err
    assert "is finished, with 160 frames; add total_frames=320 to --resume to train further." in err
    with pytest.raises(ConfigError, match="total_frames is 80, but the run has 160 already"):
        resume(run.folder, total_frames=80)
    assert (run.folder / "config.yaml").read_text() == before
    assert resume(run.folder, total_frames=240).frames == 240  # a refusal keeps no lock


# ------------------------------------------------------------------------------------- evaluation


class Bare(Arena):
    """Has no snapshots."""

    def snapshot(self):
        from torchrl_marl.errors import SimulatorStateError

        raise SimulatorStateError("no snapshot")


@pytest.mark.parametrize("given", ["the run's", "env=", "recipe's"])
def test_evaluation_within_iterate_does_not_affect_the_run(given, tmp_path):
    finals = []
    for name in ("plain", "evaluated"):
        env = None if given == "recipe's" else arena()
        for iteration in iterate(at(tmp_path / name), env=env):
            if name == "evaluated":
                settings = {"env": env} if given == "env=" else {}
                result = iteration.run.evaluate(episodes=8, deterministic=False, **settings)
                assert result["episodes"] == 8
        finals.append(tmp_path / name)
    assert_same_run(*finals)


def test_evaluation_in_a_training_env_without_snapshot_raises(tmp_path):
    env = Bare(8, max_steps=13, **ARENA)
    for iteration in iterate(at(tmp_path / "run", total_frames=160), env=env):
        for settings in ({}, {"env": env}):
            with pytest.raises(ConfigError, match="Bare is being trained.*evaluate.env=...."):
                iteration.run.evaluate(**settings)
        assert iteration.run.evaluate(episodes=3, env=arena())["episodes"] == 3
    assert iteration.run.evaluate(episodes=3)["episodes"] == 3  # training is over


def draws():
    return torch.rand(3).tolist(), np.random.rand(3).tolist(), random.random()


def test_loading_and_evaluating_use_no_global_random_numbers(tmp_path):
    run = train(at(tmp_path / "run", total_frames=80))
    found = []
    for load in (False, True):
        torch.manual_seed(0)
        np.random.seed(0)
        random.seed(0)
        if load:
            Run.load(run.folder).evaluate(episodes=2)
        found.append(draws())
    assert found[0] == found[1]


def test_evaluate_command_records_its_results(tmp_path, capsys):
    from torchrl_marl.apps.cli import main as cli

    run = train(at(tmp_path / "run", total_frames=160, **{"evaluation.deterministic": False}))
    command = ["evaluate", str(run.folder), "--episodes", "8"]
    for more in (["--stochastic"], ["--stochastic", "--seed", "7"], []):
        assert cli.main([*command, *more]) == 0
    text = (run.folder / "evaluations.jsonl").read_text()
    own, seven, zero, likeliest = map(json.loads, text.splitlines())
    assert [row["deterministic"] for row in (own, zero, seven)] == [False] * 3
    assert likeliest["deterministic"] is True
    assert {**own, "time": ""} == {**zero, "time": ""}
    assert own["return_mean"] != seven["return_mean"]
    assert own["return_mean"] == run.evaluate(8)["return_mean"]
    assert likeliest["return_mean"] == run.evaluate(8, deterministic=True)["return_mean"]
    assert (own["seed"], seven["seed"], own["frames"]) == (0, 7, 160)
    evaluations = table(run.folder / "evaluation.csv")
    resume(run.folder, total_frames=240)
    assert table(run.folder / "evaluation.csv")[:2] == evaluations
    assert (run.folder / "evaluations.jsonl").read_text() == text
    (run.folder / "evaluations.jsonl").unlink()
    (run.folder / "evaluations.jsonl").mkdir()
    capsys.readouterr()
    with pytest.warns(UserWarning, match="the result is not recorded"):
        Run.load(run.folder).evaluate(8, record=True)


def test_refused_resume_changes_no_settings(tmp_path):
    run = train(at(tmp_path / "run", total_frames=80))
    before = (run.folder / "config.yaml").read_bytes()
    (run.folder / "evaluation.csv").write_text("other,table\n1,2\n")
    with pytest.raises(CheckpointError, match=r"evaluation\.csv"):
        resume(run.folder, total_frames=160)
    assert (run.folder / "config.yaml").read_bytes() == before
