"""The settings of a whole run, as in a recipe."""

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
    flatten,
    override,
    read_yaml,
)
from torchrl_marl.settings import check as check_settings
from torchrl_marl.training.sections import (
    DataConfig,
    DistributedConfig,
    EvaluationConfig,
    EvolutionConfig,
    LeagueConfig,
    PopulationConfig,
    check_measuring,
    check_shards_divide,
    check_until,
)

__all__ = [
    "BACKENDS",
    "CHOICES",
    "INIT",
    "CheckpointConfig",
    "EvaluationConfig",
    "LoggingConfig",
    "TrainConfig",
    "last_stage",
    "members_of",
    "read_run_config",
    "seed_folders",
    "with_settings",
]


CHOICES = {
    "auto": "compile (on a GPU, cudagraph) if it saves time, else eager; config.yaml records the "
    "choice",
    **EXECUTIONS,
}
"""Execution mode -> its meaning."""

BACKENDS = {
    "tensorboard": "files in the run folder",
    "wandb": "Weights & Biases",
    "mlflow": "MLflow, at MLFLOW_TRACKING_URI if it is set, else in the run folder",
}
"""Logger -> destination of the metrics."""

INIT = {
    "actor": "networks that act",
    "critic": "critics, mixers and temperatures",
    "normalization": "running statistics of observations and returns",
    "optimizer": "moments of the optimizers, which only runs hold",
}
"""Part of a run from which another run can start -> its meaning."""


@dataclass(frozen=True)
class CheckpointConfig:
    """Checkpoints from which a run can be resumed."""

    every_iterations: Annotated[int, Range(0)] = 50
    """Iterations between two checkpoints; 0: only ``every_minutes`` counts. A checkpoint is always
    written before the first iteration and at the end."""
    every_minutes: Positive | None = 5.0
    """Minutes between two checkpoints; null: only ``every_iterations`` counts."""
    keep: Count = 2
    """Number of checkpoints to keep; older ones are deleted."""


@dataclass(frozen=True)
class LoggingConfig:
    """Progress bar, and loggers in addition to ``metrics.csv``."""

    backends: Annotated[list[str], AnyOf(BACKENDS)] = field(default_factory=list)
    """Loggers that receive the metrics."""
    project: str = "torchrl_marl"
    """Project name (``wandb``) or experiment name (``mlflow``) of the loggers."""
    progress: bool = True
    """Show a progress bar."""

    def check(self, at: str = "") -> None:
        """Refuses backends that are not installed.

        Raises:
            MissingExtraError: a backend is not installed; the message says how to install it.
        """
        for backend in self.backends:
            if importlib.util.find_spec(backend) is None:
                raise MissingExtraError(backend, "log")


class _ClassNames:
    """Marks a list of ``module:Class``."""

    def misfit(self, key: str, value: Any, default: Any) -> str | None:
        """Returns an error message if an element names no class."""
        wrong = next((x for x in value if not x.rpartition(":")[2].isidentifier()), None)
        if wrong is None:
            wrong = next((x for x in value if not x.rpartition(":")[0]), None)
        if wrong is None:
            return None
        return (
            f"{key} holds {quoted(wrong)}, expected module:Class or path/to/file.py:Class; use "
            f"for example {key}=[my_callbacks:Patience]."
        )


