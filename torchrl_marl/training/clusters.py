"""Finds clusters of agents that can share a network, from their transitions (SePS).

Shapes: E envs, T steps, N agents of a learner.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torchrl.envs import EnvBase

from torchrl_marl.collectors.rollout import RolloutCollector
from torchrl_marl.errors import ConfigError
from torchrl_marl.learners.build import partition
from torchrl_marl.modules.clustering import cluster_agents
from torchrl_marl.runtime.random_state import RandomState
from torchrl_marl.specs import GroupSpec, TeamSpec
from torchrl_marl.training.config import TrainConfig

__all__ = ["with_clusters"]

_SEED_OFFSET = 15_485_863


def with_clusters(config: TrainConfig, team: TeamSpec, env: EnvBase) -> TrainConfig:
    """Returns the settings, with the ``sharing_index`` that ``sharing: clusters`` finds.

    The steps for this are collected with random actions, in a separate random state.

    Args:
        config (TrainConfig): config of the run.
        team (TeamSpec): the groups.
        env (EnvBase): environment with dense groups; reset it before you use it again.

    Raises:
        ConfigError: agents cannot share a network, or there are more clusters than agents.
    """
    groups = dict(config.groups)
    for learner, own in partition(team, config.learner, config.groups):
        for part in ("actor", "critic"):
            network = getattr(learner, part, None)
            if network is None or network.sharing != "clusters":
                continue
            if network.sharing_index is not None:
                continue
            index = _find_clusters(network, part, list(own.values()), config, env)
            for name in own:
                settings = dict(groups.get(name) or {})
                settings[part] = {**(settings.get(part) or {}), "sharing_index": index}
                groups[name] = settings
    return config if groups == config.groups else dataclasses.replace(config, groups=groups)


def _find_clusters(
    network: Any, part: str, groups: Sequence[GroupSpec], config: TrainConfig, env: EnvBase
) -> list[int]:
    if len({group.discrete for group in groups}) > 1:
        raise ConfigError(
            f"{part}.sharing is clusters, but of the groups {[g.name for g in groups]} some have "
            "discrete actions and some continuous ones; give them separate settings."
        )
    seed = config.seed + _SEED_OFFSET
    with RandomState(seed, env.device or "cpu").active():
        env.set_seed(seed)
        batch = RolloutCollector(env, frames_per_batch=network.clustering_frames).rollout()
        env.set_seed(config.seed)
        env.reset()
    flat = batch.reshape(-1)
    following = flat.get("next")
    observations = [_pad_features(group.flat_observation(flat)) for group in groups]
    width = max(rows.shape[-1] for rows in observations)
    next_observations = [
        _pad_features(group.flat_observation(following), width) for group in groups
    ]
    observation_mask = [
        torch.arange(width) < torch.tensor(group.observation_dims).unsqueeze(-1) for group in groups
    ]
    actions = [_encode_actions(group, flat.get(group.action_key)) for group in groups]
    size = max(action.shape[-1] for action in actions)
    masks = [group.mask(flat).cpu() for group in groups]
    try:
        clusters = cluster_agents(
            torch.cat([_pad_features(rows, width) for rows in observations], 1),
            torch.cat([_pad_features(action, size) for action in actions], 1),
            torch.cat(next_observations, 1),
            torch.cat([_reward_per_agent(group, following) for group in groups], 1),
            network.n_clusters,
            mask=torch.cat(masks, 1),
            observation_mask=torch.cat(observation_mask, 0),
            seed=config.seed,
        )
    except ConfigError as error:
        raise ConfigError(f"{part}.{error}") from None
    return list(clusters)


def _pad_features(value: Tensor, width: int | None = None) -> Tensor:
    value = value.cpu()
    missing = 0 if width is None else width - value.shape[-1]
    return torch.nn.functional.pad(value, (0, missing)) if missing else value


def _encode_actions(group: GroupSpec, action: Tensor) -> Tensor:
    if group.discrete and not group.one_hot:
        action = torch.nn.functional.one_hot(action, group.n_actions)
    return action.float()


def _reward_per_agent(group: GroupSpec, following) -> Tensor:
    reward = following.get(group.reward_key)
    if math.prod(reward.shape) == following.numel():
        reward = reward.reshape(-1, 1, 1).expand(-1, group.n_agents, 1)
    return reward.cpu()
