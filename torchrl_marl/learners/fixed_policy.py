"""A learner for groups with a fixed policy.

Shapes: E envs, T steps.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from tensordict import TensorDict, TensorDictBase
from tensordict.nn import TensorDictModuleBase
from torch import nn

from torchrl_marl.learners.config import LearnerConfig
from torchrl_marl.modules.exploration import RandomActor
from torchrl_marl.specs import GroupSpec

__all__ = ["FixedPolicy", "RandomPlayers"]


class FixedPolicy(nn.Module):
    """Groups with a fixed policy, such as the opponents of the groups that learn.

    Args:
        groups (mapping of name to GroupSpec): the groups.
        config (LearnerConfig, optional): kept, but not read.
        actors (mapping of name to module, optional): actors by group; random actions by default.
        device (torch.device, optional): device of the random actions.
        **others: arguments of other learners; they are ignored.

    Examples:
        >>> from torchrl_marl import TeamSpec
        >>> from torchrl_marl.envs import VmasEnv
        >>> team = TeamSpec.from_env(VmasEnv("simple_tag", num_envs=2, seed=0))
        >>> list(FixedPolicy({"agent": team.groups["agent"]}).actors)
        ['agent']
    """

    over_ranks = True
    """True, since it learns nothing."""
    remembered = ()

    def cut(self) -> None:
        """Does nothing: no state is kept between batches."""

    def use_shards(self, own: range, total: int, seed: int) -> None:
        """Does nothing: there are no minibatches."""

    def __init__(
        self,
        groups: Mapping[str, GroupSpec],
        config: LearnerConfig | None = None,
        *,
        actors: Mapping[str, TensorDictModuleBase] | None = None,
        device: torch.device | str | None = None,
        **others: Any,
    ) -> None:
        super().__init__()
        self.groups = dict(groups)
        self.config = config
        if actors is None:
            actors = {name: RandomActor(group, device) for name, group in groups.items()}
        self.actors = nn.ModuleDict(actors)

    def set_progress(self, fraction: float) -> None:
        """Does nothing: there are no schedules."""

    def learn(self, batch: TensorDictBase) -> TensorDict:
        """Returns no metrics."""
        return TensorDict({}, [])


RandomPlayers = FixedPolicy
"""The former name."""