@dataclass(frozen=True)
class TrainConfig:
    """A complete, runnable recipe."""

    recipe: str = "custom"
    """Name of the recipe."""
    seed: Seed = 0
    """Random seed of the run."""
    device: Annotated[str, Matches(r"cpu|cuda(:\d+)?", "'cpu', 'cuda' or 'cuda:1'")] = "cpu"
    """Torch device: ``cpu``, ``cuda`` or ``cuda:1``."""
    threads: Count | None = None
    """Number of CPU threads of torch; null: torch's default. Small networks are fastest with one
    thread."""
    execution: Annotated[str, OneOf(CHOICES)] = "auto"
    """Execution mode of the simulator, the policy and the update."""
    total_frames: Count = 1_000_000
    """Number of frames of the whole run."""
    stop_at_return: Annotated[float, Range()] | None = None
    """Mean return at which the run ends early; null: never. If ``evaluation.every_frames`` or
    ``evaluation.count`` is set, this is the return of the latest evaluation. Otherwise it is the
    mean of the last ``evaluation.episodes`` training episodes."""
    until: dict[str, Any] = field(default_factory=dict)
    """Metrics of evaluations, and the values at which the run ends early, such as ``{return: 40}``.
    The run ends when an evaluation during training reaches all of them. Metrics with the value null
    are ignored."""
    frames_per_batch: Count = 6400
    """Frames per iteration; a multiple of ``env.num_envs``. Each copy of the environment takes
    ``frames_per_batch / env.num_envs`` steps per iteration."""
    folder: str | None = None
    """Run folder; null: a new folder under ``runs/``."""
    init_from: str | None = None
    """Source of the initial parameters: a run folder, stored player or exported folder; null: new
    networks. ``RUN@FRAMES`` picks a checkpoint of a run."""
    init: Annotated[list[str], AnyOf(INIT)] | None = None
    """Parts to load from ``init_from``; null: actor, critic and normalization, except those that
    the source lacks."""
    stages: dict[str, Any] = field(default_factory=dict)
    """Stages of a curriculum, as name -> settings that differ, in order. Each stage is a run in
    ``RUN/NAME``, and starts from the parameters of the previous one."""
    env: EnvConfig = field(default_factory=EnvConfig)
    """The environment."""
    learner: Annotated[LearnerConfig, LearnerSettings] = field(default_factory=OnPolicyConfig)
    """Learner of all groups."""
    groups: Annotated[dict[str, Any], Overrides("learner", example="lr")] = field(
        default_factory=dict
    )
    """Settings that differ from those of ``learner``, by group, such as ``{team: {lr: 1e-3}}``."""
    data: DataConfig = field(default_factory=DataConfig)
    """Recorded steps, or actions of an expert, to learn from."""
    evaluation: EvaluationConfig = field(default_factory=EvaluationConfig)
    """Evaluation of the policy."""
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    """Checkpoints of the run."""
    logging: LoggingConfig = field(default_factory=LoggingConfig)
    """Progress bar and loggers."""
    callbacks: Annotated[list[str], _ClassNames()] = field(default_factory=list)
    """Callbacks of the run, each as ``module:Class`` or ``path/to/file.py:Class``."""
    population: PopulationConfig = field(default_factory=PopulationConfig)
    """Several runs (members) trained in parallel."""
    evolution: EvolutionConfig = field(default_factory=EvolutionConfig)
    """Selection among members, and mutation."""
    league: LeagueConfig = field(default_factory=LeagueConfig)
    """Stored opponents and partners."""
    distributed: DistributedConfig = field(default_factory=DistributedConfig)
    """Processes and machines that collect batches."""

    @property
    def played_env(self) -> EnvConfig:
        """Settings of the evaluation environment, which has the environment's own rewards.

        It is randomized only if the settings say so, and draws no symmetries.
        """
        ranges = self.env.randomize if self.evaluation.randomize else {}
        return replace(self.env, randomize=ranges, reward_scale=1.0, other_play=False)

    def check(self, at: str = "", skip: Collection[str] = ()) -> None:
        """Refuses settings that contradict each other.

        Args:
            at (str): prefix of the names in messages.
            skip (collection of str): sections to leave out, such as ``env`` if the caller passes an
                environment.

        Raises:
            ConfigError: settings are contradictory; the message names them and the fix.
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
        check_until(self)
        if self.init is not None and (self.init_from is None or not self.init):
            why = "empty" if self.init_from else "given, but init_from is null"
            raise ConfigError(f"init is {why}; use init=null, or for example init=[actor].")
        self.check_features(own_env=own_env)
        self.check_learners(own_env=own_env)
        if self.population.size > 1:
            check_population(self)
        elif self.evolution.method != "none":
            raise ConfigError(
                f"evolution.method is {self.evolution.method!r}, but population.size is 1; use "
                "for example population.size=8, or evolution.method=none."
            )

    def check_learners(self, *, own_env: bool = False) -> None:
        """Refuses settings of learners that do not fit the rest of the run.

        Args:
            own_env (bool): whether the caller passes an environment; it is not examined here.

        Raises:
            ConfigError: settings do not fit; the message names them and the fix.
        """
        for at, learner in self.learners().items():
            learner.check_run(self, at, own_env=own_env)

    def check_features(self, *, own_env: bool = False) -> None:
        """Refuses settings that cannot be combined with the requested features.

        Args:
            own_env (bool): whether the caller passes an environment; ``env`` is then ignored.

        Raises:
            ConfigError: a setting cannot be combined; the message names it and the fix.
        """
        for feature in FEATURES:
            if feature.asked(self, own_env):
                feature.check(self)
        if self.distributed.enabled:
            check_shards_divide(self)

    def learners(self) -> dict[str, LearnerConfig]:
        """Returns every learner's settings; keys are the prefixes of their names in messages."""
        own = {f"groups.{name}.": override(self, "groups", name) for name in self.groups}
        return {"learner.": self.learner, **own}


def check_population(run: TrainConfig) -> None:
    """Refuses settings that do not fit the members of a population.

    Args:
        run (TrainConfig): the settings.

    Raises:
        ConfigError: a setting does not fit; the message names it and the fix.
    """
    if run.evolution.method == "tournament" and run.evolution.elite >= run.population.size:
        raise ConfigError(
            f"evolution.elite is {run.evolution.elite}, expected less than population.size, "
            f"{run.population.size}, or no member is replaced; use evolution.elite=1."
        )
    if run.evolution.method != "none" and run.population.folders:
        raise ConfigError(
            f"evolution.method is {run.evolution.method!r}, but population.folders is given, as "
            "by a sweep in one program; use evolution.method=none."
        )
    for at, learner in run.learners().items():
        _check_learner_of_members(run, learner, at)
    _check_groups_of_members(run)
    values = run.population.values(run.seed).values()
    for extreme in ([own.index(pick(own)) for own in values] for pick in (min, max)):
        for member in set(extreme):  # the extreme values must be in the ranges of their settings
            check_settings(members_of(run)[member].learner, "learner.")


