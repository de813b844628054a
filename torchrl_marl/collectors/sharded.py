"""Collection of batches from shards, in this process or elsewhere."""

from __future__ import annotations

import warnings
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from tensordict import TensorDictBase
from torch import Tensor, nn

from torchrl_marl.collectors.shard import Shard, is_exact

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
    """Record of a batch that has begun, from which it can be replayed."""

    weights: Weights
    """Weights of the policy in this batch."""
    with_state: bool = False
    """True if the shards' states after the batch are returned."""


class ReplayLog:
    """Snapshots of all shards, and a record of the batches that have begun since.

    A lost shard is restored from its snapshot and replays the batches of ``entries``. The learner
    has already taken the first ``taken`` of these batches.

    Args:
        keep_records (bool): whether to keep the records of batches that were taken. False if lost
            shards begin new episodes instead of replaying batches.

    Attributes:
        snapshots (list of dict, optional): snapshots of the shards; None if the shards are replayed
            from their initial states.
        entries (list of WeightsRecord): batches that have begun since the snapshots.
        taken (int): number of these batches that were taken.

    Examples:
        >>> replay_log = ReplayLog()
        >>> for _ in range(2):
        ...     replay_log.begin(WeightsRecord({}))
        >>> replay_log.take(None)
        >>> len(replay_log.entries), replay_log.taken
        (2, 1)
        >>> replay_log.take([{"random": 0}])
        >>> len(replay_log.entries), replay_log.taken
        (0, 0)
    """

    def __init__(self, keep_records: bool = True) -> None:
        self.keep_records = keep_records
        self.snapshots: list[dict[str, Any]] | None = None
        self.entries: list[WeightsRecord] = []
        self.taken = 0

    def begin(self, entry: WeightsRecord) -> None:
        """Records that a batch has begun."""
        self.entries.append(entry)

    def take(self, snapshots: Sequence[dict[str, Any]] | None) -> None:
        """Records that the oldest batch has been taken.

        Args:
            snapshots (sequence of dict, optional): states of the shards after this batch.
        """
        self.taken += 1
        if snapshots is not None:
            self.snapshots = list(snapshots)
        if snapshots is not None or not self.keep_records:
            del self.entries[: self.taken]
            self.taken = 0

    def state_dict(self) -> dict[str, Any]:
        """Returns the snapshots, and the weights of the batches that have begun since."""
        entries = [dict(entry.weights) for entry in self.entries]
        return {"shards": self.snapshots, "weights": entries, "taken": self.taken}


@dataclass
class ShardResult:
    """A shard's part of a batch."""

    batch: TensorDictBase
    """The data, ``[E, T]``."""
    state: dict[str, Any] | None = None
    """State of the shard after the batch, if requested."""
    lost: bool = False
    """True if running episodes were lost, so that the batch begins new ones."""


class Placement(Protocol):
    """Protocol of shards in this process or elsewhere; batches are taken in the order they began.

    Attributes:
        counters (dict): counts of restarts and lost episodes, for the metrics.
    """

    counters: dict[str, int]

    def begin(self, weights: Weights | None, with_state: bool = False) -> None:
        """Starts a batch on every shard.

        Args:
            weights (mapping, optional): weights of the policy; None if the shards use the learner's
                policy itself.
            with_state (bool): whether to return the shards' states, too.
        """

    def take(self, replay_log: ReplayLog) -> list[ShardResult]:
        """Returns every shard's part of the oldest batch in progress, in the shards' order.

        Args:
            replay_log (ReplayLog): log from which lost shards are restored.

        Raises:
            NonFiniteError: a value is NaN or infinite; the message names the entry.
            WorkerError: a shard cannot be restored.
        """

    def states(self) -> list[dict[str, Any]]:
        """Returns the states of the shards at the end of the batch that began last."""

    def load(self, states: Sequence[Mapping[str, Any]] | None) -> list[bool]:
        """Restores the shards; without states, starts new episodes in all of them.

        Returns:
            list of bool: for each shard, True if no episode is lost.
        """

    def close(self) -> None:
        """Closes the environments."""


