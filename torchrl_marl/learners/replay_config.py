"""Settings that all algorithms have which learn from stored steps."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Annotated, Any

from torchrl_marl.errors import ConfigError
from torchrl_marl.learners.config import TrainedConfig, check_unshare
from torchrl_marl.learners.memory_config import (
    NeedsMemory,
    check_windows,
    remembers,
    without_memory,
)
from torchrl_marl.settings import Count, Positive, Range, ReadWhere, Share

__all__ = ["ReplayConfig", "ReplayLearnerConfig"]


@dataclass(frozen=True)
class ReplayConfig:
    """The steps that are kept to learn from.

    Examples:
        >>> ReplayLearnerConfig(replay=ReplayConfig(capacity=50_000, alpha=0.6)).replay.beta
        0.4
    """

    capacity: Count = 200_000
    """Env steps that are kept, of all agents; the oldest make room."""
    alpha: Share = 0.0
    """Exponent of the errors by which steps are drawn (prioritized replay); 0 draws all alike."""
    beta: Annotated[Share, ReadWhere("alpha", 0, but=True)] = 0.4
    """How much less such steps count, so that the draw does not bias what is learned; 1 in full."""
    beta_end: Annotated[Share | None, ReadWhere("alpha", 0, but=True)] = None
    """The same at the end of the run, along a line, usually 1; null: it stays as it is."""


@dataclass(frozen=True)
class ReplayLearnerConfig(TrainedConfig):
    """Settings of every family that learns from stored steps."""

    adam_eps: Positive = 1e-8
    """Adam's epsilon."""
    replay: ReplayConfig = field(default_factory=ReplayConfig)
    """What is kept."""
    unshare_at: Share | None = None
    """Share of the run, 0 to 1, after which every agent goes on with its own copy of the networks
    that it shared, and of their targets; null for never."""
    learning_starts: Annotated[int, Range(0)] = 10_000
    """Frames with random actions before the first update."""
    updates_per_frame: Annotated[float, Range(0, 1_000, above=True)] = 0.1
    """Updates for each frame from then on; the batch that gets there counts as a whole."""
    minibatch_size: Count = 256
    """Env steps of an update, drawn from all that are kept; the agents of a step stay
    together."""
    window: Annotated[Count, NeedsMemory(critic=False)] = 16
    """Steps that a network with memory is trained on in a row, from the state that it had there
    when it acted; the steps of a minibatch are a multiple of it."""
    burn_in: Annotated[int, Range(0), NeedsMemory(critic=False)] = 0
    """Steps at the start of a window that only bring the state up to date, and are not learned
    from."""
    n_step: Count = 1
    """Rewards that are added up before the value of what follows."""
    tau: Annotated[float, Range(0, 1, above=True)] = 0.005
    """Share of the way that target networks go to the networks after each update."""

    @property
    def noisy(self) -> bool:
        """Whether continuous actions are explored by noise."""
        return False

    @property
    def remembers(self) -> bool:
        """Whether the actor carries something from step to step."""
        return remembers(self)

    def check(self, at: str = "") -> None:
        """Refuses a store that is smaller than what is drawn from it, and what has no windows."""
        super().check(at)
        check_unshare(self, at)
        if self.remembers:
            self._check_memory(at)
        for name in ("minibatch_size", "n_step"):
            value = getattr(self, name)
            if value > self.replay.capacity:
                raise ConfigError(
                    f"{at}{name} is {value}, expected at most {at}replay.capacity, "
                    f"{self.replay.capacity}; use {at}replay.capacity={value}."
                )

    def _check_memory(self, at: str) -> None:
        """Refuses what networks with memory do not have."""
        check_windows(self, at)
        plain = {"n_step": (self.n_step, 1), "replay.alpha": (self.replay.alpha, 0)}
        for name, (found, needed) in plain.items():
            if found != needed:
                raise ConfigError(
                    f"{at}{name} is {found:g}, which networks with memory do not have, whose "
                    f"windows are drawn alike and learned from step by step; use {at}{name}="
                    f"{needed}, or {without_memory(self, at)}."
                )

    def check_run(self, run: Any, at: str, *, own_env: bool = False) -> None:
        """Refuses a run in which no update would ever be made, and a store that is too small."""
        if self.learning_starts >= run.total_frames:
            raise ConfigError(
                f"{at}learning_starts is {self.learning_starts}, expected less than total_frames, "
                f"{run.total_frames}, or nothing is learned; use {at}learning_starts="
                f"{run.total_frames // 10}."
            )
        self._check_updates(run, at)
        self.check_store(None if own_env else run.env.num_envs, run.frames_per_batch, at)
        super().check_run(run, at, own_env=own_env)

    def _check_updates(self, run: Any, at: str) -> None:
        """Refuses so few updates that the first is not due by the end."""
        batch = run.frames_per_batch
        n_batches = math.ceil(run.total_frames / batch)
        frames = (n_batches - max(0, math.ceil(self.learning_starts / batch) - 1)) * batch
        if self.updates_per_frame * frames < 1:
            raise ConfigError(
                f"{at}updates_per_frame is {self.updates_per_frame:g}, expected at least "
                f"{1 / frames:.2g}, one update in the {frames:,} frames that are learned from, or "
                f"nothing is learned; use {at}updates_per_frame={0.1 if frames >= 10 else 1}."
            )

    def check_store(self, num_envs: int | None, frames_per_batch: int, at: str) -> None:
        """Refuses a store that a batch overflows, or in which n steps never lie.

        Args:
            num_envs (int, optional): number of envs, if it is known yet.
            frames_per_batch (int): env steps of a batch.
            at (str): what stands before the names in messages.

        Raises:
            ConfigError: naming the settings and the fix.
        """
        if self.replay.capacity < frames_per_batch:
            raise ConfigError(
                f"{at}replay.capacity is {self.replay.capacity}, expected at least "
                f"frames_per_batch, {frames_per_batch}; use {at}replay.capacity={frames_per_batch}."
            )
        most = self.replay.capacity // (num_envs or 1)
        for name in ("window", "n_step") if self.remembers else ("n_step",):
            if getattr(self, name) > most:
                raise ConfigError(
                    f"{at}{name} is {getattr(self, name)}, expected at most {most}, the steps of "
                    f"each of {num_envs} environments in {at}replay.capacity, "
                    f"{self.replay.capacity}; use {at}{name}={min(5, most)}."
                )
