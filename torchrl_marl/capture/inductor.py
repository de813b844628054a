"""Compilation of graphs with Inductor, with rewrites for CPUs and ordered writes."""

from __future__ import annotations

import contextlib
import functools
import gc
import logging
import operator
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any, cast

import torch
import torch.utils._pytree as pytree
from torch import Tensor, fx

from torchrl_marl.capture.cuda_graph import written_inputs
from torchrl_marl.capture.stored import compile_stored
from torchrl_marl.errors import CaptureError, WriteError

__all__ = [
    "compile_module",
    "compute_before_writes",
    "ordered_sum",
    "rational_tanh",
    "rewrite_for_cpu",
]

# Random numbers are those of eager execution. Tiling by strides costs small kernels more than it
# saves (balance, 600 envs: 1.05 -> 0.83 ms per step). Assertions on strides and alignment would
# take a tenth of a small step's time.
OPTIONS: dict[str, Any] = {
    "fallback_random": True,
    "cpp.enable_tiling_heuristics": False,
    "size_asserts": False,
    "alignment_asserts": False,
}

# Smallest number of operations of graphs stored on disk, since a library takes some seconds.
_LARGE = 200

# Operations that Inductor replaces by simpler ones that round differently.
_REORDERED = (torch.ops.aten.linalg_vector_norm.default, torch.ops.aten.logaddexp.default)


def compile_module(
    module: fx.GraphModule, leaves: list[Tensor], exact: bool = False
) -> tuple[Any, int]:
    """Compiles a graph, or loads it from the cache.

    Args:
        module (GraphModule): graph of ATen operators.
        leaves (list of Tensor): its inputs; the result is valid for their shapes, strides and
            devices.
        exact (bool): whether torch's kernels are used where the compiler's code would round
            differently, because it computes in another order.

    Returns:
        callable, int: function from the inputs to the list of outputs, and number of kernels.

    Raises:
        WriteError: if the compiler's cache cannot be written.
    """
    on_cpu = not exact and all(x.device.type == "cpu" for x in leaves)
    module = compute_before_writes(rewrite_for_cpu(module) if on_cpu else module)
    if on_cpu and len(module.graph.nodes) >= _LARGE and _libraries_load():
        try:
            return compile_stored(module, leaves, OPTIONS, _compiling)
        except OSError as error:
            raise WriteError(
                f"a compiled graph cannot be stored ({error}); set TORCHINDUCTOR_CACHE_DIR to a "
                "writable folder, or use execution=eager."
            ) from error
    import torch._inductor
    import torch._inductor.metrics as metrics

    before = metrics.generated_kernel_count
    with _compiling():
        if exact:
            run = _compiled_exactly(module, leaves)
        else:
            run = torch._inductor.compile(module, list(leaves), options=OPTIONS)
    return run, metrics.generated_kernel_count - before


def _libraries_load() -> bool:
    # On machines with a GPU torch 2.11 crashes when it loads the library of a CPU graph.
    return not torch.cuda.is_available()


@contextlib.contextmanager
def _compiling() -> Iterator[None]:
    with (
        _cacheable(),
        _pause_garbage_collection(),
        _quick_index_analysis(),
        _without_hints(),
        _cache_dtype_table(),
    ):
        yield


@contextlib.contextmanager
def _cache_dtype_table() -> Iterator[None]:
    """Lets the compiler make its table of dtypes once, not for every operation of every kernel."""
    from torch._inductor.dtype_propagation import DtypePropagationOpsHandler

    kind: Any = DtypePropagationOpsHandler
    make = kind.__init__
    made: list[Any] = []

    def make_once(self: Any) -> None:
        if not made:
            make(self)
            made.append(self)

    kind.__init__ = make_once
    try:
        yield
    finally:
        kind.__init__ = make


@contextlib.contextmanager
def _pause_garbage_collection() -> Iterator[None]:
    """Pauses garbage collection, which would take a tenth of the compilation time."""
    if not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


@contextlib.contextmanager
def _without_hints() -> Iterator[None]:
    """Silences the hints that the compiler prints for its developers, such as on slow fallbacks."""
    logger = logging.getLogger("torch._inductor.ir")
    before = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(before)


@contextlib.contextmanager
def _quick_index_analysis() -> Iterator[None]:
    """Skips the compiler's general simplification of linear index expressions.

    For every load of every kernel, the compiler simplifies the index with sympy before it computes
    the stride. Most indices are linear and cannot be simplified, but the attempts take a quarter of
    the compilation time.
    """
    from torch._inductor import sizevars

    names = ("simplify_index_in_vec_range", "stride_at")
    if not all(hasattr(sizevars, name) for name in names):  # another version of torch
        yield
        return
    before = {name: getattr(sizevars, name) for name in names}
    try:
        for name in names:
            setattr(sizevars, name, _quick(name, before[name]))
        yield
    finally:
        for name in names:
            setattr(sizevars, name, before[name])


