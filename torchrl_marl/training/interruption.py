"""Ctrl-C at the end of an iteration, where a run can be resumed to the bit."""

from __future__ import annotations

import signal
import sys
import threading
from types import FrameType
from typing import Any

__all__ = ["Interruption"]


class Interruption:
    """Notes the first Ctrl-C instead of raising it; the second one raises at once.

    Examples:
        >>> with Interruption() as interruption:
        ...     interruption.asked
        False
    """

    def __init__(self) -> None:
        self.asked = False
        self._before: Any = None

    def __enter__(self) -> Interruption:
        if threading.current_thread() is threading.main_thread():
            self._before = signal.signal(signal.SIGINT, self._note)
        return self

    def __exit__(self, *exception: object) -> None:
        if self._before is not None:
            signal.signal(signal.SIGINT, self._before)

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self.asked:
            raise KeyboardInterrupt
        self.asked = True
        print("\nstopping after this iteration; once more to stop at once", file=sys.stderr)
