"""Which collector a run has."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

import torch
from tensordict import TensorDictBase
from tensordict.nn import TensorDictModuleBase
from torch import Tensor
from torchrl.envs import EnvBase

from torchrl_marl.collectors.rollout import RolloutCollector
from torchrl_marl.envs.libraries import LIBRARIES
from torchrl_marl.specs import TeamSpec
from torchrl_marl.training.config import TrainConfig

if TYPE_CHECKING:
    from torchrl_marl.collectors.collector import Collector

__all__ = [
    "begun_anew",
    "counters",
    "cut",
    "make_collector",
    "remember",
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
    own = LIBRARIES.hook(config.env.library, "collector")
    if own is not None:
        return own(config, env, policy, remember(learners), asked)
    if config.distributed.enabled:
        from torchrl_marl.training.shards import sharded_collector

        shards = range(config.distributed.collectors or 0) if shards is None else shards
        return sharded_collector(config, policy, remember(learners), shards)
    return RolloutCollector(
        env,
        policy,
        frames_per_batch=config.population.size * config.frames_per_batch,
        total_frames=config.population.size * config.total_frames,
        execution=config.execution,  # type: ignore[arg-type]
        team=team,
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


def cut(learners: Iterable[Any]) -> None:
    """Tells learners that keep something from batch to batch that the next does not follow."""
    for learner in learners:
        if hasattr(learner, "cut"):
            learner.cut()
