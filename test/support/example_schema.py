"""A schema with all kinds of settings: sections, tags, overrides, arguments, former names."""

from dataclasses import dataclass, field
from typing import Annotated, Any

import pytest

from torchrl_marl.errors import ConfigError
from torchrl_marl.settings import (
    Arguments,
    Count,
    Formerly,
    OneOf,
    Overrides,
    Positive,
    Range,
    ReadWhere,
    Share,
    Tagged,
    check,
    parse_overrides,
    read,
    unread,
)


@dataclass(frozen=True)
class Way:
    method: str = ""
    """Which way."""
    far: Count = 2
    """How far."""
    pause: Count = 1
    """Rests."""


@dataclass(frozen=True)
class Walk(Way):
    method: str = "walk"
    """Which way."""
    steps: Count = 3
    """How often."""


@dataclass(frozen=True)
class Ride(Way):
    method: str = "ride"
    """Which way."""
    steps: Count = 1
    """How often."""
    pause: Count = 5
    """Rests."""


@dataclass(frozen=True)
class Fast:
    method: str = "fast"
    """Which way."""
    speed: Positive = 1.0
    """How fast."""
    steps: Count = 3
    """How often."""


@dataclass(frozen=True)
class Slow:
    method: str = "slow"
    """Which way."""
    patience: Count = 5
    """How long."""
    steps: Count = 3
    """How often."""


class Methods:
    def words(self):
        return {"fast": "at once", "quick": "at once, too", "slow": "later"}

    def schema(self, word):
        return {"fast": Fast, "quick": Fast, "slow": Slow}.get(word)


@dataclass(frozen=True)
class Cars:
    wheels: Annotated[int, Range(2, 8), Formerly("wheels")] = 4
    """Number of wheels."""
    spare: Annotated[bool, ReadWhere("wheels", 2, but=True)] = False
    """One more wheel."""


class Vehicles:
    def words(self):
        return {"car": "on the road", "boat": "on the water"}

    def schema(self, word):
        return Cars if word == "car" else None


@dataclass(frozen=True)
class Memory:
    cell: Annotated[str, OneOf({"none": "forgets", "gru": "remembers"})] = "none"
    """What remembers."""
    size: Annotated[Count, ReadWhere("cell", "gru"), Formerly("width")] = 8
    """How much."""


@dataclass(frozen=True)
class World:
    vehicle: Annotated[str, OneOf(Vehicles().words, form="module:Class")] = "car"
    """What drives."""
    kwargs: Annotated[dict[str, Any], Arguments("vehicle", Vehicles())] = field(
        default_factory=dict
    )
    """Arguments of the vehicle."""


@dataclass(frozen=True)
class Schema:
    seed: int = 0
    """Start."""
    name: str = "x"
    """What it is called."""
    memory: Memory = field(default_factory=Memory)
    """What is remembered."""
    world: World = field(default_factory=World)
    """Where."""
    learner: Annotated[Fast, Tagged("method", Methods())] = field(default_factory=Fast)
    """How."""
    groups: Annotated[dict[str, Any], Overrides("learner", example="steps")] = field(
        default_factory=dict
    )
    """Who differs."""
    rate: Share | None = None
    """How much."""

    def check(self, at="", skip=()):
        if "world" not in skip and self.seed > 9:
            raise ConfigError(f"{at}seed is too large.")


def refusal(*texts):
    with pytest.raises(ConfigError) as error:
        config = read(Schema, parse_overrides(texts))
        check(config)
        for text in unread(config).values():
            raise ConfigError(text)
    return str(error.value)
