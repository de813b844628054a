"""Sources of recorded actions: the collector of a dataset, and the expert of a run."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor

from torchrl_marl.collectors.dataset import Dataset
from torchrl_marl.collectors.dataset_collector import DatasetCollector
from torchrl_marl.collectors.expert import ExpertLabels
from torchrl_marl.errors import ConfigError, UserError, quoted
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
        return _make_run_labels(expert, config.device, environments, team)
    policy = environments.heuristic()
    if policy is None:
        raise ConfigError(
            f"data.expert is 'heuristic', but {config.env.library}/{config.env.name} has no "
            "heuristic that runs here; use data.expert=FOLDER with the folder of a run."
        )
    return ExpertLabels(policy, team)


def _make_run_labels(
    folder: str, device: str, environments: Environments, team: TeamSpec
) -> ExpertLabels:
    """Returns labels of the policy of a run, after a try on a step of the environment."""
    from torchrl_marl.envs.remember import hidden_sizes
    from torchrl_marl.training.run import Run

    path = Path(folder).expanduser()
    if not path.is_dir():
        raise ConfigError(
            f"data.expert is {quoted(folder)}, expected heuristic, or the folder of a run; "
            "`torchrl-marl train` prints it."
        )
    policy = Run.load(path, device=device).policy
    if hidden_sizes(policy):
        raise ConfigError(
            f"data.expert is {quoted(folder)}, whose networks have memory, expected a policy "
            "without; choose another run."
        )
    labels = ExpertLabels(policy, team)
    step = environments.training.fake_tensordict().apply(_allow_everything)
    try:
        labels(step)
    except (UserError, KeyError, RuntimeError) as error:
        raise ConfigError(
            f"data.expert is {quoted(folder)}, which does not fit the environment ({error}); "
            "choose a run of this environment."
        ) from error
    return labels


def _allow_everything(value: Tensor) -> Tensor:
    """Returns flags that are True: every agent acts, and may take every action."""
    return torch.ones_like(value) if value.dtype == torch.bool else value
