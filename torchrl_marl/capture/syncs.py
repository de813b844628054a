"""Counts device synchronizations, in eager code or in a graph.

Host and GPU run concurrently until the host reads a value or needs a shape that depends on values.
Uploads from the host stall both. A captured step neither waits nor uploads.
"""

from __future__ import annotations

import contextlib
import operator
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from numbers import Number
from typing import Any, Literal

import torch
import torch.utils._pytree as pytree
from torch import Tensor, fx
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from torchrl_marl.capture.sites import where
from torchrl_marl.errors import CaptureError

__all__ = ["Sync", "Syncs", "count_syncs", "graph_syncs"]

_DYNAMIC = (torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape)
_INDEXING = ("aten::index", "aten::index_put", "aten::index_put_", "aten::_index_put_impl_")
# Functions that return values to Python, but call no operator that a dispatch mode could see.
_READS = (Tensor.tolist, Tensor.numpy, Tensor.__array__, Tensor.cpu)

Kind = Literal["wait", "upload"]


@dataclass(frozen=True)
class Sync:
    """One synchronization with the device.

    Args:
        kind ("wait" or "upload"): whether the host waits for a value, or copies a value to the
            device.
        operation (str): name of the operation.
        site (str): file, line and source text; in a graph, only those that were recorded.
    """

    kind: Kind
    operation: str
    site: str


class Syncs(list[Sync]):
    """List of synchronizations; as a string, each source line with its count."""

    @property
    def n_waits(self) -> int:
        return sum(sync.kind == "wait" for sync in self)

    @property
    def n_uploads(self) -> int:
        return sum(sync.kind == "upload" for sync in self)

    def __str__(self) -> str:
        lines = Counter(self).most_common()
        return "\n".join(f"{n} x {s.kind}, {s.operation} at {s.site}" for s, n in lines)


@contextlib.contextmanager
def count_syncs(*, strict: bool = False) -> Iterator[Syncs]:
    """Counts the synchronizations in a ``with`` block that stall a GPU, or would stall one.

    The block may run on a CPU. Then the device of ``torch.tensor(number)`` is unknown, so each call
    counts as an upload, and copies by ``.to(device)`` are not counted. Synchronizations in compiled
    functions are not counted on any device; see :func:`graph_syncs`.

    Args:
        strict (bool): whether to raise an error at the first synchronization. On a GPU this also
            uses ``torch.cuda.set_sync_debug_mode``, which finds all synchronizations.

    Raises:
        CaptureError: the block synchronizes and ``strict`` is True; the message names the line.

    Examples:
        >>> with count_syncs() as syncs:
        ...     x = torch.zeros(3)
        ...     if (x > 1).any():
        ...         x[torch.tensor([0])] = 1.0
        >>> syncs.n_waits, syncs.n_uploads
        (1, 0)
    """
    syncs = Syncs()
    operations = _Operations(syncs, strict)
    with contextlib.ExitStack() as stack:
        if strict and torch.cuda.is_available():
            stack.callback(torch.cuda.set_sync_debug_mode, torch.cuda.get_sync_debug_mode())
            torch.cuda.set_sync_debug_mode("error")
        stack.enter_context(operations)
        stack.enter_context(_Calls(operations))
        yield syncs


class _Operations(TorchDispatchMode):
    """Counts synchronizations of operators."""

    def __init__(self, syncs: Syncs, strict: bool) -> None:
        super().__init__()
        self._syncs, self._strict = syncs, strict
        self.paused = False

    def count(self, kind: Kind, operation: str) -> None:
        self._syncs.append(Sync(kind, operation, where().removeprefix("at ")))
        if self._strict:
            raise CaptureError(f"this stalls the device: {self._syncs[-1]}")

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if not self.paused:
            uploads = func is torch.ops.aten.lift_fresh.default
            kind = "upload" if uploads else _kind(func, args, kwargs)
            if kind is not None:
                self.count(kind, str(func))
        return func(*args, **kwargs)


