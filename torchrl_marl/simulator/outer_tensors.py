"""Tensors that a graph reads from a simulator, looked up again after a reset replaced them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torchrl_marl.capture.program import Program
from torchrl_marl.errors import CaptureError
from torchrl_marl.simulator.state import Path, path_name, walk_simulator

__all__ = ["OuterTensors"]


class OuterTensors:
    """Places of a graph's outer tensors (``Trace.captured``) in the simulator.

    What all envs share, such as a wind, a graph reads from the very tensors that were there when
    it was recorded. A reset of all envs, or a user, may put new ones into their places.

    Args:
        simulator: about to be recorded.
        exclude (iterable of str or Path): what not to enter.
    """

    def __init__(self, simulator: Any, exclude: Iterable[str | Path] = ()) -> None:
        self._exclude = frozenset(exclude)
        walk = walk_simulator(simulator, self._exclude)
        self._tensors = list(walk.tensors.values())  # held, so that ids stay valid
        self._first = walk.first_slots()
        self._paths: dict[int, Path] = {}

    def belong_to(self, program: Program) -> None:
        """Notes which of the tensors the captured graph reads."""
        captured = enumerate(program.traced.captured)
        self._paths = {i: self._first[id(x)] for i, x in captured if id(x) in self._first}
        self._tensors, self._first = [], {}

    def refresh(self, program: Program, simulator: Any) -> None:
        """Makes the graph read the simulator's present tensors.

        Raises:
            CaptureError: a tensor of another shape or type.
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
