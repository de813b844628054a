"""Simplification of graphs: equal values are computed once, and exact identities are applied.

A recorded step repeats itself: the distance of two agents is computed for each of the two, and
zeros are made again and again. All rewrites keep every bit of the results.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor, fx
from torch.fx._lazy_graph_module import _LazyGraphModule

from torchrl_marl.capture.folding import LARGEST_CONSTANT, memory
from torchrl_marl.capture.writes import value_of, without_writes
from torchrl_marl.errors import CaptureError

__all__ = ["REDUCTIONS", "fill_value_of", "is_random", "memory_order", "simplify"]

_aten = torch.ops.aten
Node = Any  # fx.Node, whose arguments have a wide type

# Operations that only copy. They matter for writes and strides, and the graph has no writes.
_COPIES = {
    _aten.alias.default,
    _aten.detach.default,
    _aten.clone.default,
    _aten.lift_fresh.default,
    _aten.lift_fresh_copy.default,
}
_RESHAPES = {
    _aten.view.default,
    _aten._unsafe_view.default,
    _aten.reshape.default,
    _aten.unsqueeze.default,
    _aten.squeeze.dim,
}
_MADE = {
    _aten.zeros.default: 0,
    _aten.zeros_like.default: 0,
    _aten.new_zeros.default: 0,
    _aten.ones.default: 1,
    _aten.ones_like.default: 1,
    _aten.new_ones.default: 1,
    _aten.full.default: None,
    _aten.full_like.default: None,
    _aten.new_full.default: None,
    _aten.scalar_tensor.default: None,
}

_READS_MEMORY = {_aten.as_strided.default, _aten.view.dtype}
REDUCTIONS = {_aten.linalg_vector_norm.default, _aten.sum.dim_IntList, _aten.mean.dim}
"""Operations that add in an order that depends on strides."""


def simplify(module: fx.GraphModule) -> fx.GraphModule:
    """Returns a smaller graph with the same results, to the bit.

    - Writes in place become values (:func:`~torchrl_marl.capture.writes.without_writes`).
    - Copies are dropped, and an operation with the same arguments as an earlier one, too.
    - Operations on constants are replaced by their results.
    - ``x * 1``, ``x / 1``, ``x - 0``, ``(x + 0) + 0``, ``where(c, x, x)`` and ``~~b`` are ``x``,
      ``x`` and ``b``.
    - ``where(c, x - y, x)`` is ``x - where(c, y, 0)``, so that the masks of a chain of such
      steps do not depend on each other.

    Random numbers are drawn as often as before, in the same order.

    Args:
        module (GraphModule): recorded graph of ATen operators, with descriptions of its values.

    Raises:
        CaptureError: a write in place has no rule.

    Examples:
        >>> from torchrl_marl.capture import trace
        >>> traced = trace(lambda x, y: [(x - y).abs(), (x - y).abs() * 1.0], torch.ones(2),
        ...                torch.zeros(2))
        >>> traced.n_operations
        5
        >>> [node.name for node in simplify(traced.module).graph.nodes][2:4]
        ['sub_tensor', 'abs_default']
    """
    functional = without_writes(module)
    return _Pass(functional).run()


def fill_value_of(node: Node) -> Any:
    """Returns the number with which an ``aten.full`` fills a tensor; None for other nodes."""
    return node.args[1] if node.target is _aten.full.default else None


class _Pass:
    """One pass over a graph without writes, which builds the simplified graph."""

    def __init__(self, module: fx.GraphModule) -> None:
        self.module, self.graph = module, fx.Graph()
        self.base, _ = memory(module.graph)
        self.known: dict[Hashable, Node] = {}
        self.values: dict[Node, Tensor] = {}  # constants of the new graph
        self.attributes: dict[str, Tensor] = {}

    def run(self) -> fx.GraphModule:
        new: dict[Node, Node] = {}
        for node in self.module.graph.nodes:
            if node.op == "output":
                self.graph.output(self._outputs(node, new))
            elif node.op == "placeholder":
                new[node] = self.graph.node_copy(node)
            elif node.op == "get_attr":
                new[node] = self._constant(getattr(self.module, node.target).detach())
            else:
                args, kwargs = fx.node.map_arg((node.args, node.kwargs), new.__getitem__)
                new[node] = self._operation(node, args, kwargs)
        simplified = _LazyGraphModule(self.attributes, self.graph)
        _drop_unused(simplified.graph)
        simplified.recompile()
        return simplified

    def _operation(self, node: Node, args: tuple, kwargs: dict[str, Any]) -> Node:
        if node.target in _READS_MEMORY:
            raise CaptureError(f"{node.target} depends on how memory is laid out")
        same = _unchanged_argument(node, args)
        if same is not None:
            return same
        if node.target in _MADE:
            return self._make_node(node, args)
        target, args = _normal_form(node, args)
        if target is _aten.permute.default and args[1] == sorted(args[1]):
            return args[0]
        if target is _aten.reshape.default and _is_like(value_of(args[0]), value_of(node)):
            return args[0]
        if is_random(target):
            return self._node(node, target, args, kwargs)
        if target is _aten.where.self:
            target, args = self._rewrite_masked_difference(node, args)
        if target in REDUCTIONS:
            args = (self._as_recorded(node.args[0], args[0]), *args[1:])
        key = target, _hashable(args), _hashable(kwargs)
        if key not in self.known:
            value = self._fold_constants(target, args, kwargs)
            made = (
                self._node(node, target, args, kwargs) if value is None else self._constant(value)
            )
            self.known[key] = made
        return self.known[key]

    def _as_recorded(self, old: Any, new: Node) -> Node:
        """Copies a reduction's operand if its memory would be in another order than before."""
        if not value_of(old).is_contiguous() or new in self.values:
            return new
        key = (_aten.clone.default, new)
        if key not in self.known:
            how = {"memory_format": torch.contiguous_format}
            self.known[key] = self._node(old, _aten.clone.default, (new,), how)
        return self.known[key]

    def _node(self, like: Node, target: Any, args: tuple, kwargs: dict[str, Any]) -> Node:
        node = self.graph.call_function(target, args, kwargs)
        node.meta.update(like.meta)
        return node

    def _rewrite_masked_difference(self, node: Node, args: tuple) -> tuple[Any, tuple]:
        """Rewrites a masked difference as a difference with a masked amount.

        Subtracting 0.0 changes no number, not even -0.0.

        Returns:
            tuple: target and arguments of the new operation, or of the old one.
        """
        condition, found, x = args
        amount = _difference(found, x)
        if amount is None or not _is_like(value_of(x), value_of(node)):
            return _aten.where.self, args
        dtype, device = value_of(x).dtype, value_of(x).device
        shape = torch.Size() if isinstance(amount, float) else value_of(amount).shape
        if isinstance(amount, float):
            amount = self._filled_node(torch.tensor(amount, dtype=dtype), shape, device, {})
        zero = self._filled_node(torch.zeros((), dtype=dtype), torch.Size(), device, {})
        shape = torch.broadcast_shapes(value_of(condition).shape, shape)
        key = _aten.where.self, _hashable((condition, amount, zero)), _hashable({})
        if key not in self.known:
            self.known[key] = self._node(node, _aten.where.self, (condition, amount, zero), {})
            self.known[key].meta["val"] = torch.empty(shape, dtype=dtype, device="meta")
        return _aten.sub.Tensor, (x, self.known[key])

    # ------------------------------------------------------------------------------- constants

    def _make_node(self, node: Node, args: tuple) -> Node:
        value, described = _MADE[node.target], value_of(node)
        value = args[-1] if value is None else value
        if isinstance(value, fx.Node):
            return self._node(node, node.target, args, dict(node.kwargs))
        small = torch.full((), value, dtype=described.dtype)
        return self._filled_node(small, described.shape, described.device, node.meta)

    def _filled_node(self, value: Tensor, shape: torch.Size, device: Any, meta: dict) -> Node:
        """Returns the node of a tensor that is filled with one number."""
        key = ("full", tuple(shape), str(device), _bits(value))
        if key not in self.known:
            args = (list(shape), value.item())
            how = {"dtype": value.dtype, "device": device, "pin_memory": False}
            node = self.graph.call_function(_aten.full.default, args, how)
            node.meta.update(meta)
            node.meta["val"] = torch.empty(shape, dtype=value.dtype, device="meta")
            self.known[key] = node
            if shape.numel() <= LARGEST_CONSTANT:
                self.values[node] = value.to(device).expand(shape).contiguous()
        return self.known[key]

    def _constant(self, value: Tensor) -> Node:
        if value.numel() and _is_uniform(value):
            return self._filled_node(value.flatten()[0].cpu(), value.shape, value.device, {})
        key = ("constant", tuple(value.shape), str(value.device), _bits(value))
        if key not in self.known:
            name = f"_constant_{len(self.attributes)}"
            self.attributes[name] = value.contiguous().clone()
            self.known[key] = node = self.graph.get_attr(name)
            node.meta["val"] = self.values[node] = self.attributes[name]
        return self.known[key]

    def _fold_constants(self, target: Any, args: tuple, kwargs: dict[str, Any]) -> Tensor | None:
        """Returns the value of an operation on constants; None if it is not one, or large."""
        inputs = [x for x in pytree.tree_leaves((args, kwargs)) if isinstance(x, fx.Node)]
        if not inputs or any(x not in self.values for x in inputs):
            return None
        args, kwargs = fx.node.map_arg((args, kwargs), self.values.get)
        with torch.no_grad():
            value = target(*args, **kwargs)
        return value if isinstance(value, Tensor) and value.numel() <= LARGEST_CONSTANT else None

    # --------------------------------------------------------------------------------- outputs

    def _outputs(self, output: Node, new: dict[Node, Node]) -> list[Node]:
        """Returns the outputs; each has memory of its own, in the recorded order of elements."""
        return [self._own_memory(node, new[node]) for node in output.args[0]]

    def _own_memory(self, old: Node, new: Node) -> Node:
        described = value_of(old)
        order = memory_order(described)
        how = {"memory_format": torch.contiguous_format}
        if order == sorted(order):
            return self._node(old, _aten.clone.default, (new,), how)
        moved = self._node(old, _aten.permute.default, (new, order), {})
        own = self._node(old, _aten.clone.default, (moved,), how)
        moved.meta["val"] = own.meta["val"] = described.permute(order)
        back = [order.index(dim) for dim in range(len(order))]
        return self._node(old, _aten.permute.default, (own, back), {})


