"""Progress bars of runs, on a terminal and in a log file."""

from __future__ import annotations

import io
import sys

import pytest

import torchrl_marl
from torchrl_marl.training import messages
from torchrl_marl.training.messages import progress_bar


class Output(io.StringIO):
    """A stderr that is a terminal or a file."""

    def __init__(self, terminal: bool) -> None:
        super().__init__()
        self.terminal = terminal

    def isatty(self) -> bool:
        return self.terminal


@pytest.fixture
def clock(monkeypatch):
    """A clock that the test advances instead of that of tqdm."""
    now = [100.0]
    monkeypatch.setattr(messages, "_HAS_WIDGET", False)
    monkeypatch.setattr("tqdm.std.time", lambda: now[0])
    return now


def _written(clock, monkeypatch, terminal: bool) -> str:
    """Advance a bar by 100 iterations of half a second and return its output."""
    output = Output(terminal)
    monkeypatch.setattr(sys, "stderr", output)
    bar = progress_bar("seed 0", 1000, 0)
    for iteration in range(1, 101):
        clock[0] += 0.5
        bar.set_postfix_str(f"return {iteration}", refresh=False)
        bar.update(10)
    bar.close()
    return output.getvalue()


def test_progress_bar_on_a_terminal_shows_every_iteration(clock, monkeypatch):
    written = _written(clock, monkeypatch, terminal=True)
    assert all(f"return {iteration}]" in written for iteration in range(1, 101))


def test_progress_bar_in_a_log_file_updates_every_five_seconds(clock, monkeypatch):
    written = _written(clock, monkeypatch, terminal=False)
    states = [state for state in written.split("\r") if "return" in state]
    assert 10 <= len(states) <= 12  # 50 seconds
    assert "1.00k/1.00k" in states[-1]
    assert "return 100]" in states[-1]


def test_hidden_progress_bar_writes_nothing(monkeypatch):
    output = Output(terminal=True)
    monkeypatch.setattr(sys, "stderr", output)
    bar = progress_bar("seed 0", 1000, 0, enabled=False)
    bar.set_postfix_str("compiling")
    bar.update(10)
    bar.close()
    assert output.getvalue() == ""


def test_run_writes_few_progress_updates_to_a_log_file(monkeypatch, capsys, tmp_path):
    sizes = {"total_frames": 16_000, "frames_per_batch": 80, "env": {"num_envs": 8}}
    sizes |= {"learner": {"minibatch_size": 80, "num_epochs": 1}, "evaluation": {"episodes": 0}}
    run = torchrl_marl.train("toy_arena_mappo", folder=tmp_path / "run", **sizes)
    states = capsys.readouterr().err.split("\r")
    assert len((run.folder / "metrics.csv").read_text().splitlines()) == 201
    assert len(states) < 100
    assert "100%" in states[-1]
