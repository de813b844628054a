"""Where shards are: the protocol, and this process.

Shapes: E envs of a shard, T steps.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from tensordict import TensorDictBase

from torchrl_marl.collectors.journal import Journal, Weights
from torchrl_marl.collectors.shard import Shard, goes_on

__all__ = ["Here", "Placement", "Played"]


@dataclass
class Played:
    """What a shard has played."""

    batch: TensorDictBase
    """``[E, T]``."""
    state: dict[str, Any] | None = None
    """The shard's behind the batch, where it was asked for."""
    lost: bool = False
    """Whether the shard's running episodes were lost before the batch, which began new ones."""


class Placement(Protocol):
    """Shards somewhere: batches are begun, and taken in the same order.

    Attributes:
        counters (dict): what befell the shards, for the metrics.
    """

    counters: dict[str, int]

    def begin(self, weights: Weights | None, with_state: bool = False) -> None:
        """Lets every shard play a batch.

        Args:
            weights (mapping, optional): of the policy; None where shards act by the learner's own.
            with_state (bool): return the shards' states, too.
        """

    def take(self, journal: Journal) -> list[Played]:
        """Returns what every shard has played of the oldest batch begun, in the shards' order.

        Args:
            journal (Journal): from which a shard that was lost is put back.

        Raises:
            NonFiniteError: naming what is not finite.
            WorkerError: a shard that cannot be put back.
        """

    def states(self) -> list[dict[str, Any]]:
        """Returns the states of the shards behind the last batch begun."""

    def load(self, states: Sequence[Mapping[str, Any]] | None) -> list[bool]:
        """Puts the shards back, or lets all begin anew.

        Returns:
            list of bool: whether no episode is lost, of each.
        """

    def close(self) -> None:
        """Closes the environments."""


class Here:
    """Shards in this process, one after the other.

    Args:
        makers (sequence of callable): ``maker(life)`` makes a shard.
    """

    def __init__(self, makers: Sequence[Callable[[int], Shard]]) -> None:
        self.makers = list(makers)
        self.shards = [make(0) for make in makers]
        self.counters = {"collector_restarts": 0, "episodes_lost": 0}  # as everywhere
        self._played: deque[list[Played]] = deque()

    def begin(self, weights: Weights | None, with_state: bool = False) -> None:
        """Plays a batch."""
        played = [Played(shard.rollout(weights)) for shard in self.shards]
        for shard, own in zip(self.shards, played):
            own.state = shard.state_dict() if with_state else None
        self._played.append(played)

    def take(self, journal: Journal) -> list[Played]:
        """Returns what every shard has played."""
        return self._played.popleft()

    def states(self) -> list[dict[str, Any]]:
        """Returns the states of the shards."""
        return [shard.state_dict() for shard in self.shards]

    def load(self, states: Sequence[Mapping[str, Any]] | None) -> list[bool]:
        """Puts the shards back, or lets all begin anew."""
        self._played.clear()
        if states is None:
            for shard in self.shards:
                shard.collector.load_state_dict({})
            return [False] * len(self.shards)
        return [self._load(i, state) for i, state in enumerate(states)]

    def _load(self, i: int, state: Mapping[str, Any]) -> bool:
        if goes_on(state):
            return self.shards[i].load_state_dict(state)
        self.shards[i].close()
        self.shards[i] = self.makers[i](state["life"] + 1)
        return False

    def close(self) -> None:
        """Closes the environments."""
        for shard in self.shards:
            shard.close()
