"""What the ranks of a run must have in common, and what they cannot do."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import torch

from torchrl_marl.errors import ConfigError
from torchrl_marl.learners.algorithms import ALGORITHMS
from torchrl_marl.ranks import Alone
from torchrl_marl.settings import flatten, override, shown
from torchrl_marl.training.config import TrainConfig
from torchrl_marl.training.distributed_config import check_distributed
from torchrl_marl.version import __version__

__all__ = ["check_ranks", "refuse_disagreement", "with_shards"]


def with_shards(config: TrainConfig, n_ranks: int) -> TrainConfig:
    """Returns the settings with a shard for each rank, where they leave the number open."""
    if config.distributed.enabled:
        return config
    one_each = dataclasses.replace(config.distributed, collectors=n_ranks)
    return dataclasses.replace(config, distributed=one_each)


def check_ranks(config: TrainConfig, n_ranks: int, *, own_env: bool = False) -> None:
    """Refuses what several processes cannot learn as one.

    Args:
        config (TrainConfig): the settings, with shards.
        n_ranks (int): how many processes.
        own_env (bool): the caller brings an environment.

    Raises:
        ConfigError: naming the setting and the fix.
    """
    if own_env:
        raise ConfigError(
            f"an environment of your own is given, but {n_ranks} processes learn as one, each of "
            "which makes its own; name a world (env.name, or env.library=module:Class), or start "
            "one process."
        )
    if config.env.library == "external":
        raise ConfigError(
            f"env.library is 'external', whose clients come to one process, but {n_ranks} learn as "
            "one; start one process."
        )
    settings = config.distributed
    if settings.backend != "none":
        raise ConfigError(
            f"distributed.backend is {settings.backend!r}, but torchrun has started {n_ranks} "
            "processes, each of which collects for itself; use distributed.backend=none, or start "
            "one process."
        )
    if settings.asynchronous:
        raise ConfigError(
            "distributed.asynchronous is true, but several processes learn from one batch; use "
            "distributed.asynchronous=false, or start one process."
        )
    if settings.overlap:
        raise ConfigError(
            f"distributed.overlap is {settings.overlap}, which several processes that learn as one "
            "do not have; use distributed.overlap=0, or start one process."
        )
    number = settings.collectors or 0
    if number % n_ranks:
        raise ConfigError(
            f"distributed.collectors is {number}, expected a multiple of the {n_ranks} processes "
            "that torchrun has started; use "
            f"distributed.collectors={-(-number // n_ranks) * n_ranks}, or another number of them."
        )
    _check_learners(config, n_ranks)
    check_distributed(config)
    config.check_learners()


def _check_learners(config: TrainConfig, n_ranks: int) -> None:
    learners: dict[str, Any] = {"learner": config.learner}
    learners |= {f"groups.{name}": override(config, "groups", name) for name in config.groups}
    for at, learner in learners.items():
        if not getattr(ALGORITHMS.learner(learner.algorithm), "over_ranks", False):
            raise ConfigError(
                f"{at}.algorithm is {learner.algorithm!r}, which one process learns alone; use "
                f"{at}.algorithm=mappo or ippo, or start one process instead of {n_ranks}."
            )
        if getattr(learner, "unshare_at", None) is not None:
            raise ConfigError(
                f"{at}.unshare_at is {learner.unshare_at:g}, which several processes that learn as "
                f"one do not have; use {at}.unshare_at=null, or start one process."
            )


def refuse_disagreement(ranks: Alone, config: TrainConfig) -> None:
    """Refuses ranks of other versions or settings than the first.

    Raises:
        ConfigError: naming the first difference.
    """
    own = {"torchrl_marl": __version__, "torch": torch.__version__}
    own |= flatten(dataclasses.asdict(config))
    found = ranks.of_all({name: shown(value) for name, value in own.items()})
    for rank, theirs in enumerate(found):
        name = _difference(found[0], theirs)
        if name is not None:
            raise ConfigError(
                f"ranks disagree: {name} is {found[0].get(name, 'not there')} on rank 0 and "
                f"{theirs.get(name, 'not there')} on rank {rank}, expected the same; start all "
                "with the same line, in the same environment."
            )


def _difference(one: Mapping[str, str], other: Mapping[str, str]) -> str | None:
    return next((key for key in {**one, **other} if one.get(key) != other.get(key)), None)
