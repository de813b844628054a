"""Several groups as one: their agents side by side, padded, in one dense TensorDict.

What trains equally is trained in one batched call: a learner joins its groups once a batch, a
policy joins them in each step.

Shapes: B any batch dims, N agents of all groups, O observation features of the widest agent.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
import torch.nn.functional as F
from tensordict import NestedKey, TensorDict, TensorDictBase
from torch import Tensor
from torchrl.data import Bounded, Composite, Unbounded

from torchrl_marl.errors import SpecError
from torchrl_marl.specs import GroupSpec
from torchrl_marl.stacking import Padding, is_lazy, pad_group

__all__ = [
    "JoinedGroup",
    "can_join",
    "check_action_mask",
    "check_inputs",
    "flat_observation",
    "join",
    "padded",
]

_FLAGS = ("done", "terminated", "truncated")


def flat_observation(group: GroupSpec, tensordict: TensorDictBase) -> Tensor:
    """A group's observation leaves side by side, each agent's own features first.

    Shapes:
        - leaves: ``[*B, N, *features]``, dense or lazily stacked; returns ``[*B, N, O]``
    """
    return _flat(group, dense_group(group, tensordict))


def _flat(group: GroupSpec, own: TensorDictBase) -> Tensor:
    rows = []
    for key, ndim in zip(group.observation_keys, group.observation_ndims):
        leaf = own.get(key[1:])
        leaf = leaf if leaf.is_floating_point() else leaf.to(torch.get_default_dtype())
        rows.append(leaf.unsqueeze(-1) if ndim == 0 else leaf.flatten(-ndim) if ndim > 1 else leaf)
    features = rows[0] if len(rows) == 1 else torch.cat(rows, -1)
    order = group.observation_order
    return features if order is None else own_first(features, order.to(features.device))


def own_first(features: Tensor, order: Tensor) -> Tensor:
    """Takes features of each agent, of ``[*B, N, F]``, in an order, ``[N, O]``."""
    return features.gather(-1, order.expand(*features.shape[:-1], order.shape[-1]))


def dense_group(group: GroupSpec, tensordict: TensorDictBase) -> TensorDictBase:
    """A group's TensorDict ``[*B, N]``, padded where it is stacked lazily."""
    own = tensordict.get(group.name, None)
    if own is None:
        raise KeyError(f"there is no group {group.name!r}, found {list(tensordict.keys())}.")
    if not is_lazy(own):
        return own
    try:
        return pad_group(own, {**_equal_shapes(group), **group.paddings})
    except ValueError as error:
        raise SpecError(f"group {group.name!r}: {error}") from None


def _equal_shapes(group: GroupSpec) -> dict[NestedKey, Padding]:
    """The observations that are promised to have one shape for all agents."""
    keys = [key[1] if len(key) == 2 else key[1:] for key in group.observation_keys]
    return {
        key: Padding((shape[1:],) * group.n_agents)
        for key, shape in zip(keys, group.observation_shapes)
    }


def check_inputs(group: GroupSpec, observations: Sequence[Tensor], mask: Tensor | None) -> None:
    """Compares what a network of a group reads with the group's specs; reads no values.

    Args:
        group (GroupSpec): whose.
        observations (sequence of Tensor): its observation leaves.
        mask (Tensor, optional): where it has one.

    Shapes:
        - observations: ``[*B, N, *features]``; mask: ``[*B, N]``

    Raises:
        SpecError: naming group, key, and the shape or type that was found and expected.
    """
    for key, shape, leaf in zip(group.observation_keys, group.observation_shapes, observations):
        if leaf.shape[-len(shape) :] != shape:
            _refuse(group, key, tuple(leaf.shape), f"(*batch, {', '.join(map(str, shape))})")
    if mask is None:
        return
    ndim = observations[0].ndim - len(group.observation_shapes[0]) + 1
    if mask.dtype is not torch.bool:
        _refuse(group, group.mask_key, mask.dtype, "torch.bool")
    if mask.shape != observations[0].shape[:ndim]:
        _refuse(group, group.mask_key, tuple(mask.shape), tuple(observations[0].shape[:ndim]))


def check_action_mask(group: GroupSpec, action_mask: Tensor, batch: torch.Size) -> None:
    """Compares an action mask with the group's specs.

    Shapes:
        - action_mask: ``[*B, N, n_actions]``

    Raises:
        SpecError: naming group, key, and the shape or type that was found and expected.
    """
    key, expected = group.action_mask_key, (*batch, group.n_agents, group.n_actions)
    if action_mask.dtype is not torch.bool:
        _refuse(group, key, action_mask.dtype, "torch.bool")
    if tuple(action_mask.shape) != expected:
        _refuse(group, key, tuple(action_mask.shape), expected)


def _refuse(group: GroupSpec, key: object, found: object, expected: object) -> None:
    raise SpecError(
        f"group {group.name!r}: {key!r} is {found}, expected {expected}, as the specs say that "
        "the policy was built for."
    )


