"""Flags of a batch (living, acting, done, bootstrapped agents), and masked slots."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch
from tensordict import NestedKey, TensorDictBase
from torch import Tensor
from torch.nn import functional as F

from torchrl_marl.functional import expand_mask
from torchrl_marl.functional.statistics import PerGroup
from torchrl_marl.modules.memory.states import STATES
from torchrl_marl.specs import GroupSpec

__all__ = [
    "ALIVE",
    "BOOTSTRAPS",
    "TEAM_REWARD",
    "Births",
    "Flags",
    "alive_mask_of",
    "begun",
    "blank_masked_actions",
    "blank_masked_inputs",
    "bootstrap_mask",
    "bootstrap_mask_of",
    "flags_of",
    "learned_steps",
    "learning_mask",
    "loss_mask",
    "loss_mask_key",
    "of_agents",
    "own_reward",
    "placeholder_action",
    "share",
    "team_mean",
    "team_reward",
    "valid_actions",
    "with_flags",
]


def bootstrap_mask(
    alive: Tensor, next_mask: Tensor, truncated: Tensor, terminated: Tensor
) -> Tensor:
    """Returns a mask of agents to bootstrap after a step: they act next, or were truncated.

    A truncated agent has a last observation to bootstrap from, even if it would not act next.

    Shapes:
        - alive (before the step), next_mask: ``[*B, N]``; returns ``[*B, N]``
        - truncated, terminated: ``[*B, N, 1]``
    """
    return next_mask | (alive & (truncated & ~terminated).squeeze(-1))


def loss_mask(tensordict: TensorDictBase, mask_key: NestedKey) -> Tensor:
    """Returns the mask of steps to learn from: acting steps with a known outcome; ``[*B, N]``.

    These are the steps that an estimator with ``bootstrap="agent"`` has marked, or else all steps
    in which an agent acts.
    """
    return tensordict.get(loss_mask_key(mask_key), tensordict.get(mask_key))


def learned_steps(tensordict: TensorDictBase, group: GroupSpec) -> Tensor | None:
    """Returns the mask of a group's steps to learn from, ``[*B, N]``; None for all.

    The mask is that of :func:`loss_mask`; this function also supports groups whose agents never die
    or wait.
    """
    acts = None if group.mask_key is None else tensordict.get(group.mask_key)
    return tensordict.get(group.key("loss_mask"), acts)


def learning_mask(
    tensordict: TensorDictBase, group: GroupSpec, acts: Tensor | None
) -> Tensor | None:
    """Returns the steps of ``acts`` in which the learning policy acted.

    Args:
        tensordict (TensorDictBase): steps, which have ``(group, "learns")`` if other policies
            control some agents.
        group (GroupSpec): the group.
        acts (Tensor, optional): mask of acting agents; default: all.

    Shapes:
        - acts, ``(group, "learns")``, returns: ``[*B, N]``
    """
    learns = tensordict.get(group.key("learns"), None)
    if learns is None or acts is None:
        return acts if learns is None else learns
    return acts & learns


def loss_mask_key(mask_key: NestedKey) -> NestedKey:
    """Returns the key of the mask of steps to learn from: ``loss_mask``, next to ``mask_key``."""
    return "loss_mask" if isinstance(mask_key, str) else (*mask_key[:-1], "loss_mask")


def blank_masked_inputs(
    inputs: TensorDictBase, mask_key: NestedKey | None, source: TensorDictBase
) -> TensorDictBase:
    """Zeroes the masked slots of networks' inputs, since 0 times NaN would be NaN.

    An entry belongs to the agents if it is in the same group as the mask. The ``"state"`` belongs
    to no agent and stays unchanged, whatever its shape. Hidden states stay unchanged, too, because
    a waiting agent keeps its state.

    Args:
        inputs (TensorDictBase): selected inputs, changed in place.
        mask_key (NestedKey, optional): key of the mask ``[*B, N]`` in ``source``.
        source (TensorDictBase): data with the mask.
    """
    mask = None if mask_key is None else source.get(mask_key, None)
    if mask is None:
        return inputs
    group_path = mask_key[:-1] if isinstance(mask_key, tuple) else ()
    for key in list(inputs.keys(True, True)):
        path = (key,) if isinstance(key, str) else key
        value = inputs.get(key)
        if (
            path[: len(group_path)] != group_path
            or path == ("state",)
            or not value.is_floating_point()
        ):
            continue
        if path[-1] in STATES:
            continue
        if value.shape[: mask.ndim] != mask.shape:
            continue
        inputs.set(key, torch.where(expand_mask(mask, value), value, 0.0))
    return inputs


def placeholder_action(group: GroupSpec) -> Tensor:
    """Returns an action for which every distribution has a finite log-probability."""
    if group.one_hot:
        return F.one_hot(torch.tensor(0), group.n_actions)
    if group.discrete or group.action_bounds is None:
        return torch.zeros(())
    low, high = group.action_bounds
    middle = (low + high) / 2
    return F.pad(middle, (len(group.branches), 0)) if group.hybrid else middle


def valid_actions(group: GroupSpec | None) -> Tensor | None:
    """Returns the mask of each agent's actions in a padded one-hot action; None without padding."""
    if group is None or not group.one_hot:
        return None  # padded distributions of numbers mask an agent's actions themselves
    return group.action_padding


