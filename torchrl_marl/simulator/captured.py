"""A simulator's step as a pure function, captured as a graph.

This works for any simulator object whose tensors have the envs in their first dim
(:class:`~torchrl_marl.simulator.state.SimulatorState`).

Shapes: E envs, K numbers per env.
"""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any, Literal

import numpy as np
import torch
import torch.utils._pytree as pytree
from torch import Tensor, fx

from torchrl_marl.capture.program import Program, compile_trace
from torchrl_marl.capture.tracing import Trace, trace
from torchrl_marl.errors import CaptureError
from torchrl_marl.runtime.random_state import RandomState
from torchrl_marl.simulator.packing import Packing, put_back
from torchrl_marl.simulator.python_state import PythonState
from torchrl_marl.simulator.settings import equal
from torchrl_marl.simulator.state import (
    SCALARS,
    Path,
    SimulatorState,
    SimulatorWalk,
    as_constant,
    is_replaceable,
    path_name,
    walk_simulator,
)

__all__ = ["CapturedSimulator"]

_COMPARED = 4  # number of steps in which a graph is compared with the simulator
_SMALL = 400  # operations of a graph that compiles quickly as it is
_LARGEST_ARRAY = 1000  # most elements of a numpy array that is checked for changes

State = list[Tensor]
Structure = dict[tuple[str, str], Any]
Finish = Callable[[State, Any], list[Tensor]]


