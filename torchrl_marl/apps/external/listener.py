"""Runs a server in a thread: its port, its token and the connections of its clients."""

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
from torchrl_marl.apps.external.wire import (
    PROTOCOL,
    FrameDecoder,
    InvalidMessageError,
    check_msgpack,
    encode_message,
)
from torchrl_marl.errors import ConfigError, quoted

__all__ = ["Connection", "Listener", "read_token"]

_CLOSE_SECONDS = 2.0  # for a client to read the error before the connection closes
_HELLO_BYTES = 1 << 16  # of a client not yet known


class Connection(asyncio.Protocol):
    """One connection to an :class:`ActionServer`.

    Each pass of the event loop reads at most one message from each connection, so a client that
    floods the server delays the others by one message at most. Answers that a client does not read
    are buffered up to a limit; then the client is disconnected.

    Args:
        server (ActionServer): server that answers.
    """

    def __init__(self, server: ActionServer) -> None:
        self._server, self._limit = server, server.max_message_bytes
        self._nonce = os.urandom(16)
        self._frames = FrameDecoder(min(_HELLO_BYTES, self._limit))
        self._client: Client | None = None
        self._is_connected = False  # also during the TLS handshake
        self._handling_is_scheduled = False
        self.closed = False

    @property
    def known(self) -> bool:
        """True once the client has sent its ``hello``."""
        return self._client is not None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Sends a random nonce for the client to sign, so that the token itself is never sent."""
        self._transport, self._is_connected = cast(asyncio.Transport, transport), True
        if self.closed:  # too many connections
            self._transport.abort()
            return
        self._transport.set_write_buffer_limits(high=self._limit)
        own = transport.get_extra_info("socket")
        if own is not None and own.family in (socket.AF_INET, socket.AF_INET6):
            own.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            own.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        self.send(encode_message({"type": "nonce", "protocol": PROTOCOL, "nonce": self._nonce}))

    def data_received(self, data: bytes) -> None:
        """Decodes received bytes into messages."""
        if self.closed:
            return
        self._frames.feed(data)
        if not self._handling_is_scheduled:
            self._handle_next_message()

    def _handle_next_message(self) -> None:
        """Handles one message; schedules itself again if received bytes are left."""
        was_scheduled, self._handling_is_scheduled = self._handling_is_scheduled, False
        if self.closed:
            return
        try:
            message = self._frames.next()
            if message is not None:
                self._handle_message(message)
        except InvalidMessageError as why:
            if self._client is not None:
                self._server.refuse(self._client, str(why))
            else:
                self._server.counts["refused"] += 1
            self.refuse(str(why))
            return
        if message is not None and self._frames.waiting:
            self._handling_is_scheduled = True
            self._transport.pause_reading()
            asyncio.get_running_loop().call_soon(self._handle_next_message)
        elif was_scheduled:
            self._transport.resume_reading()

    def _handle_message(self, message: dict[str, Any]) -> None:
        if self._client is not None:
            self._server.receive(self._client, message)
            return
        self._client = self._server.hello(message, self._nonce, self)
        self._frames.limit = self._limit
        version = self._server.version
        self.send(encode_message({"type": "welcome", "protocol": PROTOCOL, "version": version}))

    def send(self, data: bytes) -> None:
        """Sends a message."""
        if not self.closed:
            self._transport.write(data)

    def refuse(self, why: str) -> None:
        """Sends the reason, and closes the connection."""
        if self._is_connected and not self.closed:
            self.send(encode_message({"type": "error", "message": why}))
            self._close_once_read()
        self.closed = True

    def _close_once_read(self) -> None:
        """Waits until the client has closed, but not longer than a timeout, and then closes.

        An immediate close could discard the last message before the client has read it.
        """
        if not self._transport.can_write_eof():  # TLS
            self._transport.close()
            return
        self._transport.write_eof()
        self._transport.resume_reading()
        asyncio.get_running_loop().call_later(_CLOSE_SECONDS, self._transport.close)

    def disconnect(self) -> None:
        """Closes without a message; the client may reconnect."""
        if self._is_connected and not self.closed:
            self._transport.close()
        self.closed = True

    def pause_writing(self) -> None:
        """Disconnects a client that does not read its answers."""
        self._server.counts["refused"] += 1
        self.closed = True
        self._transport.abort()

    def connection_lost(self, error: Exception | None) -> None:
        """Keeps the client's slot for a reconnect."""
        self.closed = True
        if self._client is not None:
            self._server.lost(self._client, self)


TOKEN_VARIABLE = "TORCHRL_MARL_TOKEN"


