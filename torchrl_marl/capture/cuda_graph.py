"""Replay of a function of flat tensors as a CUDA graph."""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection, Sequence
from typing import Any, Literal, Protocol

import torch
import torch.utils._pytree as pytree
from torch import Tensor, fx

from torchrl_marl.errors import CaptureError

__all__ = ["CudaGraph", "CudaRecorder", "Recorder", "written_inputs"]

Function = Callable[..., Sequence[Tensor]]


class Recorder(Protocol):
    """Protocol for warming up and recording a function."""

    def warm_up(self, function: Function, inputs: Sequence[Tensor]) -> Sequence[Tensor]:
        """Runs a function, so that its first allocations happen before the recording."""

    def record(
        self, function: Function, inputs: Sequence[Tensor]
    ) -> tuple[Sequence[Tensor], Callable[[], None]]:
        """Records a function *without* running it.

        Returns:
            tuple: the outputs, still without values, and a function that replays the recording
            with the current values of ``inputs`` and writes the results into the outputs.
        """


class CudaRecorder:
    """Recorder on a GPU.

    Random numbers are drawn from the GPU's default generator, which ``torch.cuda.graph`` supports.
    Each replay continues the generator's sequence, and ``torch.manual_seed`` works as usual.

    Args:
        device (torch.device): the GPU.
        pool (optional): return value of ``torch.cuda.graph_pool_handle()``. Graphs with a common
            pool share the memory of intermediate results. They must not run at the same time, and
            static outputs are valid only until another graph of the pool runs.
    """

    def __init__(self, device: torch.device, pool: Any = None) -> None:
        self.device, self.pool = device, pool
        self._side: torch.cuda.Stream | None = None

    def warm_up(self, function: Function, inputs: Sequence[Tensor]) -> Sequence[Tensor]:
        """Runs a function on a side stream, as CUDA graphs require."""
        with torch.cuda.device(self.device):
            current = torch.cuda.current_stream()
            side = self._side = self._side or torch.cuda.Stream()
            side.wait_stream(current)
            with torch.cuda.stream(side):
                outputs = function(*inputs)
            current.wait_stream(side)
            for x in outputs:
                x.record_stream(current)
        return outputs

    def record(
        self, function: Function, inputs: Sequence[Tensor]
    ) -> tuple[Sequence[Tensor], Callable[[], None]]:
        """Records a function; waits for the GPU, once."""
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.device(self.device), torch.cuda.graph(graph, pool=self.pool):
            outputs = function(*inputs)
        return outputs, graph.replay