class CapturedSimulator:
    """Simulator that keeps its state outside of the simulator's object, so graphs can step it.

    Graphs read and write :attr:`state`. :meth:`release` writes the state back into the simulator's
    object. When :attr:`state` is needed again, it is read from that object.

    Args:
        simulator: the simulator, after a reset and a step.
        state (SimulatorState): layout of the simulator's state.
        step (callable): ``step()`` makes one eager step with arbitrary actions.
        random_state (RandomState): random state of the simulator.
        branchless (callable, optional): ``branchless()`` is a context in which the simulator
            runs the same code in all states, with unchanged results.

    Attributes:
        in_graph (bool): True while a step is recorded or tried; such a step must not change random
            states.
        ahead (bool): True if :attr:`state` is newer than the simulator's tensors.

    Shapes:
        - state: a list of ``[K, E]``, one per dtype, followed by the tensors shared by all envs

    Raises:
        CaptureError: if attributes of the simulator change from step to step.
    """

    def __init__(
        self,
        simulator: Any,
        state: SimulatorState,
        step: Callable[[], Any],
        random_state: RandomState,
        branchless: Callable[[], AbstractContextManager[Any]] = contextlib.nullcontext,
    ) -> None:
        self.simulator = simulator
        self.simulator_state = state
        self._random = random_state
        self._branchless = branchless
        self.in_graph = False
        self._assumed: set[Path] = set()
        self._values: Structure = {}
        self.ahead = False
        self._state: State = []
        self.packing = self._find_packing(step)

    def _find_packing(self, step: Callable[[], Any]) -> Packing:
        """Runs a trial step, to find the tensors that a step writes; returns their packing."""
        before = self.simulator_state.read(self.simulator)
        walk = self._walk()
        versions = {path: (id(x), x._version) for path, x in walk.tensors.items()}
        held = list(walk.tensors.values())  # kept alive, so that the ids stay valid
        python = PythonState(self.simulator, self.simulator_state.exclude)
        with self._random.unchanged():
            step()
        after = self._walk()
        written = [
            path for path, x in after.tensors.items() if versions.get(path) != (id(x), x._version)
        ]
        batched = set(self.simulator_state.batched)
        first, then = walk.first_slots(), after.first_slots()
        apart = [
            path
            for path, x in after.tensors.items()
            if path in walk.tensors and first[id(walk.tensors[path])] != then[id(x)]
        ]
        del held
        python.restore()
        self.simulator_state.write(self.simulator, before)
        shared = [path for path in written if path not in batched]
        return Packing(self.simulator, self.simulator_state, shared, apart, written)

    # ---------------------------------------------------------------- access to the state

    @property
    def state(self) -> State:
        """The state as matrices; after :meth:`release`, they are read from the simulator again."""
        if not self.ahead:
            self._state = self.packing.read(self.simulator)
        return self._state

    @state.setter
    def state(self, state: State) -> None:
        self._state, self.ahead = state, True

    def release(self) -> Any:
        """Writes the state back into the simulator, and returns the simulator."""
        if self.ahead:
            self.packing.write(self.simulator, self._state)
            self.ahead = False
        return self.simulator

    def structure(self) -> str:
        """Returns the simulator's numbers and references, but not its tensors, as text."""
        return repr(self._structure(self._walk()))

    def signature(self) -> str:
        """Returns the structure, the values of :meth:`read_assumed`, and the functions in use.

        A graph relies on all of them.
        """
        walk = self._walk()
        others = [
            (path, x)
            for path, x in walk.slots()
            if type(x) not in SCALARS and id(x) not in walk.path_of and is_replaceable(x)
        ]
        found: Structure = {
            ("object", path_name(path)): [id(x)] for path, x in (*others, *walk.in_tuples.items())
        }
        return repr({**self._structure(walk), **self._values, **found})

    def _walk(self) -> SimulatorWalk:
        return walk_simulator(self.simulator, self.simulator_state.exclude)

    def read_assumed(self) -> None:
        """Reads the values of tensors that decided branches in a step; waits for the device.

        An example is a tensor with the gravity, if the simulator compares the gravity with zero.
        """
        if self._assumed:
            tensors = self._walk().tensors
            self._values = {
                ("value", path_name(path)): [tensors[path].tolist()]
                for path in sorted(self._assumed)
                if path in tensors
            }

    def _structure(self, walk: SimulatorWalk) -> Structure:
        tensors = {path_name(path) for path in walk.tensors}
        structure = {
            (holder, key): value
            for holder, slots in walk.structure().items()
            for key, value in slots.items()
            if (f"{holder}.{key}" if holder else key) not in tensors
        }
        for path, value in walk.slots():
            if type(value) in SCALARS or isinstance(value, Tensor):
                continue
            slot = path_name(path[:-1]), path[-1]
            if isinstance(value, np.ndarray) and value.size <= _LARGEST_ARRAY:
                structure[slot] = [value.tolist()]
            elif slot not in structure or isinstance(value, tuple):
                constant = as_constant(value)
                if constant is not None:
                    structure[slot] = [constant]
        for kind in reversed(type(self.simulator).__mro__):
            for name, value in vars(kind).items():
                if type(value) in SCALARS and not name.startswith("__"):
                    structure["class", name] = [value]
        return structure

    # ------------------------------------------------------------------------------ graphs

    def _make_functional(
        self, function: Callable[..., Any], finish: Finish
    ) -> Callable[..., list[Tensor]]:
        """Returns ``function(*inputs)`` as a function of the simulator's state and the inputs."""

        def pure_function(state: State, *inputs: Any) -> list[Tensor]:
            self.packing.write(self.simulator, state)
            self.in_graph = True
            try:
                with self._branchless():
                    output = function(*inputs)
            finally:
                self.in_graph = False
            return finish(self.packing.read(self.simulator), output)

        return pure_function

    @contextlib.contextmanager
    def recording(self) -> Iterator[None]:
        """Context in which a step is recorded; restores the simulator's state on exit.

        Raises:
            CaptureError: if the step writes anything that is not part of the state.
        """
        self.release()
        walk = self._walk()
        structure, tensors = walk.structure(), dict(walk.tensors)
        before = self._structure(walk)
        with self._random.unchanged():
            python = PythonState(self.simulator, self.simulator_state.exclude)
            try:
                yield
                self._refuse_change(before, tensors)
                python.refuse_changes(
                    "a step", "store it as a tensor with the envs in the first dim"
                )
            finally:
                python.restore()
                after = self._walk()
                after.restore_structure(structure)
                put_back(self.simulator, tensors)

    def _refuse_change(self, before: Structure, tensors: dict[Path, Tensor]) -> None:
        after = self._structure(self._walk())
        for slot in sorted({*before, *after}):
            if before.get(slot) != after.get(slot):
                old, new = (
                    x[0] if isinstance(x, list) else x for x in (before.get(slot), after.get(slot))
                )
                raise CaptureError(
                    f"a step changes {'.'.join(filter(None, slot))} from {old!r} to {new!r}; "
                    "store it as a tensor with the envs in the first dim"
                )
        now = self._walk().tensors
        for path in sorted({*now, *tensors} - self.packing.paths):
            if now.get(path) is not tensors.get(path):
                raise CaptureError(f"a step writes {path_name(path)}, which the trial step did not")

    @contextlib.contextmanager
    def trial(self) -> Iterator[None]:
        """Context for eager steps of the simulator; restores the simulator's state on exit."""
        saved = self.simulator_state.read(self.release())
        python = PythonState(self.simulator, self.simulator_state.exclude)
        self.in_graph = True
        try:
            with self._random.unchanged():
                yield
        finally:
            self.in_graph = False
            python.restore()
            self.simulator_state.write(self.simulator, saved)

    def capture(
        self,
        function: Callable[..., Any],
        *inputs: Tensor,
        name: str,
        execution: Literal["trace", "compile", "cudagraph"],
        finish: Finish = lambda state, output: [*state, *output],
    ) -> Program:
        """Captures a function that steps the simulator, as a function of state and inputs.

        Before the graph is compiled, its results are compared with the simulator's in a few steps.
        They must be equal to the bit for ``trace``, and up to rounding for other executions, since
        torch may round differently for other strides.

        Args:
            function (callable): function of the inputs that steps the simulator.
            *inputs (Tensor): example inputs.
            name (str): name of the function, for messages.
            execution (str): execution of the graph.
            finish (callable): ``finish(state, output)`` returns the graph's outputs, given the
                state after the step and the function's output. By default the state and the output
                are concatenated, with the state first.

        Returns:
            Program: ``flat([*state, *inputs])`` returns the outputs.

        Raises:
            CaptureError: if the function cannot be recorded, or the graph's results differ.
        """
        state = self.state
        with self.recording():
            traced = trace(self._make_functional(function, finish), state, *inputs)
            walk = self._walk()
            for path, x in walk.tensors.items():
                if x.untyped_storage()._cdata in traced.assumed:
                    self._assumed.add(path)
        self.read_assumed()
        same = equal if execution == "trace" else _equal_up_to_rounding
        self._check_results(traced, function, finish, inputs, same)
        return self._compile_graph(traced, inputs, name, execution)

    @torch.no_grad()
    def _check_results(
        self,
        traced: Trace,
        function: Callable[..., Any],
        finish: Finish,
        inputs: tuple[Tensor, ...],
        same: Callable[[Tensor, Tensor], bool],
    ) -> None:
        """Raises an error if the results of the graph and of the simulator are not the same."""
        recorded = Program(traced, traced.module, 0.0, 0)
        state = self.state
        with self.trial(), torch.random.fork_rng():
            for seed in range(_COMPARED):
                torch.manual_seed(seed)
                output = function(*inputs)
                expected = finish(self.packing.read(self.simulator), output)
                torch.manual_seed(seed)
                found = recorded.flat([*state, *inputs])
                for i, (x, y) in enumerate(zip(expected, found)):
                    if not same(x, y):
                        name = f"output {i}" if i >= len(state) else self.packing.name(i, x, y)
                        raise CaptureError(f"{name} {_describe_difference(x, y)}")
                state = expected[: len(state)]
                self.packing.write(self.simulator, state)

    def _compile_graph(
        self, traced: Trace, inputs: tuple[Tensor, ...], name: str, execution: Any
    ) -> Program:
        """Compiles a graph, with torch's exact rounding if steps amplify rounding errors."""
        state = self.state
        if execution != "trace":
            traced = self._reduce_graph(traced, inputs)
        program = compile_trace(traced, state, *inputs, name=name, execution=execution)
        if execution != "compile" or self.packing.device.type != "cpu":
            return program
        for expected, found in self._iter_compared_outputs(traced, program, inputs):
            if not all(map(_is_close, expected[: len(state)], found)):
                # Stiff joints, for example, amplify rounding errors.
                return compile_trace(
                    traced, state, *inputs, name=f"{name} exactly", execution="exact"
                )
        program.failed = None
        return program

    def _reduce_graph(self, traced: Trace, inputs: tuple[Tensor, ...]) -> Trace:
        """Returns a trace with a smaller graph, whose results are equal to the bit."""
        if traced.n_operations < _SMALL:
            return traced
        from torchrl_marl.capture.reduction import reduce_graph

        began = time.perf_counter()
        leaves = [*self.state, *pytree.tree_leaves(inputs), *traced.captured]

        def is_equal(module: fx.GraphModule) -> bool:
            found = Program(dataclasses.replace(traced, module=module), module, 0.0, 0)
            pairs = self._iter_compared_outputs(traced, found, inputs)
            return all(all(map(_same_bits, *pair)) for pair in pairs)

        with torch.random.fork_rng():  # batching a graph runs it, and may draw
            module = reduce_graph(traced.module, leaves, self.state[0].shape[1], is_equal)
        seconds = traced.seconds + time.perf_counter() - began
        return dataclasses.replace(traced, module=module, seconds=seconds)

    def _iter_compared_outputs(
        self, traced: Trace, program: Program, inputs: tuple[Tensor, ...]
    ) -> Iterator[tuple[Sequence[Tensor], Sequence[Tensor]]]:
        """Yields the outputs of a recorded graph and of a program for it, with failed checks."""
        recorded, state = Program(traced, traced.module, 0.0, 0), self.state
        with torch.random.fork_rng():
            for seed in range(_COMPARED):
                torch.manual_seed(seed)
                expected = _run_with_checks(recorded, [*state, *inputs])
                torch.manual_seed(seed)
                yield expected, _run_with_checks(program, [*state, *inputs])
                state = list(expected[: len(state)])


