"""Batching of graphs: operations that a simulator repeats for each agent run as one.

A recorded step holds N copies of what is computed for each agent, and N (N - 1) / 2 of what is
computed for each pair. Operations of the same kind, shapes and depth form a group, and a group runs
once on stacked operands.
"""

from __future__ import annotations

import operator
from collections import defaultdict
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor, fx
from torch.fx._lazy_graph_module import _LazyGraphModule

from torchrl_marl.capture.inductor import ordered_sum
from torchrl_marl.capture.recorder import GraphRecorder
from torchrl_marl.capture.simplify import REDUCTIONS, fill_value_of, is_random, memory_order
from torchrl_marl.capture.writes import value_of

__all__ = ["Groups", "batch"]

_aten = torch.ops.aten
Node = Any  # fx.Node, whose arguments have a wide type
_SEVERAL = (_aten.split_with_sizes.default, _aten.split.Tensor, _aten.unbind.int)
_JOINS = (_aten.stack.default, _aten.cat.default)
_ARITHMETIC = (_aten.add.Tensor, _aten.sub.Tensor, _aten.mul.Tensor, _aten.div.Tensor)
# Views of several stacks stay apart: joining the stacks is work, and a view is none.
_VIEWS = (_aten.reshape.default, _aten.permute.default, _aten.expand.default)
# Runs of operands of one shape, from which on a join of features gathers all rows at once.
_MANY_RUNS = 4
# Operations without work of their own: they take a part of a stack.
_PARTS = (_aten.select.int, operator.getitem, _aten.clone.default)


def batch(groups: Groups, leaves: Sequence[Tensor], n_envs: int) -> fx.GraphModule:
    """Returns a graph that runs operations of the same kind as one; results are equal to the bit.

    Args:
        groups (Groups): the groups of a graph.
        leaves (sequence of Tensor): example inputs.
        n_envs (int): number of envs. The dim of the envs is the last in memory, so that all envs
            are contiguous. Only speed depends on it.

    Examples:
        >>> from torchrl_marl.capture import trace
        >>> from torchrl_marl.capture.simplify import simplify
        >>> def distances(x):
        ...     pairs = [(i, j) for i in range(4) for j in range(i)]
        ...     return [(x[i] - x[j]).abs() for i, j in pairs]
        >>> simplified = simplify(trace(distances, torch.zeros(4, 3)).module)
        >>> batched = batch(Groups(simplified), [torch.zeros(4, 3)], 3)
        >>> [sum(node.name.startswith("sub") for node in m.graph.nodes)
        ...  for m in (simplified, batched)]
        [6, 1]
    """
    inputs = [x.clone() for x in leaves]
    with torch.no_grad(), GraphRecorder(inputs) as recorder:
        outputs = _GroupRunner(groups, n_envs, recorder)(*inputs)
    batched = recorder.module(outputs)
    batched.graph.eliminate_dead_code(lambda node: is_random(node.target) or node.is_impure())
    batched.recompile()
    return batched


def _with_tensors_for_numbers(module: fx.GraphModule) -> fx.GraphModule:
    """Turns factors and summands such as an agent's mass into constants, which can be stacked."""
    graph = fx.Graph()
    graph.output(graph.graph_copy(module.graph, {}))
    for node in list(graph.nodes):
        if node.target in _ARITHMETIC and isinstance(node.args[1], (int, float)):
            described = value_of(node)
            if {described.dtype, value_of(node.args[0]).dtype} - {torch.float32, torch.float64}:
                continue
            how = {"dtype": described.dtype, "device": described.device, "pin_memory": False}
            with graph.inserting_before(node):
                number = graph.call_function(_aten.full.default, ([], node.args[1]), how)
            number.meta["val"] = torch.empty((), dtype=described.dtype, device="meta")
            node.update_arg(1, number)
    return _LazyGraphModule(module, graph)


