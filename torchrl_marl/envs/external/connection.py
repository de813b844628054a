"""A client's connection: bytes in, messages out, and nothing without a bound."""

from __future__ import annotations

import asyncio
import os
import socket
from typing import Any, cast

from torchrl_marl.envs.external.client import Client
from torchrl_marl.envs.external.server import ActionServer
from torchrl_marl.envs.external.wire import PROTOCOL, Frames, Refused, framed

__all__ = ["Connection"]

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
