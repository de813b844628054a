"""Clients of ``door.py``: a load of clients in one process, separate from the server's.

They send the next request as soon as they have an answer, and report the latencies.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import socket
import struct
import sys
import time
from collections.abc import Iterator
from typing import Any

import msgpack
import numpy as np

AGENTS_N, SEEN, DONE = 3, 18, 2
AGENTS = {"walker": {"n": AGENTS_N, "observation": SEEN, "action": DONE}}
_LENGTH = struct.Struct("<I")


def framed(message: dict[str, Any]) -> bytes:
    """Returns a message as it is sent."""
    body = msgpack.packb(message)
    return _LENGTH.pack(len(body)) + body


class Player(asyncio.Protocol):
    """A simulator without a world: sends its next step with every answer."""

    def __init__(self, name: str) -> None:
        draw = np.random.default_rng(abs(hash(name)) % 2**32)
        seen = draw.standard_normal((AGENTS_N, SEEN)).astype("<f4")
        self.name, self.data, self.t = name, b"", 0
        self.seen = {f"walker_{i}": own.tobytes() for i, own in enumerate(seen)}
        self.rewards = dict.fromkeys(self.seen, 0.5)
        self.sent, self.times, self.until = 0.0, [], float("inf")
        self.welcome = asyncio.get_running_loop().create_future()
        self.over = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: Any) -> None:
        self.transport = transport
        transport.get_extra_info("socket").setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def data_received(self, data: bytes) -> None:
        self.data += data
        while len(self.data) >= 4:
            size = _LENGTH.unpack_from(self.data)[0]
            if len(self.data) < 4 + size:
                return
            body, self.data = self.data[4 : 4 + size], self.data[4 + size :]
            self.take(msgpack.unpackb(body))

    def take(self, message: dict[str, Any]) -> None:
        """Answers a message of the server."""
        kind = message["type"]
        if kind == "nonce":
            hello = {"type": "hello", "protocol": 1, "client": self.name, "agents": AGENTS}
            self.transport.write(framed(hello))
        elif kind == "welcome":
            self.welcome.set_result(None)
        elif kind == "error":
            raise RuntimeError(message["message"])
        else:
            now = time.perf_counter()
            self.times.append(now - self.sent)
            if now < self.until:
                self.step()
            elif not self.over.done():
                self.over.set_result(None)

    def step(self) -> None:
        """Sends the next step."""
        message = {"type": "step", "episode": 1, "t": self.t, "observations": self.seen}
        self.t += 1
        self.sent = time.perf_counter()
        self.transport.write(framed({**message, "rewards": self.rewards}))


async def play(port: int, n: int, seconds: float) -> dict[str, Any]:
    """Lets n clients play for some seconds; returns steps, seconds and round trips."""
    loop = asyncio.get_running_loop()
    players = []
    for i in range(n):
        made = loop.create_connection(lambda i=i: Player(f"{os.getpid()}-{i}"), "127.0.0.1", port)
        players.append((await made)[1])
    await asyncio.gather(*(player.welcome for player in players))
    for warm, length in ((True, 0.5), (False, seconds)):
        cpu, began = time.process_time(), time.perf_counter()
        print(json.dumps({"now": "warm" if warm else "measured"}), flush=True)
        for player in players:
            player.times.clear()
            player.over = loop.create_future()
            player.until = began + length
            player.step()
        await asyncio.gather(*(player.over for player in players))
        took, cpu = time.perf_counter() - began, time.process_time() - cpu
    print(json.dumps({"now": "over"}), flush=True)
    for player in players:
        player.transport.close()
    ms = np.sort(np.concatenate([player.times for player in players])) * 1e3
    return {
        "steps": len(ms),
        "rate": len(ms) / took,
        "p50": ms[len(ms) // 2],
        "p99": ms[int(len(ms) * 0.99)],
        "client_cpu": cpu / len(ms) * 1e6,
    }


# --------------------------------------------------------------------------- those who disturb


def joined(port: int, name: str) -> socket.socket:
    """Returns the connection of a client that the server has taken in."""
    own = socket.create_connection(("127.0.0.1", port))
    read(own)
    hello = {"type": "hello", "protocol": 1, "client": name, "agents": AGENTS}
    own.sendall(framed(hello))
    read(own)
    return own


def read(own: socket.socket) -> None:
    """Reads a message."""
    (size,) = _LENGTH.unpack(own.recv(4, socket.MSG_WAITALL))
    own.recv(size, socket.MSG_WAITALL)


def a_step() -> bytes:
    """Returns a step that may be sent again and again: the server counts it once."""
    seen = {f"walker_{i}": bytes(4 * SEEN) for i in range(AGENTS_N)}
    return framed({"type": "step", "episode": 1, "t": 0, "observations": seen})


def bad(port: int) -> Iterator[None]:
    """Comes with a wrong hello, random bytes, other agents, again and again."""
    draw = np.random.default_rng(0)
    while True:
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port)) as own:
            read(own)
            own.sendall(_LENGTH.pack(100) + draw.bytes(100))
            own.recv(1000)
        yield
        time.sleep(0.01)


def flood(port: int) -> Iterator[None]:
    """Sends the same step as often as the line takes it, and reads the answers."""
    own, data, left = joined(port, "flood"), a_step() * 50, b""
    own.setblocking(False)
    while True:
        left = left or data
        with contextlib.suppress(BlockingIOError):
            left = left[own.send(left) :]
        with contextlib.suppress(BlockingIOError):
            while own.recv(1 << 16):
                pass
        yield


def slow(port: int) -> Iterator[None]:
    """Sends the same step as often as the line takes it, and never reads; then comes back."""
    data = a_step() * 50
    for i in range(1_000_000):
        with contextlib.suppress(OSError), joined(port, f"slow{i}") as own:
            own.settimeout(0.2)
            while True:
                own.sendall(data)
                yield
        yield


def main() -> None:
    """``play PORT N SECONDS``, or ``bad``, ``flood`` or ``slow PORT``, until it is killed."""
    what, port, *rest = sys.argv[1:]
    if what == "play":
        found = asyncio.run(play(int(port), int(rest[0]), float(rest[1])))
        print(json.dumps(found), flush=True)
        return
    for _ in {"bad": bad, "flood": flood, "slow": slow}[what](int(port)):
        pass


if __name__ == "__main__":
    main()