class Groups:
    """Depths and groups of a graph's nodes.

    Args:
        module (GraphModule): simplified graph, without writes in place; not modified.

    Attributes:
        graph (Graph): a copy of the graph, in which numbers to add or to multiply with are tensors.
        members (list): groups of operations, in an order in which they can run.
        constants (dict): node -> its value, for tensors that are the same in each run. A tensor
            filled with one number is a scalar here.

    Examples:
        >>> from torchrl_marl.capture import trace
        >>> from torchrl_marl.capture.simplify import simplify
        >>> def distances(x):
        ...     return [(x[i] - x[j]).abs() for i in range(4) for j in range(i)]
        >>> len(Groups(simplify(trace(distances, torch.zeros(4, 3)).module)))  # sub and abs
        2
    """

    def __init__(self, module: fx.GraphModule) -> None:
        module = _with_tensors_for_numbers(module)
        self.graph = module.graph
        self.constants: dict[Node, Tensor] = {}
        self._depth: dict[Node, int] = {}
        self._last_draw = 0
        self._keys: dict[Node, Hashable] = {}
        groups: dict[Hashable, list[Node]] = defaultdict(list)
        for i, node in enumerate(module.graph.nodes):
            key = self._group_key(module, node, i)
            if key is not None:
                groups[key].append(node)
                self._keys[node] = key
        self.members = sorted(groups.values(), key=lambda group: self._depth[group[0]])

    def __len__(self) -> int:
        """Returns the number of operations of a batched graph, without joins and gathers."""
        return sum(group[0].op == "call_function" for group in self.members)

    def _group_key(self, module: fx.GraphModule, node: Node, i: int) -> Hashable:
        """Returns the key of a node's group; None for nodes without work of their own."""
        self._depth[node] = 0
        if node.op == "get_attr":
            self.constants[node] = getattr(module, str(node.target))
        elif fill_value_of(node) is not None:
            self.constants[node] = torch.full((), fill_value_of(node), dtype=value_of(node).dtype)
        elif node.op == "placeholder":
            return "input", *_describe_shapes(value_of(node))
        elif node.op == "call_function":
            below = max((self._depth[x] for x in node.all_input_nodes), default=0)
            self._depth[node] = below + (node.target not in _PARTS)
            if is_random(node.target):  # draws keep their order
                self._last_draw = self._depth[node] = max(self._depth[node], self._last_draw + 1)
            if node.target not in (*_PARTS, *_SEVERAL):
                own: Hashable = i if is_random(node.target) or _scalars_decide_dtype(node) else None
                if node.target in _VIEWS:
                    own = self._keys.get(node.args[0])
                return self._depth[node], node.target, _comparable((node.args, node.kwargs)), own
        return None


def _describe_shapes(value: Any) -> tuple:
    return tuple((tuple(x.shape), x.dtype, x.device) for x in pytree.tree_leaves(value))


def _comparable(x: Any) -> Hashable:
    """Returns arguments in a form to compare, with shapes instead of nodes."""
    if isinstance(x, fx.Node):
        return _describe_shapes(value_of(x))
    if isinstance(x, (list, tuple)):
        return tuple(map(_comparable, x))
    if isinstance(x, dict):
        return tuple((key, _comparable(value)) for key, value in sorted(x.items()))
    return type(x), repr(x)


Place = tuple[Hashable, int]


