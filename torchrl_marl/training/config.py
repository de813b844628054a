"""Settings of a whole run: a recipe."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any

from torchrl_marl.capture.execution import EXECUTIONS
from torchrl_marl.envs.config import EnvConfig
from torchrl_marl.errors import CheckpointError, ConfigError, MissingExtraError, quoted
from torchrl_marl.learners.algorithms import LearnerSettings
from torchrl_marl.learners.capabilities import FEATURES, varying_of
from torchrl_marl.learners.config import LearnerConfig, OnPolicyConfig
from torchrl_marl.learners.off_policy_config import ReplayLearnerConfig
from torchrl_marl.runtime.trust import refuse_link
from torchrl_marl.settings import (
    AnyOf,
    Count,
    Matches,
    OneOf,
    Overrides,
    Positive,
    Range,
    Reader,
    Seed,
    override,
    read_yaml,
)
from torchrl_marl.settings import check as check_settings
from torchrl_marl.training.sections import (
    DistributedConfig,
    EvaluationConfig,
    EvolutionConfig,
    LeagueConfig,
    PopulationConfig,
    check_measuring,
    check_shards_divide,
)

__all__ = [
    "BACKENDS",
    "CHOICES",
    "CheckpointConfig",
    "EvaluationConfig",
    "LoggingConfig",
    "TrainConfig",
    "members_of",
    "read_run_config",
    "seed_folders",
    "with_settings",
]


CHOICES = {
    "auto": "compile, or cudagraph on a GPU, where that saves more time than it takes, else eager; "
    "config.yaml says which",
    **EXECUTIONS,
}
"""Execution -> how a run runs."""

BACKENDS = {
    "tensorboard": "files in the run's folder",
    "wandb": "Weights & Biases",
    "mlflow": "MLflow, in the run's folder or at MLFLOW_TRACKING_URI",
}
"""Logger -> where metrics go."""


@dataclass(frozen=True)
class CheckpointConfig:
    """How often a run can be resumed from."""

    every_iterations: Annotated[int, Range(0)] = 50
    """Iterations between two checkpoints; 0: by the clock alone."""
    every_minutes: Positive | None = 5.0
    """Minutes between two checkpoints, whatever the iterations; null: by iterations alone.
    One is written before the first iteration, and one at the end."""
    keep: Count = 2
    """How many of the latest checkpoints are kept."""


@dataclass(frozen=True)
class LoggingConfig:
    """Where metrics go beside ``metrics.csv``."""

    backends: Annotated[list[str], AnyOf(BACKENDS)] = field(default_factory=list)
    """Loggers that metrics are sent to."""
    project: str = "torchrl_marl"
    """Project or experiment name for the backends."""
    progress: bool = True
    """Show a progress bar."""

    def check(self, at: str = "") -> None:
        """Refuses backends that are not installed.

        Raises:
            MissingExtraError: with the line that installs them.
        """
        for backend in self.backends:
            if importlib.util.find_spec(backend) is None:
                raise MissingExtraError(backend, "log")


@dataclass(frozen=True)
class TrainConfig:
    """A complete, runnable recipe."""

    recipe: str = "custom"
    """The recipe's name."""
    seed: Seed = 0
    """Start of every random generator."""
    device: Annotated[str, Matches(r"cpu|cuda(:\d+)?", "'cpu', 'cuda' or 'cuda:1'")] = "cpu"
    """``cpu``, ``cuda`` or ``cuda:1``."""
    threads: Count | None = None
    """Threads of torch on the CPU; null: torch's own choice. Small networks run best on one."""
    execution: Annotated[str, OneOf(CHOICES)] = "auto"
    """How simulator, policy and update run."""
    total_frames: Count = 1_000_000
    """Env steps of the whole run."""
    stop_at_return: Annotated[float, Range()] | None = None
    """Mean return at which the run ends early: of an evaluation where ``evaluation.every_frames``
    is set, else of the last ``evaluation.episodes`` episodes of training; null for never."""
    frames_per_batch: Count = 6400
    """Env steps of one iteration; a multiple of ``env.num_envs``."""
    folder: str | None = None
    """Run folder; null: a new one under ``runs/``."""
    env: EnvConfig = field(default_factory=EnvConfig)
    """The environment."""
    learner: Annotated[LearnerConfig, LearnerSettings] = field(default_factory=OnPolicyConfig)
    """How all groups learn."""
    groups: Annotated[dict[str, Any], Overrides("learner", example="lr")] = field(
        default_factory=dict
    )
    """Group name -> settings of its learner that differ from ``learner``."""
    evaluation: EvaluationConfig = field(default_factory=EvaluationConfig)
    """Measuring the policy."""
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    """Saving the run."""
    logging: LoggingConfig = field(default_factory=LoggingConfig)
    """Showing and sending metrics."""
    population: PopulationConfig = field(default_factory=PopulationConfig)
    """Members that are trained side by side."""
    evolution: EvolutionConfig = field(default_factory=EvolutionConfig)
    """Copies of good members that replace others."""
    league: LeagueConfig = field(default_factory=LeagueConfig)
    """Stored players that act in some envs and seats."""
    distributed: DistributedConfig = field(default_factory=DistributedConfig)
    """Where the environments are."""

    def check(self, at: str = "", skip: Collection[str] = ()) -> None:
        """Refuses what does not fit together.

        Args:
            at (str): what stands before the names in messages.
            skip (collection of str): holds ``env`` where the caller brings an environment.

        Raises:
            ConfigError: naming the settings and the fix.
        """
        own_env = "env" in skip
        if self.execution == "cudagraph" and not self.device.startswith("cuda"):
            raise ConfigError(
                f"execution is 'cudagraph', expected eager, compile or trace where device is "
                f"{quoted(self.device)}; use execution=compile, or device=cuda."
            )
        if not own_env and self.frames_per_batch % self.env.num_envs:
            steps = max(1, round(self.frames_per_batch / self.env.num_envs))
            raise ConfigError(
                f"frames_per_batch is {self.frames_per_batch}, expected a multiple of "
                f"env.num_envs, {self.env.num_envs}; "
                f"use frames_per_batch={steps * self.env.num_envs}."
            )
        if self.total_frames < self.frames_per_batch:
            raise ConfigError(
                f"total_frames is {self.total_frames}, expected at least frames_per_batch, "
                f"{self.frames_per_batch}; raise the first or lower the second."
            )
        check_measuring(self)
        self.check_features(own_env=own_env)
        self.check_learners(own_env=own_env)
        if self.population.size > 1:
            check_population(self)
        elif self.evolution.method != "none":
            raise ConfigError(
                f"evolution.method is {self.evolution.method!r}, but population.size is 1; use "
                "population.size=8, or so, or evolution.method=none."
            )

    def check_learners(self, *, own_env: bool = False) -> None:
        """Refuses settings of learners that do not fit the rest of the run.

        Args:
            own_env (bool): the caller brings an environment of which nothing is known yet.

        Raises:
            ConfigError: naming the settings and the fix.
        """
        for at, learner in self.learners().items():
            learner.check_run(self, at, own_env=own_env)

    def check_features(self, *, own_env: bool = False) -> None:
        """Refuses what does not go with the features that these settings ask for.

        Args:
            own_env (bool): the caller brings an environment, so that ``env`` is not looked at.

        Raises:
            ConfigError: naming the setting and the fix.
        """
        for feature in FEATURES:
            if feature.asked(self, own_env):
                feature.check(self)
        if self.distributed.enabled:
            check_shards_divide(self)

    def learners(self) -> dict[str, LearnerConfig]:
        """Returns the settings of every learner, by what stands before their names in messages."""
        own = {f"groups.{name}.": override(self, "groups", name) for name in self.groups}
        return {"learner.": self.learner, **own}


