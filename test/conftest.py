"""Runs tests on one thread, since all is small, and signs runs with a key of the tests' own."""

import atexit
import os
import shutil
import tempfile

import pytest
import torch

# What JAX's worlds compile runs a few steps only.
os.environ.setdefault(
    "XLA_FLAGS", "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"
)

# The key with which runs are signed is the tests' own.
os.environ["XDG_STATE_HOME"] = tempfile.mkdtemp()
atexit.register(shutil.rmtree, os.environ["XDG_STATE_HOME"], ignore_errors=True)


@pytest.fixture(autouse=True)
def _one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    yield
    torch.set_num_threads(before)
