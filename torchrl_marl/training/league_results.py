"""What came out of a league's matches, by seat and stored player.

Shapes: R envs with stored players, T steps, S seats, K players.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from torchrl_marl.games import smoothed

__all__ = ["Results", "by_seat", "outcomes"]

_DECAY = 0.99
"""What a game counts for after each later one against the same player."""


class Results:
    """Wins, draws, games and returns of the policy that learns against each stored player.

    A game counts the less the more have been played since, as the policy changes.

    Args:
        n_seats (int): number S of seats that learn.
        n_players (int): number K of players.

    Shapes:
        - ``sums``: ``[4, S, K]`` float64: wins, draws, games, sum of returns

    Examples:
        >>> results = Results(1, 2)
        >>> new = torch.zeros(4, 1, 2, dtype=torch.float64)
        >>> new[0, 0, 1], new[2, 0, 1] = 3.0, 4.0
        >>> results.saw(new)
        >>> [round(x, 4) for x in results.win_rate[0].tolist()]
        [0.5, 0.6667]
    """

    def __init__(self, n_seats: int, n_players: int) -> None:
        self.sums = torch.zeros(4, n_seats, n_players, dtype=torch.float64)

    def saw(self, new: Tensor) -> None:
        """Takes in the sums of a batch, ``[4, S, K]``."""
        self.sums = self.sums * _DECAY ** new[2] + new

    def forget(self, player: int) -> None:
        """Begins anew with a player."""
        self.sums[:, :, player] = 0.0

    @property
    def win_rate(self) -> Tensor:
        """Win rate by seat and player, draws half, near 1/2 after few games; ``[S, K]``."""
        wins, draws, games, _ = self.sums
        return smoothed(wins, draws, games)

    @property
    def overall(self) -> Tensor:
        """Win rate against each player over all seats, ``[K]``."""
        wins, draws, games, _ = self.sums.sum(1)
        return smoothed(wins, draws, games)

    def standing(self, candidates: Tensor) -> Tensor:
        """Returns the mean return with each player, from 0, the worst, to 1; 1/2 if unknown.

        Args:
            candidates (Tensor): bool, the players that are compared, ``[K]``.

        Shapes:
            - returns: ``[S, K]``
        """
        games, total = self.sums[2], self.sums[3]
        known = (games > 0) & candidates
        mean = total / games.clamp_min(1e-12)
        low = torch.where(known, mean, torch.inf).amin(-1, keepdim=True)
        high = torch.where(known, mean, -torch.inf).amax(-1, keepdim=True)
        between = (mean - low) / (high - low).clamp_min(1e-12)
        return torch.where(known & (high > low), between, 0.5)

    def state_dict(self) -> dict[str, Any]:
        """Returns the state for a checkpoint."""
        return {"sums": self.sums}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores a saved state."""
        self.sums = state["sums"].double().cpu().clone()


def outcomes(returns: Tensor, done: Tensor, player: Tensor, seat: Tensor, n_players: int) -> Tensor:
    """Returns the sums of a batch: wins, draws, games and returns.

    Args:
        returns (Tensor): of each seat up to each step of an episode.
        done (Tensor): bool, where episodes end.
        player (Tensor): the stored player of each step, from 0.
        seat (Tensor): which seat learns in each env.
        n_players (int): number K of players.

    Shapes:
        - returns: ``[S, R, T]``; done, player: ``[R, T]``; seat: ``[R]``; returns ``[4, S, K]``

    Examples:
        >>> returns = torch.tensor([[[0.0, 1.0]], [[0.0, -1.0]]])
        >>> done = torch.tensor([[False, True]])
        >>> found = outcomes(returns, done, torch.tensor([[2, 2]]), torch.tensor([1]), 3)
        >>> found[:, 1, 2].tolist()  # the second seat learns, and lost to player 2
        [0.0, 0.0, 1.0, -1.0]
    """
    n_seats = len(returns)
    returns = returns.double()
    index = seat.view(1, -1, 1).expand(1, *done.shape)
    own = returns.gather(0, index)[0]
    others = (returns.sum(0) - own) / max(n_seats - 1, 1)
    close = torch.isclose(own, others, rtol=1e-6, atol=1e-6)
    found = torch.stack([(own > others) & ~close, close, torch.ones_like(close), own]).double()
    found = torch.where(done, found, 0.0).flatten(1)
    place = (seat.unsqueeze(-1) * n_players + player).flatten()
    sums = found.new_zeros(4, n_seats * n_players).index_add(1, place, found)
    return sums.view(4, n_seats, n_players).cpu()


def by_seat(totals: Mapping[str, Tensor], seats: Sequence[Mapping[str, Sequence[int]]]) -> Tensor:
    """Returns the return of each seat: the mean over its agents, ``[S, ...]``.

    Args:
        totals (mapping): group -> the mean return of its agents.
        seats (sequence of mapping): group -> agents, of each seat.
    """
    found = []
    for seat in seats:
        n_agents = sum(map(len, seat.values()))
        found.append(sum(totals[name] * (len(own) / n_agents) for name, own in seat.items()))
    return torch.stack(found)  # type: ignore[arg-type]
