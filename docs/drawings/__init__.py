"""Drawings of the documentation, written reproducibly by ``python docs/drawings``."""

from __future__ import annotations

from pathlib import Path

from drawings import capture, credit, groups, life_cycle, sharing, turns, walk
from drawings.canvas import Drawing

__all__ = ["DRAWINGS", "FOLDER", "Drawing", "pictures"]

FOLDER = Path(__file__).resolve().parents[1] / "pictures"
DRAWINGS = {
    "life_cycle": life_cycle.draw,
    "credit": credit.draw,
    "groups": groups.draw,
    "sharing": sharing.draw,
    "turns": turns.draw,
    "capture": capture.draw,
    "walk": walk.draw,
}


def pictures() -> dict[str, str]:
    """Returns the text of each picture by its file's name."""
    return {f"{name}.svg": draw().svg() for name, draw in DRAWINGS.items()}
