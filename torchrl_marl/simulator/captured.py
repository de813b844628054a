"""A simulator's step as a pure function, captured as a graph.

Nothing here names a simulator: any object will do whose tensors hold the envs in their first
dim (:class:`~torchrl_marl.simulator.state.SimulatorState`).

Shapes: E envs, K numbers of an env.
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from torchrl_marl.capture.program import Program, compile_trace
from torchrl_marl.capture.tracing import Trace, trace
from torchrl_marl.errors import CaptureError
from torchrl_marl.runtime.random_state import RandomState
from torchrl_marl.simulator.packing import Packing, put_back
from torchrl_marl.simulator.settings import equal
from torchrl_marl.simulator.state import (
    SCALARS,
    Path,
    SimulatorState,
    path_name,
    walk_simulator,
)

__all__ = ["CapturedSimulator"]

_COMPARED = 4  # steps in which a graph is compared with the simulator
_LARGEST_ARRAY = 1000  # numbers of a numpy array that is watched for changes

State = list[Tensor]
Structure = dict[tuple[str, str], Any]
Finish = Callable[[State, Any], list[Tensor]]


class CapturedSimulator:
    """A simulator that is stepped by graphs, and can be read in between.

    While graphs run, the state is in :attr:`state`; :meth:`release` puts it back into the
    simulator, from where :attr:`state` is read the next time.

    Args:
        simulator: after a reset and a step.
        state (SimulatorState): of this kind of simulator.
        step (callable): ``step()`` makes one eager step with any actions.
        random_state (RandomState): what the simulator draws from.
        branchless (callable, optional): ``branchless()`` is a context in which the simulator
            takes the same path whatever its state is, with the same results.

    Attributes:
        in_graph (bool): a step is being recorded, which must not change random states.
        ahead (bool): the state is newer than the simulator.

    Shapes:
        - state: a list of ``[K, E]``, one for each dtype, and of the tensors that envs share

    Raises:
        CaptureError: a simulator whose attributes change from step to step.
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
        self.packing = self._pack(step)

    def _pack(self, step: Callable[[], Any]) -> Packing:
        """Runs a trial step to find what it writes."""
        before = self.simulator_state.read(self.simulator)
        walk = walk_simulator(self.simulator, self.simulator_state.exclude)
        versions = {path: (id(x), x._version) for path, x in walk.tensors.items()}
        held = list(walk.tensors.values())  # held, so that ids stay valid
        with self._random.unchanged():
            step()
        after = walk_simulator(self.simulator, self.simulator_state.exclude)
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
        self.simulator_state.write(self.simulator, before)
        shared = [path for path in written if path not in batched]
        return Packing(self.simulator, self.simulator_state, shared, apart, written)

    # ---------------------------------------------------------------- the state and its place

    @property
    def state(self) -> State:
        """The state as matrices; the simulator's own, if it was read in between."""
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
        """Returns the simulator's numbers and references, all but tensors, as text."""
        return repr(self._structure())

    def signature(self) -> str:
        """Returns what a graph relies on: the structure, and the values that :meth:`look` read."""
        return repr({**self._structure(), **self._values})

    def look(self) -> None:
        """Reads the tensors on whose values the path of a step depended, such as a gravity that
        is zero or not; waits for the device."""
        if self._assumed:
            tensors = walk_simulator(self.simulator, self.simulator_state.exclude).tensors
            self._values = {
                ("value", path_name(path)): [tensors[path].tolist()]
                for path in sorted(self._assumed)
                if path in tensors
            }

    def _structure(self) -> Structure:
        walk = walk_simulator(self.simulator, self.simulator_state.exclude)
        tensors = {path_name(path) for path in walk.tensors}
        structure = {
            (holder, key): value
            for holder, slots in walk.structure().items()
            for key, value in slots.items()
            if (f"{holder}.{key}" if holder else key) not in tensors
        }
        for path, value in walk.slots():
            if isinstance(value, np.ndarray) and value.size <= _LARGEST_ARRAY:
                structure[path_name(path[:-1]), path[-1]] = [value.tolist()]
        for name, value in vars(type(self.simulator)).items():
            if type(value) in SCALARS and not name.startswith("__"):
                structure.setdefault(("class", name), [value])
        return structure

    # ------------------------------------------------------------------------------ graphs

    def _pure(self, function: Callable[..., Any], finish: Finish) -> Callable[..., list[Tensor]]:
        """Returns ``function(*inputs)`` of the simulator as a function of its state, too."""

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
        """Restores the simulator after the calls within.

        Raises:
            CaptureError: it writes something that is not a part of the state.
        """
        self.release()
        walk = walk_simulator(self.simulator, self.simulator_state.exclude)
        structure, tensors = walk.structure(), dict(walk.tensors)
        before = self._structure()
        with self._random.unchanged():
            drawn = _numpy_and_python()
            try:
                yield
                self._refuse_change(before, tensors)
                if _numpy_and_python() != drawn:
                    raise CaptureError(
                        "a step draws from numpy or Python, which a graph cannot; draw from torch"
                    )
            finally:
                after = walk_simulator(self.simulator, self.simulator_state.exclude)
                after.restore_structure(structure)
                put_back(self.simulator, tensors)

    def _refuse_change(self, before: Structure, tensors: dict[Path, Tensor]) -> None:
        after = self._structure()
        for slot in sorted({*before, *after}):
            if before.get(slot) != after.get(slot):
                old, new = (
                    x[0] if isinstance(x, list) else x for x in (before.get(slot), after.get(slot))
                )
                raise CaptureError(
                    f"a step changes {'.'.join(filter(None, slot))} from {old!r} to {new!r}; keep "
                    "it as a tensor with the envs in the first dim"
                )
        now = walk_simulator(self.simulator, self.simulator_state.exclude).tensors
        for path in sorted({*now, *tensors} - self.packing.paths):
            if now.get(path) is not tensors.get(path):
                raise CaptureError(f"a step writes {path_name(path)}, which was not expected")

    @contextlib.contextmanager
    def trial(self) -> Iterator[None]:
        """Makes eager steps of the simulator itself, and restores it afterwards."""
        saved = self.simulator_state.read(self.release())
        self.in_graph = True
        try:
            with self._random.unchanged():
                yield
        finally:
            self.in_graph = False
            self.simulator_state.write(self.simulator, saved)

    def capture(
        self,
        function: Callable[..., Any],
        *inputs: Tensor,
        name: str,
        execution: Literal["trace", "compile", "cudagraph"],
        finish: Finish = lambda state, output: [*state, *output],
    ) -> Program:
        """Captures a function that steps the simulator, as a function of its state, too.

        The graph is held against the simulator, to the bit, before it is compiled.

        Args:
            function (callable): of the inputs; steps the simulator.
            *inputs (Tensor): as in all later runs.
            name (str): what it is, in a sentence.
            execution (str): how graphs run.
            finish (callable): ``finish(state, output)`` gives the graph's outputs from the state
                after the step and the function's output; by default one after the other. The
                state comes first in any case.

        Returns:
            Program: ``flat([*state, *inputs])`` gives the outputs.

        Raises:
            CaptureError: it cannot be recorded, or the graph gives something else.
        """
        state = self.state
        with self.recording():
            traced = trace(self._pure(function, finish), state, *inputs)
            walk = walk_simulator(self.simulator, self.simulator_state.exclude)
            for path, x in walk.tensors.items():
                if x.untyped_storage()._cdata in traced.assumed:
                    self._assumed.add(path)
        self.look()
        self._compare(traced, function, finish, inputs)
        return self._compiled(traced, inputs, name, execution)

    @torch.no_grad()
    def _compare(
        self,
        traced: Trace,
        function: Callable[..., Any],
        finish: Finish,
        inputs: tuple[Tensor, ...],
    ) -> None:
        """Refuses a graph whose steps differ from the simulator's in any bit."""
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
                    if not equal(x, y):
                        what = f"output {i}" if i >= len(state) else self.packing.name(i, x, y)
                        raise CaptureError(
                            f"{what} of the graph is not what the simulator gives: something that "
                            "is no tensor with the envs in the first dim goes on from step to step"
                        )
                state = expected[: len(state)]
                self.packing.write(self.simulator, state)

    def _compiled(
        self, traced: Trace, inputs: tuple[Tensor, ...], name: str, execution: Any
    ) -> Program:
        """Compiles a graph and compares both; exactly, where steps amplify the last bit."""
        state = self.state
        program = compile_trace(traced, state, *inputs, name=name, execution=execution)
        if execution != "compile" or self.packing.device.type != "cpu":
            return program
        recorded = Program(traced, traced.module, 0.0, 0)
        with torch.random.fork_rng():
            for seed in range(_COMPARED):
                torch.manual_seed(seed)
                expected = recorded.flat([*state, *inputs])
                torch.manual_seed(seed)
                found = program.flat([*state, *inputs])
                if not all(map(_close, expected[: len(state)], found)):
                    # Such as stiff joints.
                    return compile_trace(
                        traced, state, *inputs, name=f"{name} exactly", execution="exact"
                    )
                state = list(expected[: len(state)])
        program.failed = None
        return program


def _close(x: Tensor, y: Tensor) -> bool:
    return not x.is_floating_point() or torch.allclose(x, y, 1e-4, 1e-4, equal_nan=True)


def _numpy_and_python() -> tuple:
    state: Any = np.random.get_state()
    return state[1].tobytes(), *state[2:], random.getstate()
