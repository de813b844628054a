"""Life cycle of the agents in one copy's running episode: births, turns and ends."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from torchrl_marl.errors import SpecError

__all__ = ["LifeCycle", "flag_of", "refuse_strangers"]

_FLAGS = ("terminations", "truncations")


@dataclass
class LifeCycle:
    """Life cycle of the agents of one copy; lists are in the order of ``agents``.

    Args:
        agents (sequence): ids.
        came (list of bool): appeared.
        acts (list of bool): acts in the next step.
        terminated, truncated (list of bool): how an agent ended.
        left (list of bool): ended in an earlier step.
        gone (list of bool): ended, and the environment has it no more.
        born (list of bool): has acted, or does next.
        earns (list of bool): is paid for the next step: born, and has not ended.
        all_act (bool): all agents do.

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

    @classmethod
    def of(cls, agents: Sequence[Any]) -> LifeCycle:
        """Builds the life cycle before an episode."""
        came, acts, dead, cut, left, gone, born, earns = ([False] * len(agents) for _ in range(8))
        return cls(agents, came, acts, dead, cut, left, gone, born, earns)

    def advance(
        self,
        present: Collection[Any],
        terminated: Mapping,
        truncated: Mapping,
        cut_off: bool = False,
    ) -> tuple[bool, bool]:
        """Notes which agents came and which ended in a step.

        Args:
            present (collection): ids of those that the environment still has.
            terminated, truncated (mapping): what it says of each.
            cut_off (bool): its own time limit is reached, so both at once is a truncation.

        Returns:
            tuple of bool: whether anything changed, and whether anyone lives.

        Raises:
            SpecError: an agent came back, or is gone without a flag; a flag that is none.
        """
        changed = alive = False
        for i, agent in enumerate(self.agents):
            here = agent in present
            if self.terminated[i] or self.truncated[i]:
                self.left[i] = True
                self._stay_away(i, here)
                continue
            dead = flag_of(agent, "terminated", terminated.get(agent))
            cut = flag_of(agent, "truncated", truncated.get(agent))
            if not self.came[i]:
                if not (here or dead or cut):
                    continue
                self.came[i] = changed = True
            if here and not (dead or cut):
                alive = True
                continue
            if not (dead or cut):
                raise SpecError(
                    f"agent {agent!r} is gone from the environment's agents, but was neither "
                    "terminated nor truncated; let the environment tell one of the two in the step "
                    "in which an agent goes."
                )
            self.truncated[i] = cut and (cut_off or not dead)
            self.terminated[i] = not self.truncated[i]
            self.gone[i], changed = not here, True
        return changed, alive

    def _stay_away(self, i: int, here: bool) -> None:
        if here and self.gone[i]:
            raise SpecError(
                f"agent {self.agents[i]!r} ended and is there again; PettingZoo lets no agent come "
                "back: give it a new id, or end the episode."
            )
        self.gone[i] = not here

    def choose(self, acting: Collection[Any], in_turns: bool = False) -> bool:
        """Notes which living agents act next; returns whether that changed.

        Args:
            acting (collection): ids of those whom the environment lets act.
            in_turns (bool): who has come is born, and waits for its first turn.
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
        """Ends all agents at the end of the episode; returns whether it was terminated."""
        lived = [came and not left for came, left in zip(self.came, self.left)]
        terminated = all(dead for dead, came in zip(self.terminated, self.came) if came)
        for i, done in enumerate(map(any, zip(self.terminated, self.truncated))):
            if not done:
                (self.terminated if terminated else self.truncated)[i] = True
        # Agents that are cut off are bootstrapped, those that waited included.
        self.acts = [alive and not dead for alive, dead in zip(lived, self.terminated)]
        return terminated


def flag_of(agent: Any, name: str, value: Any) -> bool:
    """Returns a flag of an agent's end; None counts as False.

    Raises:
        SpecError: neither a bool nor a number that is 0 or 1; the text ``"False"`` would be True.
    """
    if value is True or value is False or value is None:
        return bool(value)
    number = np.asarray(value)
    if number.size == 1 and number.dtype.kind in "biuf" and number.item() in (0, 1):
        return bool(number.item())
    raise SpecError(
        f"agent {agent!r} is said to be {name}: {value!r} ({type(value).__name__}), expected True "
        "or False; correct the environment."
    )


def refuse_strangers(known: Collection[Any], named: Mapping[str, Collection[Any]]) -> None:
    """Refuses data of agents that the environment did not announce.

    Args:
        known (collection): ids of all agents.
        named (mapping): what the data are -> ids of their agents.

    Raises:
        SpecError: naming the first of them.
    """
    for what, agents in named.items():
        for agent in agents:
            if agent in known or (agent == "__all__" and what in _FLAGS):
                continue
            raise SpecError(
                f"agent {agent!r} is among its {what}, but it is none of the environment's agents "
                f"({', '.join(map(repr, known))}); list all that may ever appear in "
                "possible_agents, and let an agent keep its name."
            )