def _run_with_checks(program: Program, leaves: Sequence[Any]) -> list[Tensor]:
    out, failed = program.checked(leaves)
    return [*out] if failed is None else [*out, failed]


def _same_bits(x: Tensor, y: Tensor) -> bool:
    """Returns whether two tensors are equal, with the signs of zeros; NaN equals NaN."""
    if not equal(x, y) or not x.is_floating_point():
        return equal(x, y)
    return bool(((x.signbit() == y.signbit()) | x.isnan()).all())


def _equal_up_to_rounding(x: Tensor, y: Tensor) -> bool:
    """Returns whether two tensors are equal up to rounding."""
    return equal(x, y) or (x.is_floating_point() and torch.allclose(x, y, 1e-5, 1e-6, True))


def _describe_difference(x: Tensor, y: Tensor) -> str:
    """Returns how a value of the graph differs from the simulator's, and probably why."""
    if _equal_up_to_rounding(x, y):
        return (
            "of the graph is rounded differently than the simulator's, since rounding in torch "
            "depends on the memory layout; execution=compile accepts that"
        )
    return (
        "of the graph differs from the simulator's: the step depends on a state that is not a "
        "tensor with the envs in the first dim"
    )


def _is_close(x: Tensor, y: Tensor) -> bool:
    return not x.is_floating_point() or torch.allclose(x, y, 1e-4, 1e-4, equal_nan=True)
