"""Joins several groups into one group; also joins the groups of a population's members."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import Any

import torch
import torch.nn.functional as F
from tensordict import NestedKey, TensorDict, TensorDictBase
from torch import Tensor
from torchrl.data import Bounded, Composite, TensorSpec, Unbounded

from torchrl_marl.errors import ConfigError
from torchrl_marl.specs import GroupSpec
from torchrl_marl.specs.groups import check_action_mask, check_flags, check_inputs, own_keys

__all__ = [
    "JoinedGroup",
    "PopulationGroup",
    "as_single_group",
    "can_join",
    "fold",
    "join",
    "joined_fields",
    "of_members",
    "unfold",
    "without_member_names",
]

_FLAGS = ("done", "terminated", "truncated")


def can_join(first: GroupSpec, second: GroupSpec) -> bool:
    """Returns True if two groups can be trained by one actor and one loss."""

    def of(group: GroupSpec) -> tuple:
        bounded = not group.discrete and group.action_bounds is not None
        own_reward = group.reward_key == group.key("reward")
        dtype = group.padded_spec["action"].dtype
        # The shapes of other action specs, such as MultiOneHot, cannot be joined.
        known = isinstance(group.padded_spec["action"], (Bounded, Unbounded))
        simple = known or group.discrete or bool(group.branches)
        hybrid = group.own_specs[0]["action"] if group.hybrid else None
        kind = group.discrete, group.one_hot, group.branches, hybrid
        return *kind, bounded, dtype, own_reward, simple

    return of(first) == of(second) and of(first)[-1] and of(first)[-2]


@dataclass(frozen=True)
class JoinedGroup(GroupSpec):
    """Group that concatenates the agents of several groups; :func:`join` builds it.

    Args:
        groups (tuple of GroupSpec): groups to concatenate, in this order.

    Shapes:
        - leaves: ``[*B, N, ...]``, where N is the number of agents in all groups together

    Examples:
        >>> from torchrl_marl import AgentSpec, TeamSpec
        >>> bounded = Bounded(-1, 1, (2,))
        >>> team = TeamSpec([AgentSpec("cat", 1, Unbounded((4,)), bounded),
        ...                  AgentSpec("mouse", 2, Unbounded((3,)), bounded)])
        >>> joined = join(tuple(team.groups.values()))
        >>> living = {1: torch.ones(5, 1).bool(), 2: torch.ones(5, 2).bool()}
        >>> td = TensorDict({"cat": {"observation": torch.ones(5, 1, 4), "mask": living[1]},
        ...                  "mouse": {"observation": torch.ones(5, 2, 3), "mask": living[2]}}, [5])
        >>> joined.gather(td)["cat+mouse", "observation"][0, :, -1]
        tensor([1., 0., 0.])
    """

    groups: tuple[GroupSpec, ...] = ()

    # ------------------------------------------------------------------------- to one group

    def gather(
        self, tensordict: TensorDictBase, *, leaves: Sequence[str] = (), flags: bool = False
    ) -> TensorDict:
        """Returns the inputs of a joined network, under this group's keys.

        Args:
            tensordict (TensorDictBase): data that contain the groups, dense or lazily stacked.
            leaves (sequence of str): leaves to include besides observations and masks: ``action``,
                ``action_log_prob``, ``reward`` or ``state``.
            flags (bool): True to include the agents' done flags.

        Shapes:
            - tensordict and result: ``[*B]``
        """
        batch = tensordict.batch_size
        group_data = [group.data(tensordict) for group in self.groups]
        rows = []
        for group, td in zip(self.groups, group_data):
            seen = [td.get(key[1:]) for key in group.observation_keys]
            check_inputs(group, seen, None if group.mask_key is None else td.get("mask"))
            rows.append(group.flat(seen))
        source = {"observation": _pad_and_concatenate(rows, rows[0].ndim - 2)}
        if self.mask_key is not None:
            masks = [
                _all_true(batch, group, td) if group.mask_key is None else td.get("mask")
                for group, td in zip(self.groups, group_data)
            ]
            source["mask"] = torch.cat(masks, -1)
        if self.action_mask_key is not None:
            source["action_mask"] = self._join_action_masks(group_data, batch)
        for leaf in leaves:
            rows = [
                _flatten_states(group, leaf, td.get(leaf))
                for group, td in zip(self.groups, group_data)
            ]
            source[leaf] = _pad_and_concatenate(rows, len(batch))
        if flags:
            source |= self._join_flags(tensordict, group_data)
        device = tensordict.device
        agents = torch.Size((*batch, self.n_agents))
        joined = TensorDict._new_unsafe(source, batch_size=agents, device=device)
        return TensorDict._new_unsafe({self.name: joined}, batch_size=batch, device=device)

    def _join_action_masks(self, group_data: Sequence[TensorDictBase], batch: torch.Size) -> Tensor:
        rows = []
        for group, td in zip(self.groups, group_data):
            if group.action_mask_key is not None:
                legal = td.get("action_mask")
                check_action_mask(group, legal, batch)
            else:
                legal = (
                    _all_true(batch, group, td).unsqueeze(-1).expand(*batch, -1, group.n_options)
                )
            rows.append(legal)
        return _pad_and_concatenate(rows, len(batch))

    def _join_flags(
        self, tensordict: TensorDictBase, group_data: Sequence[TensorDictBase]
    ) -> dict[str, Tensor]:
        flags: dict[str, list[Tensor]] = {name: [] for name in _FLAGS}
        for group, td in zip(self.groups, group_data):
            source = td if group.agent_done else tensordict
            check_flags(group, source)
            done, terminated = source.get("done"), source.get("terminated")
            truncated = source.get("truncated", None)
            truncated = done & ~terminated if truncated is None else truncated
            for name, flag in zip(_FLAGS, (done, terminated, truncated)):
                if not group.agent_done:
                    flag = flag.unsqueeze(-2).expand(*flag.shape[:-1], group.n_agents, 1)
                flags[name].append(flag)
        return {name: torch.cat(rows, -2) for name, rows in flags.items()}

    @cached_property
    def of_states(self) -> GroupSpec:
        """This group with the agents' own states in place of their observations, for critics."""
        return self._observe_states(groups=tuple(group.of_states for group in self.groups))

    # ----------------------------------------------------------------------- to several groups

    def scatter(
        self, data: TensorDictBase, tensordict: TensorDictBase, leaves: Sequence[str]
    ) -> TensorDictBase:
        """Writes leaves of the joined group into the groups that were joined.

        Args:
            data (TensorDictBase): result of :meth:`gather`, to which leaves were added.
            tensordict (TensorDictBase): data that contain the groups, dense or lazily stacked;
                modified in place.
            leaves (sequence of str): leaves to write, such as ``action``.
        """
        dim = tensordict.ndim
        values = [self.split(data.get((self.name, leaf)), dim) for leaf in leaves]
        for group, *rows in zip(self.sources, *values):
            for leaf, row in zip(leaves, rows):
                width = max(group.action_dims) if leaf == "action" else None
                if width is not None and row.ndim > dim + 1 and row.shape[-1] > width:
                    row = row[..., :width]
                group.write(tensordict, leaf, row)
        return tensordict

    def split(self, rows: Tensor, dim: int) -> Sequence[Tensor]:
        """Splits a tensor of all agents into tensors, one for each group in ``sources``.

        Args:
            rows (Tensor): tensor of all agents.
            dim (int): dim of the agents in the tensor.
        """
        return rows.split([group.n_agents for group in self.groups], dim)