def memory_order(x: Tensor) -> list[int]:
    """Returns the dims of a tensor from the largest to the smallest stride."""
    strides = x.stride()
    return sorted(range(x.ndim), key=lambda dim: -strides[dim])


def _drop_unused(graph: fx.Graph) -> None:
    graph.eliminate_dead_code(lambda node: is_random(node.target) or node.is_impure())


def is_random(target: Any) -> bool:
    """Returns whether an operation draws random numbers."""
    return (
        isinstance(target, torch._ops.OpOverload)
        and torch.Tag.nondeterministic_seeded in target.tags
    )


def _unchanged_argument(node: Node, args: tuple) -> Node | None:
    """Returns the argument that an operation returns unchanged, to the bit."""
    first = args[0] if args and isinstance(args[0], fx.Node) else None
    rule = _IDENTITIES.get(node.target)
    if rule is not None and not node.kwargs:
        same = rule(args)
        return same if same is not None and _is_like(value_of(same), value_of(node)) else None
    if node.target in _COPIES:
        return first
    return None


def _is_like(x: Any, y: Any) -> bool:
    return isinstance(x, Tensor) and (x.shape, x.dtype) == (y.shape, y.dtype)


def _unless(number: int) -> Callable[[tuple], Any]:
    return lambda args: args[0] if _is_number(args[1], number) else None


