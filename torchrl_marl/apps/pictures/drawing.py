"""Helpers for matplotlib: checks that it works, new figures, and legends."""

from __future__ import annotations

import importlib.util
import logging
import textwrap
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from torchrl_marl.errors import MissingExtraError
from torchrl_marl.training.files import open_atomically

if TYPE_CHECKING:
    from matplotlib.artist import Artist
    from matplotlib.figure import Figure
    from matplotlib.legend import Legend

__all__ = ["check_matplotlib", "has_matplotlib", "legend_below", "new_figure", "save_figure"]

_MAX_LETTERS = 90  # most characters of a line


def has_matplotlib() -> bool:
    """Returns whether matplotlib is installed; it may still fail to import."""
    return importlib.util.find_spec("matplotlib") is not None


def check_matplotlib() -> None:
    """Raises an error if matplotlib cannot be imported.

    Raises:
        MissingExtraError: matplotlib is not installed, or its import fails.
    """
    if not has_matplotlib():
        raise MissingExtraError("matplotlib", "plot")
    logger = logging.getLogger("matplotlib")
    level = logger.level
    logger.setLevel(logging.ERROR)  # hides the notice on its cache folder
    try:
        importlib.import_module("matplotlib.pyplot")
    except Exception as error:  # such as a binary mismatch with numpy: any type
        why = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
        raise MissingExtraError("matplotlib", "plot", f"cannot be imported ({why})") from error
    finally:
        logger.setLevel(level)


def new_figure(width: float, height: float) -> Figure:
    """Returns an empty figure, which a notebook shows only once, as the result of a cell."""
    from matplotlib import pyplot

    figure = pyplot.figure(figsize=(width, height), layout="constrained")
    pyplot.close(figure)
    return figure


def save_figure(figure: Figure, path: Path, kind: str = "png", dpi: int = 150) -> None:
    """Writes a figure atomically.

    Raises:
        WriteError: the file cannot be written.
    """
    with open_atomically(path, "wb") as file:
        figure.savefig(file, dpi=dpi, format=kind)


def legend_below(
    figure: Figure, entries: Mapping[str, Artist], title: str = "", most: int = 4
) -> None:
    """Draws a legend below all axes, in as many columns as fit, and makes room for it.

    Args:
        figure (Figure): figure with its axes.
        entries (mapping): text -> artist, in the order of the legend.
        title (str): title of the legend.
        most (int): maximum number of columns.
    """
    room = figure.bbox.width
    looks = [(columns, _MAX_LETTERS) for columns in range(min(len(entries), most), 0, -1)]
    # If even a single column is too wide, lines are wrapped.
    looks += [(1, letters) for letters in range(_MAX_LETTERS - 4, 10, -4)]
    for columns, letters in looks:
        legend, lines = _draw_legend(figure, entries, title, columns, letters)
        if legend.get_window_extent().width < room:
            break
        legend.remove()
    figure.set_figheight(figure.get_figheight() + 0.2 * lines)


def _draw_legend(
    figure: Figure, entries: Mapping[str, Artist], title: str, columns: int, letters: int
) -> tuple[Legend, int]:
    """Draws a legend with wrapped lines; returns the legend and its number of lines."""
    texts = ["\n".join(textwrap.wrap(text, letters)) for text in (*entries, title)]
    legend = figure.legend(
        list(entries.values()),
        texts[:-1],
        ncols=columns,
        title=texts[-1] or None,
        loc="outside lower center",
    )
    broken = sum(text.count("\n") for text in texts)
    return legend, -(-len(entries) // columns) + broken + bool(title)