class _Calls(TorchFunctionMode):
    """Counts synchronizations of Python calls."""

    def __init__(self, operations: _Operations) -> None:
        super().__init__()
        self._operations = operations

    def __torch_function__(self, func, types, args=(), kwargs=None):
        # Writing a number to an index or through a mask is a fill, without a synchronization.
        fills = func is Tensor.__setitem__ and isinstance(args[2], Number) and _is_plain(args[1])
        if func not in _READS and not fills:
            return func(*args, **(kwargs or {}))
        if not fills:
            self._operations.count("wait", f"Tensor.{func.__name__}")
        before, self._operations.paused = self._operations.paused, True
        try:
            return func(*args, **(kwargs or {}))
        finally:
            self._operations.paused = before


def _is_plain(index: Any) -> bool:
    """Returns whether an index contains no list; a list would be uploaded."""
    parts = index if isinstance(index, tuple) else (index,)
    return not any(isinstance(x, list) for x in parts)


def _kind(op: torch._ops.OpOverload, args: tuple, kwargs: dict[str, Any]) -> Kind | None:
    """Returns the kind of synchronization that an operator causes; None if it causes none."""
    name = op._schema.name
    if name in _INDEXING:
        masks = (torch.bool, torch.uint8)
        return "wait" if any(x is not None and x.dtype in masks for x in args[1]) else None
    if name in ("aten::_to_copy", "aten::copy_"):
        ends = [args[0].device, kwargs.get("device")]
        if name == "aten::copy_":
            ends = [args[1].device, args[0].device]
        source, target = (end and torch.device(end).type for end in ends)
        if target is None or source == target:
            return None
        return "upload" if source == "cpu" else "wait"
    if name == "aten::repeat_interleave" and kwargs.get("output_size") is not None:
        return None
    waits = name == "aten::_linalg_check_errors" or any(tag in op.tags for tag in _DYNAMIC)
    return "wait" if waits else None


def graph_syncs(module: fx.GraphModule, inputs: Sequence[Tensor] = ()) -> Syncs:
    """Returns the synchronizations of a graph; a captured step has none.

    Args:
        module (GraphModule): graph of ATen operators from :func:`~torchrl_marl.capture.trace`.
        inputs (sequence of Tensor): example inputs, for graphs whose inputs have no metadata.

    Raises:
        ValueError: if a node has no metadata and is not one of the given inputs.

    Examples:
        >>> from torchrl_marl.capture import trace
        >>> def clamped(x):
        ...     x = x.clone()
        ...     x[x > 1] = 1.0
        ...     return x
        >>> graph_syncs(trace(clamped, torch.ones(3)).module)
        []
    """
    syncs = Syncs()
    places = [node for node in module.graph.nodes if node.op == "placeholder"]
    known = dict(zip(places, inputs))

    def value(x: Any) -> Any:
        if not isinstance(x, fx.Node):
            return x
        if x in known or "val" in x.meta:
            return known[x] if x in known else x.meta["val"]
        if x.op == "get_attr":
            return operator.attrgetter(str(x.target))(x.graph.owning_module)
        raise ValueError(f"node {x.name} of the graph has no metadata; record it with make_fx.")

    for part in module.modules():
        for node in part.graph.nodes if isinstance(part, fx.GraphModule) else ():
            if isinstance(node.target, torch._ops.OpOverload):
                args, kwargs = pytree.tree_map(value, (node.args, dict(node.kwargs)))
                kind = _kind(node.target, args, kwargs)
                if kind is not None:
                    syncs.append(Sync(kind, str(node.target), _site(node)))
    return syncs


def _site(node: fx.Node) -> str:
    lines = [line.strip() for line in (node.stack_trace or "").splitlines() if line.strip()]
    return "; ".join([f"node {node.name}", *lines[-2:]])
