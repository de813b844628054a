"""Which collector a run has."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from tensordict import TensorDictBase
from tensordict.nn import TensorDictModuleBase
from torch import Tensor
from torchrl.envs import EnvBase

from torchrl_marl.collectors.asynchronous import AsynchronousCollector
from torchrl_marl.collectors.collector import Collector
from torchrl_marl.collectors.placement import Here, Placement
from torchrl_marl.collectors.ray import OnRay
from torchrl_marl.collectors.rollout import RolloutCollector
from torchrl_marl.collectors.sharded import ShardedCollector
from torchrl_marl.specs import TeamSpec
from torchrl_marl.training.config import TrainConfig
from torchrl_marl.training.external import external_collector
from torchrl_marl.training.shards import ShardMaker

__all__ = [
    "begun_anew",
    "counters",
    "cut",
    "make_collector",
    "remember",
    "share_minibatches",
    "tell_of_death",
]


def make_collector(
    config: TrainConfig,
    env: EnvBase,
    policy: TensorDictModuleBase,
    team: TeamSpec,
    learners: Iterable[Any],
    shards: range | None = None,
    asked: Callable[[], bool] = lambda: False,
) -> Collector:
    """Returns the collector that the settings ask for.

    Args:
        config (TrainConfig): the run's.
        env (EnvBase): with dense groups; of shards only an example.
        policy (TensorDictModuleBase): who acts.
        team (TeamSpec): the groups.
        learners (iterable of Learner): who learns.
        shards (range, optional): those that this process has; all by default.
        asked (callable): whether waiting for a batch should end.
    """
    if config.env.library == "external":
        return external_collector(config, env, policy, remember(learners), asked)
    if config.distributed.enabled:
        shards = range(config.distributed.collectors or 0) if shards is None else shards
        return _of_shards(config, policy, remember(learners), shards)
    return RolloutCollector(
        env,
        policy,
        frames_per_batch=config.frames_per_batch,
        total_frames=config.total_frames,
        execution=config.execution,  # type: ignore[arg-type]
        team=team,
    )


def _of_shards(
    config: TrainConfig, policy: TensorDictModuleBase, remembers: bool, shards: range
) -> ShardedCollector | AsynchronousCollector:
    settings = config.distributed
    live = settings.backend == "none" and not settings.overlap
    on_cpu = settings.backend == "ray" and not settings.gpus_per_actor
    device = "cpu" if on_cpu else "cuda" if settings.backend == "ray" else config.device
    own = policy if live else None
    makers = [ShardMaker(config, i, device, own, remembers) for i in shards]
    placement = _placed(makers, config)
    if isinstance(placement, OnRay) and settings.asynchronous:
        return AsynchronousCollector(
            placement, policy, max_lag=settings.max_lag, device=torch.device(config.device)
        )
    return ShardedCollector(
        placement,
        policy,
        overlap=settings.overlap,
        snapshot_every=settings.snapshot_every,
        live=live,
        device=torch.device(config.device),
    )


def _placed(makers: list[ShardMaker], config: TrainConfig) -> Placement:
    if config.distributed.backend == "none":
        return Here(makers)
    settings = config.distributed
    return OnRay(
        makers,
        actors=settings.actors,
        address=settings.address,
        cpus=settings.cpus_per_actor,
        gpus=settings.gpus_per_actor,
        spares=settings.spares,
        timeout=settings.timeout,
        max_restarts=settings.max_restarts,
    )


def tell_of_death(collector: Collector, folder: Path) -> None:
    """Says how a run goes on where the Ray that was started for it dies, and the run with it.

    Args:
        collector (Collector): the run's.
        folder (Path): the run's.
    """
    placement = getattr(collector, "placement", None)
    if isinstance(placement, OnRay):
        placement.connection.tell_of_death(
            "the Ray that was started for this run has died (its raylet), and this process with "
            f"it; `torchrl-marl train --resume {shlex.quote(str(folder))}` goes on from the last "
            "checkpoint."
        )


def remember(learners: Iterable[Any]) -> bool:
    """Returns whether networks read what they remember, or where episodes begin."""
    return any(getattr(learner, "remembered", ()) for learner in learners)


def counters(collector: Collector) -> dict[str, int]:
    """Returns what befell a collector's environments, for the metrics."""
    return getattr(collector, "counters", {})


def begun_anew(collector: Collector, batch: TensorDictBase) -> Tensor | None:
    """Returns the rows of a batch that do not go on from the batch before, bool ``[E]``.

    Those whose running episodes were lost; or all, of a collector that says so.
    """
    if not getattr(collector, "follows", True):
        return torch.ones(len(batch), dtype=torch.bool, device=batch.device)
    return getattr(collector, "renewed", None)


def share_minibatches(config: TrainConfig, learners: Iterable[Any], shards: range) -> None:
    """Lets minibatches be of parts of every shard, so that they do not depend on where shards are.

    Args:
        config (TrainConfig): the run's.
        learners (iterable of Learner): who learns; who stores steps draws from all of them.
        shards (range): those that this process has.
    """
    total = config.distributed.collectors
    together = total is not None and not config.distributed.asynchronous
    for learner in learners if together else ():
        if hasattr(learner, "use_shards"):
            learner.use_shards(shards, total, config.seed)


def cut(learners: Iterable[Any]) -> None:
    """Tells learners that keep something from batch to batch that the next does not follow."""
    for learner in learners:
        if hasattr(learner, "cut"):
            learner.cut()
