"""Evolutionary ranking of players: alpha-rank.

Shapes: A players.
"""

from __future__ import annotations

import torch
from torch import Tensor

from torchrl_marl.games.equilibrium import check_square

__all__ = ["alpha_rank"]


def alpha_rank(payoff: Tensor, *, alpha: float = 100.0, population: int = 50) -> Tensor:
    r"""Returns the fraction of time that an evolving population spends with each player.

    A mutant of player r takes over a population of player s with probability

    .. math:: \rho_{rs} = \Big(1 + \sum_{l=1}^{m-1} \prod_{k=1}^{l}
              e^{-\alpha (f_r(k) - f_s(k))}\Big)^{-1}

    where f are the mean payoffs while k of the m individuals play r. The result is the stationary
    distribution of these takeovers; players that beat each other in a cycle share the time.

    Args:
        payoff (Tensor): payoff of the row's player against the column's, in a symmetric game.

    Keyword Args:
        alpha (float): selection strength; it multiplies the payoffs, so their scale matters.
        population (int): number m of individuals.

    Shapes:
        - payoff: ``[A, A]``; returns ``[A]``, float64, sums to 1

    Raises:
        ValueError: a matrix that is not square.

    Reference: Omidshafiei et al., 2019, https://arxiv.org/abs/1903.01373 (section 2.5, one
    population). It is computed with logarithms, so no alpha is too large.

    Examples:
        >>> rock_paper_scissors = torch.tensor([[0.0, -1, 1], [1, 0, -1], [-1, 1, 0]])
        >>> alpha_rank(rock_paper_scissors)
        tensor([0.3333, 0.3333, 0.3333], dtype=torch.float64)
    """
    payoff = check_square(payoff, "payoff")
    n, m = len(payoff), population
    if n == 1:
        return payoff.new_ones(1)
    k = torch.arange(1, m, dtype=payoff.dtype, device=payoff.device)
    same = payoff.diagonal()
    resident, mutant = same.view(n, 1, 1), same.view(1, n, 1)
    # [resident, mutant, number of mutants]
    against, back = payoff.mT.unsqueeze(-1), payoff.unsqueeze(-1)
    gain = (k - 1) * mutant + (m - k) * against - (m - k - 1) * resident - k * back
    steps = torch.cat([gain.new_zeros(n, n, 1), (-alpha / (m - 1) * gain).cumsum(-1)], -1)
    return _stationary(-steps.logsumexp(-1))


def _stationary(log_rate: Tensor) -> Tensor:
    """Returns the stationary distribution of a chain with the given logarithms of rates.

    Reference: Grassmann, Taksar and Heyman, 1985 (states are eliminated in turn, without
    subtractions).
    """
    rate, n = log_rate.clone(), len(log_rate)
    for last in range(n - 1, 0, -1):
        rate[:last, last] -= rate[last, :last].logsumexp(0)
        through = rate[:last, last].unsqueeze(1) + rate[last, :last]
        rate[:last, :last] = torch.logaddexp(rate[:last, :last], through)
    weight = log_rate.new_zeros(n)
    for state in range(1, n):
        weight[state] = (weight[:state] + rate[:state, state]).logsumexp(0)
    return weight.softmax(0)