def _check_learner_of_members(run: TrainConfig, learner: LearnerConfig, at: str) -> None:
    """Refuses a learner that lacks a setting to vary over members, or a replay buffer to share."""
    known = varying_of(learner)
    for name in run.population.bounds():
        if name not in known:
            raise ConfigError(
                f"population.vary has 'learner.{name}', which {at}algorithm={learner.algorithm} "
                f"does not have; expected one of {', '.join(f'learner.{one}' for one in known)}."
            )
    if run.population.share_replay and not isinstance(learner, ReplayLearnerConfig):
        raise ConfigError(
            f"population.share_replay is true, but {at}algorithm={learner.algorithm} has no "
            "replay buffer; use population.share_replay=false."
        )


def _check_groups_of_members(run: TrainConfig) -> None:
    """Refuses settings of groups that vary over members, since only one of the two can hold."""
    for group, given in run.groups.items():
        for name in run.population.bounds():
            if name in flatten(given):
                raise ConfigError(
                    f"population.vary has 'learner.{name}', but groups.{group}.{name} is given, "
                    "and a varied setting holds for all groups; leave one of them out."
                )


def with_settings(learner: LearnerConfig, settings: Mapping[str, float]) -> LearnerConfig:
    """Replaces some of a learner's settings, given by names such as ``exploration.epsilon``.

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
    """Returns the settings of each member of a population, as settings of an ordinary run.

    Args:
        run (TrainConfig): settings of the population.
    """
    values = run.population.values(run.seed)
    return [
        member_of(run, member, {name: own[member] for name, own in values.items()})
        for member in range(run.population.size)
    ]


def member_of(run: TrainConfig, number: int, settings: Mapping[str, float]) -> TrainConfig:
    """Returns the settings of one member, as settings of an ordinary run.

    Args:
        run (TrainConfig): settings of the population.
        number (int): index of the member, 0 for the first.
        settings (mapping): settings of the member's learner that differ from the population's.
    """
    name, seed = run.population.place(number, run.seed)
    return replace(
        run,
        seed=seed,
        population=PopulationConfig(),
        evolution=EvolutionConfig(),
        callbacks=[],  # the population's callbacks see all members
        learner=with_settings(run.learner, settings),
        folder=None if run.folder is None else str(Path(run.folder) / name),
    )


def seed_folders(folder: str | Path) -> list[Path]:
    """Returns the run folders of ``torchrl-marl train --seeds``, ordered by seed.

    Those of a sweep in one program are ordered by combination and seed.

    Args:
        folder (str or Path): the ``folder=...`` of that command.
    """
    found = [*Path(folder).glob("seed*/config.yaml")]
    if (Path(folder) / "config.yaml").is_file():  # a population
        found += Path(folder).glob("*/seed*/config.yaml")
    seeds = [path.parent for path in found if path.parent.name[4:].isdecimal()]
    return sorted(seeds, key=lambda path: (path.parent, int(path.name[4:])))


def read_run_config(folder: str | Path) -> TrainConfig:
    """Returns a run's settings from the ``config.yaml`` in its folder.

    Raises:
        CheckpointError: the folder is missing, is not a run folder, or its settings are broken.
        TrustError: ``config.yaml`` is a link out of the folder.
        ConfigError: ``folder`` is not a path.
    """
    if not isinstance(folder, (str, os.PathLike)):
        a_run = isinstance(getattr(folder, "folder", None), Path)
        raise ConfigError(
            f"the run folder is {quoted(folder)}, expected a path; "
            f"give {'run.folder' if a_run else 'the folder that `torchrl-marl train` printed'}."
        )
    path = Path(folder) / "config.yaml"
    if not path.is_file():
        there = "is a file" if Path(folder).exists() else "does not exist"
        there = "has no config.yaml" if Path(folder).is_dir() else there
        fix = "give the folder that `torchrl-marl train` printed"
        if seeds := seed_folders(folder):
            there = f"holds {len(seeds)} run folders, one for each seed"
            fix = f"give one of {', '.join(map(str, seeds))}"
        raise CheckpointError(f"{str(folder)!r} is not a run folder: it {there}; {fix}.")
    refuse_link(path)
    try:
        # Settings that do not apply were never used by the run, and are left out.
        return Reader(TrainConfig).read(read_yaml(path), warn=False)
    except ConfigError as error:
        raise CheckpointError(f"{str(path)!r} does not fit this version: {error}") from None


def last_stage(folder: str | Path) -> Path:
    """Returns the folder of the last stage of a run that has begun; a run without stages itself.

    Args:
        folder (str or Path): a run folder, or any other path, which is returned unchanged.
    """
    path = Path(folder)
    if not (path / "config.yaml").is_file():
        return path
    begun = [path / name for name in read_run_config(path).stages]
    begun = [one for one in begun if any(one.glob("checkpoints/iteration_*.pt"))]
    return begun[-1] if begun else path
