"""Protection from untrusted folders: signatures of files with code, and checks of links."""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import os
import re
import secrets
import stat
from collections.abc import Iterator
from contextvars import ContextVar
from pathlib import Path

from torchrl_marl.errors import TrustError

__all__ = [
    "is_signed_by_user",
    "is_trusting",
    "open_without_links",
    "refuse_link",
    "refuse_links",
    "signature",
    "trusting",
]

_KEY_LENGTH = 32
# If no key can be stored, only files of this process are trusted.
_PROCESS_KEY = secrets.token_bytes(_KEY_LENGTH)
_TRUSTS_ALL: ContextVar[bool] = ContextVar("torchrl_marl.trusting", default=False)


def signature(*parts: bytes) -> str:
    """Signs bytes with a key of this user on this machine (HMAC with SHA-256).

    The key is ``torchrl_marl/key`` in ``$XDG_STATE_HOME`` (by default ``~/.local/state``). Other
    users cannot read it. It is created on first use.

    Examples:
        >>> own = signature(b"weights", b"1")
        >>> is_signed_by_user(own, b"weights", b"1"), is_signed_by_user(own, b"weights", b"2")
        (True, False)
    """
    code = hmac.new(_read_key(), digestmod=hashlib.sha256)
    for part in parts:
        code.update(len(part).to_bytes(8, "big"))  # so that ("ab", "c") is not ("a", "bc")
        code.update(part)
    return code.hexdigest()


def is_signed_by_user(alleged_signature: object, *parts: bytes) -> bool:
    """Returns whether bytes have this user's :func:`signature`, or everything is trusted.

    Args:
        alleged_signature: the alleged signature, of any type.
        *parts (bytes): the signed bytes.
    """
    if _TRUSTS_ALL.get():
        return True
    own = signature(*parts).encode()
    return isinstance(alleged_signature, str) and hmac.compare_digest(
        alleged_signature.encode("utf-8", "replace"), own
    )


def is_trusting() -> bool:
    """Returns whether everything is trusted, as within :func:`trusting`."""
    return _TRUSTS_ALL.get()


@contextlib.contextmanager
def trusting(trust: bool = True) -> Iterator[None]:
    """Context in which everything is trusted, if ``trust`` is True."""
    token = _TRUSTS_ALL.set(trust or _TRUSTS_ALL.get())
    try:
        yield
    finally:
        _TRUSTS_ALL.reset(token)


def _read_key() -> bytes:
    try:
        path = _key_folder() / "key"
        if not path.exists():
            _make_key(path)
        status = path.stat()
        key = path.read_bytes()
    except (OSError, RuntimeError):  # no home, or no writable one
        return _PROCESS_KEY
    is_private = hasattr(os, "getuid") and status.st_uid == os.getuid()
    is_private = is_private and not stat.S_IMODE(status.st_mode) & 0o077
    return key if is_private and len(key) == _KEY_LENGTH else _PROCESS_KEY


def _key_folder() -> Path:
    state = os.environ.get("XDG_STATE_HOME", "")
    base = Path(state) if os.path.isabs(state) else Path.home() / ".local" / "state"
    return base / "torchrl_marl"


def _make_key(path: Path) -> None:
    """Writes the key atomically and once, since other processes may write it at the same time."""
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    part = path.with_name(f"key.{secrets.token_hex(8)}")
    with open(os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
        file.write(secrets.token_bytes(_KEY_LENGTH))
    try:
        os.link(part, path)
    except FileExistsError:
        pass
    finally:
        part.unlink()


# Weights & Biases recreates these links and never writes through them.
_WANDB_LINKS = re.compile(r"wandb/(?:latest-run|(?:.*/)?debug[\w-]*\.log)")


def refuse_links(folder: Path, kind: str = "run folder") -> None:
    """Raises if a folder has, at any depth, a pipe, a device or a link that leads out of it.

    The folder itself may be a link, and links within it are allowed. Within
    :func:`torchrl_marl.runtime.trust.trusting` nothing is checked.

    Args:
        folder (Path): folder that may belong to another user.
        kind (str): name of the folder in the message.

    Raises:
        TrustError: the folder has such a link, pipe or device; the message names it.
    """
    if is_trusting():
        return
    for path in _unsafe_paths(folder, os.path.realpath(folder)):
        raise TrustError(
            f"{kind} {str(folder)!r} holds {_describe_path(path)}; remove it, or copy the folder "
            "with `cp -rL`, or, if you trust its author, add --trust (in Python: trust=True, or "
            "torchrl_marl.runtime.trust.trusting() around it)."
        )


def refuse_link(path: Path) -> None:
    """Raises if a path is a pipe, a device or a link that leads out of its folder.

    Raises:
        TrustError: the path is such a link, pipe or device; the message names it.
    """
    if not is_trusting() and _is_unsafe(path, os.path.realpath(path.parent)):
        raise TrustError(f"found {_describe_path(path)}; replace it by the file itself.")


def open_without_links(path: str, flags: int) -> int:
    """Opens a file without following links, as the ``opener`` of ``open``."""
    follow = is_trusting() and not flags & os.O_EXCL
    return os.open(path, flags | (0 if follow else getattr(os, "O_NOFOLLOW", 0)), 0o666)


def _unsafe_paths(folder: str | Path, root: str) -> Iterator[Path]:
    for place, folders, files in os.walk(folder):
        for name in sorted(folders + files):
            path = Path(place, name)
            within = path.relative_to(folder).as_posix()
            if _is_unsafe(path, root) and not _WANDB_LINKS.fullmatch(within):
                yield path


def _is_unsafe(path: Path, root: str) -> bool:
    try:
        mode = path.lstat().st_mode
    except OSError:
        return False  # it does not exist
    if stat.S_ISLNK(mode):
        target = os.path.realpath(path)
        return os.path.commonpath([root, target]) != root
    return not (stat.S_ISREG(mode) or stat.S_ISDIR(mode) or stat.S_ISSOCK(mode))


def _describe_path(path: Path) -> str:
    if path.is_symlink():
        return f"the link {str(path)!r}, which leads out of it, to {os.readlink(path)!r}"
    return f"{str(path)!r}, which is a pipe or a device, not a file"
