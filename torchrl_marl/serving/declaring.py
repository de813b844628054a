"""What a run's agents are in the words of the protocol, so that any client may declare them."""

from __future__ import annotations

from torchrl_marl.envs.external.declaration import Declared, DeclaredKind
from torchrl_marl.errors import ConfigError
from torchrl_marl.specs import GroupSpec, TeamSpec

__all__ = ["declared_of"]


def declared_of(team: TeamSpec) -> Declared:
    """Returns a team's declaration: a group is a kind, its agents are ``<group>_0``, ...

    Agents of one group that see or do different numbers of things are declared as the largest:
    what a client sends beyond an agent's own is not read, and illegal actions are never chosen.
    Bounds are the widest of the group's; actions without bounds are declared as those from -1 to 1.
    What only critics see is left out.

    Args:
        team (TeamSpec): of the world that the run was trained in.

    Raises:
        ConfigError: agents that see several things or pictures, or do several things at once.

    Examples:
        >>> from torchrl.data import Bounded, Unbounded
        >>> from torchrl_marl import AgentSpec
        >>> team = TeamSpec([AgentSpec("car", 2, Unbounded((4,)), Bounded(-2, 2, (1,)))])
        >>> declared_of(team).settings()["agents"]
        {'car': {'n': 2, 'observation': 4, 'action': {'size': 1, 'low': [-2.0], 'high': [2.0]}}}
    """
    return Declared({name: _kind(name, group) for name, group in team.groups.items()})


def _kind(name: str, group: GroupSpec) -> DeclaredKind:
    if len(group.observation_keys) > 1 or group.observation_ndims != (1,):
        shapes = ", ".join(str(shape[1:]) for shape in group.observation_shapes)
        raise ConfigError(
            f"agents {name!r} see arrays of shape {shapes}, expected one row of numbers, which is "
            "all that the protocol has words for; export the run instead: torchrl-marl export."
        )
    n, seen = group.n_agents, group.observation_dim
    if group.discrete:
        masked = group.action_mask_key is not None
        return DeclaredKind(n, seen, n_actions=group.n_actions, mask=masked)
    size = group.action_dim
    low, high = (-1.0,) * size, (1.0,) * size
    if group.action_bounds is not None:
        low, high = (
            tuple(bound.tolist())
            for bound in (group.action_bounds[0].amin(0), group.action_bounds[1].amax(0))
        )
    return DeclaredKind(n, seen, low=low, high=high)
