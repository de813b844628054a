"""Names of agents, groups and players: which are taken, and what they are called as files."""

from __future__ import annotations

import re
import unicodedata
from pathlib import Path

__all__ = ["fault_of", "file_name", "path_within"]

_LONGEST = 200
_UNSEEN = ("Cc", "Cs", "Zl", "Zp")
"""Categories of control characters, halves of characters and ends of lines."""


def fault_of(name: object, *, plain: bool = False) -> str | None:
    """Returns what is wrong with a name; None for one that can be taken.

    Names stand in tables, in lines of a terminal and in paths. One that some library gives may
    hold spaces, colons or slashes, but leads out of no folder.

    Args:
        name: an agent's, a group's or a player's.

    Keyword Args:
        plain (bool): it is declared for this package, so slashes and a leading dot are wrong too.

    Examples:
        >>> fault_of("robot 1: arm"), fault_of("red/0"), fault_of("red/0", plain=True)
        (None, None, 'it has a slash')
        >>> fault_of("../red"), fault_of("/etc/red")
        ('it leads out of its folder', 'it leads out of its folder')
    """
    if not isinstance(name, str):
        return f"it is {type(name).__name__}, expected a text"
    parts = re.split(r"[/\\]", name)
    faults = {
        "it is empty": not name.strip(),
        f"it has {len(name):,} characters, expected {_LONGEST} at most": len(name) > _LONGEST,
        "it has control characters or ends of lines": any(map(_is_unseen, name)),
        "it leads out of its folder": not parts[0] or ".." in parts or name == ".",
        "it has a slash": plain and len(parts) > 1,
        "it begins with a dot": plain and name.startswith("."),
    }
    return next((fault for fault, is_there in faults.items() if is_there), None)


def _is_unseen(letter: str) -> bool:
    return unicodedata.category(letter) in _UNSEEN


def file_name(name: str) -> str:
    """Returns a name as that of one file or folder: slashes and a leading dot are encoded.

    Examples:
        >>> file_name("robot 1"), file_name("red/0"), file_name("..")
        ('robot 1', 'red%2F0', '%2E.')
    """
    text = "".join(f"%{ord(c):02X}" if c in "/\\" or _is_unseen(c) else c for c in name)
    return f"%2E{text[1:]}" if text.startswith(".") else text or "%"


def path_within(folder: Path, name: str, suffix: str = "") -> Path:
    """Returns where in a folder something of a name is kept.

    Raises:
        ValueError: a link there leads out of the folder.

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
