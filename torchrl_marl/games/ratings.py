"""Statistics of game counts: matchmaking, win rates, ratings and confidence intervals.

Shapes: A players, S players that may be chosen as opponent, B any batch dims.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from torchrl_marl.errors import nearest, quoted

__all__ = ["WEIGHTINGS", "Ratings", "bradley_terry", "interval", "pfsp", "smoothed"]

_ELO_SCALE = 400 / math.log(10)
"""Elo points per unit of log-odds: 400 points are odds of ten to one."""
_MAX_STEP = 2.0
"""Largest step of the log-odds, since the likelihood is flat far from its maximum."""

WEIGHTINGS = {
    "squared": lambda rate: (1 - rate) ** 2,
    "linear": lambda rate: 1 - rate,
    "variance": lambda rate: rate * (1 - rate),
}
"""Weight of an opponent by win rate against it: prefer hard or, by variance, equal opponents."""


def smoothed(wins: Tensor, draws: Tensor, games: Tensor) -> Tensor:
    """Returns win rates smoothed towards 1/2, most strongly for players with few games.

    The formula is ``(wins + draws / 2 + 1) / (games + 2)``.

    Shapes:
        - wins, draws, games: ``[*B]``, counts that may have decayed; returns ``[*B]``, float64

    Reference: Laplace's rule of succession.

    Examples:
        >>> smoothed(torch.tensor([0, 8]), torch.tensor([0, 2]), torch.tensor([0, 10])).tolist()
        [0.5, 0.8333333333333334]
    """
    return (wins.double() + draws.double() / 2 + 1) / (games.double() + 2)


def pfsp(win_rate: Tensor, weighting: str = "squared", candidates: Tensor | None = None) -> Tensor:
    """Returns the probability with which each player is drawn as the opponent.

    Args:
        win_rate (Tensor): win rate of the learning player against each player.
        weighting (str): name of a weighting in :data:`WEIGHTINGS`.
        candidates (Tensor, optional): mask of the players that may be drawn; default: all.

    Shapes:
        - win_rate: ``[*B, S]``, 0 to 1; candidates: ``[*B, S]``
        - returns: ``[*B, S]``, float64, sums to 1; uniform if every weight is 0

    Raises:
        ValueError: the weighting is unknown, or no player may be drawn.

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
    if not bool(may.any(-1).all()):
        raise ValueError("no player may be drawn, expected one or more candidates in each row.")
    # Win rates against players that may not be drawn can be any value.
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
        reach = _normal_quantile(level) * self.error
        return self.rating - reach, self.rating + reach


def interval(wins: Tensor, games: Tensor, level: float = 0.95) -> tuple[Tensor, Tensor]:
    """Returns the lower and the upper end of win rates' confidence intervals (Wilson's).

    Args:
        wins (Tensor): numbers of wins; a draw counts as half a win.
        games (Tensor): numbers of games, which may have decayed below one.
        level (float): confidence level.

    Shapes:
        - wins, games: ``[*B]``; returns two tensors ``[*B]``, float64; 0 and 1 where there are no
          games

    Reference: Wilson, 1927, https://doi.org/10.1080/01621459.1927.10502953.

    Examples:
        >>> low, high = interval(torch.tensor([5.0]), torch.tensor([10.0]))
        >>> round(low.item(), 4), round(high.item(), 4)
        (0.2366, 0.7634)
    """
    wins, games, z = wins.double(), games.double(), _normal_quantile(level)
    rate = wins / games.where(games > 0, 1.0)
    spread = z * (games * rate * (1 - rate) + z**2 / 4).sqrt()
    middle, total = wins + z**2 / 2, games + z**2
    return ((middle - spread) / total).clamp_min(0), ((middle + spread) / total).clamp_max(1)


