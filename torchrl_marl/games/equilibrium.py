"""Equilibria of two-player zero-sum games, and distances from them.

Shapes: M strategies of the row player, K strategies of the column player, A players (or, in a
sequence form, actions), I information sets of a player, L leaves.
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
_ROUNDED = 1e-16
"""Gap of the interior-point method below which its system may be singular."""
_NEARLY_ALL = 0.99
"""Largest step of the interior-point method, as a share of the distance to the boundary."""
_ROUNDING = 1e-3
"""Largest error of the sum of a distribution, which may have been computed in low precision."""


def check_matrix(value: Tensor, name: str) -> Tensor:
    """Returns a matrix in float64.

    Raises:
        ValueError: the value is not a matrix, has no entries, or has entries that are not finite.
    """
    if value.ndim != 2 or 0 in value.shape:
        raise ValueError(f"{name} has shape {list(value.shape)}, expected a matrix.")
    if not bool(value.isfinite().all()):
        raise ValueError(f"{name} has entries that are not finite, expected numbers.")
    return value.double()


def check_square(value: Tensor, name: str) -> Tensor:
    """Returns a square matrix in float64.

    Raises:
        ValueError: the value is not a square matrix, or has entries that are not finite.
    """
    if value.ndim == 2 and value.shape[0] != value.shape[1]:
        raise ValueError(f"{name} has shape {list(value.shape)}, expected [players, players].")
    return check_matrix(value, name)


def check_distribution(value: Tensor, legal: Tensor, name: str) -> Tensor:
    """Returns the probabilities of legal actions in float64, 0 for all others.

    Args:
        value (Tensor): probabilities. Those of actions that are not legal are ignored.
        legal (Tensor): mask of legal actions, bool. Rows without legal actions are not checked.
        name (str): name of the argument, for errors.

    Shapes:
        - value, legal: ``[*B, A]``; returns ``[*B, A]``

    Raises:
        ValueError: the shape differs, a probability is negative or NaN, or a sum is not 1.
    """
    if value.shape != legal.shape:
        raise ValueError(f"{name} has shape {list(value.shape)}, expected {list(legal.shape)}.")
    value = torch.where(legal, value.double(), 0.0)
    total = value.sum(-1)
    right = ((total - 1).abs() <= _ROUNDING) & (value >= 0).all(-1)
    wrong = ~right & legal.any(-1)
    if bool(wrong.any()):
        raise ValueError(
            f"{name} is not a distribution: its legal entries sum to {total[wrong][0].item():.4g}, "
            "or one is negative; expected probabilities that sum to 1."
        )
    return value


class Nash(NamedTuple):
    """Equilibrium: both players' distributions ``[M]`` and ``[K]``, and the row player's value."""

    row: Tensor
    column: Tensor
    value: Tensor


def nash_conv(payoff: Tensor, row: Tensor, column: Tensor) -> Tensor:
    """Returns NashConv, the sum of both players' gains by best responses; 0 at an equilibrium.

    Args:
        payoff (Tensor): payoff of the row player; the column player gets its negative.
        row, column (Tensor): distributions over strategies.

    Shapes:
        - payoff: ``[M, K]``; row: ``[M]``; column: ``[K]``; returns a scalar, float64

    Raises:
        ValueError: the payoff is not a matrix of finite numbers, or ``row`` or ``column`` is not a
            distribution over its strategies.

    Examples:
        >>> rock_paper_scissors = torch.tensor([[0.0, -1, 1], [1, 0, -1], [-1, 1, 0]])
        >>> always_rock = torch.tensor([1.0, 0, 0])
        >>> nash_conv(rock_paper_scissors, always_rock, always_rock).item()
        2.0
    """
    payoff = check_matrix(payoff, "payoff")
    legal = torch.ones_like(payoff, dtype=torch.bool)
    row = check_distribution(row, legal[:, 0], "row")
    column = check_distribution(column, legal[0], "column")
    return (payoff @ column).max() - (row @ payoff).min()


def exploitability(payoff: Tensor, row: Tensor, column: Tensor) -> Tensor:
    """Returns the exploitability, half of :func:`nash_conv`: the mean gain of a best response.

    Args and shapes: as in :func:`nash_conv`.
    """
    return nash_conv(payoff, row, column) / 2


def nash_average(payoff: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the maximum-entropy equilibrium of players, and each player's payoff against it.

    If copies of a player are added, or players that lose to all others, the results of the other
    players do not change. (A mean over opponents would change.) Players in the equilibrium get the
    payoff 0, and all others at most 0.

    Args:
        payoff (Tensor): antisymmetric payoff of the row player, such as ``2 * win_rate - 1``.

    Shapes:
        - payoff: ``[A, A]``; returns distribution and payoff, ``[A]`` each, float64

    Raises:
        ValueError: the matrix is not antisymmetric.

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
            "payoff is not antisymmetric, expected the row player's gain to be the column "
            "player's loss; use (payoff - payoff.mT) / 2."
        )
    weight = nash(payoff).row
    return weight, payoff @ weight


def nash(payoff: Tensor) -> Nash:
    """Returns the maximum-entropy equilibrium of a zero-sum matrix game.

    A game can have many equilibria; the one of maximum entropy is unique.

    Args:
        payoff (Tensor): payoff of the row player; the column player gets its negative.

    Shapes:
        - payoff: ``[M, K]``

    Returns:
        Nash: both distributions and the value, float64.

    Raises:
        ValueError: the payoff is not a matrix of finite numbers.

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
    row, column, row_used, column_used = _interior_equilibrium(scaled)
    row = _maximum_entropy_strategy(scaled, row, row_used, column_used)
    column = _maximum_entropy_strategy(-scaled.mT, column, column_used, row_used)
    return Nash(row, column, row @ payoff @ column)


