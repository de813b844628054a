"""Counts where the host waits for the device, in a run or in a graph.

A GPU works while the host goes on, until the host asks for a value, or for a shape that depends
on values; what the host uploads holds up both. A captured step does neither.
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
# Functions that return values to Python without an operator that a dispatch mode sees.
_READS = (Tensor.tolist, Tensor.numpy, Tensor.__array__, Tensor.cpu)

Kind = Literal["wait", "upload"]


@dataclass(frozen=True)
class Sync:
    """One wait for the device.

    Args:
        kind ("wait" or "upload"): the host waits for a value, or copies its own to the device.
        operation (str): by what.
        site (str): file, line and source; in a graph, what is known of them.
    """

    kind: Kind
    operation: str
    site: str


class Syncs(list[Sync]):
    """Counted waits; as a string, each site with its number."""

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
    """Counts the waits of a ``with`` block that would stall a GPU; works on a CPU.

    What a CPU cannot tell: on which device a number given to ``torch.tensor`` would lie, so each
    counts as an upload; nor what ``.to(device)`` would copy. What runs in a compiled function is
    not seen, see :func:`graph_syncs`.

    Args:
        strict (bool): raise at the first one. On a GPU this asks the driver, too
            (``torch.cuda.set_sync_debug_mode``), which misses none.

    Raises:
        CaptureError: naming the line, if ``strict``.

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
    """Counts waits of operators."""

    def __init__(self, syncs: Syncs, strict: bool) -> None:
        super().__init__()
        self._syncs, self._strict = syncs, strict
        self.paused = False

    def count(self, kind: Kind, operation: str) -> None:
        self._syncs.append(Sync(kind, operation, where().removeprefix("at ")))
        if self._strict:
            raise CaptureError(f"this holds up the device: {self._syncs[-1]}")

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if not self.paused:
            uploads = func is torch.ops.aten.lift_fresh.default
            kind = "upload" if uploads else _kind(func, args, kwargs)
            if kind is not None:
                self.count(kind, str(func))
        return func(*args, **kwargs)


class _Calls(TorchFunctionMode):
    """Counts waits of Python calls."""

    def __init__(self, operations: _Operations) -> None:
        super().__init__()
        self._operations = operations

    def __torch_function__(self, func, types, args=(), kwargs=None):
        # A number is written through a mask, or to an index, by a fill.
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
    """Returns whether an index holds no list, which would be uploaded."""
    parts = index if isinstance(index, tuple) else (index,)
    return not any(isinstance(x, list) for x in parts)


def _kind(op: torch._ops.OpOverload, args: tuple, kwargs: dict[str, Any]) -> Kind | None:
    """Returns the kind of wait of an operator, given its tensors, real or fake."""
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
    """Returns the waits of a graph; a captured step has none.

    Args:
        module (GraphModule): of ATen operators, as :func:`~torchrl_marl.capture.trace` gives.
        inputs (sequence of Tensor): what it is run on, for graphs whose inputs tell no type.

    Raises:
        ValueError: a node that tells no type, and is no input that was given.

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
        raise ValueError(f"node {x.name} of the graph tells no type; record it with make_fx.")

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
