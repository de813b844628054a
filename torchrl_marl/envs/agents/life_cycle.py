"""Life cycle of a team as tensor operations: masks, and done flags of agents and episodes.

Shapes: E envs, N agents of a group.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from torchrl_marl.specs import TeamSpec

__all__ = [
    "GroupFlags",
    "TeamFlags",
    "episode_state",
    "flags_after_reset",
    "flags_after_step",
    "mask_rewards",
    "where_fresh",
]


@dataclass(frozen=True)
class GroupFlags:
    """Flags of the agents of one group after a step.

    Args:
        terminated, truncated (Tensor): done flags of the agents; once True, they stay True until
            the episode's reset, or until the agent comes back (:meth:`revived`).
        mask (Tensor): True for agents that are alive and act in the next step.

    Shapes:
        - terminated, truncated: ``[E, N, 1]``; mask: ``[E, N]``
    """

    terminated: Tensor
    truncated: Tensor
    mask: Tensor

    @classmethod
    def living(
        cls, batch_size: torch.Size, n_agents: int, device: torch.device | None
    ) -> GroupFlags:
        """Returns the flags of a group in which all agents are alive and act."""
        shape = (*batch_size, n_agents)
        false = torch.zeros(*shape, 1, dtype=torch.bool, device=device)
        return cls(false, false.clone(), torch.ones(shape, dtype=torch.bool, device=device))

    @property
    def done(self) -> Tensor:
        """Mask ``[E, N, 1]`` of agents that are terminated or truncated."""
        return self.terminated | self.truncated

    def ended_by(self, terminated: Tensor | None, truncated: Tensor | None) -> GroupFlags:
        """Adds the flags of agents that end in a step; ignores agents that ended earlier."""
        living = ~self.done
        now_terminated, now_truncated = self.terminated, self.truncated
        if terminated is not None:
            now_terminated = now_terminated | (living & terminated)
        if truncated is not None:
            now_truncated = now_truncated | (living & truncated & ~now_terminated)
        return GroupFlags(now_terminated, now_truncated, self.mask)

    def revived(self, before: GroupFlags, acts: Tensor, root: TeamFlags) -> GroupFlags:
        """Clears the done flags of agents that come back for a new life in the next step.

        These are the agents that ended in an earlier step and act next, unless the episode is over.

        Args:
            before (GroupFlags): flags at the start of the step.
            acts (Tensor): mask ``[E, N]`` of agents that act in the next step.
            root (TeamFlags): flags of the episode.
        """
        ended = ~(before.done & acts.unsqueeze(-1) & ~root.done.unsqueeze(-2))
        return GroupFlags(self.terminated & ended, self.truncated & ended, self.mask)

    def closed_by(self, root: TeamFlags, acts: Tensor | None) -> GroupFlags:
        """Adds the end of the episode, and sets the mask of the next step.

        At a time limit the mask is True for all living agents, including waiting ones, because
        the returns of living agents are bootstrapped from the last observation.

        Args:
            root (TeamFlags): flags of the episode.
            acts (Tensor, optional): mask ``[E, N]``, False for agents that wait in the next step.
        """
        living = ~self.done
        alive = (living & ~root.terminated.unsqueeze(-2)).squeeze(-1)
        return GroupFlags(
            self.terminated | (living & root.terminated.unsqueeze(-2)),
            self.truncated | (living & root.truncated.unsqueeze(-2)),
            alive if acts is None else alive & (acts | root.truncated),
        )


@dataclass(frozen=True)
class TeamFlags:
    """Flags ``terminated`` and ``truncated`` of the episode, ``[E, 1]``; never True together."""

    terminated: Tensor
    truncated: Tensor

    @property
    def done(self) -> Tensor:
        """Mask ``[E, 1]`` of episodes that are terminated or truncated."""
        return self.terminated | self.truncated

    @classmethod
    def running(cls, batch_size: torch.Size, device: torch.device | None) -> TeamFlags:
        """Returns flags that are all False, for envs in which every episode is running."""
        false = torch.zeros(*batch_size, 1, dtype=torch.bool, device=device)
        return cls(false, false.clone())

    def after(
        self,
        groups: Sequence[GroupFlags],
        terminated: Tensor | None = None,
        truncated: Tensor | None = None,
        limit: Tensor | None = None,
    ) -> TeamFlags:
        """Returns the flags after a step.

        An episode is terminated if all its agents are terminated, or if the environment says so.
        Episodes that end for another reason are truncated.

        Args:
            groups (sequence of GroupFlags): flags of all groups after the step; empty if the
                episode continues when all agents have ended, because they may come back.
            terminated, truncated (Tensor, optional): flags ``[E, 1]`` of the whole episode, as the
                environment returns them.
            limit (Tensor, optional): mask ``[E, 1]`` of the envs at their time limit.
        """
        ended = done = torch.zeros_like(self.terminated)
        if groups:
            ended = torch.cat([group.terminated for group in groups], -2).all(-2)
            done = torch.cat([group.done for group in groups], -2).all(-2)
        if terminated is not None:
            ended = ended | terminated
        for flag in (truncated, limit):
            if flag is not None:
                done = done | flag
        ended = self.terminated | (ended & ~self.truncated)
        return TeamFlags(ended, self.truncated | (done & ~ended))


def flags_after_reset(
    team: TeamSpec, root: TeamFlags, source: Mapping[str, Any]
) -> dict[str, GroupFlags]:
    """Returns the flags of each group after a reset; the masks are those of the environment."""
    size, device = root.terminated.shape[:-1], root.terminated.device
    living = {
        name: GroupFlags.living(size, group.n_agents, device) for name, group in team.groups.items()
    }
    return {n: flags.closed_by(root, source[n].get("mask")) for n, flags in living.items()}


def flags_after_step(
    groups: Mapping[str, GroupFlags], source: Mapping[str, dict[str, Any]]
) -> dict[str, GroupFlags]:
    """Returns the groups' flags after a step; removes the agents' done flags from the output."""
    return {
        name: flags.ended_by(
            source[name].pop("terminated", None), source[name].pop("truncated", None)
        )
        for name, flags in groups.items()
    }


def mask_rewards(reward: Tensor, before: GroupFlags, born: Tensor) -> Tensor:
    """Returns the rewards of a step, with zeros before an agent's birth and after its end.

    Waiting agents are alive and earn rewards.

    Args:
        reward (Tensor): rewards from the environment.
        before (GroupFlags): flags at the start of the step.
        born (Tensor): True for agents that act in this step, or acted earlier in the episode.

    Shapes:
        - reward and returned rewards: ``[E, N, 1]``; born: ``[E, N]``
    """
    return torch.where(born.unsqueeze(-1) & ~before.done, reward, torch.zeros_like(reward))


def episode_state(
    steps: Tensor,
    root: TeamFlags,
    groups: dict[str, GroupFlags],
    source: dict[str, Any],
    born: dict[str, Tensor],
) -> dict[str, Any]:
    """Returns nested dicts of the running episodes' state and of the environment's output."""
    output = {**source, "done": root.done, **root.__dict__}
    for name, flags in groups.items():
        output[name] = {**source[name], "done": flags.done, **flags.__dict__}
    return {
        "steps": steps,
        # Copies, because users may write to the environment's output.
        "root": _clone_flags(root.__dict__),
        "groups": {name: _clone_flags(flags.__dict__) for name, flags in groups.items()},
        "born": {name: x.clone() for name, x in born.items()},
        "given": output,
    }


def _clone_flags(flags: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: flag.clone() for name, flag in flags.items()}


def where_fresh(fresh: Tensor, new: dict[str, Any], old: dict[str, Any]) -> dict[str, Any]:
    """Selects new values where the mask ``fresh`` ``[E]`` is True, and old values elsewhere."""
    merged: dict[str, Any] = {}
    for key, x in new.items():
        if isinstance(x, dict):
            merged[key] = where_fresh(fresh, x, old[key])
        else:
            merged[key] = torch.where(fresh.view(-1, *[1] * (x.ndim - 1)), x, old[key])
    return merged
