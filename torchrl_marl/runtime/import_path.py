"""The folders in which Python looks for modules, and why the current one is not among them.

Whatever lies in the current folder would take the place of a package, and somebody else may have
put it there. Environments of one's own are looked for in it, since their settings name them.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator
from importlib.machinery import ModuleSpec, PathFinder
from importlib.util import find_spec
from pathlib import Path

from torchrl_marl.errors import TrustError
from torchrl_marl.runtime.trust import is_trusting

__all__ = ["child_path", "current_folder", "leave_current_folder", "place_of", "refuse_current"]


def leave_current_folder() -> None:
    """Takes the current folder out of the search, where an empty part of ``PYTHONPATH`` put it.

    For programs; the folder of a script that calls this stays. Processes that are started from now
    on, by libraries too (PyTorch and ``multiprocessing`` start ``python -c``), do not search it.
    """
    sys.path[:] = [*sys.path[:1], *(path for path in sys.path[1:] if path in _safe())]
    os.environ["PYTHONSAFEPATH"] = "1"
    named = [part for part in os.environ.get("PYTHONPATH", "").split(os.pathsep) if part]
    os.environ["PYTHONPATH"] = os.pathsep.join(named)


def child_path() -> list[str]:
    """Returns ``sys.path`` for a child process: the current folder, if it is searched, comes last.

    Where ``PYTHONPATH`` names it, or a package is installed from it, it stays in its place.
    """
    safe = _safe()
    return safe if len(safe) == len(sys.path) else [*safe, os.getcwd()]


@contextlib.contextmanager
def current_folder(module: str, *, first: bool = False) -> Iterator[None]:
    """Lets an environment of one's own be imported from the current folder.

    The folder stays the last to be searched if the module was found there, since the module may
    import its neighbours later, or from another process.

    Args:
        module (str): that is imported within this context.

    Keyword Args:
        first (bool): look there before anywhere else, as ``python -m`` does, and not last.
    """
    here, before = os.getcwd(), list(sys.path)
    added = first or not ({here, ""} & set(before))
    if added:
        sys.path.insert(0 if first else len(before), here)
    try:
        yield
    finally:
        if added and here in sys.path:
            sys.path.remove(here)
        if {here, ""}.isdisjoint(sys.path) and _lies_in(module.partition(".")[0], here):
            sys.path.append(here)


def _lies_in(package: str, folder: str) -> bool:
    """Returns whether a package that is imported lies in a folder."""
    module = sys.modules.get(package)
    file = getattr(module, "__file__", None)
    places = list(getattr(module, "__path__", ())) if file is None else [file]
    real = Path(folder).resolve()
    return any(Path(place).resolve().is_relative_to(real) for place in places)


def place_of(package: str, path: list[str] | None = None) -> str | None:
    """Returns the file or folder of a package, without importing it; None where there is none.

    Args:
        package (str): without a dot.
        path (list of str, optional): folders to look in; otherwise everywhere.
    """
    try:
        found = find_spec(package) if path is None else PathFinder.find_spec(package, path)
    except (ImportError, ValueError):
        return None
    if found is None:
        return None
    return found.origin or ", ".join(found.submodule_search_locations or ())


def refuse_current(package: str) -> None:
    """Refuses a library that would be imported from the current folder, as its name asks for none.

    Args:
        package (str): of a library that is installed somewhere, or not at all.

    Raises:
        TrustError: naming the file.
    """
    safe = _safe()
    if package in sys.modules or len(safe) == len(sys.path) or is_trusting():
        return
    place = place_of(package, [path for path in sys.path if path not in safe])
    if place is not None and _elsewhere(package, safe) is None:
        raise TrustError(
            f"{place!r} would be imported as the package {package!r}, which is not installed; "
            f"rename it, install {package}, or, if you trust it, add --trust (in Python: "
            "torchrl_marl.runtime.trust.trusting() around it)."
        )


def _safe() -> list[str]:
    """Returns ``sys.path`` without the current folder where Python has put it by itself.

    That is in front, for ``python -m`` and scripts, for an empty part of ``PYTHONPATH``, and as an
    empty text.
    """
    parts = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    named = {os.path.realpath(part) for part in parts if part}
    here = os.path.realpath(os.getcwd())
    front = 1 + len(parts)
    return [
        path
        for i, path in enumerate(sys.path)
        if here in named or not (path == "" or (i < front and os.path.realpath(path) == here))
    ]


def _elsewhere(package: str, safe: list[str]) -> ModuleSpec | None:
    """Returns where a package is but for the current folder, an editable one's included."""
    found = PathFinder.find_spec(package, safe)
    for finder in sys.meta_path:
        if found is None and finder is not PathFinder:
            found = finder.find_spec(package, None)
    return found
