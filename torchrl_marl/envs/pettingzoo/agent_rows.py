"""Positions and views of agents' data in the row of a PettingZoo copy. Imports no torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from torchrl_marl.envs.pettingzoo.parts import has_parts, in_order, parts_of
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
        agent: the agent's id.
        observation (gymnasium.Space): observation space, without the action mask.
        action (gymnasium.Space): action space.
        masked (str, optional): where the action mask is, ``"observation"`` or ``"info"``; None
            without a mask.
        wrapped (bool): True if the observation is a dict that holds the array under the key
            ``"observation"``.
    """

    agent: Any
    observation: Any
    action: Any
    masked: str | None
    wrapped: bool

    def kind(self) -> tuple[Any, Any, str | None]:
        """Returns the spaces and settings that two agents must share to be of one kind."""
        return self.observation, self.action, self.masked


@dataclass(frozen=True)
class Leaf:
    """Leaf of an agent's observation: its path in the dict, and its field in the row.

    ``start`` is the smallest value of a discrete leaf; the row stores this value as 0.
    """

    path: tuple[str, ...]
    field: str
    start: int | tuple[int, ...] = 0


@dataclass(frozen=True)
class AgentSlot:
    """Position of one agent's data in a row, given as fields and indices.

    Args:
        spaces (AgentSpaces): spaces of the agent.
        group (str): name of the agent's group.
        index (int): index of the agent in its group.
        leaves (tuple of Leaf): leaves of the agent's observation.
        fields (dict): ``"observation"``, ``"action"`` or ``"action_mask"`` -> name of the field.
        places (dict): the same keys -> index of the agent in the field. The index counts the
            agents of the kind if shapes differ between kinds, otherwise the agents of the group.
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
        env: the environment.
        agent: the agent's id.
        infos (mapping): the environment's infos after a reset.
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
    """Returns the name of the field for a leaf of a group, or of one of its kinds."""
    return f"{group}/{kind}/{leaf}"


Row = dict[str, np.ndarray]


def _with_prefix(fields: Row, prefix: str) -> Row:
    """Returns the fields whose names start with ``prefix``, without it in their names."""
    return {key.removeprefix(prefix): x for key, x in fields.items() if key.startswith(prefix)}


class PartViews:
    """Views of one part of a copy's row.

    Args:
        row (dict): row of one copy, by field.
        part (str): ``"after"`` for the result of a step, ``"begun"`` for the start of the next
            step.
        slots (sequence of AgentSlot): where each agent's data are stored.
    """

    def __init__(self, row: Row, part: str, slots: Sequence[AgentSlot]) -> None:
        self.fields = fields = _with_prefix(row, f"{part}/")
        self.root, self.ended = fields["root"], row["ended"]
        self.flags = {slot.group: fields[f"{slot.group}//flags"] for slot in slots}
        self.masks = {slot.group: fields[f"{slot.group}//mask"] for slot in slots}
        self.all_flags = [self.root, *self.flags.values(), *self.masks.values()]
        flags = {id(x) for x in self.all_flags}
        self.data = [x for key, x in fields.items() if id(x) not in flags and "//reward" not in key]
        self.leaves = [
            [
                (leaf.path, leaf.start, fields[leaf.field][slot.places["observation"]])
                for leaf in slot.leaves
            ]
            for slot in slots
        ]
        # Most observations are a single array, for which there is a fast path.
        self.plain = [
            view if len(leaves) == 1 and not path and not start else None
            for leaves in self.leaves
            for path, start, view in leaves[:1]
        ]
        self.action_masks = [
            fields[slot.fields["action_mask"]][slot.places["action_mask"]]
            if slot.spaces.masked
            else None
            for slot in slots
        ]
        # Only the result of a step has rewards.
        rewarded_slots = slots if part == "after" else ()
        self.rewards = [fields[f"{slot.group}//reward"][slot.index] for slot in rewarded_slots]
        self.infos = {group: _with_prefix(fields, f"{group}//info/") for group in self.masks}

    def write_observation(self, i: int, agent: Any, observation: Any) -> None:
        """Writes an agent's observation.

        Raises:
            SpecError: if the observation does not fit its space.
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

    def write_no_observation(self, i: int) -> None:
        """Writes zeros as the observation of an agent that has none."""
        for _, _, view in self.leaves[i]:
            view[...] = 0


def part_of(observation: Any, key: str, agent: Any) -> Any:
    """Returns the value of a Dict observation under a key.

    Raises:
        SpecError: if the observation lacks the key.
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
    """Writes a value to a view of a row.

    Raises:
        SpecError: if the value's shape differs, or if the space's dtype cannot hold the values.
    """
    if not isinstance(value, np.ndarray):
        value = np.asarray(value)
    if value.shape != view.shape:
        if view.ndim != 1 or value.size != view.size:
            raise SpecError(
                f"{what} has shape {list(value.shape)}, expected {list(view.shape)} as in its "
                "space; correct the environment's space."
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
            f"{what} has a {value[bad].flat[0]} of {value.dtype}, expected {view.dtype} as in its "
            "space; correct the environment's space."
        )


def action_readers(row: Row, slots: Sequence[AgentSlot]) -> list[Callable[[], Any]]:
    """Returns functions, one per agent, that read an action in the environment's format."""
    return [
        _action_reader(row[slot.fields["action"]], slot.places["action"], slot.spaces.action)
        for slot in slots
    ]


def _parts_reader(row: np.ndarray, space: Any) -> Callable[[], Any]:
    """Returns a function that reads the action of a Tuple or Dict space from an agent's row."""
    readers, start = {}, 0
    for key, part in parts_of(space):
        single = type(part).__name__ == "Discrete"
        end = start + (1 if single else int(np.prod(part.shape)))
        row_part, start = row[start:end], end
        readers[key] = _action_reader(row_part if single else row_part[None], 0, part)
    return lambda: in_order({key: read() for key, read in readers.items()}, space)


def _action_reader(rows: np.ndarray, index: int, space: Any) -> Callable[[], Any]:
    kind = type(space).__name__
    if has_parts(space):
        return _parts_reader(rows[index], space)
    if kind == "Discrete":
        start = int(getattr(space, "start", 0))
        item = rows.item
        return lambda: int(item(index)) + start
    row = rows[index]
    shape, dtype = space.shape, space.dtype
    if kind == "Box" and (shape, dtype) == (row.shape, row.dtype):
        return row.copy
    first = getattr(space, "start", None)
    if kind == "MultiDiscrete" and first is not None:
        return lambda: row.reshape(shape).astype(dtype) + first
    return lambda: row.reshape(shape).astype(dtype)


def number(infos: Mapping[str, Any] | None, key: str) -> float:
    """Returns a number from an agent's info; 0 if the number is missing."""
    try:
        return float((infos or {}).get(key, 0))
    except (TypeError, ValueError):
        return 0.0
