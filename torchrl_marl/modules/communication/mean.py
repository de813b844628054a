"""CommNet: everybody hears the mean of what is said.

Shapes: B any batch dims, N agents that listen, M that speak, H features, K numbers of a message.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from torchrl_marl.modules.bodies import initialize
from torchrl_marl.modules.communication.rounds import Round

__all__ = ["Mean"]


class Mean(Round):
    r"""Reads the mean of what the linked agents say.

    .. math::
        m_j = S h_j, \qquad
        h_i' = \tanh\Big(h_i + W h_i + b + R \tfrac{1}{|L_i|} \sum_{j \in L_i} m_j\Big)

    The order of agents does not matter.

    Args:
        width (int): features H.
        message_size (int): numbers K of a message.
        device (torch.device, optional): of the parameters.

    Shapes:
        - as :class:`~torchrl_marl.modules.communication.rounds.Round`

    Reference: Sukhbaatar et al., 2016, https://arxiv.org/abs/1605.07736, equations 2 and 3; with
    K = H, their matrix C is :math:`R S`. The mean is over those who are heard, so that it does not
    shrink where some are silent.

    Reduces to: a layer of the agent's own where nobody is heard.

    Examples:
        >>> from torchrl_marl.modules.communication.links import between
        >>> alive = torch.tensor([True, True, False])
        >>> Mean(8, 4)(torch.zeros(5, 3, 8), between(alive).expand(5, 3, 3), alive).shape
        torch.Size([5, 3, 8])
    """

    def __init__(
        self, width: int, message_size: int, device: torch.device | str | None = None
    ) -> None:
        super().__init__()
        self.message_size = self.heard_size = message_size
        self.own = nn.Linear(width, width, device=device)
        self.message = nn.Linear(width, message_size, bias=False, device=device)
        self.heard = nn.Linear(message_size, width, bias=False, device=device)
        for layer in self.children():
            initialize(layer, 1.0)

    def send(self, features: Tensor, position: Tensor | None = None) -> Tensor:
        """Returns what agents say, ``[*B, N, K]``."""
        return self.message(features)

    def mix(
        self, features: Tensor, inbox: Tensor, heard: Tensor, position: Tensor | None = None
    ) -> Tensor:
        """Returns the mean of what is heard, ``[*B, N, K]``."""
        weight = heard.to(inbox.dtype)
        return weight @ inbox / weight.sum(-1, keepdim=True).clamp_min(1)

    def take_in(self, features: Tensor, words: Tensor) -> Tensor:
        """Returns what agents make of what they hear, ``[*B, N, H]``."""
        return torch.tanh(features + self.own(features) + self.heard(words))