def join(groups: Sequence[GroupSpec], *, same_actions: bool = True) -> GroupSpec:
    """Joins groups into one; returns a single group unchanged.

    Args:
        groups (sequence of GroupSpec): groups accepted by :func:`can_join`.
        same_actions (bool): False to join only the observations, for a critic.

    Raises:
        ValueError: the groups have different types of actions.
    """
    groups = tuple(groups)
    if len(groups) == 1:
        return groups[0]
    for group in groups[1:]:
        if same_actions and not can_join(groups[0], group):
            raise ValueError(
                f"groups {groups[0].name!r} and {group.name!r} have actions of different types, "
                "expected one type; they cannot be joined."
            )
    name = "+".join(group.name for group in groups)
    return JoinedGroup(**joined_fields(name, groups, same_actions=same_actions))


def joined_fields(
    name: str, groups: Sequence[GroupSpec], *, same_actions: bool = True
) -> dict[str, Any]:
    """Returns the fields of a joined group.

    Args:
        name (str): name of the joined group.
        groups (sequence of GroupSpec): groups accepted by :func:`can_join`.
        same_actions (bool): as in :func:`join`.
    """
    members = [member for group in groups for member in _specs_of_agents(group, same_actions)]
    actions = [member["action"] for member in members] if same_actions else None
    masked = any(group.mask_key is not None for group in groups)
    legal = same_actions and any(group.action_mask_key is not None for group in groups)
    kinds = [
        (i, kind) for i, group in enumerate(groups) for kind in group.kinds or (0,) * group.n_agents
    ]
    numbers = {kind: number for number, kind in enumerate(dict.fromkeys(kinds))}
    return {
        "name": name,
        "agent_names": tuple(agent for group in groups for agent in group.agent_names),
        "observation_spec": torch.stack([member["observation"] for member in members], 0),
        "action_spec": Composite() if actions is None else torch.stack(actions, 0),
        **own_keys(name),
        "observation_keys": ((name, "observation"),),
        "mask_key": (name, "mask") if masked else None,
        "action_mask_key": (name, "action_mask") if legal else None,
        "state_key": groups[0].state_key,
        "state_spec": groups[0].state_spec,
        **_agent_state_fields(name, groups),
        "agent_done": True,
        "members": tuple(members),
        "kinds": tuple(numbers[kind] for kind in kinds),
        "groups": tuple(groups),
        "respawns": any(group.respawns for group in groups),
    }


