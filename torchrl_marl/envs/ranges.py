"""Ranges of values that each new episode draws from. Imports torch only to draw."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from numbers import Real
from typing import TYPE_CHECKING, Any

from torchrl_marl.errors import ConfigError, nearest, quoted

if TYPE_CHECKING:
    import torch
    from torch import Tensor

__all__ = ["EVERYWHERE", "IsRanges", "ValueRange", "read_known_ranges", "read_ranges"]

EVERYWHERE = ("observation_noise", "observation_delay", "action_noise", "action_delay")
"""Names that all environments take, besides their own parameters."""
_LOG = "log"


@dataclass(frozen=True)
class ValueRange:
    """Range of a value, with a uniform or a log-uniform distribution.

    Args:
        low, high (float): smallest and largest value.
        log (bool): True if the logarithm of the value is uniform.

    Examples:
        >>> ValueRange.read("mass", [0.5, 2.0, "log"])
        ValueRange(low=0.5, high=2.0, log=True)
        >>> ValueRange.read("mass", 1.2).is_fixed
        True
    """

    low: float
    high: float
    log: bool = False

    @property
    def is_fixed(self) -> bool:
        """True if the range has only one value, which needs no random numbers."""
        return self.low == self.high

    @classmethod
    def read(cls, name: str, value: Any) -> ValueRange:
        """Reads a number, ``[low, high]`` or ``[low, high, log]``.

        Args:
            name (str): name of the value, for messages.
            value (number, list or ValueRange): range, or a fixed value.

        Raises:
            ConfigError: the value has another form, or the bounds are in the wrong order.
        """
        if isinstance(value, cls):
            return value
        parts = list(value) if isinstance(value, (list, tuple)) else [value, value]
        log = parts[2:] == [_LOG]
        ends = parts[:2] if log else parts
        if len(ends) != 2 or not all(map(_is_number, ends)) or not ends[0] <= ends[1]:
            raise ConfigError(
                f"{name} is {quoted(value)}, expected a number, [low, high] or [low, high, log]; "
                f"use for example {name}={_example_range(name)}."
            )
        if log and ends[0] <= 0:
            raise ConfigError(
                f"{name} is {quoted(value)}, expected positive bounds with log; leave log out."
            )
        return cls(float(ends[0]), float(ends[1]), log)

    def draw(self, shape: Sequence[int], device: torch.device | str | None = None) -> Tensor:
        """Draws values with torch's active generator; a fixed range draws nothing.

        Examples:
            >>> ValueRange(2.0, 2.0).draw((3,))
            tensor([2., 2., 2.])
        """
        import torch

        if self.is_fixed:
            return torch.full(tuple(shape), self.low, device=device)
        low, high, fraction = self.low, self.high, torch.rand(tuple(shape), device=device)
        if self.log:
            return torch.exp(math.log(low) + math.log(high / low) * fraction).clamp(low, high)
        return low + (high - low) * fraction


def _is_number(x: Any) -> bool:
    return isinstance(x, Real) and not isinstance(x, bool) and math.isfinite(x)


def _example_range(name: str) -> str:
    if name.endswith("_delay"):
        return "[0,2]"
    return "[0,0.1]" if name.endswith("_noise") else "[0.8,1.2]"


def read_ranges(ranges: Mapping[str, Any], at: str = "") -> dict[str, ValueRange]:
    """Reads several ranges by name.

    Args:
        ranges (mapping): name -> number, ``[low, high]`` or ``[low, high, log]``.
        at (str): prefix of the names in messages.

    Raises:
        ConfigError: as for :meth:`ValueRange.read`.
    """
    return {name: ValueRange.read(f"{at}{name}", value) for name, value in ranges.items()}


def read_known_ranges(
    owner: str, ranges: Mapping[str, Any], known: Sequence[str]
) -> dict[str, ValueRange]:
    """Reads ranges of an environment's parameters.

    Args:
        owner (str): name of the environment, for messages.
        ranges (mapping): name of a parameter -> number, ``[low, high]`` or ``[low, high, log]``.
        known (sequence of str): names of the environment's parameters.

    Raises:
        ConfigError: unknown parameter or malformed range; the message names the known parameters.
    """
    for name in ranges:
        if name not in known:
            raise ConfigError(
                f"{owner} has no parameter {quoted(name)} to randomize; "
                f"{nearest(str(name), [*known, *EVERYWHERE])}it has "
                f"{', '.join(known) or 'none'}; the setting env.randomize and randomized(env, ...) "
                f"also take {', '.join(EVERYWHERE)}."
            )
    return read_ranges(ranges)


class IsRanges:
    """Rule for a setting that is a mapping of names to ranges."""

    def misfit(self, key: str, value: Any, default: Any) -> str | None:
        """Returns an error message for the first entry that is not a range."""
        try:
            read_ranges(value, f"{key}.")
        except ConfigError as error:
            return str(error)
        return None