def _interior_equilibrium(payoff: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Returns an interior equilibrium, and masks of strategies that occur in any equilibrium.

    The function follows the central path of the linear program and its dual. For each strategy,
    take the product of its probability and its loss compared with a best response. On the central
    path this product is the same for all strategies, and it goes to 0.
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


def _maximum_entropy_strategy(
    payoff: Tensor, start: Tensor, used: Tensor, others: Tensor
) -> Tensor:
    """Returns the row player's equilibrium of maximum entropy.

    Args:
        payoff (Tensor): payoff, ``[M, K]``.
        start (Tensor): an interior equilibrium, ``[M]``.
        used (Tensor): mask of the rows that occur in any equilibrium, ``[M]``.
        others (Tensor): mask of the columns that occur in any equilibrium, ``[K]``. Each
            equilibrium strategy of the row player earns the game's value against these columns, and
            at least the value against all others.
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
        p = _maximum_entropy(p, free, margin)
    whole = torch.zeros_like(start)
    whole[used] = p.clamp_min(0)
    return whole / whole.sum()


def _maximum_entropy(p: Tensor, free: Tensor, margin: Tensor) -> Tensor:
    """Returns the distribution ``q = p + free z`` of maximum entropy with ``margin.mT q >= 0``."""
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
        # If a margin and its price both go to 0, moves stay larger than rounding errors.
        settled = move.abs().max() < 1e-12 or 0 < gap < _ROUNDED
        if bool(settled) and bool(gap < _CLOSE):
            break
    return p


def _reach(value: Tensor, step: Tensor) -> Tensor:
    """Returns the largest fraction of a step, at most 1, that keeps all values above 0."""
    most = torch.where(step < 0, -_NEARLY_ALL * value / step, 1.0)
    return torch.cat([most, most.new_ones(1)]).min()


class SequenceForm:
    """Sequence form of a two-player zero-sum game with perfect recall.

    A *sequence* is a player's last information set and its action there. Sequence 0 is empty, and
    ``1 + i * A + a`` is action a in set i. Each information set is reached by exactly one sequence
    of its player, and each leaf by one sequence of each player. The value of a policy and the best
    responses to it are sums over sequences, without a walk through the game tree.

    Args:
        parents (Tensor): sequence that leads to each information set.
        legal (Tensor): mask of legal actions in each information set, bool. Sets without legal
            actions are ignored. They fill up the sets of the player that has fewer of them.
        leaves (Tensor): sequences of both players that lead to each leaf.
        payoff (Tensor): payoff of the first player at each leaf, multiplied by the probability of
            the chance events on the path to the leaf, such as dealt cards.

    Shapes:
        - parents: ``[2, I]``; legal: ``[2, I, A]``; leaves: ``[2, L]``; payoff: ``[L]``
        - policies: ``[2, I, A]``, the probabilities of actions; 0 for illegal ones

    Raises:
        ValueError: the shapes do not fit together, the parents form a cycle, a sequence does not
            exist, or a payoff is not finite. Methods: the policy is not a distribution.

    Reference: von Stengel, 1996, https://doi.org/10.1006/game.1996.0050.

    Examples:
        Matching pennies: each player has one information set, and there are four leaves.

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
        self._check_tree(parents, legal, leaves, payoff)
        self.parents, self.legal, self.leaves = parents, legal, leaves
        self.payoff = payoff.double()
        self.levels = self._levels()

    def value(self, policy: Tensor) -> float:
        """Returns the first player's expected payoff if both players follow the policy."""
        first, second = self._reach(policy).gather(1, self.leaves)
        return (self.payoff * first * second).sum().item()

    def best_responses(self, policy: Tensor) -> Tensor:
        """Returns the value of each player's best response to the other's policy, ``[2]``."""
        reach = self._reach(policy).gather(1, self.leaves)
        return torch.stack(
            [
                self._best_response_value(0, self.payoff * reach[1]),
                self._best_response_value(1, -self.payoff * reach[0]),
            ]
        )

    def nash_conv(self, policy: Tensor) -> float:
        """Returns NashConv, the sum of both best-response gains; 0 at an equilibrium."""
        return self.best_responses(policy).sum().item()

    @staticmethod
    def _check_tree(parents: Tensor, legal: Tensor, leaves: Tensor, payoff: Tensor) -> None:
        """Raises an error if sequences do not exist, or payoffs are not finite."""
        last = legal[0].numel()
        for name, sequence in (("parents", parents), ("leaves", leaves)):
            if bool(((sequence < 0) | (sequence > last)).any()):
                raise ValueError(f"{name} has sequences outside 0 to {last}.")
        if not bool(payoff.isfinite().all()):
            raise ValueError("payoff has entries that are not finite, expected numbers.")

    def _levels(self) -> list[Tensor]:
        """Returns masks ``[2, I]`` of the information sets after 0, 1, 2, ... own moves."""
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
            raise ValueError("parents form a cycle, expected each to begin at sequence 0.")
        return levels

    def _reach(self, policy: Tensor) -> Tensor:
        """Returns each player's probability to realize each sequence, ``[2, 1 + I * A]``."""
        chosen = check_distribution(policy.to(self.payoff), self.legal, "policy")
        reach = self.payoff.new_zeros(2, 1 + chosen[0].numel())
        reach[:, 0] = 1
        for level in self.levels:
            arrived = reach.gather(1, self.parents).unsqueeze(-1) * chosen
            reach[:, 1:] += torch.where(level.unsqueeze(-1), arrived, 0.0).flatten(1)
        return reach

    def _best_response_value(self, player: int, leaf: Tensor) -> Tensor:
        """Returns the value, a scalar, of a player's best response, given the leaves' values."""
        legal, parents = self.legal[player], self.parents[player]
        worth = leaf.new_zeros(1 + legal.numel()).index_add_(0, self.leaves[player], leaf)
        for level in reversed(self.levels):
            choices = torch.where(legal, worth[1:].view_as(legal), -torch.inf).amax(-1)
            there = level[player] & legal.any(-1)
            worth.index_add_(0, parents, torch.where(there, choices, 0.0))
        return worth[0]
