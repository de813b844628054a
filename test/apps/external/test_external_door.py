"""The listener: sockets, tokens, broken connections, clients that do not read or send."""

import os
import socket
import struct
import subprocess
import sys
import time

import pytest
from external import AGENTS, CLIENTS, Clock, ManualClient, echo_policy
from torchrl_marl_client import Client

from torchrl_marl.apps.external.declaration import Declared
from torchrl_marl.apps.external.env import ExternalEnv
from torchrl_marl.apps.external.listener import Listener
from torchrl_marl.apps.external.server import ActionServer
from torchrl_marl.apps.external.wire import encode_message
from torchrl_marl.errors import ConfigError

SEEN = {"walker_0": [1.0, 0.0, 0.0], "walker_1": [2.0, 0.0, 0.0]}
ACTIONS = {"walker_0": [1.0], "walker_1": [2.0]}


@pytest.fixture
def opened():
    """Makes listeners, and closes them after the test."""
    listeners = []

    def make(host="127.0.0.1", max_message_bytes=1 << 16, hello_timeout=10.0, port=0, **options):
        agents = options.pop("agents", AGENTS)
        options["max_message_bytes"] = max_message_bytes
        server = ActionServer(Declared.read(agents), echo_policy, **options)
        listeners.append(Listener(server, host=host, port=port, hello_timeout=hello_timeout))
        listeners[-1].visitors = []
        return listeners[-1]

    yield make
    for listener in listeners:
        for client in listener.visitors:
            client.close()
        listener.close()


def client_of(listener, **options):
    """A client of a listener; both are closed together."""
    agents = options.pop("agents", AGENTS)
    listener.visitors.append(Client(port=listener.port, agents=agents, patience=5.0, **options))
    return listener.visitors[-1]


def until(condition, seconds=5.0):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not happen"
        time.sleep(0.005)


def test_client_runs_episodes(opened):
    listener = opened()
    client = client_of(listener)
    assert client.begin(SEEN) == ACTIONS
    actions = client.step({"walker_1": [5.0, 0, 0]}, {"walker_0": 1.0}, ["walker_0"])
    assert actions == {"walker_1": [5.0]}
    client.end({"walker_1": 2.0}, truncated=True, observations={"walker_1": [6.0, 0, 0]})
    assert client.begin(SEEN) == ACTIONS and client.episode == 2
    client.close()


def test_episode_continues_after_broken_connection(opened):
    listener = opened()
    client = client_of(listener)
    client.begin(SEEN)
    for _ in range(3):
        client.socket.shutdown(socket.SHUT_RDWR)  # as a network does
        assert client.step(SEEN) == ACTIONS
    assert listener.server.counts["reconnects"] == 3 and listener.server.counts["truncated"] == 0
    assert listener.server.counts["steps"] == 4


def test_client_reconnects_to_restarted_server(opened):
    listener = opened()
    client = client_of(listener)
    client.begin(SEEN)
    port = listener.port
    listener.close()
    opened(port=port)
    assert client.step(SEEN) == ACTIONS


def test_slot_of_killed_client_is_freed(opened):
    listener = opened(grace=0.1, max_clients=1)
    code = (
        f"import sys; sys.path.insert(0, {str(CLIENTS)!r})\n"
        "from torchrl_marl_client import Client\n"
        f"client = Client(port={listener.port}, agents={AGENTS!r})\n"
        f"client.begin({SEEN!r})\n"
        f"while True: client.step({SEEN!r})\n"
    )
    process = subprocess.Popen([sys.executable, "-S", "-c", code])
    until(lambda: listener.server.counts["steps"] > 20)
    with pytest.raises(RuntimeError, match="1 clients are connected"):
        client_of(listener).begin(SEEN)
    process.kill()
    process.wait()
    until(lambda: not listener.server.clients)
    assert listener.server.counts["truncated"] == 1
    assert client_of(listener).begin(SEEN) == ACTIONS


@pytest.mark.parametrize("token", ["", "wrong"])
def test_wrong_token_raises(opened, token):
    listener = opened(token="secret")
    with pytest.raises(RuntimeError, match="the proof of the token is wrong or missing"):
        client_of(listener, token=token).begin(SEEN)
    assert client_of(listener, token="secret").begin(SEEN) == ACTIONS


def test_client_reads_token_from_environment_variable(opened, monkeypatch):
    monkeypatch.setenv("TORCHRL_MARL_TOKEN", "secret")
    assert client_of(opened(token="secret")).begin(SEEN) == ACTIONS


