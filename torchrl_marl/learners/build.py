"""Builders of the learners of a team."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from torchrl_marl.errors import ConfigError, nearest
from torchrl_marl.learners.algorithms import ALGORITHMS, group_config
from torchrl_marl.learners.config import LearnerConfig
from torchrl_marl.learners.learner import Learner, check_learner
from torchrl_marl.specs import GroupSpec, TeamSpec

__all__ = ["build_learners", "build_population", "partition"]


def build_learners(
    team: TeamSpec,
    default: LearnerConfig,
    overrides: Mapping[str, Mapping[str, Any]] | None = None,
    *,
    device: torch.device | str | None = None,
    execution: str = "eager",
) -> list[Learner]:
    """Builds one learner for each set of groups that have the same settings.

    Args:
        team (TeamSpec): the groups.
        default (LearnerConfig): settings of all groups.
        overrides (mapping, optional): group name -> settings that differ from the default.
        device (torch.device, optional): device of networks and optimizers.
        execution (str): as in :class:`OnPolicyLearner`.

    Raises:
        ConfigError: settings for a group that the team does not have.

    Examples:
        >>> from torchrl_marl.envs import VmasEnv
        >>> from torchrl_marl.learners.config import OnPolicyConfig
        >>> team = TeamSpec.from_env(VmasEnv("simple_tag", num_envs=2, seed=0))
        >>> len(build_learners(team, OnPolicyConfig()))
        1
        >>> len(build_learners(team, OnPolicyConfig(), {"adversary": {"lr": 1e-4}}))
        2
    """
    where: dict[str, Any] = {"team": team, "device": device, "execution": execution}
    return [
        check_learner(ALGORITHMS.learner(config.algorithm)(groups, config, **where))
        for config, groups in partition(team, default, overrides)
    ]


def build_population(
    team: TeamSpec,
    default: LearnerConfig,
    overrides: Mapping[str, Mapping[str, Any]] | None = None,
    *,
    n_members: int,
    settings: Mapping[str, Tensor] | None = None,
    share_replay: bool = False,
    device: torch.device | str | None = None,
    execution: str = "eager",
) -> list[Any]:
    """Builds one learner of a population for each set of groups that have the same settings.

    Args:
        team, default, overrides, device, execution: as in :func:`build_learners`.
        n_members (int): number of members.
        settings (mapping, optional): name of a setting -> its value for each member, ``[P]``.
        share_replay (bool): whether all members learn from one replay buffer.

    Raises:
        ConfigError: settings with which members would not learn independently.
    """
    from torchrl_marl.learners.members import learner_of_members

    more: dict[str, Any] = {"n_members": n_members, "settings": settings, "team": team}
    more |= {"share_replay": share_replay, "device": device, "execution": execution}
    return [
        learner_of_members(groups, config, **more)
        for config, groups in partition(team, default, overrides)
    ]


def partition(
    team: TeamSpec,
    default: LearnerConfig,
    overrides: Mapping[str, Mapping[str, Any]] | None = None,
) -> list[tuple[LearnerConfig, dict[str, GroupSpec]]]:
    """Returns the sets of groups that have the same settings, and the settings of each set.

    Args:
        team, default, overrides: as in :func:`build_learners`.

    Raises:
        ConfigError: settings for a group that the team does not have.
    """
    overrides = overrides or {}
    for name in overrides:
        if name not in team.groups:
            raise ConfigError(
                f"groups.{name}: the environment has no group {name!r}; "
                f"{nearest(name, team.groups)}it has {', '.join(team.groups)}."
            )
    settings: list[tuple[LearnerConfig, dict[str, GroupSpec]]] = []
    for name, group in team.groups.items():
        config = group_config(default, overrides.get(name), name)
        for known, groups in settings:
            if known == config:
                groups[name] = group
                break
        else:
            settings.append((config, {name: group}))
    return settings
