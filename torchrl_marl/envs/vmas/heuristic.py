"""Heuristics of VMAS's scenarios, as policies.

Shapes: E envs, N agents of a group.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from tensordict import TensorDictBase

if TYPE_CHECKING:
    from torchrl_marl.envs.vmas import VmasEnv

__all__ = ["heuristic_policy"]


def heuristic_policy(env: VmasEnv) -> Callable[[TensorDictBase], TensorDictBase] | None:
    """Returns the scenario's own heuristic, or None where it has none that runs here.

    Args:
        env (VmasEnv): of continuous actions; the heuristics know no others.

    Keys:
        - reads: ``(group, "observation")``
        - writes: ``(group, "action")``

    Examples:
        >>> from torchrl_marl.envs import VmasEnv
        >>> env = VmasEnv("balance", num_envs=2, seed=0)
        >>> env.rollout(3, heuristic_policy(env))["agents", "action"].shape
        torch.Size([2, 3, 3, 2])
    """
    simulator = env._env
    module = inspect.getmodule(type(simulator.scenario))
    if module is None:  # VMAS loads its scenarios as modules without a name
        scenarios = importlib.import_module("vmas.scenarios")
        module = scenarios.load(f"{env.scenario_name}.py")
    kind = getattr(module, "HeuristicPolicy", None)
    if kind is None or not simulator.continuous_actions:
        return None
    try:
        heuristic = kind(continuous_action=True)
        _act(env, heuristic, env.fake_tensordict())
    except (ImportError, TypeError, NotImplementedError, AttributeError):
        return None
    return lambda tensordict: _act(env, heuristic, tensordict)


def _act(env: VmasEnv, heuristic, tensordict: TensorDictBase) -> TensorDictBase:
    agents = {agent.name: agent for agent in env._env.agents}
    for group, names in env.group_map.items():
        observation = tensordict.get((group, "observation"))
        actions = []
        for i, name in enumerate(names):
            limit = agents[name].u_range
            action = heuristic.compute_action(observation[:, i], u_range=limit)
            actions.append(action.clamp(-limit, limit))
        tensordict.set((group, "action"), torch.stack(actions, 1))
    return tensordict