class Listener:
    """Thread that listens on a port and runs an :class:`ActionServer`.

    Args:
        server (ActionServer): server that answers.

    Keyword Args:
        host (str): host to listen on; a token is needed if other machines can reach it.
        port (int): port to listen on; 0: a free one.
        hello_timeout (float): seconds within which a new client must send its ``hello``.
        ssl (ssl.SSLContext, optional): TLS context.

    Attributes:
        error (BaseException, optional): exception that ended the thread.

    Raises:
        ConfigError: a port in use, an unknown host, or a host without a token.
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
        check_msgpack()
        if not server.token and not is_loopback(host):
            raise ConfigError(
                f"host is {quoted(host)}, which other machines reach, expected a token beside it; "
                f"give token_file or {TOKEN_VARIABLE}, or use host=127.0.0.1."
            )
        self.server, self.host = server, host
        self.error: BaseException | None = None
        self._hello_timeout = hello_timeout
        self._connections: weakref.WeakSet[Connection] = weakref.WeakSet()
        self._loop = asyncio.new_event_loop()
        self._stop_future = self._loop.create_future()
        server.schedule = self._loop.call_soon
        handshake = None if ssl is None else hello_timeout
        try:
            self._socket_server = self._loop.run_until_complete(
                self._loop.create_server(
                    self._make_connection, host, port, ssl=ssl, ssl_handshake_timeout=handshake
                )
            )
        except OSError as error:
            self._loop.close()
            raise ConfigError(
                f"cannot listen on {host}:{port} ({error.strerror or error}); use another port, "
                "or 0 for a free one."
            ) from None
        self.port: int = self._socket_server.sockets[0].getsockname()[1]
        self._thread = threading.Thread(target=self._run, name="torchrl_marl server", daemon=True)
        self._thread.start()

    def call(self, function: Callable[..., Any], *arguments: Any) -> None:
        """Schedules a function call in the thread, without waiting for it."""
        self._loop.call_soon_threadsafe(function, *arguments)

    def ask(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """Calls a function in the thread, waits, and returns the result."""
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
        """Raises the exception that ended the thread, if there is one."""
        if self.error is not None:
            raise self.error
        if not self._thread.is_alive():
            raise RuntimeError("the server is closed.")

    def close(self) -> None:
        """Closes all connections and ends the thread; a second call does nothing."""
        with contextlib.suppress(RuntimeError):  # the thread may be ending by itself
            self.call(self._stop)
        self._thread.join()

    def _stop(self) -> None:
        if not self._stop_future.done():
            self._stop_future.set_result(None)

    def _make_connection(self) -> Connection:
        connection = Connection(self.server)
        self._connections.add(connection)
        if len(self._connections) > 2 * self.server.max_clients + 16:
            connection.closed = True
        else:
            self._loop.call_later(
                self._hello_timeout, _refuse_without_hello, weakref.ref(connection)
            )
        return connection

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.set_exception_handler(self._handle_exception)
        self._loop.call_later(self._reap_interval, self._reap)
        try:
            self._loop.run_until_complete(self._stop_future)
        finally:
            self._socket_server.close()
            for connection in list(self._connections):
                connection.disconnect()  # without an error, so that clients try to reconnect
            self._loop.run_until_complete(asyncio.sleep(0.05))
            self._loop.run_until_complete(self._loop.shutdown_asyncgens())
            self._loop.close()

    @property
    def _reap_interval(self) -> float:
        return max(0.02, min(self.server.grace, self.server.idle_timeout, 4.0) / 4)

    def _reap(self) -> None:
        self.server.reap()
        self._loop.call_later(self._reap_interval, self._reap)

    def _handle_exception(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        """Ends the thread, unless the exception concerns only one client's connection."""
        error = context.get("exception")
        if error is None or isinstance(error, OSError):
            return
        self.error = error
        self._stop()


def _refuse_without_hello(reference: weakref.ref[Connection]) -> None:
    connection = reference()
    if connection is not None and not connection.known:
        connection.refuse("no hello was received in time.")


def is_loopback(host: str) -> bool:
    """Returns whether a host can be reached only from this machine.

    Examples:
        >>> is_loopback("127.0.0.1"), is_loopback("localhost"), is_loopback("0.0.0.0")
        (True, True, False)
    """
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def read_token(file: str | None) -> str:
    """Returns the token from a file or the environment variable; empty if neither is set.

    Args:
        file (str, optional): path of the token file.

    Raises:
        ConfigError: the file cannot be read or is empty.
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
