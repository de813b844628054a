"""Settings of a whole run: a recipe."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torchrl_marl.envs.config import EnvConfig
from torchrl_marl.errors import CheckpointError, ConfigError
from torchrl_marl.learners.config import OnPolicyConfig
from torchrl_marl.renamed import with_new_names
from torchrl_marl.schema import merge, read_yaml

__all__ = [
    "CheckpointConfig",
    "EvaluationConfig",
    "LoggingConfig",
    "TrainConfig",
    "read_run_config",
]


@dataclass(frozen=True)
class EvaluationConfig:
    """How often and on how many whole episodes the policy is measured."""

    every_frames: int | None = None
    """Frames between two evaluations in training; null: only before and after."""
    episodes: int = 200
    """Number of whole episodes, played side by side."""
    deterministic: bool = True
    """The likeliest action, or a sampled one."""
    gif: bool = False
    """Write an animation of one episode at the end."""


@dataclass(frozen=True)
class CheckpointConfig:
    """How often a run can be resumed from."""

    every_iterations: int = 50
    """Iterations between two checkpoints; 0: by the clock alone."""
    every_minutes: float | None = 5.0
    """Minutes between two checkpoints, whatever the iterations; null: by iterations alone.
    One is written before the first iteration, and one at the end."""
    keep: int = 2
    """How many of the latest checkpoints are kept."""


@dataclass(frozen=True)
class LoggingConfig:
    """Where metrics go beside ``metrics.csv``."""

    backends: list[str] = field(default_factory=list)
    """Any of ``tensorboard``, ``wandb``, ``mlflow``."""
    project: str = "torchrl_marl"
    """Project or experiment name for the backends."""
    progress: bool = True
    """Show a progress bar."""


@dataclass(frozen=True)
class TrainConfig:
    """A complete, runnable recipe."""

    recipe: str = "custom"
    """The recipe's name."""
    seed: int = 0
    """Start of every random generator."""
    device: str = "cpu"
    """``cpu``, ``cuda`` or ``cuda:1``."""
    threads: int | None = None
    """Threads of torch on the CPU; null: torch's own choice."""
    execution: str = "eager"
    """``eager``, ``compile`` (compiled graphs, on CPU or GPU), ``cudagraph`` (graphs that a GPU
    replays) or ``trace`` (graphs, not compiled): how simulator, policy and update run."""
    total_frames: int = 1_000_000
    """Env steps of the whole run."""
    stop_at_return: float | None = None
    """Mean return at which the run ends early: of an evaluation where ``evaluation.every_frames``
    is set, else of the last ``evaluation.episodes`` episodes of training; null for never."""
    frames_per_batch: int = 6400
    """Env steps of one iteration; a multiple of ``env.num_envs``."""
    folder: str | None = None
    """Run folder; null: a new one under ``runs/``."""
    env: EnvConfig = field(default_factory=EnvConfig)
    """The world."""
    learner: OnPolicyConfig = field(default_factory=OnPolicyConfig)
    """How all groups learn."""
    groups: dict[str, Any] = field(default_factory=dict)
    """Group name -> settings of its learner that differ from ``learner``."""
    evaluation: EvaluationConfig = field(default_factory=EvaluationConfig)
    """Measuring the policy."""
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    """Saving the run."""
    logging: LoggingConfig = field(default_factory=LoggingConfig)
    """Showing and sending metrics."""


def read_run_config(folder: str | Path) -> TrainConfig:
    """The settings that a run was started with, from its folder.

    Raises:
        CheckpointError: a folder that is missing, is no run's, or whose settings are broken.
    """
    path = Path(folder) / "config.yaml"
    if not path.is_file():
        there = "is a file" if Path(folder).exists() else "is not there"
        there = "has no config.yaml" if Path(folder).is_dir() else there
        raise CheckpointError(
            f"{str(folder)!r} is no run folder: it {there}; "
            "give the folder that `torchrl-marl train` printed."
        )
    try:
        return merge(TrainConfig, with_new_names(read_yaml(path), told=False))
    except ConfigError as error:
        raise CheckpointError(f"{str(path)!r} does not fit this version: {error}") from None
