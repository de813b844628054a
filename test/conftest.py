"""Runs tests on one thread, signs runs with a key of the tests' own, and marks slow tests."""

import atexit
import gc
import os
import shutil
import tempfile
from pathlib import Path

import pytest
import torch

# What JAX's environments compile runs a few steps only.
os.environ.setdefault(
    "XLA_FLAGS",
    "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true "
    "--xla_cpu_use_fusion_emitters=false",
)


def own_folder():
    """A new folder that goes with the process."""
    folder = tempfile.mkdtemp()
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder


# The key with which runs are signed is the tests' own.
os.environ["XDG_STATE_HOME"] = own_folder()

# What JAX compiles is shared by all processes of the tests; pytest's first one makes the folder.
if "JAX_COMPILATION_CACHE_DIR" not in os.environ:
    os.environ["JAX_COMPILATION_CACHE_DIR"] = own_folder()
    os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
    os.environ["JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES"] = "-1"

# What calls a compiled graph's kernels runs a few times only.
os.environ.setdefault("AOT_INDUCTOR_COMPILE_WRAPPER_OPT_LEVEL", "O0")

# Tests run side by side, so that a second process for compiling takes the time of another test.
os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")

# Tracing makes many objects and little garbage: it is looked for less often.
gc.set_threshold(20_000, 20, 10)

SLOW = {
    line
    for line in (Path(__file__).parent / "slow.txt").read_text(encoding="utf-8").splitlines()
    if not line.startswith("#")
}


# Of ten seconds or more, so that of several processes none is left alone with one at the end.
LONG = (
    "test/test_tutorials.py",
    "test/test_left_open.py",
    "test/test_readme.py::test_python_runs",
    "test/capture/test_stored.py",
    "test/learners/test_captured_update.py::test_compiled",
    "test/learners/replay/test_team_replay_draws.py::test_a_graph",
    "test/training/test_ahead.py",
    "test/training/test_execution.py::test_a_compiled",
    "test/training/test_loggers.py::test_what_is_logged",
)


def names_of(nodeid):
    """What a case may be listed by: itself, its test, its file."""
    test = nodeid.partition("[")[0]
    return {nodeid, test, test.partition("::")[0]}


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    """Marks the tests in ``slow.txt``; among several processes the longest begin first."""
    if "PYTEST_XDIST_WORKER" in os.environ:
        items.sort(key=lambda item: not item.nodeid.startswith(LONG))
    for item in items:
        if names_of(item.nodeid) & SLOW:
            item.add_marker(pytest.mark.slow)


@pytest.fixture(autouse=True)
def _one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    yield
    torch.set_num_threads(before)


@pytest.fixture(autouse=True)
def _search_of_child_processes(monkeypatch):
    """The command line sets it for its process, which the tests go on with."""
    for name in ("PYTHONPATH", "PYTHONSAFEPATH"):
        monkeypatch.setenv(name, os.environ.get(name, ""))
        if name not in os.environ or not os.environ[name]:
            monkeypatch.delenv(name)