class _GroupRunner:
    """Function of the graph's inputs that runs each group once.

    A *stack* ``[k, ...]`` holds the values of several nodes. The place of a node is the key of its
    stack and its row there.
    """

    def __init__(self, groups: Groups, n_envs: int, recorder: GraphRecorder) -> None:
        self.graph, self.n_envs, self._recorder = groups.graph, n_envs, recorder
        self.groups, self.constants = groups.members, groups.constants
        self._made: dict[Hashable, Tensor] = {}

    def __call__(self, *leaves: Tensor) -> list[Tensor]:
        self.stacks: dict[Hashable, Any] = {}
        self.places: dict[Node, Place] = {}
        self.single: dict[Node, Tensor] = {}
        self.single.update(zip(self.graph.find_nodes(op="placeholder"), leaves))
        for key, group in enumerate(self.groups):
            self.places.update((node, (key, row)) for row, node in enumerate(group))
            self.stacks[key] = self._stack_of(group)
        (output,) = self.graph.find_nodes(op="output")
        return [self._own_memory(node) for node in output.args[0]]

    def _stack_of(self, group: list[Node]) -> Any:
        """Runs a group, and returns the stack of its values."""
        first = group[0]
        if first.op == "placeholder":
            inputs = [self.single[node] for node in group]
            return torch.stack(inputs) if len(group) > 1 else inputs[0].unsqueeze(0)
        if first.target in _JOINS:
            return self._join_group(group)
        operands = zip(*(_operands(node) for node in group))
        found = [self._stack_values(nodes) for nodes in operands]
        values, stacked = [x for x, _ in found], [several for _, several in found]
        if first.target is ordered_sum and stacked[0]:
            return ordered_sum(values[0], first.args[1] + 1)
        if first.target in REDUCTIONS:
            values = [x.contiguous() for x in values]
        run = _as_function(first)
        if any(stacked) and _is_elementwise(first):
            return self._elementwise(first, values, stacked)
        if any(stacked):
            in_dims = tuple(0 if several else None for several in stacked)
            return torch.vmap(run, in_dims)(*values)
        value = run(*values)
        if isinstance(value, Tensor):
            self.single[first] = value
        return pytree.tree_map(lambda x: x.unsqueeze(0), value)

    def _elementwise(self, first: Node, values: list[Tensor], stacked: list[bool]) -> Tensor:
        """Runs an operation on elements with the envs as the last dim.

        The compiler's loops follow the order of the dims where it cannot tell the strides.
        """
        n_dims = value_of(first).ndim
        shaped = [
            x.reshape(*x.shape[:1], *(1 for _ in range(n_dims + 1 - x.ndim)), *x.shape[1:])
            if several
            else x.reshape(*(1 for _ in range(n_dims + 1 - x.ndim)), *x.shape)
            for x, several in zip(values, stacked)
        ]
        shape = value_of(first).shape
        envs = next((i for i in range(1, n_dims + 1) if shape[i - 1] == self.n_envs), n_dims)
        return _as_function(first)(*(x.movedim(envs, -1) for x in shaped)).movedim(-1, envs)

    def _own_memory(self, node: Node) -> Tensor:
        """Returns an output in memory of its own, with the recorded order of its elements."""
        order = memory_order(value_of(node))
        own = self._single_value(node).permute(order).clone(memory_format=torch.contiguous_format)
        return own.permute([order.index(dim) for dim in range(len(order))])

    # ------------------------------------------------------------------------------ single values

    def _find_place(self, node: Node) -> Place:
        if node not in self.places:
            if node.target is _aten.clone.default:
                self.places[node] = self._find_place(node.args[0])
            elif node.target is _aten.select.int:
                self.places[node] = self._select_slices(*node.args)
            elif node.args[0].target in _SEVERAL:
                self.places[node] = self._split_part(node.args[0], node.args[1])
            else:
                key, row = self._find_place(node.args[0])
                self.stacks["item", key, node.args[1]] = self.stacks[key][node.args[1]]
                self.places[node] = ("item", key, node.args[1]), row
        return self.places[node]

    def _select_slices(self, whole: Node, dim: int, i: int) -> Place:
        """Places all slices of a stack along a dim in one stack."""
        shape, (key, row) = value_of(whole).shape, self._find_place(whole)
        dim, size = dim % len(shape), shape[dim]
        slices = "slices", key, dim
        if slices not in self.stacks:
            x = self.stacks[key].movedim(dim + 1, 1)
            self.stacks[slices] = x.reshape(-1, *x.shape[2:])
        return slices, row * size + i % size

    def _split_part(self, several: Node, i: int) -> Place:
        """Places all parts of a split of the same size in one stack."""
        whole, dim, sizes = _split_arguments(several)
        key, row = self._find_place(whole)
        same = [j for j, size in enumerate(sizes) if size == sizes[i]]
        parts = "parts", key, several.target, dim, sizes[i], tuple(same)
        if parts not in self.stacks:
            starts = [sum(sizes[:j]) for j in range(len(sizes))]
            wanted = [starts[j] + r for j in same for r in range(sizes[i])]
            x = self._rows(self.stacks[key].movedim(dim + 1, 1), wanted, 1)
            x = x.reshape(-1, sizes[i], *x.shape[2:])
            unbound = several.target is _aten.unbind.int
            self.stacks[parts] = x.squeeze(1) if unbound else x.movedim(1, dim + 1)
        return parts, row * len(same) + same.index(i)

    def _single_value(self, node: Node) -> Tensor:
        if node.target is _aten.clone.default:
            return self._single_value(node.args[0])
        if node in self.constants:
            return self._constant(("one", node), lambda: self._value(node))
        if node not in self.single:
            key, row = self._find_place(node)
            self.single[node] = self.stacks[key].select(0, row)
        return self.single[node]

    def _value(self, node: Node) -> Tensor:
        described = value_of(node)
        return self.constants[node].expand(described.shape)

    def _constant(self, key: Hashable, make: Callable[[], Tensor]) -> Tensor:
        if key not in self._made:
            with self._recorder.unrecorded():
                self._made[key] = make()
        return self._made[key]

    # ------------------------------------------------------------------------------------- stacks

    def _stack_values(self, nodes: Sequence[Node]) -> tuple[Tensor, bool]:
        """Returns the values of several nodes, and whether they are stacked or all the same."""
        if all(node is nodes[0] for node in nodes):
            return self._single_value(nodes[0]), False
        if all(node in self.constants for node in nodes):
            return self._constants(nodes), True
        places = [
            (("constant", node), 0) if node in self.constants else self._find_place(node)
            for node in nodes
        ]
        keys = list(dict.fromkeys(key for key, _ in places))
        if len(keys) == 1:
            return self._rows(self.stacks[keys[0]], [row for _, row in places]), True
        if len(keys) == len(nodes):
            return self._cat([self._single_value(node).unsqueeze(0) for node in nodes], 0), True
        return self._rows_of_several(keys, places), True

    def _rows_of_several(self, keys: list[Hashable], places: list[Place]) -> Tensor:
        keys = sorted(keys, key=repr)
        stacks = [self._stack(key) for key in keys]
        together = "together", *keys
        if together not in self.stacks:
            self.stacks[together] = self._cat(stacks, 0)
        starts = {key: sum(len(x) for x in stacks[:i]) for i, key in enumerate(keys)}
        return self._rows(self.stacks[together], [starts[key] + row for key, row in places])

    def _stack(self, key: Any) -> Tensor:
        if isinstance(key, tuple) and key[0] == "constant":
            return self._single_value(key[1]).unsqueeze(0)
        return self.stacks[key]

    def _constants(self, nodes: Sequence[Node]) -> Tensor:
        """Returns a stack of constants; one number per row for tensors filled with a number."""
        shape = value_of(nodes[0]).shape
        values = [self.constants[node] for node in nodes]
        if any(x.ndim for x in values):
            return self._constant(
                ("stack", *nodes), lambda: torch.stack([self._value(x) for x in nodes])
            )
        rows = self._constant(("numbers", *nodes), lambda: torch.stack(values))
        return rows.reshape(-1, *(1 for _ in shape)).expand(-1, *shape)

    def _join_group(self, group: list[Node]) -> Tensor:
        """Returns the stack of several ``cat`` or ``stack``; runs of equal shapes are joined once.

        Shapes:
            - returns: ``[k, ...]``
        """
        first, k = group[0], len(group)
        dim: int = (first.args[1] if len(first.args) > 1 else 0) % value_of(first).ndim
        shapes = [_describe_shapes(value_of(x)) for x in first.args[0]]
        starts = [i for i in range(len(shapes)) if not i or shapes[i] != shapes[i - 1]]
        if len(starts) > _MANY_RUNS:
            features = self._join_features(group, dim)
            if features is not None:
                return features
        joined = []
        for start, end in zip(starts, [*starts[1:], len(shapes)]):
            x, stacked = self._stack_values([p for node in group for p in node.args[0][start:end]])
            x = x if stacked else x.expand(k * (end - start), *x.shape)
            x = x.reshape(k, end - start, *x.shape[1:]).movedim(1, dim + 1)
            if first.target is _aten.cat.default:
                x = x.reshape(*x.shape[: dim + 1], -1, *x.shape[dim + 3 :])
            joined.append(x)
        return joined[0] if len(joined) == 1 else self._cat(joined, dim + 1)

    def _join_features(self, group: list[Node], dim: int) -> Tensor | None:
        """Returns the stack of several ``cat`` of features, gathered at once from all operands.

        Returns None if the operands are no features of envs, or hold many others beside these.

        Shapes:
            - returns: ``[k, E, W]`` or ``[k, W, E]``
        """
        parts = [x for node in group for x in node.args[0]]
        shapes = [value_of(x).shape for x in parts]
        if group[0].target is not _aten.cat.default or any(len(shape) != 2 for shape in shapes):
            return None
        if any(shape[1 - dim] != self.n_envs for shape in shapes):
            return None
        places = [
            (("constant", x), 0) if x in self.constants else self._find_place(x) for x in parts
        ]
        stacks = {key: self._stack(key).movedim(2 - dim, -1) for key in dict(places)}
        starts, n_rows = {}, 0
        for key, x in stacks.items():
            starts[key], n_rows = n_rows, n_rows + x.shape[0] * x.shape[1]
        rows = [
            starts[key] + row * shape[dim] + i
            for (key, row), shape in zip(places, shapes)
            for i in range(shape[dim])
        ]
        if n_rows > 2 * len(rows):
            return None
        together = self._cat([x.reshape(-1, self.n_envs) for x in stacks.values()], 0)
        found = self._rows(together, rows).reshape(len(group), -1, self.n_envs)
        return found.movedim(-1, 2 - dim)

    def _rows(self, x: Tensor, rows: list[int], dim: int = 0) -> Tensor:
        """Returns rows of a stack: as a view if they are equally spaced."""
        if rows == list(range(x.shape[dim])):
            return x
        step = rows[1] - rows[0] if len(rows) > 1 else 1
        if step > 0 and rows == list(range(rows[0], rows[0] + len(rows) * step, step)):
            return _aten.slice.Tensor(x, dim, rows[0], rows[-1] + 1, step)
        index = self._constant(("rows", *rows), lambda: torch.tensor(rows, device=x.device))
        envs = self._envs_dim(x)
        if dim == envs:
            return x.index_select(dim, index)
        dim = dim - (dim > envs)
        # Compiled, this has no check of the index, which is known to be valid.
        moved = _aten._unsafe_index.Tensor(
            x.movedim(envs, -1), [*(None for _ in range(dim)), index]
        )
        return moved.movedim(-1, envs)

    def _cat(self, stacks: list[Tensor], dim: int) -> Tensor:
        envs = self._envs_dim(stacks[0])
        moved = [x.movedim(envs, -1) for x in stacks]
        dim = dim - (dim > envs) if dim != envs else stacks[0].ndim - 1
        return torch.cat(moved, dim).movedim(-1, envs)

    def _envs_dim(self, x: Tensor) -> int:
        """Returns the dim of the envs in a stack, or the last dim if none has their number."""
        return next((dim for dim in range(1, x.ndim) if x.shape[dim] == self.n_envs), x.ndim - 1)


