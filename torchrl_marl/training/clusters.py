"""Finds clusters of agents that can share a network, from their transitions (SePS).

Shapes: E envs, T steps, N agents of a learner.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import torch
from tensordict import TensorDictBase
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
    batch = _collect_random_steps(env, network.clustering_frames, config.seed)
    try:
        clusters = cluster_agents(
            **_transitions(groups, batch.reshape(-1)),
            n_clusters=network.n_clusters,
            seed=config.seed,
        )
    except ConfigError as error:
        raise ConfigError(f"{part}.{error}") from None
    return list(clusters)


def _collect_random_steps(env: EnvBase, frames: int, seed: int) -> TensorDictBase:
    """Returns steps with random actions; then the environment starts with the run's seed."""
    own_seed = seed + _SEED_OFFSET
    with RandomState(own_seed, env.device or "cpu").active():
        env.set_seed(own_seed)
        batch = RolloutCollector(env, frames_per_batch=frames).rollout()
        env.set_seed(seed)
        env.reset()
    return batch


def _transitions(groups: Sequence[GroupSpec], steps: TensorDictBase) -> dict[str, Any]:
    """Returns the agents' transitions, with rows of equal width, as :func:`cluster_agents` reads.

    Shapes:
        - steps: ``[F]`` for F frames; returns ``[F, N, ...]``; observation_mask: ``[N, width]``
    """
    following = steps.get("next")
    observation = _join_agents([group.flat_observation(steps) for group in groups])
    width = torch.arange(observation.shape[-1])
    sizes = [torch.tensor(group.observation_dims).unsqueeze(-1) for group in groups]
    actions = [_encode_actions(group, steps.get(group.action_key)) for group in groups]
    return {
        "observation": observation,
        "action": _join_agents(actions),
        "next_observation": _join_agents([group.flat_observation(following) for group in groups]),
        "reward": torch.cat([_reward_per_agent(group, following) for group in groups], 1),
        "mask": torch.cat([group.mask(steps).cpu() for group in groups], 1),
        "observation_mask": torch.cat([width < own for own in sizes], 0),
    }


def _join_agents(rows: Sequence[Tensor]) -> Tensor:
    """Concatenates the agents of several groups, padded with zeros to the widest row."""
    width = max(own.shape[-1] for own in rows)
    padded = [torch.nn.functional.pad(own.cpu(), (0, width - own.shape[-1])) for own in rows]
    return torch.cat(padded, 1)


def _encode_actions(group: GroupSpec, action: Tensor) -> Tensor:
    if group.discrete and not group.one_hot:
        action = torch.nn.functional.one_hot(action, group.n_actions)
    return action.float()


def _reward_per_agent(group: GroupSpec, following) -> Tensor:
    reward = following.get(group.reward_key)
    if math.prod(reward.shape) == following.numel():
        reward = reward.reshape(-1, 1, 1).expand(-1, group.n_agents, 1)
    return reward.cpu()
