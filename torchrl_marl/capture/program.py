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
from torch import Tensor, fx

from torchrl_marl.capture.cuda_graph import CudaGraph, written_inputs
from torchrl_marl.capture.inductor import compile_module
from torchrl_marl.capture.syncs import graph_syncs
from torchrl_marl.capture.tracing import Trace, trace
from torchrl_marl.errors import CaptureError

__all__ = ["Program", "announce", "announced_to", "capture", "compile_trace", "fold_constants"]

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


def _set_up() -> None:
    # Silenced by logging.getLogger("torchrl_marl.capture").setLevel(logging.WARNING).
    if _logger.level == logging.NOTSET:
        _logger.setLevel(logging.INFO)
    if not _logger.handlers:
        handler = _Stderr()
        handler.setFormatter(logging.Formatter("torchrl_marl: %(message)s"))
        _logger.addHandler(handler)
        _logger.propagate = False


@contextlib.contextmanager
def announce(what: str) -> Iterator[None]:
    """Context of slow work: announces the work to listeners, and finally logs its duration."""
    _set_up()
    began = time.perf_counter()
    for listener in _listeners:
        listener(what)
    try:
        yield
    finally:
        for listener in _listeners:
            listener("")
    _logger.info("%s took %.1f s", what, time.perf_counter() - began)


@contextlib.contextmanager
def announced_to(listener: Listener) -> Iterator[None]:
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


_LARGEST = 4096  # elements; larger constants are slower to read than to compute
_UNPACKED = torch.ops.aten.lift_fresh_copy.default


def fold_constants(module: fx.GraphModule) -> int:
    """Replaces operations on constants by their results; returns the number of replaced operations.

    Tensors that the graph writes in place, also through views, are not constants.

    Examples:
        >>> from torchrl_marl.capture import trace
        >>> traced = trace(lambda x: x * torch.stack([torch.tensor(1.0), torch.tensor(2.0)]),
        ...                torch.ones(2))
        >>> fold_constants(traced.module)
        3
        >>> traced.module(torch.ones(2))[0]
        tensor([1., 2.])
    """
    base, written_bases = _memory(module.graph)
    written = {node for node in module.graph.nodes if base[node] in written_bases}
    values: dict[fx.Node, Tensor] = {}
    for node in module.graph.nodes:
        if node.op == "get_attr":
            value = getattr(module, str(node.target), None)
            if isinstance(value, Tensor) and node not in written:
                values[node] = value
        elif node.op == "call_function" and node not in written:
            value = _fold(node, values)
            if value is not None:
                values[node] = value
    folded = [node for node in values if node.op == "call_function"]
    for i, node in enumerate(folded):
        # Only constants that other operations read are kept.
        if any(user not in values for user in node.users):
            name = f"_folded_{i}"
            setattr(module, name, values[node])
            with module.graph.inserting_before(node):
                constant = module.graph.create_node("get_attr", name)
                fresh = module.graph.call_function(_UNPACKED, (constant,))
            # Values that are written later need a copy of the constant.
            node.replace_all_uses_with(constant, delete_user_cb=lambda user: user not in written)
            node.replace_all_uses_with(fresh)
    _copy_outputs(module.graph)
    module.graph.eliminate_dead_code()
    module.recompile()
    return len(folded)


def _copy_outputs(graph: fx.Graph) -> None:
    """Copies constant outputs, since callers may write to an output."""
    base, _ = _memory(graph)
    output = next(iter(reversed(graph.nodes)))
    for node in output.all_input_nodes:
        if base[node].op == "get_attr":
            with graph.inserting_before(output):
                copy = graph.call_function(torch.ops.aten.clone.default, (node,))
            output.replace_input_with(node, copy)


def _fold(node: fx.Node, values: dict[fx.Node, Tensor]) -> Tensor | None:
    target = node.target
    if not isinstance(target, torch._ops.OpOverload) or not node.all_input_nodes:
        return None
    if target._schema.is_mutable or torch.Tag.nondeterministic_seeded in target.tags:
        return None
    if any(source not in values for source in node.all_input_nodes):
        return None
    args, kwargs = fx.node.map_arg((node.args, node.kwargs), lambda source: values[source])
    with torch.no_grad():
        value = target(*args, **kwargs)
    if not isinstance(value, Tensor) or value.numel() > _LARGEST:
        return None
    return value.clone() if target is _UNPACKED else value


def _memory(graph: fx.Graph) -> tuple[dict[fx.Node, fx.Node], set[fx.Node]]:
    """Returns the base node of each node's memory, and the bases that are written in place."""
    base: dict[fx.Node, fx.Node] = {}
    written: set[fx.Node] = set()
    for node in graph.nodes:
        base[node] = node
        target = node.target
        if node.op != "call_function":
            continue
        if not isinstance(target, torch._ops.OpOverload):  # an element of a list of views
            base[node] = base[node.all_input_nodes[0]] if node.all_input_nodes else node
            continue
        for argument, given in zip(target._schema.arguments, node.args):
            if argument.alias_info is None:
                continue
            for source in _nodes_in(given):
                base[node] = base[source]
                if argument.alias_info.is_write:
                    written.add(base[source])
    return base, written


def _nodes_in(given: Any) -> list[fx.Node]:
    found: list[fx.Node] = []
    fx.node.map_arg(given, found.append)
    return found


class Program:
    """Function of nested tensors as one graph.

    Args:
        traced (Trace): the recorded function.
        run (callable): flat inputs to flat outputs, checks included.

    Attributes:
        n_operations (int): number of recorded operations.
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
    """Returns the inputs that a graph writes to; raises an error if it cannot be a CUDA graph."""
    syncs = graph_syncs(traced.module, leaves)
    if syncs:
        raise CaptureError(f"{name} cannot be a CUDA graph, the host would wait in it:\n{syncs}")
    return written_inputs(traced.module)
