"""Compiled graphs that come with the package, for processors of known kinds.

The default recipe's graphs come with the package, so that its first run needs neither the compiler
nor a C++ compiler. ``.ci/graphs`` builds them. A machine of another kind compiles.
"""

from __future__ import annotations

import contextlib
import platform
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, fx

__all__ = ["FOLDER", "KINDS", "folder", "machine", "outputs_agree"]

FOLDER = Path(__file__).with_name("graphs")
"""Graphs of each kind of processor, and the recipes they were built from."""

# Kinds of processors: the vector instructions that torch uses, and the flags of Linux that the C++
# compiler's kind of the same name needs.
KINDS = {
    "x86-64-v4": (
        "AVX512",
        "avx512f avx512bw avx512cd avx512dq avx512vl avx2 bmi1 bmi2 f16c fma movbe abm",
    ),
    "x86-64-v3": ("AVX2", "avx2 bmi1 bmi2 f16c fma movbe abm"),
}


def folder(threads: int) -> Path | None:
    """Returns the folder of the graphs that run on this machine, or None if there are none.

    Args:
        threads (int): number of threads of a graph; those of the package have one.
    """
    if sys.platform != "linux" or threads != 1:
        return None
    flags = _flags()
    for kind, (vectors, needed) in KINDS.items():
        if torch.backends.cpu.get_cpu_capability() == vectors and flags.issuperset(needed.split()):
            return FOLDER / kind
    return None


def machine() -> tuple[str | None, str]:
    """Returns the part of a graph's key that describes the machine: torch's commit and processor.

    The commit is the same for a release's builds for a CPU and for GPUs.
    """
    return torch.version.git_version, platform.machine()


def outputs_agree(
    run: Callable[..., Any], module: fx.GraphModule, inputs: Sequence[Tensor]
) -> bool:
    """Returns whether a compiled graph computes what the recorded one does, up to rounding.

    Args:
        run (callable): the compiled graph, a function of the list of inputs.
        module (GraphModule): the recorded graph.
        inputs (sequence of Tensor): the inputs; graphs run on copies of them.
    """
    compared = []
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        for function in (lambda copies: module(*copies), run):
            torch.manual_seed(0)
            copies = [_copy(x) for x in inputs]
            compared.append([*function(copies), *copies])
    return all(map(_close, *compared))


def _copy(x: Tensor) -> Tensor:
    """Returns a copy with the same strides, also of a tensor that is expanded or has gaps."""
    storage = x.detach().untyped_storage().clone()
    return x.new_empty(0).set_(storage, x.storage_offset(), x.shape, x.stride())


def _close(x: Any, y: Any) -> bool:
    if not isinstance(x, Tensor) or not x.is_floating_point():
        return bool((x == y).all()) if isinstance(x, Tensor) else x == y
    return torch.allclose(x, y, 1e-3, 1e-4, equal_nan=True)


def _flags() -> set[str]:
    with contextlib.suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        return set(next((line for line in lines if line.startswith("flags")), "").split())
    return set()
