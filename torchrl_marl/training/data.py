"""Sources of recorded actions: the collector of a dataset, and the expert of a run."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch

from torchrl_marl.collectors.dataset import Dataset
from torchrl_marl.collectors.dataset_collector import DatasetCollector
from torchrl_marl.collectors.expert import ExpertLabels
from torchrl_marl.errors import ConfigError, quoted
from torchrl_marl.specs import TeamSpec
from torchrl_marl.training.config import TrainConfig

if TYPE_CHECKING:
    from torchrl_marl.training.environments import Environments

__all__ = ["make_dataset_collector", "make_labels"]


def make_dataset_collector(
    config: TrainConfig, team: TeamSpec, device: torch.device | str | None = None
) -> DatasetCollector:
    """Returns the collector of a run that learns from a dataset.

    Args:
        config (TrainConfig): config of the run, with ``data.folder``.
        team (TeamSpec): the groups of the environment.
        device (torch.device, optional): device of the batches.

    Raises:
        DatasetError: no dataset, or one of another environment.
    """
    dataset = Dataset.open(Path(cast(str, config.data.folder)).expanduser())
    dataset.check(team)
    rows, frames = config.env.num_envs, config.frames_per_batch
    return DatasetCollector(dataset, rows, frames, device, config.env.reward_scale)


def make_labels(
    config: TrainConfig, environments: Environments, team: TeamSpec
) -> Callable[..., Any] | None:
    """Returns a function that replaces actions by an expert's; None if there is no expert.

    Args:
        config (TrainConfig): config of the run.
        environments (Environments): environments of the run.
        team (TeamSpec): the groups.

    Raises:
        ConfigError: the environment has no heuristic, or the expert has memory.
    """
    expert = config.data.expert
    if expert is None:
        return None
    if expert != "heuristic":
        return ExpertLabels(_policy_of(expert, config.device), team)
    policy = environments.heuristic()
    if policy is None:
        raise ConfigError(
            f"data.expert is 'heuristic', but {config.env.library}/{config.env.name} has no "
            "heuristic that runs here; use data.expert=FOLDER with the folder of a run."
        )
    return ExpertLabels(policy, team)


def _policy_of(folder: str, device: str) -> Any:
    from torchrl_marl.envs.remember import remembered_by
    from torchrl_marl.training.run import Run

    policy = Run.load(Path(folder).expanduser(), device=device).policy
    if remembered_by(policy):
        raise ConfigError(
            f"data.expert is {quoted(folder)}, whose networks have memory, expected a policy "
            "without; choose another run."
        )
    return policy
