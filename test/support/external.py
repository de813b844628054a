"""Clients of the server for external simulators: without sockets, and real ones."""

import contextlib
import socket
import threading
from pathlib import Path

import numpy as np

from torchrl_marl.apps.external.declaration import Declared
from torchrl_marl.apps.external.server import ActionServer
from torchrl_marl.apps.external.wire import Frames, Refused

CLIENTS = Path(__file__).parents[2] / "clients" / "python"

AGENTS = {"walker": {"n": 2, "observation": 3, "action": 1}}


class Inbox:
    """A connection that keeps the messages of the server."""

    def __init__(self):
        self.frames, self.refusals = Frames(1 << 24), []
        self.sent = 0

    def send(self, data):
        self.frames.feed(data)
        self.sent += 1

    def refuse(self, why):
        self.refusals.append(why)

    def read(self):
        return self.frames.next()


class Pen:
    """A client that sends the messages of a test."""

    def __init__(self, server, name="pen", agents=None, **more):
        self.server, self.name = server, name
        self.said = {"agents": agents or AGENTS, **more}
        self.connect()

    def connect(self):
        self.inbox = Inbox()
        hello = {"type": "hello", "protocol": 1, "client": self.name, **self.said}
        self.client = self.server.hello(hello, b"nonce", self.inbox)

    def say(self, kind="step", **message):
        """Sends a message; a refused one closes the connection, as a real one does."""
        try:
            self.server.receive(self.client, {"type": kind, **message})
        except Refused as why:
            self.server.refuse(self.client, str(why))

    def step(self, episode, t, seen=None, **more):
        self.say(episode=episode, t=t, observations=seen or all_see(0), **more)

    def end(self, episode, t, seen=None, **more):
        self.say("end", episode=episode, t=t, observations=seen or {}, **more)


def all_see(*values, n=2, width=3):
    """Observations of agents: each is ``width`` copies of the agent's value."""
    values = values * n if len(values) == 1 else values
    return {f"walker_{i}": f32([x] * width) for i, x in enumerate(values) if x is not None}


def f32(values):
    return np.asarray(values, "<f4").tobytes()


def echo(td):
    """A policy: the action is the first observed number, the log-probability its negative."""
    seen = td["walker", "observation"]
    td["walker", "action"] = seen[..., :1].clone()
    td["walker", "action_log_prob"] = -seen[..., 0]
    return td


def make_server(policy=echo, agents=None, state_size=None, **options):
    """A server that answers when the test calls ``server.flush()``."""
    server = ActionServer(Declared.read(agents or AGENTS, state_size), policy, **options)
    server.schedule = lambda flush: None
    return server


class Clock:
    """A clock that the test sets."""

    def __init__(self):
        self.now = 0.0

    def __call__(self):
        return self.now


def free_port():
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return one.getsockname()[1]


@contextlib.contextmanager
def playing(run, make_clients):
    """Runs each client in a separate thread: ``run(number, client)``.

    The threads end with the context; their later errors are ignored.
    """
    clients, failures = make_clients(), []

    def play(number, client):
        try:
            run(number, client)
        except (OSError, EOFError, RuntimeError) as error:
            failures.append(error)

    threads = [threading.Thread(target=play, args=pair, daemon=True) for pair in enumerate(clients)]
    for thread in threads:
        thread.start()
    try:
        yield clients
    finally:
        for client in clients:
            client._connect = _refuse
            if client.socket is not None:
                with contextlib.suppress(OSError):
                    client.socket.shutdown(socket.SHUT_RDWR)
        for thread in threads:
            thread.join(5.0)


def _refuse():
    raise RuntimeError("the test is over")


@contextlib.contextmanager
def meeting(port, n=2, caller=False):
    """Running clients of the example's environment."""
    from example_meet import Meet, play
    from torchrl_marl_client import Client

    worlds = [Meet(i, caller) for i in range(n)]

    def make_clients():
        return [Client(port=port, agents=world.agents(), patience=60.0) for world in worlds]

    with playing(lambda i, client: play(worlds[i], client), make_clients) as clients:
        yield clients
