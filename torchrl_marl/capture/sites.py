"""File, line and source of a simulator's current statement, for error messages."""

from __future__ import annotations

import linecache
import sys
from types import FrameType

__all__ = ["site_of", "source_of", "user_frame", "where"]

# Files of this package and torch, whose frames are skipped.
_MACHINERY = (
    "/torchrl_marl/capture/",
    "/torch/_",
    "/torch/overrides",
    "/torch/functional",
    "/torch/nn/functional",
    "/torch/utils/",
    "/torch/fx/",
)


def where() -> str:
    """Returns the file, the line and the source text of the simulator's current statement."""
    frame = user_frame()
    return f"at {site_of(frame)}: {source_of(frame)}"


def user_frame() -> FrameType:
    """Returns the innermost frame outside of this package's capture code and torch."""
    frame = sys._getframe(1)
    while frame.f_back and any(part in frame.f_code.co_filename for part in _MACHINERY):
        frame = frame.f_back
    return frame


def site_of(frame: FrameType) -> str:
    """Returns a frame's folder, file and line."""
    parts = frame.f_code.co_filename.replace("\\", "/").split("/")
    return f"{'/'.join(parts[-2:])}:{frame.f_lineno}"


def source_of(frame: FrameType) -> str:
    """Returns the source of a frame's current line."""
    return " ".join(linecache.getline(frame.f_code.co_filename, frame.f_lineno).split())
