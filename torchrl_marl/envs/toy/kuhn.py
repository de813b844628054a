"""Kuhn poker, a very small game that requires bluffing, with a known equilibrium.

Shapes: E envs.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import torch
from tensordict import TensorDict, TensorDictBase
from torch import Tensor
from torch.nn.functional import one_hot
from torchrl.envs.utils import ExplorationType, set_exploration_type

from torchrl_marl.envs.marl_env import MarlEnv
from torchrl_marl.envs.scene import Shape
from torchrl_marl.envs.toy.probabilities import action_probabilities
from torchrl_marl.envs.toy.roles import declare_players, zero_sum_step
from torchrl_marl.envs.toy.scenes import actions_in, cards, players
from torchrl_marl.games import nash_conv

__all__ = ["Kuhn"]

_START, _PASSED, _BET, _PASSED_BET = range(4)
"""Betting histories after which the game continues."""
_HISTORIES_OF_SEAT = ((_START, _PASSED_BET), (_PASSED, _BET))
"""Betting histories at which each seat acts."""
_DEALS = [[a, b] for a in range(3) for b in range(3) if a != b]


class Kuhn(MarlEnv):
    """Kuhn poker: two players, three cards, one bet.

    Both players pay an ante of 1 and get one of three cards. The first player passes or bets 1.
    After a pass, the second player passes or bets; after a bet, it folds or calls. If the first
    player passed and the second bet, the first player folds or calls. The higher card wins the pot,
    unless a player folds. In equilibrium the first player bets with the lowest card, as a bluff, a
    third as often as with the highest card. It loses 1/18 per game on average.

    Args:
        num_envs (int): number E of parallel envs.

    Keyword Args:
        max_steps, seed, device, check: as in :class:`MarlEnv`; a game has two or three steps.

    Shapes:
        - ``("first", "observation")``, ``("second", "observation")``: ``[E, 1, 8]``: the card
          (3), the betting history (4: empty, pass, bet, pass and bet), and the seat (1). ``"mask"``
          is True for the player that acts next. Action 0 passes or folds, action 1 bets or calls
        - ``"state"``: ``[E, 10]``, both cards and the betting history

    Raises:
        ConfigError: an argument is unknown.

    Reference: Kuhn, 1950, https://doi.org/10.1515/9781400881727-010.

    Examples:
        >>> env = Kuhn(2, seed=0)
        >>> round(env.optimal_return, 4), env.random_return
        (-0.0556, 0.125)
        >>> round(env.nash_conv(torch.full((2, 3, 2), 0.5)), 4)  # of uniform play
        0.9167
    """

    in_turns = True
    optimal_return = -1 / 18
    random_return = 1 / 8

    def __init__(self, num_envs: int, **kwargs: Any) -> None:
        super().__init__(num_envs, **kwargs)
        self.deals = torch.tensor(_DEALS, device=self.device)
        declare_players(self, 8, (2, 2), 10)

    # ------------------------------------------------------------------------- exact answers

    def bets(
        self, policy: Callable[[TensorDictBase], TensorDictBase], copies: int = 1000
    ) -> Tensor:
        """Returns the probability of a bet or call in every information set; calls the policy once.

        The probabilities are exact if the policy writes ``action_log_prob``; see
        :func:`~.probabilities.action_probabilities`.

        Args:
            policy (callable): policy of both players, without memory.
            copies (int): number of samples of each information set.

        Shapes:
            - returns: ``[2, 3, 2]``, float64, by player, card and decision. The decisions are the
              first player's two moves, or the second player's move after a pass and after a bet
        """
        card = torch.arange(3, device=self.device).repeat_interleave(2)
        groups = {}
        for seat, name in enumerate(self.group_map):
            history = torch.tensor(_HISTORIES_OF_SEAT[seat], device=self.device).repeat(3)
            observation = _encode_observation(card, history, seat).unsqueeze(1)
            mask = torch.ones(6, 1, dtype=torch.bool, device=self.device)
            groups[name] = TensorDict({"observation": observation, "mask": mask}, [6, 1])
        rows = TensorDict(groups, [6], device=self.device).expand(copies, 6).clone()
        with torch.no_grad(), set_exploration_type(ExplorationType.RANDOM):
            output = policy(rows)
        return torch.stack(
            [action_probabilities(output, name, 2)[:, 0, 1].view(3, 2) for name in groups]
        )

    def nash_conv(self, policy: Callable[[TensorDictBase], TensorDictBase] | Tensor) -> float:
        """Returns the NashConv: how much the players gain in total if each plays a best response.

        It is 0 at an equilibrium, and 11/12 if both players act uniformly at random. The result is
        exact, because it is calculated from all 64 pure strategies of each player.

        Args:
            policy (callable or Tensor): policy of both players, or the result of :meth:`bets`.

        Raises:
            ValueError: a tensor has another shape than that of :meth:`bets`, or a value outside 0
                to 1.
        """
        bets = policy if isinstance(policy, Tensor) else self.bets(policy)
        if bets.shape != (2, 3, 2) or not bool(((bets >= 0) & (bets <= 1)).all()):
            raise ValueError(
                f"the probabilities of bets have shape {list(bets.shape)}, or values outside 0 to "
                "1; expected [2, 3, 2]."
            )
        pure = torch.tensor(list(itertools.product((0.0, 1.0), repeat=6))).view(64, 3, 2)
        first, second = (torch.where(pure > 0, p, 1 - p).flatten(1).prod(1) for p in bets.cpu())
        return nash_conv(_payoff_matrix(pure), first, second).item()

    # ------------------------------------------------------------------------------ dynamics

    def _reset(self, tensordict: TensorDictBase | None) -> dict[str, Any]:
        deal = torch.randint(len(_DEALS), (self.num_envs,), device=self.device)
        self.cards = self.deals[deal]
        self.said = torch.full_like(deal, _START)
        return self._observe()

    def _step(self, tensordict: TensorDictBase) -> dict[str, Any]:
        first, second = (tensordict[name, "action"].squeeze(-1) for name in self.group_map)
        history = self.said
        bets = torch.where(self._is_first_players_turn(), first, second) > 0
        higher = torch.where(self.cards[:, 0] > self.cards[:, 1], 1.0, -1.0)
        folds = torch.where(history == _BET, 1.0, -1.0)  # the first player's gain after a fold
        won = torch.where(history == _PASSED, higher, torch.where(bets, 2 * higher, folds))
        ended = torch.where(history == _PASSED, ~bets, history != _START)
        won = torch.where(ended, won, 0.0)
        opened = torch.where(bets, _BET, _PASSED)
        next_history = torch.where(history == _START, opened, _PASSED_BET)
        self.said = torch.where(ended, history, next_history)
        return zero_sum_step(self._observe(), won, ended.unsqueeze(-1))

    def _is_first_players_turn(self) -> Tensor:
        return (self.said == _START) | (self.said == _PASSED_BET)

    def _observe(self) -> dict[str, Any]:
        is_firsts_turn = self._is_first_players_turn()
        output: dict[str, Any] = {}
        for seat, name in enumerate(self.group_map):
            acts = (is_firsts_turn if seat == 0 else ~is_firsts_turn).unsqueeze(-1)
            observation = _encode_observation(self.cards[:, seat], self.said, seat).unsqueeze(1)
            output[name] = {"observation": observation, "mask": acts}
        state = torch.cat([one_hot(self.cards, 3).flatten(1), one_hot(self.said, 4)], -1)
        return {**output, "state": state.float()}

    # ------------------------------------------------------------------------------- drawing

    def scene(self, index: int = 0, step: TensorDictBase | None = None) -> list[Shape]:
        """Returns a drawing of the players with both cards."""
        first, second = ("JQK"[card] for card in self.cards[index].tolist())
        actions = actions_in(self, step)
        labels = [
            "" if action == "" else ("bets, calls" if action == "1" else "passes")
            for action in actions
        ]
        shapes = players(self, labels, [(-2.0, 0.0), (2.0, 0.0)])
        return shapes + cards(["first card", "second card"], [first, second], [(-0.8, 0), (0.8, 0)])


def _encode_observation(card: Tensor, history: Tensor, seat: int) -> Tensor:
    """Returns the observation of a player, ``[E, 8]``."""
    seat_feature = torch.full_like(card, seat).unsqueeze(-1)
    return torch.cat([one_hot(card, 3), one_hot(history, 4), seat_feature], -1).float()


def _payoff_matrix(strategies: Tensor) -> Tensor:
    """Returns the first player's mean gain for each pair of pure strategies, ``[64, 64]``."""
    total = torch.zeros(len(strategies), len(strategies), dtype=torch.float64)
    for card, other_card in _DEALS:
        higher = 1.0 if card > other_card else -1.0
        first_bets, first_calls = strategies[:, card].unsqueeze(1).unbind(-1)
        second_bets, second_calls = strategies[:, other_card].unsqueeze(0).unbind(-1)
        after_bet = torch.where(second_calls > 0, 2 * higher, 1.0)
        after_second_bet = torch.where(first_calls > 0, 2 * higher, -1.0)
        after_pass = torch.where(second_bets > 0, after_second_bet, higher)
        total += torch.where(first_bets > 0, after_bet, after_pass)
    return total / len(_DEALS)
