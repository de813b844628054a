"""Rewrites a captured graph into forms that compiled code runs faster on a CPU.

The results are those of the graph within a few units in the last place; operation by operation,
and on a GPU, graphs stay as they were recorded.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from torchrl_marl.capture.cuda_graph import written_inputs

__all__ = ["rational_tanh", "rewrite_for_cpu"]

_aten = torch.ops.aten
_LIBRARY = torch.library.Library("torchrl_marl", "FRAGMENT")
_LIBRARY.define("rows(Tensor[] sources, Tensor index) -> Tensor[]")

# The rational minimax approximation of Eigen and XLA: odd over even powers, lowest first.
_LARGEST = 7.90531110763549805
_ODD = (
    4.89352455891786e-03,
    6.37261928875436e-04,
    1.48572235717979e-05,
    5.12229709037114e-08,
    -8.60467152213735e-11,
    2.00018790482477e-13,
    -2.76076847742355e-16,
)
_EVEN = (
    4.89352518554385e-03,
    2.26843463243900e-03,
    1.18534705686654e-04,
    1.19825839466702e-06,
)


def rewrite_for_cpu(module: fx.GraphModule) -> fx.GraphModule:
    """Returns a copy of a recorded graph in forms that are fast on a CPU, when compiled.

    - ``tanh`` of float32 is :func:`rational_tanh`;
    - the bias of a linear layer is added by the kernel that reads the layer's output;
    - rows that one index selects from several inputs are gathered once, by one operation, and not
      anew wherever they are read;
    - norms of a list of tensors are computed tensor by tensor.

    Args:
        module (GraphModule): of ATen operators; it stays as it is.

    Examples:
        >>> from torchrl_marl.capture import trace
        >>> traced = trace(lambda x: x.tanh(), torch.ones(2))
        >>> fast = rewrite_for_cpu(traced.module)
        >>> [torch.ops.aten.tanh.default in {node.target for node in m.graph.nodes}
        ...  for m in (traced.module, fast)]
        [True, False]
    """
    graph = fx.Graph()
    graph.output(graph.graph_copy(module.graph, {}))
    _gather_once(graph, written_inputs(module))
    _one_by_one(graph)
    for node in list(graph.nodes):
        rewrite = _REWRITES.get(node.target)
        if rewrite is not None and _is_float32(node):
            with graph.inserting_before(node):
                node.replace_all_uses_with(rewrite(graph.call_function, node))
            graph.erase_node(node)
    return fx.GraphModule(module, graph)


def rational_tanh(x: Tensor) -> Tensor:
    """Returns ``tanh`` as a polynomial of degree 13 over one of degree 6, for float32.

    The largest error is 4.2e-7, absolute and (from 1e-30 up) relative; the result is odd, never
    beyond 1, and NaN where ``x`` is.

    Shapes:
        - x, and what is returned: any

    Examples:
        >>> rational_tanh(torch.tensor([0.0, 1.0, float("inf")]))
        tensor([0.0000, 0.7616, 1.0000])
    """
    return _rational_tanh(lambda operation, arguments: operation(*arguments), x)


Call = Callable[[Any, tuple], Any]


def _rational_tanh(call: Call, x: Any) -> Any:
    x = call(_aten.clamp.default, (x, -_LARGEST, _LARGEST))
    square = call(_aten.mul.Tensor, (x, x))
    odd = call(_aten.mul.Tensor, (x, _polynomial(call, square, _ODD)))
    return call(_aten.div.Tensor, (odd, _polynomial(call, square, _EVEN)))


def _polynomial(call: Call, x: Any, coefficients: Sequence[float]) -> Any:
    *rest, value = coefficients
    for coefficient in reversed(rest):
        value = call(_aten.mul.Tensor, (x, value))
        value = call(_aten.add.Tensor, (value, coefficient))
    return value


def _linear(call: Call, node: fx.Node) -> fx.Node:
    bias, x, weight = node.args
    product = call(_aten.mm.default, (x, weight))
    # Otherwise the compiler would fuse a product and a sum into one operation.
    return call(_aten.sub.Tensor, (product, call(_aten.neg.default, (bias,))))


def _one_by_one(graph: fx.Graph) -> None:
    """Computes norms of a list, which the compiler leaves to torch, tensor by tensor."""
    for node in graph.find_nodes(op="call_function", target=_aten._foreach_norm.Scalar):
        tensors, *order = node.args
        for user in list(node.users):
            with graph.inserting_before(user):
                arguments = (tensors[user.args[1]], *order)
                norm = graph.call_function(_aten.linalg_vector_norm.default, arguments)
            user.replace_all_uses_with(norm)
            graph.erase_node(user)
        graph.erase_node(node)


def _gather_once(graph: fx.Graph, written: set[int]) -> None:
    """Merges all selections of one input from others along their first dim."""
    inputs = graph.find_nodes(op="placeholder")
    unchanged = {x for i, x in enumerate(inputs) if i not in written}
    by_index: dict[fx.Node, list[fx.Node]] = {}
    for node in graph.find_nodes(op="call_function", target=_aten.index_select.default):
        source, dim, index = node.args
        if dim == 0 and {source, index} <= unchanged:
            by_index.setdefault(index, []).append(node)
    for index, selected in by_index.items():
        with graph.inserting_before(selected[0]):
            sources = [node.args[0] for node in selected]
            rows = graph.call_function(torch.ops.torchrl_marl.rows.default, (sources, index))
            for i, node in enumerate(selected):
                node.replace_all_uses_with(graph.call_function(operator.getitem, (rows, i)))
        for node in selected:
            graph.erase_node(node)


def _rows(sources: Sequence[Tensor], index: Tensor) -> list[Tensor]:
    return [x.index_select(0, index) for x in sources]


_LIBRARY.impl("rows", _rows, "CompositeExplicitAutograd")
_LIBRARY.impl(
    "rows", lambda sources, index: [x.new_empty(len(index), *x.shape[1:]) for x in sources], "Meta"
)

_REWRITES: dict[Any, Callable[[Call, fx.Node], fx.Node]] = {
    _aten.tanh.default: lambda call, node: _rational_tanh(call, node.args[0]),
    _aten.addmm.default: _linear,
}


def _is_float32(node: fx.Node) -> bool:
    known = node.meta.get("val", node.meta.get("tensor_meta"))
    return known is not None and known.dtype is torch.float32 and not node.kwargs
