"""Errors that a user can mend: the command line prints them as one line and ends with code 2."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

__all__ = [
    "BatchSizeError",
    "CaptureError",
    "CheckpointError",
    "ConfigError",
    "GraphCheckError",
    "MissingExtraError",
    "NonFiniteError",
    "SpecError",
    "TrustError",
    "UserError",
    "WorkerError",
    "WriteError",
]


class UserError(Exception):
    """What the user asked for cannot be done; the message names the fix."""


class ConfigError(UserError, ValueError):
    """A recipe, key or value that is not right."""


class BatchSizeError(ConfigError, TypeError):
    """A batch size that does not fit; a ``TypeError`` as well, which TorchRL raises."""


class MissingExtraError(UserError, ImportError):
    """An optional package that is not installed.

    Args:
        package (str): its name in a sentence.
        extra (str): the extra of ``torchrl_marl`` that installs it.
    """

    def __init__(self, package: str, extra: str) -> None:
        super().__init__(f"{package} is not installed; run: pip install 'torchrl_marl[{extra}]'")


class CaptureError(UserError, RuntimeError):
    """A simulator or update that cannot be recorded as a graph."""


class GraphCheckError(CaptureError, AssertionError):
    """A check that a simulator makes, left for later in a graph, failed."""


class CheckpointError(UserError, RuntimeError):
    """A checkpoint or run folder that cannot be used."""


class SpecError(UserError, ValueError):
    """What an environment gives and what it declared disagree."""


class WorkerError(UserError, RuntimeError):
    """A process in which worlds run died, or does not answer."""


class TrustError(UserError):
    """Code of somebody else that would run, and nobody has said that it may."""


class WriteError(UserError, OSError):
    """A file that cannot be written: a full disk, a folder that is read-only."""


class NonFiniteError(UserError, ArithmeticError):
    """A value of a living agent is NaN or infinite."""


def nearest(name: str, known: Iterable[str]) -> str:
    """``"did you mean 'x'? "``, or nothing where no known name comes near.

    Examples:
        >>> nearest("blance", ["balance", "wheel"])
        "did you mean 'balance'? "
    """
    close = difflib.get_close_matches(name, list(known), n=1, cutoff=0.5)
    return f"did you mean {close[0]!r}? " if close else ""
