"""Collectors with graphs and with eager steps, and their batches."""

import torch

from torchrl_marl import TeamSpec
from torchrl_marl.collectors import RolloutCollector, TeamPolicy
from torchrl_marl.envs import VmasEnv
from torchrl_marl.modules import make_actor
from torchrl_marl.modules.config import NetworkConfig

SMALL = NetworkConfig(num_cells=[8])


def dropout(**kwargs):
    """A small scenario: two agents; a step has a tenth of the operations of balance."""
    settings = {"num_envs": 6, "seed": 0, "max_steps": 7, "info": False, "n_agents": 2, **kwargs}
    return VmasEnv("dropout", **settings)


def policy_of(env, seed=0):
    torch.manual_seed(seed)
    groups = TeamSpec.from_env(env).groups.values()
    return TeamPolicy(make_actor(group, SMALL) for group in groups)


def collector_of(env, execution, policy="actors", n_steps=5, **kwargs):
    policy = policy_of(env) if policy == "actors" else policy
    frames = n_steps * env.batch_size.numel()
    return RolloutCollector(env, policy, frames_per_batch=frames, execution=execution, **kwargs)


def batch_of(collector, seed=1):
    torch.manual_seed(seed)
    return collector.rollout()


def assert_equal(first, second):
    assert set(first.keys(True, True)) == set(second.keys(True, True))
    assert first.batch_size == second.batch_size
    for key in first.keys(True):
        x, y = first.get(key), second.get(key)
        if isinstance(x, torch.Tensor):
            assert x.dtype == y.dtype and torch.equal(x, y), key
        else:
            assert x.batch_size == y.batch_size, key
