"""Runs a simulator's steps as captured graphs, and resets only the envs that end."""

from __future__ import annotations

import ast
import contextlib
from collections.abc import Callable, Collection, Mapping
from dataclasses import KW_ONLY, dataclass
from typing import Any, Literal

import torch
from tensordict import NestedKey, TensorDict, TensorDictBase
from torch import Tensor
from torchrl.data import TensorSpec

from torchrl_marl.capture.program import Program
from torchrl_marl.errors import CaptureError, SpecError
from torchrl_marl.runtime.random_state import RandomState
from torchrl_marl.simulator.captured import CapturedSimulator
from torchrl_marl.simulator.packing import ResetPool, TensorDictLayout, begin_episodes
from torchrl_marl.simulator.state import Exclude, Path, path_name, walk_simulator

__all__ = ["OuterTensors", "StepGraphs", "refuse_many_structures"]


class OuterTensors:
    """Paths of the simulator's tensors that a graph reads directly (``Trace.captured``).

    Some tensors are shared by all envs, such as the wind. A graph reads them from the memory that
    they had when the graph was recorded. A reset of all envs, or the user, may replace them by
    other tensors.

    Args:
        simulator: simulator before the recording.
        exclude (iterable of str or Path): attributes to skip.
    """

    def __init__(self, simulator: Any, exclude: Exclude = ()) -> None:
        self._exclude = frozenset(exclude)
        walk = walk_simulator(simulator, self._exclude)
        self._tensors = list(walk.tensors.values())  # kept alive, so that the ids stay valid
        self._first = walk.first_slots()
        self._paths: dict[int, Path] = {}

    def record_paths(self, program: Program) -> None:
        """Records the paths of the tensors that the graph reads."""
        captured = enumerate(program.traced.captured)
        self._paths = {i: self._first[id(x)] for i, x in captured if id(x) in self._first}
        self._tensors, self._first = [], {}

    def refresh(self, program: Program, simulator: Any) -> None:
        """Makes the graph read the simulator's current tensors.

        Raises:
            CaptureError: if a tensor has another shape or dtype.
        """
        if not self._paths:
            return
        now = walk_simulator(simulator, self._exclude).tensors
        for i, path in self._paths.items():
            old, new = program.traced.captured[i], now.get(path)
            if new is None or (new.shape, new.dtype) != (old.shape, old.dtype):
                found = "gone" if new is None else f"{new.dtype} {list(new.shape)}"
                raise CaptureError(
                    f"{path_name(path)} is {found} now, and was {old.dtype} {list(old.shape)} "
                    "when the graph was recorded"
                )
            program.traced.captured[i] = new


_MOST_STRUCTURES = 12  # simple_reference has 9: each of two agents has one of three goals


