"""A client as a server knows it, and what a server asks of connections and of who learns."""

from __future__ import annotations

from typing import Protocol

import numpy as np

from torchrl_marl.envs.external.acting import Leaves

__all__ = ["Client", "Line", "Recording"]


class Line(Protocol):
    """Where a client is connected."""

    def send(self, data: bytes) -> None:
        """Sends a message."""

    def refuse(self, why: str) -> None:
        """Says why, and closes."""


class Recording(Protocol):
    """Who wants the steps: told of each when it begins and when its outcome is known."""

    def begin(self, seat: int, whole: bool) -> None:
        """Is told that an episode begins, or goes on of which the begin is not known."""

    def may_open(self, seat: int) -> bool:
        """Whether a client's next step may begin now; it waits otherwise."""

    def open(self, seats: np.ndarray, leaves: Leaves, version: int) -> None:
        """Takes the begin of steps: what was seen and done."""

    def close(self, seats: np.ndarray, outcome: Leaves) -> None:
        """Takes what the open steps of some seats led to."""

    def cut(self, seat: int) -> None:
        """Leaves out an open step, and truncates the episode before it."""

    def leave(self, seat: int) -> None:
        """Gives a seat free."""


class Client:
    """A simulator: where it sits, what it sent last, and the answer that it may ask for again.

    Args:
        name (str): which it gave itself.
        seat (int): its place in all arrays.

    Attributes:
        episode, t (int): of its last message; that is what tells its steps apart.
        busy (bool): the message is not answered yet.
        over (bool): the episode has ended.
        recorded (bool): its last step is one that is recorded, and open.
        answer (bytes): to the last message.
        heard (float): when, by the server's clock.
        line (Line, optional): where it is connected; None while it is away.
    """

    __slots__ = (
        "answer", "busy", "episode", "heard", "last", "line", "name", "over", "recorded", "seat",
        "t",
    )  # fmt: skip

    def __init__(self, name: str, seat: int, line: Line, now: float) -> None:
        self.name, self.seat, self.heard = name, seat, now
        self.line: Line | None = line
        self.episode, self.t, self.answer = 0, -1, b""
        self.busy = self.recorded = self.last = False
        self.over = True

    def say(self) -> str:
        """Returns who it is and what it last sent."""
        where = f"step {self.t} of episode {self.episode}" if self.t >= 0 else "hello"
        return f"{self.name!r} (last sent: {where}{'' if self.line else '; not connected'})"
