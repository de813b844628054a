"""Critics of observations and actions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal, cast

import torch
import torch.nn.functional as F
from tensordict.nn import TensorDictModule, TensorDictSequential
from torch import Tensor, nn
from torch.types import Device
from torchrl.data import Composite, Unbounded

from torchrl_marl.functional import expand_mask
from torchrl_marl.modules.build import refuse_choices
from torchrl_marl.modules.central import GroupColumns, columns_of_groups
from torchrl_marl.modules.config import CriticConfig, NetworkConfig
from torchrl_marl.modules.critics import make_critic
from torchrl_marl.modules.inputs import (
    AgentInput,
    StateInput,
    pack,
    packed_index,
    register_constants,
)
from torchrl_marl.modules.normalization import ObservationNorm
from torchrl_marl.specs import GroupSpec
from torchrl_marl.specs.groups import move_padding_last
from torchrl_marl.specs.joining import JoinedGroup, PopulationGroup
from torchrl_marl.specs.teams import check_group

__all__ = [
    "ActionFeatures",
    "ObservationsAndActions",
    "OwnStatesAndActions",
    "StateAndActions",
    "make_action_critic",
]


class ActionFeatures(nn.Module):
    """Encodes actions for a critic: scaled to [-1, 1] within their bounds, or one-hot.

    Args:
        group (GroupSpec): group that acts.
        device (torch.device, optional): device of the bounds.

    Attributes:
        widths (tuple of int): number of action features of each agent.

    Shapes:
        - action: ``[*B, N, A]``, ``[*B, N]`` or one-hot; mask: ``[*B, N]``; returns ``[*B, N, A]``,
          0 where masked and at padding

    Examples:
        >>> from torchrl.data import Bounded, Unbounded
        >>> from torchrl_marl import AgentSpec, TeamSpec
        >>> team = TeamSpec([AgentSpec("car", 1, Unbounded((4,)), Bounded(0, 4, (2,)))])
        >>> ActionFeatures(team.groups["car"])(torch.tensor([[0.0, 3.0]]))
        tensor([[-1.0000,  0.5000]])
    """

    middle: Tensor | None
    half_range: Tensor  # of bounded actions
    own: Tensor | None

    def __init__(self, group: GroupSpec, device: Device = None) -> None:
        super().__init__()
        self.discrete, self.one_hot = group.discrete, group.discrete and group.one_hot
        self.n_actions = group.n_actions if group.discrete else 0
        self.widths = group.action_dims
        padding = group.action_padding
        middle, half = group.action_range or (None, None)
        if half is not None and padding is not None:
            half = torch.where(padding, half, 1.0)
        register_constants(self, device, middle=middle, half_range=half, own=padding)

    def forward(self, action: Tensor, mask: Tensor | None = None) -> Tensor:
        """Scales or encodes the actions."""
        if mask is not None:
            action = torch.where(expand_mask(mask, action), action, 0)
        if self.discrete:
            encoded = self.one_hot or action.is_floating_point()
            features = action if encoded else F.one_hot(action, self.n_actions)
            features = features.to(torch.get_default_dtype())
        else:
            features = action if self.middle is None else (action - self.middle) / self.half_range
        if mask is not None:
            features = torch.where(mask.unsqueeze(-1), features, 0.0)
        return features if self.own is None else torch.where(self.own, features, 0.0)


class ObservationsAndActions(nn.Module):
    """Concatenates each agent's observation and action, without padding between them.

    Args:
        input_group (GroupSpec): agents whose observations are read.
        group (GroupSpec): agents whose actions are read; no actions are read for other agents of
            ``input_group``.
        actions (ActionFeatures): encoder of the actions of ``group``.
        norm (ObservationNorm, optional): standardizes observations.
        device (torch.device, optional): device of the indices.

    Shapes:
        - inputs: those of :class:`AgentInput` for the M agents of ``input_group``, then the
          actions; returns ``[*B, M, O + A]``
    """

    index: Tensor | None
    order: Tensor | None

    def __init__(
        self,
        input_group: GroupSpec,
        group: GroupSpec,
        actions: ActionFeatures,
        norm: ObservationNorm | None = None,
        device: Device = None,
    ) -> None:
        super().__init__()
        self.agents, self.actions = AgentInput(input_group, norm, device), actions
        place = _positions_in_group(input_group, group)
        same_agents = place == list(range(group.n_agents))
        widths = [0 if i < 0 else actions.widths[i] for i in place]
        order = _order_without_gaps(input_group.observation_dims, widths, max(actions.widths))
        index = None if same_agents else torch.tensor(place)
        register_constants(self, device, index=index, order=order)

    def forward(self, *inputs: Tensor) -> Tensor:
        """Concatenates observations and actions."""
        *observed, action = inputs
        features, mask = self.agents(*observed)
        if self.index is None:
            encoded_actions = self.actions(action, mask)
        else:
            encoded_actions = self.actions(action).index_select(-2, self.index.clamp_min(0))
            acts = (self.index >= 0) if mask is None else (self.index >= 0) & mask
            encoded_actions = torch.where(acts.unsqueeze(-1), encoded_actions, 0.0)
        both = torch.cat([features, encoded_actions], -1)
        return both if self.order is None else move_padding_last(both, self.order)


class OwnStatesAndActions(nn.Module):
    """Concatenates each agent's own state and the actions of all agents of its team.

    Args:
        group (GroupSpec): agents that act, and that have states.
        actions (ActionFeatures): encoder of their actions.
        device (torch.device, optional): device of the indices.

    Attributes:
        widths (list of int): number of action features that each agent's critic reads.

    Shapes:
        - inputs: those of :class:`AgentInput` for the states, then the actions ``[*B, N, A]``;
          returns ``[*B, N, S + A of the team]``
    """

    index: Tensor | None
    order: Tensor | None

    def __init__(self, group: GroupSpec, actions: ActionFeatures, device: Device = None) -> None:
        super().__init__()
        states = group.of_states
        self.states, self.actions = AgentInput(states, None, device), actions
        of_groups = columns_of_groups(group, group, own_group=False, widths=actions.widths)
        columns = [of_groups[k] for k in group.group_index]
        self.columns, self.widths = GroupColumns(columns, device), [*map(len, columns)]
        order = _order_without_gaps(states.observation_dims, self.widths, max(self.widths))
        register_constants(self, device, index=packed_index(actions.widths), order=order)

    def forward(self, *inputs: Tensor) -> Tensor:
        """Concatenates states and actions."""
        *observed, action = inputs
        features, mask = self.states(*observed)
        row = pack(self.actions(action, mask), self.index)
        both = torch.cat([features, self.columns(row)], -1)
        return both if self.order is None else move_padding_last(both, self.order)


class StateAndActions(nn.Module):
    """Concatenates the state and all agents' actions, and leaves out padding of the actions.

    Members of a population lie side by side, each with its state and its agents' actions.
    """

    index: Tensor | None

    def __init__(self, group: GroupSpec, actions: ActionFeatures) -> None:
        super().__init__()
        assert group.state_spec is not None
        self.state, self.actions = StateInput(group.state_spec.ndim), actions
        self.n_teams = len(set(group.teams))
        self.width = (group.state_dim + sum(actions.widths)) // self.n_teams
        device = None if actions.own is None else actions.own.device
        register_constants(self, device, index=packed_index(actions.widths))

    def forward(self, state: Tensor, action: Tensor, mask: Tensor | None = None) -> Tensor:
        """Returns ``[*B, S + A of all]``."""
        row = pack(self.actions(action, mask), self.index)
        of_teams = [x.unflatten(-1, (self.n_teams, -1)) for x in (self.state(state)[0], row)]
        return torch.cat(of_teams, -1).flatten(-2)


def _positions_in_group(input_group: GroupSpec, group: GroupSpec) -> list[int]:
    """Returns the position of each agent of ``input_group`` in ``group``, or -1."""
    sizes = [one.n_agents for one in group.groups]
    starts = {one.name: sum(sizes[:i]) for i, one in enumerate(group.groups)}
    return [
        starts[one.name] + i if one.name in starts else -1
        for one in input_group.groups
        for i in range(one.n_agents)
    ]


def _order_without_gaps(
    observed: Sequence[int], acted: Sequence[int], widest_action: int
) -> Tensor | None:
    """Returns an order that puts real features before padding; None if it is the given order."""
    widest_observation = max(observed)
    if min(observed) == widest_observation and min(acted) == widest_action:
        return None
    rows = []
    for n_observed, actions in zip(observed, acted):
        columns = [*range(n_observed), *range(widest_observation, widest_observation + actions)]
        rows.append(
            columns + [j for j in range(widest_observation + widest_action) if j not in columns]
        )
    width = max(n_observed + actions for n_observed, actions in zip(observed, acted))
    return torch.tensor(rows)[:, :width]


_OBSERVATION_ACTION = "observation_action"
_STATE_ACTION = "state_action"


def make_action_critic(
    group: GroupSpec,
    config: CriticConfig | NetworkConfig | None = None,
    *,
    centralized: bool | Literal["state", "agent_state"] = True,
    team: GroupSpec | None = None,
    n_critics: int = 1,
    observation_norm: ObservationNorm | None = None,
    device: Device = None,
) -> TensorDictSequential:
    """Builds critics of observations and actions (Q-values) for every agent of a group.

    Args:
        group (GroupSpec): group whose agents act, or several groups joined into one.
        config (CriticConfig or NetworkConfig, optional): network of each critic.
        centralized (bool, "state" or "agent_state"): input of the critic, as in
            :func:`~torchrl_marl.modules.make_critic`. With ``False`` the critic of an agent reads
            this agent's action. With ``True`` a critic reads the actions of those agents of
            ``group`` that it sees. With ``"state"`` or ``"agent_state"`` a critic reads the actions
            of all agents of ``group``.
        team (GroupSpec, optional): agents that a critic across groups sees.
        n_critics (int): number K of critics, which differ only in their initialization.
        observation_norm (ObservationNorm, optional): standardizes observations.
        device (torch.device, optional): device of the parameters.

    Shapes:
        - observation: ``[*B, N, O]``; mask: ``[*B, N]``
        - state: ``[*B, S]``; the agents' own: ``[*B, N, S]``
        - action: ``[*B, N, A]``, ``[*B, N]``, or one-hot ``[*B, N, n_actions]``. One-hot actions
          are also accepted if the group's actions are integers
        - state_action_value: ``[*B, N, K]``

    Keys:
        - reads: the keys that a critic from :func:`~torchrl_marl.modules.make_critic` reads, and
          ``group.action_key``
        - writes: ``(group, "state_action_value")``

    Raises:
        ConfigError: settings that contradict each other; multi-discrete or hybrid actions.

    Examples:
        >>> from tensordict import TensorDict
        >>> from torchrl.data import Bounded
        >>> from torchrl_marl import AgentSpec, TeamSpec
        >>> team = TeamSpec([AgentSpec("car", 3, Unbounded((4,)), Bounded(-1, 1, (2,)))])
        >>> critic = make_action_critic(team.groups["car"], n_critics=2)
        >>> td = TensorDict({"car": {"observation": torch.zeros(5, 3, 4),
        ...                          "action": torch.zeros(5, 3, 2),
        ...                          "mask": torch.ones(5, 3, dtype=torch.bool)}}, [5])
        >>> critic(td)["car", "state_action_value"].shape
        torch.Size([5, 3, 2])
    """
    check_group(group, "make_action_critic")
    refuse_choices(group)
    seen = group if team is None else team
    actions = ActionFeatures(group, device)
    if centralized == "state" and group.state_spec is not None:
        joined_inputs = _make_state_action_module(group, actions)
        wide_group, wide_team = _replace_state(group, joined_inputs.module.width), None
    elif centralized == "agent_state":
        joined_inputs, widths = _make_agent_state_action_module(group, actions, device)
        wide_group, wide_team, centralized = (
            _add_action_columns(group.of_states, widths),
            None,
            False,
        )
    else:
        joined_inputs = _make_observation_action_module(
            seen, group, actions, observation_norm, device
        )
        widths = _widths_by_group(group, actions.widths)
        wide_group = _add_action_columns(group, widths)
        wide_team = None if team is None else _add_action_columns(team, widths)
    critics = [
        make_critic(wide_group, config, centralized=centralized, team=wide_team, device=device)
        for _ in range(n_critics)
    ]
    values = Ensemble([cast(nn.Module, critic.module) for critic in critics])
    last = TensorDictModule(values, critics[0].in_keys, [group.key("state_action_value")])
    return TensorDictSequential(joined_inputs, last)


class Ensemble(nn.Module):
    """Runs several networks on the same inputs and concatenates their outputs."""

    def __init__(self, networks: Sequence[nn.Module]) -> None:
        super().__init__()
        self.networks = nn.ModuleList(networks)

    def forward(self, *inputs: Tensor) -> Tensor:
        """Returns ``[*B, N, K]``."""
        return torch.cat([network(*inputs) for network in self.networks], -1)


def _make_observation_action_module(input_group, group, actions, norm, device) -> TensorDictModule:
    keys = [*AgentInput.keys(input_group), group.action_key]
    module = ObservationsAndActions(input_group, group, actions, norm, device)
    return TensorDictModule(module, keys, [(input_group.name, _OBSERVATION_ACTION)])


def _make_state_action_module(group: GroupSpec, actions: ActionFeatures) -> TensorDictModule:
    keys = [group.state_key, group.action_key, *([group.mask_key] if group.mask_key else [])]
    return TensorDictModule(StateAndActions(group, actions), keys, [_STATE_ACTION])


def _replace_state(group: GroupSpec, width: int) -> GroupSpec:
    """Returns the group with a state of ``width`` features for each team."""
    parts: dict[str, Any] = {"state_key": _STATE_ACTION, "state_spec": Unbounded((width,))}
    if isinstance(group, PopulationGroup):
        parts["team"] = replace(cast(JoinedGroup, group.team), **parts)
        parts["state_spec"] = Unbounded((group.n_members * width,))
    return replace(group, **parts)


def _make_agent_state_action_module(
    group: GroupSpec, actions: ActionFeatures, device: Device
) -> tuple[TensorDictModule, dict[str, list[int]]]:
    module = OwnStatesAndActions(group, actions, device)
    keys = [*AgentInput.keys(group.of_states), group.action_key]
    widths = _widths_by_group(group, module.widths)
    return TensorDictModule(module, keys, [(group.name, _OBSERVATION_ACTION)]), widths


def _add_action_columns(group: GroupSpec, widths: Mapping[str, list[int]]) -> GroupSpec:
    """Returns a copy of a group, wider in groups of ``widths``: observations include actions."""
    own = [widths.get(one.name, [0] * one.n_agents) for one in group.groups]
    parts = tuple(_add_columns(one, actions) for one, actions in zip(group.groups, own))
    if not isinstance(group, JoinedGroup):
        return parts[0]
    return replace(cast(JoinedGroup, _add_columns(group, sum(own, []))), groups=parts)


def _add_columns(group: GroupSpec, actions: Sequence[int]) -> GroupSpec:
    widths = [seen + own for seen, own in zip(group.observation_dims, actions)]
    members = tuple(Composite({_OBSERVATION_ACTION: Unbounded((width,))}) for width in widths)
    key = group.key(_OBSERVATION_ACTION)
    return replace(group, members=members, observation_keys=(key,), action_mask_key=None)


def _widths_by_group(group: GroupSpec, widths: Sequence[int]) -> dict[str, list[int]]:
    """Returns the widths of each group's agents, by its name, from the widths of all agents."""
    owner, groups = group.group_index, enumerate(group.groups)
    return {one.name: [w for w, k in zip(widths, owner) if k == i] for i, one in groups}
