"""Announcements of slow work, once, through the standard ``logging``."""

from __future__ import annotations

import contextlib
import logging
import sys
import time
from collections.abc import Callable, Iterator

__all__ = ["announce", "announced_to"]

Listener = Callable[[str], None]

_logger = logging.getLogger("torchrl_marl.capture")
_listeners: list[Listener] = []


class _Stderr(logging.StreamHandler):
    """Stream to the present ``sys.stderr``."""

    def __init__(self) -> None:
        logging.Handler.__init__(self)

    @property
    def stream(self):
        return sys.stderr


def _set_up() -> None:
    # Silent with logging.getLogger("torchrl_marl.capture").setLevel(logging.WARNING).
    if _logger.level == logging.NOTSET:
        _logger.setLevel(logging.INFO)
    if not _logger.handlers:
        handler = _Stderr()
        handler.setFormatter(logging.Formatter("torchrl_marl: %(message)s"))
        _logger.addHandler(handler)
        _logger.propagate = False


@contextlib.contextmanager
def announce(what: str) -> Iterator[None]:
    """Tells listeners of some work while it lasts, and logs its duration at the end."""
    _set_up()
    began = time.perf_counter()
    for listener in _listeners:
        listener(what)
    try:
        yield
    finally:
        for listener in _listeners:
            listener("")
    _logger.info("%s took %.1f s", what, time.perf_counter() - began)


@contextlib.contextmanager
def announced_to(listener: Listener) -> Iterator[None]:
    """Adds a listener within this context.

    Args:
        listener (callable): ``listener(what)`` is called when slow work begins, and
            ``listener("")`` when it ends.
    """
    _listeners.append(listener)
    try:
        yield
    finally:
        _listeners.remove(listener)