def bradley_terry(
    wins: Tensor, draws: Tensor | None = None, *, prior: float = 1.0, anchor: int | None = None
) -> Ratings:
    r"""Returns the maximum-likelihood Bradley-Terry ratings of players, on Elo's scale.

    .. math:: P(i \text{ beats } j) = \frac{1}{1 + 10^{(r_j - r_i) / 400}}

    The order of the games does not matter. If players beat each other in a cycle, ratings depend on
    the pairings; see :func:`nash_average`.

    Args:
        wins (Tensor): number of wins of each player against each other player.
        draws (Tensor, optional): number of draws, a symmetric matrix; a draw counts as half a win
            for each of the two players.
        prior (float): number of virtual games of each player against an average player; half of
            them are won. So the rating of a player that only won or only lost stays finite.
        anchor (int, optional): index of a player whose rating is fixed at 0, without error; errors
            of other players are then relative to this player. By default the mean rating is 0.

    Shapes:
        - wins, draws: ``[A, A]``, wins of the row player; the diagonal is ignored

    Returns:
        Ratings: rating and standard error, ``[A]`` each.

    Raises:
        ValueError: ``wins`` is not a square matrix, or, without a prior, the likelihood has no
            maximum.

    Reference: Hunter, 2004, https://doi.org/10.1214/aos/1079120141 (the likelihood; here it is
    maximized by Newton's method).

    Examples:
        >>> wins = torch.tensor([[0, 10], [1, 0]])
        >>> [round(rating) for rating in bradley_terry(wins, prior=0.0).rating.tolist()]
        [200, -200]
    """
    won = _count_wins(wins, draws)
    games, n = won + won.mT, len(won)
    if prior <= 0 and not bool(_win_chains(won).all()):
        raise ValueError(
            "the likelihood has no maximum: some players never won, or never lost, against the "
            "others; set a prior above 0."
        )
    theta, gauge = won.new_zeros(n), torch.ones_like(won) / n
    for _ in range(1000):
        expected = (theta.unsqueeze(1) - theta).sigmoid()
        average = theta.sigmoid()
        slope = (won - games * expected).sum(1) + prior * (0.5 - average)
        information = -games * expected * (1 - expected)
        information.diagonal().sub_(information.sum(1))
        information.diagonal().add_(prior * average * (1 - average))
        # Without a prior, the likelihood ignores a shift of all ratings. The gauge fixes the sum.
        inverse = torch.linalg.inv(information + (gauge if prior <= 0 else 0.0))
        step = inverse @ slope
        theta = theta + step * (_MAX_STEP / step.abs().max().clamp_min(_MAX_STEP))
        if bool(step.abs().max() < 1e-11):
            break
    center = torch.eye(n, dtype=won.dtype, device=won.device)
    center = center - (gauge if anchor is None else center[anchor])
    variance = (center @ inverse @ center.mT).diagonal()
    return Ratings(_ELO_SCALE * (center @ theta), _ELO_SCALE * variance.clamp_min(0).sqrt())


def _count_wins(wins: Tensor, draws: Tensor | None) -> Tensor:
    """Returns wins plus half the draws, with zeros on the diagonal; checks the shapes."""
    if wins.ndim != 2 or wins.shape[0] != wins.shape[1]:
        raise ValueError(f"wins has shape {list(wins.shape)}, expected [players, players].")
    if draws is not None and draws.shape != wins.shape:
        raise ValueError(f"draws has shape {list(draws.shape)}, expected {list(wins.shape)}.")
    won = wins.double() if draws is None else wins.double() + draws.double() / 2
    return won - won.diagonal().diag()


def _win_chains(won: Tensor) -> Tensor:
    """Returns whether a chain of wins leads from player i to player j, ``[A, A]``."""
    reached = (won > 0).double() + torch.eye(len(won), dtype=torch.float64, device=won.device)
    for _ in range(len(won).bit_length()):
        reached = (reached @ reached).clamp_max(1)
    return reached > 0


def _normal_quantile(level: float) -> float:
    """Returns the half-width of a confidence interval in standard errors."""
    return torch.special.ndtri(torch.tensor((1 + level) / 2, dtype=torch.float64)).item()
