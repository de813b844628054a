"""Atomic writing of a run's files, with error messages of one sentence."""

from __future__ import annotations

import contextlib
import errno
import json
import math
import os
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import IO, Any

from torchrl_marl.errors import UserError, WriteError
from torchrl_marl.runtime.trust import open_without_links

__all__ = [
    "append",
    "explain_write_errors",
    "frames_of",
    "json_text",
    "new_file",
    "open_atomically",
    "open_to_append",
]

_DISK_FULL_ERRORS = (errno.ENOSPC, errno.EDQUOT)
_PERMISSION_ERRORS = (errno.EACCES, errno.EPERM, errno.EROFS)


@contextlib.contextmanager
def open_atomically(
    path: Path, mode: str = "w", *, at_once: bool = False, **options: Any
) -> Iterator[IO[Any]]:
    """Opens a file that replaces ``path`` only when it is completely written.

    Args:
        path (Path): the file; an existing file stays unchanged until the new one is complete.
        mode (str): mode of ``open``.
        **options: further options of ``open``; text is written as UTF-8; a character
            without UTF-8 code is written as an escape such as ``\\udce4``.

    Keyword Args:
        at_once (bool): whether other processes may write the file at the same time; the last one to
            finish wins.

    Raises:
        WriteError: the disk is full, or the folder is read-only or missing.
    """
    part = path.with_name(f"{path.name}{f'.{os.getpid()}' * at_once}.part")
    if "b" not in mode:
        # Names of files may hold bytes that are no text.
        options = {"encoding": "utf-8", "errors": "backslashreplace"} | options
    with explain_write_errors(path):
        try:
            part.unlink(missing_ok=True)  # left behind by a killed process, or another user's link
            with open(part, mode, opener=_open_new, **options) as file:
                yield file
                file.flush()
                os.fsync(file.fileno())
            part.replace(path)
        except BaseException:
            with contextlib.suppress(OSError):
                part.unlink(missing_ok=True)
            raise


def json_text(value: Any, indent: int | None = None) -> str:
    """Returns JSON with a newline at its end; NaN and infinity, which JSON lacks, become null.

    Examples:
        >>> json_text({"return": float("nan"), "rows": [1.5]})
        '{"return": null, "rows": [1.5]}\\n'
    """
    return json.dumps(_replace_non_finite(value), indent=indent, allow_nan=False) + "\n"


def _replace_non_finite(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _replace_non_finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_replace_non_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def append(path: Path, text: str) -> None:
    """Appends text to a file, completely or not at all.

    Raises:
        WriteError: the disk is full, or the folder is read-only or missing.
    """
    with explain_write_errors(path), open_to_append(path) as file:
        before = file.seek(0, os.SEEK_END)
        data = memoryview(text.encode(errors="backslashreplace"))
        try:
            while data:
                data = data[file.write(data) :]
        except OSError:
            with contextlib.suppress(OSError):
                file.truncate(before)
            raise


def open_to_append(path: Path) -> IO[bytes]:
    """Opens a file for unbuffered appending, without following or changing links.

    Raises:
        OSError: the file cannot be opened.
    """
    file = open(path, "ab", buffering=0, opener=open_without_links)  # noqa: SIM115
    if os.fstat(file.fileno()).st_nlink < 2:
        return file
    file.close()  # the file has a hard link, such as a backup
    with path.open("rb") as before, open_atomically(path, "wb") as own:
        shutil.copyfileobj(before, own)
    return open(path, "ab", buffering=0, opener=open_without_links)


def new_file(path: Path) -> Path:
    """Removes an existing file before a new one is written, so that hard links keep the old one.

    Use it for writers that take a path instead of an open file.

    Args:
        path (Path): the file.

    Returns:
        Path: the same path.

    Raises:
        OSError: the file cannot be removed.
    """
    path.unlink(missing_ok=True)
    return path


def _open_new(path: str, flags: int) -> int:
    return open_without_links(path, flags | os.O_EXCL)


@contextlib.contextmanager
def explain_write_errors(path: Path) -> Iterator[None]:
    """Context that turns errors in writing a file into a message with a fix.

    Raises:
        WriteError: writing failed; the message names the file, the reason and the fix.
    """
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        reason = _find_os_error(error)
        if reason is None:
            raise
        found = WriteError(
            f"{str(path)!r} cannot be written ({reason.strerror or reason}); "
            f"{_suggest_fix(reason)}. Earlier files are unchanged."
        )
        found.errno = reason.errno
        raise found from error


def _find_os_error(error: BaseException | None) -> OSError | None:
    """Returns the operating system's error, also if ``torch.save`` wrapped it in a RuntimeError."""
    while error is not None and not isinstance(error, OSError):
        error = error.__cause__ or error.__context__
    return error


def _suggest_fix(reason: OSError) -> str:
    if reason.errno in _DISK_FULL_ERRORS:
        return "free some space on the disk and try again"
    if reason.errno in _PERMISSION_ERRORS:
        return "allow writing there, or choose another folder"
    return "check the path and the disk"


def frames_of(folder: Path) -> int:
    """Returns a run's frames, from the last complete row of ``metrics.csv``; 0 without a row."""
    try:
        with (folder / "metrics.csv").open("rb") as file:
            heads = file.readline().decode().strip().split(",")
            column = heads.index("frames")
            size = file.seek(0, 2)
            file.seek(max(0, size - 20_000))
            lines = file.read().decode(errors="replace").split("\n")
    except (OSError, ValueError):
        return 0
    # The last piece is an incomplete row, or the empty text after the last newline.
    for line in reversed(lines[:-1]):
        cells = line.strip().split(",")
        if len(cells) == len(heads) and cells[column].isdecimal():
            return int(cells[column])
    return 0