class LocalPlacement:
    """Shards in this process, which collect sequentially.

    Args:
        makers (sequence of callable): ``maker(n_restarts)`` builds a shard.
    """

    def __init__(self, makers: Sequence[Callable[[int], Shard]]) -> None:
        self.makers = list(makers)
        self.shards = [make(0) for make in makers]
        self.counters = {"collector_restarts": 0, "episodes_lost": 0}  # always 0 here
        self._finished_batches: deque[list[ShardResult]] = deque()

    def begin(self, weights: Weights | None, with_state: bool = False) -> None:
        """Collects a batch from every shard."""
        played = [ShardResult(shard.rollout(weights)) for shard in self.shards]
        for shard, own in zip(self.shards, played):
            own.state = shard.state_dict() if with_state else None
        self._finished_batches.append(played)

    def take(self, replay_log: ReplayLog) -> list[ShardResult]:
        """Returns every shard's part of the oldest batch."""
        return self._finished_batches.popleft()

    def states(self) -> list[dict[str, Any]]:
        """Returns the states of the shards."""
        return [shard.state_dict() for shard in self.shards]

    def load(self, states: Sequence[Mapping[str, Any]] | None) -> list[bool]:
        """Restores the shards; without states, starts new episodes in all of them."""
        self._finished_batches.clear()
        if states is None:
            for shard in self.shards:
                shard.collector.load_state_dict({})
            return [False] * len(self.shards)
        return [self._load_shard(i, state) for i, state in enumerate(states)]

    def _load_shard(self, i: int, state: Mapping[str, Any]) -> bool:
        if is_exact(state):
            return self.shards[i].load_state_dict(state)
        self.shards[i].close()
        self.shards[i] = self.makers[i](state["life"] + 1)
        return False

    def close(self) -> None:
        """Closes the environments."""
        for shard in self.shards:
            shard.close()