def _quick(name: str, general: Any) -> Any:
    import sympy

    @functools.cache
    def quick(index: sympy.Expr, var: sympy.Symbol, *vec_length: int) -> sympy.Expr:
        if index.atoms(sympy.Function, sympy.Rel, sympy.Pow):
            return general(index, var, *vec_length)
        if name == "stride_at":
            return sympy.expand(index.xreplace({var: var + 1}) - index)
        return index

    return quick


def _cacheable() -> AbstractContextManager[Any]:
    """Context in which the compiler caches its output on disk, as it does for symbolic shapes.

    If an update has been compiled before, its compilation then takes 4 s instead of 11 s. Sizes
    stay numbers: as symbols, strides of inputs that only a custom operation reads have no value.
    """
    from torch._guards import TracingContext, tracing
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    mode: Any = FakeTensorMode(shape_env=ShapeEnv(), static_shapes=True, allow_non_fake_inputs=True)
    convert = mode.from_tensor
    mode.from_tensor = lambda x, **options: convert(x, **{**options, "static_shapes": True})
    return tracing(TracingContext(mode))


def _compiled_exactly(module: fx.GraphModule, leaves: list[Tensor]) -> Any:
    from torch._inductor.compile_fx import compile_fx
    from torch._inductor.decomposition import select_decomp_table
    from torch._inductor.lowering import lowerings, make_fallback

    table = {op: f for op, f in select_decomp_table().items() if op not in _REORDERED}
    for op in _REORDERED:
        # This is the compiler's default, too, unless the environment variable CI is set.
        if op not in lowerings:
            make_fallback(op, override_decomp=True)
    # The cache ignores decompositions, and would return a graph compiled with the defaults.
    options = {**OPTIONS, "force_disable_caches": True}
    return compile_fx(module, leaves, config_patches=options, decompositions=table)


_aten = torch.ops.aten
_LIBRARY = torch.library.Library("torchrl_marl", "FRAGMENT")
_LIBRARY.define("rows(Tensor[] sources, Tensor index) -> Tensor[]")
_LIBRARY.define("ordered_sum(Tensor x, int dim) -> Tensor")
_LIBRARY.define("tall_product(Tensor x, Tensor y) -> Tensor")
ordered_sum = torch.ops.torchrl_marl.ordered_sum.default
"""Sum along a dim that adds one slice after the other. Torch's sum adds in another order."""
_tall_product = torch.ops.torchrl_marl.tall_product.default
_TALL = 2048  # rows; with half as many, oneDNN and BLAS take the same time

