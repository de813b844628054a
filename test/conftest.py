"""Makes ``samples`` importable from every folder of tests; one thread, since all is small."""

import os

import pytest
import torch

# What JAX's worlds compile runs a few steps only.
os.environ.setdefault(
    "XLA_FLAGS", "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"
)


@pytest.fixture(autouse=True)
def _one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    yield
    torch.set_num_threads(before)
