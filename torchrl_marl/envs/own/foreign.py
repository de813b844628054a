"""Code outside the known libraries that the name of a world would run."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from torchrl_marl.envs.config import EnvConfig
from torchrl_marl.envs.libraries import LIBRARIES
from torchrl_marl.import_path import place_of

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
        place = place_of(own.partition(".")[0], [os.getcwd(), *sys.path]) or os.getcwd()
        return f"module {own!r} (in {place!r})"
    library = LIBRARIES.find(env.library)
    module = None if library is None or library.foreign is None else library.foreign(env)
    if module is None or module.endswith(".py"):
        return None if module is None else _file(module)
    package = module.partition(".")[0]
    there = place_of(package) or place_of(package, [os.getcwd()])
    return None if there is None else f"module {module!r} (in {there!r})"


def _file(path: str) -> str:
    return f"file {str(Path(path).resolve())!r}"
