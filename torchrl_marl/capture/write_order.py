"""Has a compiled graph compute what it needs of its inputs' old values before it writes to them.

Inductor computes a value where it is first needed. It moves that before a write of its own
operations, but not before one of a custom operation, which would then change the value.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence

import torch
import torch.utils._pytree as pytree
from torch import Tensor, fx

from torchrl_marl.errors import CaptureError

__all__ = ["compute_before_writes"]

_LIBRARY = torch.library.Library("torchrl_marl", "FRAGMENT")
_LIBRARY.define("computed(Tensor[] values) -> Tensor[]")


def compute_before_writes(module: fx.GraphModule) -> fx.GraphModule:
    """Returns a copy of a graph that stores what is used behind a write before the write.

    This holds for custom operations that write to their inputs, such as a step of Adam. Values
    that are computed before it and used behind it pass through an operation that stores them. The
    write takes the stored values as its argument ``before``, and ignores them; so it comes later,
    however a compiler orders its operations.

    Args:
        module (GraphModule): of ATen and custom operators; it stays as it is.

    Raises:
        CaptureError: a custom operation that writes to its inputs and has no such argument.

    Examples:
        >>> from torchrl_marl.capture import trace
        >>> from torchrl_marl.learners.adam import Adam
        >>> x = torch.ones(2)
        >>> adam = Adam([x], lr=0.5, eps=1e-8)
        >>> def double_and_step(*held):
        ...     double = 2 * x
        ...     adam.step([torch.ones(2)])
        ...     return double
        >>> module = compute_before_writes(trace(double_and_step, *adam.tensors).module)
        >>> [node.name for node in module.graph.nodes if node.op == "call_function"]
        ['mul', 'ones', 'computed_default', 'getitem', 'adam_']
    """
    graph = fx.Graph()
    graph.output(graph.graph_copy(module.graph, {}))
    for node in graph.find_nodes(op="call_function", target=operator.getitem):
        node.args[0].append(node)  # where its operation stands, as the other results of it
    stored: set[fx.Node] = set()
    for node in list(graph.nodes):
        if _is_custom_write(node):
            _store_before(graph, node, stored)
    return fx.GraphModule(module, graph)


def _is_custom_write(node: fx.Node) -> bool:
    target = node.target
    if not isinstance(target, torch._ops.OpOverload) or target.namespace in ("aten", "prims"):
        return False
    return target._schema.is_mutable


def _store_before(graph: fx.Graph, write: fx.Node, stored: set[fx.Node]) -> None:
    """Stores the values that exist before a write and are used behind it, also through views."""
    place = {node: i for i, node in enumerate(graph.nodes)}
    used = [n for n in place if any(place[n] < place[write] < place[user] for user in n.users)]
    viewed = dict.fromkeys(_viewed(node) for node in used)
    sources = [x for x in viewed if x.op == "call_function" and x not in stored]
    if not sources:
        return
    with graph.inserting_before(write):
        kept = graph.call_function(torch.ops.torchrl_marl.computed.default, (sources,))
        fresh = {x: graph.call_function(operator.getitem, (kept, i)) for i, x in enumerate(sources)}
    stored.update(fresh.values())
    _set_before(write, list(fresh.values()))
    with graph.inserting_before(write):
        for node in used:
            if _viewed(node) in sources:
                _replace_behind(node, _fresh(graph, node, fresh), place, place[write])


def _fresh(graph: fx.Graph, node: fx.Node, fresh: dict[fx.Node, fx.Node]) -> fx.Node:
    """Returns a view, once more, of the stored value."""
    if node not in fresh:
        source = _aliased(node)
        assert source is not None
        own = _fresh(graph, source, fresh)
        fresh[node] = graph.node_copy(node, lambda x: own if x is source else x)
    return fresh[node]


def _replace_behind(old: fx.Node, new: fx.Node, place: dict[fx.Node, int], write: int) -> None:
    for user in list(old.users):
        if place.get(user, -1) > write:
            user.replace_input_with(old, new)


def _viewed(node: fx.Node) -> fx.Node:
    """Returns the value, or the input, that a node is a view of; itself where it is none."""
    source = _aliased(node)
    return node if source is None else _viewed(source)


def _aliased(node: fx.Node) -> fx.Node | None:
    """Returns the argument whose memory a node shares; of several views, the operation."""
    if node.target is operator.getitem:
        several = node.args[0]
        return several if isinstance(several, fx.Node) and _aliased(several) else None
    if not isinstance(node.target, torch._ops.OpOverload):
        return None
    schema = node.target._schema
    if all(one.alias_info is None for one in schema.returns):
        return None
    aliased = [x for one, x in zip(schema.arguments, node.args) if one.alias_info is not None]
    return next((x for x in pytree.tree_leaves(aliased) if isinstance(x, fx.Node)), None)


def _set_before(write: fx.Node, stored: Sequence[fx.Node]) -> None:
    arguments = write.target._schema.arguments  # type: ignore[union-attr]
    if arguments[-1].name != "before":
        raise CaptureError(
            f"the operation {write.target} writes to its inputs, and values computed before it are "
            "used behind it; to be compiled it needs a last argument 'Tensor[] before', which it "
            "ignores. Or use execution=eager."
        )
    write.args = (*write.args[: len(arguments) - 1], list(stored))


def _computed(values: Sequence[Tensor]) -> list[Tensor]:
    return [x.clone() for x in values]


_LIBRARY.impl("computed", _computed, "CompositeExplicitAutograd")
_LIBRARY.impl("computed", _computed, "Meta")
