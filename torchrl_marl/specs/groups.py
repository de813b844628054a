"""Spec of a group of agents, and checks of the group's data."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from tensordict import LazyStackedTensorDict, NestedKey, TensorDict, TensorDictBase
from torch import Tensor
from torchrl.data import Bounded, Composite, MultiCategorical, OneHot, TensorSpec

from torchrl_marl.errors import ConfigError, SpecError
from torchrl_marl.specs.agents import is_discrete
from torchrl_marl.specs.stacking import Padding, agents_differ, pad_group, pad_specs, paddings_of

__all__ = ["GroupSpec", "check_action_mask", "check_flags", "check_inputs", "is_lazy"]


def is_lazy(group: object) -> bool:
    """Returns True if the data of a group are stacked lazily."""
    return isinstance(group, LazyStackedTensorDict)


@dataclass(frozen=True)
class GroupSpec:
    """Spec of agents that share a sub-TensorDict: keys, sizes, bounds, masks and done flags.

    :class:`TeamSpec` builds these specs. All modules, losses and learners take their keys from
    them.

    Args:
        name (str): key of the group in the TensorDict.
        agent_names (tuple of str): names of the N agents, in the order of the agents' dim in the
            data.
        observation_spec (TensorSpec): spec of the group's observations, ``[N, O]``, or a Composite
            of such specs.
        action_spec (TensorSpec): spec of the group's actions, ``[N, A]``, ``[N]`` or
            ``[N, n_actions]``.
        action_key, reward_key (NestedKey): keys of actions and rewards.
        done_key, terminated_key, truncated_key (NestedKey): keys of the agents' done flags if
            ``agent_done`` is True, otherwise keys of the episode's flags at the root.
        observation_keys (tuple of NestedKey): keys of the leaves that an actor reads, in order.
        mask_key, action_mask_key, state_key (NestedKey, optional): keys of the masks and of the
            state; None if the environment does not return them.
        state_spec (TensorSpec, optional): spec of the state, ``[S]``.
        agent_state_key (NestedKey, optional): key of the agents' own states; None if the
            environment does not return them.
        agent_state_spec (TensorSpec, optional): spec of the agents' own states, ``[N, S]``.
        agent_done (bool): True if every agent has done flags.
        members (tuple of Composite, optional): specs of each agent, if the agents' specs differ.
            Then the group's sizes and bounds are those of the padded form; see
            :mod:`torchrl_marl.specs.stacking`.
        kinds (tuple of int): index of each agent's kind.
        in_turns (bool): True for a turn-based group, in which all agents are born at the reset.
        respawns (bool): True if ended agents may come back within the episode.

    Examples:
        >>> from torchrl.data import Categorical, Unbounded
        >>> from torchrl_marl import AgentSpec, TeamSpec
        >>> group = TeamSpec([AgentSpec("car", 2, Unbounded((4,)), Categorical(3))]).groups["car"]
        >>> group.n_agents, group.observation_dim, group.n_actions, group.action_key
        (2, 4, 3, ('car', 'action'))
    """

    name: str
    agent_names: tuple[str, ...]
    observation_spec: TensorSpec
    action_spec: TensorSpec
    action_key: NestedKey
    reward_key: NestedKey
    done_key: NestedKey
    terminated_key: NestedKey
    truncated_key: NestedKey | None
    observation_keys: tuple[NestedKey, ...]
    mask_key: NestedKey | None = None
    action_mask_key: NestedKey | None = None
    state_key: NestedKey | None = None
    state_spec: TensorSpec | None = None
    agent_state_key: NestedKey | None = None
    agent_state_spec: TensorSpec | None = None
    agent_done: bool = False
    members: tuple[Composite, ...] | None = None
    kinds: tuple[int, ...] = ()
    in_turns: bool = False
    respawns: bool = False

    @property
    def n_agents(self) -> int:
        """Number N of agents."""
        return len(self.agent_names)

    @property
    def groups(self) -> tuple[GroupSpec, ...]:
        """Groups that were joined to form this group; for an ordinary group, the group itself."""
        return (self,)

    @property
    def sources(self) -> tuple[GroupSpec, ...]:
        """Groups under which a TensorDict stores the data of this group."""
        return self.groups

    @property
    def teams(self) -> tuple[int, ...]:
        """Team index of each group in ``groups``; in a population, each member is a team."""
        return (0,) * len(self.groups)

    def by_source(self, values: Tensor) -> list[tuple[GroupSpec, Tensor]]:
        """Returns pairs of a group in ``sources`` and its value, or in a population its P values.

        Args:
            values (Tensor): one value for each of the G groups in ``groups``, ``[G]``, or a common
                value, ``[1]``.
        """
        return list(zip(self.sources, values.expand(len(self.groups))))

    @property
    def team_end_keys(self) -> tuple[NestedKey, NestedKey]:
        """Keys of the done and terminated flags of the whole team."""
        return "done", "terminated"

    @property
    def group_index(self) -> tuple[int, ...]:
        """Index of each agent's group among ``groups``."""
        return tuple(i for i, group in enumerate(self.groups) for _ in range(group.n_agents))

    @property
    def membership(self) -> Tensor | None:
        """One-hot group of each agent, ``[N, G]`` for G groups; None for an ordinary group."""
        if len(self.groups) == 1:
            return None
        return torch.eye(len(self.groups))[torch.tensor(self.group_index)]

    def key(self, leaf: str) -> tuple[str, str]:
        """Returns the key of a leaf of this group, such as ``(name, "advantage")``."""
        return (self.name, leaf)

    def living(self, tensordict: TensorDictBase) -> Tensor | None:
        """Returns a mask ``[*B, N]`` of agents alive at a step's start; None without such data."""
        done = tensordict.get(self.done_key, None) if self.agent_done else None
        if done is not None:
            return ~done.squeeze(-1)
        return None if self.mask_key is None else tensordict.get(self.mask_key)

    def mask(self, tensordict: TensorDictBase) -> Tensor:
        """Returns the mask of agent steps to learn from, ``[*B, N]``.

        Agents learn from the steps in which they act; in a group without masks, from all steps. In
        a league, ``(group, "learns")`` excludes the steps of agents that past players control.
        """
        learns = tensordict.get(self.key("learns"), None)
        if self.mask_key is not None:
            mask = tensordict.get(self.mask_key)
            return mask if learns is None else mask & learns
        if learns is not None:
            return learns
        shape = (*tensordict.batch_size, self.n_agents)
        return torch.ones(shape, dtype=torch.bool, device=tensordict.device)

    # -------------------------------------------------------------------------------- its data

    def dense(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Returns the TensorDict; if the group is lazily stacked, a shallow copy with padding.

        Args:
            tensordict (TensorDictBase): data ``[*B]`` that contain the group, also under
                ``"next"``.

        Raises:
            SpecError: shapes differ from the specs.
        """
        dense = tensordict
        for key in ((self.name,), ("next", self.name)):
            group_data = dense.get(key, None)
            if is_lazy(group_data):
                dense = dense.copy() if dense is tensordict else dense
                dense.set(key, self._pad_if_lazy(group_data))
        return dense

    def gather(
        self, tensordict: TensorDictBase, *, leaves: Sequence[str] = (), flags: bool = False
    ) -> TensorDictBase:
        """Returns a TensorDict that contains only this group, in dense form.

        Args:
            tensordict (TensorDictBase): data ``[*B]`` that contain the group.
            leaves, flags: see :meth:`~torchrl_marl.specs.joining.JoinedGroup.gather`. An ordinary
                group ignores them and returns all leaves.
        """
        data = {self.name: self.data(tensordict).copy()}
        return TensorDict(data, tensordict.batch_size, device=tensordict.device)

    def scatter(
        self, data: TensorDictBase, tensordict: TensorDictBase, leaves: Sequence[str]
    ) -> TensorDictBase:
        """Writes leaves of a dense group into a TensorDict, where the group may be lazily stacked.

        Args:
            data (TensorDictBase): result of :meth:`gather`, to which leaves were added.
            tensordict (TensorDictBase): data ``[*B]`` that contain the group; modified in place.
            leaves (sequence of str): leaves to write, such as ``action``.
        """
        for leaf in leaves:
            self.write(tensordict, leaf, data.get((self.name, leaf)))
        return tensordict

    def write(self, tensordict: TensorDictBase, leaf: str, rows: Tensor) -> None:
        """Writes a leaf ``[*B, N, ...]``; in a lazily stacked group, without the padding."""
        group_data = self._own_data(tensordict)
        if not (is_lazy(group_data) and agents_differ(group_data)):
            group_data.set(leaf, rows)
            return
        padding, dim = self.paddings.get(leaf), group_data.ndim - 1
        for i, (member, row) in enumerate(zip(group_data.unbind(dim), rows.unbind(dim))):
            region: tuple = () if padding is None else padding.own(i) or ()
            member.set(leaf, row[(..., *region)])

    def data(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Returns the dense sub-TensorDict ``[*B, N]`` of the group.

        Raises:
            KeyError: the group is missing.
            SpecError: shapes differ from the specs.
        """
        return self._pad_if_lazy(self._own_data(tensordict))

    def flat_observation(self, tensordict: TensorDictBase) -> Tensor:
        """Concatenates the observation leaves, and moves padding behind each agent's features.

        Shapes:
            - leaves: ``[*B, N, *features]``, dense or lazily stacked; returns: ``[*B, N, O]``
        """
        group_data = self.data(tensordict)
        return self.flat([group_data.get(key[1:]) for key in self.observation_keys])

    def flat(self, leaves: Sequence[Tensor]) -> Tensor:
        """Concatenates dense observation leaves, and moves padding behind each agent's features."""
        order = self.observation_order
        order = None if order is None else order.to(leaves[0].device)
        return flat_leaves(leaves, self.observation_ndims, order)

    def _own_data(self, tensordict: TensorDictBase) -> TensorDictBase:
        group_data = tensordict.get(self.name, None)
        if group_data is None:
            raise KeyError(f"there is no group {self.name!r}, found {list(tensordict.keys())}.")
        return group_data

    def _pad_if_lazy(self, group_data: TensorDictBase) -> TensorDictBase:
        if not is_lazy(group_data):
            return group_data
        self.check_number(group_data.batch_size[-1])
        try:
            return pad_group(group_data, self.paddings | self._observation_paddings)
        except ValueError as error:
            raise SpecError(f"group {self.name!r}: {error}") from None

    def check_number(self, found: int, where: str = "") -> None:
        """Raises an error if the data and the specs have different numbers of agents."""
        if found != self.n_agents:
            raise SpecError(
                f"group {self.name!r}{where} has {found} agents here, and its policy was built for "
                f"{self.n_agents}; build one for this team and load the weights that do not depend "
                "on their number (docs/faq.md), or let agents act alone (docs/export.md)."
            )

    @cached_property
    def _observation_paddings(self) -> dict[NestedKey, Padding]:
        """Padding of each observation leaf, also of leaves with the same shape in all agents."""
        keys = [key[1] if len(key) == 2 else key[1:] for key in self.observation_keys]
        return {
            key: self.paddings.get(key) or Padding((shape[1:],) * self.n_agents)
            for key, shape in zip(keys, self.observation_shapes)
        }

    # ------------------------------------------------------------------------- sizes and bounds

    @property
    def observation_key(self) -> NestedKey:
        """Key of the observation, which is a sub-TensorDict for dict observations."""
        return self.key("observation")

    @property
    def heterogeneous(self) -> bool:
        """True if the agents have different observation or action specs."""
        return self.members is not None

    @cached_property
    def own_specs(self) -> tuple[Composite, ...]:
        """Observation and action specs of each agent, even if all agents have equal specs."""
        if self.members is not None:
            return self.members
        seen, action = self.observation_spec, self.action_spec
        return tuple(Composite(observation=seen[i], action=action[i]) for i in range(self.n_agents))

    @cached_property
    def paddings(self) -> dict[NestedKey, Padding]:
        """Padding of each leaf that has different shapes in different agents."""
        return {} if self.members is None else paddings_of(self.members)

    @cached_property
    def padded_spec(self) -> Composite:
        """Specs of the observations and actions in the padded, dense form, ``[N]``."""
        if self.members is not None:
            return pad_specs(self.members, f"group {self.name!r}")
        leaves = {"observation": self.observation_spec, "action": self.action_spec}
        return Composite(leaves, shape=(self.n_agents,))

    @cached_property
    def observation_dim(self) -> int:
        """Number O of flattened observation features of the agent with the most features."""
        return max(self.observation_dims)

    @cached_property
    def observation_shapes(self) -> tuple[tuple[int, ...], ...]:
        """Padded shape of each observation leaf without batch dims, ``(N, *features)``."""
        return tuple(tuple(leaf.shape) for leaf in self._observation_leaves)

    @cached_property
    def observation_ndims(self) -> tuple[int, ...]:
        """Number of feature dimensions of each observation leaf (1 for a vector)."""
        return tuple(len(shape) - 1 for shape in self.observation_shapes)

    @cached_property
    def observation_mask(self) -> Tensor | None:
        """Mask of the flattened features, which is False in padding; None without padding."""
        paddings = self._observation_paddings
        if paddings.keys().isdisjoint(self.paddings):
            return None
        return torch.cat([p.mask().reshape(self.n_agents, -1) for p in paddings.values()], -1)

    @cached_property
    def observation_dims(self) -> tuple[int, ...]:
        """Number of observation features of each agent."""
        if self.observation_mask is None:
            features = sum(leaf.shape[1:].numel() for leaf in self._observation_leaves)
            return (features,) * self.n_agents
        return tuple(self.observation_mask.sum(-1).tolist())

    @cached_property
    def observation_padding(self) -> Tensor | None:
        """Mask ``[N, O]``, False in padding, which is at each row's end; None without padding."""
        if self.observation_mask is None:
            return None
        return torch.arange(self.observation_dim) < torch.tensor(self.observation_dims)[:, None]

    @cached_property
    def observation_order(self) -> Tensor | None:
        """Feature order ``[N, O]`` that moves padding to each row's end; None if not needed."""
        mask = self.observation_mask
        if mask is None or bool((mask[:, 1:] <= mask[:, :-1]).all()):
            return None
        order = (~mask).to(torch.uint8).argsort(dim=-1, stable=True)
        return order[:, : self.observation_dim]

    @property
    def _observation_leaves(self) -> list[TensorSpec]:
        spec = self.padded_spec
        return [spec[key[1:]] for key in self.observation_keys]

    @property
    def _padded_action_spec(self) -> TensorSpec:
        return self.padded_spec["action"]

    @property
    def discrete(self) -> bool:
        """True for discrete actions."""
        return is_discrete(self._padded_action_spec)

    @cached_property
    def branches(self) -> tuple[int, ...]:
        """Number of choices in each branch of a multi-discrete or hybrid action; else empty."""
        action = self.padded_spec["action"]
        if isinstance(action, MultiCategorical):
            return tuple(action.nvec[0].tolist())
        return getattr(action, "branches", ())

    @property
    def hybrid(self) -> bool:
        """True for hybrid actions: choices and numbers, see :class:`~torchrl_marl.specs.Hybrid`."""
        return hasattr(self._padded_action_spec, "branches")

    @property
    def choices(self) -> str:
        """Description of multi-discrete or hybrid actions, for messages."""
        if not self.hybrid:
            return f"multi-discrete, {list(self.branches)}"
        width = self.continuous_spec.shape[-1]
        return f"hybrid, {list(self.branches)} and {width} number{'s' * (width > 1)}"

    @property
    def n_options(self) -> int:
        """Number of options of all choices, the size of an action mask."""
        return sum(self.branches) or self.n_actions

    @property
    def continuous_spec(self) -> TensorSpec:
        """Spec of the numbers of hybrid actions; of the whole action otherwise."""
        return getattr(self._padded_action_spec, "continuous", self._padded_action_spec)

    @property
    def one_hot(self) -> bool:
        """True for one-hot encoded discrete actions."""
        return isinstance(self._padded_action_spec, OneHot)

    @property
    def n_actions(self) -> int:
        """Number of discrete actions of the agent with the most actions."""
        if not self.discrete:
            raise ValueError(f"group {self.name!r} has continuous actions; use action_dim.")
        return self._padded_action_spec.space.n

    @cached_property
    def action_dim(self) -> int:
        """Number A of features of a continuous action, for the agent with the most features."""
        if self.discrete:
            raise ValueError(f"group {self.name!r} has discrete actions; use n_actions.")
        return self._padded_action_spec.shape[-1]

    @cached_property
    def action_dims(self) -> tuple[int, ...]:
        """Each agent's number of discrete actions, or of features of a continuous action."""
        if self.members is None:
            return (self.n_actions if self.discrete else self.action_dim,) * self.n_agents
        specs = [member["action"] for member in self.members]
        return tuple(spec.space.n if self.discrete else spec.shape[-1] for spec in specs)

    @cached_property
    def action_padding(self) -> Tensor | None:
        """Mask of each agent's actions, ``[N, A]`` or ``[N, n_actions]``; None without padding."""
        largest = max(self.action_dims)
        if min(self.action_dims) == largest:
            return None
        return torch.arange(largest) < torch.tensor(self.action_dims).unsqueeze(-1)

    @property
    def action_bounds(self) -> tuple[Tensor, Tensor] | None:
        """Lower and upper bounds of the actions, ``[N, A]`` each; None if any is unbounded.

        Those of hybrid actions are the bounds of their numbers, ``[N, D]``.
        """
        spec = self.continuous_spec
        if not isinstance(spec, Bounded):
            return None
        low, high = spec.space.low, spec.space.high
        finite = bool(torch.isfinite(low).all() and torch.isfinite(high).all())
        return (low, high) if finite else None

    @property
    def action_range(self) -> tuple[Tensor, Tensor] | None:
        """Center and half-range of the actions, ``[N, A]`` each; None if any is unbounded."""
        if self.action_bounds is None:
            return None
        low, high = self.action_bounds
        return (low + high) / 2, (high - low) / 2

    @property
    def state_dim(self) -> int:
        """Number S of state features."""
        if self.state_spec is None:
            raise ValueError(
                f"group {self.name!r}: this environment gives no 'state', expected one."
            )
        return self.state_spec.shape.numel()

    @property
    def team_state_spec(self) -> TensorSpec | None:
        """Spec of one team's state; in a population, each member is a team."""
        return self.state_spec

    @cached_property
    def of_states(self) -> GroupSpec:
        """This group with the agents' own states in place of their observations, for critics.

        Raises:
            ConfigError: the environment does not return states of the agents.
        """
        return self._observe_states()

    def _observe_states(self, **changed_fields: Any) -> GroupSpec:
        if self.agent_state_spec is None or self.agent_state_key is None:
            raise ConfigError(
                f"group {self.name!r}: this environment gives no state of each agent, expected "
                f"{self.key('state')!r}; declare AgentSpec(state_spec=...), or use "
                "central_input=observations."
            )
        members = []
        for spec, state in zip(self.own_specs, self.agent_state_spec.unbind(0)):
            leaves = {key: leaf for key, leaf in spec.items() if key != "observation"}
            members.append(Composite(leaves | {"state": state}))
        changed_fields |= {"observation_keys": (self.agent_state_key,), "action_mask_key": None}
        return replace(self, members=tuple(members), **changed_fields)


def own_keys(name: str) -> dict[str, Any]:
    """Returns the default keys of a group in which each agent has rewards and done flags."""
    leaves = ("action", "reward", "done", "terminated", "truncated")
    return {f"{leaf}_key": (name, leaf) for leaf in leaves}


def flat_leaves(leaves: Sequence[Tensor], ndims: Sequence[int], order: Tensor | None) -> Tensor:
    """Flattens leaves and concatenates them as floats, ``[*B, N, F]``.

    Args:
        leaves (sequence of Tensor): leaves ``[*B, N, *features]``.
        ndims (sequence of int): number of feature dims of each leaf.
        order (Tensor, optional): for each agent, the order of the concatenated features,
            ``[N, F]``.
    """
    rows = [_flatten_leaf(leaf, ndim) for leaf, ndim in zip(leaves, ndims)]
    features = rows[0] if len(rows) == 1 else torch.cat(rows, -1)
    return features if order is None else move_padding_last(features, order)


def _flatten_leaf(leaf: Tensor, ndim: int) -> Tensor:
    leaf = leaf if leaf.is_floating_point() else leaf.to(torch.get_default_dtype())
    return leaf.unsqueeze(-1) if ndim == 0 else leaf.flatten(-ndim) if ndim > 1 else leaf


def move_padding_last(features: Tensor, order: Tensor) -> Tensor:
    """Reorders features ``[*B, N, F]`` by an index ``[N, O]``, one row for each agent."""
    return features.gather(-1, order.expand(*features.shape[:-1], order.shape[-1]))


def check_inputs(group: GroupSpec, observations: Sequence[Tensor], mask: Tensor | None) -> None:
    """Checks the shapes and types of a network's inputs against the specs of a group.

    Args:
        group (GroupSpec): the group.
        observations (sequence of Tensor): observation leaves of the group.
        mask (Tensor, optional): mask of the group, if it has one.

    Shapes:
        - observations: ``[*B, N, *features]``; mask: ``[*B, N]``

    Raises:
        SpecError: a shape or type is wrong; the message names the group and key.
    """
    for key, shape, leaf in zip(group.observation_keys, group.observation_shapes, observations):
        if leaf.shape[-len(shape) :] != shape:
            expected = f"(*batch, {', '.join(map(str, shape))})"
            if leaf.ndim >= len(shape):
                where = f": {key!r} is {tuple(leaf.shape)}, expected {expected}: it"
                group.check_number(leaf.shape[-len(shape)], where)
            _raise_wrong(group, key, tuple(leaf.shape), expected)
    if mask is None:
        return
    ndim = observations[0].ndim - len(group.observation_shapes[0]) + 1
    if mask.dtype is not torch.bool:
        _raise_wrong(group, group.mask_key, mask.dtype, "torch.bool")
    if mask.shape != observations[0].shape[:ndim]:
        _raise_wrong(group, group.mask_key, tuple(mask.shape), tuple(observations[0].shape[:ndim]))


def check_action_mask(group: GroupSpec, action_mask: Tensor, batch: torch.Size) -> None:
    """Checks an action mask against the group's specs.

    Shapes:
        - action_mask: ``[*B, N, n_actions]``, of several choices ``[*B, N, n_options]``

    Raises:
        SpecError: the shape or type is wrong; the message names the group and key.
    """
    key, expected = group.action_mask_key, (*batch, group.n_agents, group.n_options)
    if action_mask.dtype is not torch.bool:
        _raise_wrong(group, key, action_mask.dtype, "torch.bool")
    if tuple(action_mask.shape) != expected:
        _raise_wrong(group, key, tuple(action_mask.shape), expected)


def check_flags(group: GroupSpec, source: TensorDictBase) -> None:
    """Checks that the done flags of a group exist.

    Args:
        group (GroupSpec): the group.
        source (TensorDictBase): data of the group if the agents have done flags; otherwise the
            whole TensorDict, which holds the episode's flags.

    Raises:
        SpecError: a flag is missing; the message names it.
    """
    for name in ("done", "terminated"):
        if source.get(name, None) is None:
            raise SpecError(
                f"group {group.name!r}: the batch has no {name!r} "
                f"{'of its agents' if group.agent_done else 'of the team'}, expected one in each "
                "step and under 'next'; keep all flags of the environment."
            )


def _raise_wrong(group: GroupSpec, key: object, found: object, expected: object) -> None:
    raise SpecError(
        f"group {group.name!r}: {key!r} is {found}, expected {expected} by the specs that the "
        "policy was built for."
    )
