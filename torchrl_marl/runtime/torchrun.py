"""Environment variables that ``torchrun`` sets in each process; read without importing torch."""

from __future__ import annotations

import os
from typing import NamedTuple

__all__ = ["Place", "place"]

_REQUIRED_VARIABLES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


class Place(NamedTuple):
    """Rank of this process, and number of ranks."""

    rank: int
    """Global rank; 0 is the first."""
    size: int
    """Number of ranks."""
    local_rank: int
    """Rank on this machine; 0 is the first."""


def place() -> Place | None:
    """Returns this process's rank and the number of ranks; None for a single process."""
    if any(not os.environ.get(name, "") for name in _REQUIRED_VARIABLES):
        return None
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    return None if size < 2 else Place(rank, size, int(os.environ.get("LOCAL_RANK", rank)))
