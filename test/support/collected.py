"""Environments and policies for tests of collectors."""

import torch
from torchrl.envs import TransformedEnv
from torchrl.envs.transforms import RewardSum

from torchrl_marl import TeamSpec
from torchrl_marl.collectors import TeamPolicy
from torchrl_marl.envs import VmasEnv
from torchrl_marl.envs.toy import Arena
from torchrl_marl.modules import NetworkConfig, make_actor


def make_arena(num_envs=4, **kwargs):
    settings = {"n_agents": 3, "years": 2, "lives": 2, "seed": 0} | kwargs
    return Arena(num_envs, **settings)


def make_balance(num_envs=4, max_steps=7):
    return VmasEnv("balance", num_envs=num_envs, max_steps=max_steps, seed=0)


def with_sum(env, group="agents"):
    keys = {"in_keys": [(group, "reward")], "out_keys": [(group, "episode_reward")]}
    return TransformedEnv(env, RewardSum(**keys))


def policy_of(env, seed=0):
    torch.manual_seed(seed)
    groups = TeamSpec.from_env(env).groups.values()
    return TeamPolicy(make_actor(group, NetworkConfig([8])) for group in groups)


def collect(collector, n, seed=0):
    torch.manual_seed(seed)
    return [collector.next() for _ in range(n)]


WORLDS = {
    "arena": make_arena,
    "arena masked actions": lambda: make_arena(action_mask=True, n_groups=3),
    "balance": make_balance,
    "with sum": lambda: with_sum(make_arena()),
    "balance with sum": lambda: with_sum(make_balance()),
}
