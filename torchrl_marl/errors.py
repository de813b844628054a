"""Errors that a user can fix; the command line prints them in one line and exits with code 2."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from typing import Any

__all__ = [
    "BatchSizeError",
    "CallbackError",
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
    """A request that cannot be met; the message says how to fix it."""


class ConfigError(UserError, ValueError):
    """An invalid recipe, setting or value."""


class BatchSizeError(ConfigError, TypeError):
    """A wrong batch size; also a ``TypeError``, as in TorchRL."""


class MissingExtraError(UserError, ImportError):
    """A missing or broken optional package.

    Args:
        package (str): name of the package.
        extra (str): extra of ``torchrl_marl`` that installs it.
        why (str): predicate of the message, such as ``"is not installed"``.
    """

    def __init__(self, package: str, extra: str, why: str = "is not installed") -> None:
        super().__init__(
            f"{package} {why}; run: pip install '.[{extra}]' in torchrl_marl's checkout"
        )


class CaptureError(UserError, RuntimeError):
    """A simulator or update that cannot be captured as a graph."""


class GraphCheckError(CaptureError, AssertionError):
    """A failed check of a simulator, reported late because the step ran as a graph."""


class CheckpointError(UserError, RuntimeError):
    """An unusable checkpoint or run folder."""


class DatasetError(UserError, RuntimeError):
    """A folder without a dataset, or a dataset that does not fit."""


class CallbackError(UserError, RuntimeError):
    """An error in a callback of a run; the message says how to resume."""


class SimulatorStateError(UserError, RuntimeError):
    """A simulator that does not allow its state to be read as tensors."""


class SpecError(UserError, ValueError):
    """A mismatch between the specs and the output of an environment or policy."""


class WorkerError(UserError, RuntimeError):
    """A worker process of environments that died or does not answer."""


class RankError(UserError, RuntimeError):
    """A failure in one rank, which ends all ranks; only that rank reports it."""


class TrustError(UserError):
    """A refusal to use code or services of another user that this user has not trusted."""


class WriteError(UserError, OSError):
    """A file that cannot be written, such as on a full disk."""


class NonFiniteError(UserError, ArithmeticError):
    """A NaN or infinite value of a living agent."""


def quoted(value: Any) -> str:
    """Returns the ``repr`` of a value; long ones are cut.

    Examples:
        >>> quoted("balance"), quoted("x" * 1000)
        ("'balance'", "'xxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxx... \
(1,002 characters)")
    """
    try:
        text = repr(value)
    except ValueError:  # Python refuses to print integers of several thousand digits
        text = hex(value) if isinstance(value, int) else f"a {type(value).__name__}"
    return text if len(text) <= 120 else f"{text[:60]}... ({len(text):,} characters)"


def nearest(name: str, known: Iterable[str]) -> str:
    """Returns ``"did you mean 'x'? "``, or an empty string if no known name is similar.

    Examples:
        >>> nearest("blance", ["balance", "wheel"]), nearest("chess", ["cheetah", "wheel"])
        ("did you mean 'balance'? ", '')
    """
    close = closest(name, known)
    return f"did you mean {close!r}? " if close else ""


def closest(name: str, known: Iterable[str]) -> str | None:
    """Returns the most similar known name, or one that contains the name, or None.

    Examples:
        >>> closest("football", ["vmas_football_mappo", "vmas_balance_mappo"])
        'vmas_football_mappo'
    """
    name, known = name[:100], list(known)
    # In a name of two letters, one right letter is half of it.
    close = difflib.get_close_matches(name, known, n=1, cutoff=0.66 if len(name) > 2 else 0.5)
    holding = [other for other in known if len(name) > 3 and name in other]
    found = close or holding
    return found[0] if found else None
