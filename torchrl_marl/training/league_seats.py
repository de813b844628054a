"""Seats of a league: what one player controls, and in which envs which seat learns."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torchrl_marl.errors import ConfigError, nearest, quoted
from torchrl_marl.specs import TeamSpec

__all__ = ["envs_of_seats", "find_seats"]

Seat = dict[str, list[int]]
"""Group -> the numbers of its agents."""


def find_seats(team: TeamSpec, given: Mapping[str, Any], *, against: bool) -> dict[str, Seat]:
    """Returns the seats of a team by name.

    Args:
        team (TeamSpec): the groups.
        given (mapping): seat -> a group or an agent, or a list of them; where it is empty, each
            group is a seat, or each agent of the only group.
        against (bool): whether seats are opponents, of which each is whole groups.

    Raises:
        ConfigError: opponents in a world of one team, a seat of what is not there, agents in two
            seats or in none.

    Examples:
        >>> from torchrl_marl.envs.toy import MatchingLevers
        >>> team = TeamSpec.from_env(MatchingLevers(2))
        >>> find_seats(team, {}, against=False)
        {'agent_0': {'agents': [0]}, 'agent_1': {'agents': [1]}}
    """
    parts: dict[str, tuple[str, list[int]]] = {}
    for name, group in team.groups.items():
        parts[name] = name, list(range(group.n_agents))
    if against and len(parts) == 1:
        raise ConfigError(
            f"league.opponents is given, but the world has one team, {quoted(next(iter(parts)))}; "
            "use league.partners, or give each side a group of its own (env.group_map)."
        )
    groups = list(parts)
    if not against:
        for name, group in team.groups.items():
            for i, agent in enumerate(group.agent_names):
                parts.setdefault(agent, (name, [i]))
    if not given:
        names = groups if len(groups) > 1 else list(team.groups[groups[0]].agent_names)
        given = {name: [name] for name in names}
    seats = {name: _seat(name, members, parts) for name, members in given.items()}
    _check(team, seats)
    return seats


def _seat(name: str, members: Any, parts: Mapping[str, tuple[str, list[int]]]) -> Seat:
    found: Seat = {}
    for member in [members] if isinstance(members, str) else members:
        if member not in parts:
            raise ConfigError(
                f"league.seats.{name} has {quoted(member)}; {nearest(str(member), parts)}expected "
                f"some of {', '.join(parts)}."
            )
        group, agents = parts[member]
        found.setdefault(group, []).extend(agents)
    return found


def _check(team: TeamSpec, seats: Mapping[str, Seat]) -> None:
    if len(seats) < 2:
        raise ConfigError(
            f"a league has {len(seats)} seat, {', '.join(seats)}, expected two or more; there is "
            "nobody to play with."
        )
    for name, group in team.groups.items():
        taken = [agent for seat in seats.values() for agent in seat.get(name, ())]
        for i, agent in enumerate(group.agent_names):
            if taken.count(i) != 1:
                raise ConfigError(
                    f"agent {agent!r} of group {name!r} is in {taken.count(i)} seats of "
                    "league.seats, expected each agent in one."
                )


def envs_of_seats(num_envs: int, n_seats: int, self_play: float) -> list[int]:
    """Returns in how many envs all seats learn, and then each of them.

    Args:
        num_envs (int): all.
        n_seats (int): how many seats.
        self_play (float): share of the first.

    Raises:
        ConfigError: too few envs for one of each seat.

    Examples:
        >>> envs_of_seats(64, 2, 0.5), envs_of_seats(10, 3, 0.0)
        ([32, 16, 16], [0, 4, 3, 3])
    """
    others = num_envs - round(self_play * num_envs)
    if self_play > 0:
        others -= others % n_seats
    if others < n_seats:
        raise ConfigError(
            f"league.self_play is {self_play:g} of {num_envs} envs, which leaves {others} to "
            f"{n_seats} seats, expected one or more for each; raise env.num_envs."
        )
    share, more = divmod(others, n_seats)
    counts: Sequence[int] = [share + (i < more) for i in range(n_seats)]
    return [num_envs - others, *counts]
