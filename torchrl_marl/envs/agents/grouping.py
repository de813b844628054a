"""Groups of agents: by the prefix of their ids, or from a given map."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from torchrl.envs.utils import MarlGroupMapType

from torchrl_marl.errors import ConfigError, nearest

__all__ = ["grouped"]


def grouped(
    agents: Sequence[Any], group_map: MarlGroupMapType | Mapping[str, Sequence[Any]] | None
) -> dict[str, list[Any]]:
    """Returns the agent ids of each group.

    Args:
        agents (sequence): ids of all agents of a world.
        group_map (MarlGroupMapType or mapping, optional): None groups ``bob_0`` and ``bob_1``
            as ``bob``, and an id without a number alone.

    Raises:
        ConfigError: an agent without a group or in two, or an id that the world does not have.

    Examples:
        >>> grouped(["speaker_0", "rover_0", "rover_1"], None)
        {'speaker': ['speaker_0'], 'rover': ['rover_0', 'rover_1']}
    """
    groups: dict[str, list[Any]] = {}
    if isinstance(group_map, MarlGroupMapType):
        group_map = group_map.get_group_map([str(agent) for agent in agents])
    if not group_map:
        for agent in agents:
            prefix = re.sub(r"[_-]?\d+$", "", str(agent)) or "agents"
            groups.setdefault(prefix, []).append(agent)
        return groups
    ids = {str(agent): agent for agent in agents}
    seen: dict[str, str] = {}
    for group, names in group_map.items():
        for name in map(str, names):
            if name not in ids:
                raise ConfigError(
                    f"group_map: {name!r} of group {group!r} is no agent of the world; "
                    f"{nearest(name, ids)}it has {list(ids)}."
                )
            if name in seen:
                twice = f"is in {seen[name]!r} and {group!r}, expected one group"
                if seen[name] == group:
                    twice = f"twice in {group!r}, expected once"
                raise ConfigError(f"group_map: {name!r} {twice}.")
            seen[name] = group
            groups.setdefault(group, []).append(ids[name])
    for name in ids.keys() - seen.keys():
        raise ConfigError(
            f"group_map: agent {name!r} has no group, expected one for each of {list(ids)}; "
            "add it to a group."
        )
    return groups
