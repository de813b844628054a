"""Collects from shards, wherever they are placed."""

from __future__ import annotations

import warnings
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from tensordict import TensorDictBase
from torch import Tensor, nn

from torchrl_marl.collectors.shard import Shard, goes_on

__all__ = [
    "LocalPlacement",
    "Placement",
    "ReplayLog",
    "ShardResult",
    "ShardedCollector",
    "Weights",
    "WeightsRecord",
]

Weights = Mapping[str, Tensor]


@dataclass(frozen=True)
class WeightsRecord:
    """A batch that was begun."""

    weights: Weights
    """Of the policy that plays it."""
    with_state: bool = False
    """Whether the shards' states behind it are wanted."""


class ReplayLog:
    """Snapshots of all shards, and the batches that were begun after them.

    From both a shard comes back to where it is, wherever it is put: it plays the batches of
    ``entries`` again, of which the first ``taken`` have been learned from already.

    Args:
        keeps (bool): False where a shard that is lost begins anew; what was taken is then
            forgotten.

    Attributes:
        snapshots (list of dict, optional): of every shard; None: as they were made.
        entries (list of Entry): the batches begun since.
        taken (int): how many of these batches have been taken.

    Examples:
        >>> journal = ReplayLog()
        >>> journal.begin(WeightsRecord({})), journal.begin(WeightsRecord({})), journal.take(None)
        (None, None, None)
        >>> len(journal.entries), journal.taken
        (2, 1)
        >>> journal.take([{"random": 0}])
        >>> len(journal.entries), journal.taken
        (0, 0)
    """

    def __init__(self, keeps: bool = True) -> None:
        self.keeps = keeps
        self.snapshots: list[dict[str, Any]] | None = None
        self.entries: list[WeightsRecord] = []
        self.taken = 0

    def begin(self, entry: WeightsRecord) -> None:
        """Notes a batch that is begun."""
        self.entries.append(entry)

    def take(self, snapshots: Sequence[dict[str, Any]] | None) -> None:
        """Notes that the oldest batch was taken.

        Args:
            snapshots (sequence of dict, optional): the shards' states behind it.
        """
        self.taken += 1
        if snapshots is not None:
            self.snapshots = list(snapshots)
        if snapshots is not None or not self.keeps:
            del self.entries[: self.taken]
            self.taken = 0

    def state_dict(self) -> dict[str, Any]:
        """Returns what shards are put back from."""
        entries = [dict(entry.weights) for entry in self.entries]
        return {"shards": self.snapshots, "weights": entries, "taken": self.taken}


@dataclass
class ShardResult:
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

    def take(self, journal: ReplayLog) -> list[ShardResult]:
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


class LocalPlacement:
    """Shards in this process, one after the other.

    Args:
        makers (sequence of callable): ``maker(life)`` makes a shard.
    """

    def __init__(self, makers: Sequence[Callable[[int], Shard]]) -> None:
        self.makers = list(makers)
        self.shards = [make(0) for make in makers]
        self.counters = {"collector_restarts": 0, "episodes_lost": 0}  # as everywhere
        self._played: deque[list[ShardResult]] = deque()

    def begin(self, weights: Weights | None, with_state: bool = False) -> None:
        """Plays a batch."""
        played = [ShardResult(shard.rollout(weights)) for shard in self.shards]
        for shard, own in zip(self.shards, played):
            own.state = shard.state_dict() if with_state else None
        self._played.append(played)

    def take(self, journal: ReplayLog) -> list[ShardResult]:
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