@dataclass(eq=False)
class StepGraphs:
    """Runs an environment's steps as graphs, and its partial resets from a pool.

    One graph is recorded for each *structure* of the simulator. The structure is the simulator's
    numbers and references, for example a reference to the landmark that is the goal. It is read
    again whenever other code may have changed the state, as in a reset of all envs.

    Args:
        captured (CapturedSimulator): the environment's simulator.
        advance (callable): ``advance(tensordict)`` makes an eager step, ``[E]``.
        read (callable): ``read()`` returns the output of a reset for the current state.
        actions (mapping): key of an action -> its spec.
        pool (ResetPool): initial states of new episodes.
        random (RandomState): random state of the simulator.
        name (str): name of the environment, for messages.
        execution (str): execution of the graphs.
    """

    captured: CapturedSimulator
    advance: Callable[[TensorDictBase], TensorDictBase]
    read: Callable[[], TensorDictBase]
    actions: Mapping[NestedKey, TensorSpec]
    pool: ResetPool
    random: RandomState
    _: KW_ONLY
    name: str
    execution: Literal["trace", "compile", "cudagraph"]

    def __post_init__(self) -> None:
        self._programs: dict[str, _CapturedStep] = {}
        self._current: _CapturedStep | None = None
        self._signature = self._structure = ""
        self._state: list[Tensor] | None = None
        self._last: TensorDictBase | None = None

    def step(self, tensordict: TensorDictBase) -> TensorDict:
        """Makes a step, with the same results as the simulator.

        Raises:
            CaptureError: if the simulator cannot be captured.
            GraphCheckError: if a check of the simulator failed; the state is then as before the
                step. On a GPU only :meth:`begin` and :meth:`raise_failed` raise this error.
            SpecError: if an action is missing, or its shape differs from its spec.
        """
        actions = [self._read_action(tensordict, key) for key in self.actions]
        state = self._read_state()
        if self._current is None:
            self._current = self._find_step(state, actions)
            self._current.outer.refresh(self._current.program, self.captured.simulator)
        step = self._current
        with self.random.active() if step.draws else contextlib.nullcontext():
            out = step.program.flat([*state, *actions])
        if out[0].device.type == "cpu":  # on other devices, reading would wait
            step.program.raise_failed()
        self._write_state(list(out[: len(state)]))
        leaves = out[len(state) :]
        self._last = step.nesting.build(leaves, leaves[0].shape[:1])
        return self._last.copy()

    def begin(self, ended: Tensor) -> TensorDict:
        """Starts new episodes in the envs where ``ended`` ``[E]`` is True.

        Raises:
            CaptureError: if the simulator's state cannot be packed.
            GraphCheckError: if a check of the simulator failed in an earlier step.
        """
        self.raise_failed()
        state = self._read_state()
        self.pool.discard_if_other_structure(self._structure)
        self.pool.prepare()
        nesting = self.pool.nesting
        last = self._last
        if last is None:
            with self.random.unchanged():
                last = self.read()
        carry = dict(zip(nesting.keys, nesting.leaves(last)))
        state, carry, used = begin_episodes(ended, state, carry, self.pool.tensors)
        self.pool.tensors["used"] = used
        self._write_state(state)
        self._last = nesting.build(list(carry.values()), ended.shape)
        return self._last.copy()

    def _read_state(self) -> list[Tensor]:
        """Returns the state; if other code changed the state, also reads the structure again."""
        state = self.captured.state
        if state is not self._state:
            self.captured.read_assumed()
            self._structure = self.captured.structure()
            self._signature = self.captured.signature()
            self._current = self._last = None
        return state

    def _write_state(self, state: list[Tensor]) -> None:
        self.captured.state = self._state = state

    def _read_action(self, tensordict: TensorDictBase, key: NestedKey) -> Tensor:
        action, spec = tensordict.get(key, None), self.actions[key]
        if action is None or action.shape != spec.shape:
            found = "nothing" if action is None else list(action.shape)
            raise SpecError(
                f"{self.name}: {key!r} is {found}, expected {list(spec.shape)}; the policy must "
                "act for every group."
            )
        # A graph is valid for one dtype and memory layout.
        return action.to(spec.dtype).contiguous()

    def _find_step(self, state: list[Tensor], actions: list[Tensor]) -> _CapturedStep:
        if self._signature not in self._programs:
            refuse_many_structures([*self._programs, self._signature])
            recorded = self._record_step(state, actions)
            # Recording finds the tensors that decide branches. They change the signature.
            self._signature = self.captured.signature()
            self._programs[self._signature] = recorded
        return self._programs[self._signature]

    def _record_step(self, state: list[Tensor], actions: list[Tensor]) -> _CapturedStep:
        found: list[TensorDictLayout] = []

        def step(*values: Tensor) -> list[Tensor]:
            td = TensorDict({}, [state[0].shape[1]], device=state[0].device)
            for key, action in zip(self.actions, values):
                td.set(key, action)
            stepped = self.advance(td)
            found.append(TensorDictLayout(stepped))
            return found[0].leaves(stepped)

        outer = OuterTensors(self.captured.simulator, self.captured.simulator_state.exclude)
        program = self.captured.capture(
            step, *actions, name=f"a step of {self.name}", execution=self.execution
        )
        outer.record_paths(program)
        return _CapturedStep(program, found[0], outer)

    def raise_failed(self) -> None:
        """Raises the errors of failed checks in all graphs; waits for the device.

        Raises:
            GraphCheckError: a check failed; the message names the line of the simulator's code.
        """
        for step in self._programs.values():
            step.program.raise_failed()


class _CapturedStep:
    """A step captured as a graph.

    Args:
        program (Program): the graph.
        nesting (TensorDictLayout): layout of the graph's output.
        outer (OuterTensors): tensors that the graph reads directly from the simulator.
    """

    def __init__(self, program: Program, nesting: TensorDictLayout, outer: OuterTensors) -> None:
        self.program, self.nesting, self.outer = program, nesting, outer
        targets = [node.target for node in program.traced.module.graph.nodes]
        self.draws = any(
            torch.Tag.nondeterministic_seeded in target.tags
            for target in targets
            if isinstance(target, torch._ops.OpOverload)
        )


def refuse_many_structures(signatures: Collection[str]) -> None:
    """Raises an error if a simulator changes so often that too many graphs would be recorded.

    Args:
        signatures (collection of str): signatures of the simulator's structures, including the next
            one.

    Raises:
        CaptureError: there are too many signatures; the message names the difference between the
            last two.
    """
    if len(signatures) <= _MOST_STRUCTURES:
        return
    *_, last, new = signatures
    before, after = _parse_signature(last), _parse_signature(new)
    slots = [slot for slot in sorted({*before, *after}) if before.get(slot) != after.get(slot)]
    raise CaptureError(
        f"a graph is valid for one structure of the simulator, and {len(signatures)} were found: "
        f"resets keep changing {', '.join(slots[:3])}{', ...' if len(slots) > 3 else ''}; store "
        "it as a tensor with the envs in the first dim"
    )


def _parse_signature(signature: str) -> dict[str, str]:
    """Returns a dict, name -> value as text, from a signature (``inf`` is no Python literal)."""
    slots = ast.parse(signature, mode="eval").body
    assert isinstance(slots, ast.Dict)
    names = [ast.literal_eval(key) for key in slots.keys if key is not None]
    return {".".join(filter(None, name)): ast.unparse(x) for name, x in zip(names, slots.values)}
