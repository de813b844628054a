"""What an actor of Ray answers, or why it does not."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from torchrl_marl.errors import UserError, WorkerError

__all__ = ["ActorFailure", "answer_of"]


@dataclass(frozen=True)
class ActorFailure:
    """Why an actor has not answered.

    Args:
        words (str): in one line.
        lost (bool): its process is dead, silent or out of reach; otherwise its world's code raised.
        traceback (str): of the actor's process.
    """

    words: str
    lost: bool
    traceback: str = ""

    def error(self, before: str, after: str = "") -> WorkerError:
        """Returns the error to raise, with the traceback as a note."""
        error = WorkerError(f"{before} {self.words}{after}")
        if self.traceback:
            error.add_note(f"There:\n{self.traceback}")
        return error


def answer_of(ray: Any, result: Any, ready: bool, timeout: float, who: str = "") -> Any:
    """Returns what an actor has answered, or its :class:`ActorFailure`.

    Args:
        ray (module): Ray.
        result (ObjectRef): of the call.
        ready (bool): whether it has ended.
        timeout (float): the seconds for which it was waited for.
        who (str): named before what a user can correct.

    Raises:
        UserError: what a user can correct, as the actor said it.
    """
    if not ready:
        return ActorFailure(f"was silent for {timeout:g} s (distributed.timeout)", lost=True)
    try:
        return ray.get(result)
    except ray.exceptions.RayTaskError as error:
        cause = error.cause
        if isinstance(cause, UserError) and not isinstance(cause, WorkerError):
            raise _named(cause, who, str(error)) from None
        return ActorFailure(_raised(error), lost=False, traceback=str(error))
    except ray.exceptions.RayError as error:
        lines = str(error).strip().splitlines() or [type(error).__name__]
        return ActorFailure(f"is gone ({lines[0]})", lost=True, traceback=str(error))


def _named(cause: UserError, who: str, traceback: str) -> UserError:
    if not who:
        return cause
    kind = type(cause)
    error = kind.__new__(kind, f"{who}: {cause}")  # its __init__ may ask for anything
    error.add_note(f"There:\n{traceback}")
    return error


def _raised(error: Any) -> str:
    """``"raised ValueError: it broke (world.py, line 3)"``."""
    text = " ".join(str(error.cause).split())[:500]
    places = re.findall(r'File "([^"]+)", line (\d+)', str(error))
    where = f" ({places[-1][0]}, line {places[-1][1]})" if places else ""
    return f"raised {type(error.cause).__name__}" + (f": {text}" if text else "") + where