class CudaGraph:
    """Function of flat tensors that is called by replaying a CUDA graph.

    Every call has the effects of one call of the function. The first ``warmup`` calls run it
    eagerly, the next one records it and replays the graph, and later ones replay it. The calls of
    the warm-up are ordinary calls, so nothing has to be undone after them.

    A graph reads and writes fixed memory. Inputs with the same memory in every call, such as
    parameters, are used in place. An input whose memory changes is *buffered* from then on: it is
    copied into a buffer before the replay, and copied back afterwards if the function writes to it.
    If this happens after the recording, the graph is recorded again, at most once per input.

    Args:
        function (callable): function from flat tensors to flat tensors, all on one device. It may
            write to its inputs in place.
        mutated (collection of int, optional): indices of the inputs that the function may write to,
            see :func:`written_inputs`; all by default.
        outputs ("clone" or "static"): ``clone`` returns copies. ``static`` returns the graph's
            tensors, which the next call of any graph of the pool overwrites. In both cases, if the
            function returns one of its inputs, the call returns the caller's own tensor.
        warmup (int): number of calls before the recording, at least one.
        recorder (Recorder, optional): by default a :class:`CudaRecorder` for the inputs' device.
        name (str): name of the function, for messages.

    Attributes:
        n_recorded (int): number of recordings.
        buffered (list of int): indices of the inputs that are copied in each call.

    Raises:
        CaptureError: if inputs differ from the first call in shape, strides, dtype or device, are
            not all on one GPU, or the function cannot be recorded.
    """

    def __init__(
        self,
        function: Function,
        *,
        mutated: Collection[int] | None = None,
        outputs: Literal["clone", "static"] = "clone",
        warmup: int = 2,
        recorder: Recorder | None = None,
        name: str = "a function",
    ) -> None:
        if warmup < 1 or outputs not in ("clone", "static"):
            raise ValueError(
                f"warmup is {warmup}, expected 1 or more; outputs is {outputs!r}, expected "
                "'clone' or 'static'."
            )
        self.name, self.warmup, self.n_recorded = name, warmup, 0
        self._function, self._recorder = function, recorder
        self._mutated = None if mutated is None else frozenset(mutated)
        self._clones = outputs == "clone"
        self.forget()

    def forget(self) -> None:
        """Discards the graph, for example after parameters were replaced."""
        self._n_calls = 0
        self._signatures: list[tuple] = []
        self._seen_inputs: list[Tensor | None] = []
        self._inputs: list[Tensor] = []
        self._addresses: list[int] = []
        self._moving: set[int] = set()
        self._replay: Callable[[], None] | None = None
        self._outputs: Sequence[Tensor] = ()

    @property
    def buffered(self) -> list[int]:
        """Indices of the inputs that are copied into buffers before every replay."""
        return sorted(self._moving)

    @torch.no_grad()
    def __call__(self, *inputs: Tensor) -> list[Tensor]:
        """Runs the function without gradients."""
        if not self._signatures:
            self._set_up_inputs(inputs)
        assert self._recorder is not None
        moved = self._find_moved_inputs(inputs)
        self._moving |= moved
        self._n_calls += 1
        if self._n_calls <= self.warmup:
            self._keep_inputs(inputs)
            return list(self._recorder.warm_up(self._function, inputs))
        if moved or self._replay is None:
            self._record(self._recorder, inputs)
        assert self._replay is not None
        _copy([self._inputs[i] for i in self._buffered], [inputs[i] for i in self._buffered])
        self._replay()
        _copy([inputs[i] for i in self._copied_back], [self._inputs[i] for i in self._copied_back])
        return [
            inputs[i] if i is not None else x.clone() if self._clones else x
            for i, x in zip(self._is_input, self._outputs)
        ]

    def _set_up_inputs(self, inputs: Sequence[Tensor]) -> None:
        devices = {x.device for x in inputs}
        on_gpu = all(device.type == "cuda" for device in devices)
        if len(devices) != 1 or (self._recorder is None and not on_gpu):
            raise CaptureError(
                f"{self.name}: a CUDA graph needs all its inputs on one GPU, they are on "
                f"{', '.join(sorted(map(str, devices))) or 'none'}."
            )
        self._recorder = self._recorder or CudaRecorder(inputs[0].device)
        self._signatures = list(map(_signature, inputs))
        self._keep_inputs(inputs)

    def _find_moved_inputs(self, inputs: Sequence[Tensor]) -> set[int]:
        """Returns the inputs with an address that changed for the first time; checks all shapes."""
        if len(inputs) != len(self._signatures):
            raise CaptureError(
                f"{self.name} was recorded with {len(self._signatures)} inputs and is called "
                f"with {len(inputs)}."
            )
        moved = set()
        # A fast path: there may be hundreds of parameters, and most have not changed.
        for i, (x, given, address) in enumerate(zip(inputs, self._seen_inputs, self._addresses)):
            if x is given and x.data_ptr() == address:
                continue
            now, then = _signature(x), self._signatures[i]
            if now != then:
                raise CaptureError(
                    f"{self.name} was recorded with input {i} as {_description(then)} and is "
                    f"called with {_description(now)}; a graph has fixed shapes, record another."
                )
            if x.data_ptr() != address and i not in self._moving:
                moved.add(i)
        return moved

    def _keep_inputs(self, inputs: Sequence[Tensor]) -> None:
        # Aliases keep the memory allocated, even if the caller replaces a parameter's `data`, so
        # that no later input can get the same address.
        self._inputs = [x.detach() for x in inputs]
        self._addresses = [x.data_ptr() for x in inputs]
        self._seen_inputs = [None if i in self._moving else x for i, x in enumerate(inputs)]

    def _record(self, recorder: Recorder, inputs: Sequence[Tensor]) -> None:
        self._replay = None
        self._outputs = ()  # frees the memory of an earlier graph
        self._keep_inputs(inputs)
        written = range(len(inputs)) if self._mutated is None else self._mutated
        self._refuse_overlaps(written)
        for i in self._moving:
            x = self._inputs[i]
            self._inputs[i] = torch.empty_strided(
                x.shape, x.stride(), dtype=x.dtype, device=x.device
            )
        self._buffered = self.buffered
        self._copied_back = [i for i in self._buffered if i in written]
        try:
            self._outputs, replay = recorder.record(self._function, self._inputs)
        except RuntimeError as error:
            raise CaptureError(
                f"{self.name} cannot be recorded as a CUDA graph: {error}"
            ) from error
        places = {_memory_key(x): i for i, x in enumerate(self._inputs)}
        self._is_input = [places.get(_memory_key(x)) for x in self._outputs]
        self._replay = replay
        self.n_recorded += 1

    def _refuse_overlaps(self, written: Collection[int]) -> None:
        # Separate buffers would break shared memory.
        for i in self._moving:
            for j, x in enumerate(self._inputs):
                if i != j and (i in written or j in written) and _overlap(self._inputs[i], x):
                    raise CaptureError(
                        f"{self.name}: inputs {i} and {j} share memory, one is written to and "
                        f"the memory of input {i} changes between calls; keep it fixed."
                    )