# Rational minimax approximation that Eigen and XLA use: the coefficients of the odd powers of
# the numerator and of the even powers of the denominator, lowest first.
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
    """Returns a copy of a recorded graph that is faster on a CPU when compiled.

    - ``tanh`` of float32 becomes :func:`rational_tanh`.
    - The bias of a linear layer is added by the kernel that reads the layer's output.
    - The gradient of a weight that has fewer inputs than outputs is computed transposed.
    - Products with many rows are computed by oneDNN instead of BLAS.
    - If one index selects rows from several inputs, one operation gathers all of these rows once.
      Otherwise every operation that reads them would gather them again.
    - Norms of a list of tensors are computed tensor by tensor.
    - :data:`ordered_sum` becomes torch's sum, which the compiler turns into such a loop.

    Args:
        module (GraphModule): graph of ATen operators; not modified.

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
    _merge_gathers(graph, written_inputs(module))
    _split_norms(graph)
    for node in list(graph.nodes):
        rewrite = _REWRITES.get(node.target)
        if rewrite is not None and _is_float32(node):
            with graph.inserting_before(node):
                fast = rewrite(graph.call_function, node)
            if fast is node:
                continue
            fast.meta = dict(node.meta)
            node.replace_all_uses_with(fast)
            graph.erase_node(node)
    return fx.GraphModule(module, graph)


def rational_tanh(x: Tensor) -> Tensor:
    """Returns ``tanh`` for float32 as a polynomial of degree 13 divided by one of degree 6.

    The largest absolute error is 4.2e-7, and so is the largest relative error for absolute values
    of ``x`` from 1e-30 on. The function is odd, bounded by 1, and NaN where ``x`` is NaN.

    Shapes:
        - x, returns: any

    Examples:
        >>> rational_tanh(torch.tensor([0.0, 1.0, float("inf")]))
        tensor([0.0000, 0.7616, 1.0000])
    """
    return _rational_tanh(lambda operation, arguments: operation(*arguments), x)


Call = Callable[[Any, tuple], Any]


def _rational_tanh(call: Call, x: Any) -> Any:
    x = call(_aten.clamp.default, (x, -_LARGEST, _LARGEST))
    square = call(_aten.mul.Tensor, (x, x))
    above, below = (_polynomial(call, square, own) for own in (_ODD, _EVEN))
    return call(_aten.div.Tensor, (call(_aten.mul.Tensor, (x, above)), below))


def _polynomial(call: Call, x: Any, coefficients: Sequence[float]) -> Any:
    *rest, value = coefficients
    for coefficient in reversed(rest):
        value = call(_aten.mul.Tensor, (x, value))
        value = call(_aten.add.Tensor, (value, coefficient))
    return value


def _linear(call: Call, node: fx.Node) -> fx.Node:
    bias, *factors = node.args
    operation = _tall_product if _is_tall(node) else _aten.mm.default
    product = call(operation, tuple(factors))
    # With a sum, the compiler would fuse it and the product into one operation.
    return call(_aten.sub.Tensor, (product, call(_aten.neg.default, (bias,))))


def _matmul(call: Call, node: fx.Node) -> fx.Node:
    if _is_tall(node):
        return call(_tall_product, node.args)
    left, right = cast(Sequence[fx.Node], node.args)
    if _value_of(left) is None or _value_of(right) is None:  # constants are not described
        return node
    (n_rows, n_summed), n_columns = _value_of(left).shape, _value_of(right).shape[1]
    if not n_columns < n_rows < n_summed:
        return node
    # BLAS is up to 7 times slower on long sums if the result is narrow instead of flat.
    turned = [call(_aten.t.default, (x,)) for x in (right, left)]
    return call(_aten.t.default, (call(_aten.mm.default, tuple(turned)),))


def _view(call: Call, node: fx.Node) -> fx.Node:
    """Returns a view that copies, if it is one of a product that is now computed transposed."""
    product = _viewed(node)
    factors = product.args if product.target is _aten.mm.default else ()
    turned = factors and all(cast(fx.Node, x).target is _aten.t.default for x in factors)
    return call(_aten.reshape.default, node.args) if turned else node


def _is_tall(node: fx.Node) -> bool:
    """Returns whether oneDNN computes a product faster than BLAS, which copies all rows first."""
    n_rows, n_columns = _value_of(node).shape
    return n_rows >= _TALL and n_columns % 16 == 0 and torch.backends.mkldnn.is_available()


def _split_norms(graph: fx.Graph) -> None:
    """Replaces the norms of a list of tensors, which the compiler cannot fuse, by one norm each."""
    for node in graph.find_nodes(op="call_function", target=_aten._foreach_norm.Scalar):
        tensors, *order = node.args
        for user in list(node.users):
            with graph.inserting_before(user):
                arguments = (tensors[user.args[1]], *order)
                norm = graph.call_function(_aten.linalg_vector_norm.default, arguments)
            user.replace_all_uses_with(norm)
            graph.erase_node(user)
        graph.erase_node(node)


def _merge_gathers(graph: fx.Graph, written: set[int]) -> None:
    """Merges all operations that select rows with the same index into one operation.

    Rows of which some agents are selected later stay with the compiler, which then reads only these
    agents.
    """
    inputs = graph.find_nodes(op="placeholder")
    unchanged = {x for i, x in enumerate(inputs) if i not in written}
    by_index: dict[fx.Node, list[fx.Node]] = {}
    for node in graph.find_nodes(op="call_function", target=_aten.index_select.default):
        source, dim, index = node.args
        if dim == 0 and {source, index} <= unchanged and not _is_narrowed(node):
            by_index.setdefault(index, []).append(node)
    for index, selected in by_index.items():
        with graph.inserting_before(selected[0]):
            sources = [node.args[0] for node in selected]
            rows = graph.call_function(torch.ops.torchrl_marl.rows.default, (sources, index))
            for i, node in enumerate(selected):
                node.replace_all_uses_with(graph.call_function(operator.getitem, (rows, i)))
        for node in selected:
            graph.erase_node(node)


def _is_narrowed(node: fx.Node) -> bool:
    """Returns whether all that is computed of an operation's result is a selection along dim 1.

    Operations on single elements may come in between.
    """
    readers = list(node.users)
    for reader in readers:
        target = reader.target
        if target is _aten.index_select.default and reader.args[1] == 1:
            continue
        if not isinstance(target, torch._ops.OpOverload) or torch.Tag.pointwise not in target.tags:
            return False
        readers += [user for user in reader.users if user not in readers]
    return bool(readers)


def _rows(sources: Sequence[Tensor], index: Tensor) -> list[Tensor]:
    return [x.index_select(0, index) for x in sources]


_LIBRARY.impl("rows", _rows, "CompositeExplicitAutograd")
_LIBRARY.impl(
    "rows", lambda sources, index: [x.new_empty(len(index), *x.shape[1:]) for x in sources], "Meta"
)


def _ordered_sum(x: Tensor, dim: int) -> Tensor:
    total, *rest = x.unbind(dim)
    total = total.clone()
    for one in rest:
        total = total + one
    return total


_LIBRARY.impl("ordered_sum", _ordered_sum, "CompositeExplicitAutograd")
_LIBRARY.impl("ordered_sum", _ordered_sum, "Meta")
_LIBRARY.impl(
    "tall_product",
    lambda x, y: torch.ops.mkldnn._linear_pointwise(x, y.t(), None, "none", [], ""),
    "CompositeExplicitAutograd",
)
_LIBRARY.impl("tall_product", lambda x, y: x.new_empty(x.shape[0], y.shape[1]), "Meta")

_REWRITES: dict[Any, Callable[[Call, fx.Node], fx.Node]] = {
    _aten.tanh.default: lambda call, node: _rational_tanh(call, node.args[0]),
    _aten.addmm.default: _linear,
    _aten.mm.default: _matmul,
    _aten.view.default: _view,
    ordered_sum: lambda call, node: call(_aten.sum.dim_IntList, (node.args[0], [node.args[1]])),
}


def _is_float32(node: fx.Node) -> bool:
    known = _value_of(node)
    return known is not None and known.dtype is torch.float32 and not node.kwargs


def _value_of(node: fx.Node) -> Any:
    """Returns what was recorded of a node's result, such as its shape; None if nothing was."""
    return node.meta.get("val", node.meta.get("tensor_meta"))


