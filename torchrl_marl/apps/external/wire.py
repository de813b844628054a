"""Messages on the wire: four bytes of length, then MessagePack; ``protocol.md`` describes them."""

from __future__ import annotations

import struct
from typing import Any

from torchrl_marl.errors import MissingExtraError, UserError

try:
    import msgpack
except ImportError:
    msgpack = None

__all__ = ["PROTOCOL", "Frames", "Refused", "framed", "need_msgpack"]

PROTOCOL = 1
"""Version of the protocol."""

_LENGTH = struct.Struct("<I")
_MOST_NAMES = 20_000  # of one map: agents of a step


class Refused(UserError):
    """What a client sent that is not taken; it is told so, and the others play on."""


def need_msgpack() -> None:
    """Raises where MessagePack is not installed.

    Raises:
        MissingExtraError: with the line that installs it.
    """
    if msgpack is None:
        raise MissingExtraError("msgpack", "serve")


def framed(message: dict[str, Any]) -> bytes:
    """Returns a message as it is sent.

    Examples:
        >>> framed({"type": "welcome"})[:4]
        b'\\x0e\\x00\\x00\\x00'
    """
    body = msgpack.packb(message, use_single_float=True)
    return _LENGTH.pack(len(body)) + body


class Frames:
    """Cuts a stream of bytes into messages.

    A message's length is checked before its body is waited for.

    Args:
        limit (int): bytes that a message may have.

    Examples:
        >>> frames = Frames(100)
        >>> frames.feed(framed({"t": 1})[:5])
        >>> frames.next(), frames.feed(framed({"t": 1})[5:]), frames.next()
        (None, None, {'t': 1})
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._data = bytearray()

    @property
    def waiting(self) -> int:
        """Number of bytes that are not taken yet."""
        return len(self._data)

    def feed(self, data: bytes) -> None:
        """Takes bytes as they come."""
        self._data += data

    def next(self) -> dict[str, Any] | None:
        """Returns the next message, or None where it is not whole yet.

        Raises:
            Refused: a message that is too large, or is none.
        """
        data = self._data
        if len(data) < 4:
            return None
        (size,) = _LENGTH.unpack_from(data)
        if size > self.limit:
            raise Refused(
                f"a message has {size:,} bytes, expected {self.limit:,} at most "
                "(max_message_bytes)."
            )
        if len(data) < 4 + size:
            return None
        body = bytes(memoryview(data)[4 : 4 + size])
        del data[: 4 + size]
        return _unpacked(body)


def _unpacked(body: bytes) -> dict[str, Any]:
    try:
        message = msgpack.unpackb(
            body, max_map_len=_MOST_NAMES, max_str_len=1000, max_ext_len=0, strict_map_key=True
        )
    except Exception as error:  # random bytes raise many kinds
        what = f"{type(error).__name__}: {str(error)[:80]}"
        raise Refused(f"{len(body):,} bytes are no MessagePack that is taken ({what}).") from None
    if not isinstance(message, dict):
        raise Refused(f"a message is of type {type(message).__name__}, expected a map.")
    return message
