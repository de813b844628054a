"""Settings of a league: whom the policy that learns plays against, or with."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Any

from torchrl_marl.errors import ConfigError, quoted
from torchrl_marl.settings import Count, OneOf, Range, Share

__all__ = ["LeagueConfig"]

MATCHES = {
    "none": "there is no league",
    "self": "the policy itself; players are stored, and nobody plays them",
    "latest": "the player that was stored last",
    "uniform": "every stored player as often (fictitious play)",
    "pfsp": "those the more that win more (prioritized fictitious self-play)",
    "nash": "as the equilibrium of all stored players plays (PSRO)",
}
"""Who is drawn as an opponent or a partner."""


@dataclass(frozen=True)
class LeagueConfig:
    """Stored players that act in some envs and seats instead of the policy that learns."""

    opponents: Annotated[str, OneOf(MATCHES)] = "none"
    """Who the opponents are, in worlds of several sides."""
    partners: Annotated[
        str, OneOf({name: words for name, words in MATCHES.items() if name != "nash"})
    ] = "none"
    """Who the partners are, of one team (fictitious co-play)."""
    self_play: Annotated[float, Range(0, 1)] = 0.5
    """Share of the envs in which all seats learn; in the others each seat learns as often."""
    weighting: Annotated[
        str,
        OneOf(
            {
                "squared": "(1 - w) ** 2 of a win rate w: the hardest most",
                "linear": "1 - w",
                "variance": "w * (1 - w): the equal ones most",
            }
        ),
    ] = "squared"
    """How ``pfsp`` weighs players; of partners, w is the return from 0, the worst, to 1."""
    slots: Annotated[int, Range(1, 1000)] = 16
    """Stored players that may be drawn at once; who is drawn least gives way to a new one."""
    snapshot_every: Count | None = 100_000
    """Frames between two players that are stored; null: those of ``start_with`` alone."""
    snapshot_at: Share | None = None
    """Win rate against every stored player at which the next one is stored, before
    ``snapshot_every`` frames are over; null: by frames alone."""
    exploiters: Annotated[int, Range(0)] = 0
    """More policies that learn, each only against the one that is trained. One is stored, and
    begins anew as a copy of that, when it wins ``snapshot_at`` of its games, or 0.7, and after
    ``snapshot_every`` frames at the latest."""
    exploited: Share = 0.25
    """Share of the envs that all exploiters have together."""
    seats: dict[str, Any] = field(default_factory=dict)
    """Seat -> groups, or agents of one group, that one player has; empty: each group, or each
    agent where there is one group."""
    start_with: list[str] = field(default_factory=list)
    """Players from the start: run folders, files of stored players or folders of such, ``random``,
    ``heuristic``; empty: the untrained policy."""

    @property
    def enabled(self) -> bool:
        """Whether there is a league."""
        return self.match != "none"

    @property
    def match(self) -> str:
        """Who is drawn, as opponents or as partners."""
        return self.partners if self.opponents == "none" else self.opponents

    def check(self, at: str = "") -> None:
        """Refuses what does not fit together.

        Args:
            at (str): what stands before the names in messages.

        Raises:
            ConfigError: naming the settings and the fix.
        """
        if not self.enabled and self.start_with:
            raise ConfigError(
                f"{at}start_with is {quoted(self.start_with)}, but {at}opponents and {at}partners "
                f"are none, so that nobody plays them; use {at}opponents=uniform, or so."
            )
        if self.match == "self" and self.snapshot_at is not None:
            raise ConfigError(
                f"{at}snapshot_at is {self.snapshot_at:g}, but nobody plays stored players; use "
                f"{at}snapshot_at=null."
            )
        twice = [name for i, name in enumerate(self.start_with) if name in self.start_with[:i]]
        if twice:
            raise ConfigError(
                f"{at}start_with has {quoted(twice[0])} twice, expected each player once."
            )
        if "none" not in (self.opponents, self.partners):
            raise ConfigError(
                f"{at}opponents is {quoted(self.opponents)} and {at}partners "
                f"{quoted(self.partners)}, expected one of them to be none; use {at}partners=none."
            )
        if self.enabled and self.match != "self" and self.self_play == 1.0:
            raise ConfigError(
                f"{at}self_play is 1, which leaves no envs to stored players; use "
                f"{at}self_play=0.5, or {at}opponents=self."
            )
        if self.enabled and self.snapshot_every is None and not self.start_with:
            raise ConfigError(
                f"{at}snapshot_every is null and {at}start_with is empty, so that nobody is "
                f"stored; use {at}snapshot_every=100000, or name players."
            )
        if self.exploiters and (self.opponents in ("none", "self") or self.snapshot_every is None):
            raise ConfigError(
                f"{at}exploiters is {self.exploiters}, expected 0 where {at}opponents is "
                f"{quoted(self.opponents)} and {at}snapshot_every {quoted(self.snapshot_every)}: "
                f"they are stored for others to play; use {at}opponents=pfsp."
            )
        if self.snapshot_every is None and self.snapshot_at is not None:
            raise ConfigError(
                f"{at}snapshot_at is {self.snapshot_at:g}, but {at}snapshot_every is null; give "
                "the frames after which a player is stored at the latest."
            )
