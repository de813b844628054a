"""A population's run: its folder, members and results, and what its members have together.

Shapes: P members.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from torchrl_marl.specs import TeamSpec
from torchrl_marl.training.config import TrainConfig
from torchrl_marl.training.run import Run

__all__ = ["MOST_EVALUATED", "PopulationRun", "row_of_all", "together"]

MOST_EVALUATED = 1000
"""Episodes of all members that are played side by side."""


class PopulationRun:
    """The results of a population's training.

    Args:
        folder (Path): with ``config.yaml``, ``metrics.csv`` (means over members, and the best),
            ``checkpoints/`` of all members together, and a run folder for each member.
        config (TrainConfig): its settings.
        folders (sequence of Path): the members' run folders.

    Attributes:
        summary (dict): as a run's, means over members.
        frames (int): env steps that each member was trained for.
    """

    def __init__(self, folder: Path, config: TrainConfig, folders: Sequence[Path]) -> None:
        self.folder, self.config, self.folders = folder, config, list(folders)
        self.summary: dict[str, Any] = {}
        self.frames = 0

    @property
    def members(self) -> list[Run]:
        """The members as ordinary runs, as they were saved last."""
        return [Run.load(folder) for folder in self.folders]

    def __repr__(self) -> str:
        return f"PopulationRun({str(self.folder)!r}, {len(self.folders)} members)"


def row_of_all(
    rows: Sequence[Mapping[str, Any]], team: TeamSpec, seeds: Sequence[int], sick: Tensor
) -> dict[str, Any]:
    """Returns each group's mean return, the best member's, and whose that is.

    Args:
        rows (sequence of mapping): of each member's ``metrics.csv``.
        team (TeamSpec): the groups.
        seeds (sequence of int): of the members.
        sick (Tensor): members that are left out, bool.

    Shapes:
        - sick: ``[P]``
    """
    row: dict[str, Any] = {}
    for name in team.groups:
        found = torch.tensor([own[f"{name}/episode_reward"] for own in rows])
        found = found.masked_fill(sick, torch.nan)
        known = found.nan_to_num(-torch.inf)
        row[f"{name}/episode_reward"] = float(found.nanmean())
        row[f"{name}/best"] = float(known.max())
        row[f"{name}/best_seed"] = seeds[int(known.argmax())]
    return row


def together(config: TrainConfig) -> TrainConfig:
    """Returns the settings of all members' environments as one."""
    size = config.population.size
    episodes = min(config.evaluation.episodes, max(1, MOST_EVALUATED // size))
    return dataclasses.replace(
        config,
        env=dataclasses.replace(config.env, num_envs=size * config.env.num_envs),
        evaluation=dataclasses.replace(config.evaluation, episodes=size * episodes),
    )
