"""Copy of a world whose agents move one after another."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from torchrl_marl.envs.pettingzoo.lives import flag_of, refuse_strangers
from torchrl_marl.envs.pettingzoo.one_copy import Given, OneCopy
from torchrl_marl.errors import SpecError

__all__ = ["TurnCopy"]


class TurnCopy(OneCopy):
    """Copy of an AEC world: a step is one agent's move.

    An agent's rewards are those that the world adds up for it until its next turn, given in the
    step in which each was earned.
    """

    in_turns = True

    def _reset(self, seed: int | None) -> tuple[dict, dict]:
        self.world.reset(seed=seed)
        seen: dict[Any, Any] = {}
        self._see(seen, self.world.agents)
        return seen, self.world.infos

    def _move(self) -> Given:
        world = self.world
        mover = world.agent_selection
        self._ledger()[mover] = 0  # worlds reset it themselves, but some wrappers do not
        known, before = dict(self._ledger()), list(world.agents)
        world.step(self._actions[self.agents.index(mover)]())
        seen: dict[Any, Any] = {}
        earned: dict[Any, float] = {}
        terminated: dict[Any, bool] = {}
        truncated: dict[Any, bool] = {}
        infos = dict(world.infos)
        for _ in range(2 * len(self.agents) + 1):
            self._earn(known, earned)
            ended = self._ends(before, terminated, truncated)
            self._see(seen, ended)
            if not world.agents or world.agent_selection not in ended:
                break
            world.step(None)
        else:
            raise SpecError(
                f"agent {world.agent_selection!r} ended and is selected again "
                "after each step(None); the world has to take it out of its agents."
            )
        infos.update(world.infos)
        self._see(seen, world.agents)
        return seen, earned, terminated, truncated, infos

    def _acting(self, seen: Mapping[Any, Any]) -> Collection[Any]:
        mover = self.world.agent_selection
        if not self.world.agents:
            return ()
        if mover not in self.agents:
            refuse_strangers(self.agents, {"movers (agent_selection)": [mover]})
        return (mover,)

    def _ledger(self) -> dict:
        """Returns the rewards that each agent has not yet received."""
        return self.world._cumulative_rewards

    def _earn(self, known: dict, earned: dict) -> None:
        """Adds the growth of the world's reward ledger to the rewards."""
        for agent, total in self._ledger().items():
            earned[agent] = earned.get(agent, 0.0) + total - known.get(agent, 0)
            known[agent] = total

    def _ends(self, before: list[Any], terminated: dict, truncated: dict) -> list[Any]:
        """Notes ends, also of former agents; returns ended agents that the world still has."""
        world = self.world
        for agent in dict.fromkeys((*before, *world.agents)):
            dead = flag_of(agent, "terminated", world.terminations.get(agent))
            cut = flag_of(agent, "truncated", world.truncations.get(agent))
            terminated[agent] = terminated.get(agent, False) or dead
            truncated[agent] = truncated.get(agent, False) or cut
        return [agent for agent in world.agents if terminated[agent] or truncated[agent]]

    def _see(self, seen: dict, agents: Collection[Any]) -> None:
        """Reads the agents' observations, also while they wait, where the world has them."""
        for agent in agents:
            try:
                seen[agent] = self.world.observe(agent)
            except Exception:
                if agent == self.world.agent_selection:
                    raise
