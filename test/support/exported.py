"""Team policies whose agents differ, compared with their exported agents."""

import math

import torch

from torchrl_marl import TeamSpec
from torchrl_marl.apps.export.agent import agents_of
from torchrl_marl.apps.export.check import InMemory, check_players
from torchrl_marl.collectors import TeamPolicy
from torchrl_marl.envs import with_memory
from torchrl_marl.envs.transforms import with_dense_groups
from torchrl_marl.modules.joined_actor import GroupActors
from torchrl_marl.modules.normalization import ObservationNorm
from torchrl_marl.specs.joining import join


@torch.no_grad()
def randomize_weights(policy, seed=0):
    """The policy with random weights, so that outputs differ between agents and observations."""
    generator = torch.Generator().manual_seed(seed)
    for parameter in policy.parameters():
        scale = 1.5 / math.sqrt(max(parameter.shape[-1], 2)) if parameter.ndim > 1 else 0.3
        parameter.copy_(scale * torch.randn(parameter.shape, generator=generator))
    for norm in (module for module in policy.modules() if isinstance(module, ObservationNorm)):
        norm.mean.copy_(torch.rand(norm.mean.shape, generator=generator))
        norm.variance.copy_(0.5 + torch.rand(norm.mean.shape, generator=generator))
    return policy


def team_policy(groups, make, *, joined=False, normed=False, **settings):
    """The actors of some groups, separate or joined."""
    actors = GroupActors()
    for group in [join(tuple(groups))] if joined else groups:
        norm = ObservationNorm(group.observation_dim, kinds=group.kinds) if normed else None
        actors.add(group, make(group, observation_norm=norm, **settings))
    return randomize_weights(TeamPolicy(actors.values()))


def check_players_alone(env, make, *, steps=24, **settings):
    """Compares every single agent of an environment with the team policy."""
    env = with_dense_groups(env)
    groups = list(TeamSpec.from_env(env).groups.values())
    policy = team_policy(groups, make, **settings)
    players = {name: InMemory(agent) for name, agent in agents_of(policy).items()}
    return check_players(with_memory(env, policy), policy, players, steps=steps)