def _operands(node: Node) -> list[Node]:
    return [x for x in pytree.tree_leaves((node.args, node.kwargs)) if isinstance(x, fx.Node)]


def _is_elementwise(node: Node) -> bool:
    """Returns whether an operation works on elements and returns one tensor."""
    value = value_of(node)
    return torch.Tag.pointwise in node.target.tags and isinstance(value, Tensor) and value.ndim > 0


def _scalars_decide_dtype(node: Node) -> bool:
    """Returns whether the dtype of the result depends on which operands are scalars."""
    described = pytree.tree_leaves([value_of(x) for x in _operands(node)])
    dtypes = {x.dtype for x in described} - {torch.bool}
    return len(dtypes) > 1 and any(not x.ndim for x in described)


def _as_function(node: Node) -> Callable[..., Any]:
    """Returns a node's operation as a function of its operands."""

    def run(*operands: Tensor) -> Any:
        rest = iter(operands)
        args, kwargs = fx.node.map_arg((node.args, node.kwargs), lambda _: next(rest))
        return node.target(*args, **kwargs)

    return run


def _split_arguments(several: Node) -> tuple[Node, int, list[int]]:
    """Returns what is split, along which dim, and the sizes of the parts."""
    whole, *rest = several.args
    unbound = several.target is _aten.unbind.int
    given: Any = rest[0] if unbound and rest else rest[1] if len(rest) > 1 else 0
    dim = given % value_of(whole).ndim
    return whole, dim, [1 if unbound else x.shape[dim] for x in value_of(several)]
