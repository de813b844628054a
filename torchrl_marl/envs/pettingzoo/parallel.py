"""Copy of a world whose agents move at once, or each at its own pace."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from torchrl_marl.envs.pettingzoo.one_copy import Given, OneCopy

__all__ = ["ParallelCopy"]


class ParallelCopy(OneCopy):
    """Copy of a parallel world; agents with an observation act in the next step."""

    def _reset(self, seed: int | None) -> tuple[dict, dict]:
        return self.world.reset(seed=seed)

    def _move(self) -> Given:
        acts = zip(self.agents, self.life.acts, self._actions)
        return self.world.step({agent: action() for agent, does, action in acts if does})

    def _acting(self, seen: Mapping[Any, Any]) -> Collection[Any]:
        return seen