def blank_masked_actions(
    tensordict: TensorDictBase, key: NestedKey, acts: Tensor, placeholder: Tensor
) -> None:
    """Replaces actions of agents that do not act by one with a finite log-probability."""
    action = tensordict[key]
    mask = expand_mask(acts, action)
    tensordict.set(key, torch.where(mask, action, placeholder.to(action)))


class Births:
    """Tracks the agents that are born, through episodes that may span several batches.

    An agent is born in the first step of an episode in which its mask is True. In turn-based
    groups, and without masks, all agents are born with the episode.

    Args:
        groups (mapping of name to GroupSpec): the groups.
    """

    def __init__(self, groups: Mapping[str, GroupSpec]) -> None:
        self.groups = dict(groups)
        self._born_before: dict[str, Tensor] = {}

    def update(self, batch: TensorDictBase) -> dict[str, Tensor]:
        """Returns masks of the agents born by each step of a batch: ``[*B, T, N]`` by group.

        Groups whose agents are all born with the episode are left out.
        """
        done = batch.get(("next", "done")).reshape(batch.shape).unsqueeze(-1)
        born = {}
        for name, group in _groups_with_late_births(self.groups).items():
            acts = batch.get(group.mask_key)
            before = self._born_before.get(name)
            if before is None or before.shape != acts[..., 0, :].shape:
                before = torch.zeros_like(acts[..., 0, :])
            born[name], self._born_before[name] = _born_masks(acts, done, before.to(acts.device))
        return born

    def forget(self, envs: Tensor | None = None) -> None:
        """Forgets births in running episodes of the given environments (bool ``[E]``) or of all."""
        if envs is None:
            self._born_before = {}
            return
        for name, born in self._born_before.items():
            self._born_before[name] = born & ~envs.unsqueeze(-1)

    def state_dict(self) -> dict[str, Tensor]:
        """Returns the born agents of the running episodes."""
        return {f"{name}/born": x for name, x in self._born_before.items()}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Restores saved births."""
        keys = {name: f"{name}/born" for name in self.groups}
        self._born_before = {name: state[key] for name, key in keys.items() if key in state}


def begun(
    groups: Mapping[str, GroupSpec], step: TensorDictBase, before: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """Returns the agents born up to a step, ``[*B, N]`` by group, as :class:`Births` counts them.

    Args:
        groups (mapping of name to GroupSpec): the groups.
        step (TensorDictBase): a step, ``[*B]``.
        before (mapping): result for the previous step; empty at the beginning of the episode.
    """
    acting = {
        name: step.get(group.mask_key) for name, group in _groups_with_late_births(groups).items()
    }
    return {name: acts | before[name] if before else acts for name, acts in acting.items()}


def _groups_with_late_births(groups: Mapping[str, GroupSpec]) -> dict[str, GroupSpec]:
    """Returns the groups with agents that may be born late."""
    return {n: g for n, g in groups.items() if g.mask_key is not None and not g.in_turns}


def _born_masks(acts: Tensor, done: Tensor, before: Tensor) -> tuple[Tensor, Tensor]:
    """Returns masks of born agents: per step, ``[*B, T, N]``; for the next batch, ``[*B, N]``.

    Args:
        acts (Tensor): acting agents, ``[*B, T, N]``.
        done (Tensor): whether the episode ends in the step, ``[*B, T, 1]``.
        before (Tensor): agents born before the batch, ``[*B, N]``.
    """
    steps = torch.arange(acts.shape[-2], device=acts.device).unsqueeze(-1)
    last_acting = torch.where(acts, steps, -1).cummax(-2).values
    last_end = torch.where(done, steps, -1).cummax(-2).values
    no_end = torch.full_like(last_end[..., :1, :], -1)
    last_end_before = torch.cat([no_end, last_end[..., :-1, :]], -2)
    born = (last_acting > last_end_before) | ((last_end_before < 0) & before.unsqueeze(-2))
    return born, born[..., -1, :] & ~done[..., -1, :]


ALIVE, BOOTSTRAPS = ("flags", "alive"), ("flags", "bootstraps")
TEAM_REWARD = ("team", "reward")


class Flags(NamedTuple):
    """Flags of a group's agents, ``[*B, N]`` each; None if all agents always live and act."""

    alive: Tensor | None
    bootstraps: Tensor | None


