"""Shards of a run: parts of its envs, stepped separately, in this process or on Ray."""

from __future__ import annotations

import dataclasses
import shlex
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
from tensordict import TensorDictBase
from tensordict.nn import TensorDictModuleBase

from torchrl_marl.collectors.rollout import has_graphs
from torchrl_marl.collectors.shard import Shard, shard_seed
from torchrl_marl.collectors.sharded import LocalPlacement, Placement, ShardedCollector
from torchrl_marl.collectors.team import TeamPolicy
from torchrl_marl.envs.make import make_env
from torchrl_marl.envs.remember import hidden_sizes, with_memory
from torchrl_marl.envs.transforms import with_dense_groups
from torchrl_marl.learners.build import build_learners
from torchrl_marl.runtime.random_state import RandomState
from torchrl_marl.specs import TeamSpec
from torchrl_marl.training.config import TrainConfig
from torchrl_marl.training.metrics import EpisodeTracker

if TYPE_CHECKING:
    from torchrl_marl.collectors.asynchronous import AsynchronousCollector
    from torchrl_marl.collectors.collector import Collector

__all__ = ["EpisodeSums", "ShardMaker", "report_death", "sharded_collector", "share_minibatches"]


@dataclasses.dataclass(frozen=True)
class ShardMaker:
    """Function that builds a shard, and can be called in any process.

    Args:
        config (TrainConfig): config of the run.
        shard (int): index of the shard.
        device (str): device of the environments and of the acting networks.
        policy (TensorDictModuleBase, optional): the learner's policy itself; by default, the shard
            builds a copy, to which weights are sent.
        remembers (bool): whether networks read hidden states or flags of episode starts.
    """

    config: TrainConfig
    shard: int
    device: str = "cpu"
    policy: TensorDictModuleBase | None = None
    remembers: bool = False

    def __call__(self, n_restarts: int = 0) -> Shard:
        """Builds the shard.

        Args:
            n_restarts (int): number of earlier restarts of the shard without a snapshot.
        """
        config, number = self.config, self.config.distributed.collectors
        assert number is not None
        seed = shard_seed(config.seed, self.shard, n_restarts)
        random = RandomState(seed, self.device)
        with random.active():
            env = make_env(
                config.env, seed=seed, device=self.device, num_envs=config.env.num_envs // number
            )
            env = with_dense_groups(env)
            team = TeamSpec.from_env(env)
        policy = self._build_policy(team) if self.policy is None else self.policy
        if self.remembers:
            env = with_memory(env, hidden_sizes(policy))
        return Shard(
            env,
            policy,
            random,
            frames_per_batch=config.frames_per_batch // number,
            execution=config.execution if has_graphs(env) else "eager",  # type: ignore[arg-type]
            team=team,
            n_restarts=n_restarts,
            threads=config.threads or 1,
            note=EpisodeSums(team) if config.distributed.asynchronous else None,
        )

    def _build_policy(self, team: TeamSpec) -> Any:
        with RandomState(self.config.seed, self.device).active():
            learners = build_learners(
                team, self.config.learner, self.config.groups, device=torch.device(self.device)
            )
        return TeamPolicy(actor for learner in learners for actor in learner.actors.values())


class EpisodeSums(EpisodeTracker):
    """Writes sums over the running episodes (returns and lengths) into a shard's batches.

    With these sums, a row of a batch need not continue the episode in the same row of the last
    batch.

    Args:
        team (TeamSpec): the groups.

    Keys:
        - writes: ``("collector", "<group>/episode_reward")`` and ``("collector",
          "<group>/episode_length")``, the sums up to each step; ``("collector", "<group>/lived")``,
          whether an agent has lived; and ``("collector", "episode_known")``, whether the sums are
          complete
    """

    def __call__(self, batch: TensorDictBase) -> None:
        """Writes the sums into a batch."""
        self.update(batch)
        for name, sums in self.sums.items():
            batch.set(("collector", name), sums)
        for name, lived in self.lived.items():
            batch.set(("collector", f"{name}/lived"), lived)
        known = torch.ones(batch.shape, dtype=torch.bool, device=batch.device)
        batch.set(("collector", "episode_known"), known)


def sharded_collector(
    config: TrainConfig, policy: TensorDictModuleBase, remembers: bool, shards: range
) -> ShardedCollector | AsynchronousCollector:
    """Returns the collector of a run that is split into shards.

    Args:
        config (TrainConfig): config of the run.
        policy (TensorDictModuleBase): the joint policy.
        remembers (bool): whether networks read hidden states or flags of episode starts.
        shards (range): shards of this process.
    """
    settings, on_ray = config.distributed, config.distributed.backend == "ray"
    live = not on_ray and not settings.overlap
    device = ("cuda" if settings.gpus_per_actor else "cpu") if on_ray else config.device
    own = policy if live else None
    makers = [ShardMaker(config, i, device, own, remembers) for i in shards]
    placement = _make_placement(makers, config)
    if on_ray and settings.asynchronous:
        from torchrl_marl.collectors.asynchronous import AsynchronousCollector

        return AsynchronousCollector(
            cast(Any, placement),
            policy,
            max_lag=settings.max_lag,
            device=torch.device(config.device),
        )
    return ShardedCollector(
        placement,
        policy,
        overlap=settings.overlap,
        snapshot_every=settings.snapshot_every,
        shares_policy=live,
        device=torch.device(config.device),
    )


def _make_placement(makers: list[ShardMaker], config: TrainConfig) -> Placement:
    if config.distributed.backend == "none":
        return LocalPlacement(makers)
    from torchrl_marl.collectors.ray import RayPlacement

    settings = config.distributed
    return RayPlacement(
        makers,
        actors=settings.actors,
        address=settings.address,
        cpus=settings.cpus_per_actor,
        gpus=settings.gpus_per_actor,
        spares=settings.spares,
        timeout=settings.timeout,
        max_restarts=settings.max_restarts,
    )


def report_death(collector: Collector, folder: Path) -> None:
    """Prepares the message that is printed if Ray was started by the run and dies.

    Args:
        collector (Collector): collector of the run.
        folder (Path): folder of the run.
    """
    placement: Any = getattr(collector, "placement", None)
    if placement is not None:
        placement.connection.report_death(
            "the Ray that was started for this run has died (its raylet), and this process with "
            f"it; `torchrl-marl train --resume {shlex.quote(str(folder))}` resumes it from the "
            "last checkpoint."
        )


def share_minibatches(config: TrainConfig, learners: Iterable[Any], shards: range) -> None:
    """Makes every minibatch contain equal parts of all shards, in any placement of the shards.

    Args:
        config (TrainConfig): config of the run.
        learners (iterable of Learner): learners. Their replay buffers then sample equally from all
            shards, too.
        shards (range): shards of this process.
    """
    total = config.distributed.collectors
    together = total is not None and not config.distributed.asynchronous
    for learner in learners if together else ():
        learner.use_shards(shards, total, config.seed)