def written_inputs(module: fx.GraphModule) -> set[int]:
    """Returns the indices of a graph's inputs that it may write to, also through views.

    Args:
        module (GraphModule): graph of ATen operators from :func:`~torchrl_marl.capture.trace`.

    Examples:
        >>> from torchrl_marl.capture import trace
        >>> written_inputs(trace(lambda x, y: x[0].add_(y), torch.ones(2), torch.ones(())).module)
        {0}
    """
    behind: dict[fx.Node, set[int]] = {}
    written: set[int] = set()
    n_inputs = 0
    for node in module.graph.nodes:
        if node.op == "placeholder":
            behind[node] = {n_inputs}
            n_inputs += 1
        elif isinstance(node.target, torch._ops.OpOverload):
            arguments = node.target._schema.arguments
            named = {argument.name: argument for argument in arguments}
            given = [*zip(arguments, node.args), *((named[k], x) for k, x in node.kwargs.items())]
            for argument, value in given:
                if argument.alias_info is not None:
                    places = _input_indices(value, behind)
                    behind.setdefault(node, set()).update(places)
                    written |= places if argument.alias_info.is_write else set()
        else:
            behind[node] = _input_indices((node.args, node.kwargs), behind)
            if node.op != "output" and node.target is not operator.getitem:
                written |= behind[node]  # unknown operations may write
    return written


def _input_indices(value: Any, behind: dict[fx.Node, set[int]]) -> set[int]:
    nodes = [x for x in pytree.tree_leaves(value) if isinstance(x, fx.Node)]
    return set().union(*(behind.get(node, set()) for node in nodes))


def _signature(x: Tensor) -> tuple:
    shape = x.shape
    strides = tuple(stride for stride, size in zip(x.stride(), shape) if size > 1)
    return shape, strides, x.dtype, x.device


def _description(signature: tuple) -> str:
    shape, strides, dtype, device = signature
    return f"{dtype} {list(shape)} (strides {list(strides)}) on {device}"


def _memory_key(x: Tensor) -> tuple:
    return x.data_ptr(), _signature(x)


def _copy(into: Sequence[Tensor], values: Sequence[Tensor]) -> None:
    """Copies tensors with equal strides asynchronously; on a GPU usually by one kernel launch."""
    if into:
        torch._foreach_copy_(list(map(_unexpanded, into)), list(map(_unexpanded, values)))


def _unexpanded(x: Tensor) -> Tensor:
    """Returns a tensor without the repetitions of expanded dims."""
    for dim, stride in enumerate(x.stride()):
        if stride == 0 and x.shape[dim] > 1:
            x = x.narrow(dim, 0, 1)
    return x


def _overlap(x: Tensor, y: Tensor) -> bool:
    if x.numel() == 0 or y.numel() == 0:
        return False
    (x_begin, x_end), (y_begin, y_end) = map(_extent, (x, y))
    return x_begin < y_end and y_begin < x_end


def _extent(x: Tensor) -> tuple[int, int]:
    last = sum((size - 1) * stride for size, stride in zip(x.shape, x.stride()))
    return x.data_ptr(), x.data_ptr() + (last + 1) * x.element_size()
