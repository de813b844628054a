"""Code outside the known libraries that the name of a world would run."""

from __future__ import annotations

import os
import sys
from importlib.machinery import PathFinder
from importlib.util import find_spec
from pathlib import Path

from torchrl_marl.envs.config import EnvConfig
from torchrl_marl.envs.libraries import LIBRARIES

__all__ = ["foreign_code"]


def foreign_code(env: EnvConfig) -> str | None:
    """Returns the module or file that building a world runs, or None for a known library's.

    Nothing of it is imported to find out.

    Args:
        env (EnvConfig): which world.

    Examples:
        >>> foreign_code(EnvConfig(library="pettingzoo", name="mpe2/simple_spread_v3"))
        >>> foreign_code(EnvConfig(library="pettingzoo", name="json/decoder"))
        "module 'json.decoder' (in ...)"
    """
    own, colon, _ = env.library.partition(":")
    if colon:
        if own.endswith(".py"):
            return _file(own)
        place = _place(own.partition(".")[0], [os.getcwd(), *sys.path]) or os.getcwd()
        return f"module {own!r} (in {place!r})"
    library = LIBRARIES.find(env.library)
    module = None if library is None or library.foreign is None else library.foreign(env)
    if module is None or module.endswith(".py"):
        return None if module is None else _file(module)
    there = _place(module.partition(".")[0])
    return None if there is None else f"module {module!r} (in {there!r})"


def _file(path: str) -> str:
    return f"file {str(Path(path).resolve())!r}"


def _place(package: str, path: list[str] | None = None) -> str | None:
    """Returns the file or folder of a package; None where there is none, so nothing can run."""
    try:
        found = PathFinder.find_spec(package, path) if path else find_spec(package)
    except (ImportError, ValueError):
        return None
    if found is None:
        return None
    return found.origin or ", ".join(found.submodule_search_locations or ())
