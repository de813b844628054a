"""Tracing of a function of tensors: its graph, its assumptions and its deferred checks."""

from __future__ import annotations

import ast
import functools
import itertools
import linecache
import time
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from types import FrameType
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor, fx
from torch.overrides import TorchFunctionMode

from torchrl_marl.capture.masks import MaskedRows, is_mask
from torchrl_marl.capture.recorder import GraphRecorder, tensors_in
from torchrl_marl.capture.sites import site_of, source_of, user_frame, where
from torchrl_marl.errors import CaptureError, GraphCheckError

__all__ = ["Check", "Trace", "ValueNumbers", "guards_masked_writes", "only_raises", "trace"]

_SMALL = 16


class ValueNumbers:
    """Value numbering: tensors with the same number have the same values.

    The same operation on tensors with the same numbers gives a result with the same number. Thus,
    the two masks in ``x[a & b] = x[a & b] + 1`` are known to be equal. A write in place gives new
    numbers to the tensor and its views. Tensors with different numbers may still be equal.

    Examples:
        >>> values, x = ValueNumbers(), torch.ones(3)
        >>> a, b = x + 1, x + 1
        >>> for result in (a, b):
        ...     values.record(torch.ops.aten.add.Tensor, (x, 1), {}, result, [])
        >>> values.of(a) == values.of(b), values.of(a) == values.of(x)
        (True, False)
    """

    def __init__(self) -> None:
        self._new = itertools.count()
        self._numbers: dict[Hashable, int] = {}
        self._computed: dict[Hashable, int] = {}
        self._writes: Counter[int] = Counter()
        self._held: dict[int, torch.UntypedStorage] = {}

    def of(self, x: Tensor, constant: bool = False) -> int:
        """Returns the value number of a tensor; equal small constants share one."""
        place = self._memory_key(x)
        if place not in self._numbers:
            self._numbers[place] = next(self._new)
            if constant and x.numel() <= _SMALL:
                text = (repr(x.tolist()), x.shape, x.dtype, x.device)
                self._numbers[place] = self._computed.setdefault(text, self._numbers[place])
        return self._numbers[place]

    def record(
        self,
        func: Any,
        args: tuple,
        kwargs: dict[str, Any],
        result: Any,
        written: Iterable[Tensor],
        constants: Iterable[Tensor] = (),
    ) -> None:
        """Records an executed operation.

        Args:
            func (OpOverload): the operation.
            args, kwargs: its arguments.
            result: its result.
            written (iterable of Tensor): arguments that it has written to.
            constants (iterable of Tensor): arguments that are the same in every run.
        """
        written = list(written)
        for x in written:
            self._writes[x.untyped_storage()._cdata] += 1
        if written or torch.Tag.nondeterministic_seeded in func.tags or "empty" in str(func):
            return
        for x in constants:
            self.of(x, constant=True)
        computation = (func, self._hashable(args), self._hashable(sorted(kwargs.items())))
        for i, x in enumerate(pytree.tree_leaves(result)):
            if isinstance(x, Tensor):
                place = self._memory_key(x)
                if place not in self._numbers:
                    number = self._computed.setdefault((i, computation), next(self._new))
                    self._numbers[place] = number

    def _hashable(self, x: Any) -> Hashable:
        if isinstance(x, Tensor):
            return self.of(x)
        if isinstance(x, (list, tuple)):
            return tuple(map(self._hashable, x))
        return type(x), repr(x)

    def _memory_key(self, x: Tensor) -> Hashable:
        storage = x.untyped_storage()
        self._held[storage._cdata] = storage  # so that its address is not reused
        writes = self._writes[storage._cdata]
        return storage._cdata, writes, x.storage_offset(), x.shape, x.stride(), x.dtype


# Syntax allowed in a guarded write; calls are not allowed, since they may have side effects.
_SIMPLE = (
    ast.Name,
    ast.Attribute,
    ast.Subscript,
    ast.Slice,
    ast.Tuple,
    ast.Constant,
    ast.BinOp,
    ast.UnaryOp,
    ast.operator,
    ast.unaryop,
    ast.expr_context,
)


