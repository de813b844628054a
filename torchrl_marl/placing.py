"""Where pictures and tables of several runs go: beside the runs, over nothing that is there."""

from __future__ import annotations

import os
from collections.abc import Iterable
from itertools import count
from pathlib import Path

__all__ = ["beside", "free"]


def beside(folders: Iterable[str | Path]) -> Path:
    """Returns the folder in which all of these lie; that of the first where they share none.

    Args:
        folders (iterable of paths): run folders.

    Examples:
        >>> beside(["runs/a/seed0", "runs/b"]).as_posix()
        'runs'
    """
    parents = [os.path.dirname(os.path.abspath(folder)) for folder in folders]
    try:
        found = os.path.commonpath(parents)
    except ValueError:  # of several drives
        found = parents[0]
    if os.path.dirname(found) == found:
        found = parents[0]
    near = os.path.relpath(found)
    return Path(found if near.startswith(os.pardir) else near)


def free(path: Path) -> Path:
    """Returns the path, or one with a number where there is something already.

    Args:
        path (Path): a file or a folder.
    """
    if not os.path.lexists(path):
        return path
    numbered = (path.with_name(f"{path.stem}_{i}{path.suffix}") for i in count(2))
    return next(one for one in numbered if not os.path.lexists(one))
