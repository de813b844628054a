"""A network in parts: an encoder, a memory and a head.

Shapes: B any batch dims, N agents, I input features, O output features.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from torchrl_marl.errors import ConfigError
from torchrl_marl.modules.bodies import Context, Feedforward, make_mlp
from torchrl_marl.modules.config import NetworkConfig, RecurrentNetworkConfig, sharing_of
from torchrl_marl.modules.inputs import Features
from torchrl_marl.modules.memory.cells import Memory
from torchrl_marl.modules.memory.network import cell_index, make_memory, remember
from torchrl_marl.modules.sharing.builder import share

__all__ = ["TeamNetwork", "encoder_maker", "make_team_network", "sharing_of_encoder"]


class TeamNetwork(nn.Module):
    """A body with memory: encodes what agents see, remembers, and gives what the head makes of it.

    In TorchRL's recurrent mode (``torchrl.modules.set_recurrent_mode``) the last batch dim is time.

    Args:
        encoder (nn.Module): a body without memory.
        memory (Memory): reads the encodings.
        head (nn.Module): a body without memory; the last layer.
        norm (nn.Module, optional): of what the memory gives.

    Shapes:
        - features: ``[*B, N, I]``, or ``[*B, I]`` where all are seen at once; mask: ``[*B, N]``
        - context.state: ``[*B, N, S]``; context.is_init: ``[*B, N, 1]``
        - returns: ``[*B, N, O]`` and the state after each step, ``[*B, N, S]``
    """

    def __init__(
        self,
        encoder: nn.Module,
        memory: Memory,
        head: nn.Module,
        norm: nn.Module | None = None,
    ) -> None:
        super().__init__()
        self.encoder, self.memory, self.head = encoder, memory, head
        self.norm = norm

    def forward(
        self, features: Tensor, mask: Tensor | None, context: Context
    ) -> tuple[Tensor, Tensor]:
        """Runs the parts."""
        assert context.is_init is not None
        encoded, _ = self.encoder(features, mask, context)
        output, state = remember(self.memory, encoded, context.state, context.is_init, mask)
        output = output if self.norm is None else self.norm(output)
        return self.head(output, mask, context)[0], state


def make_team_network(
    encoder: nn.Module,
    out_features: int,
    kinds: Sequence[int],
    config: RecurrentNetworkConfig,
    *,
    gain: float,
    device: torch.device | str | None = None,
) -> TeamNetwork:
    """Builds memory and head behind an encoder, shared as the settings say.

    Args:
        encoder (nn.Module): a body whose outputs are as wide as the last hidden layer.
        out_features (int): outputs for one agent.
        kinds (sequence of int): group and kind of each agent.
        config (RecurrentNetworkConfig): memory, sharing.
        gain (float): scale of the last layer's orthogonal start.
        device (torch.device, optional): of the parameters.
    """
    memory = make_memory(config.num_cells[-1], config.memory, cell_index(config, kinds), device)
    plain = replace(config, num_cells=[], layer_norm=False, body="mlp", channels=None)
    # Behind one memory for all stands one layer for all, or a layer for each.
    as_one = {"trunk": "none", "agent_id": "full"}.get(sharing_of(config), sharing_of(config))
    n = len(kinds)
    head = share(
        make_mlp,
        [Features(memory.out_features)] * n,
        [out_features] * n,
        kinds,
        replace(plain, sharing=as_one, share_params=None),
        gain=gain,
        device=device,
    )
    norm = None
    if config.layer_norm:
        norm = nn.LayerNorm(memory.out_features, elementwise_affine=False)
    return TeamNetwork(encoder, memory, Feedforward(*head), norm)


def encoder_maker(make: Callable[..., nn.Module]) -> Callable[..., nn.Module]:
    """Returns a maker of networks that end in their last hidden layer.

    Args:
        make (callable): of whole networks, as :func:`~torchrl_marl.modules.bodies.make_mlp`.
    """

    def encoder(
        inputs: Features, out_features: int, config: NetworkConfig, **settings: Any
    ) -> nn.Module:
        settings = {"num_cells": config.num_cells[:-1], "activate_last_layer": True, **settings}
        return make(inputs, out_features, config, **{**settings, "gain": 2**0.5})

    return encoder


def sharing_of_encoder(config: NetworkConfig) -> NetworkConfig:
    """Returns the settings of an encoder: a trunk is one for all.

    Raises:
        ConfigError: a way of sharing that has no memory.
    """
    if sharing_of(config) == "trunk":
        return replace(config, sharing="full", share_params=None)
    if sharing_of(config) == "masks":
        raise ConfigError(
            "sharing is 'masks', which has no memory; use sharing=group, or memory=none."
        )
    return config