def _is_number(x: Any, number: int) -> bool:
    """Returns whether an argument is a number; -0.0 is not 0."""
    return not isinstance(x, fx.Node) and x == number and math.copysign(1.0, x) > 0


def _add(args: tuple) -> Any:
    """``x + 0`` turns -0.0 into 0.0, so only the second of two such sums is ``x``."""
    x, number = args[:2]
    if not _is_number(number, 0) or x.target is not _aten.add.Tensor or x.kwargs:
        return None
    return x if _is_number(x.args[1], 0) else None


def _where(args: tuple) -> Any:
    condition, x, y = args
    taken = fill_value_of(condition)
    if taken is None:
        return x if x is y else None
    return x if taken else y


def _difference(found: Any, x: Any) -> Any:
    """Returns the amount subtracted from x, as a float or a node of its dtype, or None."""
    targets = (_aten.sub.Tensor, _aten.add.Tensor)
    if not isinstance(found, fx.Node) or found.target not in targets or found.kwargs:
        return None
    minuend, amount = found.args
    if minuend is not x or value_of(x).dtype not in (torch.float32, torch.float64):
        return None
    if isinstance(amount, (int, float)):
        return float(amount if found.target is _aten.sub.Tensor else -amount)
    is_alike = found.target is _aten.sub.Tensor and value_of(amount).dtype == value_of(x).dtype
    return amount if is_alike else None


