"""Whom to play next: win rates from few games, and prioritized fictitious self-play.

Shapes: B any batch dims, S players to choose among.
"""

from __future__ import annotations

import torch
from torch import Tensor

from torchrl_marl.errors import nearest, quoted

__all__ = ["WEIGHTINGS", "pfsp", "smoothed"]

WEIGHTINGS = {
    "squared": lambda rate: (1 - rate) ** 2,
    "linear": lambda rate: 1 - rate,
    "variance": lambda rate: rate * (1 - rate),
}
"""What a win rate against a player weighs, by name: hard opponents, or equal ones (variance)."""


def smoothed(wins: Tensor, draws: Tensor, games: Tensor) -> Tensor:
    """Returns win rates that are near 1/2 where little was played.

    ``(wins + draws / 2 + 1) / (games + 2)``.

    Shapes:
        - wins, draws, games: ``[*B]``, counts that may have decayed; returns ``[*B]``, float64

    Reference: Laplace's rule of succession.

    Examples:
        >>> smoothed(torch.tensor([0, 8]), torch.tensor([0, 2]), torch.tensor([0, 10])).tolist()
        [0.5, 0.8333333333333334]
    """
    return (wins.double() + draws.double() / 2 + 1) / (games.double() + 2)


def pfsp(win_rate: Tensor, weighting: str = "squared", candidates: Tensor | None = None) -> Tensor:
    """Returns with which probability each player is drawn as the opponent.

    Args:
        win_rate (Tensor): of the one who learns, against each player.
        weighting (str): one of :data:`WEIGHTINGS`.
        candidates (Tensor, optional): bool, who may be drawn; all by default.

    Shapes:
        - win_rate: ``[*B, S]``, 0 to 1; candidates: ``[*B, S]``
        - returns: ``[*B, S]``, float64, sums to 1; even where every weight is 0

    Raises:
        ValueError: an unknown weighting.

    Reference: Vinyals et al., 2019, https://doi.org/10.1038/s41586-019-1724-z (methods,
    prioritized fictitious self-play).

    Examples:
        >>> pfsp(torch.tensor([0.5, 1.0, 0.0])).tolist()
        [0.2, 0.0, 0.8]
        >>> pfsp(torch.tensor([1.0, 1.0])).tolist()
        [0.5, 0.5]
    """
    if weighting not in WEIGHTINGS:
        raise ValueError(
            f"unknown weighting {quoted(weighting)}; {nearest(weighting, WEIGHTINGS)}"
            f"expected one of {', '.join(WEIGHTINGS)}."
        )
    rate = win_rate.double()
    may = torch.ones_like(rate, dtype=torch.bool) if candidates is None else candidates
    # Rates of those who may not be drawn may hold anything.
    weight = torch.where(may, WEIGHTINGS[weighting](rate), 0.0)
    total = weight.sum(-1, keepdim=True)
    even = may.double() / may.sum(-1, keepdim=True)
    return torch.where(total > 0, weight / total.clamp_min(torch.finfo(rate.dtype).tiny), even)
