"""Rows of a PettingZoo environment's agents, and views of them; without torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from torchrl_marl.errors import SpecError

__all__ = [
    "AgentSlot",
    "AgentSpaces",
    "Leaf",
    "PartViews",
    "Row",
    "action_readers",
    "field_of",
    "part_of",
    "spaces_of",
]


@dataclass(frozen=True)
class AgentSpaces:
    """Observation and action spaces of one agent, as the environment declares them.

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

    def kind(self) -> tuple[Any, Any, str | None]:
        """Returns what agents of one kind have in common."""
        return self.observation, self.action, self.masked


@dataclass(frozen=True)
class Leaf:
    """Part of an agent's observation: its path in the dict, field and start."""

    path: tuple[str, ...]
    field: str
    start: int | tuple[int, ...] = 0


@dataclass(frozen=True)
class AgentSlot:
    """Places of one agent in the rows.

    Args:
        spaces (AgentSpaces): of the agent.
        group (str): its group.
        index (int): its place in the group.
        leaves (tuple of Leaf): of its observation.
        fields (dict): ``"observation"``, ``"action"`` or ``"action_mask"`` -> its field.
        places (dict): the same -> its place there: in its kind where kinds differ in shape, else
            in the group.
    """

    spaces: AgentSpaces
    group: str
    index: int
    leaves: tuple[Leaf, ...]
    fields: Mapping[str, str]
    places: Mapping[str, int]


def spaces_of(env: Any, agent: Any, infos: Mapping[Any, Any]) -> AgentSpaces:
    """Returns the spaces of an agent of an environment.

    Args:
        environment: the environment.
        agent: the agent's id.
        infos (mapping): of the environment at an episode's start.
    """
    observation, action = env.observation_space(agent), env.action_space(agent)
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


Row = dict[str, np.ndarray]


class PartViews:
    """Views of one part of a row, ``after`` or ``begun``.

    Args:
        row (dict): of one copy.
        part (str): the part.
        slots (sequence of AgentSlot): of all agents.
    """

    def __init__(self, row: Row, part: str, slots: Sequence[AgentSlot]) -> None:
        head = f"{part}/"
        own = {key.removeprefix(head): x for key, x in row.items() if key.startswith(head)}
        self.fields = own
        self.root, self.ended = own["root"], row["ended"]
        self.flags = {slot.group: own[f"{slot.group}//flags"] for slot in slots}
        self.masks = {slot.group: own[f"{slot.group}//mask"] for slot in slots}
        self.all_flags = [self.root, *self.flags.values(), *self.masks.values()]
        flags = {id(x) for x in self.all_flags}
        self.data = [x for key, x in own.items() if id(x) not in flags and "//reward" not in key]
        self.leaves = [
            [
                (leaf.path, leaf.start, own[leaf.field][slot.places["observation"]])
                for leaf in slot.leaves
            ]
            for slot in slots
        ]
        # Observations of a single array, the most common, have a faster path.
        self.plain = [
            view if len(leaves) == 1 and not path and not start else None
            for leaves in self.leaves
            for path, start, view in leaves[:1]
        ]
        self.action_masks = [
            own[slot.fields["action_mask"]][slot.places["action_mask"]]
            if slot.spaces.masked
            else None
            for slot in slots
        ]
        # Only a step's result has rewards.
        earners = slots if part == "after" else ()
        self.rewards = [own[f"{slot.group}//reward"][slot.index] for slot in earners]
        self.infos = {
            group: {
                key.removeprefix(f"{group}//info/"): x
                for key, x in own.items()
                if key.startswith(f"{group}//info/")
            }
            for group in self.masks
        }

    def see(self, i: int, agent: Any, observation: Any) -> None:
        """Writes an agent's observation.

        Raises:
            SpecError: not what its space says.
        """
        plain = self.plain[i]
        if (
            plain is not None
            and getattr(observation, "shape", None) == plain.shape
            and (observation.dtype == plain.dtype or plain.dtype.kind == "f")
        ):
            plain[...] = observation
            return
        for path, start, view in self.leaves[i]:
            value = observation
            for key in path:
                value = part_of(value, key, agent)
            write(view, value, f"the observation{list(path) or ''} of agent {agent!r}", start)

    def see_nothing(self, i: int) -> None:
        """Writes zeros for agents without an observation."""
        for _, _, view in self.leaves[i]:
            view[...] = 0


def part_of(observation: Any, key: str, agent: Any) -> Any:
    """Returns the value of a Dict observation under a key.

    Raises:
        SpecError: it has no such key.
    """
    try:
        return observation[key]
    except (LookupError, TypeError) as error:
        keys = getattr(observation, "keys", None)
        found = f"only {', '.join(map(repr, keys()))}" if keys else type(observation).__name__
        raise SpecError(
            f"the observation of agent {agent!r} has no {key!r} ({found}), which its space "
            "declares; correct the environment."
        ) from error


def write(view: np.ndarray, value: Any, what: str, start: int | tuple[int, ...] = 0) -> None:
    """Writes a value at its place.

    Raises:
        SpecError: another shape, no numbers, or numbers that its space's dtype does not hold.
    """
    if not isinstance(value, np.ndarray):
        value = np.asarray(value)
    if value.shape != view.shape:
        if view.ndim != 1 or value.size != view.size:
            raise SpecError(
                f"{what} has shape {list(value.shape)}, expected {list(view.shape)} as its space "
                "says; correct the environment's space."
            )
        value = value.reshape(-1)
    try:
        value = value - start if start else value
        with np.errstate(invalid="ignore"):
            view[...] = value
    except (TypeError, ValueError) as error:
        raise SpecError(f"{what} is {value.dtype}, expected numbers ({error}).") from error
    if view.dtype.kind in "iu" and value.dtype != view.dtype and (bad := view != value).any():
        raise SpecError(
            f"{what} has a {value[bad].flat[0]} of {value.dtype}, expected {view.dtype} as its "
            "space says; correct the environment's space."
        )


def action_readers(row: Row, slots: Sequence[AgentSlot]) -> list[Callable[[], Any]]:
    """Returns readers of each agent's action, in the form that the environment takes."""
    return [
        _reader(row[slot.fields["action"]], slot.places["action"], slot.spaces.action)
        for slot in slots
    ]


def _reader(rows: np.ndarray, place: int, space: Any) -> Callable[[], Any]:
    kind = type(space).__name__
    if kind == "Discrete":
        start = int(getattr(space, "start", 0))
        item = rows.item
        return lambda: item(place) + start
    row = rows[place]
    shape, dtype = space.shape, space.dtype
    if kind == "Box" and (shape, dtype) == (row.shape, row.dtype):
        return row.copy
    first = getattr(space, "start", None)
    if kind == "MultiDiscrete" and first is not None:
        return lambda: row.reshape(shape).astype(dtype) + first
    return lambda: row.reshape(shape).astype(dtype)


def number(infos: Mapping[str, Any] | None, key: str) -> float:
    """Returns a number of an agent's info, 0 where there is none."""
    try:
        return float((infos or {}).get(key, 0))
    except (TypeError, ValueError):
        return 0.0