def only_raises(frame: FrameType) -> bool:
    """Returns whether a line is an ``assert``, or an ``if`` that only raises an error."""
    for node in _conditions(frame.f_code.co_filename):
        tested = node if isinstance(node, ast.Assert) else node.test
        if tested.lineno <= frame.f_lineno <= (tested.end_lineno or tested.lineno):
            if isinstance(node, ast.Assert):
                return True
            if all(isinstance(statement, ast.Raise) for statement in node.body):
                return True
    return False


def guards_masked_writes(frame: FrameType) -> bool:
    """Returns whether a line tests ``if mask.any():`` and then only writes ``x[mask] = ...``.

    The condition can then be dropped, because a mask that is False everywhere writes nothing.
    """
    for node in _conditions(frame.f_code.co_filename):
        if isinstance(node, ast.If) and node.test.lineno == frame.f_lineno and not node.orelse:
            mask = _tested_name(node.test)
            if mask is not None and is_mask(_local_variable(frame, mask)):
                return all(_is_masked_write(x, mask, frame) for x in node.body)
    return False


def _tested_name(test: ast.expr) -> str | None:
    """Returns the name in ``name.any()`` or ``torch.any(name)``."""
    if not isinstance(test, ast.Call) or test.keywords:
        return None
    tested = test.func.value if isinstance(test.func, ast.Attribute) else None
    if tested is None or test.func.attr != "any":  # type: ignore[attr-defined]
        return None
    if isinstance(tested, ast.Name) and tested.id == "torch" and len(test.args) == 1:
        tested = test.args[0]
    elif test.args:
        return None
    return tested.id if isinstance(tested, ast.Name) else None


def _is_masked_write(statement: ast.stmt, mask: str, frame: FrameType) -> bool:
    if isinstance(statement, ast.Assign) and len(statement.targets) == 1:
        target = statement.targets[0]
    elif isinstance(statement, ast.AugAssign):
        target = statement.target
    else:
        return False
    if not isinstance(target, ast.Subscript) or not isinstance(target.value, ast.Name):
        return False
    index = target.slice.elts if isinstance(target.slice, ast.Tuple) else [target.slice]
    return (
        isinstance(_local_variable(frame, target.value.id), Tensor)
        and any(isinstance(part, ast.Name) and part.id == mask for part in index)
        and all(isinstance(part, _SIMPLE) for part in ast.walk(target))
        and all(isinstance(part, _SIMPLE) for part in ast.walk(statement.value))
    )


def _local_variable(frame: FrameType, name: str) -> object:
    return frame.f_locals.get(name)


@functools.cache
def _conditions(file: str) -> list[ast.Assert | ast.If]:
    try:
        tree = ast.parse("".join(linecache.getlines(file)))
    except SyntaxError:
        return []
    nodes = list(ast.walk(tree))
    # If the simulator catches the error, it takes another path.
    caught = [part for node in nodes if isinstance(node, ast.Try) for part in node.body]
    inside = {id(node) for part in caught for node in ast.walk(part)}
    conditions = [node for node in nodes if isinstance(node, (ast.Assert, ast.If))]
    return [node for node in conditions if id(node) not in inside]


_ANSWERS = {
    Tensor.__bool__,
    Tensor.__float__,
    Tensor.__int__,
    Tensor.__index__,
    Tensor.item,
    Tensor.tolist,
}
# Numpy would compute with the values of this run, which a graph then repeats.
_LEAVES_TORCH = {Tensor.numpy, Tensor.__array__, Tensor.__dlpack__}
_FROM_PYTHON = (torch.ops.aten.lift_fresh.default, torch.ops.aten.lift_fresh_copy.default)
_DYNAMIC = (torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape)


