"""Signatures of files that this user made on this machine, as a keyed hash.

The worlds of a checkpoint are pickles and the world of a run is a name: code runs when the first
are read and when the second is imported. What carries a hash made with the user's secret key is the
user's own; a stranger does not have the key.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import os
import secrets
import stat
from collections.abc import Iterator
from contextvars import ContextVar
from pathlib import Path

__all__ = ["is_own", "is_trusting", "signature", "trusting"]

_LENGTH = 32
# Where no key can be stored, only this process's own files are trusted.
_KEY_OF_PROCESS = secrets.token_bytes(_LENGTH)
_TRUSTING: ContextVar[bool] = ContextVar("torchrl_marl.trusting", default=False)


def signature(*parts: bytes) -> str:
    """Returns a hash of bytes that only this user on this machine can make (HMAC with SHA-256).

    The key is ``torchrl_marl/key`` in ``$XDG_STATE_HOME`` (``~/.local/state``), which nobody else
    can read; it is made when it is first needed.

    Examples:
        >>> own = signature(b"world", b"1")
        >>> is_own(own, b"world", b"1"), is_own(own, b"world", b"2")
        (True, False)
    """
    code = hmac.new(_key(), digestmod=hashlib.sha256)
    for part in parts:
        code.update(len(part).to_bytes(8, "big"))  # so that ("ab", "c") is not ("a", "bc")
        code.update(part)
    return code.hexdigest()


def is_own(given: object, *parts: bytes) -> bool:
    """Returns whether bytes carry this user's :func:`signature`, or are trusted in any case.

    Args:
        given: what stands for their signature; anything that a stranger may have put there.
        *parts (bytes): what was signed.
    """
    if _TRUSTING.get():
        return True
    own = signature(*parts).encode()
    return isinstance(given, str) and hmac.compare_digest(given.encode("utf-8", "replace"), own)


def is_trusting() -> bool:
    """Returns whether everything is trusted now, as within :func:`trusting`."""
    return _TRUSTING.get()


@contextlib.contextmanager
def trusting(trust: bool = True) -> Iterator[None]:
    """Trusts everything within this context, if the user says so."""
    token = _TRUSTING.set(trust or _TRUSTING.get())
    try:
        yield
    finally:
        _TRUSTING.reset(token)


def _key() -> bytes:
    try:
        path = _folder() / "key"
        if not path.exists():
            _make_key(path)
        seen = path.stat()
        key = path.read_bytes()
    except (OSError, RuntimeError):  # no home, or no writable one
        return _KEY_OF_PROCESS
    secret = hasattr(os, "getuid") and seen.st_uid == os.getuid()
    secret = secret and not stat.S_IMODE(seen.st_mode) & 0o077
    return key if secret and len(key) == _LENGTH else _KEY_OF_PROCESS


def _folder() -> Path:
    state = os.environ.get("XDG_STATE_HOME", "")
    base = Path(state) if os.path.isabs(state) else Path.home() / ".local" / "state"
    return base / "torchrl_marl"


def _make_key(path: Path) -> None:
    """Writes the key whole or not at all, and once: other processes may do so, too."""
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    part = path.with_name(f"key.{secrets.token_hex(8)}")
    with open(os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
        file.write(secrets.token_bytes(_LENGTH))
    try:
        os.link(part, path)
    except FileExistsError:
        pass
    finally:
        part.unlink()
