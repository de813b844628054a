"""Rollouts of PettingZoo's environments."""

import torch

from torchrl_marl.envs import PettingZooEnv


def step_values(td, group, leaf):
    """A leaf of the first env, step by step."""
    return td[group, leaf].squeeze(-1)[0].tolist()


def rollout_of_ones(pettingzoo_env, n_steps, **kwargs):
    """A rollout of one env in which all actions are 1."""
    env = PettingZooEnv(pettingzoo_env, seed=0, **kwargs)

    def policy(td):
        for group in env.group_map:
            td[group, "action"] = torch.ones_like(env.full_action_spec[group, "action"].rand())
        return td

    return env.rollout(n_steps, policy, break_when_any_done=False)
