"""Ends of agents and episodes in a step of Isaac Lab, as tensor maths.

Shapes: E envs, N agents of the whole team.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from torchrl_marl.envs.agents.life_cycle import GroupFlags, TeamFlags

__all__ = ["Ends", "present"]


@dataclass(frozen=True)
class Ends:
    """The agents' flags of one step, read with and without an end of the episode.

    Isaac Lab's flags are levels of the task's making: an agent's ``terminated`` may clear while
    the episode goes on. Here an agent that ended stays so until the episode's reset. And Isaac
    Lab ends an episode where all agents are terminated or all are timed out in one step, so one
    in which some terminated and the others timed out would run forever: :attr:`over` tells
    where no agent is left, or the time limit is reached.

    Args:
        running (GroupFlags): of the agents, where the episode goes on.
        last (GroupFlags): where it ends: those who time out in this step live up to its end.
        terminated (Tensor): if the episode ends, it is for good.
        over (Tensor): it must end.

    Shapes:
        - flags of ``running`` and ``last``: ``[E, N, 1]``; terminated, over: ``[E, 1]``
    """

    running: GroupFlags
    last: GroupFlags
    terminated: Tensor
    over: Tensor

    @classmethod
    def of(
        cls,
        before: GroupFlags,
        terminated: Tensor,
        timed_out: Tensor,
        limit: Tensor | None = None,
        away: Tensor | None = None,
    ) -> Ends:
        """Builds the ends from the flags before a step and the task's flags after it.

        Args:
            before (GroupFlags): of the agents, with their ends since the last reset.
            terminated, timed_out (Tensor): the task's, ``[E, N, 1]``.
            limit (Tensor, optional): our own time limit is reached, ``[E, 1]``.
            away (Tensor, optional): the task has no such agent now, ``[1, N, 1]``.
        """
        last = before.ended_by(terminated, None)
        running = last.ended_by(None, timed_out)
        absent = torch.zeros_like(terminated[:1]) if away is None else away
        for_good = (terminated | absent).all(1) | (last.terminated | absent).all(1)
        over = (running.done | absent).all(1)
        return cls(running, last, for_good, over if limit is None else over | limit)

    def flags(self, done: Tensor, away: Tensor | None = None) -> tuple[TeamFlags, GroupFlags]:
        """Returns the flags of the episode and of the agents, with the mask of the next step.

        Args:
            done (Tensor): where the environment was reset, ``[E, 1]``.
            away (Tensor, optional): the task has no such agent now, ``[1, N, 1]``.
        """
        terminated = done & self.terminated
        root = TeamFlags(terminated, done & ~terminated)
        truncated = torch.where(done.unsqueeze(1), self.last.truncated, self.running.truncated)
        agents = replace(self.running, truncated=truncated).closed_by(root, None)
        return root, present(agents, away)


def present(agents: GroupFlags, away: Tensor | None) -> GroupFlags:
    """Masks out agents that the task does not have."""
    if away is None:
        return agents
    return replace(agents, mask=agents.mask & ~away.squeeze(-1))
