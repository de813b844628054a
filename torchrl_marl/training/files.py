"""Files of a run: written whole or not at all, with failures in one sentence."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

from torchrl_marl.errors import UserError, WriteError
from torchrl_marl.runtime.trust import no_link

__all__ = ["append", "new_file", "open_to_append", "whole_file", "writing"]

_FULL = (errno.ENOSPC, errno.EDQUOT)
_FORBIDDEN = (errno.EACCES, errno.EPERM, errno.EROFS)


@contextlib.contextmanager
def whole_file(
    path: Path, mode: str = "w", *, at_once: bool = False, **options: Any
) -> Iterator[IO[Any]]:
    """Opens a file that gets its name only when all of it is on the disk.

    Args:
        path (Path): the file; one that is there stays as it is until then.
        mode (str): as ``open`` takes it.
        **options: likewise; a text is UTF-8.

    Keyword Args:
        at_once (bool): others may write it at the same time; the last one stays.

    Raises:
        WriteError: a full disk, a folder that is read-only or not there.
    """
    part = path.with_name(f"{path.name}{f'.{os.getpid()}' * at_once}.part")
    if "b" not in mode:
        options.setdefault("encoding", "utf-8")
    with writing(path):
        try:
            part.unlink(missing_ok=True)  # of a killed process, or a link of somebody's
            with open(part, mode, opener=_new, **options) as file:
                yield file
                file.flush()
                os.fsync(file.fileno())
            part.replace(path)
        except BaseException:
            with contextlib.suppress(OSError):
                part.unlink(missing_ok=True)
            raise


def append(path: Path, text: str) -> None:
    """Adds a text to a file, all of it or nothing.

    Raises:
        WriteError: a full disk, a folder that is read-only or not there.
    """
    with writing(path), open_to_append(path) as file:
        before = file.seek(0, os.SEEK_END)
        data = memoryview(text.encode())
        try:
            while data:
                data = data[file.write(data) :]
        except OSError:
            with contextlib.suppress(OSError):
                file.truncate(before)
            raise


def open_to_append(path: Path) -> IO[bytes]:
    """Opens a file at its end, unbuffered; a link is not followed, and no other name's file grows.

    Raises:
        OSError: the system refuses.
    """
    file = open(path, "ab", buffering=0, opener=no_link)  # noqa: SIM115
    if os.fstat(file.fileno()).st_nlink < 2:
        return file
    file.close()  # a hard link, such as a backup's
    with path.open("rb") as before, whole_file(path, "wb") as own:
        shutil.copyfileobj(before, own)
    return open(path, "ab", buffering=0, opener=no_link)


def new_file(path: Path) -> Path:
    """Removes a file that is there, so that another name of it (a hard link) keeps its content.

    Args:
        path (Path): of a file that is written next, by what cannot be given an open one.

    Returns:
        Path: the same.

    Raises:
        OSError: the system refuses.
    """
    path.unlink(missing_ok=True)
    return path


def _new(path: str, flags: int) -> int:
    return no_link(path, flags | os.O_EXCL)


@contextlib.contextmanager
def writing(path: Path) -> Iterator[None]:
    """Raises one sentence where a file cannot be written.

    Raises:
        WriteError: naming the file, the reason and the fix.
    """
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        reason = _reason(error)
        if reason is None:
            raise
        found = WriteError(
            f"{str(path)!r} cannot be written ({reason.strerror or reason}); {_fix(reason)}. "
            "What was saved before is as it was."
        )
        found.errno = reason.errno
        raise found from error


def _reason(error: BaseException | None) -> OSError | None:
    """Returns the reason of the operating system; ``torch.save`` wraps it in a RuntimeError."""
    while error is not None and not isinstance(error, OSError):
        error = error.__cause__ or error.__context__
    return error


def _fix(reason: OSError) -> str:
    if reason.errno in _FULL:
        return "free some space on the disk and go on"
    if reason.errno in _FORBIDDEN:
        return "allow writing there, or choose another place"
    return "check the path and the disk"
