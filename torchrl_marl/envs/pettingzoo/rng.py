"""Random state of one copy: private global generators for its environment, and episode seeds."""

from __future__ import annotations

import random
from typing import Any

import numpy as np

__all__ = ["OwnRandom"]

_N_WATCHED = 200  # contexts in which Python's generator is swapped in any case


class OwnRandom:
    """Private state of numpy's and Python's global generators for one environment.

    Each episode also gets a seed from a separate stream of random numbers. Without this seed, some
    environments would seed their own generator at random in every reset, and could not be
    reproduced.

    Swapping numpy's generator takes about 2 us, because only a reference changes. Swapping Python's
    generator takes about 30 us, because it is copied. So Python's generator is swapped only in
    resets and in the first steps. Once the environment has drawn from it, it is swapped in all
    steps.

    Args:
        seed (int): random seed of all generators.

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
        # Snapshots hold the attributes, so their names stay.
        self._left = _N_WATCHED
        self._look = True
        self._outer: Any = None
        self._outer_python: Any = None
        self.seed(seed)

    def seed(self, seed: int) -> None:
        """Seeds all generators."""
        self._numpy = np.random.MT19937(seed)
        self._python: Any = random.Random(seed).getstate()
        self._episodes = np.random.SeedSequence(seed)

    def seed_of_episode(self) -> int:
        """Returns the next episode's seed; it has 31 bits, as some environments accept no more."""
        return int(self._episodes.spawn(1)[0].generate_state(1)[0]) >> 1

    def active(self, look: bool = False) -> OwnRandom:
        """Returns a context in which global random functions draw from these generators.

        Args:
            look (bool): True to swap Python's generator, too, and to record whether it was used.
        """
        self._left -= 1
        self._look = look or self.uses_python or self._left > 0
        return self

    def __enter__(self) -> None:
        self._outer = np.random.get_bit_generator()  # type: ignore[attr-defined]
        np.random.set_bit_generator(self._numpy)  # type: ignore[attr-defined]
        if self._look:
            self._outer_python = random.getstate()
            random.setstate(self._python)

    def __exit__(self, *raised: Any) -> None:
        np.random.set_bit_generator(self._outer)  # type: ignore[attr-defined]
        if self._look:
            inner = random.getstate()
            self.uses_python = self.uses_python or inner != self._python
            self._python = inner
            random.setstate(self._outer_python)
        self._outer = self._outer_python = None
