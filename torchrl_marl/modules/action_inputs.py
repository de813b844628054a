"""What critics of actions read: actions beside observations, or beside the state.

Shapes: B any batch dims, N agents, M agents that a critic sees, A action features.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from torchrl_marl.functional import expand_mask
from torchrl_marl.modules.inputs import AgentInput, StateInput
from torchrl_marl.modules.normalization import ObservationNorm
from torchrl_marl.specs import GroupSpec

__all__ = ["ActionFeatures", "BesideObservations", "BesideState"]


class ActionFeatures(nn.Module):
    """Actions as a critic reads them: from -1 to 1 within their bounds, or one-hot.

    Args:
        group (GroupSpec): whose actions.
        device (torch.device, optional): of the bounds.

    Attributes:
        widths (tuple of int): each agent's own number of features.

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
    half_range: Tensor  # where there is a middle
    own: Tensor | None

    def __init__(self, group: GroupSpec, device: torch.device | str | None = None) -> None:
        super().__init__()
        self.discrete, self.one_hot = group.discrete, group.discrete and group.one_hot
        self.n_actions = group.n_actions if group.discrete else 0
        self.widths = group.action_dims
        bounds = None if group.discrete else group.action_bounds
        padding = group.action_padding
        middle = half = None
        if bounds is not None:
            low, high = bounds
            middle, half = (low + high) / 2, (high - low) / 2
            half = half if padding is None else torch.where(padding, half, 1.0)
        for name, value in (("middle", middle), ("half_range", half), ("own", padding)):
            value = None if value is None else value.to(device)
            self.register_buffer(name, value, persistent=False)

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


class BesideObservations(nn.Module):
    """Puts each agent's action behind its observation, its own features first.

    Args:
        seen (GroupSpec): whose observations.
        group (GroupSpec): whose actions; agents of ``seen`` that are not of it have none.
        actions (ActionFeatures): of ``group``.
        norm (ObservationNorm, optional): standardizes observations.
        device (torch.device, optional): of the indices.

    Shapes:
        - inputs: of :class:`AgentInput` for ``seen``, and the actions; returns ``[*B, M, O + A]``
    """

    index: Tensor | None
    order: Tensor | None

    def __init__(
        self,
        seen: GroupSpec,
        group: GroupSpec,
        actions: ActionFeatures,
        norm: ObservationNorm | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        self.agents, self.actions = AgentInput(seen, norm, device), actions
        place = _places(seen, group)
        everyone = place == list(range(group.n_agents))
        self.register_buffer(
            "index", None if everyone else torch.tensor(place, device=device), persistent=False
        )
        widths = [0 if i < 0 else actions.widths[i] for i in place]
        order = _own_first(seen.observation_dims, widths, max(actions.widths))
        order = None if order is None else order.to(device)
        self.register_buffer("order", order, persistent=False)

    def forward(self, *inputs: Tensor) -> Tensor:
        """Puts them side by side."""
        *observed, action = inputs
        features, mask = self.agents(*observed)
        if self.index is None:
            done = self.actions(action, mask)
        else:
            done = self.actions(action).index_select(-2, self.index.clamp_min(0))
            acts = (self.index >= 0) if mask is None else (self.index >= 0) & mask
            done = torch.where(acts.unsqueeze(-1), done, 0.0)
        both = torch.cat([features, done], -1)
        if self.order is None:
            return both
        return both.gather(-1, self.order.expand(*both.shape[:-1], -1))


class BesideState(nn.Module):
    """Puts all agents' actions behind the state, without their padding."""

    index: Tensor | None

    def __init__(self, group: GroupSpec, actions: ActionFeatures) -> None:
        super().__init__()
        assert group.state_spec is not None
        self.state, self.actions = StateInput(group.state_spec.ndim), actions
        most = max(actions.widths)
        index = [i * most + j for i, width in enumerate(actions.widths) for j in range(width)]
        device = None if actions.own is None else actions.own.device
        packed = None if actions.own is None else torch.tensor(index, device=device)
        self.register_buffer("index", packed, persistent=False)

    def forward(self, state: Tensor, action: Tensor, mask: Tensor | None = None) -> Tensor:
        """Returns ``[*B, S + A of all]``."""
        row = self.actions(action, mask).flatten(-2)
        row = row if self.index is None else row.index_select(-1, self.index)
        return torch.cat([self.state(state)[0], row], -1)


def _places(seen: GroupSpec, group: GroupSpec) -> list[int]:
    """Returns for each agent of ``seen`` its place in ``group``, or -1."""
    starts, start = {}, 0
    for one in group.groups:
        starts[one.name] = start
        start += one.n_agents
    return [
        starts[one.name] + i if one.name in starts else -1
        for one in seen.groups
        for i in range(one.n_agents)
    ]


def _own_first(observed: Sequence[int], acted: Sequence[int], most: int) -> Tensor | None:
    """Returns the order of features with each agent's own first, or None if they are already."""
    first = max(observed)
    if min(observed) == first and min(acted) == most:
        return None
    rows = []
    for own, actions in zip(observed, acted):
        columns = [*range(own), *range(first, first + actions)]
        rows.append(columns + [j for j in range(first + most) if j not in columns])
    width = max(own + actions for own, actions in zip(observed, acted))
    return torch.tensor(rows)[:, :width]
