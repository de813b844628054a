"""Copies of an environment in the process that plays them, their rows of memory, and their
failures.

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
"""Field -> array: of all copies, or of one."""

ALIGNMENT = 64  # bytes: a cache line, and the alignment of torch's vector instructions


@dataclass(frozen=True)
class RowLayout:
    """Layout of the arrays that an environment's copies read and write; one row of each per copy.

    Args:
        fields (dict): name -> (shape of one copy, name of the numpy dtype).

    Examples:
        >>> layout = RowLayout({"action": ((2,), "float32"), "done": ((), "bool")})
        >>> rows = layout.views(bytearray(layout.n_bytes(3)), 3)
        >>> rows["action"].shape, rows["done"].shape
        ((3, 2), (3,))
    """

    fields: dict[str, tuple[tuple[int, ...], str]]

    def n_bytes(self, n_copies: int) -> int:
        """Returns the bytes of a block for a number of copies."""
        end = max((end for *_, end in self._places(n_copies)), default=0)
        return -(-end // ALIGNMENT) * ALIGNMENT

    def views(self, buffer: mmap.mmap | bytearray | memoryview, n_copies: int) -> Rows:
        """Returns the arrays of a buffer: field -> ``[n_copies, *shape]``."""
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
    """Returns the views of one copy, scalars included."""
    return {name: array[number, ...] for name, array in rows.items()}


def open_block(n_bytes: int) -> int:
    """Opens new memory, all zero, without a name: it is freed with its last process."""
    if hasattr(os, "memfd_create"):
        block = os.memfd_create("torchrl_marl")
    else:
        with tempfile.TemporaryFile() as file:
            block = os.dup(file.fileno())
    os.truncate(block, max(n_bytes, 1))
    return block


# Programming errors, which come again: in the environment, or in its arguments.
_WRONG = (
    *(TypeError, LookupError, AttributeError, NameError, AssertionError),
    *(ImportError, NotImplementedError, SyntaxError),
)


@dataclass(frozen=True)
class Failure:
    """An error that a copy raised, or the loss of its worker; it travels between processes.

    Args:
        copy (int): the copy's number.
        worker (int, optional): the number of its process, if it is not this one.
        message (str): what happened.
        traceback (str): where, as far as that is known.
        known (str, optional): the class of ``torchrl_marl.errors`` that was raised, if it is one.
        lost (bool): the worker died or does not answer.
        wrong (bool): a mistake in the environment's program, which a copy made anew has as well.
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
        """Returns whether a new copy may succeed: not after a wrong setting, space or program."""
        return self.known in (None, "NonFiniteError") and not self.wrong

    def words(self, env: str) -> str:
        """Returns the failure as text, with the copies concerned."""
        if self.lost:
            return f"Worker {self.worker} of {env} {self.message} (in copy {self.copy})"
        where = "" if self.worker is None else f" (worker {self.worker})"
        return f"Copy {self.copy} of {env}{where}{':' if self.known else ''} {self.message}"

    def error(self, env: str) -> UserError:
        """Returns the error to raise."""
        words = self.words(env)
        if self.known:
            kind = getattr(errors, self.known)
            error = kind.__new__(kind, words)  # its __init__ may ask for anything
        else:
            anew = "starts it" if self.lost else "makes it"
            hint = f"restart_workers=True {anew} anew instead of stopping."
            error = WorkerError(f"{words}; {'correct the environment.' if self.wrong else hint}")
        if self.traceback:
            error.add_note(f"There:\n{self.traceback}")
        return error


def _is_ours(error: Exception) -> bool:
    """Returns whether this package raised the error, and no environment or package of an environment."""
    *_, (frame, _) = traceback.walk_tb(error.__traceback__)
    return str(frame.f_globals.get("__name__")).startswith("torchrl_marl.")


class EnvInstance(Protocol):
    """One copy of an environment, made in the process in which it runs."""

    def begin(self, row: Rows, seed: int | None) -> None:
        """Begins an episode and writes the row; None continues the environment's generator."""

    def play(self, row: Rows) -> None:
        """Reads the actions, makes a step and writes it; begins the next episode after an end."""

    def save(self) -> bytes:
        """Returns the copy's whole state."""

    def load(self, state: bytes) -> None:
        """Restores a saved state."""

    def close(self) -> None:
        """Frees the environment's resources."""


class Copies:
    """Several copies of an environment, played one after the other.

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
                results[i] = self._call(method, i, words)
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
