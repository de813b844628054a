"""A thousand random faults: no step is recorded twice, and no answered step is lost."""

import asyncio
import random
import struct

import msgpack
from external import AGENTS, Clock, echo_policy, make_server

from torchrl_marl.apps.external.client_slots import Fragments
from torchrl_marl.apps.external.listener import Connection
from torchrl_marl.apps.external.wire import encode_message

N_FAULTS, T, E = 1000, 5, 4


class Wire:
    """A transport that keeps its bytes in memory."""

    def __init__(self):
        self.sent, self.reading, self.open = b"", True, True

    def write(self, data):
        self.sent += data

    def get_extra_info(self, name):
        return None

    def set_write_buffer_limits(self, high):
        pass

    def pause_reading(self):
        self.reading = False

    def resume_reading(self):
        self.reading = True

    def can_write_eof(self):
        return False

    def close(self):
        self.open = False

    abort = close


class Stranger:
    """The client's side of a connection."""

    def __init__(self, server):
        self.wire, self.peer = Wire(), Connection(server)
        self.peer.connection_made(self.wire)
        self.told = []

    async def send(self, data, draw):
        """Sends bytes in pieces of random sizes."""
        while data and self.wire.open:
            n = draw.choice((1, 7, 60, 10_000))
            self.peer.data_received(data[:n])
            data = data[n:]
            while not self.wire.reading:
                await asyncio.sleep(0)

    def hear(self):
        data, messages = self.wire.sent, []
        self.wire.sent = b""
        while data:
            (n,) = struct.unpack("<I", data[:4])
            messages.append(msgpack.unpackb(data[4 : 4 + n]))
            data = data[4 + n :]
        return messages

    def drop(self):
        self.peer.connection_lost(None)


class Simulator:
    """A client whose observations identify each step: client number, episode and time."""

    def __init__(self, server, number, draw):
        self.server, self.number, self.draw = server, number, draw
        self.episode, self.t, self.length = 0, 0, 0
        self.counted = {}  # (episode, t) -> whether the episode ended with it
        self.line = None
        self.due = self.next_message()

    def next_message(self):
        if self.t == self.length:
            self.episode, self.t, self.length = self.episode + 1, 0, self.draw.randrange(1, 12)
            return self.message(self.t)
        self.t += 1
        return self.message(self.t, "end" if self.t == self.length else "step")

    def message(self, t, kind="step"):
        seen = {f"walker_{i}": [self.number, self.episode, t] for i in range(2)}
        earned = {f"walker_{i}": t + 0.25 * i for i in range(2)}
        message = {"type": kind, "episode": self.episode, "t": t, "observations": seen}
        return {**message, "rewards": earned, "truncated": self.episode % 2 == 0}

    async def connect(self):
        if self.line is not None:
            self.line.drop()
        self.line = Stranger(self.server)
        hello = {"type": "hello", "protocol": 1, "client": f"c{self.number}", "agents": AGENTS}
        await self.line.send(encode_message(hello), self.draw)

    async def play(self, fault):
        """Sends the next message with a fault; ``hear`` continues with the answer."""
        if self.line is None or not self.line.wire.open:
            await self.connect()
        data = encode_message(self.due)
        if fault == "broken":  # in the middle of the message
            await self.line.send(data[: self.draw.randrange(len(data))], self.draw)
            return await self.connect()
        if fault == "late" and self.t > 0:
            await self.line.send(
                encode_message(self.message(self.draw.randrange(self.t))), self.draw
            )
        if fault == "twice":
            await self.line.send(data, self.draw)
        await self.line.send(data, self.draw)
        if fault == "lost":  # the answer, whether it was there or not
            for _ in range(self.draw.randrange(3)):
                await asyncio.sleep(0)
            await self.connect()
            await self.line.send(data, self.draw)
        return None

    def hear(self):
        for message in self.line.hear() if self.line is not None else ():
            assert message["type"] != "error", message
            if message["type"] == "actions" and (message["episode"], message["t"]) == (
                self.episode,
                self.t,
            ):
                if self.due["type"] == "step":
                    first = [float(self.number)]
                    assert message["actions"] == {"walker_0": first, "walker_1": first}
                if self.t > 0:
                    self.counted[self.episode, self.t - 1] = self.due["type"] == "end"
                self.due = self.next_message()


