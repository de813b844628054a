"""Who is drawn in a league.

Shapes: S seats that learn, K players.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from torchrl_marl.games import nash, pfsp
from torchrl_marl.training.league_config import LeagueConfig

__all__ = ["matchmaking"]


def matchmaking(
    settings: LeagueConfig,
    rate: Tensor,
    may: Tensor,
    frames: Sequence[int],
    payoff: Callable[[Sequence[int]], Tensor],
) -> Tensor:
    """Returns with which probability each player is drawn, by seat that learns.

    Args:
        settings (LeagueConfig): how.
        rate (Tensor): how well the policy does against, or with, each player, 0 to 1.
        may (Tensor): bool, who may be drawn.
        frames (sequence of int): when each was stored; for ``latest``.
        payoff (callable): returns what the players at some places earn from each other; for
            ``nash``.

    Shapes:
        - rate: ``[S, K]``; may: ``[K]``; returns ``[S, K]``, float64, each row sums to 1

    Examples:
        >>> rate = torch.tensor([[0.5, 0.0, 1.0]])
        >>> may = torch.tensor([True, True, False])
        >>> def chances(match):
        ...     settings = LeagueConfig(opponents=match)
        ...     return matchmaking(settings, rate, may, [0, 9, 5], lambda _: None).tolist()
        >>> chances("uniform"), chances("latest"), chances("pfsp")
        ([[0.5, 0.5, 0.0]], [[0.0, 1.0, 0.0]], [[0.2, 0.8, 0.0]])
    """
    found = torch.zeros(rate.shape, dtype=torch.float64)
    places = may.nonzero().squeeze(1).tolist()
    if settings.match == "latest":
        found[:, max(places, key=lambda i: (frames[i], i))] = 1.0
        return found
    if settings.match == "pfsp":
        return pfsp(rate, settings.weighting, may.expand(rate.shape))
    if settings.match == "nash":
        equilibrium = nash(payoff(places))
        # Against the seat that learns plays the other one's side of the equilibrium.
        found[0, places], found[1, places] = equilibrium.column, equilibrium.row
        return found
    found[:, places] = 1.0 / len(places)
    return found
