"""The life cycle of a batch as flags, and the team's reward: one definition for all that learns.

A learner computes the flags once, where it gathers a batch. Estimators, losses and replay buffers
read them; a loss that is used alone finds them by itself, as far as its batch shows them.

- ``(group, "flags", "alive")``: the agent is born, and its life has not ended when the step
  begins; it acts or waits.
- ``("next", group, "flags", "bootstraps")``: what follows the step can be read for the agent: it
  acts next, or a time limit has cut it off.
- ``(group, "mask")``: the agent acts. ``(group, "learns")``: it is no opponent's.
- ``("next", group, "team", "reward")``: the team's reward, of a step that is stored.

Shapes: B any batch dims, T time, N agents.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from tensordict import TensorDictBase
from torch import Tensor

from torchrl_marl.objectives.births import Births
from torchrl_marl.objectives.masking import bootstrap_mask, who_learns
from torchrl_marl.per_group import PerGroup
from torchrl_marl.specs import GroupSpec

__all__ = [
    "ALIVE",
    "BOOTSTRAPS",
    "TEAM_REWARD",
    "Flags",
    "alive_in",
    "bootstraps_in",
    "flags_of",
    "of_agents",
    "own_reward",
    "share",
    "team_mean",
    "team_reward",
    "with_flags",
]

ALIVE, BOOTSTRAPS = ("flags", "alive"), ("flags", "bootstraps")
TEAM_REWARD = ("team", "reward")


class Flags(NamedTuple):
    """Flags of a group's agents, ``[*B, N]`` each; None where all agents always live and act."""

    alive: Tensor | None
    bootstraps: Tensor | None


def flags_of(group: GroupSpec, data: TensorDictBase, born: Tensor | None = None) -> Flags:
    """Computes the flags of a group.

    Args:
        group (GroupSpec): whose agents.
        data (TensorDictBase): ``[*B]``, steps with ``"next"``.
        born (Tensor, optional): who is born, from :class:`~torchrl_marl.objectives.births.Births`;
            all, by default.

    Shapes:
        - born: ``[*B, N]``
    """
    alive = group.living(data)
    if alive is not None and born is not None:
        alive = alive & born
    if group.mask_key is None:
        return Flags(alive, None)
    following = data.get("next")
    seen = following.get(group.mask_key)
    truncated = None if group.truncated_key is None else following.get(group.truncated_key, None)
    if truncated is None:
        return Flags(alive, seen)  # a stored step's mask is settled
    ends = (of_agents(x, seen) for x in (truncated, following.get(group.terminated_key)))
    return Flags(alive, bootstrap_mask(seen if alive is None else alive, seen, *ends))


def alive_in(group: GroupSpec, data: TensorDictBase) -> Tensor | None:
    """Returns who is born and lives when a step begins, acting or waiting; None for all."""
    found = data.get((group.name, *ALIVE), None)
    return group.living(data) if found is None else found


def bootstraps_in(group: GroupSpec, data: TensorDictBase) -> Tensor | None:
    """Returns for whom what follows a step can be read, ``[*B, N]``; None for all."""
    found = data.get(("next", group.name, *BOOTSTRAPS), None)
    return flags_of(group, data).bootstraps if found is None else found


def with_flags(group: GroupSpec, data: TensorDictBase) -> TensorDictBase:
    """Returns a batch with the group's flags, computed from the batch alone where it has none.

    An agent that waits before its first own step in the batch then counts as not yet born.

    Args:
        group (GroupSpec): whose agents; dense.
        data (TensorDictBase): ``[*B, T]``; stays as it is.
    """
    known = data.get((group.name, *ALIVE), None) is not None
    if known or group.mask_key is None or data.get(("next", "done"), None) is None:
        return data
    born = Births({group.name: group}).update(data).get(group.name)
    data = data.copy()
    flags = flags_of(group, data, born)
    data.set((group.name, *ALIVE), flags.alive)
    data.set(("next", group.name, *BOOTSTRAPS), flags.bootstraps)
    return data


def of_agents(signal: Tensor, mask: Tensor) -> Tensor:
    """Returns a signal for every agent, ``[*B, N, 1]``, of an agent's or the team's ``[*B, 1]``."""
    signal = signal.unsqueeze(-2) if signal.ndim == mask.ndim else signal
    return signal.expand(*mask.shape, 1)


def team_mean(signal: Tensor, sources: Tensor, per_group: PerGroup) -> Tensor:
    """Returns the mean over the sources of each agent's group; 0 where there are none.

    Shapes:
        - signal: ``[*B, N, 1]``; sources: ``[*B, N]``; returns ``[*B, N]``, or ``[*B, 1]``
    """
    total = per_group.sum(torch.where(sources, signal.squeeze(-1), 0.0))
    count = per_group.sum(sources.to(signal.dtype)).clamp_min(1.0)
    return per_group.to_agents(total / count)


def share(
    signal: Tensor, own: Tensor | None, sources: Tensor | None, per_group: PerGroup
) -> Tensor:
    """Gives the agents that have no signal of their own the mean of their group's sources.

    Args:
        signal (Tensor): such as rewards or values.
        own (Tensor, optional): who has one; all, by default.
        sources (Tensor, optional): whose mean it is; those who have one, by default.
        per_group (PerGroup): of the group.

    Shapes:
        - signal, returns: ``[*B, N, 1]``; own, sources: ``[*B, N]``
    """
    if own is None:
        return signal
    mean = team_mean(signal, own if sources is None else sources, per_group)
    return torch.where(own, signal.squeeze(-1), mean).unsqueeze(-1)


def own_reward(group: GroupSpec, data: TensorDictBase, reward: Tensor) -> Tensor:
    """Returns each agent's own reward, 0 before its birth and after its end.

    Where a batch does not say whose life has ended, who does not act may wait, and is paid.

    Args:
        group (GroupSpec): whose.
        data (TensorDictBase): ``[*B]``.
        reward (Tensor): what the environment gives.

    Shapes:
        - reward, returns: ``[*B, N, 1]``
    """
    alive = alive_in(group, data)
    if alive is None or not group.agent_done or data.get(group.done_key, None) is None:
        return reward
    return torch.where(alive.unsqueeze(-1), reward, 0.0)


def team_reward(
    group: GroupSpec, data: TensorDictBase, reward: Tensor, per_group: PerGroup
) -> Tensor:
    """Returns the team's reward of each step, for every agent of the group.

    It is the mean over the agents that are born and alive in the step, whether they act or wait;
    where some do not learn, over those who do.

    Args:
        group (GroupSpec): whose.
        data (TensorDictBase): ``[*B]``.
        reward (Tensor): each agent's.
        per_group (PerGroup): of the group.

    Shapes:
        - reward, returns: ``[*B, N, 1]``
    """
    earns = who_learns(data, group, alive_in(group, data))
    earns = torch.ones_like(reward.squeeze(-1), dtype=torch.bool) if earns is None else earns
    return team_mean(reward, earns, per_group).expand(reward.shape[:-1]).unsqueeze(-1)
