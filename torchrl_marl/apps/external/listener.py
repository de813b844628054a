"""A server's thread, its port and its token, and the connections of its clients."""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import os
import socket
import ssl
import threading
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

from torchrl_marl.apps.external.server import ActionServer, Client
from torchrl_marl.apps.external.wire import PROTOCOL, Frames, Refused, framed, need_msgpack
from torchrl_marl.errors import ConfigError, quoted

__all__ = ["Connection", "Listener", "read_token"]

_LAST_WORDS = 2.0  # seconds for a client to read why it is left
_HELLO_BYTES = 1 << 16  # of somebody whom nobody knows yet


class Connection(asyncio.Protocol):
    """One connection to an :class:`ActionServer`.

    One message of a connection is taken each time round the loop, so that a flood delays others
    by no more than one message. What a client does not read is kept up to a bound; then it is
    left.

    Args:
        server (ActionServer): who answers.
    """

    def __init__(self, server: ActionServer) -> None:
        self._server, self._limit = server, server.max_message_bytes
        self._nonce = os.urandom(16)
        self._frames = Frames(min(_HELLO_BYTES, self._limit))
        self._client: Client | None = None
        self._made = False  # not while TLS shakes hands
        self._goes_on = False
        self.closed = False

    @property
    def known(self) -> bool:
        """Whether it has said who it is."""
        return self._client is not None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Greets with a nonce: the token itself is never sent."""
        self._transport, self._made = cast(asyncio.Transport, transport), True
        if self.closed:  # there is a crowd of strangers
            self._transport.abort()
            return
        self._transport.set_write_buffer_limits(high=self._limit)
        own = transport.get_extra_info("socket")
        if own is not None and own.family in (socket.AF_INET, socket.AF_INET6):
            own.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            own.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        self.send(framed({"type": "nonce", "protocol": PROTOCOL, "nonce": self._nonce}))

    def data_received(self, data: bytes) -> None:
        """Takes bytes as they come."""
        if self.closed:
            return
        self._frames.feed(data)
        if not self._goes_on:
            self._take_next()

    def _take_next(self) -> None:
        """Takes one message; a next one waits for its turn."""
        went_on, self._goes_on = self._goes_on, False
        if self.closed:
            return
        try:
            message = self._frames.next()
            if message is not None:
                self._take(message)
        except Refused as why:
            if self._client is not None:
                self._server.refuse(self._client, str(why))
            else:
                self._server.counts["refused"] += 1
            self.refuse(str(why))
            return
        if message is not None and self._frames.waiting:
            self._goes_on = True
            self._transport.pause_reading()
            asyncio.get_running_loop().call_soon(self._take_next)
        elif went_on:
            self._transport.resume_reading()

    def _take(self, message: dict[str, Any]) -> None:
        if self._client is not None:
            self._server.receive(self._client, message)
            return
        self._client = self._server.hello(message, self._nonce, self)
        self._frames.limit = self._limit
        version = self._server.version
        self.send(framed({"type": "welcome", "protocol": PROTOCOL, "version": version}))

    def send(self, data: bytes) -> None:
        """Sends a message."""
        if not self.closed:
            self._transport.write(data)

    def refuse(self, why: str) -> None:
        """Says why, and closes."""
        if self._made and not self.closed:
            self.send(framed({"type": "error", "message": why}))
            self._close_once_read()
        self.closed = True

    def _close_once_read(self) -> None:
        """Closes when the other side has, or soon: bytes left unread would undo the last words."""
        if not self._transport.can_write_eof():  # TLS
            self._transport.close()
            return
        self._transport.write_eof()
        self._transport.resume_reading()
        asyncio.get_running_loop().call_later(_LAST_WORDS, self._transport.close)

    def hang_up(self) -> None:
        """Closes without a word; the client may come back."""
        if self._made and not self.closed:
            self._transport.close()
        self.closed = True

    def pause_writing(self) -> None:
        """Leaves a client that does not read."""
        self._server.counts["refused"] += 1
        self.closed = True
        self._transport.abort()

    def connection_lost(self, error: Exception | None) -> None:
        """Lets the client come back."""
        self.closed = True
        if self._client is not None:
            self._server.lost(self._client, self)


TOKEN_VARIABLE = "TORCHRL_MARL_TOKEN"


class Listener:
    """Listens on a port and runs an :class:`ActionServer` in a thread of its own.

    Args:
        server (ActionServer): who answers.

    Keyword Args:
        host (str): where to listen; another than this machine's own needs a token.
        port (int): 0: a free one.
        hello_timeout (float): seconds in which who comes says who it is.
        ssl (ssl.SSLContext, optional): for TLS.

    Attributes:
        error (BaseException, optional): what ended the thread.

    Raises:
        ConfigError: a port that is taken, a host that is not here, or one without a token.
        MissingExtraError: MessagePack is not installed.
    """

    def __init__(
        self,
        server: ActionServer,
        *,
        host: str = "127.0.0.1",
        port: int = 0,
        hello_timeout: float = 10.0,
        ssl: ssl.SSLContext | None = None,
    ) -> None:
        need_msgpack()
        if not server.token and not is_this_machine(host):
            raise ConfigError(
                f"host is {quoted(host)}, which others reach, but there is no token; give "
                f"token_file or {TOKEN_VARIABLE}, or use host=127.0.0.1."
            )
        self.server, self.host = server, host
        self.error: BaseException | None = None
        self._hello_timeout = hello_timeout
        self._connections: weakref.WeakSet[Connection] = weakref.WeakSet()
        self._loop = asyncio.new_event_loop()
        self._end = self._loop.create_future()
        server.schedule = self._loop.call_soon
        shaking = None if ssl is None else hello_timeout
        try:
            self._listening = self._loop.run_until_complete(
                self._loop.create_server(
                    self._connect, host, port, ssl=ssl, ssl_handshake_timeout=shaking
                )
            )
        except OSError as error:
            self._loop.close()
            raise ConfigError(
                f"{host}:{port} cannot be listened on ({error.strerror or error}); use another "
                "port, or 0 for a free one."
            ) from None
        self.port: int = self._listening.sockets[0].getsockname()[1]
        self._thread = threading.Thread(target=self._run, name="torchrl_marl door", daemon=True)
        self._thread.start()

    def call(self, function: Callable[..., Any], *arguments: Any) -> None:
        """Lets the thread call a function soon."""
        self._loop.call_soon_threadsafe(function, *arguments)

    def ask(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """Lets the thread call a function, and returns what it returns."""
        found: list[Any] = []
        ready = threading.Event()

        def run() -> None:
            try:
                found.append(function(*arguments))
            finally:
                ready.set()

        self.call(run)
        while not ready.wait(1.0):
            self.raise_error()
        self.raise_error()
        return found[0]

    def raise_error(self) -> None:
        """Raises what ended the thread."""
        if self.error is not None:
            raise self.error
        if not self._thread.is_alive():
            raise RuntimeError("the door is closed.")

    def close(self) -> None:
        """Closes all connections and ends the thread; a second time nothing happens."""
        with contextlib.suppress(RuntimeError):  # the thread may be ending by itself
            self.call(self._stop)
        self._thread.join()

    def _stop(self) -> None:
        if not self._end.done():
            self._end.set_result(None)

    def _connect(self) -> Connection:
        connection = Connection(self.server)
        self._connections.add(connection)
        if len(self._connections) > 2 * self.server.max_clients + 16:
            connection.closed = True
        else:
            self._loop.call_later(self._hello_timeout, _expect_hello, weakref.ref(connection))
        return connection

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.set_exception_handler(self._note)
        self._loop.call_later(self._pause, self._reap)
        try:
            self._loop.run_until_complete(self._end)
        finally:
            self._listening.close()
            for connection in list(self._connections):
                connection.hang_up()  # clients look for a server that comes back
            self._loop.run_until_complete(asyncio.sleep(0.05))
            self._loop.run_until_complete(self._loop.shutdown_asyncgens())
            self._loop.close()

    @property
    def _pause(self) -> float:
        return max(0.02, min(self.server.grace, self.server.idle_timeout, 4.0) / 4)

    def _reap(self) -> None:
        self.server.reap()
        self._loop.call_later(self._pause, self._reap)

    def _note(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        """Ends the thread at a failure of the server's own; a client's connection may fail."""
        error = context.get("exception")
        if error is None or isinstance(error, OSError):
            return
        self.error = error
        self._stop()


def _expect_hello(reference: weakref.ref[Connection]) -> None:
    connection = reference()
    if connection is not None and not connection.known:
        connection.refuse("no hello came in time.")


def is_this_machine(host: str) -> bool:
    """Returns whether a host can be reached from this machine only.

    Examples:
        >>> is_this_machine("127.0.0.1"), is_this_machine("localhost"), is_this_machine("0.0.0.0")
        (True, True, False)
    """
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def read_token(file: str | None) -> str:
    """Returns the token of a file, or of the environment; empty where neither is given.

    Args:
        file (str, optional): its path.

    Raises:
        ConfigError: a file that cannot be read, or is empty.
    """
    if file is None:
        return os.environ.get(TOKEN_VARIABLE, "").strip()
    try:
        token = Path(file).read_text(encoding="utf-8").strip()
    except (OSError, UnicodeError) as error:
        why = getattr(error, "strerror", None) or error
        raise ConfigError(f"token_file is {quoted(file)}, which cannot be read ({why}).") from None
    if not token:
        raise ConfigError(f"token_file is {quoted(file)}, which is empty; write a token into it.")
    return token
