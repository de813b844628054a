"""When a suite ends: frames that are left, at the pace of those that are done."""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

__all__ = ["Pace", "clock", "seconds_left"]

Pair = tuple[str, str]


@dataclass(frozen=True)
class Pace:
    """Frames, and the seconds that they took: compiling, evaluating and all.

    Examples:
        >>> Pace(1000, 2.0) + Pace(2000, 10.0)
        Pace(frames=3000, seconds=12.0)
    """

    frames: int = 0
    seconds: float = 0.0

    def __add__(self, other: Pace) -> Pace:
        return Pace(self.frames + other.frames, self.seconds + other.seconds)


def seconds_left(
    left: Iterable[tuple[Pair, int]], paces: Mapping[Pair, Pace], jobs: int = 1
) -> float | None:
    """Returns the seconds until all runs have ended, or None where nothing is known yet.

    A task and algorithm of which nothing was seen goes as fast as the algorithm does elsewhere, or
    else as everything together. Runs begin in their order, each where a place is free first.

    Args:
        left (iterable of (pair, frames)): the frames that each run has to go; the running ones
            first.
        paces (mapping): (task, algorithm) -> what was seen of it.
        jobs (int): how many run at once.

    Examples:
        >>> paces = {("balance", "mappo"): Pace(1000, 2.0)}
        >>> seconds_left([(("balance", "mappo"), 500), (("wheel", "mappo"), 1000)], paces)
        3.0
        >>> seconds_left([(("balance", "mappo"), 500), (("wheel", "mappo"), 1000)], paces, jobs=2)
        2.0
    """
    known = {pair: pace for pair, pace in paces.items() if pace.frames > 0}
    places = [0.0] * max(jobs, 1)
    for pair, frames in left:
        if not frames:
            continue
        if not known:
            return None
        alike = [pace for (_, algorithm), pace in known.items() if algorithm == pair[1]]
        pace = known.get(pair) or sum(alike or known.values(), Pace())
        heapq.heapreplace(places, places[0] + frames * pace.seconds / pace.frames)
    return max(places)


def clock(seconds: float) -> str:
    """Returns a time as one says it.

    Examples:
        >>> clock(42), clock(150), clock(7260), clock(200_000)
        ('42 s', '2 min 30 s', '2 h 01 min', '2 d 7 h')
    """
    whole = max(0, round(seconds))
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    if whole < 86_400:
        return f"{whole // 3600} h {whole % 3600 // 60:02d} min"
    return f"{whole // 86_400} d {whole % 86_400 // 3600} h"
