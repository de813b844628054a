"""Groups that do not learn.

Shapes: E envs, T steps.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from tensordict import TensorDict, TensorDictBase
from torch import nn

from torchrl_marl.learners.config import LearnerConfig
from torchrl_marl.modules.random_actor import RandomActor
from torchrl_marl.specs import GroupSpec, TeamSpec

__all__ = ["RandomPlayers"]


class RandomPlayers(nn.Module):
    """Groups that act at random and learn nothing: opponents of those who do.

    Args:
        groups (mapping of name to GroupSpec): who they are.
        config (LearnerConfig): nothing of it is read.
        team, execution: taken as of any learner, and not read.
        device (torch.device, optional): of the actions.

    Examples:
        >>> from torchrl_marl import TeamSpec
        >>> from torchrl_marl.envs import VmasEnv
        >>> team = TeamSpec.from_env(VmasEnv("simple_tag", num_envs=2, seed=0))
        >>> from torchrl_marl.learners.config import RandomConfig
        >>> list(RandomPlayers({"agent": team.groups["agent"]}, RandomConfig()).actors)
        ['agent']
    """

    def __init__(
        self,
        groups: Mapping[str, GroupSpec],
        config: LearnerConfig,
        *,
        team: TeamSpec | None = None,
        device: torch.device | str | None = None,
        execution: str = "eager",
    ) -> None:
        super().__init__()
        self.groups = dict(groups)
        self.config = config
        self.actors = nn.ModuleDict({n: RandomActor(g, device) for n, g in groups.items()})

    def set_progress(self, fraction: float) -> None:
        """There are no schedules."""

    def learn(self, batch: TensorDictBase) -> TensorDict:
        """No metrics."""
        return TensorDict({}, [])
