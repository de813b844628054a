"""Bodies: the networks between what goes in and the heads.

Shapes: B any batch dims, I input features, O output features.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torchrl.modules import MLP

from torchrl_marl.modules.config import NetworkConfig

__all__ = ["ACTIVATIONS", "initialize", "make_mlp"]

ACTIVATIONS: dict[str, type[nn.Module]] = {
    "tanh": nn.Tanh,
    "relu": nn.ReLU,
    "elu": nn.ELU,
    "gelu": nn.GELU,
    "silu": nn.SiLU,
}


def make_mlp(
    in_features: int,
    out_features: int,
    config: NetworkConfig,
    *,
    gain: float,
    num_cells: Sequence[int] | None = None,
    device: torch.device | str | None = None,
    **kwargs: Any,
) -> MLP:
    """Builds a multi-layer perceptron, ``[*B, I] -> [*B, O]``.

    Args:
        in_features (int): inputs I.
        out_features (int): outputs O.
        config (NetworkConfig): widths and activation.
        gain (float): scale of the last layer's orthogonal start; hidden layers have sqrt(2).
        num_cells (sequence of int, optional): widths of hidden layers other than the config's.
        device (torch.device, optional): of the parameters.
        **kwargs: of :class:`torchrl.modules.MLP`.

    Examples:
        >>> make_mlp(3, 2, NetworkConfig([8]), gain=1.0)(torch.zeros(5, 3)).shape
        torch.Size([5, 2])
    """
    network = MLP(
        in_features=in_features,
        out_features=out_features,
        num_cells=list(config.num_cells if num_cells is None else num_cells),
        activation_class=ACTIVATIONS[config.activation],
        device=device,
        **kwargs,
    )
    initialize(network, gain)
    return network


@torch.no_grad()
def initialize(network: nn.Module, gain: float) -> None:
    """Draws orthogonal weights, each of stacked ones, the last scaled by ``gain``; biases are 0."""
    weights = []
    for name, parameter in network.named_parameters():
        if name.endswith("bias"):
            parameter.zero_()
        else:
            weights.append(parameter)
    for weight in weights:
        scale = gain if weight is weights[-1] else math.sqrt(2.0)
        for member in weight if weight.ndim == 3 else [weight]:
            nn.init.orthogonal_(member, scale)
