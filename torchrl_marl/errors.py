"""Errors that a user can fix: the command line prints them as one line and exits with code 2."""

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
    "RankError",
    "SimulatorStateError",
    "SpecError",
    "TrustError",
    "UserError",
    "WorkerError",
    "WriteError",
]


class UserError(Exception):
    """A request that cannot be met; the message contains the fix."""


class ConfigError(UserError, ValueError):
    """A recipe, key or value that is invalid."""


class BatchSizeError(ConfigError, TypeError):
    """A batch size that does not fit; a ``TypeError`` as well, which TorchRL raises."""


class MissingExtraError(UserError, ImportError):
    """An optional package that is not installed, or broken.

    Args:
        package (str): its name in a sentence.
        extra (str): the extra of ``torchrl_marl`` that installs it.
        why (str): what is wrong with it.
    """

    def __init__(self, package: str, extra: str, why: str = "is not installed") -> None:
        super().__init__(
            f"{package} {why}; run: pip install '.[{extra}]' in torchrl_marl's checkout"
        )


class CaptureError(UserError, RuntimeError):
    """A simulator or update that cannot be captured as a graph."""


class GraphCheckError(CaptureError, AssertionError):
    """A simulator's check, deferred by a graph, that failed."""


class CheckpointError(UserError, RuntimeError):
    """A checkpoint or run folder that cannot be used."""


class SimulatorStateError(UserError, RuntimeError):
    """A simulator whose state cannot be read and written as tensors."""


class SpecError(UserError, ValueError):
    """An environment whose output differs from its declaration."""


class WorkerError(UserError, RuntimeError):
    """A process of environments that died, or does not answer."""


class RankError(UserError, RuntimeError):
    """One of the processes that learn as one has failed, and with it all; it alone says so."""


class TrustError(UserError):
    """Code of others that would run without the user's consent."""


class WriteError(UserError, OSError):
    """A file that cannot be written: a full disk, or a read-only folder."""


class NonFiniteError(UserError, ArithmeticError):
    """A value of a living agent that is NaN or infinite."""


def quoted(value: Any) -> str:
    """Returns a value in Python's syntax, cut where it is long.

    Examples:
        >>> quoted("balance"), quoted("x" * 1000)
        ("'balance'", "'xxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxx... \
(1,002 characters)")
    """
    try:
        text = repr(value)
    except ValueError:  # Python prints no integer of more than some thousand digits
        text = hex(value) if isinstance(value, int) else f"a {type(value).__name__}"
    return text if len(text) <= 120 else f"{text[:60]}... ({len(text):,} characters)"


def nearest(name: str, known: Iterable[str]) -> str:
    """Returns ``"did you mean 'x'? "``, or an empty text where no known name is similar.

    Examples:
        >>> nearest("blance", ["balance", "wheel"]), nearest("chess", ["cheetah", "wheel"])
        ("did you mean 'balance'? ", '')
    """
    close = closest(name, known)
    return f"did you mean {close!r}? " if close else ""


def closest(name: str, known: Iterable[str]) -> str | None:
    """Returns the known name most alike, or one that contains the name; None where none is.

    Examples:
        >>> closest("football", ["vmas_football_mappo", "vmas_balance_mappo"])
        'vmas_football_mappo'
    """
    name, known = name[:100], list(known)
    # One of two letters is half of a word.
    close = difflib.get_close_matches(name, known, n=1, cutoff=0.66 if len(name) > 2 else 0.5)
    holding = [other for other in known if len(name) > 3 and name in other]
    found = close or holding
    return found[0] if found else None
