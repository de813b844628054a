"""A population's members as one group: the agents of all of them side by side.

Members learn the same task, each by itself. Side by side in one dense TensorDict they are trained
as several groups are: in one batched call, of which each has its own part.

Shapes: P members, E envs of a member, N agents of a member.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from tensordict import NestedKey, TensorDict, TensorDictBase
from torch import Tensor

from torchrl_marl.errors import ConfigError
from torchrl_marl.joining import JoinedGroup, can_join, joined_fields
from torchrl_marl.specs import GroupSpec

__all__ = ["PopulationGroup", "fold", "of_members", "unfold"]


def fold(rows: Tensor, n_members: int, dim: int) -> Tensor:
    """Puts the members' envs, one after the other, side by side as agents.

    Args:
        rows (Tensor): of all envs.
        n_members (int): P.
        dim (int): that of the agents.

    Shapes:
        - rows: ``[P * E, *B, N, ...]``; returns ``[E, *B, P * N, ...]``

    Examples:
        >>> import torch
        >>> fold(torch.tensor([[1, 2], [3, 4], [5, 6], [7, 8]]), 2, dim=1)
        tensor([[1, 2, 5, 6],
                [3, 4, 7, 8]])
    """
    return rows.unflatten(0, (n_members, -1)).movedim(0, dim).flatten(dim, dim + 1)


def unfold(rows: Tensor, n_members: int, dim: int) -> Tensor:
    """Puts members that stand side by side into envs of their own: the inverse of :func:`fold`.

    Shapes:
        - rows: ``[E, *B, P * N, ...]``; returns ``[P * E, *B, N, ...]``
    """
    return rows.unflatten(dim, (n_members, -1)).movedim(dim, 0).flatten(0, 1)


@dataclass(frozen=True)
class PopulationGroup(JoinedGroup):
    """The same group, or groups, of several members as one, from :func:`of_members`.

    Args:
        team (JoinedGroup, optional): what one member has.
        n_members (int): number P of members.

    Shapes:
        - a TensorDict of the env: ``[P * E, *B]``, the envs of a member one after the other
        - this group's leaves: ``[E, *B, P * N, ...]``
    """

    team: JoinedGroup | None = None
    n_members: int = 1

    @property
    def sources(self) -> tuple[GroupSpec, ...]:
        """Groups that a TensorDict holds for it."""
        assert self.team is not None
        return self.team.groups

    @property
    def teams(self) -> tuple[int, ...]:
        """Member that each of ``groups`` is of."""
        each = len(self.groups) // self.n_members
        return tuple(i // each for i in range(len(self.groups)))

    def by_source(self, values: Tensor) -> list[tuple[GroupSpec, Tensor]]:
        """Returns the values of each member, ``[P]``, for each of ``sources``."""
        by_member = values.expand(len(self.groups)).unflatten(0, (self.n_members, -1))
        return list(zip(self.sources, by_member.unbind(1)))

    @property
    def team_end_keys(self) -> tuple[NestedKey, NestedKey]:
        """Where it stands whether a member's team is done, and whether it terminated."""
        return self.key("team_done"), self.key("team_terminated")

    def gather(
        self, tensordict: TensorDictBase, *, leaves: Sequence[str] = (), flags: bool = False
    ) -> TensorDict:
        """Returns what networks of all members read, under this group's keys.

        Args:
            tensordict (TensorDictBase): with the groups, dense or lazily stacked.
            leaves, flags: of :meth:`JoinedGroup.gather`; with flags, those of a member's team too.

        Shapes:
            - tensordict: ``[P * E, *B]``; returns ``[E, *B]``
        """
        assert self.team is not None
        dim = tensordict.ndim
        own = self.team.gather(tensordict, leaves=leaves, flags=flags).get(self.name)
        source = {name: fold(rows, self.n_members, dim) for name, rows in own.items()}
        if flags:
            for name in ("done", "terminated"):
                rows = tensordict.get(name).unsqueeze(dim)
                rows = rows.expand(*tensordict.shape, self.team.n_agents, 1)
                source[f"team_{name}"] = fold(rows, self.n_members, dim)
        first, *others = tensordict.shape
        batch, device = [first // self.n_members, *others], tensordict.device
        joined = TensorDict(source, [*batch, self.n_agents], device=device)
        return TensorDict({self.name: joined}, batch, device=device)

    def split(self, rows: Tensor, dim: int) -> Sequence[Tensor]:
        """Returns the rows of each of ``sources``, ``[P * E, *B, N, ...]``."""
        assert self.team is not None
        return self.team.split(unfold(rows, self.n_members, dim), dim)


def of_members(team: GroupSpec, n_members: int, *, same_actions: bool = True) -> PopulationGroup:
    """Returns a group, or several as one, of each of several members, as one group.

    Args:
        team (GroupSpec): what a member has.
        n_members (int): how many members.
        same_actions (bool): as in :func:`~torchrl_marl.joining.join`.

    Raises:
        ConfigError: a group of which several cannot stand side by side.

    Examples:
        >>> from torchrl.data import Bounded, Unbounded
        >>> from torchrl_marl import AgentSpec, TeamSpec
        >>> team = TeamSpec([AgentSpec("car", 3, Unbounded((4,)), Bounded(-1, 1, (2,)))])
        >>> group = of_members(team.groups["car"], 2)
        >>> group.name, group.n_agents, [own.name for own in group.groups]
        ('car', 6, ['car of member 0', 'car of member 1'])
    """
    for group in team.groups:
        if same_actions and not can_join(group, group):
            raise ConfigError(
                f"group {group.name!r}: a population's members stand side by side, which needs "
                "rewards of each agent and actions that are numbers or choices; use "
                "population.size=1."
            )
    if not isinstance(team, JoinedGroup):
        team = JoinedGroup(**joined_fields(team.name, [team], same_actions=same_actions))
    members = [
        replace(group, name=f"{group.name} of member {i}")
        for i in range(n_members)
        for group in team.groups
    ]
    fields = joined_fields(team.name, members, same_actions=same_actions)
    return PopulationGroup(**fields, team=team, n_members=n_members)
