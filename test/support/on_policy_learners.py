"""Learners of a small arena, and batches for them."""

import torch

from torchrl_marl import TeamSpec
from torchrl_marl.collectors import RolloutCollector, TeamPolicy
from torchrl_marl.envs.toy import Arena
from torchrl_marl.learners import OnPolicyConfig, OnPolicyLearner
from torchrl_marl.modules import NetworkConfig

SMALL = {"actor": NetworkConfig([8]), "critic": NetworkConfig([8])}


def make_arena(num_envs=8, **kwargs):
    settings = {"n_agents": 3, "years": 3, "lives": 2, "seed": 0} | kwargs
    return Arena(num_envs, **settings)


def make_learner(env, seed=0, **kwargs):
    torch.manual_seed(seed)
    settings = {**SMALL, "num_epochs": 2, "minibatch_size": 24, "entropy_coeff": 0.01} | kwargs
    return OnPolicyLearner(TeamSpec.from_env(env).groups, OnPolicyConfig(**settings))


def make_batch(env, learner, steps=10, seed=0):
    torch.manual_seed(seed)
    policy = TeamPolicy(learner.actors.values())
    frames = steps * env.batch_size.numel()
    return RolloutCollector(env, policy, frames_per_batch=frames).next()


def weights(learner):
    return [p.detach().clone() for p in learner.parameters()]


def learn(learner, batch, seed=1):
    torch.manual_seed(seed)
    return learner.learn(batch)
