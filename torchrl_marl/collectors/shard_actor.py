"""What an actor of Ray does: it makes shards, and plays their batches."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import Any

from torchrl_marl.collectors.shard import Shard, goes_on
from torchrl_marl.collectors.shipping import from_arrays, pack
from torchrl_marl.trust import trusting

__all__ = ["ShardActor"]


class ShardActor:
    """Some of a run's shards, in a process of their own.

    Examples:
        >>> ShardActor().ready()
        True
    """

    def __init__(self) -> None:
        self.shards: dict[int, Shard] = {}

    def ready(self, *makers: Callable[[int], Shard]) -> bool:
        """Answers, once the process has imported what makers of shards need."""
        return True

    def process(self) -> int:
        """Returns the number of its process, for tests and tools."""
        return os.getpid()

    def make(
        self,
        makers: Mapping[int, Callable[[int], Shard]],
        lives: Mapping[int, int],
        states: Mapping[int, Mapping[str, Any]],
        trust: bool,
    ) -> dict[int, bool]:
        """Makes shards, instead of those that there are.

        Args:
            makers (mapping): number of a shard -> ``maker(life)``.
            lives (mapping): how often each has begun anew.
            states (mapping): what each is put back to, where it is known.
            trust (bool): take pickled worlds in states for one's own.

        Returns:
            dict: whether no episode of a shard is lost.
        """
        for shard in self.shards.values():
            shard.close()
        self.shards = {i: make(lives[i]) for i, make in makers.items()}
        kept = dict.fromkeys(self.shards, True)
        with trusting(trust):
            for i, state in states.items():
                kept[i] = goes_on(state) and self.shards[i].load_state_dict(state)
        return kept

    def play(self, weights: Mapping[str, Any], with_state: bool) -> list[tuple[dict, dict | None]]:
        """Returns a batch of each shard as arrays, and its state, if it is asked for."""
        given = from_arrays(weights)
        played = []
        for shard in self.shards.values():
            batch = pack(shard.rollout(given))
            played.append((batch, shard.state_dict() if with_state else None))
        return played

    def states(self) -> dict[int, dict[str, Any]]:
        """Returns the states of its shards."""
        return {i: shard.state_dict() for i, shard in self.shards.items()}

    def close(self) -> None:
        """Closes the environments."""
        for shard in self.shards.values():
            shard.close()
        self.shards = {}
