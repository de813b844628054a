"""Missing members of a protocol; from Python 3.12 on ``isinstance`` ignores submodules."""

from typing import Any


def missing_names(thing: Any, protocol: type) -> list[str]:
    """Returns the names of a protocol that an object lacks."""
    methods = [name for name in vars(protocol) if not name.startswith("_")]
    return [name for name in (*protocol.__annotations__, *methods) if not hasattr(thing, name)]
