"""Two-sided zero-sum games with hidden information, and how far a policy is from their equilibrium.

Shapes: I information sets of a player, A actions, L leaves.
"""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["SequenceForm"]


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
