"""Layers of networks that agents share: what an agent has of one, and who an agent is.

Shapes: B any batch dims, N agents, F features, D features of who an agent is.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

__all__ = ["AgentId", "AgentMask"]


class AgentMask(nn.Module):
    """Replaces features that an agent does not have, NaN included, by 0.

    Args:
        mask (Tensor): True for features that it has.
        persistent (bool): the mask belongs to the ``state_dict``.

    Shapes:
        - mask: ``[N, F]``; features: ``[*B, N, F]``; returns ``[*B, N, F]``
    """

    mask: Tensor

    def __init__(self, mask: Tensor, persistent: bool = False) -> None:
        super().__init__()
        self.register_buffer("mask", mask, persistent=persistent)

    def forward(self, features: Tensor) -> Tensor:
        """Replaces the others."""
        return torch.where(self.mask, features, 0.0)


class AgentId(nn.Module):
    """Appends who an agent is to its features.

    Args:
        agent_id (Tensor): a parameter if it is learned.

    Shapes:
        - agent_id: ``[N, D]``; features: ``[*B, N, F]``; returns ``[*B, N, F + D]``
    """

    agent_id: Tensor

    def __init__(self, agent_id: Tensor) -> None:
        super().__init__()
        if isinstance(agent_id, nn.Parameter):
            self.agent_id = agent_id
        else:
            self.register_buffer("agent_id", agent_id, persistent=False)

    def forward(self, features: Tensor) -> Tensor:
        """Puts them side by side."""
        return torch.cat([features, self.agent_id.expand(*features.shape[:-1], -1)], -1)
