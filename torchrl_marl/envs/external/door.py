"""A server's thread, its port and its token."""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import os
import ssl
import threading
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torchrl_marl.envs.external.connection import Connection
from torchrl_marl.envs.external.server import ActionServer
from torchrl_marl.envs.external.wire import need_msgpack
from torchrl_marl.errors import ConfigError, quoted

__all__ = ["Door", "read_token"]

TOKEN_VARIABLE = "TORCHRL_MARL_TOKEN"


class Door:
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
