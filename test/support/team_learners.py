"""Learners and policies for a team of the meadow."""

import torch

from torchrl_marl.collectors import TeamPolicy
from torchrl_marl.learners import OnPolicyConfig, build_learners
from torchrl_marl.modules import NetworkConfig
from torchrl_marl.modules.config import CriticConfig

E, T = 8, 10


def config_of(critic=None, **settings):
    defaults = {
        "actor": NetworkConfig([8]),
        "critic": CriticConfig([8], **(critic or {})),
        "num_epochs": 2,
        "minibatch_size": 40,
        "entropy_coeff": 0.01,
    }
    return OnPolicyConfig(**(defaults | settings))


def learners_of(team, config, apart=(), seed=0):
    """``apart``: groups with separate settings."""
    torch.manual_seed(seed)
    group_settings = {name: {"gamma": 0.9 - 0.01 * i} for i, name in enumerate(apart)}
    return build_learners(team, config, group_settings)


def policy_of(learners):
    return TeamPolicy(actor for learner in learners for actor in learner.actors.values())