_LIBRARY.define("computed(Tensor[] values) -> Tensor[]")


def compute_before_writes(module: fx.GraphModule) -> fx.GraphModule:
    """Returns a copy of a graph in which values that are used after a write are stored before it.

    This concerns custom operations that write to their inputs, such as a step of Adam. Values
    computed before the write and used after it pass through an operation that stores them. The
    write takes the stored values as its argument ``before`` and ignores them. The compiler
    therefore cannot move the write before the computation of these values.

    Args:
        module (GraphModule): graph of ATen and custom operators; not modified.

    Raises:
        CaptureError: if a custom operation writes to its inputs and has no argument ``before``.

    Examples:
        >>> from torchrl_marl.capture import trace
        >>> from torchrl_marl.learners.adam import Adam
        >>> x = torch.ones(2)
        >>> adam = Adam([x], lr=0.5, eps=1e-8)
        >>> def double_and_step(*held):
        ...     double = 2 * x
        ...     adam.take([torch.ones(2)])
        ...     return double
        >>> module = compute_before_writes(trace(double_and_step, *adam.tensors).module)
        >>> [node.name for node in module.graph.nodes if node.op == "call_function"]
        ['mul', 'ones', 'computed_default', 'getitem', 'adam_']
    """
    graph = fx.Graph()
    graph.output(graph.graph_copy(module.graph, {}))
    for node in graph.find_nodes(op="call_function", target=operator.getitem):
        node.args[0].append(node)  # next to its operation, like its other results
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
    """Stores the values that exist before a write and are used after it, also through views."""
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
                _replace_after(node, _fresh(graph, node, fresh), place, place[write])


def _fresh(graph: fx.Graph, node: fx.Node, fresh: dict[fx.Node, fx.Node]) -> fx.Node:
    """Returns a node that reads the stored value in place of the given one, which may be a view."""
    if node not in fresh:
        source = _aliased(node)
        assert source is not None
        own = _fresh(graph, source, fresh)
        fresh[node] = graph.node_copy(node, lambda x: own if x is source else x)
    return fresh[node]


def _replace_after(old: fx.Node, new: fx.Node, place: dict[fx.Node, int], write: int) -> None:
    for user in list(old.users):
        if place.get(user, -1) > write:
            user.replace_input_with(old, new)


def _viewed(node: fx.Node) -> fx.Node:
    """Returns the base node of a view; the node itself if it is not a view."""
    source = _aliased(node)
    return node if source is None else _viewed(source)


def _aliased(node: fx.Node) -> fx.Node | None:
    """Returns the node that shares a node's memory: its argument, or an operation with views."""
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
            "used after it; add a last argument 'Tensor[] before', which it ignores, or use "
            "execution=eager."
        )
    write.args = (*write.args[: len(arguments) - 1], list(stored))


def _computed(values: Sequence[Tensor]) -> list[Tensor]:
    return [x.clone() for x in values]


_LIBRARY.impl("computed", _computed, "CompositeExplicitAutograd")
_LIBRARY.impl("computed", _computed, "Meta")
