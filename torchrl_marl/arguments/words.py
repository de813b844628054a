"""Words of the command line that are checked as they are read: counts, seeds, choices."""

from __future__ import annotations

import argparse
import re

from torchrl_marl.errors import nearest, quoted
from torchrl_marl.export.formats import FORMATS

__all__ = [
    "LISTS",
    "TRUST",
    "count",
    "count_or_none",
    "execution",
    "list_name",
    "port",
    "program_format",
    "seed",
    "seeds",
]

TRUST = (
    "run the code that a run of somebody else's brings (its world's module, pickled worlds), and "
    "follow links out of its folder"
)
LISTS = ("recipes", "worlds", "scenarios", "algorithms", "settings", "suites", "schema")


def seeds(text: str) -> list[int]:
    if not re.fullmatch(r"\d+(,\d+)*|\d+\.\.\d+", text):
        raise argparse.ArgumentTypeError(
            f"found {quoted(text)}, expected numbers such as 0,1,2 or 0..15"
        )
    first, _, last = text.partition("..")
    found = [int(one) for one in text.split(",")] if not last else _range(int(first), int(last))
    if len(set(found)) < len(found):
        raise argparse.ArgumentTypeError(f"found {quoted(text)}, expected each seed once")
    return found


def _range(first: int, last: int) -> list[int]:
    if first > last or last - first >= 10_000:
        raise argparse.ArgumentTypeError(
            f"found {first}..{last}, expected a first seed, and a last one that is larger"
        )
    return list(range(first, last + 1))


def seed(text: str) -> int:
    if not text.isdecimal() or int(text) >= 2**32:
        raise argparse.ArgumentTypeError(f"found {text!r}, expected a number from 0 to {2**32 - 1}")
    return int(text)


def count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"found {quoted(text)}, expected a number of 1 or more")
    return int(text)


def count_or_none(text: str) -> int:
    if not text.isdecimal() or int(text) > 10_000:
        raise argparse.ArgumentTypeError(f"found {quoted(text)}, expected a number of 0 or more")
    return int(text)


def port(text: str) -> int:
    if not text.isdecimal() or int(text) > 65535:
        raise argparse.ArgumentTypeError(f"found {quoted(text)}, expected a port, 0 to 65535")
    return int(text)


def execution(text: str) -> str:
    words = ("compile", "trace", "eager")
    if text not in words:
        raise argparse.ArgumentTypeError(
            f"found {quoted(text)}; {nearest(text, words)}choose among {', '.join(words)}"
        )
    return text


def program_format(text: str) -> str:
    if text not in FORMATS:
        raise argparse.ArgumentTypeError(
            f"found {quoted(text)}; {nearest(text, FORMATS)}choose among {', '.join(FORMATS)}"
        )
    return text


def list_name(text: str) -> str:
    if text not in LISTS:
        raise argparse.ArgumentTypeError(
            f"found {quoted(text)}; {nearest(text, LISTS)}choose among {', '.join(LISTS)}"
        )
    return text
