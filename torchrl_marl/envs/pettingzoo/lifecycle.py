"""Life cycle of the agents in the running episode of one copy: births, turns and ends."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from torchrl_marl.errors import SpecError

__all__ = ["LifeCycle", "check_agents", "flag_of"]

_FLAGS = ("terminations", "truncations")


@dataclass
class LifeCycle:
    """Life cycle of the agents of one copy. Each list has one entry per agent.

    Args:
        agents (sequence): ids of the agents.
        came (list of bool): True if the agent has appeared.
        acts (list of bool): True if the agent acts in the next step.
        terminated, truncated (list of bool): done flags of the agents.
        left (list of bool): True if the agent ended in an earlier step.
        gone (list of bool): True if the agent ended and was removed from the environment's agents.
        born (list of bool): True if the agent has acted, or acts next.
        earns (list of bool): True if the agent receives the reward of the next step, because it is
            born and has not ended.
        all_act (bool): True if all agents act in the next step.
        respawns (bool): True if agents that were removed may appear again, for a new life.

    Examples:
        >>> life = LifeCycle.of(["a", "b"])
        >>> life.advance(["a", "b"], {}, {})
        (True, True)
        >>> life.advance(["a"], {"b": True}, {})
        (True, True)
        >>> life.choose(["a"]), life.acts
        (True, [True, False])
    """

    agents: Sequence[Any]
    came: list[bool]
    acts: list[bool]
    terminated: list[bool]
    truncated: list[bool]
    left: list[bool]
    gone: list[bool]
    born: list[bool]
    earns: list[bool]
    all_act: bool = False
    respawns: bool = False

    @classmethod
    def of(cls, agents: Sequence[Any], respawns: bool = False) -> LifeCycle:
        """Returns the life cycle at the start of an episode."""
        came, acts, dead, cut, left, gone, born, earns = ([False] * len(agents) for _ in range(8))
        return cls(agents, came, acts, dead, cut, left, gone, born, earns, respawns=respawns)

    def advance(
        self,
        present: Collection[Any],
        terminated: Mapping,
        truncated: Mapping,
        cut_off: bool = False,
    ) -> tuple[bool, bool]:
        """Records which agents appeared in a step, and which ended.

        Args:
            present (collection): ids of the environment's current agents.
            terminated, truncated (mapping): the environment's flags by agent.
            cut_off (bool): True if the environment's time limit is reached; an agent with both
                flags is then truncated.

        Returns:
            tuple of bool: True if anything changed, and True if any agent is alive.

        Raises:
            SpecError: if an agent came back, disappeared without a flag, or has an invalid flag.
        """
        changed = alive = False
        for i, agent in enumerate(self.agents):
            is_present = agent in present
            if self.terminated[i] or self.truncated[i]:
                if not self._revive_if_present(i, is_present):
                    self.left[i], self.gone[i] = True, not is_present
                    continue
                changed = True
            is_terminated = flag_of(agent, "terminated", terminated.get(agent))
            is_truncated = flag_of(agent, "truncated", truncated.get(agent))
            if not self.came[i]:
                if not (is_present or is_terminated or is_truncated):
                    continue
                self.came[i] = changed = True
            if is_present and not (is_terminated or is_truncated):
                alive = True
                continue
            if not (is_terminated or is_truncated):
                raise SpecError(
                    f"agent {agent!r} is gone from the environment's agents, but was neither "
                    "terminated nor truncated; let the environment set one of the two in the step "
                    "that removes an agent."
                )
            self.truncated[i] = is_truncated and (cut_off or not is_terminated)
            self.terminated[i] = not self.truncated[i]
            self.gone[i], changed = not is_present, True
        return changed, alive

    def _revive_if_present(self, i: int, is_present: bool) -> bool:
        """Returns whether an agent that was removed is present again; then begins its new life."""
        if not (is_present and self.gone[i]):
            return False
        if not self.respawns:
            raise SpecError(
                f"agent {self.agents[i]!r} ended and is present again, which PettingZoo does not "
                "allow; set env.kwargs.respawns=true if agents of this environment come back, "
                "give it a new id, or end the episode."
            )
        self.terminated[i] = self.truncated[i] = self.left[i] = self.gone[i] = False
        return True

    def choose(self, acting: Collection[Any], in_turns: bool = False) -> bool:
        """Records which living agents act next; returns True if these agents changed.

        Args:
            acting (collection): ids of the agents that may act.
            in_turns (bool): True if agents are born when they appear, before their first turn.
        """
        acts = [
            came and not (dead or cut) and agent in acting
            for agent, came, dead, cut in zip(
                self.agents, self.came, self.terminated, self.truncated
            )
        ]
        changed, self.acts, self.all_act = acts != self.acts, acts, all(acts)
        self.born = list(self.came) if in_turns else list(map(any, zip(self.born, acts)))
        self.earns = [
            born and not (dead or cut)
            for born, dead, cut in zip(self.born, self.terminated, self.truncated)
        ]
        return changed

    def close(self) -> bool:
        """Ends all agents at the end of the episode; returns True if all were terminated."""
        alive_before = [came and not left for came, left in zip(self.came, self.left)]
        terminated = all(dead for dead, came in zip(self.terminated, self.came) if came)
        for i, done in enumerate(map(any, zip(self.terminated, self.truncated))):
            if not done:
                (self.terminated if terminated else self.truncated)[i] = True
        # The returns of truncated agents are bootstrapped, also if an agent was waiting.
        self.acts = [alive and not dead for alive, dead in zip(alive_before, self.terminated)]
        return terminated


def flag_of(agent: Any, name: str, value: Any) -> bool:
    """Returns an agent's terminated or truncated flag as a bool; None counts as False.

    Raises:
        SpecError: if the flag is neither a bool nor 0 or 1, such as the text ``"False"``.
    """
    if value is True or value is False or value is None:
        return bool(value)
    number = np.asarray(value)
    if number.size == 1 and number.dtype.kind in "biuf" and number.item() in (0, 1):
        return bool(number.item())
    raise SpecError(
        f"the {name} flag of agent {agent!r} is {value!r} ({type(value).__name__}), expected "
        "True or False; correct the environment."
    )


def check_agents(known: Collection[Any], named: Mapping[str, Collection[Any]]) -> None:
    """Raises an error if the data of a step contain an undeclared agent.

    Args:
        known (collection): ids of all declared agents.
        named (mapping): name of the data -> ids of the agents in these data.

    Raises:
        SpecError: if an agent is undeclared; the message names the first one.
    """
    for data, agents in named.items():
        for agent in agents:
            if agent in known or (agent == "__all__" and data in _FLAGS):
                continue
            raise SpecError(
                f"agent {agent!r} is among the {data}, but not among the environment's agents "
                f"({', '.join(map(repr, known))}); list all agents that may ever appear in "
                "possible_agents, and do not rename them."
            )
