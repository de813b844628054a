"""Equilibria of two-sided zero-sum games, and how far from them one is.

Shapes: M strategies of the row's side, K of the column's, A players or, where information is
hidden, actions, I information sets of a player, L leaves.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

__all__ = [
    "Nash",
    "SequenceForm",
    "check_square",
    "exploitability",
    "nash",
    "nash_average",
    "nash_conv",
]

_CLOSE = 1e-13
_NEARLY_ALL = 0.99
"""Share of the way to the boundary that a step may take."""


def check_matrix(value: Tensor, name: str) -> Tensor:
    """Returns a matrix in float64.

    Raises:
        ValueError: something else, no entry, or entries that are not finite.
    """
    if value.ndim != 2 or 0 in value.shape:
        raise ValueError(f"{name} has shape {list(value.shape)}, expected a matrix.")
    if not bool(value.isfinite().all()):
        raise ValueError(f"{name} has entries that are not finite, expected numbers.")
    return value.double()


def check_square(value: Tensor, name: str) -> Tensor:
    """Returns a square matrix in float64.

    Raises:
        ValueError: something else.
    """
    if value.ndim == 2 and value.shape[0] != value.shape[1]:
        raise ValueError(f"{name} has shape {list(value.shape)}, expected [players, players].")
    return check_matrix(value, name)


class Nash(NamedTuple):
    """An equilibrium: both sides' distributions ``[M]``, ``[K]``, and the row's value, a scalar."""

    row: Tensor
    column: Tensor
    value: Tensor


def nash_conv(payoff: Tensor, row: Tensor, column: Tensor) -> Tensor:
    """Returns what both sides' best responses would gain together; 0 at an equilibrium.

    Args:
        payoff (Tensor): of the row's side; the column's gets the negative.
        row, column (Tensor): distributions over strategies.

    Shapes:
        - payoff: ``[M, K]``; row: ``[M]``; column: ``[K]``; returns a scalar, float64

    Examples:
        >>> rock_paper_scissors = torch.tensor([[0.0, -1, 1], [1, 0, -1], [-1, 1, 0]])
        >>> always_rock = torch.tensor([1.0, 0, 0])
        >>> nash_conv(rock_paper_scissors, always_rock, always_rock).item()
        2.0
    """
    payoff = check_matrix(payoff, "payoff")
    return (payoff @ column.double()).max() - (row.double() @ payoff).min()


def exploitability(payoff: Tensor, row: Tensor, column: Tensor) -> Tensor:
    """Returns what a best response gains on average over the sides, :func:`nash_conv` / 2.

    Args and shapes: as in :func:`nash_conv`.
    """
    return nash_conv(payoff, row, column) / 2


def nash_average(payoff: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the unique most even equilibrium of players, and each one's payoff against it.

    Copies of a player, and players who lose to all, change nothing for the others: unlike the mean
    over opponents, nobody gains by who else is there. Those of the equilibrium get 0, others at
    most 0.

    Args:
        payoff (Tensor): antisymmetric, of the row's player, such as ``2 * win_rate - 1``.

    Shapes:
        - payoff: ``[A, A]``; returns distribution and payoff, ``[A]`` each, float64

    Raises:
        ValueError: a matrix that is not antisymmetric.

    Reference: Balduzzi et al., 2018, https://arxiv.org/abs/1806.02643 (section 3).

    Examples:
        >>> beats = torch.tensor([[0.0, 1, -1, 1], [-1, 0, 1, 1], [1, -1, 0, 1], [-1, -1, -1, 0]])
        >>> weight, score = nash_average(beats)
        >>> [round(x, 4) for x in weight.tolist()], [round(x, 4) + 0.0 for x in score.tolist()]
        ([0.3333, 0.3333, 0.3333, 0.0], [0.0, 0.0, 0.0, -1.0])
    """
    payoff = check_square(payoff, "payoff")
    if not bool(torch.allclose(payoff, -payoff.mT, rtol=0, atol=1e-9)):
        raise ValueError(
            "payoff is not antisymmetric, expected what the row's player wins to be what the "
            "column's loses; take (payoff - payoff.mT) / 2."
        )
    weight = nash(payoff).row
    return weight, payoff @ weight


def nash(payoff: Tensor) -> Nash:
    """Returns the equilibrium of largest entropy of a zero-sum matrix game.

    Many equilibria may have the game's value; of each side's the most even one is unique.

    Args:
        payoff (Tensor): of the row's side; the column's gets the negative.

    Shapes:
        - payoff: ``[M, K]``

    Returns:
        Nash: both distributions and the value, float64.

    Raises:
        ValueError: no matrix of finite numbers.

    Reference: Balduzzi et al., 2018, https://arxiv.org/abs/1806.02643 (maximum entropy); solved by
    interior points (Wright, 1997, https://doi.org/10.1137/1.9781611971453).

    Examples:
        >>> row, column, value = nash(torch.tensor([[3.0, -1.0], [-1.0, 1.0]]))
        >>> [round(x, 6) for x in (*row.tolist(), *column.tolist(), value.item())]
        [0.333333, 0.666667, 0.333333, 0.666667, 0.333333]
    """
    payoff = check_matrix(payoff, "payoff")
    low, width = payoff.min(), payoff.max() - payoff.min()
    scaled = (payoff - low) / torch.where(width > 0, width, 1.0)
    row, column, row_used, column_used = _center(scaled)
    row = _most_even(scaled, row, row_used, column_used)
    column = _most_even(-scaled.mT, column, column_used, row_used)
    return Nash(row, column, row @ payoff @ column)