def check_population(run: TrainConfig) -> None:
    """Refuses numbers that do not fit a population's members, each of which is a run.

    Args:
        run (TrainConfig): the settings.

    Raises:
        ConfigError: naming the setting and the fix.
    """
    if run.evolution.method == "tournament" and run.evolution.elite > run.population.size:
        raise ConfigError(
            f"evolution.elite is {run.evolution.elite}, expected at most population.size, "
            f"{run.population.size}; use evolution.elite=1."
        )
    for at, learner in run.learners().items():
        _check_learner_of_members(run, learner, at)
    values = run.population.values(run.seed).values()
    for extreme in ([own.index(pick(own)) for own in values] for pick in (min, max)):
        for member in set(extreme):  # whether values are in the ranges of their settings
            check_settings(members_of(run)[member].learner, "learner.")


def _check_learner_of_members(run: TrainConfig, learner: LearnerConfig, at: str) -> None:
    """Refuses a learner that does not have what differs, or stores nothing to be shared."""
    known = varying_of(learner)
    for name in run.population.bounds():
        if name not in known:
            raise ConfigError(
                f"population.vary has 'learner.{name}', which {at}algorithm={learner.algorithm} "
                f"does not have; expected one of {', '.join(f'learner.{one}' for one in known)}."
            )
    if run.population.share_replay and not isinstance(learner, ReplayLearnerConfig):
        raise ConfigError(
            f"population.share_replay is true, but {at}algorithm={learner.algorithm} stores no "
            "steps; use population.share_replay=false."
        )


