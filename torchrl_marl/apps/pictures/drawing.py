"""Whether pictures can be drawn, since matplotlib may be missing or broken; and their legend."""

from __future__ import annotations

import importlib.util
import logging
import textwrap
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from torchrl_marl.errors import MissingExtraError
from torchrl_marl.training.files import whole_file

if TYPE_CHECKING:
    from matplotlib.artist import Artist
    from matplotlib.figure import Figure
    from matplotlib.legend import Legend

__all__ = ["check_matplotlib", "has_matplotlib", "legend_below", "new_figure", "save_figure"]

_WIDEST = 90  # letters of a line


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


def new_figure(width: float, height: float) -> Figure:
    """Returns an empty figure; a notebook shows it once, where it is returned."""
    from matplotlib import pyplot

    figure = pyplot.figure(figsize=(width, height), layout="constrained")
    pyplot.close(figure)
    return figure


def save_figure(figure: Figure, path: Path, kind: str = "png", dpi: int = 150) -> None:
    """Writes a figure whole or not at all.

    Raises:
        WriteError: it cannot be written.
    """
    with whole_file(path, "wb") as file:
        figure.savefig(file, dpi=dpi, format=kind)


def legend_below(
    figure: Figure, entries: Mapping[str, Artist], title: str = "", most: int = 4
) -> None:
    """Draws a legend below all axes, in as many columns as fit, and makes room for it.

    Args:
        figure (Figure): with its axes.
        entries (mapping): text -> what is drawn so, in order.
        title (str): above them.
        most (int): columns at most.
    """
    room = figure.bbox.width
    looks = [(columns, _WIDEST) for columns in range(min(len(entries), most), 0, -1)]
    # Where a column of its own is too wide, lines are broken.
    looks += [(1, letters) for letters in range(_WIDEST - 4, 10, -4)]
    for columns, letters in looks:
        legend, lines = _legend(figure, entries, title, columns, letters)
        if legend.get_window_extent().width < room:
            break
        legend.remove()
    figure.set_figheight(figure.get_figheight() + 0.2 * lines)


def _legend(
    figure: Figure, entries: Mapping[str, Artist], title: str, columns: int, letters: int
) -> tuple[Legend, int]:
    """Draws a legend with lines of so many letters; returns how many lines it has, too."""
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
