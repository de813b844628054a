"""Whether pictures can be drawn: matplotlib may be missing, or there and broken."""

from __future__ import annotations

import importlib.util
import logging

from torchrl_marl.errors import MissingExtraError

__all__ = ["check_matplotlib", "has_matplotlib"]


def has_matplotlib() -> bool:
    """Whether matplotlib is installed, be it one that works or not."""
    return importlib.util.find_spec("matplotlib") is not None


def check_matplotlib() -> None:
    """Refuses to draw without a matplotlib that can be imported.

    Raises:
        MissingExtraError: it is not installed, or its import fails.
    """
    if not has_matplotlib():
        raise MissingExtraError("matplotlib", "plot")
    logger = logging.getLogger("matplotlib")
    level = logger.level
    logger.setLevel(logging.ERROR)  # where its cache lies is of no matter for a picture
    try:
        importlib.import_module("matplotlib.pyplot")
    except Exception as error:  # of another numpy, whatever it may be
        why = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
        raise MissingExtraError("matplotlib", "plot", f"cannot be imported ({why})") from error
    finally:
        logger.setLevel(level)
