"""What takes a while says so, once, through the standard ``logging``."""

from __future__ import annotations

import contextlib
import logging
import sys
import time
from collections.abc import Iterator

__all__ = ["announce"]

_logger = logging.getLogger("torchrl_marl.capture")


class _Stderr(logging.StreamHandler):
    """Writes to what ``sys.stderr`` is at the time."""

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
    """Says what begins, and when it is done how long it took."""
    _set_up()
    began = time.perf_counter()
    yield
    _logger.info("%s took %.1f s", what, time.perf_counter() - began)
