"""Python's import path without the current folder.

A file in the current folder, which another user may have written, could shadow a package. Only
modules that settings name, such as custom environments, are imported from the current folder.
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

__all__ = [
    "check_not_in_current_folder",
    "child_path",
    "current_folder",
    "place_of",
    "remove_current_folder",
]


def remove_current_folder() -> None:
    """Removes the current folder from the import path.

    Called by command-line programs; the folder of a running script stays. Child processes started
    later, also by libraries (PyTorch and ``multiprocessing`` run ``python -c``), do not search the
    current folder either.
    """
    sys.path[:] = [
        *sys.path[:1],
        *(path for path in sys.path[1:] if path in _path_without_current_folder()),
    ]
    os.environ["PYTHONSAFEPATH"] = "1"
    named = [part for part in os.environ.get("PYTHONPATH", "").split(os.pathsep) if part]
    os.environ["PYTHONPATH"] = os.pathsep.join(named)


def child_path() -> list[str]:
    """Returns ``sys.path`` for a child process, with the current folder last, if it is searched.

    If ``PYTHONPATH`` names the folder, or a package is installed from it, the folder keeps its
    position.
    """
    safe = _path_without_current_folder()
    return safe if len(safe) == len(sys.path) else [*safe, os.getcwd()]


@contextlib.contextmanager
def current_folder(module: str, *, first: bool = False) -> Iterator[None]:
    """Context in which a custom module can be imported from the current folder.

    If the module was found there, the folder stays at the end of the path, since the module may
    import its neighbours later or in another process.

    Args:
        module (str): module to import within this context.

    Keyword Args:
        first (bool): search the folder first, as ``python -m`` does; otherwise last.
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
        if {here, ""}.isdisjoint(sys.path) and _is_imported_from(module.partition(".")[0], here):
            sys.path.append(here)


def _is_imported_from(package: str, folder: str) -> bool:
    """Returns whether an imported package is in a folder."""
    module = sys.modules.get(package)
    file = getattr(module, "__file__", None)
    places = list(getattr(module, "__path__", ())) if file is None else [file]
    real = Path(folder).resolve()
    return any(Path(place).resolve().is_relative_to(real) for place in places)


def place_of(package: str, path: list[str] | None = None) -> str | None:
    """Returns the file or folder of a package without importing it; None if not found.

    Args:
        package (str): top-level name.
        path (list of str, optional): folders to search; None: the whole import path.
    """
    try:
        found = find_spec(package) if path is None else PathFinder.find_spec(package, path)
    except (ImportError, ValueError):
        return None
    if found is None:
        return None
    return found.origin or ", ".join(found.submodule_search_locations or ())


def check_not_in_current_folder(package: str) -> None:
    """Raises if a library would be imported from the current folder.

    Args:
        package (str): top-level name of the library.

    Raises:
        TrustError: the library is in the current folder; the message names the file.
    """
    safe = _path_without_current_folder()
    if package in sys.modules or len(safe) == len(sys.path) or is_trusting():
        return
    place = place_of(package, [path for path in sys.path if path not in safe])
    if place is not None and _find_outside_current_folder(package, safe) is None:
        raise TrustError(
            f"{place!r} would be imported as the package {package!r}, which is not installed; "
            f"rename it, install {package}, or, if you trust it, add --trust (in Python: "
            "torchrl_marl.runtime.trust.trusting() around it)."
        )


def _path_without_current_folder() -> list[str]:
    """Returns ``sys.path`` without the entries of the current folder that Python added.

    These are the first entry (``python -m`` and scripts), those of empty parts of ``PYTHONPATH``,
    and empty strings.
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


def _find_outside_current_folder(package: str, safe: list[str]) -> ModuleSpec | None:
    """Finds a package outside the current folder, including editable installs."""
    found = PathFinder.find_spec(package, safe)
    for finder in sys.meta_path:
        if found is None and finder is not PathFinder:
            found = finder.find_spec(package, None)
    return found
