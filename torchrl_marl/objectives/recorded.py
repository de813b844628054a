"""Recorded actions, as a policy's distribution can read them."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from torchrl_marl.specs import GroupSpec

__all__ = ["RecordedActions"]

_BOUND_MARGIN = 0.005


class RecordedActions(nn.Module):
    """Prepares recorded actions for their log-probability.

    A squashed normal gives the bounds of its actions probability 0. Bounded actions are therefore
    moved inwards, by 0.5 % of their range at most. One-hot actions become numbers. The choices of
    hybrid actions stay as they are.

    Args:
        group (GroupSpec): group that acts.
        device (torch.device): device of the actions.
        noise (float): standard deviation of the noise that is added to continuous actions, relative
            to half their range; for unbounded ones, in their units.

    Shapes:
        - action: ``[*B, N, A]``, ``[*B, N]`` or one-hot; returns the same

    Examples:
        >>> from torchrl.data import Bounded, Unbounded
        >>> from torchrl_marl import AgentSpec, TeamSpec
        >>> team = TeamSpec([AgentSpec("car", 2, Unbounded((4,)), Bounded(-1, 1, (1,)))])
        >>> RecordedActions(team.groups["car"], torch.device("cpu"))(torch.tensor([[1.0], [0.2]]))
        tensor([[0.9900],
                [0.2000]])
    """

    low: Tensor | None
    high: Tensor

    def __init__(self, group: GroupSpec, device: torch.device, noise: float = 0.0) -> None:
        super().__init__()
        self.noise, self.n_choices = noise, len(group.branches)
        within: tuple[Tensor | None, Tensor | None] = (None, None)
        if not (group.discrete or group.action_bounds is None):
            low, high = (bound.to(device) for bound in group.action_bounds)
            margin = _BOUND_MARGIN * (high - low)
            within = (low + margin, high - margin)
        for name, value in zip(("low", "high"), within):
            self.register_buffer(name, value, persistent=False)

    def forward(self, action: Tensor) -> Tensor:
        """Returns the prepared actions."""
        if not action.is_floating_point():
            return action.long()
        if self.n_choices:
            choice, numbers = action[..., : self.n_choices], action[..., self.n_choices :]
            return torch.cat([choice, self._move_inside_bounds(numbers)], -1)
        return self._move_inside_bounds(action)

    def _move_inside_bounds(self, action: Tensor) -> Tensor:
        if self.noise:
            half = 1.0 if self.low is None else (self.high - self.low) / 2
            action = action + self.noise * half * torch.randn_like(action)
        if self.low is None:
            return action
        return torch.minimum(torch.maximum(action, self.low), self.high)