def with_settings(learner: LearnerConfig, settings: Mapping[str, float]) -> LearnerConfig:
    """Returns settings of a learner of which some differ, by name, such as ``exploration.epsilon``.

    Examples:
        >>> with_settings(OnPolicyConfig(), {"lr": 0.5}).lr
        0.5
    """
    own: dict[str, Any] = {}
    for name, value in settings.items():
        section, _, inner = name.partition(".")
        if inner:
            own[section] = replace(own.get(section, getattr(learner, section)), **{inner: value})
        else:
            own[name] = value
    return replace(learner, **own)


def members_of(run: TrainConfig) -> list[TrainConfig]:
    """Returns the settings of each member of a population, as an ordinary run has them.

    Args:
        run (TrainConfig): the population's.
    """
    values = run.population.values(run.seed)
    return [
        member_of(run, member, {name: own[member] for name, own in values.items()})
        for member in range(run.population.size)
    ]


def member_of(run: TrainConfig, number: int, settings: Mapping[str, float]) -> TrainConfig:
    """Returns the settings of one member, as an ordinary run has them.

    Args:
        run (TrainConfig): the population's.
        number (int): of the member, 0 for the first.
        settings (mapping): of its learner, where it has its own.
    """
    seed = run.seed + number
    return replace(
        run,
        seed=seed,
        population=PopulationConfig(),
        evolution=EvolutionConfig(),
        learner=with_settings(run.learner, settings),
        folder=None if run.folder is None else str(Path(run.folder) / f"seed{seed}"),
    )


def seed_folders(folder: str | Path) -> list[Path]:
    """Returns the run folders in a folder, as ``torchrl-marl train --seeds`` makes them.

    Args:
        folder (str or Path): what ``folder=...`` was beside ``--seeds``.
    """
    found = Path(folder).glob("seed*/config.yaml")
    seeds = [path.parent for path in found if path.parent.name[4:].isdecimal()]
    return sorted(seeds, key=lambda path: int(path.name[4:]))


def read_run_config(folder: str | Path) -> TrainConfig:
    """The settings that a run was started with, from its folder.

    Raises:
        CheckpointError: a folder that is missing, is no run's, or whose settings are broken.
        TrustError: the settings are a link out of the folder.
        ConfigError: no path at all.
    """
    if not isinstance(folder, (str, os.PathLike)):
        a_run = isinstance(getattr(folder, "folder", None), Path)
        raise ConfigError(
            f"the run folder is {quoted(folder)}, expected a path; "
            f"give {'run.folder' if a_run else 'the folder that `torchrl-marl train` printed'}."
        )
    path = Path(folder) / "config.yaml"
    if not path.is_file():
        there = "is a file" if Path(folder).exists() else "is not there"
        there = "has no config.yaml" if Path(folder).is_dir() else there
        fix = "give the folder that `torchrl-marl train` printed"
        if seeds := seed_folders(folder):
            there = f"holds {len(seeds)} of them, one for each seed"
            fix = f"give one of {', '.join(map(str, seeds))}"
        raise CheckpointError(f"{str(folder)!r} is no run folder: it {there}; {fix}.")
    refuse_link(path)
    try:
        # What does not apply has never been read, and is left out.
        return Reader(TrainConfig).read(read_yaml(path), told=False)
    except ConfigError as error:
        raise CheckpointError(f"{str(path)!r} does not fit this version: {error}") from None
