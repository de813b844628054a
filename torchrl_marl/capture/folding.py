"""Folding of constants in graphs, and the memory that graphs' values share."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, fx

__all__ = ["LARGEST_CONSTANT", "fold_constants", "memory"]

LARGEST_CONSTANT = 4096
"""Most elements of a folded constant; larger constants are slower to read than to compute."""

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
    base, written_bases = memory(module.graph)
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
                fresh.meta["val"] = values[node]
            # Values that are written later need a copy of the constant.
            node.replace_all_uses_with(constant, delete_user_cb=lambda user: user not in written)
            node.replace_all_uses_with(fresh)
    _copy_outputs(module.graph)
    module.graph.eliminate_dead_code()
    module.recompile()
    return len(folded)


def _copy_outputs(graph: fx.Graph) -> None:
    """Copies constant outputs, since callers may write to an output."""
    base, _ = memory(graph)
    output = next(iter(reversed(graph.nodes)))
    for node in output.all_input_nodes:
        if base[node].op == "get_attr":
            with graph.inserting_before(output):
                copy = graph.call_function(torch.ops.aten.clone.default, (node,))
                copy.meta.update(node.meta)
                if node.op == "get_attr":
                    copy.meta["val"] = getattr(graph.owning_module, str(node.target))
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
    if not isinstance(value, Tensor) or value.numel() > LARGEST_CONSTANT:
        return None
    return value.clone() if target is _UNPACKED else value


def memory(graph: fx.Graph) -> tuple[dict[fx.Node, fx.Node], set[fx.Node]]:
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
