"""Copies of an environment within one process, their rows of shared memory, and their failures.

Imports no torch, to start fast.
"""

from __future__ import annotations

import contextlib
import math
import mmap
import os
import tempfile
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from torchrl_marl import errors
from torchrl_marl.errors import UserError, WorkerError

__all__ = ["Copies", "EnvInstance", "Failure", "RowLayout", "Rows", "open_block", "row_of"]

Rows = dict[str, np.ndarray]
"""Arrays of all copies or of one, by field."""

ALIGNMENT = 64  # bytes: a cache line, and the alignment of torch's vector instructions


@dataclass(frozen=True)
class RowLayout:
    """Layout of the arrays that the copies of an environment read and write, one row per copy.

    Args:
        fields (dict): shape of one copy's row and name of the numpy dtype, by field.

    Examples:
        >>> layout = RowLayout({"action": ((2,), "float32"), "done": ((), "bool")})
        >>> rows = layout.views(bytearray(layout.n_bytes(3)), 3)
        >>> rows["action"].shape, rows["done"].shape
        ((3, 2), (3,))
    """

    fields: dict[str, tuple[tuple[int, ...], str]]

    def n_bytes(self, n_copies: int) -> int:
        """Returns the size in bytes of a block for some copies."""
        end = max((end for *_, end in self._places(n_copies)), default=0)
        return -(-end // ALIGNMENT) * ALIGNMENT

    def views(self, buffer: mmap.mmap | bytearray | memoryview, n_copies: int) -> Rows:
        """Returns the arrays of a buffer by field, ``[n_copies, *shape]``."""
        return {
            name: np.ndarray((n_copies, *shape), dtype, buffer, start)
            for name, shape, dtype, start, _ in self._places(n_copies)
        }

    def _places(self, n_copies: int) -> Iterator[tuple[str, tuple[int, ...], str, int, int]]:
        end = 0
        for name, (shape, dtype) in self.fields.items():
            start = -(-end // ALIGNMENT) * ALIGNMENT
            end = start + n_copies * math.prod(shape) * np.dtype(dtype).itemsize
            yield name, shape, dtype, start, end


def row_of(rows: Rows, number: int) -> Rows:
    """Returns views of the rows of one copy, also of scalars."""
    return {name: array[number, ...] for name, array in rows.items()}


def open_block(n_bytes: int) -> int:
    """Opens anonymous shared memory, filled with zeros; it is freed with its last process."""
    if hasattr(os, "memfd_create"):
        block = os.memfd_create("torchrl_marl")
    else:
        with tempfile.TemporaryFile() as file:
            block = os.dup(file.fileno())
    os.truncate(block, max(n_bytes, 1))
    return block


# Programming errors in the environment or its arguments, which a new copy would repeat.
_WRONG = (
    *(TypeError, LookupError, AttributeError, NameError, AssertionError),
    *(ImportError, NotImplementedError, SyntaxError),
)


@dataclass(frozen=True)
class Failure:
    """Error of a copy, or loss of its worker, as a message between processes.

    Args:
        copy (int): index of the copy.
        worker (int, optional): index of its worker process; None in this process.
        message (str): error message.
        traceback (str): traceback, if known.
        known (str, optional): class of ``torchrl_marl.errors``, for such an error.
        lost (bool): True if the worker died or does not answer.
        wrong (bool): True for a programming error, which a new copy would repeat.
    """

    copy: int
    worker: int | None
    message: str
    traceback: str
    known: str | None = None
    lost: bool = False
    wrong: bool = False

    @classmethod
    def of(cls, copy: int, worker: int | None, error: Exception) -> Failure:
        """Builds a failure from an error."""
        ours = (c.__name__ for c in type(error).__mro__ if c.__module__ == errors.__name__)
        known, message = next(ours, None), str(error)
        if known is None:
            message = f"raised {type(error).__name__}" + (f": {message}" if message else "")
        text = "".join(traceback.format_exception(error))
        wrong = known is None and (isinstance(error, _WRONG) or _is_ours(error))
        return cls(copy, worker, message, text, known, wrong=wrong)

    @property
    def repairable(self) -> bool:
        """Returns True if a new copy may succeed; False after wrong settings, specs or code."""
        return self.known in (None, "NonFiniteError") and not self.wrong

    def describe(self, env: str) -> str:
        """Returns the failure in one line, with the copy and its worker."""
        if self.lost:
            return f"Worker {self.worker} of {env} {self.message} (in copy {self.copy})"
        where = "" if self.worker is None else f" (worker {self.worker})"
        return f"Copy {self.copy} of {env}{where}{':' if self.known else ''} {self.message}"

    def error(self, env: str) -> UserError:
        """Returns the exception to raise."""
        text = self.describe(env)
        if self.known:
            kind = getattr(errors, self.known)
            error = kind.__new__(kind, text)  # its __init__ may have other arguments
        else:
            lost = "worker" if self.lost else "copy"
            hint = f"use restart_workers=True to restart the {lost} instead of stopping."
            error = WorkerError(f"{text}; {'fix the environment.' if self.wrong else hint}")
        if self.traceback:
            error.add_note(f"There:\n{self.traceback}")
        return error


def _is_ours(error: Exception) -> bool:
    """Returns True if code of this package raised the error."""
    *_, (frame, _) = traceback.walk_tb(error.__traceback__)
    return str(frame.f_globals.get("__name__")).startswith("torchrl_marl.")


class EnvInstance(Protocol):
    """Interface of one copy of an environment, made in the process in which it runs."""

    def begin(self, row: Rows, seed: int | None) -> None:
        """Starts an episode and writes the row; without a seed the random generator continues."""

    def play(self, row: Rows) -> None:
        """Reads the actions, makes a step and writes the row; resets ended episodes."""

    def save(self) -> bytes:
        """Returns the whole state of the copy."""

    def load(self, state: bytes) -> None:
        """Restores a saved state."""

    def close(self) -> None:
        """Frees the environment's resources."""


class Copies:
    """Copies of an environment in one process, stepped in sequence.

    An error in one copy does not stop the others; all errors are returned at the end.

    Args:
        make (callable): makes a copy, from a seed if there are seeds.
        rows (dict): arrays of the copies of all processes.
        numbers (sequence of int): indices of the copies of this process.
        current (numpy.ndarray): ``[1]``, receives the index of the running copy.
        worker (int, optional): index of the worker process; None in the main process.
    """

    def __init__(
        self,
        make: Callable[..., EnvInstance],
        rows: Rows,
        numbers: Sequence[int],
        current: np.ndarray,
        worker: int | None = None,
    ) -> None:
        self._maker = make
        self._rows = {i: row_of(rows, i) for i in numbers}
        self._current, self._worker = current, worker
        self._copies: dict[int, EnvInstance] = {}
        self._turns: list[tuple[int, EnvInstance, Rows]] = []

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
        """Calls a method of some copies.

        Args:
            method (str): ``"make"``, ``"begin"``, ``"renew"`` (make and begin), ``"save"``,
                ``"load"``, ``"watch"`` or ``"draw"``.
            arguments (mapping): arguments by copy.

        Returns:
            dict and list: results by copy, and failures.
        """
        results: dict[int, Any] = {}
        failures = []
        for i, args in arguments.items():
            self._current[0] = i
            try:
                results[i] = self._call(method, i, args)
            except Exception as error:
                failures.append(Failure.of(i, self._worker, error))
        self._turns = [(i, copy, self._rows[i]) for i, copy in sorted(self._copies.items())]
        return results, failures

    def close(self) -> None:
        """Closes all copies; ignores their errors."""
        for copy in self._copies.values():
            with contextlib.suppress(Exception):
                copy.close()
        self._copies, self._turns = {}, []

    def _call(self, method: str, i: int, words: tuple) -> Any:
        if method == "make":
            self._copies[i] = self._maker(*words)
            return None
        if method == "renew":
            seed, *made_with = words
            with contextlib.suppress(Exception):
                self._copies.pop(i).close()
            self._copies[i] = self._maker(*made_with)
            return self._copies[i].begin(self._rows[i], seed)
        if method == "begin":
            return self._copies[i].begin(self._rows[i], *words)
        return getattr(self._copies[i], method)(*words)