@dataclass(frozen=True)
class Check:
    """A deferred check of the simulator, with its site and source line."""

    site: str
    text: str


@dataclass
class Trace:
    """A recorded function.

    Args:
        module (GraphModule): graph from flat inputs to flat outputs.
        inputs (TreeSpec): nesting of the inputs.
        outputs (TreeSpec): nesting of the outputs, without the checks.
        constants (dict): index of an output -> its value, if it is not a tensor.
        checks (list of Check): deferred checks. The graph's last output, bool ``[n_checks]``, is
            True for each check that failed.
        seconds (float): time of the recording.
        captured (list of Tensor): further inputs of the graph: tensors from outside that the
            function read, such as weights. The graph reads their memory itself, so in-place updates
            take effect.
        assumed (set of int): memory of the tensors from outside whose values determined the path of
            the function.

    Attributes:
        n_recorded (int): number of recorded operations, before the graph is made smaller.
    """

    module: fx.GraphModule
    inputs: pytree.TreeSpec
    outputs: pytree.TreeSpec
    constants: dict[int, Any]
    checks: list[Check] = field(default_factory=list)
    seconds: float = 0.0
    captured: list[Tensor] = field(default_factory=list)
    assumed: set[int] = field(default_factory=set)
    n_recorded: int = 0

    def __post_init__(self) -> None:
        self.n_recorded = self.n_recorded or self.n_operations

    @property
    def n_operations(self) -> int:
        """Number of operations in the graph, views included."""
        return sum(node.op == "call_function" for node in self.module.graph.nodes)

    def unflatten(self, leaves: Iterable[Tensor]) -> Any:
        """Nests flat outputs in the same way as the function nests its outputs."""
        if not self.constants:
            return pytree.tree_unflatten(list(leaves), self.outputs)
        rest = iter(leaves)
        total = self.outputs.num_leaves
        full = [self.constants[i] if i in self.constants else next(rest) for i in range(total)]
        return pytree.tree_unflatten(full, self.outputs)

    def raise_failed(self, failed: Tensor) -> None:
        """Raises the error of the first check that failed; waits for the device.

        Raises:
            GraphCheckError: a check failed; the message names the line of the simulator.
        """
        places = [i for i, x in enumerate(failed.tolist()) if x]
        if not places:
            return
        check = self.checks[places[0]]
        raise GraphCheckError(f"inside a graph, this failed: {check.text} ({check.site}).")


def trace(function: Callable[..., Any], *inputs: Any) -> Trace:
    """Records one run of a function.

    Args:
        function (callable): function from nested tensors to nested tensors. If the function writes
            to its inputs in place, the graph does, too.
        *inputs: example inputs, with the shapes and devices of all later runs.

    Raises:
        CaptureError: if the path depends on the inputs, or the function writes to a tensor that is
            not an input and that it did not create. It is also raised if the function catches it.

    Examples:
        >>> def double_positive(x):
        ...     x = x.clone()
        ...     x[x > 0] *= 2
        ...     return x
        >>> traced = trace(double_positive, torch.tensor([-1.0, 1.0]))
        >>> traced.module(torch.tensor([3.0, -4.0]))[0]
        tensor([ 6., -4.])
    """
    began = time.perf_counter()
    flat, in_spec = pytree.tree_flatten(inputs)
    watch = _DependencyRecorder(flat)
    with watch:
        with _BranchTracer(watch) as branches:
            out = function(*pytree.tree_unflatten(flat, in_spec))
        if watch.refusal is not None:
            raise watch.refusal
        leaves, out_spec = pytree.tree_flatten(out)
        for x in leaves:
            branches.rows.refuse(x)
        failed = [torch.stack(branches.failed)] if branches.checks else []
    module = watch.module([*tensors_in(leaves), *failed])
    module.graph.eliminate_dead_code()
    captured = _lift_outer_tensors(module, watch)
    module.recompile()
    constants = {i: x for i, x in enumerate(leaves) if not isinstance(x, Tensor)}
    seconds = time.perf_counter() - began
    return Trace(
        module, in_spec, out_spec, constants, branches.checks, seconds, captured, watch.assumed
    )