def stranger(listener, data=b""):
    """Sends some bytes on a new connection; returns the reply until it is closed."""
    with socket.create_connection(("127.0.0.1", listener.port), 5.0) as line:
        line.sendall(data)
        told = b""
        while part := line.recv(4096):
            told += part
        return told


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (struct.pack("<I", 100) + os.urandom(100), b"MessagePack"),
        (struct.pack("<I", 1 << 20), b"expected 65,536 at most"),
        (b"GET / HTTP/1.1\r\n\r\n", b"max_message_bytes"),
        (encode_message({"type": "step"}), b"expected 'hello'"),
        (b"", b"no hello was received in time"),
    ],
)
def test_invalid_connections_get_an_error_and_are_closed(opened, data, said):
    listener = opened(hello_timeout=0.2)
    client = client_of(listener)
    client.begin(SEEN)
    assert said in stranger(listener, data)
    assert client.step(SEEN) == ACTIONS


def test_refused_client_gets_the_error_and_others_continue(opened):
    listener = opened()
    good, bad = client_of(listener), client_of(listener)
    good.begin(SEEN)
    bad.begin(SEEN)
    with pytest.raises(RuntimeError, match="'walker_0' has 2 numbers|8 bytes, expected 3 float32"):
        bad.step({"walker_0": [1.0, 2.0]})
    assert good.step(SEEN) == ACTIONS
    assert len(listener.server.clients) == 1


def test_silent_client_is_dropped_after_idle_timeout(opened):
    listener = opened(idle_timeout=0.2, grace=60.0)
    silent, quick = client_of(listener), client_of(listener)
    silent.begin(SEEN)
    quick.begin(SEEN)
    end = time.monotonic() + 0.5
    while time.monotonic() < end:
        quick.step(SEEN)
    assert [client.connection is not None for client in listener.server.clients.values()] == [True]
    assert listener.server.counts["truncated"] == 1
    with pytest.raises(RuntimeError, match=r"no message for 0.2 s \(idle_timeout\)"):
        silent.step(SEEN)


def test_client_that_does_not_read_is_dropped(opened):
    agents = {"walker": {"n": 2000, "observation": 1, "action": 1}}  # makes large answers
    listener = opened(agents=agents)
    good, bad = client_of(listener, agents=agents), client_of(listener, agents=agents)
    seen = {f"walker_{i}": [0.0] for i in range(2000)}
    good.begin({"walker_0": [1.0]})
    bad.begin(seen)
    again = encode_message({"type": "step", "episode": 1, "t": 0})
    bad.socket.settimeout(5.0)
    with pytest.raises(ConnectionError):
        for _ in range(10_000):
            bad.socket.sendall(again)
            time.sleep(0.0001)
    assert good.step({"walker_0": [2.0]}) == {"walker_0": [2.0]}
    assert listener.server.counts["refused"] == 1


def test_invalid_port_or_host_raises(opened):
    port = opened().port
    with pytest.raises(ConfigError, match=f"cannot listen on 127.0.0.1:{port}"):
        opened(port=port)
    with pytest.raises(ConfigError, match="expected a token beside it; give token_file or TORCH"):
        opened(host="0.0.0.0")
    with pytest.raises(ConfigError, match="cannot listen on nowhere.invalid:0"):
        opened(host="nowhere.invalid", token="secret")


def test_waiting_message_names_clients_and_their_last_message():
    env, clock = ExternalEnv("game", num_envs=4, agents=AGENTS, port=0), Clock()
    env.open()
    server, waited = env.server, f"has waited 31 s at {env.address} with 1 of 4 fragments; "
    server.clock, server.policy, server.schedule = clock, echo_policy, lambda flush: None
    assert env.waiting_message(31.4, 1, 4) == f"{waited}0 clients are connected, waits for clients"
    slow, held = ManualClient(server, "slow"), ManualClient(server, "held")
    slow.step(3, 7)
    server.flush()
    held.step(1, 0)  # the server has not answered yet
    clock.now = 12.0
    told = "2 clients are connected, waits for 'slow' (last sent: step 7 of episode 3), 12 s ago"
    assert env.waiting_message(31.4, 1, 4) == waited + told
    server.lost(slow.client, slow.connection)
    assert "step 7 of episode 3; not connected), 0 s ago" in env.waiting_message(31.4, 1, 4)
    with pytest.raises(ConfigError, match="has no step or reset"):
        env.rollout(3)
    env.close()


def test_error_of_the_policy_is_raised_by_the_listener(opened):
    listener = opened()

    def broken(td):
        raise ValueError("out of petrol")

    listener.server.policy = broken
    client = client_of(listener, timeout=0.5)
    client.patience = -1.0
    with pytest.raises((OSError, EOFError)):
        client.begin(SEEN)
    until(lambda: listener.error is not None)
    with pytest.raises(ValueError, match="out of petrol"):
        listener.ask(lambda: None)


def test_oversized_message_raises_on_the_client(opened):
    """The client gets the reason instead of a reset connection."""
    listener = opened(max_message_bytes=1 << 12)
    client = client_of(listener)
    client.begin(SEEN)
    with pytest.raises(RuntimeError, match="expected 4,096 at most"):
        client.step(SEEN, {f"walker_{i}": 1.0 for i in range(20_000)})
