"""How much memory a store of steps takes at least."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from torchrl_marl.learners.config import LearnerConfig
from torchrl_marl.learners.off_policy_config import ReplayLearnerConfig
from torchrl_marl.runtime.memory import memory_of, refuse_too_large
from torchrl_marl.specs import GroupSpec

__all__ = ["least_bytes_per_row", "refuse_large_store"]


def least_bytes_per_row(groups: Iterable[GroupSpec]) -> int:
    """Returns the bytes of a step: observations before and after it, actions and rewards.

    Args:
        groups (iterable of GroupSpec): whose steps are stored.

    Examples:
        >>> from torchrl.data import Categorical, Unbounded
        >>> from torchrl_marl import AgentSpec, TeamSpec
        >>> team = TeamSpec([AgentSpec("car", 2, Unbounded((5,)), Categorical(3))])
        >>> least_bytes_per_row(team.groups.values())  # 2 * (2 * 5 * 4 + 8 + 4)
        104
    """
    size = 0
    for group in groups:
        zeros = group.padded_spec.zero()
        seen, done = zeros.select("observation"), zeros.select("action")
        size += 2 * seen.bytes() + done.bytes() + 4 * group.n_agents
    return size


def refuse_large_store(
    config: LearnerConfig,
    groups: Iterable[GroupSpec],
    device: torch.device | str,
    n_members: int = 1,
) -> None:
    """Refuses a store that does not fit into memory, before anything is stored.

    Args:
        config (LearnerConfig): how the groups learn; not all algorithms have a store.
        groups (iterable of GroupSpec): whose steps are stored.
        device (torch.device): where.
        n_members (int): members of a population, each of which has such a store.

    Raises:
        ConfigError: naming the setting and both sizes.
    """
    if not isinstance(config, ReplayLearnerConfig):
        return
    row, capacity = n_members * least_bytes_per_row(groups), config.replay.capacity
    most = (memory_of(device) or 0) // (2 * row)
    refuse_too_large(
        row * capacity,
        device,
        f"learner.replay.capacity is {capacity:,}, a store of which, at {row:,} B a step"
        f"{f' of {n_members} members' if n_members > 1 else ''},",
        f"use learner.replay.capacity={most}",
    )
