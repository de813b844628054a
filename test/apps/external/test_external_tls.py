"""A listener with TLS, and fairness between clients."""

import asyncio
import shutil
import ssl
import subprocess
from contextlib import closing

import pytest
from external import AGENTS, echo_policy, encode_values
from torchrl_marl_client import Client

from torchrl_marl.apps.external.declaration import Declared
from torchrl_marl.apps.external.env import tls_context
from torchrl_marl.apps.external.listener import Connection, Listener
from torchrl_marl.apps.external.server import ActionServer
from torchrl_marl.apps.external.wire import FrameDecoder, encode_message

OPENSSL = shutil.which("openssl")


@pytest.fixture(scope="module")
def certificate(tmp_path_factory):
    """Files of a certificate for 127.0.0.1, and of its key."""
    folder = tmp_path_factory.mktemp("tls")
    files = folder / "certificate.pem", folder / "key.pem"
    subprocess.run(
        [OPENSSL, "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1",
         "-nodes", "-days", "2", "-subj", "/CN=door", "-addext", "subjectAltName=IP:127.0.0.1",
         "-out", str(files[0]), "-keyout", str(files[1])],
        check=True, capture_output=True,
    )  # fmt: skip
    return tuple(map(str, files))


def context_of(certificate=None):
    """An SSL context of a client that trusts one certificate."""
    return ssl.create_default_context(cafile=certificate)


@pytest.mark.skipif(OPENSSL is None, reason="there is no openssl")
def test_clients_connect_with_tls(certificate):
    server = ActionServer(Declared.read(AGENTS), echo_policy, token="secret")
    listener = Listener(server, ssl=tls_context(*certificate), hello_timeout=0.5)
    options = {"port": listener.port, "agents": AGENTS, "token": "secret", "patience": -1.0}
    try:
        with closing(Client(ssl=context_of(certificate[0]), **options)) as client:
            assert client.begin(encode_values(1)) == {"walker_0": [1.0], "walker_1": [1.0]}
            client.close()  # reconnects with a new handshake
            assert client.step(encode_values(2)) == {"walker_0": [2.0], "walker_1": [2.0]}
            assert client.socket.version() == "TLSv1.3"
            for other in (context_of(), None):  # without trust; without TLS
                with closing(Client(ssl=other, timeout=2.0, **options)) as stranger:
                    with pytest.raises((OSError, EOFError)):
                        stranger.begin(encode_values(1))
            assert client.step(encode_values(3))["walker_0"] == [3.0]
        assert server.counts["steps"] == 3 and server.counts["reconnects"] == 1
    finally:
        listener.close()


class Wire(asyncio.Transport):
    """A transport that records its data, and the order of writes over all transports."""

    writes = 0

    def __init__(self):
        super().__init__()
        self.frames, self.when, self.paused = FrameDecoder(1 << 24), [], False

    def write(self, data):
        type(self).writes += 1
        self.when.append(type(self).writes)
        self.frames.feed(data)

    def get_extra_info(self, name, default=None):
        return default

    def set_write_buffer_limits(self, high=None, low=None):
        pass

    def can_write_eof(self):
        return False

    def close(self):
        pass

    def pause_reading(self):
        self.paused = True

    def resume_reading(self):
        self.paused = False


def connected(server, name):
    """A connection after the client's hello."""
    server.max_message_bytes = 1 << 24
    wire, line = Wire(), Connection(server)
    line.connection_made(wire)
    hello = {"type": "hello", "protocol": 1, "client": name, "agents": AGENTS}
    line.data_received(encode_message(hello))
    return line, wire


def step(t):
    message = {"type": "step", "episode": 1, "t": t, "observations": encode_values(t)}
    return encode_message(message)


def test_flooding_client_does_not_delay_others():
    """A thousand messages at once delay another client's answer by at most two writes."""

    async def run():
        server = ActionServer(Declared.read(AGENTS), echo_policy)
        server.schedule = asyncio.get_running_loop().call_soon
        flood, flooded = connected(server, "flood")
        quiet, answers = connected(server, "quiet")
        flood.data_received(step(0))
        await asyncio.sleep(0)
        waited = []
        flood.data_received(step(0) * 1000)  # duplicates, each of which is answered
        assert flooded.paused  # nothing more is read of it for now
        for t in range(20):
            before = Wire.writes
            quiet.data_received(step(t))
            while len(answers.when) < 3 + t:  # nonce, welcome, and the answers before
                await asyncio.sleep(0)
            waited.append(answers.when[-1] - before - 1)
        while flooded.paused:
            await asyncio.sleep(0)
        return server, waited

    server, waited = asyncio.run(run())
    assert max(waited) <= 2
    assert server.counts["steps"] == 21 and server.counts["duplicates"] == 1000
    assert server.counts["refused"] == 0


def test_step_before_the_answer_drops_only_its_client():
    async def run():
        server = ActionServer(Declared.read(AGENTS), echo_policy)
        server.schedule = asyncio.get_running_loop().call_soon
        hasty, _ = connected(server, "hasty")
        quiet, answers = connected(server, "quiet")
        server.policy, policy = None, server.policy  # as while a run learns
        hasty.data_received(step(0) + step(1))
        quiet.data_received(step(0))
        for _ in range(3):
            await asyncio.sleep(0)
        server.policy = policy
        server.resume_waiting()
        for _ in range(3):
            await asyncio.sleep(0)
        return server, hasty, answers

    server, hasty, answers = asyncio.run(run())
    assert hasty.closed and list(server.clients) == ["quiet"]
    assert server.counts["refused"] == 1
    types = [answers.frames.next()["type"] for _ in range(3)]
    assert types == ["nonce", "welcome", "actions"]
