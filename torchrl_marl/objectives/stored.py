"""What stored steps earn: settled before they are stored, so that steps can be added up.

Shapes: B any batch dims, E envs, T time, N agents.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from tensordict import NestedKey, TensorDictBase
from torch import Tensor

from torchrl_marl.objectives.flags import (
    TEAM_REWARD,
    alive_in,
    of_agents,
    share,
    team_mean,
    team_reward,
    with_flags,
)
from torchrl_marl.objectives.masking import who_learns
from torchrl_marl.per_group import PerGroup
from torchrl_marl.specs import GroupSpec

__all__ = ["StoredRewards"]


class StoredRewards:
    """The rewards of a loss of stored steps, as part of it.

    Where values are mixed, a step is stored with the team's reward, under
    ``("next", group, "team", "reward")``, else with each agent's; by ``bootstrap="team"`` that of
    the dead is the team's.
    """

    group: GroupSpec
    per_group: PerGroup
    bootstrap: str
    mixed: bool
    tensor_keys: Any
    to_agents: Callable[[Tensor], Tensor]

    def rewards(self, data: TensorDictBase, everyone: Tensor) -> Tensor:
        """Returns each agent's reward, or the team's where values are mixed.

        Shapes:
            - everyone: any ``[*B, N]``; returns ``[*B, N, 1]``
        """
        stored = data.get(self._team_reward_key, None) if self.mixed else None
        if stored is not None:
            return stored
        reward = of_agents(data.get(("next", *_as_tuple(self.tensor_keys.reward))), everyone)
        if not self.mixed:
            return reward
        return team_reward(self.group, data, reward, self.per_group)

    def settle_rewards(self, data: TensorDictBase) -> None:
        """Writes what a step earns by ``bootstrap="team"``, before it is stored.

        Where values are mixed that is the team's reward; else the dead earn it, and the living
        what they earn. Sums over several steps then have each step's own mean.

        Args:
            data (TensorDictBase): ``[E, T]``, the group dense.
        """
        if self.bootstrap != "team" or not self._own_rewards:
            return
        key, flagged = ("next", *self.group.key("reward")), with_flags(self.group, data)
        reward, alive = data.get(key), alive_in(self.group, flagged)
        if self.mixed:
            earned = team_reward(self.group, flagged, reward, self.per_group)
            data.set(self._team_reward_key, earned)
        elif alive is not None:
            sources = who_learns(flagged, self.group, alive)
            data.set(key, share(reward, alive, sources, self.per_group))

    @property
    def stored_keys(self) -> list[NestedKey]:
        """What of a step is stored, once its rewards are settled."""
        keys: list[NestedKey] = self.in_keys  # type: ignore[attr-defined]
        if not self.mixed or not self._own_rewards:
            return keys
        own = ("next", *self.group.key("reward"))
        return [self._team_reward_key if key == own else key for key in keys]

    def add_team_reward(
        self, leaves: dict[tuple[str, ...], Tensor], arrange: Any, restore: Any
    ) -> None:
        """Adds the team's reward to rows that an older version stored, which have each agent's.

        It is then the mean over the agents that acted, or over all where nobody did.

        Args:
            leaves (dict): key -> rows; written to.
            arrange, restore (callable): rows as stored to ``[*B, N, 1]`` of this group, and back.
        """
        own = ("next", *self.group.key("reward"))
        if self._team_reward_key not in self.stored_keys or own not in leaves:
            return
        reward = arrange(leaves.pop(own))
        mask = leaves.get((self.group.name, "mask"))
        acts = torch.ones_like(reward) > 0 if mask is None else arrange(mask.unsqueeze(-1))
        acts = acts.squeeze(-1)
        some = self.to_agents(self.per_group.sum(acts.to(reward.dtype))).squeeze(-1) > 0
        mean = team_mean(reward, acts | ~some, self.per_group)
        leaves[self._team_reward_key] = restore(mean.expand(acts.shape).unsqueeze(-1).contiguous())

    @property
    def _own_rewards(self) -> bool:
        """Whether agents have rewards of their own, and not the team's one."""
        return self.tensor_keys.reward == self.group.key("reward")

    @property
    def _team_reward_key(self) -> tuple[str, ...]:
        return ("next", self.group.name, *TEAM_REWARD)


def _as_tuple(key: NestedKey) -> tuple[str, ...]:
    return (key,) if isinstance(key, str) else tuple(key)
