"""Failures of a copy of a world, or of its process, in words. Imports no torch."""

from __future__ import annotations

import traceback
from dataclasses import dataclass

from torchrl_marl import errors
from torchrl_marl.errors import UserError, WorkerError

__all__ = ["Failure"]

# Programming errors, which come again: in the world, or in its arguments.
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
        wrong (bool): a mistake in the world's program, which a copy made anew has as well.
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

    def words(self, world: str) -> str:
        """Returns the failure as text, with the copies concerned."""
        if self.lost:
            return f"Worker {self.worker} of {world} {self.message} (in copy {self.copy})"
        where = "" if self.worker is None else f" (worker {self.worker})"
        return f"Copy {self.copy} of {world}{where}{':' if self.known else ''} {self.message}"

    def error(self, world: str) -> UserError:
        """Returns the error to raise."""
        words = self.words(world)
        if self.known:
            kind = getattr(errors, self.known)
            error = kind.__new__(kind, words)  # its __init__ may ask for anything
        else:
            anew = "starts it" if self.lost else "makes it"
            hint = f"restart_workers=True {anew} anew instead of stopping."
            error = WorkerError(f"{words}; {'correct the world.' if self.wrong else hint}")
        if self.traceback:
            error.add_note(f"There:\n{self.traceback}")
        return error


def _is_ours(error: Exception) -> bool:
    """Returns whether this package raised the error, and no world or package of a world."""
    *_, (frame, _) = traceback.walk_tb(error.__traceback__)
    return str(frame.f_globals.get("__name__")).startswith("torchrl_marl.")
