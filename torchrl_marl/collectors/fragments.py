"""Fragments: so many steps of one client after the other, from which batches are made.

Shapes: C seats, T steps of a fragment, n seats of a call, N agents of a group.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Mapping

import numpy as np

__all__ = ["Fragment", "Fragments"]

Leaves = Mapping[tuple[str, ...], np.ndarray]
Fragment = dict[tuple[str, ...], np.ndarray]
"""Key -> array ``[T, ...]``."""


class Fragments:
    """Recorder of the steps of all clients: cuts each one's play into fragments of T steps.

    A fragment may hold several episodes, and the begin of one whose rest is in the next. Where a
    client leaves in the middle of a fragment, its episode is truncated, and the next client that
    begins a fragment goes on with this one, so that no step is lost.

    With ``hold`` a batch is played with one policy: of each batch just so many fragments are
    begun as it has, and who has given its part waits. Without, clients play on until the fragments
    of a whole batch lie ready.

    Args:
        n_steps (int): number T.
        per_batch (int): fragments of a batch.
        groups (sequence of str): names of the groups, whose returns are summed.
        capacity (int): number C of seats.
        hold (bool): as above.

    Attributes:
        ready (deque of Fragment): those that are complete.
        changed (threading.Condition): notified when one is.
    """

    def __init__(
        self, n_steps: int, per_batch: int, groups: tuple[str, ...], capacity: int, hold: bool
    ) -> None:
        self.n_steps, self.per_batch, self.hold, self.groups = n_steps, per_batch, hold, groups
        self.ready: deque[Fragment] = deque()
        self.changed = threading.Condition()
        self.to_begin = 0
        self._rows: dict[tuple[str, ...], np.ndarray] = {}
        self._count = np.zeros(capacity, int)  # of whole steps
        self._begun = np.zeros(capacity, bool)  # a fragment, maybe without a whole step yet
        self._left: list[int] = []  # seats of clients who went away from a fragment
        self._returns = {name: np.zeros(capacity, np.float32) for name in groups}
        self._lengths = np.zeros(capacity, np.int64)
        self._whole = np.zeros(capacity, bool)
        self._episode = np.zeros(capacity, np.int64)
        self._episodes = 0

    # ------------------------------------------------------------------------- the learner's side

    def take(self) -> list[Fragment] | None:
        """Returns the fragments of a batch, or None where they are not complete."""
        with self.changed:
            if len(self.ready) < self.per_batch:
                return None
            return [self.ready.popleft() for _ in range(self.per_batch)]

    def release(self) -> None:
        """Lets the fragments of the next batch begin."""
        self.to_begin = self.per_batch - len(self.ready) - int(self._begun.sum())

    # -------------------------------------------------------------------------- the server's side

    def begin(self, seat: int, whole: bool) -> None:
        """Is told that an episode begins, or goes on of which the begin is not known."""
        for returns in self._returns.values():
            returns[seat] = 0
        self._lengths[seat] = 0
        self._whole[seat] = whole
        self._episode[seat] = self._episodes
        self._episodes += 1

    def may_open(self, seat: int) -> bool:
        """Whether a client's next step may begin now; begins a fragment for it, where it may."""
        if self._begun[seat]:
            if seat in self._left:  # who sat here before went away
                self._left.remove(seat)
            return True
        if self._left:
            self._inherit(seat, self._left.pop())
            return True
        if self.hold:
            if self.to_begin < 1:
                return False
            self.to_begin -= 1
        elif len(self.ready) >= self.per_batch:
            return False
        self._begun[seat] = True
        return True

    def _inherit(self, seat: int, other: int) -> None:
        """Goes on with a fragment that another client left."""
        if seat != other:
            n = self._count[other]
            for rows in self._rows.values():
                rows[seat, :n] = rows[other, :n]
            self._count[seat], self._count[other] = n, 0
            self._begun[other] = False
        self._begun[seat] = True

    def open(self, seats: np.ndarray, leaves: Leaves, version: int) -> None:
        """Takes the begin of steps: what was seen and done."""
        count = self._count[seats]
        for key, value in leaves.items():
            self._row(key, value)[seats, count] = value
        n = len(seats)
        self._row(("collector", "policy_version"), np.zeros(1, np.int64))[seats, count] = version
        ids = self._episode[seats]
        self._row(("collector", "traj_ids"), np.zeros(n, np.int64))[seats, count] = ids

    def _row(self, key: tuple[str, ...], like: np.ndarray) -> np.ndarray:
        """Returns the steps of all seats under a key, ``[C, T, ...]``."""
        rows = self._rows.get(key)
        if rows is None:
            shape = (len(self._count), self.n_steps, *like.shape[1:])
            rows = self._rows[key] = np.zeros(shape, like.dtype)
        return rows

    def close(self, seats: np.ndarray, outcome: Leaves) -> None:
        """Takes what the open steps of some seats led to."""
        count = self._count[seats]
        for key, value in outcome.items():
            if key[-1] != "earns":
                self._row(("next", *key), value)[seats, count] = value
        self._sum(seats, count, outcome)
        count = self._count[seats] = count + 1
        for seat in seats[count == self.n_steps].tolist():
            self._complete(seat)

    def _sum(self, seats: np.ndarray, count: np.ndarray, outcome: Leaves) -> None:
        """Adds to the returns of running episodes; a group's is the mean over who earns."""
        self._lengths[seats] += 1
        sums = {"episode_known": self._whole[seats]}
        for name, returns in self._returns.items():
            earns = outcome[name, "earns"]
            total = np.where(earns, outcome[name, "reward"][..., 0], 0).sum(1, dtype=np.float32)
            returns[seats] += total / np.maximum(earns.sum(1), 1)
            sums[f"{name}/episode_reward"] = returns[seats]
            sums[f"{name}/episode_length"] = self._lengths[seats]
        for name, value in sums.items():
            self._row(("collector", name), value)[seats, count] = value

    def _complete(self, seat: int) -> None:
        fragment = {key: rows[seat].copy() for key, rows in self._rows.items()}
        self._count[seat], self._begun[seat] = 0, False
        with self.changed:
            self.ready.append(fragment)
            self.changed.notify_all()

    def cut(self, seat: int) -> None:
        """Leaves out an open step, and truncates the episode before it."""
        last = self._count[seat] - 1
        done = self._rows.get(("next", "done"))
        if last < 0 or done is None or done[seat, last, 0]:
            return
        self._rows["collector", "episode_known"][seat, last] = False
        done[seat, last] = self._rows["next", "truncated"][seat, last] = True
        for name in self.groups:
            living = ~self._rows["next", name, "done"][seat, last]
            self._rows["next", name, "truncated"][seat, last] |= living
            self._rows["next", name, "done"][seat, last] = True
            self._rows["next", name, "mask"][seat, last] = living[..., 0]

    def leave(self, seat: int) -> None:
        """Gives a seat free; its fragment is for the next client."""
        if self._begun[seat]:
            self._left.append(seat)
