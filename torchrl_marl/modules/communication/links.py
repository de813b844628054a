"""Links: who hears whom.

Shapes: B any batch dims, N agents, P columns of a position.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from torchrl_marl.modules.communication_config import CommunicationConfig

__all__ = ["Links", "between", "nearest", "ring", "within"]


def between(alive: Tensor) -> Tensor:
    """Returns the links between the living; nobody hears itself.

    Shapes:
        - alive: ``[*B, N]``, bool; returns ``[*B, N, N]``, True where the agent of a row hears
          the agent of a column

    Examples:
        >>> between(torch.tensor([True, True, False])).int()
        tensor([[0, 1, 0],
                [1, 0, 0],
                [0, 0, 0]], dtype=torch.int32)
    """
    others = ~torch.eye(alive.shape[-1], dtype=torch.bool, device=alive.device)
    return alive.unsqueeze(-1) & alive.unsqueeze(-2) & others


def ring(n_agents: int, device: torch.device | str | None = None) -> Tensor:
    """Returns the links of a ring, ``[N, N]``: to the agent before and to the one behind.

    Examples:
        >>> ring(4)[0].tolist()
        [False, True, False, True]
    """
    agent = torch.arange(n_agents, device=device)
    apart = (agent.unsqueeze(-1) - agent) % n_agents
    return (apart == 1 % n_agents) | (apart == (n_agents - 1) % n_agents)


def within(position: Tensor, radius: float) -> Tensor:
    """Returns who is at most so far away.

    Shapes:
        - position: ``[*B, N, P]``; returns ``[*B, N, N]``

    Examples:
        >>> within(torch.tensor([[0.0, 0.0], [3.0, 4.0], [9.0, 9.0]]), 5.0)[0].tolist()
        [True, True, False]
    """
    return _squared_distance(position) <= radius**2


def nearest(position: Tensor, count: int, alive: Tensor) -> Tensor:
    """Returns the nearest living ones; of two equally near the first.

    Shapes:
        - position: ``[*B, N, P]``; alive: ``[*B, N]``; returns ``[*B, N, N]``

    Examples:
        >>> position = torch.tensor([[0.0], [1.0], [5.0]])
        >>> nearest(position, 1, torch.tensor([True, False, True]))[0].tolist()
        [False, False, True]
    """
    linked = between(alive)
    distance = torch.where(linked, _squared_distance(position), torch.inf)
    rank = distance.argsort(dim=-1, stable=True).argsort(dim=-1)
    return (rank < count) & linked


def _squared_distance(position: Tensor) -> Tensor:
    return (position.unsqueeze(-2) - position.unsqueeze(-3)).square().sum(-1)


class Links(nn.Module):
    """Says who hears whom: the living, as far as the settings let them.

    Args:
        config (CommunicationConfig): who hears whom.
        n_agents (int): N.
        device (torch.device, optional): of the links.

    Shapes:
        - alive: ``[*B, N]``; position: ``[*B, N, P]``; given: ``[N, N]`` or ``[*B, N, N]``;
          returns ``[*B, N, N]``
    """

    fixed: Tensor | None

    def __init__(
        self,
        config: CommunicationConfig,
        n_agents: int,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        self.kind, self.radius, self.nearest = config.links, config.radius, config.nearest
        fixed = ring(n_agents, device) if config.links == "ring" else None
        self.register_buffer("fixed", fixed, persistent=False)

    def forward(self, alive: Tensor, position: Tensor | None, given: Tensor | None) -> Tensor:
        """Returns the links; those that are given are factors of them."""
        links = between(alive)
        if self.fixed is not None:
            links = links & self.fixed
        if given is not None:
            links = links & given
        if self.kind == "radius":
            assert position is not None and self.radius is not None
            links = links & within(position, self.radius)
        if self.kind == "nearest":
            assert position is not None
            links = links & nearest(position, self.nearest, alive)
        return links
