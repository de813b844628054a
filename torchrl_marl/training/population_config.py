"""Settings of a population: how many members, and what differs between them."""

from __future__ import annotations

import math
import random
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from torchrl_marl.errors import ConfigError, nearest, quoted
from torchrl_marl.learners.population_config import VARYING
from torchrl_marl.settings import Count

__all__ = ["PopulationConfig"]

_SECTION = "learner"


@dataclass(frozen=True)
class PopulationConfig:
    """Members that are trained side by side, in one program."""

    size: Count = 1
    """Number of members, each with ``env.num_envs`` envs, ``total_frames`` and a run folder of its
    own, of the seeds ``seed``, ``seed + 1`` and so on; 1: an ordinary run."""
    vary: dict[str, Any] = field(default_factory=dict)
    """Setting of the learner -> a list with its value in each member, or a range,
    ``{low: 1e-4, high: 1e-2, log: true}``, over which the members are spread."""

    share_replay: bool = False
    """All members learn from the steps of all; only where steps are stored."""

    def check(self, at: str = "") -> None:
        """Refuses settings that cannot differ, and values that are none or not enough.

        Args:
            at (str): what stands before the names in messages.

        Raises:
            ConfigError: naming them.
        """
        if self.vary and self.size == 1:
            raise ConfigError(f"{at}vary is given, but {at}size is 1; use {at}size=8, or so.")
        for name, given in self._given().items():
            for word in (name, *(given if isinstance(given, Mapping) else ())):
                if ":" in str(word):  # YAML takes the whole for a key
                    raise ConfigError(
                        f"{at}vary has {word!r}, expected a space after each colon: "
                        "{low: 1e-4, high: 1e-2, log: true}."
                    )
            self._check_name(f"{at}vary", name)
            self._check_values(f"{at}vary.{name}", given)

    def values(self, seed: int) -> dict[str, list[float]]:
        """Returns the value of each member, by name of a learner's setting.

        Ranges are cut into as many values at equal distances (of logarithms, if ``log``), which
        the members get in an order of their own for each setting but the first.

        Args:
            seed (int): of the orders.

        Examples:
            >>> lr = {"low": 0.1, "high": 10.0, "log": True}
            >>> PopulationConfig(3, {"learner.lr": lr}).values(seed=0)
            {'lr': [0.1, 1.0, 10.0]}
        """
        found: dict[str, list[float]] = {}
        for i, (name, given) in enumerate(self._given().items()):
            own = list(map(float, given)) if isinstance(given, list) else _spread(given, self.size)
            if i and not isinstance(given, list):
                random.Random(f"{seed} {name}").shuffle(own)
            found[name.removeprefix(f"{_SECTION}.")] = own
        return found

    def bounds(self) -> dict[str, tuple[float, float, bool]]:
        """Returns the range of each setting that differs: its ends, and whether it is logarithmic.

        Examples:
            >>> PopulationConfig(2, {"learner.gamma": [0.9, 0.99]}).bounds()
            {'gamma': (0.9, 0.99, False)}
        """
        found = {}
        for name, given in self._given().items():
            limits = (min(given), max(given)) if isinstance(given, list) else None
            low, high = limits or (given["low"], given["high"])
            logarithmic = limits is None and bool(given.get("log", False))
            found[name.removeprefix(f"{_SECTION}.")] = (float(low), float(high), logarithmic)
        return found

    def _given(self) -> dict[str, Any]:
        return _flat(self.vary)

    def _check_name(self, at: str, name: str) -> None:
        section, _, setting = name.partition(".")
        if section != _SECTION or setting not in VARYING:
            known = [f"{_SECTION}.{one}" for one in VARYING]
            raise ConfigError(
                f"{at} has {name!r}; {nearest(name, known)}expected one of {', '.join(known)}; "
                "what changes shapes cannot differ by member."
            )

    def _check_values(self, at: str, given: Any) -> None:
        if isinstance(given, list):
            if len(given) != self.size or not all(map(_is_number, given)):
                raise ConfigError(
                    f"{at} is {quoted(given)}, expected {self.size} numbers, one for each member "
                    "(population.size)."
                )
            return
        if not isinstance(given, Mapping) or not {"low", "high"} <= set(given) <= {
            "low",
            "high",
            "log",
        }:
            raise ConfigError(
                f"{at} is {quoted(given)}, expected a list of {self.size} numbers, or "
                "{low: ..., high: ...}."
            )
        low, high = given["low"], given["high"]
        logarithmic = given.get("log", False)
        if not (_is_number(low) and _is_number(high) and low < high):
            raise ConfigError(
                f"{at} goes from {quoted(low)} to {quoted(high)}, expected two numbers, the first "
                "the smaller."
            )
        if not isinstance(logarithmic, bool) or (logarithmic and low <= 0):
            raise ConfigError(
                f"{at} begins at {quoted(low)} with log: {quoted(logarithmic)}, expected more than "
                "0 with log: true; use log: false."
            )


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def _flat(nested: Mapping[str, Any], at: str = "") -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in nested.items():
        if isinstance(value, Mapping) and not {"low", "high", "log"} & set(value):
            found |= _flat(value, f"{at}{key}.")
        else:
            found[f"{at}{key}"] = value
    return found


def _spread(given: Mapping[str, Any], size: int) -> list[float]:
    low, high = given["low"], given["high"]
    shares = [i / max(size - 1, 1) for i in range(size)]
    if not given.get("log"):
        return [low + share * (high - low) for share in shares]
    return [low * (high / low) ** share for share in shares]