class ShardedCollector:
    """Collects from shards: batches ``[E, T]``, the shards' envs one after the other.

    Shards that play in a process of their own, or ahead, take the weights of the policy as they
    were when their batch was begun: that of iteration ``k`` is begun when iteration
    ``k - overlap`` has ended. What is collected depends on nothing else, so not on where shards
    are.

    Args:
        placement (Placement): the shards.
        policy (nn.Module): of the learner.
        overlap (int): batches that are begun ahead.
        snapshot_every (int): batches between two snapshots of the shards, from which one is put
            back; 0: none are kept, and the shards are asked for their states when they are needed.
        live (bool): shards act by the learner's policy itself.
        device (torch.device, optional): of batches; by default they stay where they were made.

    Attributes:
        renewed (Tensor, optional): the envs whose running episodes were lost before the last
            batch, bool ``[E]``.

    Keys:
        - writes: ``("collector", "traj_ids")`` ``[E, T]``, which differ between shards

    Examples:
        >>> from functools import partial
        >>> from torchrl_marl import TeamSpec
        >>> from torchrl_marl.collectors.sharded import LocalPlacement
        >>> from torchrl_marl.collectors.shard import Shard, shard_seed
        >>> from torchrl_marl.envs import VmasEnv
        >>> from torchrl_marl.runtime.random_state import RandomState
        >>> def make(number, life):
        ...     random = RandomState(shard_seed(0, number, life))
        ...     with random.active():
        ...         env = VmasEnv("balance", num_envs=4, max_steps=100, seed=number)
        ...     team = TeamSpec.from_env(env)
        ...     return Shard(env, env.rand_action, random, frames_per_batch=40, team=team)
        >>> here = LocalPlacement([partial(make, number) for number in range(2)])
        >>> ShardedCollector(here, torch.nn.Identity(), live=True).rollout().shape
        torch.Size([8, 10])
    """

    follows = True

    def __init__(
        self,
        placement: Placement,
        policy: nn.Module,
        *,
        overlap: int = 0,
        snapshot_every: int = 1,
        live: bool = False,
        device: torch.device | str | None = None,
    ) -> None:
        if live and overlap:
            raise ValueError("overlap is given, but shards act by the learner's policy itself.")
        self.placement, self.policy, self.device = placement, policy, device
        self.overlap, self.live = overlap, live
        self.snapshot_every = 0 if live else snapshot_every
        self.frames = 0
        self.renewed: Tensor | None = None
        self._journal = ReplayLog(keeps=self.snapshot_every > 0)
        self._begun = 0
        self._ahead = 0
        self._before: dict[str, int] = {}

    @property
    def counters(self) -> dict[str, int]:
        """What befell the shards."""
        own = self.placement.counters
        return {name: count + self._before.get(name, 0) for name, count in own.items()}

    def rollout(self) -> TensorDictBase:
        """Collects one batch.

        Raises:
            NonFiniteError: naming what is not finite.
            WorkerError: a shard that cannot be put back.
        """
        if not self._ahead:
            self._begin()
        played = self.placement.take(self._journal)
        self._ahead -= 1
        if not self.live:
            states = [own.state for own in played if own.state is not None]
            self._journal.take(states or None)
        batch = self._side_by_side(played)
        while self._ahead < self.overlap:
            self._begin()
        self.frames += batch.numel()
        return batch

    def _begin(self) -> None:
        self._begun += 1
        self._ahead += 1
        if self.live:
            self.placement.begin(None)
            return
        due = self.snapshot_every > 0 and self._begun % self.snapshot_every == 0
        entry = WeightsRecord(self._weights(), due)
        self._journal.begin(entry)
        self.placement.begin(entry.weights, due)

    def _weights(self) -> Weights:
        state = self.policy.state_dict()
        return {name: value.detach().cpu().clone() for name, value in state.items()}

    def _side_by_side(self, played: list[ShardResult]) -> TensorDictBase:
        batches = [own.batch for own in played]
        for shard, batch in enumerate(batches):
            ids = batch.get(("collector", "traj_ids"))
            batch.set(("collector", "traj_ids"), ids * len(batches) + shard)
        batch = batches[0].clone() if len(batches) == 1 else torch.cat(batches, 0)
        batch = batch if self.device is None else batch.to(self.device)
        lost = [torch.full(own.batch.shape[:1], own.lost) for own in played]
        self.renewed = torch.cat(lost).to(batch.device) if any(o.lost for o in played) else None
        return batch

    def finish(self, batch: TensorDictBase) -> None:
        """Does nothing: each shard has checked its part of the batch."""

    def state_dict(self) -> dict[str, Any]:
        """Returns all from which the shards go on, also those that have played ahead."""
        if not self._begun:
            return {"frames": self.frames}
        state = self._journal.state_dict()
        if not self.snapshot_every:
            state["shards"] = self.placement.states()
        return {"frames": self.frames, "counters": self.counters, **state}

    def load_state_dict(self, state: Mapping[str, Any]) -> bool:
        """Goes on from a saved state; from an empty one, new episodes begin.

        Returns:
            bool: whether the episodes of all shards go on.
        """
        self.frames = state.get("frames", self.frames)
        self._before = dict(state.get("counters", {}))
        shards, entries = state.get("shards"), state.get("weights", [])
        begun = shards is not None or bool(entries)
        went_on = [True]
        if shards is not None or self._begun:
            went_on = self.placement.load(shards)
        self._journal = ReplayLog(keeps=self.snapshot_every > 0)
        self._journal.snapshots = None if shards is None else list(shards)
        self._ahead, self._begun = 0, int(begun)
        if any(went_on) and not all(went_on):
            warnings.warn(
                f"shards {[i for i, own in enumerate(went_on) if not own]} begin new episodes, "
                "since their environments could not be put back.",
                stacklevel=2,
            )
        self._play_again(entries, state.get("taken", 0))
        return begun and all(went_on)

    def _play_again(self, entries: list[Weights], taken: int) -> None:
        """Brings shards from their snapshots to where they were."""
        for i, weights in enumerate(entries):
            self._journal.begin(WeightsRecord(weights))
            self.placement.begin(weights)
            if i < taken:
                self.placement.take(self._journal)
                self._journal.take(None)
            else:
                self._ahead += 1

    def shutdown(self) -> None:
        """Closes the environments."""
        self.placement.close()
