"""Copies of a world in the process that plays them. Imports no torch, to start fast."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import numpy as np

from torchrl_marl.envs.processes.failures import Failure
from torchrl_marl.envs.processes.rows import Rows, row_of

__all__ = ["Copies", "WorldCopy"]


class WorldCopy(Protocol):
    """One copy of a world, made in the process in which it runs."""

    def begin(self, row: Rows, seed: int | None) -> None:
        """Begins an episode and writes the row; None continues the world's generator."""

    def play(self, row: Rows) -> None:
        """Reads the actions, makes a step and writes it; begins the next episode after an end."""

    def save(self) -> bytes:
        """Returns the copy's whole state."""

    def load(self, state: bytes) -> None:
        """Restores a saved state."""

    def close(self) -> None:
        """Frees the world's resources."""


class Copies:
    """Several copies of a world, played one after the other.

    A copy that raises stops none of the others: errors are reported when all had their turn.

    Args:
        make (callable): makes a copy, of a seed where there are such.
        rows (dict): the arrays of all copies, also of those elsewhere.
        numbers (sequence of int): which copies these are.
        current (numpy.ndarray): ``[1]``; the number of the copy whose turn it is is kept there.
        worker (int, optional): the process's number, if it is not the one of all.
    """

    def __init__(
        self,
        make: Callable[..., WorldCopy],
        rows: Rows,
        numbers: Sequence[int],
        current: np.ndarray,
        worker: int | None = None,
    ) -> None:
        self._maker = make
        self._rows = {i: row_of(rows, i) for i in numbers}
        self._current, self._worker = current, worker
        self._copies: dict[int, WorldCopy] = {}
        self._turns: list[tuple[int, WorldCopy, Rows]] = []

    def play(self) -> list[Failure]:
        """Steps each copy."""
        failures, current = [], self._current
        for i, copy, row in self._turns:
            current[0] = i
            try:
                copy.play(row)
            except Exception as error:
                failures.append(Failure.of(i, self._worker, error))
        return failures

    def call(
        self, method: str, arguments: Mapping[int, tuple]
    ) -> tuple[dict[int, Any], list[Failure]]:
        """Runs ``make``, ``begin``, ``renew`` (both), ``save``, ``load``, or ``watch`` or ``draw``.

        Args:
            method (str): which.
            arguments (mapping): copy -> its arguments.

        Returns:
            dict and list: copy -> what it returned, and what copies raised.
        """
        results: dict[int, Any] = {}
        failures = []
        for i, words in arguments.items():
            self._current[0] = i
            try:
                results[i] = getattr(self, f"_{method}")(i, *words)
            except Exception as error:
                failures.append(Failure.of(i, self._worker, error))
        self._turns = [(i, copy, self._rows[i]) for i, copy in sorted(self._copies.items())]
        return results, failures

    def close(self) -> None:
        """Closes all copies; ignores errors of closing."""
        for copy in self._copies.values():
            with contextlib.suppress(Exception):
                copy.close()
        self._copies, self._turns = {}, []

    def _make(self, i: int, *seed: int) -> None:
        self._copies[i] = self._maker(*seed)

    def _begin(self, i: int, seed: int | None) -> None:
        self._copies[i].begin(self._rows[i], seed)

    def _renew(self, i: int, seed: int | None, *made_with: int) -> None:
        with contextlib.suppress(Exception):
            self._copies.pop(i).close()
        self._make(i, *made_with)
        self._begin(i, seed)

    def _save(self, i: int) -> bytes:
        return self._copies[i].save()

    def _load(self, i: int, state: bytes) -> None:
        self._copies[i].load(state)

    def _watch(self, i: int, on: bool) -> None:
        self._copies[i].watch(on)  # type: ignore[attr-defined]

    def _draw(self, i: int) -> Any:
        return self._copies[i].draw()  # type: ignore[attr-defined]
