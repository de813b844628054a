"""Sums in a graph: a chain of additions becomes one sum over a stack, in the same order."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx
from torch.fx._lazy_graph_module import _LazyGraphModule

from torchrl_marl.capture.inductor import ordered_sum
from torchrl_marl.capture.writes import value_of

__all__ = ["sum_chains"]

_aten = torch.ops.aten
Node = Any  # fx.Node, whose arguments have a wide type

_SHORTEST = 4  # additions of a chain; fewer are as cheap as a sum


def sum_chains(module: fx.GraphModule) -> fx.GraphModule:
    """Returns a graph in which each long chain of additions and differences is one sum.

    A simulator adds the forces of all pairs to an agent one by one. The results do not change,
    since :data:`~torchrl_marl.capture.inductor.ordered_sum` adds in the same order.

    Args:
        module (GraphModule): simplified graph, without writes in place; not modified.

    Examples:
        >>> from torchrl_marl.capture import trace
        >>> from torchrl_marl.capture.simplify import simplify
        >>> def total(x):
        ...     found = x[0]
        ...     for i in range(1, 20):
        ...         found = found + x[i]
        ...     return found
        >>> module = sum_chains(simplify(trace(total, torch.zeros(20, 3)).module))
        >>> sum("ordered_sum" in node.name for node in module.graph.nodes)
        1
        >>> sum("add" in node.name for node in module.graph.nodes)
        0
    """
    graph = fx.Graph()
    new: dict[Node, Node] = {}
    graph.output(graph.graph_copy(module.graph, new))
    for last in [
        node for node in module.graph.nodes if _is_link(node) and not _feeds_one_sum(node)
    ]:
        summands = _summands(last)
        if len(summands) > _SHORTEST:
            with graph.inserting_before(new[last]):
                total = _emit_sum(graph, [(new[x], minus) for x, minus in summands])
            new[last].replace_all_uses_with(total)
    graph.eliminate_dead_code(lambda node: node.is_impure())
    return _LazyGraphModule(module, graph)


def _is_link(node: Node) -> bool:
    """Returns whether a node adds a float tensor to another one of the same shape."""
    if node.target not in (_aten.add.Tensor, _aten.sub.Tensor) or node.kwargs:
        return False
    if not all(isinstance(x, fx.Node) for x in node.args):
        return False
    first, second, result = (value_of(x) for x in (*node.args, node))
    same = first.shape == second.shape == result.shape
    return same and first.dtype == second.dtype == torch.float32


def _feeds_one_sum(node: Node) -> bool:
    """Returns whether only one operation reads a node, which adds something to it."""
    if len(node.users) != 1:
        return False
    (user,) = node.users
    return _is_link(user) and user.args[0] is node and user.args[1] is not node


def _summands(last: Node) -> list[tuple[Node, bool]]:
    """Returns what a chain adds, in order, and whether it is subtracted."""
    found: list[tuple[Node, bool]] = []
    node = last
    while True:
        found.append((node.args[1], node.target is _aten.sub.Tensor))
        before = node.args[0]
        if not (_is_link(before) and _feeds_one_sum(before)):
            return [(before, False), *reversed(found)]
        node = before


def _emit_sum(graph: fx.Graph, summands: list[tuple[Node, bool]]) -> Node:
    like = value_of(summands[0][0])

    def add(target: Any, args: tuple, *rows: int) -> Node:
        node = graph.call_function(target, args)
        node.meta["val"] = torch.empty((*rows, *like.shape), dtype=like.dtype, device="meta")
        return node

    rows = [add(_aten.neg.default, (x,)) if minus else x for x, minus in summands]
    return add(ordered_sum, (add(_aten.stack.default, (rows,), len(rows)), 0))
