"""Counts repeated failures of a world's copies at the same place. Imports no torch."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

__all__ = ["Repeats"]


class Repeats:
    """Position of each copy since it was made, and its number of failures there in a row.

    A copy that is made anew, gets other seeds and fails in the same step all the same does so by
    itself: no restart fixes it.

    Args:
        n_copies (int): how many there are.

    Examples:
        >>> repeats = Repeats(1)
        >>> for _ in range(2):
        ...     repeats.made([0])
        ...     repeats.played(np.array([False]))
        ...     times = repeats.failed(0)
        >>> times, repeats.place(0)
        (2, 'step 2 of its episode 1')
    """

    def __init__(self, n_copies: int) -> None:
        self._at = np.zeros((n_copies, 2), np.int64)  # episodes, and steps in the running one
        self._failed: dict[int, tuple[tuple[int, ...], int]] = {}

    def made(self, copies: Sequence[int]) -> None:
        """Resets the counts of copies that were made anew, and begin their first episode."""
        self._at[list(copies)] = 1, 0

    def begun(self, copies: Sequence[int]) -> None:
        """Notes that some copies begin an episode."""
        self._at[list(copies)] += (1, 0)
        self._at[list(copies), 1] = 0

    def played(self, ended: np.ndarray | None, failed: Sequence[int] = ()) -> None:
        """Notes a step of all copies but the failed ones; some episodes ``[E]`` ended in it."""
        self._at[:, 1] += 1
        self._at[list(failed), 1] -= 1
        if ended is not None and ended.any():
            self.begun(np.flatnonzero(ended).tolist())

    def failed(self, copy: int) -> int:
        """Returns how often a copy failed at its position, without one elsewhere in between."""
        at = tuple(self._at[copy].tolist())
        last, times = self._failed.get(copy, (at, 0))
        self._failed[copy] = at, (times if last == at else 0) + 1
        return self._failed[copy][1]

    def place(self, copy: int) -> str:
        """Returns the position of a copy, counted since it was made, as text."""
        episodes, steps = self._at[copy].tolist()
        return f"step {steps + 1} of its episode {episodes}"