async def annoy(server, draw):
    """A connection with invalid data, which gets an error and is closed."""
    stranger = Stranger(server)
    kind = draw.choice(("random", "large", "agents", "silent"))
    if kind == "random":
        await stranger.send(struct.pack("<I", 40) + draw.randbytes(40), draw)
    if kind == "large":
        await stranger.send(struct.pack("<I", 1 << 30) + b"x", draw)
    if kind == "agents":
        agents = {"walker": {**AGENTS["walker"], "n": 9}}
        await stranger.send(
            encode_message({"type": "hello", "protocol": 1, "client": "x", "agents": agents}), draw
        )
    if kind != "silent":
        assert stranger.hear()[-1]["type"] == "error" and not stranger.wire.open
    stranger.drop()


async def run(server, fragments, draw, clock):
    """Runs until ``N_FAULTS`` faults; returns all simulators, the alive ones, and batches."""
    server.schedule = asyncio.get_running_loop().call_soon
    everybody = [Simulator(server, i, draw) for i in range(6)]
    alive, batches, faults = list(everybody), [], 0
    while faults < N_FAULTS:
        for one in list(alive):
            kinds = (None, "broken", "late", "twice", "lost", "killed", "stranger")
            fault = draw.choices(kinds, (10, 2, 2, 2, 2, 0.2, 1))[0]
            faults += fault is not None
            if fault == "stranger":
                await annoy(server, draw)
            if fault == "killed" and one.line is not None:
                one.line.drop()
                alive.remove(one)
                everybody.append(Simulator(server, len(everybody), draw))
                alive.append(everybody[-1])
            else:
                await one.play(fault)
        await asyncio.sleep(0)
        for one in alive:
            one.hear()
        clock.now += 1.0
        server.reap()
        if (batch := fragments.take()) is not None:
            batches += batch
            fragments.release()
            server.resume_waiting()
    for _ in range(20):  # held clients finish
        batches += fragments.take() or []
        fragments.release()
        server.resume_waiting()
        await asyncio.sleep(0)
        for one in alive:
            one.hear()
    return everybody, alive, batches


def steps_of(rows, n):
    """Yields (client, episode, t) and the recorded data of the first n steps."""
    now, then = rows["walker", "observation"][:n, 0], rows["next", "walker", "observation"][:n, 0]
    earned, ends = rows["next", "walker", "reward"][:n, :, 0], rows["next", "done"][:n, 0]
    cut = ~rows["collector", "episode_known"][:n]
    for a, b, reward, end, lost in zip(now, then, earned.tolist(), ends.tolist(), cut.tolist()):
        yield tuple(map(int, a)), (tuple(map(int, b)), reward, end, lost)


def check(seed, hold):
    draw, clock = random.Random(seed), Clock()
    server = make_server(echo_policy, clock=clock, grace=20.0, idle_timeout=1e6, max_clients=40)
    fragments = Fragments(T, E, ("walker",), 40, hold)
    server.recording = fragments
    fragments.release()
    everybody, alive, batches = asyncio.run(run(server, fragments, draw, clock))
    server.schedule = lambda flush: None

    found = [step for one in (*batches, *fragments.ready) for step in steps_of(one, T)]
    for slot, n in enumerate(fragments._n_recorded):  # incomplete fragments
        rows = {key: x[slot] for key, x in fragments._rows.items()}
        found += steps_of(rows, int(n))
    recorded = dict(found)
    assert len(recorded) == len(found), "a step counted twice"
    for one in everybody:
        for (episode, t), end in one.counted.items():
            then, reward, done, lost = recorded.pop((one.number, episode, t))
            assert then == (one.number, episode, t + 1)
            assert reward == [t + 1, t + 1.25]
            assert done == (end or lost)
    # The remaining steps were received, but their clients died before the answer.
    assert len(recorded) <= len(everybody)

    clock.now += 21.0
    for one in alive:
        one.line.drop()
    clock.now += 21.0
    server.reap()
    assert not server.clients and sorted(server._free_slots) == list(range(40))
    names = ("reconnects", "duplicates", "late", "truncated", "refused")
    assert all(server.counts[name] > 5 for name in names), server.counts


def test_random_faults_with_hold():
    check(0, True)


def test_random_faults_without_hold():
    check(1, False)
