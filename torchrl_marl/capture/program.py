"""A function of tensors as one program, which is traced, folded and compiled."""

from __future__ import annotations

import contextlib
import logging
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal

import torch
import torch.utils._pytree as pytree
from torch import Tensor

from torchrl_marl.capture.cuda_graph import CudaGraph, written_inputs
from torchrl_marl.capture.inductor import compile_module
from torchrl_marl.capture.syncs import graph_syncs
from torchrl_marl.capture.tracing import Trace, trace
from torchrl_marl.errors import CaptureError

__all__ = ["Program", "announce_slow_work", "capture", "compile_trace", "listen_to_slow_work"]

Listener = Callable[[str], None]

_logger = logging.getLogger("torchrl_marl.capture")
_listeners: list[Listener] = []


class _Stderr(logging.StreamHandler):
    """Handler that writes to the current ``sys.stderr``."""

    def __init__(self) -> None:
        logging.Handler.__init__(self)

    @property
    def stream(self):
        return sys.stderr


def _set_up_logger() -> None:
    # Silenced by logging.getLogger("torchrl_marl.capture").setLevel(logging.WARNING).
    if _logger.level == logging.NOTSET:
        _logger.setLevel(logging.INFO)
    if not _logger.handlers:
        handler = _Stderr()
        handler.setFormatter(logging.Formatter("torchrl_marl: %(message)s"))
        _logger.addHandler(handler)
        _logger.propagate = False


@contextlib.contextmanager
def announce_slow_work(description: str) -> Iterator[None]:
    """Context of slow work: announces the work to listeners, and finally logs its duration."""
    _set_up_logger()
    began = time.perf_counter()
    for listener in _listeners:
        listener(description)
    try:
        yield
    finally:
        for listener in _listeners:
            listener("")
    _logger.info("%s took %.1f s", description, time.perf_counter() - began)


@contextlib.contextmanager
def listen_to_slow_work(listener: Listener) -> Iterator[None]:
    """Within the context, calls a listener whenever slow work begins or ends.

    Args:
        listener (callable): called as ``listener(description)`` when slow work begins, and as
            ``listener("")`` when it ends.
    """
    _listeners.append(listener)
    try:
        yield
    finally:
        _listeners.remove(listener)


class Program:
    """Function of nested tensors as one graph.

    Args:
        traced (Trace): the recorded function.
        run (callable): flat inputs to flat outputs, checks included.

    Attributes:
        n_operations (int): number of operations of the graph.
        n_recorded (int): number of recorded operations, before the graph was made smaller.
        n_kernels (int): number of compiled kernels; 0 if the graph is not compiled.
        seconds (float): time of recording and compilation.
    """

    def __init__(
        self, traced: Trace, run: Callable[..., Sequence[Tensor]], seconds: float, n_kernels: int
    ) -> None:
        self.traced = traced
        self._run = run
        self.seconds = seconds
        self.n_kernels = n_kernels
        self.n_operations = traced.n_operations
        self.n_recorded = traced.n_recorded
        self.failed: Tensor | None = None

    def __call__(self, *inputs: Any) -> Any:
        """Runs the function on inputs that are nested in the same way as the example inputs."""
        leaves = self.flat(pytree.tree_leaves(inputs))
        return self.traced.unflatten(leaves)

    def flat(self, leaves: Sequence[Tensor]) -> Sequence[Tensor]:
        """Runs the function on flat inputs, without gradients; collects failed checks."""
        out, failed = self.checked(leaves)
        self.gather(failed)
        return out

    def checked(self, leaves: Sequence[Tensor]) -> tuple[Sequence[Tensor], Tensor | None]:
        """Runs the function on flat inputs; also returns failed checks, bool ``[n_checks]``."""
        with torch.no_grad():
            out = self._run(*leaves, *self.traced.captured)
        return (out[:-1], out[-1]) if self.traced.checks else (out, None)

    def gather(self, failed: Tensor | None) -> None:
        """Collects failed checks for :meth:`raise_failed`."""
        self.failed = failed if self.failed is None or failed is None else self.failed | failed

    def raise_failed(self) -> None:
        """Raises an error if a check failed since the last call; waits for the device.

        Raises:
            GraphCheckError: a check failed; the message names the line of the simulator.
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
        function (callable): function from nested tensors to nested tensors.
        *inputs: example inputs, with the shapes, dtypes and devices of all later calls.
        name (str): name of the function, for messages.
        execution ("trace", "compile" or "cudagraph"): ``trace`` runs the graph operation by
            operation, with the same results as eager execution, to the bit; ``cudagraph`` replays
            the compiled graph on a GPU.

    Raises:
        CaptureError: if the path of the function depends on its inputs.

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
        traced (Trace): function recorded on these inputs.
        *inputs, name, execution: as in :func:`capture`; the additional execution ``exact`` also
            compiles, but runs torch's kernels where compiled code would round differently, because
            it computes in another order.
    """
    if execution == "trace":
        return Program(traced, traced.module, traced.seconds, 0)
    from torchrl_marl.capture.folding import fold_constants

    _refuse_hidden_writes(traced)
    fold_constants(traced.module)
    began = time.perf_counter()
    leaves = [*pytree.tree_leaves(inputs), *traced.captured]
    written = _written_on_replay(traced, leaves, name) if execution == "cudagraph" else None
    with (
        announce_slow_work(f"compiling {name} ({traced.n_operations:,} operations)"),
        torch.no_grad(),
    ):
        run, n_kernels = compile_module(traced.module, leaves, exact=execution == "exact")
    if written is not None:
        run = CudaGraph(run, mutated=written, name=name)
    seconds = traced.seconds + time.perf_counter() - began
    return Program(traced, run, seconds, n_kernels)


def _refuse_hidden_writes(traced: Trace) -> None:
    """Refuses batch normalization whose statistics compiled code would not update."""
    for node in traced.module.graph.nodes:
        if node.target is not torch.ops.aten.native_batch_norm.default:
            continue
        statistics, training = node.args[3], node.args[5]
        if training and statistics is not None:
            raise CaptureError(
                "compiled code does not update the statistics of batch normalization; use another "
                "normalization, or execution=trace"
            )


def _written_on_replay(traced: Trace, leaves: Sequence[Tensor], name: str) -> set[int]:
    """Returns the inputs that a graph writes to; raises an error if it cannot be a CUDA graph."""
    syncs = graph_syncs(traced.module, leaves)
    if syncs:
        raise CaptureError(f"{name} cannot be a CUDA graph, the host would wait in it:\n{syncs}")
    return written_inputs(traced.module)
