"""What may be said in Leduc poker, what it costs, and all that a player may know.

A *place* is what both have said so far: one of six words in the first round, or one of the five
that close it and one of six in the second. In words, c passes or calls and r raises; a fold ends
the game.

Shapes: D deals, P places, I information sets of a player.
"""

from __future__ import annotations

import itertools
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import one_hot

from torchrl_marl.games import SequenceForm

__all__ = [
    "DEALS",
    "FOLD",
    "SHOWDOWN",
    "Places",
    "information_sets",
    "seen",
    "sequence_form",
    "strength",
]

DEALS = torch.tensor(list(itertools.permutations(range(6), 3)))
"""The first's card, the second's and the public one, ``[D, 3]``; ``card // 2`` is its rank."""
GOES_ON, FOLD, SHOWDOWN = range(3)
"""What an action leads to."""
_OPEN = ("", "c", "r", "cr", "rr", "crr")
_CLOSED = ("cc", "rc", "crc", "rrc", "crrc")
_PLACES: list[tuple[str, str | None]] = [(word, None) for word in _OPEN]
_PLACES += itertools.product(_CLOSED, _OPEN)
_HIDDEN = 6
"""The public card in the first round."""


class Places(NamedTuple):
    """Tables of all places; the actions are to fold, to pass or call, and to raise."""

    second_moves: Tensor
    """Whose turn it is, bool ``[P]``."""
    public: Tensor
    """Whether the public card is seen, bool ``[P]``."""
    legal: Tensor
    """``[P, 3]``; what is not legal passes or calls."""
    said: Tensor
    """Two bits, call and raise, for each of four moves in two rounds ``[P, 16]``."""
    following: Tensor
    """The next place, ``[P, 3]``; the same where the game ends."""
    ends: Tensor
    """:data:`GOES_ON`, :data:`FOLD` or :data:`SHOWDOWN`, ``[P, 3]``."""
    stake: Tensor
    """What the loser loses if the game ends so, ``[P, 3]``."""

    @classmethod
    def make(cls, device: torch.device | str = "cpu") -> Places:
        """Makes the tables on a device."""
        columns = zip(*(_place(*place) for place in _PLACES))
        return cls(*(torch.tensor(column, device=device) for column in columns))


def _place(first: str, second: str | None) -> tuple:
    """Returns a row of each of the tables."""
    word, size = (first, 2.0) if second is None else (second, 4.0)
    staked = 1 + 2.0 * first.count("r") + 4.0 * (second or "").count("r")
    legal = [word.endswith("r"), True, word.count("r") < 2]
    here = _PLACES.index((first, second))
    following, ends, stake = [], [], []
    for action in range(3):
        said = word + ("r" if action == 2 and legal[2] else "c")
        folds = action == 0 and legal[0]
        closes = said in _CLOSED and not folds
        after = (said, "" if closes else None) if second is None else (first, said)
        over = folds or (closes and second is not None)
        following.append(here if over else _PLACES.index(after))
        ends.append(FOLD if folds else SHOWDOWN if over else GOES_ON)
        stake.append(staked - size if folds else staked)  # who folds did not pay the last raise
    told = [0.0] * 16
    for i, words in enumerate((first, second or "")):
        for j, action_said in enumerate(words):
            told[8 * i + 2 * j + (action_said == "r")] = 1.0
    return len(word) % 2 == 1, second is not None, legal, told, following, ends, stake


def strength(cards: Tensor) -> Tensor:
    """Returns 1 where the first has the better hand, -1 where the second has, 0 for equal ones.

    Args:
        cards (Tensor): both players' and the public one, ``[*B, 3]``: a pair with it wins, else
            the higher rank.
    """
    rank = cards // 2
    own, public = rank[..., :2], rank[..., 2:]
    hand = own + 3 * (own == public)
    return (hand[..., 0] - hand[..., 1]).sign().float()


@cache
def information_sets() -> tuple[Tensor, Tensor]:
    """Returns all that each player may know when it moves, and their numbers.

    Shapes:
        - returns: place, own and public card, 6 where it is hidden, ``[2, I, 3]``, and the number
          of each by the same, ``[P, 6, 7]``
    """
    known: tuple[list, list] = ([], [])
    number = torch.full((len(_PLACES), 6, 7), -1)
    places = Places.make()
    for place, own, public in itertools.product(range(len(_PLACES)), range(6), range(7)):
        if own != public and (public != _HIDDEN) == bool(places.public[place]):
            sets = known[int(places.second_moves[place])]
            number[place, own, public] = len(sets)
            sets.append([place, own, public])
    return torch.tensor(known), number


@cache
def sequence_form() -> SequenceForm:
    """Returns the whole game by its players' sequences: 936 information sets, 5,880 leaves."""
    places, (known, number) = Places.make(), information_sets()
    parents = torch.zeros(known.shape[:2], dtype=torch.int64)
    leaves, payoff, won = [], [], strength(DEALS)

    def walk(place: int, before: Tensor) -> None:
        player = int(places.second_moves[place])
        public = DEALS[:, 2] if places.public[place] else torch.full((len(DEALS),), _HIDDEN)
        here = number[place, DEALS[:, player], public]
        parents[player, here] = before[player]
        for action in places.legal[place].nonzero().flatten().tolist():
            after = before.clone()
            after[player] = 1 + 3 * here + action
            how, stake = int(places.ends[place, action]), places.stake[place, action]
            if how == GOES_ON:
                walk(int(places.following[place, action]), after)
                continue
            leaves.append(after)
            folded = torch.full_like(won, 2.0 * player - 1)  # what the first gets where one folds
            payoff.append(stake * (folded if how == FOLD else won))

    walk(0, torch.zeros(2, len(DEALS), dtype=torch.int64))
    legal = places.legal[known[..., 0]]
    chance = torch.cat(payoff).double() / len(DEALS)
    return SequenceForm(parents, legal, torch.cat(leaves, 1), chance)


def seen(places: Places, place: Tensor, own: Tensor, public: Tensor, seat: int) -> Tensor:
    """Returns what a player sees, ``[*B, 30]``: OpenSpiel's information state tensor.

    Args:
        places (Places): on the device of the others.
        place (Tensor): ``[*B]``.
        own, public (Tensor): cards, ``[*B]``; the public one counts where it is seen.
        seat (int): 0 or 1.
    """
    shown = one_hot(public.clamp_max(5), 6) * places.public[place].unsqueeze(-1)
    who = one_hot(torch.full_like(place, seat), 2)
    return torch.cat([who, one_hot(own, 6), shown, places.said[place]], -1).float()