def padded(group: GroupSpec | None, tensordict: TensorDictBase) -> TensorDictBase:
    """The same TensorDict, or a shallow copy in which a lazily stacked group is padded.

    Args:
        group (GroupSpec, optional): the group; also under ``"next"``.
        tensordict (TensorDictBase): ``[*B]``.
    """
    if group is None or not is_lazy(tensordict.get(group.name, None)):
        return tensordict
    copied = tensordict.exclude(group.name).set(group.name, dense_group(group, tensordict))
    following = copied.get("next", None)
    if following is not None and following.get(group.name, None) is not None:
        copied.set("next", padded(group, following))
    return copied


def can_join(first: GroupSpec, second: GroupSpec) -> bool:
    """Whether one actor and one loss can serve the agents of both groups."""

    def of(group: GroupSpec) -> tuple:
        bounded = not group.discrete and group.action_bounds is not None
        own_reward = group.reward_key == group.key("reward")
        dtype = group.padded_spec["action"].dtype
        # Other action specs, such as MultiCategorical, have shapes of their own.
        simple = group.discrete or isinstance(group.padded_spec["action"], (Bounded, Unbounded))
        return group.discrete, group.one_hot, bounded, dtype, own_reward, simple

    return of(first) == of(second) and of(first)[-1] and of(first)[-2]


@dataclass(frozen=True)
class JoinedGroup(GroupSpec):
    """Several groups as one, from :func:`join`.

    Args:
        groups (tuple of GroupSpec): its parts, side by side in this order.

    Shapes:
        - its leaves: ``[*B, N, ...]`` with N the agents of all parts

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

    @property
    def parts(self) -> tuple[GroupSpec, ...]:
        """The groups of which it is made."""
        return self.groups

    @cached_property
    def slices(self) -> tuple[slice, ...]:
        """Where each part's agents are."""
        ends = torch.tensor([part.n_agents for part in self.groups]).cumsum(0).tolist()
        return tuple(slice(end - part.n_agents, end) for part, end in zip(self.groups, ends))

    # ------------------------------------------------------------------------- to one group

    def gather(
        self, tensordict: TensorDictBase, *, leaves: Sequence[str] = (), flags: bool = False
    ) -> TensorDict:
        """What a joined network reads, under this group's keys.

        Args:
            tensordict (TensorDictBase): with the parts, dense or lazily stacked.
            leaves (sequence of str): what is taken beside observations and masks, of
                ``action``, ``action_log_prob`` and ``reward``.
            flags (bool): take the agents' done flags, too.

        Shapes:
            - tensordict, returns: ``[*B]``
        """
        batch = tensordict.batch_size
        own = [dense_group(part, tensordict) for part in self.groups]
        for part, td in zip(self.groups, own):
            seen = [td.get(key[1:]) for key in part.observation_keys]
            check_inputs(part, seen, None if part.mask_key is None else td.get("mask"))
        source = {"observation": self._cat_observations(own)}
        if self.mask_key is not None:
            source["mask"] = torch.cat(
                [
                    _ones(batch, part, td) if part.mask_key is None else td.get("mask")
                    for part, td in zip(self.groups, own)
                ],
                -1,
            )
        if self.action_mask_key is not None:
            source["action_mask"] = self._cat_action_masks(own, batch)
        for leaf in leaves:
            source[leaf] = _cat([td.get(leaf) for td in own], len(batch))
        if flags:
            source |= self._cat_flags(tensordict, own)
        device = tensordict.device
        agents = torch.Size((*batch, self.n_agents))
        joined = TensorDict._new_unsafe(source, batch_size=agents, device=device)
        return TensorDict._new_unsafe({self.name: joined}, batch_size=batch, device=device)

    def _cat_observations(self, own: Sequence[TensorDictBase]) -> Tensor:
        rows = [
            td.get("observation") if plain else _flat(part, td)
            for part, td, plain in zip(self.groups, own, self._plain)
        ]
        return _cat(rows, rows[0].ndim - 2)

    @cached_property
    def _plain(self) -> tuple[bool, ...]:
        """Whose observation is one vector of floats, with each agent's own features first."""
        return tuple(
            part.observation_ndims == (1,)
            and part.observation_order is None
            and part.observation_keys == (part.observation_key,)
            and part.padded_spec["observation"].dtype.is_floating_point
            for part in self.groups
        )

    def _cat_action_masks(self, own: Sequence[TensorDictBase], batch: torch.Size) -> Tensor:
        rows = []
        for part, td in zip(self.groups, own):
            if part.action_mask_key is not None:
                legal = td.get("action_mask")
                check_action_mask(part, legal, batch)
            else:
                legal = _ones(batch, part, td).unsqueeze(-1).expand(*batch, -1, part.n_actions)
            rows.append(legal)
        return _cat(rows, len(batch))

    def _cat_flags(
        self, tensordict: TensorDictBase, own: Sequence[TensorDictBase]
    ) -> dict[str, Tensor]:
        flags: dict[str, list[Tensor]] = {name: [] for name in _FLAGS}
        for part, td in zip(self.groups, own):
            source = td if part.agent_done else tensordict
            done, terminated = source.get("done"), source.get("terminated")
            truncated = source.get("truncated", None)
            truncated = done & ~terminated if truncated is None else truncated
            for name, flag in zip(_FLAGS, (done, terminated, truncated)):
                if not part.agent_done:
                    flag = flag.unsqueeze(-2).expand(*flag.shape[:-1], part.n_agents, 1)
                flags[name].append(flag)
        return {name: torch.cat(rows, -2) for name, rows in flags.items()}

    # ----------------------------------------------------------------------- to several groups

    def scatter(self, joined: TensorDictBase, tensordict: TensorDictBase, leaves: Sequence[str]):
        """Writes leaves of the joined group into its parts.

        Args:
            joined (TensorDictBase): from :meth:`gather`, and what was written since.
            tensordict (TensorDictBase): the parts, dense or lazily stacked; written to.
            leaves (sequence of str): such as ``action`` and ``action_log_prob``.
        """
        dim, sizes = tensordict.ndim, [part.n_agents for part in self.groups]
        values = [joined.get((self.name, leaf)).split(sizes, dim) for leaf in leaves]
        for part, *rows in zip(self.groups, *values):
            own = tensordict.get(part.name)
            for leaf, row in zip(leaves, rows):
                width = max(part.action_dims) if leaf == "action" else None
                if width is not None and row.ndim > dim + 1 and row.shape[-1] > width:
                    row = row[..., :width]
                write_rows(part, own, leaf, row)
        return tensordict


