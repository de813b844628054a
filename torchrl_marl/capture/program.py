"""A captured function, compiled, for repeated calls."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any, Literal

import torch
import torch.utils._pytree as pytree
from torch import Tensor

from torchrl_marl.capture.announce import announce
from torchrl_marl.capture.cuda_graph import CudaGraph, written_inputs
from torchrl_marl.capture.folding import fold_constants
from torchrl_marl.capture.inductor import compile_module
from torchrl_marl.capture.syncs import graph_syncs
from torchrl_marl.capture.tracing import Trace, trace
from torchrl_marl.errors import CaptureError

__all__ = ["Program", "capture", "compile_trace"]


class Program:
    """Function of nested tensors as one graph.

    Args:
        traced (Trace): the recorded function.
        run (callable): flat inputs to flat outputs, checks included.

    Attributes:
        n_operations (int): operations that were recorded.
        n_kernels (int): kernels that the compiler made of them; 0 if it is not compiled.
        seconds (float): how long it took to record and compile.
    """

    def __init__(
        self, traced: Trace, run: Callable[..., Sequence[Tensor]], seconds: float, n_kernels: int
    ) -> None:
        self.traced = traced
        self._run = run
        self.seconds = seconds
        self.n_kernels = n_kernels
        self.n_operations = traced.n_operations
        self.failed: Tensor | None = None

    def __call__(self, *inputs: Any) -> Any:
        """Runs the function on inputs nested as those of the capture."""
        leaves = self.flat(pytree.tree_leaves(inputs))
        return self.traced.unflatten(leaves)

    def flat(self, leaves: Sequence[Tensor]) -> Sequence[Tensor]:
        """Runs it on flat inputs, without a gradient; collects checks and does not return them."""
        out, failed = self.checked(leaves)
        self.gather(failed)
        return out

    def checked(self, leaves: Sequence[Tensor]) -> tuple[Sequence[Tensor], Tensor | None]:
        """Runs it on flat inputs; also returns failed checks, bool ``[n_checks]``."""
        with torch.no_grad():
            out = self._run(*leaves, *self.traced.captured)
        return (out[:-1], out[-1]) if self.traced.checks else (out, None)

    def gather(self, failed: Tensor | None) -> None:
        """Collects failed checks for :meth:`raise_failed`."""
        self.failed = failed if self.failed is None or failed is None else self.failed | failed

    def raise_failed(self) -> None:
        """Raises the checks that failed since the last call; waits for the device.

        Raises:
            GraphCheckError: naming the line of the simulator.
        """
        failed, self.failed = self.failed, None
        if failed is not None:
            self.traced.raise_failed(failed)


def capture(
    function: Callable[..., Any],
    *inputs: Any,
    name: str,
    execution: Literal["trace", "compile", "cudagraph"] = "compile",
) -> Program:
    """Captures a function and compiles it; logs the work and its duration.

    Args:
        function (callable): of nested tensors; gives nested tensors.
        *inputs: of the shapes, types and devices of all later calls.
        name (str): what it is, in a sentence.
        execution ("trace", "compile" or "cudagraph"): ``trace`` runs the graph operation by
            operation, which gives what eager execution gives, to the bit; ``cudagraph`` lets a
            GPU replay the compiled graph.

    Raises:
        CaptureError: a function whose path depends on its inputs.

    Examples:
        >>> add = capture(lambda x, y: x + y, torch.ones(2), torch.ones(2), name="a sum",
        ...               execution="trace")
        >>> add(torch.ones(2), torch.zeros(2))
        tensor([1., 1.])
    """
    traced = trace(function, *inputs)
    return compile_trace(traced, *inputs, name=name, execution=execution)


def compile_trace(
    traced: Trace,
    *inputs: Any,
    name: str,
    execution: Literal["trace", "compile", "exact", "cudagraph"] = "compile",
) -> Program:
    """Compiles a trace; logs the work and its duration.

    Args:
        traced (Trace): a function, recorded on these inputs.
        *inputs, name, execution: of :func:`capture`; ``exact`` compiles, too, but leaves to torch
            itself what the compiler would compute in another order.
    """
    if execution == "trace":
        return Program(traced, traced.module, traced.seconds, 0)
    fold_constants(traced.module)
    began = time.perf_counter()
    leaves = [*pytree.tree_leaves(inputs), *traced.captured]
    written = _written_on_replay(traced, leaves, name) if execution == "cudagraph" else None
    with announce(f"compiling {name} ({traced.n_operations:,} operations)"), torch.no_grad():
        run, n_kernels = compile_module(traced.module, leaves, exact=execution == "exact")
    if written is not None:
        run = CudaGraph(run, mutated=written, name=name)
    seconds = traced.seconds + time.perf_counter() - began
    return Program(traced, run, seconds, n_kernels)


def _written_on_replay(traced: Trace, leaves: Sequence[Tensor], name: str) -> set[int]:
    """Returns the inputs that a graph writes to; refuses what no CUDA graph can hold."""
    syncs = graph_syncs(traced.module, leaves)
    if syncs:
        raise CaptureError(f"{name} cannot be a CUDA graph, the host would wait in it:\n{syncs}")
    return written_inputs(traced.module)