def _center(payoff: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Returns an equilibrium from within all of them, and which strategies some of them use.

    Follows the central path of the linear program and its dual: for each strategy, its probability
    times what it falls short of a best response is the same, and goes to 0.
    """
    m, k = payoff.shape
    x = payoff.new_ones(m + k)
    x[:m], x[m:] = 1 / m, 1 / k
    short = torch.cat([1.5 - payoff @ x[m:], payoff.mT @ x[:m] + 0.5])
    system = payoff.new_zeros(m + k + 2, m + k + 2)
    system[:m, m : m + k], system[m : m + k, :m] = -payoff, payoff.mT
    system[:m, -2], system[-2, :m] = 1, 1
    system[m : m + k, -1], system[-1, m : m + k] = -1, 1
    for _ in range(200):
        gap = (x * short).mean()
        if bool(gap < _CLOSE):
            break
        wanted = 0.1 * gap / x - short
        now = system.clone()
        now.diagonal()[: m + k] += short / x
        step = torch.linalg.solve(now, torch.cat([wanted, wanted.new_zeros(2)]))[: m + k]
        shorter = wanted - short / x * step
        reach = torch.minimum(_reach(x, step), _reach(short, shorter))
        x, short = x + reach * step, short + reach * shorter
    used = x > short
    return x[:m], x[m:], used[:m], used[m:]


def _most_even(payoff: Tensor, start: Tensor, used: Tensor, others: Tensor) -> Tensor:
    """Returns the row's equilibrium of largest entropy.

    Args:
        payoff (Tensor): ``[M, K]``.
        start (Tensor): an equilibrium from within all of them, ``[M]``.
        used (Tensor): the rows that some equilibrium uses, ``[M]``.
        others (Tensor): the columns that some equilibrium uses: all rows' equilibria pay the same
            against these, and no less against the others, ``[K]``.
    """
    equal, rest = payoff[used][:, others], payoff[used][:, ~others]
    p = start[used] / start[used].sum()
    fixed = torch.cat([(equal - equal.mean(1, keepdim=True)).mT, torch.ones_like(p).unsqueeze(0)])
    values = torch.cat([p.new_zeros(len(fixed) - 1), p.new_ones(1)])
    _, singular, basis = torch.linalg.svd(fixed)
    rank = int((singular > 1e-9 * singular.max()).sum())
    p = p - torch.linalg.pinv(fixed, rtol=1e-9) @ (fixed @ p - values)
    free = basis[rank:].mT
    if free.shape[1] and bool((p > 0).all()):
        margin = rest - equal.mean(1, keepdim=True)
        p = _spread(p, free, margin)
    whole = torch.zeros_like(start)
    whole[used] = p.clamp_min(0)
    return whole / whole.sum()


def _spread(p: Tensor, free: Tensor, margin: Tensor) -> Tensor:
    """Returns the distribution of largest entropy in ``p + free z`` where ``margin.mT p >= 0``."""
    slope = margin.mT @ free
    slack = margin.mT @ p
    if bool((slack <= 0).any()):
        return p
    price = 1 / (slack * len(slack)) if len(slack) else slack
    for _ in range(200):
        gap = (price * slack).mean() if len(slack) else p.new_zeros(())
        aim = 0.1 * gap / slack
        curve = free.mT @ (free / p.unsqueeze(1)) + slope.mT @ (
            slope * (price / slack).unsqueeze(1)
        )
        step = torch.linalg.solve(curve, slope.mT @ aim - free.mT @ p.log())
        move, change = free @ step, slope @ step
        dearer = aim - price - price / slack * change
        reach = torch.minimum(_reach(p, move), _reach(slack, change))
        reach = torch.minimum(reach, _reach(price, dearer))
        p, slack, price = p + reach * move, slack + reach * change, price + reach * dearer
        if bool(move.abs().max() < 1e-12) and bool(gap < _CLOSE):
            break
    return p


def _reach(value: Tensor, step: Tensor) -> Tensor:
    """Returns the largest share of a step, at most 1, that keeps values above 0."""
    most = torch.where(step < 0, -_NEARLY_ALL * value / step, 1.0)
    return torch.cat([most, most.new_ones(1)]).min()


class SequenceForm:
    """A zero-sum game of two players who forget nothing, by what each of them has done.

    A *sequence* is a player's last information set and what it chose there: 0 is nothing yet, and
    ``1 + i * A + a`` the action a in the set i. One of these leads to each information set, and two
    of them, one of each player, to each leaf. Nothing here walks through the game again: a policy's
    value and best responses are sums over sequences.

    Args:
        parents (Tensor): the sequence that leads to each information set.
        legal (Tensor): bool, what may be done there.
        leaves (Tensor): the sequences of both that lead to each end.
        payoff (Tensor): what the first player gets there, times the chance of what is drawn on the
            way, by the deals.

    Shapes:
        - parents: ``[2, I]``; legal: ``[2, I, A]``; leaves: ``[2, L]``; payoff: ``[L]``
        - policies: ``[2, I, A]``, the probabilities of actions; 0 where they are not legal

    Raises:
        ValueError: shapes that do not fit, or parents that lead in a circle.

    Reference: von Stengel, 1996, https://doi.org/10.1006/game.1996.0050.

    Examples:
        Matching pennies: each has one information set, and leads to four leaves.

        >>> game = SequenceForm(
        ...     parents=torch.zeros(2, 1, dtype=torch.int64),
        ...     legal=torch.ones(2, 1, 2, dtype=torch.bool),
        ...     leaves=torch.tensor([[1, 1, 2, 2], [1, 2, 1, 2]]),
        ...     payoff=torch.tensor([1.0, -1, -1, 1]),
        ... )
        >>> policy = torch.tensor([[[0.75, 0.25]], [[0.5, 0.5]]])
        >>> game.value(policy), game.best_responses(policy).tolist(), game.nash_conv(policy)
        (0.0, [0.0, 0.5], 0.5)
    """

    def __init__(self, parents: Tensor, legal: Tensor, leaves: Tensor, payoff: Tensor) -> None:
        shape = legal.shape[:2]
        if legal.ndim != 3 or parents.shape != shape or leaves.shape != (2, len(payoff)):
            raise ValueError(
                f"parents {list(parents.shape)}, legal {list(legal.shape)}, leaves "
                f"{list(leaves.shape)} and payoff {list(payoff.shape)} do not fit; expected "
                "[2, I], [2, I, A], [2, L] and [L]."
            )
        self.parents, self.legal, self.leaves = parents, legal, leaves
        self.payoff = payoff.double()
        self.levels = self._levels()

    def value(self, policy: Tensor) -> float:
        """Returns what the first player wins on average where both play a policy."""
        first, second = self._reach(policy).gather(1, self.leaves)
        return (self.payoff * first * second).sum().item()

    def best_responses(self, policy: Tensor) -> Tensor:
        """Returns what each player's best response to the other's policy wins, ``[2]``."""
        reach = self._reach(policy).gather(1, self.leaves)
        return torch.stack(
            [self._best(0, self.payoff * reach[1]), self._best(1, -self.payoff * reach[0])]
        )

    def nash_conv(self, policy: Tensor) -> float:
        """Returns what best responses would gain, of both players together; 0 at an equilibrium."""
        return self.best_responses(policy).sum().item()

    def _levels(self) -> list[Tensor]:
        """Returns which information sets follow on 0, 1, 2, ... own moves, ``[2, I]`` each."""
        n_actions = self.legal.shape[-1]
        depth = torch.full_like(self.parents, -1)
        before = (self.parents - 1).clamp_min(0) // n_actions
        levels: list[Tensor] = []
        found = self.parents == 0
        while bool(found.any()):
            depth = torch.where(found, len(levels), depth)
            levels.append(found)
            found = (self.parents > 0) & (depth.gather(1, before) == len(levels) - 1)
            found = found & (depth < 0)
        if bool((depth < 0).any()):
            raise ValueError("parents lead in a circle; expected each to begin at sequence 0.")
        return levels

    def _reach(self, policy: Tensor) -> Tensor:
        """Returns how likely each player chooses what leads to a sequence, ``[2, 1 + I * A]``."""
        chosen = torch.where(self.legal, policy.to(self.payoff), 0.0)
        reach = self.payoff.new_zeros(2, 1 + chosen[0].numel())
        reach[:, 0] = 1
        for level in self.levels:
            arrived = reach.gather(1, self.parents).unsqueeze(-1) * chosen
            reach[:, 1:] += torch.where(level.unsqueeze(-1), arrived, 0.0).flatten(1)
        return reach

    def _best(self, player: int, leaf: Tensor) -> Tensor:
        """Returns the value of a player's best response to leaves of given worth, a scalar."""
        legal, parents = self.legal[player], self.parents[player]
        worth = leaf.new_zeros(1 + legal.numel()).index_add_(0, self.leaves[player], leaf)
        for level in reversed(self.levels):
            choices = torch.where(legal, worth[1:].view_as(legal), -torch.inf).amax(-1)
            worth.index_add_(0, parents, torch.where(level[player], choices, 0.0))
        return worth[0]
