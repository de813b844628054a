"""Leduc poker, with a known equilibrium.

Shapes: E envs, B any batch dims, D deals of cards, P betting histories, I information sets.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

import torch
from tensordict import TensorDict, TensorDictBase
from torch import Tensor
from torch.nn.functional import one_hot
from torchrl.envs.utils import ExplorationType, set_exploration_type

from torchrl_marl.envs.marl_env import MarlEnv
from torchrl_marl.envs.scene import Shape
from torchrl_marl.envs.toy.probabilities import legal_probabilities
from torchrl_marl.envs.toy.roles import declare_players, zero_sum_step
from torchrl_marl.envs.toy.scenes import actions_in, cards, players
from torchrl_marl.games import SequenceForm

__all__ = [
    "DEALS",
    "FOLD",
    "SHOWDOWN",
    "Leduc",
    "Places",
    "information_sets",
    "seen",
    "sequence_form",
    "strength",
]

DEALS = torch.tensor(list(itertools.permutations(range(6), 3)))
"""Cards of the first player, the second player and the table, ``[D, 3]``; rank: ``card // 2``."""
GOES_ON, FOLD, SHOWDOWN = range(3)
"""Possible outcomes of an action."""
_UNFINISHED_ROUNDS = ("", "c", "r", "cr", "rr", "crr")
_FINISHED_ROUNDS = ("cc", "rc", "crc", "rrc", "crrc")
_HISTORIES: list[tuple[str, str | None]] = [(word, None) for word in _UNFINISHED_ROUNDS]
_HISTORIES += itertools.product(_FINISHED_ROUNDS, _UNFINISHED_ROUNDS)
_HIDDEN_CARD = 6
"""Index that stands for the public card while it is hidden, in the first round."""


class Places(NamedTuple):
    """Tables with a row for each betting history; actions are fold, pass (or call) and raise."""

    second_moves: Tensor
    """True if the second player acts, bool ``[P]``."""
    public: Tensor
    """True if the public card is visible, bool ``[P]``."""
    legal: Tensor
    """Mask of legal actions, ``[P, 3]``; an illegal action is taken as pass/call."""
    said: Tensor
    """Past moves, ``[P, 16]``: two bits, call and raise, for each of four moves in two rounds."""
    following: Tensor
    """Index of the history after each action, ``[P, 3]``; unchanged at the end of the game."""
    ends: Tensor
    """Outcome of each action, ``[P, 3]``: :data:`GOES_ON`, :data:`FOLD` or :data:`SHOWDOWN`."""
    stake: Tensor
    """Amount that the loser loses if the game ends with an action, ``[P, 3]``."""

    @classmethod
    def make(cls, device: torch.device | str = "cpu") -> Places:
        """Builds the tables on a device."""
        columns = zip(*(_table_rows(*place) for place in _HISTORIES))
        return cls(*(torch.tensor(column, device=device) for column in columns))


def _table_rows(first: str, second: str | None) -> tuple:
    """Returns the rows of one betting history, one for each of the tables."""
    moves, raise_size = (first, 2.0) if second is None else (second, 4.0)
    staked = 1 + 2.0 * first.count("r") + 4.0 * (second or "").count("r")
    legal = [moves.endswith("r"), True, moves.count("r") < 2]
    own_index = _HISTORIES.index((first, second))
    next_indices, ends, stake = [], [], []
    for action in range(3):
        new_moves = moves + ("r" if action == 2 and legal[2] else "c")
        folds = action == 0 and legal[0]
        closes = new_moves in _FINISHED_ROUNDS and not folds
        next_history = (new_moves, "" if closes else None) if second is None else (first, new_moves)
        over = folds or (closes and second is not None)
        next_indices.append(own_index if over else _HISTORIES.index(next_history))
        ends.append(FOLD if folds else SHOWDOWN if over else GOES_ON)
        stake.append(
            staked - raise_size if folds else staked
        )  # a player that folds has not paid the last raise
    encoded_history = [0.0] * 16
    for i, round_moves in enumerate((first, second or "")):
        for j, move in enumerate(round_moves):
            encoded_history[8 * i + 2 * j + (move == "r")] = 1.0
    return (
        len(moves) % 2 == 1,
        second is not None,
        legal,
        encoded_history,
        next_indices,
        ends,
        stake,
    )


