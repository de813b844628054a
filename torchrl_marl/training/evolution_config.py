"""Settings of a population's evolution."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated

from torchrl_marl.errors import ConfigError, quoted
from torchrl_marl.settings import OneOf, Range, ReadWhere

__all__ = ["EvolutionConfig"]

_EVOLVING = ReadWhere("method", "none", but=True)
_TOURNAMENT = ReadWhere("method", "tournament")


@dataclass(frozen=True)
class EvolutionConfig:
    """Which members are replaced by copies of others, and how copies differ."""

    method: Annotated[
        str,
        OneOf(
            {
                "none": "nobody is replaced",
                "pbt": "the worst become copies of the best (population-based training)",
                "tournament": "every place goes to the best of a few that are drawn",
            }
        ),
    ] = "none"
    """Who is copied to whom."""
    every_frames: Annotated[int, Range(1), _EVOLVING] = 200_000
    """Env steps of a member between two selections."""
    fitness: Annotated[
        str,
        _EVOLVING,
        OneOf(
            {
                "return": "mean return of the episodes of training that began since the last one",
                "evaluation": "mean return of an evaluation",
                "rating": "Bradley-Terry rating of games between members, in worlds of two sides",
            }
        ),
    ] = "return"
    """What is compared."""
    least_episodes: Annotated[int, Range(1), _EVOLVING, ReadWhere("fitness", "return")] = 10
    """Episodes that every member must have had; else it is selected later."""
    worst: Annotated[float, Range(0, 0.5), ReadWhere("method", "pbt")] = 0.25
    """Share of the members that ``pbt`` replaces."""
    drawn: Annotated[int, Range(1), _TOURNAMENT] = 2
    """Members among which ``tournament`` takes the best."""
    elite: Annotated[int, Range(0), _TOURNAMENT] = 1
    """The best members that ``tournament`` leaves as they are."""
    factors: Annotated[list[float], _EVOLVING] = field(default_factory=lambda: [0.8, 1.25])
    """A copy's varied settings are its parent's times one of these."""
    resample: Annotated[float, Range(0, 1), _EVOLVING] = 0.25
    """Chance that a copy's setting is drawn anew from its range instead."""

    def check(self, at: str = "") -> None:
        """Refuses factors that are none.

        Args:
            at (str): what stands before the names in messages.

        Raises:
            ConfigError: naming them.
        """
        if not self.factors or any(factor <= 0 for factor in self.factors):
            raise ConfigError(
                f"{at}factors is {quoted(self.factors)}, expected numbers above 0; use [0.8, 1.25]."
            )
