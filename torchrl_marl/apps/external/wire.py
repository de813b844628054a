"""Format of messages: four bytes with the length, then MessagePack (see ``protocol.md``)."""

from __future__ import annotations

import struct
from typing import Any

from torchrl_marl.errors import MissingExtraError, UserError

try:
    import msgpack
except ImportError:
    msgpack = None

__all__ = ["PROTOCOL", "FrameDecoder", "InvalidMessageError", "check_msgpack", "encode_message"]

PROTOCOL = 1
"""Version of the protocol."""

_LENGTH = struct.Struct("<I")
_MAX_MAP_ENTRIES = 20_000  # keys of one map: agents of a step


class InvalidMessageError(UserError):
    """Raised for an invalid message; its client receives the reason, and other clients continue."""


def check_msgpack() -> None:
    """Raises an error if MessagePack is not installed.

    Raises:
        MissingExtraError: MessagePack is missing; the message gives the command to install it.
    """
    if msgpack is None:
        raise MissingExtraError("msgpack", "serve")


def encode_message(message: dict[str, Any]) -> bytes:
    """Encodes a message as four bytes with its length, then MessagePack.

    Examples:
        >>> encode_message({"type": "welcome"})[:4]
        b'\\x0e\\x00\\x00\\x00'
    """
    body = msgpack.packb(message, use_single_float=True)
    return _LENGTH.pack(len(body)) + body


class FrameDecoder:
    """Decoder of a stream of bytes into messages.

    The length of a message is checked before its body is read.

    Args:
        limit (int): maximum bytes of a message.

    Examples:
        >>> frames = FrameDecoder(100)
        >>> frames.feed(encode_message({"t": 1})[:5])
        >>> frames.next(), frames.feed(encode_message({"t": 1})[5:]), frames.next()
        (None, None, {'t': 1})
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._data = bytearray()

    @property
    def waiting(self) -> int:
        """Number of received bytes that are not decoded yet."""
        return len(self._data)

    def feed(self, data: bytes) -> None:
        """Appends received bytes."""
        self._data += data

    def next(self) -> dict[str, Any] | None:
        """Returns the next message, or None while it is incomplete.

        Raises:
            InvalidMessageError: the message is too large or malformed.
        """
        data = self._data
        if len(data) < 4:
            return None
        (size,) = _LENGTH.unpack_from(data)
        if size > self.limit:
            raise InvalidMessageError(
                f"a message has {size:,} bytes, expected {self.limit:,} at most "
                "(max_message_bytes)."
            )
        if len(data) < 4 + size:
            return None
        body = bytes(memoryview(data)[4 : 4 + size])
        del data[: 4 + size]
        return _unpack(body)


def _unpack(body: bytes) -> dict[str, Any]:
    try:
        message = msgpack.unpackb(
            body, max_map_len=_MAX_MAP_ENTRIES, max_str_len=1000, max_ext_len=0, strict_map_key=True
        )
    except Exception as error:  # random bytes raise many kinds
        what = f"{type(error).__name__}: {str(error)[:80]}"
        raise InvalidMessageError(
            f"a message of {len(body):,} bytes is no valid MessagePack ({what})."
        ) from None
    if not isinstance(message, dict):
        raise InvalidMessageError(f"a message is of type {type(message).__name__}, expected a map.")
    return message
