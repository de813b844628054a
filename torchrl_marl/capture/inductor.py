"""Compiles a graph of ATen operators by Inductor, torch's compiler."""

from __future__ import annotations

import contextlib
import functools
import gc
import logging
from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, fx

from torchrl_marl.capture.cpu_forms import rewrite_for_cpu
from torchrl_marl.capture.stored import compile_stored
from torchrl_marl.capture.write_order import compute_before_writes
from torchrl_marl.errors import WriteError

__all__ = ["compile_module"]

# Random numbers are those of eager execution; tiling by strides costs small kernels more than it
# saves (balance, 600 envs: 1.05 -> 0.83 ms a step). Whether each buffer has the strides that the
# compiler gave it is its own tests' business, and takes a tenth of a small step's time.
OPTIONS: dict[str, Any] = {
    "fallback_random": True,
    "cpp.enable_tiling_heuristics": False,
    "size_asserts": False,
    "alignment_asserts": False,
}

# Operations, from which on a graph is stored on disk; a library of one's own takes some seconds.
_LARGE = 200

# Operations that Inductor decomposes into steps that round differently.
_REORDERED = (torch.ops.aten.linalg_vector_norm.default, torch.ops.aten.logaddexp.default)


def compile_module(
    module: fx.GraphModule, leaves: list[Tensor], exact: bool = False
) -> tuple[Any, int]:
    """Compiles a graph, or loads what was compiled of an equal one before.

    Args:
        module (GraphModule): of ATen operators.
        leaves (list of Tensor): its inputs; it holds for their shapes, strides and devices.
        exact (bool): leaves to torch itself what the compiler would compute in another order.

    Returns:
        callable, int: of the inputs, giving the list of outputs; and its number of kernels.

    Raises:
        WriteError: the compiler's cache cannot be written.
    """
    on_cpu = not exact and all(x.device.type == "cpu" for x in leaves)
    module = compute_before_writes(rewrite_for_cpu(module) if on_cpu else module)
    if on_cpu and len(module.graph.nodes) >= _LARGE and _libraries_load():
        try:
            return compile_stored(module, leaves, OPTIONS, _compiling)
        except OSError as error:
            raise WriteError(
                f"a compiled graph cannot be kept ({error}); set TORCHINDUCTOR_CACHE_DIR to a "
                "folder that can be written, or use execution=eager."
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
    # Beside a GPU, torch 2.11 crashed where it loaded the library of a graph of a CPU.
    return not torch.cuda.is_available()


@contextlib.contextmanager
def _compiling() -> Iterator[None]:
    with _cacheable(), _uninterrupted(), _quick_index_analysis(), _without_hints():
        yield


@contextlib.contextmanager
def _uninterrupted() -> Iterator[None]:
    """Pauses the collection of garbage, which looks through everything that is loaded.

    It takes a tenth of the time of a compilation.
    """
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
    """Silences hints for those who work on the compiler, such as at operations it calls slowly."""
    logger = logging.getLogger("torch._inductor.ir")
    before = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(before)


@contextlib.contextmanager
def _quick_index_analysis() -> Iterator[None]:
    """Spares sums of multiples of loop variables the compiler's general simplification.

    The compiler asks, for every load of every kernel, how far apart the numbers of a vector lie,
    and has sympy simplify the index before. Most indices are linear, so that there is nothing to
    simplify, which takes a quarter of the time of a compilation to find.
    """
    from torch._inductor import sizevars

    names = ("simplify_index_in_vec_range", "stride_at")
    if not all(hasattr(sizevars, name) for name in names):  # of another version
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
    """Lets the compiler cache its output on disk, as it does where shapes may be symbols.

    A second compilation of an update then takes 4 s instead of 11.
    """
    from torch._guards import TracingContext, tracing
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    mode = FakeTensorMode(shape_env=ShapeEnv(), static_shapes=True, allow_non_fake_inputs=True)
    return tracing(TracingContext(mode))


def _compiled_exactly(module: fx.GraphModule, leaves: list[Tensor]) -> Any:
    from torch._inductor.compile_fx import compile_fx
    from torch._inductor.decomposition import select_decomp_table
    from torch._inductor.lowering import lowerings, make_fallback

    table = {op: f for op, f in select_decomp_table().items() if op not in _REORDERED}
    for op in _REORDERED:
        # The compiler's default does so, too, except where the environment has CI set.
        if op not in lowerings:
            make_fallback(op, override_decomp=True)
    # The cache ignores decompositions, and would return the graph with the others.
    options = {**OPTIONS, "force_disable_caches": True}
    return compile_fx(module, leaves, config_patches=options, decompositions=table)
