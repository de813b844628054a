"""Clients of the server for external simulators: without sockets, and real ones."""

import contextlib
import socket
import threading
from pathlib import Path

import numpy as np

from torchrl_marl.apps.external.declaration import Declared
from torchrl_marl.apps.external.server import ActionServer
from torchrl_marl.apps.external.wire import FrameDecoder, InvalidMessageError

CLIENTS = Path(__file__).parents[2] / "clients" / "python"

AGENTS = {"walker": {"n": 2, "observation": 3, "action": 1}}


class RecordingConnection:
    """A connection that keeps the messages of the server."""

    def __init__(self):
        self.frames, self.refusals = FrameDecoder(1 << 24), []
        self.sent = 0

    def send(self, data):
        self.frames.feed(data)
        self.sent += 1

    def refuse(self, why):
        self.refusals.append(why)

    def read(self):
        return self.frames.next()


class ManualClient:
    """A client that sends the messages of a test."""

    def __init__(self, server, name="pen", agents=None, **fields):
        self.server, self.name = server, name
        self.hello_fields = {"agents": agents or AGENTS, **fields}
        self.connect()

    def connect(self):
        self.connection = RecordingConnection()
        hello = {"type": "hello", "protocol": 1, "client": self.name, **self.hello_fields}
        self.client = self.server.hello(hello, b"nonce", self.connection)

    def send(self, kind="step", **message):
        """Sends a message; a refused one closes the connection, as a real one does."""
        try:
            self.server.receive(self.client, {"type": kind, **message})
        except InvalidMessageError as why:
            self.server.refuse(self.client, str(why))

    def step(self, episode, t, observations=None, **fields):
        self.send(episode=episode, t=t, observations=observations or encode_values(0), **fields)

    def end(self, episode, t, observations=None, **fields):
        self.send("end", episode=episode, t=t, observations=observations or {}, **fields)


def encode_values(*values, n=2, width=3):
    """Observations of agents: each is ``width`` copies of the agent's value."""
    values = values * n if len(values) == 1 else values
    return {f"walker_{i}": f32([x] * width) for i, x in enumerate(values) if x is not None}


def f32(values):
    return np.asarray(values, "<f4").tobytes()


def echo_policy(td):
    """A policy: the action is the first observed number, the log-probability its negative."""
    observations = td["walker", "observation"]
    td["walker", "action"] = observations[..., :1].clone()
    td["walker", "action_log_prob"] = -observations[..., 0]
    return td


def make_server(policy=echo_policy, agents=None, state_size=None, **options):
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
    with socket.socket() as server_socket:
        server_socket.bind(("127.0.0.1", 0))
        return server_socket.getsockname()[1]


@contextlib.contextmanager
def run_clients(run, make_clients):
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
def run_meeting_clients(port, n=2, caller=False):
    """Running clients of the example's environment."""
    from example_meet import Meet, play
    from torchrl_marl_client import Client

    environments = [Meet(i, caller) for i in range(n)]

    def make_clients():
        return [
            Client(port=port, agents=environment.agents(), patience=60.0)
            for environment in environments
        ]

    with run_clients(lambda i, client: play(environments[i], client), make_clients) as clients:
        yield clients
