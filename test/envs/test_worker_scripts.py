"""Workers of scripts need no main guard and leave nothing behind, however the script ends."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

pytestmark = pytest.mark.processes

SCRIPT = """
import os, sys, signal
import numpy as np
from torchrl_marl.envs.processes.copies import RowLayout
from torchrl_marl.envs.processes.workers import Workers

class Count:
    def begin(self, row, seed):
        row["x"][...] = 0
    def play(self, row):
        assert "torch" not in sys.modules and "__main__" in sys.modules
        row["x"][...] += 1
        if {hangs} and row["x"] == 2:
            while True:
                pass
    def close(self):
        print("closed", flush=True)

print("once", flush=True)
workers = Workers(Count, RowLayout({{"x": ((), "int64")}}), 4, 2)
workers.begin()
workers.play()
print(workers.rows["x"].tolist(), *[w._process.pid for w in workers._workers], flush=True)
{end}
"""


def run_script(folder, end, hangs=False):
    """Runs a script without a main guard."""
    path = Path(folder) / "script.py"
    path.write_text(SCRIPT.format(end=end, hangs=hangs), encoding="utf-8")
    started = [sys.executable, "-W", "error", str(path)]
    return subprocess.run(started, capture_output=True, text=True, timeout=60)


def alive(process):
    """Whether the process is running."""
    try:
        state = Path(f"/proc/{process}/stat").read_text(encoding="utf-8")
    except OSError:
        return False
    return state.rpartition(")")[2].split()[0] != "Z"


def segments():
    """Names of the shared memory segments of this package."""
    folder = Path("/dev/shm")
    return {path.name for path in folder.glob("*torchrl*")} if folder.exists() else set()


def test_script_needs_no_main_guard_and_no_close(tmp_path):
    ran = run_script(tmp_path, end="")
    assert ran.stderr == "" and ran.returncode == 0
    assert ran.stdout.count("once") == 1 and ran.stdout.count("closed") == 4
    assert "[1, 1, 1, 1]" in ran.stdout
    assert not segments()


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="asks /proc")
@pytest.mark.parametrize("hangs", [False, True])
def test_killed_parent_leaves_no_processes_or_shared_memory(tmp_path, hangs):
    end = f"workers.play() if {False} else None\nos.kill(os.getpid(), signal.SIGKILL)"
    if hangs:
        end = (
            "import threading\n"
            "threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGKILL)).start()\n"
            "workers.play()"
        )
    ran = run_script(tmp_path, end, hangs)
    assert ran.returncode == -signal.SIGKILL
    line = next(line for line in ran.stdout.splitlines() if line.startswith("["))
    processes = line.rpartition("]")[2].split()
    last = time.monotonic() + 15.0
    while any(map(alive, processes)) and time.monotonic() < last:
        time.sleep(0.1)
    assert len(processes) == 2 and not any(map(alive, processes))
    assert not segments() and "Error" not in ran.stderr
