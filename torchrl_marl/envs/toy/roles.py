"""Declarations that several toy environments use: a homogeneous team, and two players.

Shapes: E envs.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor
from torchrl.data import Categorical, Unbounded

from torchrl_marl.envs.marl_env import MarlEnv
from torchrl_marl.specs import AgentSpec

__all__ = ["declare_players", "declare_team", "zero_sum_step"]


def declare_team(
    env: MarlEnv,
    n_agents: int,
    n_seen: int,
    n_actions: int,
    n_state: int,
    name: str = "agent",
    n_own: int | None = None,
) -> None:
    """Registers a homogeneous team with discrete actions as the group ``"agents"``; and the state.

    Args:
        env (MarlEnv): the environment.
        n_agents (int): number of agents.
        n_seen (int): number of observation features of an agent.
        n_actions (int): number of actions of an agent.
        n_state (int): number of state features.
        name (str): name of the agents.
        n_own (int, optional): number of features of each agent's own state; None without one.
    """
    own = None if n_own is None else Unbounded((n_own,))
    seen, action = Unbounded((n_seen,)), Categorical(n_actions)
    spec = AgentSpec(name, n_agents, seen, action, state_spec=own)
    env.register_agent(spec, group="agents")
    env.register_state(Unbounded((n_state,)))


def declare_players(
    env: MarlEnv, n_seen: int, n_actions: Sequence[int], n_state: int, action_mask: bool = False
) -> None:
    """Registers the players ``first`` and ``second``, each in its own group, and the state.

    Args:
        env (MarlEnv): the environment.
        n_seen (int): number of observation features of a player.
        n_actions (sequence of int): number of actions of each player.
        n_state (int): number of state features.
        action_mask (bool): True if actions may be illegal.
    """
    for name, n in zip(("first", "second"), n_actions):
        seen, action = Unbounded((n_seen,)), Categorical(n)
        env.register_agent(AgentSpec(name, 1, seen, action, action_mask=action_mask))
    env.register_state(Unbounded((n_state,)))


def zero_sum_step(seen: dict[str, Any], earned: Tensor, ended: Tensor) -> dict[str, Any]:
    """Returns the output of a step of a zero-sum game.

    Args:
        seen (dict): outputs by group, which contain the observations.
        earned (Tensor): reward of the first player.
        ended (Tensor): True at the end of the game.

    Shapes:
        - earned: ``[E]``; ended: ``[E, 1]``
    """
    earned = earned.view(-1, 1, 1)
    seen["first"]["reward"], seen["second"]["reward"] = earned, -earned
    return {**seen, "terminated": ended}
