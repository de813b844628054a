"""Leduc poker: six cards, two rounds of bets, and its exact answers.

Shapes: E envs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from tensordict import TensorDict, TensorDictBase
from torch import Tensor
from torch.nn.functional import one_hot
from torchrl.data import Categorical, Unbounded
from torchrl.envs.utils import ExplorationType, set_exploration_type

from torchrl_marl.envs.marl_env import MarlEnv
from torchrl_marl.envs.scene import Shape
from torchrl_marl.envs.toy.chances import legal_chances
from torchrl_marl.envs.toy.leduc_rules import (
    DEALS,
    FOLD,
    SHOWDOWN,
    Places,
    information_sets,
    seen,
    sequence_form,
    strength,
)
from torchrl_marl.envs.toy.scenes import actions_in, cards, players
from torchrl_marl.specs import AgentSpec

__all__ = ["Leduc"]


class Leduc(MarlEnv):
    """Leduc poker: two players, three ranks of two cards each, two rounds of bets.

    Both put in 1 and get a card. The first begins; they pass, call or raise by 2, with two raises
    at most. Then a public card is seen, and they do so again, with raises of 4. Who pairs the
    public card wins, else the higher rank does; equal ranks share. Who folds loses what it has put
    in. Together the players have 936 information sets; the first loses 0.0856 a game where both
    play best.

    Args:
        num_envs (int): number E of vectorized envs.

    Keyword Args:
        max_steps, seed, device, check: as in :class:`MarlEnv`; a game has two to eight steps.

    Shapes:
        - ``("first", "observation")``, ``("second", "observation")``: ``[E, 1, 30]``, one's seat
          (2), one's card (6), the public card (6, zeros in the first round), and what was said (two
          rounds, four moves, call or raise); ``"mask"`` says whose turn it is. Actions: 0 folds,
          1 passes or calls, 2 raises; ``"action_mask"``: ``[E, 1, 3]``, nothing while one waits
        - ``"state"``: ``[E, 34]``, both players' cards, the public one and what was said

    Raises:
        ConfigError: an unknown argument.

    Reference: Southey et al., 2005, https://arxiv.org/abs/1207.1411. The observation is the
    information state tensor of OpenSpiel's ``leduc_poker``.

    Examples:
        >>> env = Leduc(2, seed=0)
        >>> uniform = env.game.legal.double() / env.game.legal.sum(-1, keepdim=True)
        >>> round(env.nash_conv(uniform), 4), round(env.game.value(uniform), 6)
        (4.7472, -0.078125)
    """

    in_turns = True
    optimal_return = -0.0856064
    random_return = -0.078125

    def __init__(self, num_envs: int, **kwargs: Any) -> None:
        super().__init__(num_envs, **kwargs)
        self.deals, self.places = DEALS.to(self.device), Places.make(self.device)
        for name in ("first", "second"):
            observation, actions = Unbounded((30,)), Categorical(3)
            self.register_agent(AgentSpec(name, 1, observation, actions, action_mask=True))
        self.register_state(Unbounded((34,)))

    # ------------------------------------------------------------------------- exact answers

    @property
    def game(self) -> Any:
        """The whole game, a :class:`~torchrl_marl.games.SequenceForm`."""
        return sequence_form()

    def strategies(
        self, policy: Callable[[TensorDictBase], TensorDictBase], copies: int = 100
    ) -> Tensor:
        """Returns what both players do, by one call on all that they may know.

        Exact for policies that write ``action_log_prob``; see :func:`~.chances.legal_chances`.

        Args:
            policy (callable): acts for both players, without memory.
            copies (int): how often each situation is in the call.

        Shapes:
            - returns: ``[2, 468, 3]``, float64: player, information set, action; sums to 1. Which
              set is which: :func:`~.leduc_rules.information_sets`
        """
        rows = TensorDict({}, [468], device=self.device)
        for seat, name in enumerate(self.group_map):
            place, own, public = information_sets()[0][seat].to(self.device).unbind(-1)
            group = {
                "observation": seen(self.places, place, own, public, seat).unsqueeze(1),
                "mask": torch.ones(468, 1, dtype=torch.bool, device=self.device),
                "action_mask": self.places.legal[place].unsqueeze(1),
            }
            rows[name] = TensorDict(group, [468, 1])
        with torch.no_grad(), set_exploration_type(ExplorationType.RANDOM):
            found = legal_chances(policy, rows, list(self.group_map), copies)
        return torch.stack([found[name].squeeze(-2) for name in self.group_map])

    def nash_conv(self, policy: Callable[[TensorDictBase], TensorDictBase] | Tensor) -> float:
        """Returns what best responses would gain, of both players together; 0 at an equilibrium.

        Exact. Uniform play has 4.7472.

        Args:
            policy (callable or Tensor): or what :meth:`strategies` returns.
        """
        found = policy if isinstance(policy, Tensor) else self.strategies(policy)
        return sequence_form().nash_conv(found.cpu())

    # ------------------------------------------------------------------------------ dynamics

    def _reset(self, tensordict: TensorDictBase | None) -> dict[str, Any]:
        deal = torch.randint(len(DEALS), (self.num_envs,), device=self.device)
        self.cards = self.deals[deal]
        self.place = torch.zeros_like(deal)
        return self._observe()

    def _step(self, tensordict: TensorDictBase) -> dict[str, Any]:
        first, second = (tensordict[name, "action"].squeeze(-1) for name in self.group_map)
        second_moves = self.places.second_moves[self.place]
        choice = (self.place, torch.where(second_moves, second, first))
        how, stake = self.places.ends[choice], self.places.stake[choice]
        folded = torch.where(second_moves, 1.0, -1.0)  # what the first gets where one folds
        won = torch.where(how == FOLD, folded, torch.where(how == SHOWDOWN, self.better, 0.0))
        won = (stake * won).view(-1, 1, 1)
        self.place = self.places.following[choice]
        out = self._observe()
        out["first"]["reward"], out["second"]["reward"] = won, -won
        return {**out, "terminated": (how != 0).unsqueeze(-1)}

    @property
    def better(self) -> Tensor:
        """1 where the first has the better hand, -1 where the second has, 0 for equal ones."""
        return strength(self.cards)

    def _observe(self) -> dict[str, Any]:
        second_moves, legal = self.places.second_moves[self.place], self.places.legal[self.place]
        public = self.cards[:, 2]
        out: dict[str, Any] = {}
        for seat, name in enumerate(self.group_map):
            moves = (second_moves if seat else ~second_moves).unsqueeze(-1)
            observed = seen(self.places, self.place, self.cards[:, seat], public, seat)
            own = {"observation": observed.unsqueeze(1), "mask": moves}
            out[name] = {**own, "action_mask": (legal & moves).unsqueeze(1)}
        state = [one_hot(self.cards, 6).flatten(1), self.places.said[self.place]]
        return {**out, "state": torch.cat(state, -1).float()}

    # ------------------------------------------------------------------------------- drawing

    def scene(self, index: int = 0, step: TensorDictBase | None = None) -> list[Shape]:
        """Returns the players and the cards, which only we see all."""
        place, own = self.place[index], self.cards[index].tolist()
        first, second, public = ("JQK"[card // 2] for card in own)
        shown = public if bool(self.places.public[place]) else "?"
        words = {"0": "folds", "1": "passes, calls", "2": "raises", "": ""}
        said = [words[word] for word in actions_in(self, step)]
        shapes = players(self, said, [(-3.0, 0.0), (3.0, 0.0)])
        names, where = ["first card", "public card", "second card"], [(-1.7, 0), (0, 0), (1.7, 0)]
        return shapes + cards(names, [first, shown, second], where)
