"""Announcements of slow work, once, through the standard ``logging``."""

from __future__ import annotations

import contextlib
import logging
import sys
import time
from collections.abc import Iterator

__all__ = ["announce"]

_logger = logging.getLogger("torchrl_marl.capture")


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
    """Logs the start of some work, and its duration at the end."""
    _set_up()
    began = time.perf_counter()
    yield
    _logger.info("%s took %.1f s", what, time.perf_counter() - began)
