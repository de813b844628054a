"""Removal of writes in place from graphs: every write becomes a new value.

A write to a view, such as ``x[:, 0] += 1``, gives a new value to the tensor that is viewed. Views
that are read later are taken from the new value.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, fx
from torch.fx._lazy_graph_module import _LazyGraphModule

from torchrl_marl.capture.folding import memory
from torchrl_marl.errors import CaptureError

__all__ = ["value_of", "without_writes"]

_aten = torch.ops.aten
Node = Any  # fx.Node, whose arguments have a wide type


def value_of(node: Node) -> Any:
    """Returns the description of a node's value, with its shape, dtype and strides.

    Raises:
        CaptureError: the node was recorded without a description.
    """
    if "val" in node.meta:
        return node.meta["val"]
    if node.op == "get_attr":
        return getattr(node.graph.owning_module, str(node.target))
    raise CaptureError(f"the value of {node.name} is not described")


def without_writes(module: fx.GraphModule) -> fx.GraphModule:
    """Returns a copy of a recorded graph that writes to no tensor in place.

    Args:
        module (GraphModule): graph of ATen operators, with the descriptions of its values.

    Raises:
        CaptureError: the graph writes to an input, or an operation writes in a way without a rule.

    Examples:
        >>> from torchrl_marl.capture import trace
        >>> def add_to_row(x):
        ...     x = x.clone()
        ...     x[0] += 1
        ...     return x
        >>> functional = without_writes(trace(add_to_row, torch.zeros(2, 1)).module)
        >>> functional(torch.zeros(2, 1))[0].tolist()
        [[1.0], [0.0]]
        >>> "select_scatter_default" in {node.name for node in functional.graph.nodes}
        True
    """
    return _LazyGraphModule(module, _WriteRewriter(module.graph).run())


class _WriteRewriter:
    """One pass over a graph.

    The nodes of written memory are read through :meth:`read`, which takes a view again if its
    memory was written since.
    """

    def __init__(self, old: fx.Graph) -> None:
        self.old, self.graph = old, fx.Graph()
        self.base, written = memory(old)
        self.writes = dict.fromkeys(written, 0)  # base -> number of writes so far
        self.current: dict[Node, Node] = {}  # base -> its present value
        self.new: dict[Node, Node] = {}
        self.seen: dict[Node, int] = {}  # node -> writes before its value was taken

    def run(self) -> fx.Graph:
        for base in self.writes:
            if base.op != "call_function":
                raise CaptureError(f"the graph writes to {base.name}, which it did not make")
        for node in self.old.nodes:
            if _is_write(node):
                self._rewrite_write(node)
            else:
                self._replace_node(node, self.graph.node_copy(node, self.read))
        return self.graph

    def _replace_node(self, node: Node, new: Node) -> None:
        base = self.base[node]
        self.new[node], self.seen[node] = new, self.writes.get(base, 0)
        if node is base and node in self.writes:
            self.current[node] = new

    def read(self, node: Node) -> Node:
        """Returns the present value of a node of the old graph."""
        base = self.base[node]
        if self.seen[node] != self.writes.get(base, 0):
            if node is base:
                self._replace_node(node, self.current[node])
            elif _is_write(node):
                self._replace_node(node, self.read(_target(node)))
            else:
                self._replace_node(node, self.graph.node_copy(node, self.read))
        return self.new[node]

    def _rewrite_write(self, node: Node) -> None:
        """Replaces a write by a new value of the whole memory."""
        kind, target = _functional(node), _target(node)
        value = self._written_value(kind, node, target)
        base = self.base[target]
        place = target
        while place is not base:
            viewed = _viewed(place)
            if not _is_write(place):
                value = self._write_view(place, viewed, value)
            place = viewed if isinstance(value_of(viewed), Tensor) else _viewed(viewed)
        self.writes[base] += 1
        self.current[base] = value
        self._replace_node(node, self.read(target))

    def _written_value(self, kind: Any, node: Node, target: Node) -> Node:
        """Returns the value that a write gives to its target."""
        like = value_of(target)
        if kind is _aten.copy.default:
            return self._cast_like(self.read(node.args[1]), value_of(node.args[1]), like)
        if kind is _aten.fill.Tensor:
            return self._cast_like(self.read(node.args[1]), value_of(node.args[1]), like)
        if kind in (_aten.fill.Scalar, _aten.zero.default):
            filled = node.args[1] if len(node.args) > 1 else 0
            how = {"dtype": like.dtype, "device": like.device}
            return self._call(_aten.full.default, (list(like.shape), filled), like, **how)
        args, kwargs = fx.node.map_arg((node.args, node.kwargs), self.read)
        value = self._call(kind, args, like, **kwargs)
        if _dtype_of(kind, node) != like.dtype:
            value = self._call(_aten._to_copy.default, (value,), like, dtype=like.dtype)
        return value

    def _cast_like(self, value: Node, given: Tensor, like: Tensor) -> Node:
        """Gives a value the shape and dtype of the tensor that it is written to."""
        if given.device != like.device:
            raise CaptureError("a write copies between devices")
        if given.dtype != like.dtype:
            described = given.to(like.dtype)
            value = self._call(_aten._to_copy.default, (value,), described, dtype=like.dtype)
        if given.shape != like.shape:
            value = self._call(_aten.expand.default, (value, list(like.shape)), like)
        return value

    def _write_view(self, place: Node, viewed: Node, value: Node) -> Node:
        """Returns the viewed tensor with a new value of one of its views."""
        if place.target is operator.getitem:
            whole = _viewed(viewed)
            target, args = _view_write(viewed, place.args[1], value_of(whole))
            return self._call(target, (self.read(whole), value, *args), value_of(whole))
        rule = _INTO.get(place.target)
        if rule is None:
            raise CaptureError(f"a write through {place.target} has no rule")
        target, args, reads_whole = rule(place, value_of(viewed))
        first = (self.read(viewed), value) if reads_whole else (value,)
        return self._call(target, (*first, *args), value_of(viewed))

    def _call(self, target: Any, args: tuple, described: Any, **kwargs: Any) -> Node:
        node = self.graph.call_function(target, args, kwargs)
        node.meta["val"] = described
        return node


def _is_write(node: Node) -> bool:
    return isinstance(node.target, torch._ops.OpOverload) and node.target._schema.is_mutable


def _target(write: Node) -> Node:
    """Returns the tensor that a write writes to, before any write of it."""
    while _is_write(write):  # x.add_(1).add_(1) ...
        write = _viewed(write)
    return write


def _viewed(node: Node) -> Node:
    viewed = node.args[0]
    assert isinstance(viewed, fx.Node)
    return viewed


# Writes whose functional form has another name. ``aten.normal`` draws one number for each mean.
_FUNCTIONAL = {_aten.normal_.default: _aten.normal_functional.default}


def _functional(node: Node) -> Any:
    """Returns the operation that computes what a write stores.

    Raises:
        CaptureError: there is none with the same arguments, or the write also changes the shape.
    """
    target = node.target
    name = target._schema.name.removeprefix("aten::")
    packet = getattr(_aten, name[:-1], None) if name.endswith("_") else None
    kind = _FUNCTIONAL.get(target, getattr(packet, target._overloadname, None))
    if (
        kind is None
        or torch.Tag.inplace_view in target.tags
        or len(_written_arguments(target)) != 1
        or not isinstance(node.args[0], fx.Node)
        or [str(x.type) for x in kind._schema.arguments]
        != [str(x.type) for x in target._schema.arguments]
    ):
        raise CaptureError(f"the write {target} has no rule")
    return kind


def _dtype_of(kind: Any, node: Node) -> torch.dtype:
    """Returns the dtype of an operation's result, for a node's arguments."""
    args, kwargs = fx.node.map_arg((node.args, node.kwargs), _without_data)
    return kind(*args, **kwargs).dtype


def _without_data(node: Node) -> Tensor:
    described = value_of(node)
    return torch.empty(described.shape, dtype=described.dtype, device="meta")


def _written_arguments(target: Any) -> list[str]:
    arguments = target._schema.arguments
    return [x.name for x in arguments if x.alias_info is not None and x.alias_info.is_write]


def _view_write(several: Node, i: Any, whole: Tensor) -> tuple[Any, tuple]:
    """Returns the operation that writes one of several views, and its arguments."""
    args, shapes = several.args, [x.shape for x in value_of(several)]
    if several.target is _aten.unbind.int:
        return _aten.select_scatter.default, (args[1] if len(args) > 1 else 0, i)
    if several.target not in (_aten.split_with_sizes.default, _aten.split.Tensor):
        raise CaptureError(f"a write through {several.target} has no rule")
    dim: Any = args[2] if len(args) > 2 else 0
    start = sum(shape[dim] for shape in shapes[:i])
    return _aten.slice_scatter.default, (dim, start, start + shapes[i][dim])


Rule = Callable[[Node, Tensor], tuple[Any, tuple, bool]]


def _scatter(target: Any) -> Rule:
    return lambda place, viewed: (target, tuple(place.args[1:]), True)


def _reshape(place: Node, viewed: Tensor) -> tuple[Any, tuple, bool]:
    return _aten.reshape.default, (list(viewed.shape),), False


def _permuted(place: Node, viewed: Tensor) -> tuple[Any, tuple, bool]:
    dims: Any = [dim % viewed.ndim for dim in place.args[1]]
    return _aten.permute.default, ([dims.index(dim) for dim in range(viewed.ndim)],), False


# View -> function of its node and of the viewed tensor that returns the operation that writes the
# view, its arguments after the value, and whether it reads the viewed tensor.
_INTO: dict[Any, Rule] = {
    _aten.select.int: _scatter(_aten.select_scatter.default),
    _aten.slice.Tensor: _scatter(_aten.slice_scatter.default),
    _aten.diagonal.default: _scatter(_aten.diagonal_scatter.default),
    _aten.permute.default: _permuted,
    _aten.t.default: lambda place, viewed: (_aten.t.default, (), False),
    _aten.transpose.int: lambda place, viewed: (place.target, tuple(place.args[1:]), False),
    **dict.fromkeys(
        (
            _aten.view.default,
            _aten.unsqueeze.default,
            _aten.squeeze.dim,
            _aten.alias.default,
            _aten.detach.default,
        ),
        _reshape,
    ),
}