def as_single_group(group: GroupSpec) -> GroupSpec:
    """Returns an ordinary group with the agents of a joined group; other groups do not change.

    Examples:
        >>> from torchrl_marl import AgentSpec, TeamSpec
        >>> bounded = Bounded(-1, 1, (2,))
        >>> team = TeamSpec([AgentSpec("cat", 1, Unbounded((4,)), bounded),
        ...                  AgentSpec("mouse", 2, Unbounded((3,)), bounded)])
        >>> joined = join(tuple(team.groups.values()))
        >>> single = as_single_group(joined)
        >>> len(joined.groups), len(single.groups), single.n_agents
        (2, 1, 3)
    """
    return GroupSpec(**{field.name: getattr(group, field.name) for field in fields(GroupSpec)})


def _specs_of_agents(group: GroupSpec, with_actions: bool) -> list[Composite]:
    """Returns the specs of each agent, with the observation as a flat vector."""
    if not with_actions:
        return [Composite(observation=Unbounded((width,))) for width in group.observation_dims]
    return [
        Composite(observation=Unbounded((width,)), action=specs["action"])
        for width, specs in zip(group.observation_dims, group.own_specs)
    ]


def _agent_state_fields(name: str, groups: Sequence[GroupSpec]) -> dict[str, Any]:
    """Returns the key and the spec of the agents' own states, if all groups have them."""
    if any(group.agent_state_key is None for group in groups):
        return {}
    widths = [width for group in groups for width in group.of_states.observation_dims]
    spec = torch.stack([Unbounded((width,)) for width in widths], 0)
    return {"agent_state_key": (name, "state"), "agent_state_spec": spec}


def _flatten_states(group: GroupSpec, leaf: str, value: Tensor) -> Tensor:
    """Returns a leaf of a group; the agents' own states as flat vectors."""
    return group.of_states.flat([value]) if leaf == "state" else value


def _all_true(batch: torch.Size, group: GroupSpec, td: TensorDictBase) -> Tensor:
    return torch.ones(*batch, group.n_agents, dtype=torch.bool, device=td.device)


def _pad_and_concatenate(rows: Sequence[Tensor], dim: int) -> Tensor:
    """Concatenates tensors along the agents' dim; pads shorter feature dims with zeros."""
    if rows[0].ndim > dim + 1:
        width = max(row.shape[-1] for row in rows)
        widen = [(0, width - row.shape[-1]) for row in rows]
        rows = [F.pad(row, pad) if pad[1] else row for row, pad in zip(rows, widen)]
    return torch.cat(list(rows), dim)


def fold(rows: Tensor, n_members: int, dim: int) -> Tensor:
    """Moves a population's members from the envs' dim to the agents' dim of a tensor.

    Args:
        rows (Tensor): tensor of all envs; the envs of one member are consecutive.
        n_members (int): number P of members.
        dim (int): dim of the agents.

    Shapes:
        - rows: ``[P * E, *B, N, ...]``; returns: ``[E, *B, P * N, ...]``

    Examples:
        >>> import torch
        >>> fold(torch.tensor([[1, 2], [3, 4], [5, 6], [7, 8]]), 2, dim=1)
        tensor([[1, 2, 5, 6],
                [3, 4, 7, 8]])
    """
    return rows.unflatten(0, (n_members, -1)).movedim(0, dim).flatten(dim, dim + 1)


def unfold(rows: Tensor, n_members: int, dim: int) -> Tensor:
    """Moves a population's members from the agents' dim to the envs' dim of a tensor.

    Shapes:
        - rows: ``[E, *B, P * N, ...]``; returns: ``[P * E, *B, N, ...]``
    """
    return rows.unflatten(dim, (n_members, -1)).movedim(dim, 0).flatten(0, 1)