def write_rows(group: GroupSpec, own: TensorDictBase, leaf: str, rows: Tensor) -> None:
    """Writes a leaf ``[*B, N, ...]`` into a group's TensorDict, cut to each agent's own if lazy."""
    if not is_lazy(own):
        own.set(leaf, rows)
        return
    padding, dim = group.paddings.get(leaf), own.ndim - 1
    for i, (member, row) in enumerate(zip(own.unbind(dim), rows.unbind(dim))):
        region: tuple = () if padding is None else padding.own(i) or ()
        member.set(leaf, row[(..., *region)])


def join(groups: Sequence[GroupSpec], *, same_actions: bool = True) -> GroupSpec:
    """Several groups as one; a single one as it is.

    Args:
        groups (sequence of GroupSpec): that :func:`can_join`.
        same_actions (bool): False joins what the groups see only, for a critic.

    Raises:
        ValueError: groups without a common kind of action.
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
    members = [member for group in groups for member in _members(group, same_actions)]
    actions = [member["action"] for member in members] if same_actions else None
    masked = any(group.mask_key is not None for group in groups)
    legal = same_actions and any(group.action_mask_key is not None for group in groups)
    kinds: dict[tuple[int, int], int] = {}
    for i, group in enumerate(groups):
        for kind in group.kinds or (0,) * group.n_agents:
            kinds.setdefault((i, kind), len(kinds))
    return JoinedGroup(
        name=name,
        agent_names=tuple(agent for group in groups for agent in group.agent_names),
        observation_spec=torch.stack([member["observation"] for member in members], 0),
        action_spec=Composite() if actions is None else torch.stack(actions, 0),
        action_key=(name, "action"),
        reward_key=(name, "reward"),
        done_key=(name, "done"),
        terminated_key=(name, "terminated"),
        truncated_key=(name, "truncated"),
        observation_keys=((name, "observation"),),
        mask_key=(name, "mask") if masked else None,
        action_mask_key=(name, "action_mask") if legal else None,
        state_key=groups[0].state_key,
        state_spec=groups[0].state_spec,
        agent_done=True,
        members=tuple(members),
        kinds=tuple(
            kinds[i, kind]
            for i, group in enumerate(groups)
            for kind in group.kinds or (0,) * group.n_agents
        ),
        groups=groups,
    )


def _members(group: GroupSpec, acts: bool) -> list[Composite]:
    """Each agent with a flat observation."""
    if not acts:
        return [Composite(observation=Unbounded((width,))) for width in group.observation_dims]
    actions = (
        [group.action_spec[i] for i in range(group.n_agents)]
        if group.members is None
        else [member["action"] for member in group.members]
    )
    return [
        Composite(observation=Unbounded((width,)), action=action)
        for width, action in zip(group.observation_dims, actions)
    ]


def _ones(batch: torch.Size, part: GroupSpec, td: TensorDictBase) -> Tensor:
    return torch.ones(*batch, part.n_agents, dtype=torch.bool, device=td.device)


def _cat(rows: Sequence[Tensor], dim: int) -> Tensor:
    """Concatenates over the agents, with zeros behind what is narrower."""
    if rows[0].ndim > dim + 1:
        width = max(row.shape[-1] for row in rows)
        rows = [
            row if row.shape[-1] == width else F.pad(row, (0, width - row.shape[-1]))
            for row in rows
        ]
    return torch.cat(list(rows), dim)
