"""Declarations that toy environments share: teams of equal agents, and two players.

Shapes: E envs.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor
from torchrl.data import Categorical, Unbounded

from torchrl_marl.envs.marl_env import MarlEnv
from torchrl_marl.specs import AgentSpec

__all__ = ["declare_players", "declare_team", "settled"]


def declare_team(
    env: MarlEnv, n_agents: int, n_seen: int, n_actions: int, n_state: int, name: str = "agent"
) -> None:
    """Registers a team of equal agents that choose, the group ``"agents"``, and its state.

    Args:
        env (MarlEnv): the environment.
        n_agents (int): of the team.
        n_seen (int): features that one sees.
        n_actions (int): among which one chooses.
        n_state (int): features of the state.
        name (str): of the kind of agents.
    """
    spec = AgentSpec(name, n_agents, Unbounded((n_seen,)), Categorical(n_actions))
    env.register_agent(spec, group="agents")
    env.register_state(Unbounded((n_state,)))


def declare_players(
    env: MarlEnv, n_seen: int, n_actions: Sequence[int], n_state: int, action_mask: bool = False
) -> None:
    """Registers the players ``first`` and ``second``, a group each, and the state.

    Args:
        env (MarlEnv): the environment.
        n_seen (int): features that one sees.
        n_actions (sequence of int): among which each chooses.
        n_state (int): features of the state.
        action_mask (bool): some of them may be illegal.
    """
    for name, n in zip(("first", "second"), n_actions):
        seen, choice = Unbounded((n_seen,)), Categorical(n)
        env.register_agent(AgentSpec(name, 1, seen, choice, action_mask=action_mask))
    env.register_state(Unbounded((n_state,)))


def settled(seen: dict[str, Any], earned: Tensor, ended: Tensor) -> dict[str, Any]:
    """Returns what a step gives: what both see, and that one earns what the other loses.

    Args:
        seen (dict): group -> what it sees.
        earned (Tensor): by the first.
        ended (Tensor): the game is over.

    Shapes:
        - earned: ``[E]``; ended: ``[E, 1]``
    """
    earned = earned.view(-1, 1, 1)
    seen["first"]["reward"], seen["second"]["reward"] = earned, -earned
    return {**seen, "terminated": ended}
