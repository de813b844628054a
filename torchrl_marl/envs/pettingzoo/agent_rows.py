"""Places of each agent's data in the rows of a PettingZoo world.

Shapes: N agents of a group, M agents of a kind.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

__all__ = ["AgentSlot", "AgentSpaces", "Leaf", "field_of", "spaces_of"]


@dataclass(frozen=True)
class AgentSpaces:
    """Observation and action spaces of one agent, as the world declares them.

    Args:
        agent: its id.
        observation (gymnasium.Space): without the action mask.
        action (gymnasium.Space): of its actions.
        masked (str, optional): where its action mask is: ``"observation"`` or ``"info"``.
        wrapped (bool): the observation is found under ``"observation"``.
    """

    agent: Any
    observation: Any
    action: Any
    masked: str | None
    wrapped: bool

    def alike(self, other: AgentSpaces) -> bool:
        """Returns whether two agents have spaces of one kind."""
        own = (self.observation, self.action, self.masked)
        return own == (other.observation, other.action, other.masked)


@dataclass(frozen=True)
class Leaf:
    """Part of an agent's observation: its path in the dict, field, shape and start."""

    path: tuple[str, ...]
    field: str
    shape: tuple[int, ...]
    start: int | tuple[int, ...] = 0


@dataclass(frozen=True)
class AgentSlot:
    """Places of one agent in the rows.

    Args:
        spaces (AgentSpaces): of the agent.
        group (str): its group.
        index (int): its place in the group.
        place (int): its place in the fields of what it sees and does: of its kind where kinds
            differ in shape, else of the group.
        leaves (tuple of Leaf): of its observation.
        action (str): field of its actions.
        action_mask (str, optional): field of its action mask.
        action_place, mask_place (int): its places in these.
    """

    spaces: AgentSpaces
    group: str
    index: int
    place: int
    leaves: tuple[Leaf, ...]
    action: str
    action_place: int
    action_mask: str | None
    mask_place: int


def spaces_of(world: Any, agent: Any, infos: Mapping[Any, Any]) -> AgentSpaces:
    """Returns the spaces of an agent of a world.

    Args:
        world: the world.
        agent: the agent's id.
        infos (mapping): of the world at an episode's start.
    """
    observation, action = world.observation_space(agent), world.action_space(agent)
    masked, wrapped = None, False
    leaves = getattr(observation, "spaces", None)
    if isinstance(leaves, Mapping) and "action_mask" in leaves:
        masked = "observation"
        rest = {key: leaf for key, leaf in leaves.items() if key != "action_mask"}
        wrapped = list(rest) == ["observation"]
        observation = rest["observation"] if wrapped else type(observation)(rest)
    elif "action_mask" in (infos.get(agent) or {}):
        masked = "info"
    return AgentSpaces(agent, observation, action, masked, wrapped)


def field_of(group: str, kind: str, leaf: str) -> str:
    """Returns the name of a field of all agents of a group, or of a kind."""
    return f"{group}/{kind}/{leaf}"
