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


def frame_message(message: dict[str, Any]) -> bytes:
    """Returns a message as bytes, with its length in front."""
    body = msgpack.packb(message)
    return _LENGTH.pack(len(body)) + body


class Player(asyncio.Protocol):
    """A client without a simulator: it answers every action with a prepared step."""

    def __init__(self, name: str) -> None:
        rng = np.random.default_rng(abs(hash(name)) % 2**32)
        observations = rng.standard_normal((AGENTS_N, SEEN)).astype("<f4")
        self.name, self.data, self.t = name, b"", 0
        self.observations = {f"walker_{i}": row.tobytes() for i, row in enumerate(observations)}
        self.rewards = dict.fromkeys(self.observations, 0.5)
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
            self.transport.write(frame_message(hello))
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
        message = {"type": "step", "episode": 1, "t": self.t, "observations": self.observations}
        self.t += 1
        self.sent = time.perf_counter()
        self.transport.write(frame_message({**message, "rewards": self.rewards}))


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


def connect_client(port: int, name: str) -> socket.socket:
    """Returns the connection of a client that the server has taken in."""
    connection = socket.create_connection(("127.0.0.1", port))
    read_message(connection)
    hello = {"type": "hello", "protocol": 1, "client": name, "agents": AGENTS}
    connection.sendall(frame_message(hello))
    read_message(connection)
    return connection


def read_message(connection: socket.socket) -> None:
    """Reads a message."""
    (size,) = _LENGTH.unpack(connection.recv(4, socket.MSG_WAITALL))
    connection.recv(size, socket.MSG_WAITALL)


def encode_step() -> bytes:
    """Returns a step that may be sent again and again: the server counts it once."""
    observations = {f"walker_{i}": bytes(4 * SEEN) for i in range(AGENTS_N)}
    return frame_message({"type": "step", "episode": 1, "t": 0, "observations": observations})


def send_bad_messages(port: int) -> Iterator[None]:
    """Comes with a wrong hello, random bytes, other agents, again and again."""
    rng = np.random.default_rng(0)
    while True:
        with (
            contextlib.suppress(OSError),
            socket.create_connection(("127.0.0.1", port)) as connection,
        ):
            read_message(connection)
            connection.sendall(_LENGTH.pack(100) + rng.bytes(100))
            connection.recv(1000)
        yield
        time.sleep(0.01)


def flood_server(port: int) -> Iterator[None]:
    """Sends the same step as often as the line takes it, and reads the answers."""
    connection, data, unsent = connect_client(port, "flood"), encode_step() * 50, b""
    connection.setblocking(False)
    while True:
        unsent = unsent or data
        with contextlib.suppress(BlockingIOError):
            unsent = unsent[connection.send(unsent) :]
        with contextlib.suppress(BlockingIOError):
            while connection.recv(1 << 16):
                pass
        yield


def send_without_reading(port: int) -> Iterator[None]:
    """Sends the same step as often as the line takes it, and never reads; then comes back."""
    data = encode_step() * 50
    for i in range(1_000_000):
        with contextlib.suppress(OSError), connect_client(port, f"slow{i}") as connection:
            connection.settimeout(0.2)
            while True:
                connection.sendall(data)
                yield
        yield


def main() -> None:
    """``play PORT N SECONDS``, or ``bad``, ``flood`` or ``slow PORT``, until it is killed."""
    mode, port, *rest = sys.argv[1:]
    if mode == "play":
        found = asyncio.run(play(int(port), int(rest[0]), float(rest[1])))
        print(json.dumps(found), flush=True)
        return
    for _ in {"bad": send_bad_messages, "flood": flood_server, "slow": send_without_reading}[mode](
        int(port)
    ):
        pass


if __name__ == "__main__":
    main()
