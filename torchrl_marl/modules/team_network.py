"""A network in parts: an encoder, communication, memory and a head.

Shapes: B any batch dims, N agents, I input features, O output features.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from torchrl_marl.errors import ConfigError
from torchrl_marl.modules.bodies import Context, Feedforward, make_mlp
from torchrl_marl.modules.communication.channel import Channel
from torchrl_marl.modules.communication_config import CommunicationConfig, communicates
from torchrl_marl.modules.config import NetworkConfig, has_memory, sharing_of
from torchrl_marl.modules.inputs import Features
from torchrl_marl.modules.memory.cells import Memory
from torchrl_marl.modules.memory.network import cell_index, make_memory, remember
from torchrl_marl.modules.sharing.builder import share

__all__ = [
    "Extras",
    "TeamNetwork",
    "encoder_maker",
    "has_parts",
    "make_team_network",
    "sharing_of_encoder",
]


class Extras(NamedTuple):
    """What a network gives beside its outputs.

    Args:
        state (Tensor, optional): what agents remember then, ``[*B, N, S]``.
        drawn (Tensor, optional): what was drawn in the channel, ``[*B, N, D]``.
        gate (Tensor, optional): logits of who speaks, ``[*B, N, 1]``.
    """

    state: Tensor | None = None
    drawn: Tensor | None = None
    gate: Tensor | None = None


class TeamNetwork(nn.Module):
    """A body in parts: encodes what agents see, lets them talk, remembers, and reads the rest.

    In TorchRL's recurrent mode (``torchrl.modules.set_recurrent_mode``) the last batch dim is time.

    Args:
        encoder (nn.Module): a body without memory.
        head (nn.Module): a body without memory; the last layer.
        channel (Channel, optional): between the agents.
        memory (Memory, optional): of each agent.
        norm (nn.Module, optional): of what the memory gives.
        talk_first (bool): agents communicate before they remember, and not after it.

    Shapes:
        - features: ``[*B, N, I]``, or ``[*B, I]`` where all are seen at once; mask: ``[*B, N]``
        - context.state: ``[*B, N, S]``; context.is_init: ``[*B, N, 1]``
        - returns: ``[*B, N, O]`` and :class:`Extras`
    """

    def __init__(
        self,
        encoder: nn.Module,
        head: nn.Module,
        *,
        channel: Channel | None = None,
        memory: Memory | None = None,
        norm: nn.Module | None = None,
        talk_first: bool = True,
    ) -> None:
        super().__init__()
        self.encoder, self.memory, self.head = encoder, memory, head
        self.channel, self.norm = channel, norm
        self.talk_first = talk_first

    def forward(
        self, features: Tensor, mask: Tensor | None, context: Context
    ) -> tuple[Tensor, Extras]:
        """Runs the parts."""
        x, _ = self.encoder(features, mask, context)
        state = words = drawn = gate = None
        if self.talk_first and self.channel is not None:
            x, drawn, gate, words = self.channel(x, mask, self._part(context, 1))
        if self.memory is not None:
            own = self._part(context, 0)
            assert own.is_init is not None
            x, state = remember(self.memory, x, own.state, own.is_init, mask)
            x = x if self.norm is None else self.norm(x)
        if not self.talk_first and self.channel is not None:
            x, drawn, gate, words = self.channel(x, mask, self._part(context, 1))
        states = [after for after in (state, words) if after is not None]
        state = torch.cat(states, -1) if len(states) == 2 else next(iter(states), None)
        return self.head(x, mask, context)[0], Extras(state, drawn, gate)

    @property
    def memories(self) -> list[Memory]:
        """What carries something from step to step; its states stand side by side."""
        delay = None if self.channel is None else self.channel.delay
        return [part for part in (self.memory, delay) if part is not None]

    def _part(self, context: Context, part: int) -> Context:
        """Returns a context with the state of the memory (0), or of the channel (1), alone."""
        sizes = [memory.state_size for memory in self.memories]
        if len(sizes) < 2 or context.state is None:
            return context
        return replace(context, state=context.state.split(sizes, -1)[part])


def make_team_network(
    encoder: nn.Module,
    out_features: int,
    kinds: Sequence[int],
    config: NetworkConfig,
    *,
    gain: float,
    device: torch.device | str | None = None,
) -> TeamNetwork:
    """Builds channel, memory and head behind an encoder, shared as the settings say.

    Args:
        encoder (nn.Module): a body whose outputs are as wide as the last hidden layer.
        out_features (int): outputs for one agent.
        kinds (sequence of int): group and kind of each agent.
        config (NetworkConfig): communication, memory, sharing.
        gain (float): scale of the last layer's orthogonal start.
        device (torch.device, optional): of the parameters.
    """
    n, width = len(kinds), config.num_cells[-1]
    memory = norm = channel = None
    if has_memory(config):
        own: Any = config
        memory = make_memory(width, own.memory, cell_index(config, kinds), device)
        if config.layer_norm:
            norm = nn.LayerNorm(memory.out_features, elementwise_affine=False)
    remembered = width if memory is None else memory.out_features
    talk_first = config.communication.order == "before"
    plain = replace(
        config,
        num_cells=[],
        layer_norm=False,
        body="mlp",
        channels=None,
        communication=CommunicationConfig(),
    )
    # Behind one memory for all stands one layer for all, or a layer for each.
    as_one = {"trunk": "none", "agent_id": "full"}.get(sharing_of(config), sharing_of(config))
    head = share(
        make_mlp,
        [Features(remembered)] * n,
        [out_features] * n,
        kinds,
        replace(plain, sharing=as_one, share_params=None),
        gain=gain,
        device=device,
    )
    if communicates(config):
        heard = width if talk_first else remembered
        channel = Channel(heard, config.communication, n, device)
    parts: dict[str, Any] = {"channel": channel, "memory": memory, "norm": norm}
    return TeamNetwork(encoder, Feedforward(*head), **parts, talk_first=talk_first)


def has_parts(config: NetworkConfig) -> bool:
    """Returns whether a network has a channel or a memory, between hidden layers and the last.

    Examples:
        >>> has_parts(NetworkConfig())
        False
    """
    return has_memory(config) or communicates(config)


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
            "sharing is 'masks', which has no memory and no communication; use sharing=group, or "
            "memory=none and communication=none."
        )
    return config
