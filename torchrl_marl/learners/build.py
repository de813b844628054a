"""From a team and settings to its learners."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

import torch
from torch import Tensor

from torchrl_marl.errors import ConfigError, nearest
from torchrl_marl.learners.algorithms import ALGORITHMS, group_config
from torchrl_marl.learners.config import LearnerConfig, OnPolicyConfig
from torchrl_marl.learners.learner import Learner
from torchrl_marl.learners.off_policy_config import OffPolicyConfig
from torchrl_marl.learners.population import PopulationLearner
from torchrl_marl.learners.population_config import check_members
from torchrl_marl.learners.replay_population import OffPolicyPopulation, ValuePopulation
from torchrl_marl.learners.value_config import ValueConfig
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
    """Builds one learner for all groups of equal settings.

    Args:
        team (TeamSpec): the groups.
        default (LearnerConfig): settings of all groups.
        overrides (mapping, optional): group name -> settings that differ.
        device (torch.device, optional): of networks and optimizers.
        execution (str): as in :class:`OnPolicyLearner`.

    Raises:
        ConfigError: settings for a group that the team has not.

    Examples:
        >>> from torchrl_marl.envs import VmasEnv
        >>> from torchrl_marl.learners.config import OnPolicyConfig
        >>> team = TeamSpec.from_env(VmasEnv("simple_tag", num_envs=2, seed=0))
        >>> len(build_learners(team, OnPolicyConfig()))
        1
        >>> len(build_learners(team, OnPolicyConfig(), {"adversary": {"lr": 1e-4}}))
        2
    """
    return [
        ALGORITHMS.learner(config.algorithm)(
            groups, config, team=team, device=device, execution=execution
        )
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
    """Builds one learner of all members of a population for all groups of equal settings.

    Args:
        team, default, overrides, device, execution: as in :func:`build_learners`.
        n_members (int): how many members.
        settings (mapping, optional): name -> a setting of each member, ``[P]``.
        share_replay (bool): all members learn from the stored steps of all.

    Raises:
        ConfigError: settings with which members would not learn by themselves.
    """
    learners: list[Any] = []
    for config, groups in partition(team, default, overrides):
        check_members(config)
        more: dict[str, Any] = {"n_members": n_members, "settings": settings, "team": team}
        more |= {"device": device, "execution": execution}
        if isinstance(config, ValueConfig):
            learners.append(ValuePopulation(groups, config, share_replay=share_replay, **more))
        elif isinstance(config, OffPolicyConfig):
            learners.append(OffPolicyPopulation(groups, config, share_replay=share_replay, **more))
        else:
            learners.append(PopulationLearner(groups, cast(OnPolicyConfig, config), **more))
    return learners


def partition(
    team: TeamSpec,
    default: LearnerConfig,
    overrides: Mapping[str, Mapping[str, Any]] | None = None,
) -> list[tuple[LearnerConfig, dict[str, GroupSpec]]]:
    """Returns the groups of equal settings, with their settings.

    Args:
        team, default, overrides: as in :func:`build_learners`.

    Raises:
        ConfigError: settings for a group that the team has not.
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
