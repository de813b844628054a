"""What ``torchrun`` tells each process that it starts, in environment variables; without torch."""

from __future__ import annotations

import os
from typing import NamedTuple

__all__ = ["Place", "place"]

_NEEDED = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


class Place(NamedTuple):
    """Which of the processes this is that learn as one."""

    rank: int
    """0 for the first of all."""
    size: int
    """How many there are."""
    local_rank: int
    """0 for the first on this machine."""


def place() -> Place | None:
    """Returns this process's place; None where it is the only one of its run."""
    if any(not os.environ.get(name, "") for name in _NEEDED):
        return None
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    return None if size < 2 else Place(rank, size, int(os.environ.get("LOCAL_RANK", rank)))