def strength(cards: Tensor) -> Tensor:
    """Compares hands: 1 if the first player has the better one, -1 if the second; 0 if equal.

    A hand that forms a pair with the public card wins. If no hand does, the higher rank wins.

    Args:
        cards (Tensor): cards of both players, and the public card, ``[*B, 3]``.
    """
    rank = cards // 2
    own, public = rank[..., :2], rank[..., 2:]
    hand = own + 3 * (own == public)
    return (hand[..., 0] - hand[..., 1]).sign().float()


@cache
def information_sets() -> tuple[Tensor, Tensor]:
    """Returns the information sets of each player, and a table of their indices.

    Shapes:
        - returns: the sets ``[2, I, 3]``, each of which is three numbers: betting history, own card
          and public card (6 if it is hidden); and a table ``[P, 6, 7]``, which maps these three
          numbers to the index of the set
    """
    sets: tuple[list, list] = ([], [])
    set_indices = torch.full((len(_HISTORIES), 6, 7), -1)
    places = Places.make()
    for place, own, public in itertools.product(range(len(_HISTORIES)), range(6), range(7)):
        if own != public and (public != _HIDDEN_CARD) == bool(places.public[place]):
            player_sets = sets[int(places.second_moves[place])]
            set_indices[place, own, public] = len(player_sets)
            player_sets.append([place, own, public])
    return torch.tensor(sets), set_indices


@cache
def sequence_form() -> SequenceForm:
    """Returns the game in sequence form, with 936 information sets and 5,880 leaves."""
    places, (sets, set_indices) = Places.make(), information_sets()
    parents = torch.zeros(sets.shape[:2], dtype=torch.int64)
    leaves, payoff, won = [], [], strength(DEALS)

    def walk(place: int, before: Tensor) -> None:
        player = int(places.second_moves[place])
        public = DEALS[:, 2] if places.public[place] else torch.full((len(DEALS),), _HIDDEN_CARD)
        own_sets = set_indices[place, DEALS[:, player], public]
        parents[player, own_sets] = before[player]
        for action in places.legal[place].nonzero().flatten().tolist():
            after = before.clone()
            after[player] = 1 + 3 * own_sets + action
            outcome, stake = int(places.ends[place, action]), places.stake[place, action]
            if outcome == GOES_ON:
                walk(int(places.following[place, action]), after)
                continue
            leaves.append(after)
            folded = torch.full_like(won, 2.0 * player - 1)  # the first player's gain after a fold
            payoff.append(stake * (folded if outcome == FOLD else won))

    walk(0, torch.zeros(2, len(DEALS), dtype=torch.int64))
    legal = places.legal[sets[..., 0]]
    weighted_payoff = torch.cat(payoff).double() / len(DEALS)
    return SequenceForm(parents, legal, torch.cat(leaves, 1), weighted_payoff)


def seen(places: Places, place: Tensor, own: Tensor, public: Tensor, seat: int) -> Tensor:
    """Returns a player's observation ``[*B, 30]``, which is OpenSpiel's information state tensor.

    Args:
        places (Places): tables of the betting histories, on the device of the other arguments.
        place (Tensor): indices of the betting histories, ``[*B]``.
        own, public (Tensor): the player's card and the public card, ``[*B]``; if the public card
            is hidden, its value is ignored.
        seat (int): seat of the player, 0 or 1.
    """
    public_code = one_hot(public.clamp_max(5), 6) * places.public[place].unsqueeze(-1)
    seat_code = one_hot(torch.full_like(place, seat), 2)
    return torch.cat([seat_code, one_hot(own, 6), public_code, places.said[place]], -1).float()


