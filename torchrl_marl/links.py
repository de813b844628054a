"""Links in a run's folder that lead out of it, which nobody follows unasked.

A folder that somebody else has made may hold a link in the place of any file that is written:
what it leads to would be overwritten.
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Iterator
from pathlib import Path

from torchrl_marl.errors import TrustError
from torchrl_marl.trust import is_trusting

__all__ = ["no_link", "refuse_link", "refuse_links"]

# Weights & Biases makes these anew, and never writes through them.
_KNOWN = re.compile(r"wandb/(?:latest-run|(?:.*/)?debug[\w-]*\.log)")


def refuse_links(folder: Path, kind: str = "run folder") -> None:
    """Refuses a folder with a link out of it, however deep, and with what is no file at all.

    The folder itself may be reached by a link, links within it may lead to each other, and
    everything passes within :func:`torchrl_marl.trust.trusting`.

    Args:
        folder (Path): that may be a stranger's.
        kind (str): what it is called in a sentence.

    Raises:
        TrustError: naming the link, and where it leads.
    """
    if is_trusting():
        return
    for path in _strange(folder, os.path.realpath(folder)):
        raise TrustError(
            f"{kind} {str(folder)!r} holds {_described(path)}; remove it, or copy the folder with "
            "`cp -rL`, or, if you trust who made it, add --trust (in Python: trust=True, or "
            "torchrl_marl.trust.trusting() around it)."
        )


def refuse_link(path: Path) -> None:
    """Refuses a file that is a link out of its folder, or no file at all.

    Raises:
        TrustError: naming the link, and where it leads.
    """
    if not is_trusting() and _is_strange(path, os.path.realpath(path.parent)):
        raise TrustError(f"found {_described(path)}; put the file itself there.")


def no_link(path: str, flags: int) -> int:
    """Opens a file, but no link to one; the ``opener`` of ``open``."""
    follow = is_trusting() and not flags & os.O_EXCL
    return os.open(path, flags | (0 if follow else getattr(os, "O_NOFOLLOW", 0)), 0o666)


def _strange(folder: str | Path, root: str) -> Iterator[Path]:
    for place, folders, files in os.walk(folder):
        for name in sorted(folders + files):
            path = Path(place, name)
            if _is_strange(path, root) and not _KNOWN.fullmatch(_within(path, folder)):
                yield path


def _within(path: Path, folder: str | Path) -> str:
    return path.relative_to(folder).as_posix()


def _is_strange(path: Path, root: str) -> bool:
    try:
        mode = path.lstat().st_mode
    except OSError:
        return False  # it is gone, or not there yet
    if stat.S_ISLNK(mode):
        target = os.path.realpath(path)
        return os.path.commonpath([root, target]) != root
    return not (stat.S_ISREG(mode) or stat.S_ISDIR(mode) or stat.S_ISSOCK(mode))


def _described(path: Path) -> str:
    if path.is_symlink():
        return f"the link {str(path)!r}, which leads out of it, to {os.readlink(path)!r}"
    return f"{str(path)!r}, which is no file but a pipe or a device"
