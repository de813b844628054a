"""Replaces the actions of batches by those of an expert.

Shapes: E envs, T steps.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from tensordict import TensorDictBase
from torchrl.envs.utils import ExplorationType, set_exploration_type

from torchrl_marl.specs import TeamSpec

__all__ = ["ExpertLabels"]


class ExpertLabels:
    """Writes an expert's actions into a batch, in place of those that were taken (DAgger).

    Args:
        expert (callable): the expert's joint policy, without memory.
        team (TeamSpec): the groups.

    Shapes:
        - batch: ``[E, T]``

    Keys:
        - reads: observations, masks, and the state
        - writes: ``(group, "action")``

    Reference: Ross et al., 2011, https://arxiv.org/abs/1011.0686, algorithm 3.1.

    Examples:
        >>> from torchrl_marl.envs import VmasEnv
        >>> env = VmasEnv("balance", num_envs=2, seed=0)
        >>> label = ExpertLabels(env.heuristic(), TeamSpec.from_env(env))
        >>> batch = env.rollout(3)
        >>> before = batch["agents", "action"].clone()
        >>> bool((label(batch)["agents", "action"] == before).all())
        False
    """

    def __init__(self, expert: Callable[[TensorDictBase], TensorDictBase], team: TeamSpec) -> None:
        self.expert, self.team = expert, team

    @torch.no_grad()
    def __call__(self, batch: TensorDictBase) -> TensorDictBase:
        actions = [group.action_key for group in self.team.groups.values()]
        steps = batch.exclude("next", "collector", *actions).reshape(-1)
        with set_exploration_type(ExplorationType.DETERMINISTIC):
            acted = self.expert(steps)
        for key in actions:
            batch.set(key, acted.get(key).reshape(batch.get(key).shape))
        return batch