def _lift_outer_tensors(module: fx.GraphModule, watch: _DependencyRecorder) -> list[Tensor]:
    """Turns tensors from outside into inputs of the graph, and returns these tensors."""
    last = [node for node in module.graph.nodes if node.op == "placeholder"][-1]
    placed: dict[int, fx.Node] = {}
    captured: list[Tensor] = []
    for node in list(module.graph.nodes):
        if node.op != "get_attr":
            continue
        tensor = getattr(module, node.target)
        if not isinstance(tensor, Tensor) or watch.made(tensor):
            continue
        if id(tensor) not in placed:
            with module.graph.inserting_after(last):
                last = placed[id(tensor)] = module.graph.placeholder(f"outer_{len(placed)}")
            last.meta["val"] = tensor.detach()
            captured.append(tensor)
        node.replace_all_uses_with(placed[id(tensor)])
        module.graph.erase_node(node)
    return captured


class _DependencyRecorder(GraphRecorder):
    """Recorder that tracks the memory that depends on the inputs or on random numbers."""

    def __init__(self, inputs: Sequence[Tensor]) -> None:
        super().__init__(inputs)
        self._dependent: dict[int, torch.UntypedStorage] = {}
        self._created: dict[int, torch.UntypedStorage] = {}
        # Memory allocated in the trace -> memory from outside that it was computed from.
        self._sources: dict[int, set[int]] = {}
        self.assumed: set[int] = set()
        self.refusal: CaptureError | None = None  # the first one, which the function may catch
        self._values = ValueNumbers()
        for x in inputs:
            self._hold_memory(self._dependent, x)
            self._hold_memory(self._created, x)

    @staticmethod
    def _hold_memory(known: dict[int, torch.UntypedStorage], x: Tensor) -> None:
        storage = x.untyped_storage()
        known[storage._cdata] = storage  # held, so that its address is not reused

    def made(self, x: Tensor) -> bool:
        """Returns whether a tensor is an input or was created by the function."""
        return x.untyped_storage()._cdata in self._created

    def depends(self, x: Tensor) -> bool:
        """Returns whether a tensor's values may differ in the next run."""
        return x.untyped_storage()._cdata in self._dependent

    def assume(self, x: Tensor) -> None:
        """Records that the path depends on a tensor's current values."""
        self.assumed |= self._sources_of(x)

    def _sources_of(self, x: Tensor) -> set[int]:
        memory = x.untyped_storage()._cdata
        return self._sources.get(memory, set()) if self.made(x) else {memory}

    def number(self, x: Tensor) -> int:
        """Returns the value number of a tensor; equal value numbers mean equal values."""
        return self._values.of(x)

    def run(self, func, args, kwargs):
        """Runs and records an operation, and tracks what its results depend on."""
        read = [*tensors_in(args), *tensors_in(list(kwargs.values()))]
        if func in _FROM_PYTHON:  # torch.tensor(1.0)
            self._hold_memory(self._created, read[0])
        dependent = any(map(self.depends, read))
        if dependent and _is_dynamic(func, args):
            raise CaptureError(f"the size or value of {func} depends on the state, {where()}")
        if any(isinstance(x, torch.Generator) for x in (*args, *kwargs.values())):
            raise CaptureError(
                f"random numbers of a torch.Generator are not captured, {where()}; use torch's "
                "global generator"
            )
        written = _written_tensors(func, args, kwargs)
        for x in written:
            if not self.made(x):
                raise CaptureError(
                    f"a tensor {list(x.shape)} that is not part of the state is written in "
                    f"place, {where()}"
                )
        result = super().run(func, args, kwargs)
        dependent = dependent or torch.Tag.nondeterministic_seeded in func.tags
        made = [*tensors_in(result)]
        for x in made:
            if not _returns_views(func) or func in _FROM_PYTHON:
                self._hold_memory(self._created, x)
        constants = [x for x in read if not self.depends(x)]
        if dependent:
            for x in made + written:
                self._hold_memory(self._dependent, x)
        elif func not in _FROM_PYTHON:
            sources = set().union(*map(self._sources_of, read))
            for x in made + written if sources else ():
                self._sources.setdefault(x.untyped_storage()._cdata, set()).update(sources)
        self._values.record(func, args, kwargs, result, written, constants)
        return result