def flags_of(group: GroupSpec, data: TensorDictBase, born: Tensor | None = None) -> Flags:
    """Computes the flags of a group.

    Args:
        group (GroupSpec): group of the agents.
        data (TensorDictBase): steps ``[*B]`` with ``"next"``.
        born (Tensor, optional): mask of born agents, from
            :class:`~torchrl_marl.objectives.flags.Births`; default: all agents.

    Shapes:
        - born: ``[*B, N]``
    """
    alive = group.living(data)
    if alive is not None and born is not None:
        alive = alive & born
    if group.mask_key is None:
        return Flags(alive, None)
    following = data.get("next")
    seen = following[group.mask_key]
    truncated = None if group.truncated_key is None else following.get(group.truncated_key, None)
    if truncated is None:
        return Flags(alive, seen)  # a stored mask is final
    ends = (of_agents(x, seen) for x in (truncated, following.get(group.terminated_key)))
    return Flags(alive, bootstrap_mask(seen if alive is None else alive, seen, *ends))


def alive_mask_of(group: GroupSpec, data: TensorDictBase) -> Tensor | None:
    """Returns the mask of agents that are born and alive before a step; None for all."""
    stored = data.get((group.name, *ALIVE), None)
    return group.living(data) if stored is None else stored


def bootstrap_mask_of(group: GroupSpec, data: TensorDictBase) -> Tensor | None:
    """Returns the mask of agents to bootstrap after a step, ``[*B, N]``; None for all."""
    stored = data.get(("next", group.name, *BOOTSTRAPS), None)
    return flags_of(group, data).bootstraps if stored is None else stored


def with_flags(group: GroupSpec, data: TensorDictBase) -> TensorDictBase:
    """Returns a batch with the group's flags, computed from the batch alone if it has none.

    An agent then counts as unborn until the first step of the batch in which it acts.

    Args:
        group (GroupSpec): group of the agents; dense.
        data (TensorDictBase): batch ``[*B, T]``; it is not changed.
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
    """Returns a signal per agent, ``[*B, N, 1]``; a team's signal ``[*B, 1]`` is expanded."""
    signal = signal.unsqueeze(-2) if signal.ndim == mask.ndim else signal
    return signal.expand(*mask.shape, 1)


def team_mean(signal: Tensor, sources: Tensor, per_group: PerGroup) -> Tensor:
    """Returns the mean signal of the source agents in each agent's group; 0 if there are none.

    Shapes:
        - signal: ``[*B, N, 1]``; sources: ``[*B, N]``; returns ``[*B, N]``, or ``[*B, 1]``
    """
    total = per_group.sum(torch.where(sources, signal.squeeze(-1), 0.0))
    count = per_group.sum(sources.to(signal.dtype)).clamp_min(1.0)
    return per_group.to_agents(total / count)


def share(
    signal: Tensor, own: Tensor | None, sources: Tensor | None, per_group: PerGroup
) -> Tensor:
    """Gives agents without a signal the mean signal of the source agents in their group.

    Args:
        signal (Tensor): signal, such as rewards or values.
        own (Tensor, optional): mask of agents that have a signal; default: all agents.
        sources (Tensor, optional): mask of agents over which the mean is taken; default: ``own``.
        per_group (PerGroup): statistics per group.

    Shapes:
        - signal, returns: ``[*B, N, 1]``; own, sources: ``[*B, N]``
    """
    if own is None:
        return signal
    mean = team_mean(signal, own if sources is None else sources, per_group)
    return torch.where(own, signal.squeeze(-1), mean).unsqueeze(-1)


def own_reward(group: GroupSpec, data: TensorDictBase, reward: Tensor) -> Tensor:
    """Returns each agent's reward; it is 0 before the agent's birth and after its end.

    In a batch without done flags of agents, an agent that does not act may be waiting, so its
    reward is kept.

    Args:
        group (GroupSpec): group of the agents.
        data (TensorDictBase): steps ``[*B]``.
        reward (Tensor): reward of the environment.

    Shapes:
        - reward, returns: ``[*B, N, 1]``
    """
    alive = alive_mask_of(group, data)
    if alive is None or not group.agent_done or data.get(group.done_key, None) is None:
        return reward
    return torch.where(alive.unsqueeze(-1), reward, 0.0)


def team_reward(
    group: GroupSpec, data: TensorDictBase, reward: Tensor, per_group: PerGroup
) -> Tensor:
    """Returns the team's reward of each step, for every agent of the group.

    It is the mean over the agents that are born and alive in the step, whether or not they act. If
    some agents do not learn, it is the mean over those that do.

    Args:
        group (GroupSpec): group of the agents.
        data (TensorDictBase): steps ``[*B]``.
        reward (Tensor): reward of each agent.
        per_group (PerGroup): statistics per group.

    Shapes:
        - reward, returns: ``[*B, N, 1]``
    """
    earns = learning_mask(data, group, alive_mask_of(group, data))
    earns = torch.ones_like(reward.squeeze(-1), dtype=torch.bool) if earns is None else earns
    return team_mean(reward, earns, per_group).expand(reward.shape[:-1]).unsqueeze(-1)