def _twice(args: tuple) -> Any:
    return args[0].args[0] if args[0].target is _aten.bitwise_not.default else None


def _reshape(args: tuple) -> Any:
    return args[0]


def _stack(args: tuple) -> Any:
    """A stack of all slices of a tensor is the tensor."""
    parts, dim = args[0], args[1] if len(args) > 1 else 0
    if any(x.target is not _aten.select.int for x in parts):
        return None
    whole = parts[0].args[0]
    n_dims = value_of(whole).ndim
    places = [(x.args[0], x.args[1] % n_dims, x.args[2]) for x in parts]
    expected = [(whole, dim % n_dims, i) for i in range(value_of(whole).shape[dim])]
    return whole if places == expected else None


# Operation -> function of its arguments that returns the argument with the same values. The result
# must also have the shape and dtype of the operation's.
_IDENTITIES: dict[Any, Callable[[tuple], Any]] = {
    _aten.mul.Tensor: _unless(1),
    _aten.div.Tensor: _unless(1),
    _aten.sub.Tensor: _unless(0),
    _aten.add.Tensor: _add,
    _aten.where.self: _where,
    _aten.bitwise_not.default: _twice,
    _aten.stack.default: _stack,
    **dict.fromkeys((*_RESHAPES, _aten.expand.default), _reshape),
}


def _normal_form(node: Node, args: tuple) -> tuple[Any, tuple]:
    """Returns an operation and its arguments in the one form in which they are compared."""
    if node.target in _RESHAPES or _takes_only_row(node):
        return _aten.reshape.default, (_before_reshapes(args[0]), list(value_of(node).shape))
    if node.target is _aten.expand.default:
        return node.target, (args[0], list(value_of(node).shape))
    if node.target in _PERMUTATIONS:
        return _permuted(args[0], _PERMUTATIONS[node.target](value_of(node).ndim, *args[1:]))
    return node.target, args


def _takes_only_row(node: Node) -> bool:
    if node.target is not _aten.select.int:
        return False
    return value_of(node.args[0]).numel() == value_of(node).numel()


def _before_reshapes(x: Node) -> Node:
    while x.target is _aten.reshape.default:
        x = x.args[0]
    return x


def _permuted(x: Node, dims: list[int]) -> tuple[Any, tuple]:
    """Returns a permutation of dims; two in a row are one."""
    if x.target is _aten.permute.default:
        x, before = x.args
        dims = [before[dim] for dim in dims]
    return _aten.permute.default, (x, dims)


def _swapped(n_dims: int, a: int, b: int) -> list[int]:
    dims = list(range(n_dims))
    dims[a], dims[b] = dims[b], dims[a]
    return dims


# Operation -> function of the number of dims and its arguments that returns the order of the dims.
_PERMUTATIONS: dict[Any, Callable[..., list[int]]] = {
    _aten.permute.default: lambda n_dims, dims: [dim % n_dims for dim in dims],
    _aten.transpose.int: lambda n_dims, a, b: _swapped(n_dims, a, b) if n_dims else [],
    _aten.t.default: lambda n_dims: list(range(n_dims))[::-1],
}


def _hashable(x: Any) -> Hashable:
    if isinstance(x, (list, tuple)):
        return tuple(map(_hashable, x))
    if isinstance(x, dict):
        return tuple((key, _hashable(value)) for key, value in sorted(x.items()))
    return x if isinstance(x, fx.Node) else (type(x), repr(x))


def _bits(x: Tensor) -> tuple:
    return str(x.dtype), _bytes(x)


def _bytes(x: Tensor) -> bytes:
    flat = x.detach().cpu().flatten().clone(memory_format=torch.contiguous_format)
    return flat.view(torch.uint8).numpy().tobytes()


def _is_uniform(x: Tensor) -> bool:
    """Returns whether all elements have the same bits."""
    flat = x.detach().flatten().clone(memory_format=torch.contiguous_format)
    rows = flat.view(torch.uint8).reshape(flat.numel(), -1)
    return bool((rows == rows[0]).all())
