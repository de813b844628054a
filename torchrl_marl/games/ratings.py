"""What counts of games say: whom to play next, win rates, and ratings with intervals.

Shapes: A players, S players to choose among, B any batch dims.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from torchrl_marl.errors import nearest, quoted

__all__ = ["WEIGHTINGS", "Ratings", "bradley_terry", "interval", "pfsp", "smoothed"]

_ELO = 400 / math.log(10)
"""Points of a unit of log-odds: 400 points are odds of ten to one."""
_LONGEST = 2.0
"""Longest step of a rating's log-odds: the likelihood is flat far from its maximum."""

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


class Ratings(NamedTuple):
    """Ratings on Elo's scale and their standard errors, ``[A]`` each."""

    rating: Tensor
    error: Tensor

    def interval(self, level: float = 0.95) -> tuple[Tensor, Tensor]:
        """Returns the lower and the upper end of the ratings' confidence intervals."""
        reach = _normal(level) * self.error
        return self.rating - reach, self.rating + reach


def interval(wins: Tensor, games: Tensor, level: float = 0.95) -> tuple[Tensor, Tensor]:
    """Returns the lower and the upper end of win rates' confidence intervals (Wilson's).

    Args:
        wins (Tensor): a draw counts as half a win.
        games (Tensor): how many were played.
        level (float): share of such intervals that hold the true rate.

    Shapes:
        - wins, games: ``[*B]``; returns ``[*B]`` each, float64; 0 and 1 where none was played

    Reference: Wilson, 1927, https://doi.org/10.1080/01621459.1927.10502953.

    Examples:
        >>> low, high = interval(torch.tensor([5.0]), torch.tensor([10.0]))
        >>> round(low.item(), 4), round(high.item(), 4)
        (0.2366, 0.7634)
    """
    wins, games, z = wins.double(), games.double(), _normal(level)
    rate = wins / games.clamp_min(1)
    spread = z * (games * rate * (1 - rate) + z**2 / 4).sqrt()
    middle, total = wins + z**2 / 2, games + z**2
    return ((middle - spread) / total).clamp_min(0), ((middle + spread) / total).clamp_max(1)


def bradley_terry(
    wins: Tensor, draws: Tensor | None = None, *, prior: float = 1.0, anchor: int | None = None
) -> Ratings:
    r"""Returns the maximum-likelihood ratings of players who met each other.

    .. math:: P(i \text{ beats } j) = \frac{1}{1 + 10^{(r_j - r_i) / 400}}

    Nothing depends on the order of the games. Where players win in a circle, ratings depend on who
    met whom; see :func:`nash_average`.

    Args:
        wins (Tensor): how often each player beat each other.
        draws (Tensor, optional): how often they drew, symmetric; half a win for both.
        prior (float): games, half of them won, that each player is credited with against an
            average one: who has won or lost all still has a finite rating.
        anchor (int, optional): the player whose rating is 0, without error, and from whom the
            errors count; otherwise the mean of all ratings is.

    Shapes:
        - wins, draws: ``[A, A]``, wins of the row's player; the diagonal does not count

    Returns:
        Ratings: rating and standard error, ``[A]`` each.

    Raises:
        ValueError: no square matrix, or no ratings are most likely without a prior.

    Reference: Hunter, 2004, https://doi.org/10.1214/aos/1079120141 (the likelihood; here it is
    maximized by Newton's method).

    Examples:
        >>> wins = torch.tensor([[0, 10], [1, 0]])
        >>> [round(rating) for rating in bradley_terry(wins, prior=0.0).rating.tolist()]
        [200, -200]
    """
    won = _won(wins, draws)
    games, n = won + won.mT, len(won)
    if prior <= 0 and not bool(_reached(won).all()):
        raise ValueError(
            "no ratings are most likely: some players never won, or never lost, against the "
            "others; give a prior above 0."
        )
    theta, gauge = won.new_zeros(n), torch.ones_like(won) / n
    for _ in range(1000):
        chance = (theta.unsqueeze(1) - theta).sigmoid()
        average = theta.sigmoid()
        slope = (won - games * chance).sum(1) + prior * (0.5 - average)
        information = -games * chance * (1 - chance)
        information.diagonal().sub_(information.sum(1))
        information.diagonal().add_(prior * average * (1 - average))
        # Without a prior a shift of all ratings changes nothing: the gauge keeps their sum.
        inverse = torch.linalg.inv(information + (gauge if prior <= 0 else 0.0))
        step = inverse @ slope
        theta = theta + step * (_LONGEST / step.abs().max().clamp_min(_LONGEST))
        if bool(step.abs().max() < 1e-11):
            break
    center = torch.eye(n, dtype=won.dtype, device=won.device)
    center = center - (gauge if anchor is None else center[anchor])
    variance = (center @ inverse @ center.mT).diagonal()
    return Ratings(_ELO * (center @ theta), _ELO * variance.clamp_min(0).sqrt())


def _won(wins: Tensor, draws: Tensor | None) -> Tensor:
    """Returns wins and half the draws without the diagonal, checked."""
    if wins.ndim != 2 or wins.shape[0] != wins.shape[1]:
        raise ValueError(f"wins has shape {list(wins.shape)}, expected [players, players].")
    if draws is not None and draws.shape != wins.shape:
        raise ValueError(f"draws has shape {list(draws.shape)}, expected {list(wins.shape)}.")
    won = wins.double() if draws is None else wins.double() + draws.double() / 2
    return won - won.diagonal().diag()


def _reached(won: Tensor) -> Tensor:
    """Returns whether a chain of wins leads from each player to each other, ``[A, A]``."""
    reached = (won > 0).double() + torch.eye(len(won), dtype=torch.float64, device=won.device)
    for _ in range(len(won).bit_length()):
        reached = (reached @ reached).clamp_max(1)
    return reached > 0


def _normal(level: float) -> float:
    """Returns how many standard errors an interval of a level reaches to each side."""
    return torch.special.ndtri(torch.tensor((1 + level) / 2, dtype=torch.float64)).item()
