"""Validation of the names of agents, groups and players, and their file names."""

from __future__ import annotations

import re
import unicodedata
from pathlib import Path

__all__ = ["file_name", "invalid_name_reason", "path_within"]

_MAX_LENGTH = 200
_INVISIBLE_CATEGORIES = ("Cc", "Cs", "Zl", "Zp")
"""Unicode categories of control characters, surrogates and line separators."""


def invalid_name_reason(name: object, *, plain: bool = False) -> str | None:
    """Returns the fault of a name; None if it is valid.

    Names appear in tables, on the terminal and in paths. Names from other libraries may have
    spaces, colons or slashes, but must not lead out of a folder.

    Args:
        name: name of an agent, group or player.

    Keyword Args:
        plain (bool): also reject slashes and a leading dot, for names declared in this package.

    Examples:
        >>> invalid_name_reason("robot 1: arm"), invalid_name_reason("red/0")
        (None, None)
        >>> invalid_name_reason("red/0", plain=True)
        'it has a slash'
        >>> invalid_name_reason("../red"), invalid_name_reason("/etc/red")
        ('it leads out of its folder', 'it leads out of its folder')
    """
    if not isinstance(name, str):
        return f"it is {type(name).__name__}, expected a text"
    parts = re.split(r"[/\\]", name)
    faults = {
        "it is empty": not name.strip(),
        f"it has {len(name):,} characters, expected {_MAX_LENGTH} at most": len(name) > _MAX_LENGTH,
        "it has control characters or ends of lines": any(map(_is_invisible, name)),
        "it leads out of its folder": not parts[0] or ".." in parts or name == ".",
        "it has a slash": plain and len(parts) > 1,
        "it begins with a dot": plain and name.startswith("."),
    }
    return next((fault for fault, is_there in faults.items() if is_there), None)


def _is_invisible(letter: str) -> bool:
    return unicodedata.category(letter) in _INVISIBLE_CATEGORIES


def file_name(name: str) -> str:
    """Returns a name as a file name, with slashes and a leading dot encoded.

    Examples:
        >>> file_name("robot 1"), file_name("red/0"), file_name("..")
        ('robot 1', 'red%2F0', '%2E.')
    """
    text = "".join(f"%{ord(c):02X}" if c in "/\\" or _is_invisible(c) else c for c in name)
    return f"%2E{text[1:]}" if text.startswith(".") else text or "%"


def path_within(folder: Path, name: str, suffix: str = "") -> Path:
    """Returns a path in a folder; its last part is the :func:`file_name` of the name.

    Raises:
        ValueError: if the path is a link that leads out of the folder.

    Examples:
        >>> path_within(Path("export"), "../agent_0").as_posix()
        'export/%2E.%2Fagent_0'
    """
    path = folder / f"{file_name(name)}{suffix}"
    if not path.resolve().is_relative_to(folder.resolve()):
        raise ValueError(
            f"{str(path)!r} is a link that leads out of {str(folder)!r}; remove it, or choose "
            "another folder."
        )
    return path
