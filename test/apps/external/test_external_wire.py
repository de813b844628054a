"""Messages on the wire: reassembled from any pieces, refused if invalid or too large."""

import contextlib
import random

import msgpack
import pytest

from torchrl_marl.apps.external.wire import FrameDecoder, InvalidMessageError, encode_message


def all_of(frames):
    return list(iter(frames.next, None))


def test_messages_are_reassembled_from_any_pieces():
    draw = random.Random(0)
    messages = [
        {"t": i, "b": bytes(draw.randrange(300)), "x": [0.5] * draw.randrange(9)} for i in range(50)
    ]
    stream = b"".join(map(encode_message, messages))
    for _ in range(20):
        frames, found, at = FrameDecoder(1000), [], 0
        while at < len(stream):
            n = draw.choice((1, 2, 3, 5, 100, 5000))
            frames.feed(stream[at : at + n])
            found += all_of(frames)
            at += n
        assert found == messages and frames.waiting == 0


def test_oversized_length_is_refused_before_the_body_arrives():
    frames = FrameDecoder(100)
    frames.feed((101).to_bytes(4, "little"))
    with pytest.raises(InvalidMessageError, match="101 bytes, expected 100 at most"):
        frames.next()


def frame(body):
    return len(body).to_bytes(4, "little") + body


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"\xc1",
        msgpack.packb(5),
        msgpack.packb([1, 2]),
        msgpack.packb({1: 2}),  # keys are texts
        msgpack.packb({"a": msgpack.ExtType(1, b"xx")}),
        msgpack.packb({"a": 1})[:-1],
        msgpack.packb({"a": 1}) + b"\0",
        b"\xdf\xff\xff\xff\xff",  # a map of four billion
        b"\xdd\xff\xff\xff\xff",
        b"\x81\xa1a" + b"\x91" * 5000 + b"\x01",  # nested too deeply
        b"\x81\xa2\xff\xfe\x01",  # no text
    ],
)
def test_invalid_message_is_refused(body):
    frames = FrameDecoder(10_000)
    frames.feed(frame(body))
    with pytest.raises(InvalidMessageError, match=r"\.$"):
        frames.next()


def test_random_bytes_are_refused_or_parsed():
    draw = random.Random(1)
    for _ in range(2000):
        frames = FrameDecoder(1 << 20)
        frames.feed(frame(draw.randbytes(draw.randrange(1, 60))))
        with contextlib.suppress(InvalidMessageError):
            assert isinstance(frames.next(), dict)
