"""Copies of an environment in one process: their arrays in shared memory, and their failures.

The module does not import torch, so workers start fast.
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
"""Arrays of all copies, or of one copy, by field."""

ALIGNMENT = 64  # bytes: a cache line, and the alignment of torch's vector instructions


@dataclass(frozen=True)
class RowLayout:
    """Layout of the arrays with which copies of an environment exchange data; one row per copy.

    Args:
        fields (dict): for each field, the shape of one row and the name of the numpy dtype.

    Examples:
        >>> layout = RowLayout({"action": ((2,), "float32"), "done": ((), "bool")})
        >>> rows = layout.views(bytearray(layout.n_bytes(3)), 3)
        >>> rows["action"].shape, rows["done"].shape
        ((3, 2), (3,))
    """

    fields: dict[str, tuple[tuple[int, ...], str]]

    def n_bytes(self, n_copies: int) -> int:
        """Returns the size in bytes of a memory block for ``n_copies`` copies."""
        end = max((end for *_, end in self._positions(n_copies)), default=0)
        return -(-end // ALIGNMENT) * ALIGNMENT

    def views(self, buffer: mmap.mmap | bytearray | memoryview, n_copies: int) -> Rows:
        """Returns arrays ``[n_copies, *shape]`` that are views of a buffer, by field."""
        return {
            name: np.ndarray((n_copies, *shape), dtype, buffer, start)
            for name, shape, dtype, start, _ in self._positions(n_copies)
        }

    def _positions(self, n_copies: int) -> Iterator[tuple[str, tuple[int, ...], str, int, int]]:
        """Yields each field's name, shape and dtype, and where its array starts and ends."""
        end = 0
        for name, (shape, dtype) in self.fields.items():
            start = -(-end // ALIGNMENT) * ALIGNMENT
            end = start + n_copies * math.prod(shape) * np.dtype(dtype).itemsize
            yield name, shape, dtype, start, end


def row_of(rows: Rows, number: int) -> Rows:
    """Returns one copy's row of every array, as a view; a row of a single number is a view, too."""
    return {name: array[number, ...] for name, array in rows.items()}


def open_block(n_bytes: int) -> int:
    """Opens anonymous shared memory, filled with zeros; it is freed when its last user ends."""
    if hasattr(os, "memfd_create"):
        block = os.memfd_create("torchrl_marl")
    else:
        with tempfile.TemporaryFile() as file:
            block = os.dup(file.fileno())
    os.truncate(block, max(n_bytes, 1))
    return block


# Programming errors in the environment or its arguments, which a new copy would repeat.
_PROGRAMMING_ERRORS = (
    *(TypeError, LookupError, AttributeError, NameError, AssertionError),
    *(ImportError, NotImplementedError, SyntaxError),
)


@dataclass(frozen=True)
class Failure:
    """Message between processes about an error in a copy, or about the loss of its worker.

    Args:
        copy (int): index of the copy.
        worker (int, optional): index of its worker process; None if it runs in the main process.
        message (str): error message.
        traceback (str): traceback, empty if unknown.
        known (str, optional): name of the error's class in ``torchrl_marl.errors``; None for other
            errors.
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
        """Builds a failure from an exception."""
        own_classes = (c.__name__ for c in type(error).__mro__ if c.__module__ == errors.__name__)
        known, message = next(own_classes, None), str(error)
        if known is None:
            message = f"raised {type(error).__name__}" + (f": {message}" if message else "")
        text = "".join(traceback.format_exception(error))
        wrong = known is None and (
            isinstance(error, _PROGRAMMING_ERRORS) or _is_raised_by_package(error)
        )
        return cls(copy, worker, message, text, known, wrong=wrong)

    @property
    def repairable(self) -> bool:
        """True if a new copy may succeed; False if settings, specs or code are wrong."""
        return self.known in (None, "NonFiniteError") and not self.wrong

    def describe(self, env: str) -> str:
        """Returns a one-line description, which names the copy and its worker."""
        if self.lost:
            return f"Worker {self.worker} of {env} {self.message} (in copy {self.copy})"
        where = "" if self.worker is None else f" (worker {self.worker})"
        return f"Copy {self.copy} of {env}{where}{':' if self.known else ''} {self.message}"

    def error(self, env: str) -> UserError:
        """Returns the exception to raise in the main process."""
        text = self.describe(env)
        if self.known:
            kind = getattr(errors, self.known)
            error = kind.__new__(kind, text)  # the class's __init__ may have other arguments
        else:
            lost = "worker" if self.lost else "copy"
            hint = f"use restart_workers=True to restart the {lost} instead of stopping."
            error = WorkerError(f"{text}; {'fix the environment.' if self.wrong else hint}")
        if self.traceback:
            error.add_note(f"There:\n{self.traceback}")
        return error


def _is_raised_by_package(error: Exception) -> bool:
    """Returns True if code of this package raised the error."""
    *_, (frame, _) = traceback.walk_tb(error.__traceback__)
    return str(frame.f_globals.get("__name__")).startswith("torchrl_marl.")


class EnvInstance(Protocol):
    """Interface of one copy of an environment, which is made in the process that runs it."""

    def begin(self, row: Rows, seed: int | None) -> None:
        """Starts an episode and writes the copy's row; a seed of None keeps the random state."""

    def play(self, row: Rows) -> None:
        """Makes a step with the actions in the copy's row, and writes the row; resets at an end."""

    def save(self) -> bytes:
        """Returns the whole state of the copy."""

    def load(self, state: bytes) -> None:
        """Restores a state that :meth:`save` returned."""

    def close(self) -> None:
        """Frees the environment's resources."""


class Copies:
    """Copies of an environment in one process, which are stepped in sequence.

    An error in one copy does not stop the others; all errors are returned at the end.

    Args:
        make (callable): function that makes a copy; it receives a seed if seeds are given.
        rows (dict): arrays of the copies of all processes.
        numbers (sequence of int): indices of the copies of this process.
        current (numpy.ndarray): array ``[1]`` that receives the index of the running copy.
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
        self._stepped_copies: list[tuple[int, EnvInstance, Rows]] = []

    def play(self) -> list[Failure]:
        """Steps each copy; returns the failures of the copies."""
        failures, current = [], self._current
        for i, copy, row in self._stepped_copies:
            current[0] = i
            try:
                copy.play(row)
            except Exception as error:
                failures.append(Failure.of(i, self._worker, error))
        return failures

    def call(
        self, method: str, arguments: Mapping[int, tuple]
    ) -> tuple[dict[int, Any], list[Failure]]:
        """Calls a method of the given copies.

        Args:
            method (str): ``"make"``, ``"begin"``, ``"renew"`` (make and begin), ``"save"``,
                ``"load"``, ``"watch"`` or ``"draw"``.
            arguments (mapping): arguments of the method, by copy.

        Returns:
            dict and list: the results by copy, and the failures.
        """
        results: dict[int, Any] = {}
        failures = []
        for i, args in arguments.items():
            self._current[0] = i
            try:
                results[i] = self._call(method, i, args)
            except Exception as error:
                failures.append(Failure.of(i, self._worker, error))
        self._stepped_copies = [
            (i, copy, self._rows[i]) for i, copy in sorted(self._copies.items())
        ]
        return results, failures

    def close(self) -> None:
        """Closes all copies; ignores errors that are raised while they close."""
        for copy in self._copies.values():
            with contextlib.suppress(Exception):
                copy.close()
        self._copies, self._stepped_copies = {}, []

    def _call(self, method: str, i: int, arguments: tuple) -> Any:
        if method == "make":
            self._copies[i] = self._maker(*arguments)
            return None
        if method == "renew":
            seed, *made_with = arguments
            with contextlib.suppress(Exception):
                self._copies.pop(i).close()
            self._copies[i] = self._maker(*made_with)
            return self._copies[i].begin(self._rows[i], seed)
        if method == "begin":
            return self._copies[i].begin(self._rows[i], *arguments)
        return getattr(self._copies[i], method)(*arguments)
