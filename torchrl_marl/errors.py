"""Errors that a user can mend: the command line prints them as one line and ends with code 2."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from typing import Any

__all__ = [
    "BatchSizeError",
    "CaptureError",
    "CheckpointError",
    "ConfigError",
    "GraphCheckError",
    "MissingExtraError",
    "NonFiniteError",
    "SimulatorStateError",
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


class SimulatorStateError(UserError, RuntimeError):
    """The simulator keeps its state in a way that cannot be read and written as tensors."""


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


def quoted(value: Any) -> str:
    """A value as Python writes it, cut where it is long.

    Examples:
        >>> quoted("balance"), quoted("x" * 1000)
        ("'balance'", "'xxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxx... \
(1,002 characters)")
    """
    try:
        text = repr(value)
    except ValueError:  # Python writes no integer of more than some thousand digits
        text = hex(value) if isinstance(value, int) else f"a {type(value).__name__}"
    return text if len(text) <= 120 else f"{text[:60]}... ({len(text):,} characters)"


def nearest(name: str, known: Iterable[str]) -> str:
    """``"did you mean 'x'? "``, or nothing where no known name comes near.

    Examples:
        >>> nearest("blance", ["balance", "wheel"]), nearest("chess", ["cheetah", "wheel"])
        ("did you mean 'balance'? ", '')
    """
    close = closest(name, known)
    return f"did you mean {close!r}? " if close else ""


def closest(name: str, known: Iterable[str]) -> str | None:
    """The known name that is spelled most alike or holds the name, or None where none does.

    Examples:
        >>> closest("football", ["vmas_football_mappo", "vmas_balance_mappo"])
        'vmas_football_mappo'
    """
    name, known = name[:100], list(known)
    # Of two letters, one that is right is half of the word.
    close = difflib.get_close_matches(name, known, n=1, cutoff=0.66 if len(name) > 2 else 0.5)
    holding = [other for other in known if len(name) > 3 and name in other]
    found = close or holding
    return found[0] if found else None
