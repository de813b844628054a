"""Births of agents: an agent that is not born yet earns nothing and counts nowhere.

Shapes: B any batch dims, E envs, T steps, N agents of a group.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from tensordict import TensorDictBase
from torch import Tensor

from torchrl_marl.specs import GroupSpec

__all__ = ["Births", "begun"]


class Births:
    """Which agents are born, through episodes that may span several batches.

    An agent is born with its first own step: the first of its episode in which its mask is True.
    Where agents move in turns, all are born with the episode, and so are those without masks.

    Args:
        groups (mapping of name to GroupSpec): the groups.
    """

    def __init__(self, groups: Mapping[str, GroupSpec]) -> None:
        self.groups = dict(groups)
        self._before: dict[str, Tensor] = {}

    def update(self, batch: TensorDictBase) -> dict[str, Tensor]:
        """Returns the born agents in each step of a batch ``[*B, T]``: ``[*B, T, N]`` by group.

        Groups of which all agents are born with the episode are left out.
        """
        done = batch.get(("next", "done")).reshape(batch.shape).unsqueeze(-1)
        born = {}
        for name, group in _waiting(self.groups).items():
            acts = batch.get(group.mask_key)
            before = self._before.get(name)
            if before is None or before.shape != acts[..., 0, :].shape:
                before = torch.zeros_like(acts[..., 0, :])
            born[name], self._before[name] = _born(acts, done, before.to(acts.device))
        return born

    def forget(self, envs: Tensor | None = None) -> None:
        """Forgets the running episodes of some envs, bool ``[E]``, or of all."""
        if envs is None:
            self._before = {}
            return
        for name, born in self._before.items():
            self._before[name] = born & ~envs.unsqueeze(-1)

    def state_dict(self) -> dict[str, Tensor]:
        """Returns which agents are born in the running episodes."""
        return {f"{name}/born": x for name, x in self._before.items()}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Restores saved births."""
        keys = {name: f"{name}/born" for name in self.groups}
        self._before = {name: state[key] for name, key in keys.items() if key in state}


def begun(
    groups: Mapping[str, GroupSpec], step: TensorDictBase, before: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """Returns which agents are born in a first episode, ``[*B, N]`` by group; see :class:`Births`.

    Args:
        groups (mapping of name to GroupSpec): the groups.
        step (TensorDictBase): ``[*B]``.
        before (mapping): the same of the step before; empty at the episode's begin.
    """
    acting = {name: step.get(group.mask_key) for name, group in _waiting(groups).items()}
    return {name: acts | before[name] if before else acts for name, acts in acting.items()}


def _waiting(groups: Mapping[str, GroupSpec]) -> dict[str, GroupSpec]:
    """Returns the groups whose agents may be born late."""
    return {n: g for n, g in groups.items() if g.mask_key is not None and not g.in_turns}


def _born(acts: Tensor, done: Tensor, before: Tensor) -> tuple[Tensor, Tensor]:
    """Returns births in each step ``[*B, T, N]``, and in the running episode ``[*B, N]``.

    Args:
        acts (Tensor): who acts, ``[*B, T, N]``.
        done (Tensor): whether the episode ends in the step, ``[*B, T, 1]``.
        before (Tensor): who was born when the batch began, ``[*B, N]``.
    """
    steps = torch.arange(acts.shape[-2], device=acts.device).unsqueeze(-1)
    last_own = torch.where(acts, steps, -1).cummax(-2).values
    last_end = torch.where(done, steps, -1).cummax(-2).values
    first = torch.full_like(last_end[..., :1, :], -1)
    ended_before = torch.cat([first, last_end[..., :-1, :]], -2)
    born = (last_own > ended_before) | ((ended_before < 0) & before.unsqueeze(-2))
    return born, born[..., -1, :] & ~done[..., -1, :]
