"""Builds networks of agents from their settings: bodies, memory, communication, sharing."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from tensordict import NestedKey
from torch import Tensor, nn
from torch.types import Device

from torchrl_marl.errors import ConfigError
from torchrl_marl.modules.bodies import make_mlp
from torchrl_marl.modules.config import (
    NetworkConfig,
    communicates,
    has_memory,
    sharing_of,
)
from torchrl_marl.modules.inputs import Features, agent_features, widest
from torchrl_marl.modules.networks import Feedforward, TeamNetwork, places_of
from torchrl_marl.modules.registry import body_of
from torchrl_marl.modules.sharing.builder import share
from torchrl_marl.specs import GroupSpec

__all__ = [
    "encoder_maker",
    "extra_keys",
    "feedforward",
    "has_parts",
    "kinds_of",
    "links_of",
    "make_agent_network",
    "make_team_network",
    "sharing_of_encoder",
]


def make_team_network(
    encoder: nn.Module,
    out_features: int,
    kinds: Sequence[int],
    config: NetworkConfig,
    *,
    gain: float,
    device: Device = None,
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
        from torchrl_marl.modules.memory.cells import cell_index, make_memory

        own: Any = config
        memory = make_memory(width, own.memory, cell_index(config, kinds), device)
        if config.layer_norm:
            norm = nn.LayerNorm(memory.out_features, elementwise_affine=False)
    remembered = width if memory is None else memory.out_features
    talk_first = config.communication.order == "before"
    # Behind one memory for all stands one layer for all, or a layer for each.
    as_one = {"trunk": "none", "agent_id": "full"}.get(sharing_of(config), sharing_of(config))
    last = NetworkConfig([], config.activation, sharing=as_one, sharing_index=config.sharing_index)
    inputs, outputs = [Features(remembered)] * n, [out_features] * n
    head = share(make_mlp, inputs, outputs, kinds, last, gain=gain, device=device)
    if communicates(config):
        from torchrl_marl.modules.communication.channel import Channel

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


def make_agent_network(
    group: GroupSpec,
    out_features: int,
    config: NetworkConfig,
    *,
    gain: float,
    standardized: bool = False,
    device: Device = None,
) -> nn.Module:
    """Builds a body with outputs for every agent, ``[*B, N, O] -> [*B, N, out]``.

    Args:
        group (GroupSpec): the agents, their features and kinds.
        out_features (int): outputs for one agent.
        config (NetworkConfig): body, widths, activation, sharing.
        gain (float): scale of the last layer's orthogonal start.
        standardized (bool): observations are standardized before.
        device (torch.device, optional): of the parameters.

    Raises:
        ConfigError: a body or a way of sharing that is unknown or does not fit the group.
    """
    body = body_of(config)
    if body.make_body is not None:
        return body.make_body(group, out_features, config, gain=gain, device=device)
    make, inputs = body.make_network, agent_features(group, standardized)
    assert make is not None
    kinds, shared = kinds_of(group), sharing_of(config)
    if has_memory(config) or communicates(config):
        check_channel(group, config)
        width, own = config.num_cells[-1], sharing_of_encoder(config)
        settings: dict = {"gain": gain, "device": device}
        rows = [width] * group.n_agents
        encoder = feedforward(share(encoder_maker(make), inputs, rows, kinds, own, **settings))
        return make_team_network(encoder, out_features, kinds, config, **settings)
    one = shared == "full" or shared == "group" and len(set(kinds)) == 1
    if one and len({own.width for own in inputs}) == 1:
        return feedforward(make(widest(inputs), out_features, config, gain=gain, device=device))
    outputs = [out_features] * group.n_agents
    return feedforward(share(make, inputs, outputs, kinds, config, gain=gain, device=device))


def extra_keys(
    network: nn.Module, group: GroupSpec, state: str = "hidden"
) -> tuple[list[NestedKey], list[NestedKey]]:
    """Returns what a network reads and writes beside observations, mask and outputs.

    Args:
        network (nn.Module): of agents.
        group (GroupSpec): whose.
        state (str): leaf of what it remembers: ``hidden`` of an actor, ``critic_hidden`` of a
            critic.
    """
    reads: Sequence[str] = getattr(network, "reads", ())
    writes: Sequence[str] = getattr(network, "writes", ())
    leaf = {"state": state}
    after: dict[str, NestedKey] = {"state": ("next", group.name, state)}
    read = [group.key(leaf.get(name, name)) for name in reads]
    return read, [after.get(name, group.key(name)) for name in writes]


def feedforward(network: nn.Module) -> Feedforward:
    """Returns a network of features as a body; the names of its parameters stay."""
    return Feedforward(*network) if isinstance(network, nn.Sequential) else Feedforward(network)


def kinds_of(group: GroupSpec) -> tuple[int, ...]:
    """Returns the kind of each agent."""
    return group.kinds or (0,) * group.n_agents


def check_channel(group: GroupSpec, config: NetworkConfig) -> None:
    """Refuses communication that a group cannot have.

    Raises:
        ConfigError: one agent, groups in a chain that do not hear each other, or positions that
            are not observed.
    """
    own = config.communication
    if not communicates(config):
        return
    needed, seen, fault = max(places_of(own), default=-1), min(group.observation_dims), ""
    if group.n_agents == 1:
        fault = (
            f"communication.kind is {own.kind!r}, but it has one agent, who has nobody to hear; "
            "use communication=none."
        )
    elif own.kind == "bicnet" and len(group.groups) > 1 and not own.across_groups:
        fault = (
            "its groups do not hear each other, but bicnet goes through all agents; use "
            "communication.across_groups=true, or communication=commnet."
        )
    elif own.links == "env" and len(group.groups) > 1:
        fault = (
            "links of an environment are those within a group; use communication.links=all, or "
            "communication.across_groups=false."
        )
    elif needed >= seen:
        fault = (
            f"communication.position names column {needed}, but an agent observes {seen} numbers, "
            f"0 to {seen - 1}; give the columns of its place."
        )
    if fault:
        raise ConfigError(f"group {group.name!r}: {fault}")


def links_of(group: GroupSpec, config: NetworkConfig, device: Device = None) -> Tensor | None:
    """Returns which agents are of one group, ``[N, N]``, for a body over all agents.

    None where all may hear all, and for networks of single agents.
    """
    if len(group.groups) == 1 or config.communication.across_groups:
        return None
    if body_of(config).make_body is None and not communicates(config):
        return None
    owner = torch.tensor(group.group_index, device=device)
    return owner.unsqueeze(-1) == owner
