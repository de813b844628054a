"""Two tiers of tests, their order and processes, one thread per process, a key to sign runs."""

import atexit
import csv
import gc
import os
import shutil
import tempfile
from pathlib import Path

# Set before torch and matplotlib are imported, here and in child processes.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("MPLBACKEND", "agg")

import pytest
import torch

# Compiled JAX environments run a few steps only, so optimization does not pay off.
os.environ.setdefault(
    "XLA_FLAGS",
    "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true "
    "--xla_cpu_use_fusion_emitters=false",
)


def own_folder():
    """A new folder that is removed when the process exits."""
    folder = tempfile.mkdtemp()
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder


# The tests sign runs with a key that is not the user's.
os.environ["XDG_STATE_HOME"] = own_folder()

# All test processes share JAX's compilation cache; the first pytest process creates it.
if "JAX_COMPILATION_CACHE_DIR" not in os.environ:
    os.environ["JAX_COMPILATION_CACHE_DIR"] = own_folder()
    os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
    os.environ["JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES"] = "-1"

# The wrappers of compiled graphs run a few times only.
os.environ.setdefault("AOT_INDUCTOR_COMPILE_WRAPPER_OPT_LEVEL", "O0")

# Tests run in parallel, so a second compile process would take time from another test.
os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")

# Tracing creates many objects and little garbage, so the collector runs less often.
gc.set_threshold(20_000, 20, 10)

DURATIONS = Path(__file__).with_name("durations.csv")
MOST_PROCESSES = 8


def pytest_configure(config):
    """Reads the parts of the second tier from the markers of pyproject.toml."""
    lines = config.getini("markers")
    config.parts = [x.partition(":")[0] for x in lines if x.partition(":")[2].startswith(" part")]


@pytest.hookimpl(tryfirst=True)
def pytest_xdist_auto_num_workers(config):
    """Uses all cores for a whole tier, and a single process if files are given."""
    named = list(config.args) != list(config.getini("testpaths"))
    return 0 if named else min(len(os.sched_getaffinity(0)), MOST_PROCESSES)


def longest_first(items):
    """Sorts tests by duration, so that no process starts a long one at the end."""
    with DURATIONS.open(newline="", encoding="utf-8") as file:
        seconds = {row["test"]: float(row["seconds"]) for row in csv.DictReader(file)}
    items.sort(key=lambda item: -seconds.get(item.nodeid.partition("[")[0], 0.0))


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config, items):
    """Marks the second tier: tests that belong to one of its parts."""
    for item in items:
        if any(item.get_closest_marker(part) for part in config.parts):
            item.add_marker(pytest.mark.full)
    if "PYTEST_XDIST_WORKER" in os.environ:
        longest_first(items)


def pytest_terminal_summary(terminalreporter, config):
    """Prints how to run the second tier if it was deselected."""
    if config.option.markexpr == "not full":
        parts = ", ".join(config.parts)
        terminalreporter.write_line(
            "This was the first tier. All tests: pytest -m ''. One part of the second tier: "
            f"pytest -m PART, of {parts}."
        )


@pytest.fixture(autouse=True)
def _one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    yield
    torch.set_num_threads(before)


@pytest.fixture(autouse=True)
def _search_of_child_processes(monkeypatch):
    """Restores the variables that the command line sets for its process."""
    for name in ("PYTHONPATH", "PYTHONSAFEPATH"):
        monkeypatch.setenv(name, os.environ.get(name, ""))
        if name not in os.environ or not os.environ[name]:
            monkeypatch.delenv(name)