class Leduc(MarlEnv):
    """Leduc poker: two players, three ranks of two cards each, two rounds of bets.

    Both players pay an ante of 1 and get a card. In the first round they pass, call, fold, or raise
    by 2, with at most two raises. Then a public card is shown, and in a second round raises are 4.
    A hand that forms a pair with the public card wins. If no hand does, the higher rank wins, and
    equal ranks split the pot. A player that folds loses its bets. The players have 936 information
    sets in total. In equilibrium the first player loses 0.0856 per game.

    Args:
        num_envs (int): number E of parallel envs.

    Keyword Args:
        max_steps, seed, device, check: as in :class:`MarlEnv`; a game has two to eight steps.

    Shapes:
        - ``("first", "observation")``, ``("second", "observation")``: ``[E, 1, 30]``: the seat
          (2), the card (6), the public card (6, zeros in the first round), and the betting history
          (16: two rounds, four moves, call or raise). ``"mask"`` is True for the player that acts
          next. Action 0 folds, 1 passes or calls, 2 raises
        - ``"action_mask"`` of each player: ``[E, 1, 3]``, all False for the player that waits
        - ``"state"``: ``[E, 34]``, both players' cards, the public card and the betting history

    Raises:
        ConfigError: an argument is unknown.

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
        declare_players(self, 30, (3, 3), 34, action_mask=True)

    # ------------------------------------------------------------------------- exact answers

    @property
    def game(self) -> Any:
        """The game as a :class:`~torchrl_marl.games.SequenceForm`."""
        return sequence_form()

    def strategies(
        self, policy: Callable[[TensorDictBase], TensorDictBase], copies: int = 100
    ) -> Tensor:
        """Returns the action probabilities in all information sets.

        The probabilities are exact if the policy writes ``action_log_prob``; see
        :func:`~.probabilities.legal_probabilities`.

        Args:
            policy (callable): policy of both players, without memory.
            copies (int): number of samples of each information set.

        Shapes:
            - returns: ``[2, 468, 3]``, float64, by player, information set and action. The sum
              over the actions is 1. The sets are in the order of :func:`information_sets`
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
            probabilities = legal_probabilities(policy, rows, list(self.group_map), copies)
        return torch.stack([probabilities[name].squeeze(-2) for name in self.group_map])

    def nash_conv(self, policy: Callable[[TensorDictBase], TensorDictBase] | Tensor) -> float:
        """Returns the NashConv: how much the players gain in total if each plays a best response.

        The result is exact. It is 0 at an equilibrium, and 4.7472 if both players act uniformly at
        random.

        Args:
            policy (callable or Tensor): policy of both players, or the result of
                :meth:`strategies`.
        """
        strategies = policy if isinstance(policy, Tensor) else self.strategies(policy)
        return sequence_form().nash_conv(strategies.cpu())

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
        outcome, stake = self.places.ends[choice], self.places.stake[choice]
        folded = torch.where(second_moves, 1.0, -1.0)  # the first player's gain after a fold
        won = torch.where(
            outcome == FOLD, folded, torch.where(outcome == SHOWDOWN, self.better, 0.0)
        )
        self.place = self.places.following[choice]
        return zero_sum_step(self._observe(), stake * won, (outcome != 0).unsqueeze(-1))

    @property
    def better(self) -> Tensor:
        """Comparison of the hands: 1 if the first player's is better, -1 if it is worse, else 0."""
        return strength(self.cards)

    def _observe(self) -> dict[str, Any]:
        second_moves, legal = self.places.second_moves[self.place], self.places.legal[self.place]
        public = self.cards[:, 2]
        output: dict[str, Any] = {}
        for seat, name in enumerate(self.group_map):
            acts = (second_moves if seat else ~second_moves).unsqueeze(-1)
            observation = seen(self.places, self.place, self.cards[:, seat], public, seat)
            leaves = {"observation": observation.unsqueeze(1), "mask": acts}
            output[name] = {**leaves, "action_mask": (legal & acts).unsqueeze(1)}
        state = [one_hot(self.cards, 6).flatten(1), self.places.said[self.place]]
        return {**output, "state": torch.cat(state, -1).float()}

    # ------------------------------------------------------------------------------- drawing

    def scene(self, index: int = 0, step: TensorDictBase | None = None) -> list[Shape]:
        """Returns a drawing of the players with all cards."""
        place, dealt = self.place[index], self.cards[index].tolist()
        first, second, public = ("JQK"[card // 2] for card in dealt)
        shown = public if bool(self.places.public[place]) else "?"
        labels_of_actions = {"0": "folds", "1": "passes, calls", "2": "raises", "": ""}
        labels = [labels_of_actions[action] for action in actions_in(self, step)]
        shapes = players(self, labels, [(-3.0, 0.0), (3.0, 0.0)])
        names, places = ["first card", "public card", "second card"], [(-1.7, 0), (0, 0), (1.7, 0)]
        return shapes + cards(names, [first, shown, second], places)
