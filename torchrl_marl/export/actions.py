"""What an agent does of what its network gives, and the parameters of its distribution.

Shapes: A own action features, or own discrete actions; P features of the network's outputs.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

__all__ = ["Best", "Bounded"]


class Best(nn.Module):
    """Chooses the likeliest legal action, or the one of the highest value.

    Args:
        n_actions (int): the agent's own number A.
        dtype (torch.dtype): of actions.
        one_hot (bool): actions are one-hot.
        dueling (bool): the first output is what all values have in common.
        values (bool): the parameters are values, of illegal actions, too.

    Shapes:
        - outputs: ``[P]``; action_mask: bool ``[A]``
        - returns: the action, ``[]`` or ``[A]``, and the logits or values, ``[A]``

    Examples:
        >>> legal = torch.tensor([True, True, False])
        >>> Best(3, torch.int64)(torch.tensor([0.0, 1.0, 2.0]), legal)[0]
        tensor(1)
    """

    def __init__(
        self,
        n_actions: int,
        dtype: torch.dtype,
        one_hot: bool = False,
        dueling: bool = False,
        values: bool = False,
    ) -> None:
        super().__init__()
        self.n_actions, self.dtype, self.one_hot = n_actions, dtype, one_hot
        self.dueling, self.values = dueling, values

    def forward(self, outputs: Tensor, action_mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Chooses."""
        if self.dueling:
            common, advantage = outputs[:1], outputs[1 : 1 + self.n_actions]
            outputs = common + advantage - advantage.mean(-1, keepdim=True)
        outputs = legal = outputs[: self.n_actions]
        if action_mask is not None:
            allowed = action_mask | ~action_mask.any(-1, keepdim=True)
            legal = torch.where(allowed, outputs, torch.finfo(outputs.dtype).min)
        best = legal.argmax(-1)
        action = F.one_hot(best, self.n_actions) if self.one_hot else best
        return action.to(self.dtype), outputs if self.values else legal


class Bounded(nn.Module):
    """Brings outputs into the bounds of actions, by tanh; where there are none, as they are.

    Args:
        n_features (int): the agent's own number A.
        bounds (tuple of Tensor, optional): low and high.
        head (nn.Module, optional): makes location and scale of the outputs; without it they are
            the location.

    Shapes:
        - outputs: ``[P]``; low, high: ``[A]``
        - returns: the action, and location (and scale), each ``[A]``

    Examples:
        >>> Bounded(1, (torch.zeros(1), torch.full((1,), 4.0)))(torch.zeros(1))
        (tensor([2.]), tensor([0.]))
    """

    middle: Tensor | None
    half_range: Tensor  # where there is a middle

    def __init__(
        self,
        n_features: int,
        bounds: tuple[Tensor, Tensor] | None = None,
        head: nn.Module | None = None,
    ) -> None:
        super().__init__()
        self.n_features, self.head = n_features, head
        middle = None if bounds is None else (bounds[0] + bounds[1]) / 2
        half = None if bounds is None else (bounds[1] - bounds[0]) / 2
        self.register_buffer("middle", middle)
        self.register_buffer("half_range", half)

    def forward(self, outputs: Tensor) -> tuple[Tensor, ...]:
        """Squashes the location."""
        parts = (outputs,) if self.head is None else self.head(outputs)
        parameters = tuple(part[: self.n_features] for part in parts)
        action = loc = parameters[0]
        if self.middle is not None:
            action = self.middle + self.half_range * loc.tanh()
        return (action, *parameters)
