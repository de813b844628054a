"""Progress bars of runs, on a terminal and in a log file."""

from __future__ import annotations

import io
import sys

import pytest

from torchrl_marl.training import messages
from torchrl_marl.training.messages import ProgressBar


class Output(io.StringIO):
    """A stderr that is a terminal or a file."""

    def __init__(self, terminal: bool) -> None:
        super().__init__()
        self.terminal = terminal

    def isatty(self) -> bool:
        return self.terminal


@pytest.fixture
def clock(monkeypatch):
    """A clock that the test moves, in place of tqdm's."""
    now = [100.0]
    monkeypatch.setattr(messages, "_HAS_WIDGET", False)
    monkeypatch.setattr("tqdm.std.time", lambda: now[0])
    return now


def _written(clock, monkeypatch, terminal: bool) -> str:
    """Moves a bar by 100 iterations of half a second, and returns what it writes."""
    output = Output(terminal)
    monkeypatch.setattr(sys, "stderr", output)
    bar = ProgressBar("seed 0", 1000, 0)
    for iteration in range(1, 101):
        clock[0] += 0.5
        bar.move_to(10 * iteration, f"return {iteration}")
    bar.close()
    return output.getvalue()


def test_a_terminal_shows_every_iteration(clock, monkeypatch):
    written = _written(clock, monkeypatch, terminal=True)
    assert all(f"return {iteration}]" in written for iteration in range(1, 101))


def test_a_log_file_has_a_state_every_five_seconds(clock, monkeypatch):
    written = _written(clock, monkeypatch, terminal=False)
    states = [state for state in written.split("\r") if "return" in state]
    assert 10 <= len(states) <= 12  # 50 seconds
    assert "1.00k/1.00k" in states[-1]
    assert "return 100]" in states[-1]


def test_slow_work_is_shown_at_once(clock, monkeypatch):
    output = Output(terminal=False)
    monkeypatch.setattr(sys, "stderr", output)
    bar = ProgressBar("seed 0", 1000, 0)
    bar.show("compiling")
    assert "compiling]" in output.getvalue()
    bar.close()


def test_a_hidden_bar_writes_nothing(monkeypatch):
    output = Output(terminal=True)
    monkeypatch.setattr(sys, "stderr", output)
    bar = ProgressBar("seed 0", 1000, 0, shows=False)
    bar.move_to(10, "return 1")
    bar.show("compiling")
    bar.close()
    assert output.getvalue() == ""
