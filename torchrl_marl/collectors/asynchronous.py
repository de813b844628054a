"""Asynchronous collection: a batch consists of the parts that arrive first, from any shards.

Shapes: E envs in a batch, T steps.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from typing import Any

import torch
from tensordict import TensorDictBase
from torch import Tensor, nn

from torchrl_marl.collectors.ray import RayPlacement
from torchrl_marl.collectors.sharded import ReplayLog, ShardResult, Weights, WeightsRecord

__all__ = ["AsynchronousCollector"]


class AsynchronousCollector:
    """Collects batches ``[E, T]`` from shards on Ray actors that never wait for each other.

    A *fragment* is T steps of one shard. An actor that has finished its fragments starts new ones
    at once, with the newest weights. A batch has as many fragments as there are shards, and a fast
    shard may contribute several. Fragments that were collected with too old a policy are dropped
    and counted. Batches depend on timing, so runs cannot be repeated exactly;
    :class:`~torchrl_marl.collectors.sharded.ShardedCollector` is reproducible.

    Args:
        placement (RayPlacement): the shards. They must write into batches the rewards and lengths
            summed so far in unfinished episodes.
        policy (nn.Module): policy of the learner.
        max_lag (int): maximum age of a fragment's weights: the number of batches that the policy
            has learned from since then.
        device (torch.device, optional): device of batches.

    Attributes:
        follows (bool): False: an episode in a row of a batch need not continue in the same row of
            the next batch.

    Keys:
        - writes: ``("collector", "policy_version")``: the number of batches that the acting policy
          had learned from, ``[E, T]``
    """

    follows = False
    renewed: Tensor | None = None

    def __init__(
        self,
        placement: RayPlacement,
        policy: nn.Module,
        *,
        max_lag: int,
        device: torch.device | str | None = None,
    ) -> None:
        self.placement, self.policy, self.max_lag, self.device = placement, policy, max_lag, device
        self.n_shards = len(placement.makers)
        self.frames = self.version = self.dropped = 0
        self._snapshots: list[dict[str, Any] | None] = [None] * self.n_shards
        self._pending_calls: dict[
            Any, tuple[int, int, WeightsRecord]
        ] = {}  # call -> actor, version, weights
        self._ready_fragments: deque[tuple[int, int, ShardResult]] = deque()  # shard, version

    @property
    def counters(self) -> dict[str, int]:
        """Counts of restarts, lost episodes and dropped fragments."""
        return {**self.placement.counters, "fragments_dropped": self.dropped}

    def rollout(self) -> TensorDictBase:
        """Collects one batch; waits for as many fragments as there are shards.

        Raises:
            NonFiniteError: a value is NaN or infinite; the message names the entry.
            WorkerError: a shard cannot be restored.
        """
        weights = self._copy_weights()
        idle = set(range(len(self.placement.actors)))
        for a in idle - {a for a, _, _ in self._pending_calls.values()}:
            self._start_actor(a, weights)
        fragments: list[TensorDictBase] = []
        while len(fragments) < self.n_shards:
            while self._ready_fragments and len(fragments) < self.n_shards:
                fragments += self._accept_fragment(*self._ready_fragments.popleft())
            if len(fragments) < self.n_shards:
                self._wait_for_actor(weights)
        batch = torch.cat(fragments, 0)
        batch = batch if self.device is None else batch.to(self.device)
        self.frames += batch.numel()
        self.version += 1
        return batch

    def _accept_fragment(
        self, shard: int, version: int, played: ShardResult
    ) -> list[TensorDictBase]:
        """Returns a list with a fragment's batch; empty if the policy that acted was too old."""
        if self.version - version > self.max_lag:
            self.dropped += 1
            return []
        batch = played.batch
        ids = batch.get(("collector", "traj_ids"))
        batch.set(("collector", "traj_ids"), ids * self.n_shards + shard)
        batch.set(("collector", "policy_version"), torch.full_like(ids, version))
        return [batch]

    def _copy_weights(self) -> Weights:
        state = self.policy.state_dict()
        return {name: value.detach().cpu().clone() for name, value in state.items()}

    def _start_actor(self, a: int, weights: Weights) -> None:
        entry = WeightsRecord(weights, with_state=True)
        self._pending_calls[self.placement.play(a, entry)] = a, self.version, entry

    def _wait_for_actor(self, weights: Weights) -> None:
        """Waits for an actor with finished fragments, takes them, and starts new ones on it."""
        call = self.placement.first(list(self._pending_calls))
        a, version, entry = self._pending_calls.pop(call)
        replay_log = ReplayLog(keep_records=all(state is not None for state in self._snapshots))
        replay_log.snapshots = list(self._snapshots) if replay_log.keep_records else None  # type: ignore[arg-type]
        replay_log.begin(entry)
        for shard, played in zip(
            self.placement.own[a], self.placement.take_from_actor(a, call, replay_log)
        ):
            self._snapshots[shard] = played.state
            self._ready_fragments.append((shard, version, played))
        self._start_actor(a, weights)

    def finish(self, batch: TensorDictBase) -> None:
        """Does nothing: each shard has checked its part of the batch."""

    def state_dict(self) -> dict[str, Any]:
        """Returns the shards' last snapshots; fragments in progress start again after resuming."""
        known = all(state is not None for state in self._snapshots)
        numbers = {"frames": self.frames, "version": self.version, "dropped": self.dropped}
        return {**numbers, "shards": list(self._snapshots) if known else None}

    def load_state_dict(self, state: Mapping[str, Any]) -> bool:
        """Restores a saved state; an empty one starts new episodes.

        Returns:
            bool: False: episodes do not continue in the same rows of the next batch.
        """
        self.frames = state.get("frames", self.frames)
        self.version, self.dropped = state.get("version", 0), state.get("dropped", 0)
        if state.get("shards") is not None:
            self.placement.load(state["shards"])
            self._snapshots = list(state["shards"])
        self._pending_calls.clear()
        self._ready_fragments.clear()
        return False

    def shutdown(self) -> None:
        """Stops the actors."""
        self.placement.close()
