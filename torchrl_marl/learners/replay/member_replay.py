"""Stored steps of a population: each member reads its own, or all read the same.

Shapes: P members, E envs of a member, S steps that are kept, B rows of a minibatch, U updates,
N agents of a member.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from tensordict import NestedKey, TensorDict
from torch import Tensor

from torchrl_marl.learners.replay.ring import Key
from torchrl_marl.learners.replay.team_replay import TeamReplay

__all__ = ["MemberReplay"]


class MemberReplay(TeamReplay):
    """Ring of the last steps of all members' envs, those of a member one after the other.

    A minibatch has as many rows of each member, the same as it would draw alone, side by side as
    agents; ``shared`` gives all members the same rows, of all envs.

    Args:
        n_steps (int): steps S that are kept of each env.
        num_envs (int): number E of envs of each member.
        keys (sequence of NestedKey): as in :class:`TeamReplay`, of groups that all members have.
        n_members (int): number P of members.
        shared (bool): whether all members read what any of them stored.
        **kwargs: of :class:`TeamReplay`.

    Keys written by :meth:`look`: ``keys`` and, beside each group's, its own ``discount``
    ``[B, P * N, 1]``; ``index``, ``priority_weight``.

    Reduces to: :class:`TeamReplay`, for each member.

    Examples:
        >>> from torchrl_marl.envs import VmasEnv
        >>> env = VmasEnv("balance", num_envs=4, seed=0)  # two of each of two members
        >>> keys = [("agents", "observation"), ("next", "agents", "reward")]
        >>> replay = MemberReplay(1000, 2, keys, n_members=2)
        >>> replay.extend(env.rollout(10, break_when_any_done=False))
        >>> len(replay), replay.look(replay.rows(1, 16)[0], 1, 0.9)["agents", "observation"].shape
        (20, torch.Size([16, 6, 16]))
    """

    def __init__(
        self,
        n_steps: int,
        num_envs: int,
        keys: Sequence[NestedKey],
        *,
        n_members: int,
        shared: bool = False,
        **kwargs: Any,
    ) -> None:
        super().__init__(n_steps, n_members * num_envs, keys, **kwargs)
        self.n_members, self.shared, self.num_envs = n_members, shared, num_envs
        # Of whom a member draws: of its own envs, or of all.
        self.num_own = n_members * num_envs if shared else num_envs

    def __len__(self) -> int:
        return self.ring.n_filled * self.num_own

    @property
    def capacity(self) -> int:
        """Number of rows that are kept for each member to read."""
        return self.ring.n_steps * self.num_own

    @property
    def bytes_per_row(self) -> int:
        """Memory that a row of all members takes; 0 before the first batch."""
        return sum(x.numel() * x.element_size() for x in self.tensors) // self.ring.capacity

    def look(self, rows: Tensor, n_step: int, gamma: float | Tensor) -> TensorDict:
        """Returns a minibatch of all members, as :meth:`TeamReplay.look` does of one.

        Args:
            rows (Tensor): of one update, from :meth:`rows`.
            n_step (int): number of steps.
            gamma (float or Tensor): discount, or that of each member, ``[P]``.

        Shapes:
            - rows, returns: ``[B]``
        """
        index = self._of_members(rows)
        if isinstance(gamma, Tensor):
            gamma = gamma.expand(index.shape).reshape(-1, 1)
        found = super().look(index.flatten(), n_step, gamma)
        leaves = {key: self._side_by_side(found.get(key)) for key in self.keys}
        discount = found.get("discount").unflatten(0, (-1, self.n_members)).unsqueeze(-2)
        for name, group in _sizes(leaves).items():
            own = discount.expand(-1, -1, group // self.n_members, -1)
            leaves[name, "discount"] = own.flatten(1, 2)
        leaves["index",] = rows
        leaves["priority_weight",] = torch.ones_like(rows, dtype=discount.dtype)
        minibatch = TensorDict({}, rows.shape, device=self.ring.device)
        for key, value in leaves.items():
            minibatch.set(key, value)
        return minibatch

    def _side_by_side(self, rows: Tensor) -> Tensor:
        """``[B * P, N, ...]`` to ``[B, P * N, ...]``, without a copy."""
        return rows.unflatten(0, (-1, self.n_members)).flatten(1, 2)

    def _of_members(self, rows: Tensor) -> Tensor:
        """Returns each member's rows, ``[B, P]``, of those that one would draw alone, ``[B]``."""
        if self.shared:
            return rows.unsqueeze(-1).expand(-1, self.n_members)
        step, env = rows // self.num_own, rows % self.num_own
        member = torch.arange(self.n_members, device=rows.device)
        own = env.unsqueeze(-1) + member * self.num_own
        return step.unsqueeze(-1) * self.ring.num_envs + own

    def state_of(self, member: int, keys: Collection[NestedKey]) -> dict[str, Any]:
        """Returns what :class:`TeamReplay` saves, of a member's envs.

        Args:
            member (int): whose.
            keys (collection of NestedKey): what that one stores.
        """
        state, num_envs = self.ring.state_dict(), self.num_envs
        envs = slice(member * num_envs, (member + 1) * num_envs)
        leaves = {}
        for key, value in state["leaves"].items():
            if key[-1].endswith("terminated") and key not in keys:  # the team has it, at the root
                leaves["next", "terminated"] = value[:, envs, 0].clone()
            else:
                leaves[key] = value[:, envs].clone()
        return {**state, "shape": [self.ring.n_steps, num_envs], "leaves": leaves}


def _sizes(leaves: Mapping[Key, Tensor]) -> dict[str, int]:
    """Returns how many agents of all members each group has."""
    return {key[0]: x.shape[1] for key, x in leaves.items() if len(key) > 1 and key[0] != "next"}
