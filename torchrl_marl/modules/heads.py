"""Heads: what follows a body in actors and critics.

Shapes: B any batch dims, N agents, M agents that a critic sees.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import torch
from torch import Tensor, nn

from torchrl_marl.modules.normalization import ValueNorm
from torchrl_marl.specs import GroupSpec
from torchrl_marl.specs.checks import check_action_mask

__all__ = ["AgentValues", "Denormalize", "LegalLogits", "PickAgents"]


class Denormalize(nn.Module):
    """Ends a critic: from normalized returns to reward units."""

    def __init__(self, value_norm: ValueNorm) -> None:
        super().__init__()
        self.value_norm = value_norm

    def forward(self, value: Tensor) -> Tensor:
        """Applies the affine of the statistics."""
        return self.value_norm.denormalize(value)


class AgentValues(nn.Module):
    """Picks a value for every agent from the outputs of one network, or of several.

    Args:
        index (sequence of int): the output that is each agent's, numbered through.
        several (bool): there is a dim of networks before that of outputs.
        n_outputs (int): how many there are.
        device (torch.device, optional): of the indices.
        width (int): numbers W of each of them, side by side; a value is one.

    Shapes:
        - values: ``[*B, n_outputs * W]``; returns ``[*B, N, W]``
    """

    index: Tensor | None

    def __init__(
        self,
        index: Sequence[int],
        several: bool,
        n_outputs: int,
        device: torch.device | str | None,
        width: int = 1,
    ) -> None:
        super().__init__()
        self.several, self.width = several, width
        plain = list(index) == list(range(n_outputs))
        chosen = None if plain else torch.tensor(index, device=device)
        self.register_buffer("index", chosen, persistent=False)

    def forward(self, values: Tensor) -> Tensor:
        values = values.flatten(-2) if self.several else values
        if self.width > 1:
            values = values.unflatten(-1, (-1, self.width))
            return values if self.index is None else values.index_select(-2, self.index)
        values = values if self.index is None else values.index_select(-1, self.index)
        return values.unsqueeze(-1)


class PickAgents(nn.Module):
    """Picks the agents whose values are wanted, and of each the output that is its value.

    Args:
        agents (sequence of int): whose values, of M agents.
        outputs (sequence of int): which of K outputs is the value of each of them.
        n_seen (int): number M of agents that have outputs.
        device (torch.device, optional): of the indices.

    Shapes:
        - values: ``[*B, M, K]``; returns ``[*B, N, 1]``
    """

    agents: Tensor | None
    output: Tensor | None

    def __init__(
        self,
        agents: Sequence[int],
        outputs: Sequence[int],
        n_seen: int,
        device: torch.device | str | None,
    ) -> None:
        super().__init__()
        everyone = list(agents) == list(range(n_seen))
        index = None if everyone else torch.tensor(agents, device=device)
        self.register_buffer("agents", index, persistent=False)
        several = len(set(outputs)) > 1
        output = torch.tensor(outputs, device=device).unsqueeze(-1) if several else None
        self.register_buffer("output", output, persistent=False)

    def forward(self, values: Tensor) -> Tensor:
        if self.agents is not None:
            values = values.index_select(-2, self.agents)
        if self.output is not None:
            values = values.gather(-1, self.output.expand(*values.shape[:-1], 1))
        return values


class LegalLogits(nn.Module):
    """Takes the probability of illegal actions away, unless none is legal.

    Args:
        group (GroupSpec): whose actions; padding is never legal.
        device (torch.device, optional): of the logits.

    Shapes:
        - logits: ``[*B, N, n_actions]``; action_mask: the same, bool

    Raises:
        SpecError: an action mask of another shape or type.
    """

    own: Tensor | None

    def __init__(self, group: GroupSpec, device: torch.device | str | None = None) -> None:
        super().__init__()
        self.group = group
        own = group.action_padding
        own = None if own is None else own.to(device)
        self.register_buffer("own", own, persistent=False)

    def forward(self, logits: Tensor, action_mask: Tensor | None = None) -> Tensor:
        """Lowers illegal logits to the least finite number."""
        if action_mask is None:
            legal = cast(Tensor, self.own)
        else:
            check_action_mask(self.group, action_mask, logits.shape[:-2])
            own = action_mask if self.own is None else action_mask & self.own
            legal = own | ~own.any(-1, keepdim=True)
            legal = legal if self.own is None else legal & self.own
        return torch.where(legal, logits, torch.finfo(logits.dtype).min)