def _is_dynamic(func, args) -> bool:
    """Returns whether an operation's output size or Python result depends on tensors' values."""
    if func is torch.ops.aten.index.Tensor:  # integer indices have a fixed size
        masks = (torch.bool, torch.uint8)
        return any(index is not None and index.dtype in masks for index in args[1])
    return any(tag in func.tags for tag in _DYNAMIC)


def _written_tensors(func, args, kwargs) -> list[Tensor]:
    """Returns the arguments that an operation writes to."""
    places, names = _written_arguments(func)
    values = [args[i] for i in places if i < len(args)]
    return [*tensors_in(values + [kwargs[name] for name in names if name in kwargs])]


@functools.cache
def _written_arguments(func) -> tuple[list[int], list[str]]:
    info = [argument.alias_info for argument in func._schema.arguments]
    places = [i for i, alias in enumerate(info) if alias is not None and alias.is_write]
    return places, [func._schema.arguments[i].name for i in places]


@functools.cache
def _returns_views(func) -> bool:
    return any(result.alias_info is not None for result in func._schema.returns)


class _BranchTracer(TorchFunctionMode):
    """Evaluates Python's tests of tensors, and replaces masks by ``where``."""

    def __init__(self, watch: _DependencyRecorder) -> None:
        super().__init__()
        self._watch = watch
        self.rows = MaskedRows(watch)
        self.checks: list[Check] = []
        self.failed: list[Tensor] = []

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        try:
            return self._answer(func, args, kwargs)
        except CaptureError as refusal:
            self._watch.refusal = self._watch.refusal or refusal
            raise

    def _answer(self, func, args, kwargs):
        if func in _ANSWERS or func in _LEAVES_TORCH:
            return self._answer_test(func, args, kwargs)
        if func is Tensor.__getitem__:
            return self.rows.read(*args)
        if func is Tensor.__setitem__:
            return self.rows.write(*args)
        if func is torch.nn.functional.one_hot:
            return self._one_hot(*args, **kwargs)
        return self.rows.apply(func, args, kwargs)

    def _one_hot(self, tensor: Tensor, num_classes: int = -1) -> Tensor:
        """Computes ``one_hot`` with a deferred check of its range."""
        self.rows.refuse(tensor)
        if num_classes < 1 or not self._watch.depends(tensor):
            return torch.nn.functional.one_hot(tensor, num_classes)
        self._check_later(((tensor < 0) | (tensor >= num_classes)).any(), user_frame())
        classes = torch.arange(num_classes, device=tensor.device)
        return (tensor.unsqueeze(-1) == classes).to(torch.int64)

    def _check_later(self, failed: Tensor, frame: FrameType) -> None:
        self.checks.append(Check(site_of(frame), source_of(frame)))
        self.failed.append(failed)

    def _answer_test(self, func, args, kwargs):
        tensor = args[0]
        self.rows.refuse(tensor)
        with self._watch.unrecorded():
            value = func(*args, **kwargs)
        if not self._watch.depends(tensor):
            self._watch.assume(tensor)
            return value
        frame = user_frame()
        if func is Tensor.__bool__ and guards_masked_writes(frame):
            return True
        if func is Tensor.__bool__ and only_raises(frame):
            self._check_later(tensor.reshape(()).bool() != value, frame)
            return value
        raise CaptureError(
            f"the path depends on the state, {where()}; compute it with tensors (torch.where)"
        )
