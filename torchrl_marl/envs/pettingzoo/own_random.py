"""Global random generators of a copy's own, swapped in while its world runs."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator
from typing import Any

import numpy as np

__all__ = ["OwnRandom"]

_WATCHED = 200


class OwnRandom:
    """What a world that draws from numpy's or Python's global generator draws from.

    numpy's generator is swapped by reference, which takes about 2 us. Python's can only be
    copied (30 us), so it is looked at in every reset and in the first steps, and swapped
    in each step as soon as a world was seen drawing from it.

    Args:
        seed (int): start of both.

    Examples:
        >>> own = OwnRandom(0)
        >>> before = np.random.get_state()[1].copy()
        >>> with own.active():
        ...     x = np.random.rand()
        >>> bool((before == np.random.get_state()[1]).all())
        True
    """

    def __init__(self, seed: int) -> None:
        self.uses_python = False
        self._left = _WATCHED
        self.seed(seed)

    def seed(self, seed: int) -> None:
        """Starts both anew."""
        self._numpy = np.random.MT19937(seed)
        self._python: Any = random.Random(seed).getstate()

    @contextlib.contextmanager
    def active(self, look: bool = False) -> Iterator[None]:
        """Makes these what global random functions draw from.

        Args:
            look (bool): look whether Python's generator is drawn from.
        """
        look = look or self.uses_python or self._left > 0
        self._left -= 1
        outer = np.random.get_bit_generator()
        np.random.set_bit_generator(self._numpy)
        python = self._enter_python() if look else None
        try:
            yield
        finally:
            np.random.set_bit_generator(outer)
            if look:
                self._leave_python(python)

    def _enter_python(self) -> Any:
        outer = random.getstate()
        random.setstate(self._python)
        return outer

    def _leave_python(self, outer: Any) -> None:
        inner = random.getstate()
        self.uses_python = self.uses_python or inner != self._python
        self._python = inner
        random.setstate(outer)
