"""Console output of a training run: messages and the progress bar."""

from __future__ import annotations

import contextlib
import sys
import warnings
from collections.abc import Iterator
from contextvars import ContextVar

with warnings.catch_warnings():  # in a notebook without ipywidgets, the bar is plain text
    warnings.simplefilter("ignore")
    from tqdm.asyncio import tqdm_asyncio
    from tqdm.auto import tqdm

__all__ = ["messages_of", "print_message", "progress_bar"]

_HAS_WIDGET = tqdm is not tqdm_asyncio  # a notebook draws the bar


def progress_bar(name: str, total: int, frames: int, *, enabled: bool = True) -> tqdm:
    """Returns a progress bar over the frames of a run.

    In a terminal or notebook, the bar is refreshed up to ten times per second. If stderr is
    redirected, for example to a log file, it is refreshed at most every five seconds.

    Args:
        name (str): text in front of the bar.
        total (int): frames of the whole run.
        frames (int): frames so far.

    Keyword Args:
        enabled (bool): False for a bar that writes nothing.
    """
    in_place = _HAS_WIDGET or sys.stderr.isatty()
    return tqdm(
        desc=name,
        total=total,
        initial=frames,
        unit=" frames",
        unit_scale=True,
        dynamic_ncols=True,
        mininterval=0.1 if in_place else 5,
        disable=not enabled,
    )


_run: ContextVar[str] = ContextVar("run", default="")


@contextlib.contextmanager
def messages_of(run: str) -> Iterator[None]:
    """Context in which messages start with a run's name, where several runs share a terminal.

    Args:
        run (str): name of the run; empty for none.
    """
    token = _run.set(run)
    try:
        yield
    finally:
        _run.reset(token)


def print_message(text: str, *, is_warning: bool = True) -> None:
    """Prints a message above the progress bar.

    Args:
        text (str): sentence without the full stop.

    Keyword Args:
        is_warning (bool): True to print to stderr, which notebooks show in red; False for stdout.
    """
    text = f"{_run.get()}: {text}" if _run.get() else text
    tqdm.write(f"torchrl_marl: {text}.", file=sys.stderr if is_warning else sys.stdout)
