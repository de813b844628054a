"""Recording of operations on tensors as a graph."""

from __future__ import annotations

import contextlib
import functools
import operator
import weakref
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx._lazy_graph_module import _LazyGraphModule
from torch.utils._mode_utils import no_dispatch
from torch.utils._python_dispatch import TorchDispatchMode, autograd_would_have_decomposed

__all__ = ["GraphRecorder", "tensors_in"]

_lift, _lift_copy = torch.ops.aten.lift_fresh.default, torch.ops.aten.lift_fresh_copy.default


class GraphRecorder(TorchDispatchMode):
    """Mode that records the operations on tensors as a graph.

    The graph is that of ``make_fx(function, tracing_mode="real")``, without what only fake tensors,
    symbolic shapes and decompositions need; a recording takes a fraction of the time.

    Args:
        inputs (sequence of Tensor): inputs of the graph.

    Examples:
        >>> x = torch.ones(2)
        >>> with GraphRecorder([x]) as recorder:
        ...     y = x + 1
        >>> print(recorder.module([y]).code.strip())
        def forward(self, arg0_1):
            add = torch.ops.aten.add.Tensor(arg0_1, 1);  arg0_1 = None
            return [add]
    """

    def __init__(self, inputs: Sequence[Tensor]) -> None:
        super().__init__()
        self._paused = False
        self._graph, self._root = fx.Graph(), nn.Module()
        # Only weak references, since torch detaches results that are held elsewhere.
        self._nodes: dict[int, tuple[weakref.ref, fx.Node]] = {}
        self._n_constants = 0
        self._mode = FakeTensorMode(allow_fallback_kernels=True)
        for i, x in enumerate(inputs):
            self._track(x, self._graph.placeholder(f"arg{i}_1"))

    @contextlib.contextmanager
    def unrecorded(self) -> Iterator[None]:
        """Context for computations outside of the graph."""
        paused, self._paused = self._paused, True
        try:
            yield
        finally:
            self._paused = paused

    def module(self, outputs: Iterable[Any]) -> fx.GraphModule:
        """Returns the graph of the recorded operations, with these outputs."""
        self._graph.output([self._argument(x) for x in outputs])
        return _LazyGraphModule(self._root, self._graph)

    def run(self, func: OpOverload, args: tuple, kwargs: dict[str, Any]) -> Any:
        """Runs an operation and records it; subclasses may watch it."""
        arguments = self._argument(args), {key: self._argument(x) for key, x in kwargs.items()}
        result = func(*args, **kwargs)
        # A write into a new tensor from Python's numbers must not change the constant.
        target = _lift_copy if func is _lift else func
        node = self._graph.create_node(
            "call_function", target, *arguments, name=_target_name(target)
        )
        if isinstance(result, Tensor):
            self._track(result, node)
        elif isinstance(result, (list, tuple)):
            self._track_each(result, node)
        return result

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if self._paused:
            return func(*args, **kwargs)
        given = [*args, *kwargs.values()]
        if _is_composite(func) and autograd_would_have_decomposed(func, [*tensors_in(given)]):
            with self:  # in inference mode, autograd does not take it apart
                result = func.decompose(*args, **kwargs)
            if result is not NotImplemented:
                return result
        return self.run(func, args, kwargs)

    def _track(self, x: Tensor, node: fx.Node) -> None:
        self._nodes[id(x)] = weakref.ref(x), node
        node.meta["val"] = self._meta_tensor(x)

    def _track_each(self, results: Sequence[Any], node: fx.Node) -> None:
        for i, x in enumerate(results):
            if isinstance(x, Tensor):
                self._track(x, self._graph.call_function(operator.getitem, (node, i)))
        described = [self._meta_tensor(x) if isinstance(x, Tensor) else x for x in results]
        node.meta["val"] = tuple(described) if isinstance(results, tuple) else described

    def _meta_tensor(self, x: Tensor) -> Tensor:
        """Returns the shape, strides, dtype and device of a tensor, as a tensor without memory."""
        if x.layout != torch.strided:
            return self._mode.from_tensor(x)
        with no_dispatch():
            meta = torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="meta")
        return FakeTensor(self._mode, meta, x.device)

    def _argument(self, x: Any) -> Any:
        if isinstance(x, Tensor):
            known = self._nodes.get(id(x))
            return known[1] if known is not None and known[0]() is x else self._constant(x)
        if isinstance(x, (list, tuple)):
            return type(x)(map(self._argument, x)) if type(x) in (list, tuple) else tuple(x)
        return x

    def _constant(self, x: Tensor) -> fx.Node:
        """Returns the node of a tensor from outside."""
        name = f"_tensor_constant{self._n_constants}"
        self._n_constants += 1
        setattr(self._root, name, x)
        self._track(x, self._graph.get_attr(name))
        return self._nodes[id(x)][1]


def tensors_in(x: Any) -> Iterator[Tensor]:
    """Yields the tensors in an operation's arguments or results."""
    if isinstance(x, Tensor):
        yield x
    elif isinstance(x, (list, tuple)):
        for one in x:
            yield from tensors_in(one)


@functools.cache
def _target_name(func: OpOverload) -> str:
    return fx.Graph()._target_to_str(func.overloadpacket.__name__)


@functools.cache
def _is_composite(func: OpOverload) -> bool:
    return torch._C._dispatch_has_kernel_for_dispatch_key(
        func.name(), torch._C.DispatchKey.CompositeImplicitAutograd
    )
