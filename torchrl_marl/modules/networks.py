"""Networks of actors and critics, of one agent each or of the team."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import torch
from tensordict import NestedKey
from torch import Tensor, nn
from torch.types import Device

from torchrl_marl.errors import ConfigError
from torchrl_marl.modules.bodies import Context, Feedforward, make_mlp
from torchrl_marl.modules.config import (
    CommunicationConfig,
    NetworkConfig,
    communicates,
    has_memory,
    sharing_of,
)
from torchrl_marl.modules.inputs import AgentInput, Features, agent_features, widest
from torchrl_marl.modules.registry import body_of
from torchrl_marl.modules.sharing.builder import share
from torchrl_marl.specs import GroupSpec

if TYPE_CHECKING:
    from torchrl_marl.modules.communication.channel import Channel
    from torchrl_marl.modules.memory.cells import Memory

__all__ = [
    "AgentNetwork",
    "Extras",
    "TeamNetwork",
    "channels_of",
    "encoder_maker",
    "extra_keys",
    "feedforward",
    "kinds_of",
    "links_of",
    "make_agent_network",
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
            from torchrl_marl.modules.memory.cells import remember

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


def channels_of(network: nn.Module) -> list[Channel]:
    """Returns the channels inside a network."""
    teams = [module for module in network.modules() if isinstance(module, TeamNetwork)]
    return [team.channel for team in teams if team.channel is not None]


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


class AgentNetwork(nn.Module):
    """Runs an input, a body and a head one after the other.

    Args:
        features (nn.Module): returns what the body reads, and the mask.
        network (nn.Module): the body, see :mod:`torchrl_marl.modules.bodies`.
        head (nn.Module, optional): what follows the body.
        pick (nn.Module, optional): takes some of the body's outputs before the head.
        links (Tensor, optional): ``[N, N]``, which agents may hear each other, for the body.

    Attributes:
        reads (tuple of str): leaves of the group that it reads behind observations and mask:
            ``links``, ``is_init`` and the state, ``channel``.
        writes (tuple of str): leaves that it gives behind the outputs: the state after the step,
            ``channel``, ``gate_logits``.
    """

    links: Tensor | None

    def __init__(
        self,
        features: nn.Module,
        network: nn.Module,
        head: nn.Module | None = None,
        *,
        pick: nn.Module | None = None,
        links: Tensor | None = None,
    ) -> None:
        super().__init__()
        self.features = features
        self.network: nn.Module = network
        self.pick = pick
        self.head = head
        self.precision = "float32"
        channel = network.channel if isinstance(network, TeamNetwork) else None
        self.remembers = isinstance(network, TeamNetwork) and bool(network.memories)
        self.hears = channel is not None and channel.config.links == "env"
        self.draws = 0 if channel is None else channel.draws
        self.position = [] if channel is None else places_of(channel.config)
        self.gated = channel is not None and channel.gate is not None
        drawn = ("channel",) if self.draws else ()
        remembered = ("is_init", "state") if self.remembers else ()
        self.reads = (*("links",) * self.hears, *remembered, *drawn)
        self.writes = (*remembered[1:], *drawn, *("gate_logits",) * self.gated)
        self.register_buffer("links", links, persistent=False)

    def forward(self, *inputs: Tensor) -> Tensor | tuple[Tensor, ...]:
        """Runs them."""
        n = len(inputs) - len(self.reads)
        given = dict(zip(self.reads, inputs[n:]))
        features, mask = self.features(*inputs[:n])
        context = self._context(given, inputs[:n])
        output, extras = self._body()(features, mask, context)
        output = output if self.pick is None else self.pick(output)
        output = output if self.head is None else self.head(output)
        if not self.writes:
            return output
        outputs = output if isinstance(output, tuple) else (output,)
        return *outputs, *(extra for extra in extras if extra is not None)

    def _body(self) -> Callable[..., tuple[Tensor, Extras]]:
        if self.precision != "bf16":
            return self.network
        from torchrl_marl.modules.precision import in_bfloat16

        return in_bfloat16(self.network)

    def heard(self, *inputs: Tensor) -> Tensor:
        """Returns who heard whom, ``[*B, N, N]``: True where the agent of a row heard that of a
        column."""
        n = len(inputs) - len(self.reads)
        seen = inputs[:n]
        agents = cast(AgentInput, self.features)
        mask = seen[-1] if agents.masked else torch.ones_like(agents.rows(*seen)[..., 0]).bool()
        channel = cast(TeamNetwork, self.network).channel
        assert channel is not None
        return channel.heard(mask, self._context(dict(zip(self.reads, inputs[n:])), seen))

    def _context(self, given: Mapping[str, Tensor], seen: Sequence[Tensor]) -> Context:
        links, position = self.links, None
        if self.hears:
            links = given["links"] if links is None else given["links"] & links
        if self.position:
            rows = cast(AgentInput, self.features).rows(*seen)
            position = torch.stack([rows[..., i] for i in self.position], -1)
        return Context(
            links=links,
            state=given.get("state"),
            is_init=given.get("is_init"),
            position=position,
            drawn=given.get("channel"),
        )


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


def places_of(config: CommunicationConfig) -> list[int]:
    """Returns the columns of an observation that say where an agent is, where that matters."""
    needed = config.kind == "graph" or config.links in ("radius", "nearest")
    return config.position if needed else []


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