class ShardedCollector:
    """Collects batches ``[E, T]`` from shards, with the envs in the order of the shards.

    Shards that are in other processes or collect ahead act with the weights that the policy had at
    the start of the batch. The batch of iteration ``k`` begins when iteration ``k - overlap`` has
    ended, wherever the shards are, so batches do not depend on the placement of the shards.

    Args:
        placement (Placement): the shards.
        policy (nn.Module): policy of the learner.
        overlap (int): number of batches that are collected ahead of learning.
        snapshot_every (int): number of batches between two snapshots, from which lost shards are
            restored. With 0 there are no snapshots, and the shards are asked for their states when
            a run is saved.
        shares_policy (bool): whether the shards use the learner's policy itself.
        device (torch.device, optional): device of batches; by default that of the shards.

    Attributes:
        renewed (Tensor, optional): mask of the envs that lost their running episodes before the
            last batch, bool ``[E]``; None if no env did.

    Keys:
        - writes: ``("collector", "traj_ids")``, ``[E, T]``, unique among all shards

    Examples:
        >>> from functools import partial
        >>> from torchrl_marl import TeamSpec
        >>> from torchrl_marl.collectors.sharded import LocalPlacement
        >>> from torchrl_marl.collectors.shard import Shard, shard_seed
        >>> from torchrl_marl.envs import VmasEnv
        >>> from torchrl_marl.runtime.random_state import RandomState
        >>> def make(number, n_restarts):
        ...     random = RandomState(shard_seed(0, number, n_restarts))
        ...     with random.active():
        ...         env = VmasEnv("balance", num_envs=4, max_steps=100, seed=number)
        ...     team = TeamSpec.from_env(env)
        ...     return Shard(env, env.rand_action, random, frames_per_batch=40, team=team)
        >>> here = LocalPlacement([partial(make, number) for number in range(2)])
        >>> ShardedCollector(here, torch.nn.Identity(), shares_policy=True).rollout().shape
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
        shares_policy: bool = False,
        device: torch.device | str | None = None,
    ) -> None:
        if shares_policy and overlap:
            raise ValueError("overlap is given, but shards act by the learner's policy itself.")
        self.placement, self.policy, self.device = placement, policy, device
        self.overlap, self.shares_policy = overlap, shares_policy
        self.snapshot_every = 0 if shares_policy else snapshot_every
        self.frames = 0
        self.renewed: Tensor | None = None
        self._replay_log = ReplayLog(keep_records=self.snapshot_every > 0)
        self._n_begun = 0
        self._n_ahead = 0
        self._previous_counters: dict[str, int] = {}

    @property
    def counters(self) -> dict[str, int]:
        """Counts of restarts and lost episodes."""
        own = self.placement.counters
        return {name: count + self._previous_counters.get(name, 0) for name, count in own.items()}

    def rollout(self) -> TensorDictBase:
        """Collects one batch.

        Raises:
            NonFiniteError: a value is NaN or infinite; the message names the entry.
            WorkerError: a shard cannot be restored.
        """
        if not self._n_ahead:
            self._begin_batch()
        played = self.placement.take(self._replay_log)
        self._n_ahead -= 1
        if not self.shares_policy:
            states = [own.state for own in played if own.state is not None]
            self._replay_log.take(states or None)
        batch = self._concatenate(played)
        while self._n_ahead < self.overlap:
            self._begin_batch()
        self.frames += batch.numel()
        return batch

    def _begin_batch(self) -> None:
        self._n_begun += 1
        self._n_ahead += 1
        if self.shares_policy:
            self.placement.begin(None)
            return
        due = self.snapshot_every > 0 and self._n_begun % self.snapshot_every == 0
        entry = WeightsRecord(self._copy_weights(), due)
        self._replay_log.begin(entry)
        self.placement.begin(entry.weights, due)

    def _copy_weights(self) -> Weights:
        state = self.policy.state_dict()
        return {name: value.detach().cpu().clone() for name, value in state.items()}

    def _concatenate(self, played: list[ShardResult]) -> TensorDictBase:
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
        """Returns the state of the shards, including batches that were begun ahead."""
        if not self._n_begun:
            return {"frames": self.frames}
        state = self._replay_log.state_dict()
        if not self.snapshot_every:
            state["shards"] = self.placement.states()
        return {"frames": self.frames, "counters": self.counters, **state}

    def load_state_dict(self, state: Mapping[str, Any]) -> bool:
        """Restores a saved state; an empty one starts new episodes.

        Returns:
            bool: whether the episodes of all shards continue.
        """
        self.frames = state.get("frames", self.frames)
        self._previous_counters = dict(state.get("counters", {}))
        shards, entries = state.get("shards"), state.get("weights", [])
        begun = shards is not None or bool(entries)
        continues = [True]
        if shards is not None or self._n_begun:
            continues = self.placement.load(shards)
        self._replay_log = ReplayLog(keep_records=self.snapshot_every > 0)
        self._replay_log.snapshots = None if shards is None else list(shards)
        self._n_ahead, self._n_begun = 0, int(begun)
        if any(continues) and not all(continues):
            warnings.warn(
                f"shards {[i for i, own in enumerate(continues) if not own]} begin new episodes, "
                "because their environments could not be restored.",
                stacklevel=2,
            )
        self._replay(entries, state.get("taken", 0))
        return begun and all(continues)

    def _replay(self, entries: list[Weights], taken: int) -> None:
        """Replays the batches that began after the shards' snapshots."""
        for i, weights in enumerate(entries):
            self._replay_log.begin(WeightsRecord(weights))
            self.placement.begin(weights)
            if i < taken:
                self.placement.take(self._replay_log)
                self._replay_log.take(None)
            else:
                self._n_ahead += 1

    def shutdown(self) -> None:
        """Closes the environments."""
        self.placement.close()
