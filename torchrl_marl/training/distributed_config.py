"""Settings of where a run's environments are."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any

from torchrl_marl.errors import ConfigError
from torchrl_marl.settings import Count, OneOf, Positive, Range, ReadWhere, override

__all__ = ["DistributedConfig", "check_distributed"]

_ON_RAY = ReadWhere("backend", "ray")


@dataclass(frozen=True)
class DistributedConfig:
    """In which processes and on which machines a run collects."""

    backend: Annotated[
        str,
        OneOf({"none": "in this process", "ray": "on actors of Ray, here or in a cluster"}),
    ] = "none"
    """Where shards are; what is learned does not depend on it."""
    collectors: Count | None = None
    """Number of shards, each with as many of the envs and a random state of its own; what is
    learned depends on it. null: none, or one for each process that ``torchrun`` starts."""
    overlap: Annotated[int, Range(0, 100)] = 0
    """Batches that collecting runs ahead of learning; above 1 take ``learner.estimator=vtrace``."""
    asynchronous: Annotated[bool, _ON_RAY] = False
    """Actors play on without waiting, and batches are of whatever comes first: quicker where actors
    are not equally fast, and not reproducible; best with ``learner.estimator=vtrace``."""
    max_lag: Annotated[Count, _ON_RAY, ReadWhere("asynchronous", True)] = 4
    """Batches by which a policy may be old whose fragments are still learned from."""
    actors: Annotated[Count | None, _ON_RAY] = None
    """Processes for the shards; null: one for each shard, as far as there are CPUs."""
    address: Annotated[str | None, _ON_RAY] = None
    """A cluster of Ray: ``auto``, ``host:6379`` or ``ray://host:10001``; null: what
    ``RAY_ADDRESS`` says, or else a Ray of one's own on this machine."""
    cpus_per_actor: Annotated[float, Range(0), _ON_RAY] = 1.0
    """CPUs that Ray keeps for each actor."""
    gpus_per_actor: Annotated[float, Range(0), _ON_RAY] = 0.0
    """GPUs that Ray keeps for each; 0: worlds and actors' networks are on the CPU."""
    spares: Annotated[int, Range(0, 100), _ON_RAY] = 1
    """Processes that have imported everything and wait to replace one that dies."""
    timeout: Annotated[Positive, _ON_RAY] = 300.0
    """Seconds after which an actor that has not played its batch counts as dead."""
    max_restarts: Annotated[int, Range(0), _ON_RAY] = 10
    """Actors that are replaced for one batch before the run gives up."""
    snapshot_every: Annotated[int, Range(0), _ON_RAY] = 1
    """Batches between the snapshots from which a lost shard is put back; 0: it begins anew."""

    @property
    def enabled(self) -> bool:
        """Returns whether the environments are split into shards."""
        return self.collectors is not None

    def check(self, at: str = "") -> None:
        """Refuses what does not fit together.

        Args:
            at (str): what stands before the names in messages.

        Raises:
            ConfigError: naming the settings and the fix.
        """
        if self.actors is not None and self.actors > (self.collectors or self.actors):
            raise ConfigError(
                f"{at}actors is {self.actors}, expected at most {at}collectors, "
                f"{self.collectors}; use {at}actors=null."
            )
        if self.overlap and self.asynchronous:
            raise ConfigError(
                f"{at}overlap is {self.overlap}, but {at}asynchronous is true, whose actors never "
                f"wait; use {at}overlap=0."
            )
        if self.overlap and self.backend == "ray" and not self.snapshot_every:
            raise ConfigError(
                f"{at}snapshot_every is 0, expected 1 or more beside {at}overlap={self.overlap}, "
                f"whose batches are played again on resuming; use {at}snapshot_every=1."
            )


def check_distributed(run: Any, *, own_env: bool = False) -> None:
    """Refuses what shards do not go with.

    Args:
        run (TrainConfig): the settings.
        own_env (bool): the caller brings an environment.

    Raises:
        ConfigError: naming the setting and the fix.
    """
    number, num_envs = run.distributed.collectors, run.env.num_envs
    if own_env:
        raise ConfigError(
            f"distributed.collectors is {number}, but the environment is one that is built "
            "already, which cannot be split into shards; name a world (env.name, or "
            "env.library=module:Class), or use distributed.collectors=null."
        )
    if num_envs % number:
        fitting = max(i for i in range(1, min(number, num_envs) + 1) if num_envs % i == 0)
        more = num_envs < number
        raise ConfigError(
            f"distributed.collectors is {number}, expected "
            f"{'at most' if more else 'a divisor of'} env.num_envs, {num_envs}; use "
            f"distributed.collectors={fitting}, or env.num_envs={-(-num_envs // number) * number}."
        )
    for name, given in (
        ("population.size", run.population.size if run.population.size > 1 else None),
        ("league", "given" if run.league.enabled else None),
    ):
        if given is not None:
            raise ConfigError(
                f"{name} is {given}, but distributed.collectors is {number}, and shards have one "
                f"policy; use distributed.collectors=null."
            )
    if run.distributed.backend == "ray" or run.distributed.overlap:
        _refuse_unsharing(run)


def _refuse_unsharing(run: Any) -> None:
    learners = {"learner": run.learner}
    learners |= {f"groups.{name}": override(run, "groups", name) for name in run.groups}
    for at, learner in learners.items():
        if getattr(learner, "unshare_at", None) is not None:
            raise ConfigError(
                f"{at}.unshare_at is {learner.unshare_at:g}, but the networks of shards that play "
                f"elsewhere or ahead keep their shapes; use {at}.unshare_at=null."
            )