@dataclass(frozen=True)
class PopulationGroup(JoinedGroup):
    """Group with the agents of all members of a population; :func:`of_members` builds it.

    Args:
        team (JoinedGroup, optional): group with the agents of one member.
        n_members (int): number P of members.

    Shapes:
        - data of the environment: ``[P * E, *B]``; the envs of one member are consecutive
        - leaves of this group: ``[E, *B, P * N, ...]``
        - state: ``[E, *B, P * S]``
    """

    team: JoinedGroup | None = None
    n_members: int = 1

    @property
    def sources(self) -> tuple[GroupSpec, ...]:
        """Groups under which a TensorDict stores the data of this group."""
        assert self.team is not None
        return self.team.groups

    @property
    def teams(self) -> tuple[int, ...]:
        """Index of the member to which each group in ``groups`` belongs."""
        each = len(self.groups) // self.n_members
        return tuple(i // each for i in range(len(self.groups)))

    def by_source(self, values: Tensor) -> list[tuple[GroupSpec, Tensor]]:
        """Returns pairs of a group in ``sources`` and its values ``[P]``, one value per member."""
        by_member = values.expand(len(self.groups)).unflatten(0, (self.n_members, -1))
        return list(zip(self.sources, by_member.unbind(1)))

    @property
    def team_state_spec(self) -> TensorSpec | None:
        """Spec of the state of one member."""
        assert self.team is not None
        return self.team.state_spec

    @property
    def team_end_keys(self) -> tuple[NestedKey, NestedKey]:
        """Keys of the done and terminated flags of a member's team."""
        return self.key("team_done"), self.key("team_terminated")

    def gather(
        self, tensordict: TensorDictBase, *, leaves: Sequence[str] = (), flags: bool = False
    ) -> TensorDict:
        """Returns the inputs of all members' networks, under this group's keys.

        Args:
            tensordict (TensorDictBase): data that contain the groups, dense or lazily stacked.
            leaves, flags: as in :meth:`JoinedGroup.gather`; ``flags`` also includes the done flags
                of each member's team.

        Shapes:
            - tensordict: ``[P * E, *B]``; returns: ``[E, *B]``
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

    def gather_state(self, state: Tensor) -> Tensor:
        """Returns the states of all members side by side.

        Shapes:
            - state: ``[P * E, *B, S, ...]``; returns: ``[E, *B, P * S, ...]``
        """
        assert self.team_state_spec is not None
        return fold(state, self.n_members, state.ndim - self.team_state_spec.ndim)

    def split(self, rows: Tensor, dim: int) -> Sequence[Tensor]:
        """Splits a tensor of all agents into a ``[P * E, *B, N, ...]`` per group in ``sources``."""
        assert self.team is not None
        return self.team.split(unfold(rows, self.n_members, dim), dim)


def without_member_names(text: str) -> str:
    """Removes the member from the names of groups in a message.

    Members have the same groups, so :func:`of_members` numbers them. Users know the groups of the
    environment only, and what is wrong is wrong for each member.

    Args:
        text (str): message.

    Examples:
        >>> without_member_names("group 'car of member 0': its actions are continuous")
        "group 'car': its actions are continuous"
    """
    return _MEMBER_SUFFIX.sub("", text)


_MEMBER_SUFFIX = re.compile(r" of member \d+")


def of_members(team: GroupSpec, n_members: int, *, same_actions: bool = True) -> PopulationGroup:
    """Joins the groups of a population's members into one group.

    Args:
        team (GroupSpec): group with the agents of one member, which may be a joined group.
        n_members (int): number P of members.
        same_actions (bool): as in :func:`~torchrl_marl.specs.joining.join`.

    Raises:
        ConfigError: the group cannot be joined.

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
                f"group {group.name!r}: members of a population are joined, which needs a reward "
                "for each agent and actions that are numbers or choices; use population.size=1."
            )
    if not isinstance(team, JoinedGroup):
        team = JoinedGroup(**joined_fields(team.name, [team], same_actions=same_actions))
    members = [
        replace(group, name=f"{group.name} of member {i}")
        for i in range(n_members)
        for group in team.groups
    ]
    fields = joined_fields(team.name, members, same_actions=same_actions)
    if team.state_spec is not None:
        first, *others = team.state_spec.shape
        fields["state_spec"] = Unbounded((n_members * first, *others))
    return PopulationGroup(**fields, team=team, n_members=n_members)
