"""Parts of networks: feedforward layers, team networks, and networks of input, body and head.

Shapes: B any batch dims, N agents, I input features, O output features, S numbers of a hidden
state, P coordinates of a position, D samples of the channel for each agent.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import torch
from torch import Tensor, nn

from torchrl_marl.modules.config import CommunicationConfig
from torchrl_marl.modules.inputs import AgentInput, cast_for_network

if TYPE_CHECKING:
    from torchrl_marl.modules.communication.channel import Channel
    from torchrl_marl.modules.memory.cells import Memory

__all__ = ["AgentNetwork", "Context", "Extras", "Feedforward", "TeamNetwork", "channels_of"]


@dataclass(frozen=True)
class Context:
    """Further inputs of a body, besides features and mask.

    Args:
        links (Tensor, optional): True where the agent of a row may hear the agent of a column;
            None: all may hear all. Groups that are trained as one do not hear each other.
        state (optional): hidden state that the body returned in the step before.
        is_init (Tensor, optional): True at an agent's first step of an episode.
        position (Tensor, optional): positions of the agents.
        drawn (Tensor, optional): samples of the channel.

    Shapes:
        - links: ``[N, N]`` or ``[*B, N, N]``; state: ``[*B, N, S]``; is_init: ``[*B, N, 1]``
        - position: ``[*B, N, P]``; drawn: ``[*B, N, D]``
    """

    links: Tensor | None = None
    state: Any = None
    is_init: Tensor | None = None
    position: Tensor | None = None
    drawn: Tensor | None = None


class Extras(NamedTuple):
    """Further outputs of a network.

    Args:
        state (Tensor, optional): next hidden state, ``[*B, N, S]``.
        drawn (Tensor, optional): samples of the channel, ``[*B, N, D]``.
        gate (Tensor, optional): logits of the communication gate, ``[*B, N, 1]``.
    """

    state: Tensor | None = None
    drawn: Tensor | None = None
    gate: Tensor | None = None


class Feedforward(nn.Sequential):
    """Sequence of layers that read features alone; the body of perceptrons and convolutions.

    Examples:
        >>> features, state = Feedforward(nn.Linear(3, 2))(torch.zeros(5, 4, 3))
        >>> features.shape, state
        (torch.Size([5, 4, 2]), None)
    """

    def forward(  # type: ignore[override]
        self, features: Tensor, mask: Tensor | None = None, context: Context | None = None
    ) -> tuple[Tensor, None]:
        """Runs the layers."""
        return super().forward(features), None


class TeamNetwork(nn.Module):
    """Network of a team: encoder, communication, memory and head.

    In TorchRL's recurrent mode (``torchrl.modules.set_recurrent_mode``) the last batch dim is time.

    Args:
        encoder (nn.Module): a body without memory.
        head (nn.Module): a body without memory; the last layer.
        channel (Channel, optional): communication between the agents.
        memory (Memory, optional): memory of each agent.
        norm (nn.Module, optional): normalizes the memory's output.
        communicate_first (bool): whether agents communicate before their memory, not after it.

    Shapes:
        - features: ``[*B, N, I]``, or ``[*B, I]`` for a centralized input; mask: ``[*B, N]``
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
        communicate_first: bool = True,
    ) -> None:
        super().__init__()
        self.encoder, self.memory, self.head = encoder, memory, head
        self.channel, self.norm = channel, norm
        self.communicate_first = communicate_first

    def forward(
        self, features: Tensor, mask: Tensor | None, context: Context
    ) -> tuple[Tensor, Extras]:
        """Runs the parts."""
        x, _ = self.encoder(features, mask, context)
        state = channel_state = drawn = gate = None
        if self.communicate_first and self.channel is not None:
            x, drawn, gate, channel_state = self.channel(x, mask, self._state_of_part(context, 1))
        if self.memory is not None:
            from torchrl_marl.modules.memory.cells import remember

            memory_context = self._state_of_part(context, 0)
            assert memory_context.is_init is not None
            x, state = remember(self.memory, x, memory_context.state, memory_context.is_init, mask)
            x = x if self.norm is None else self.norm(x)
        if not self.communicate_first and self.channel is not None:
            x, drawn, gate, channel_state = self.channel(x, mask, self._state_of_part(context, 1))
        states = [after for after in (state, channel_state) if after is not None]
        state = torch.cat(states, -1) if len(states) == 2 else next(iter(states), None)
        return self.head(x, mask, context)[0], Extras(state, drawn, gate)

    @property
    def memories(self) -> list[Memory]:
        """Modules with a state across steps; their states are concatenated."""
        delay = None if self.channel is None else self.channel.delay
        return [part for part in (self.memory, delay) if part is not None]

    def _state_of_part(self, context: Context, part: int) -> Context:
        """Returns a context with the state of the memory (0) or of the channel (1) alone."""
        sizes = [memory.state_size for memory in self.memories]
        if len(sizes) < 2 or context.state is None:
            return context
        return replace(context, state=context.state.split(sizes, -1)[part])


def channels_of(network: nn.Module) -> list[Channel]:
    """Returns the channels inside a network."""
    teams = [module for module in network.modules() if isinstance(module, TeamNetwork)]
    return [team.channel for team in teams if team.channel is not None]


class AgentNetwork(nn.Module):
    """Runs an input module, a body and a head in sequence.

    Args:
        features (nn.Module): returns the body's features and the mask.
        network (nn.Module): the body, see :mod:`torchrl_marl.modules.bodies`.
        head (nn.Module, optional): last layer, after the body.
        pick (nn.Module, optional): selects outputs of the body before the head.
        links (Tensor, optional): ``[N, N]``, True for agents that may hear each other.

    Attributes:
        reads (tuple of str): names of the inputs that follow observations and mask: ``links``,
            ``is_init``, ``state`` (the hidden state) and ``channel`` (samples of the communication
            channel), each only if the network needs it.
        writes (tuple of str): names of the outputs that follow the head's: ``state`` (the hidden
            state after the step), ``channel`` and ``gate_logits``, each only if the network returns
            it.
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
        self.remembers = bool(getattr(network, "memories", ()))
        self.hears = channel is not None and channel.config.links == "env"
        self.draws = 0 if channel is None else channel.draws
        self.position = [] if channel is None else position_columns(channel.config)
        self.gated = channel is not None and channel.gate is not None
        drawn = ("channel",) if self.draws else ()
        remembered = ("is_init", "state") if self.remembers else ()
        self.reads = (*("links",) * self.hears, *remembered, *drawn)
        self.writes = (*remembered[1:], *drawn, *("gate_logits",) * self.gated)
        self.register_buffer("links", links, persistent=False)

    def forward(self, *inputs: Tensor) -> Tensor | tuple[Tensor, ...]:
        """Runs input, body and head."""
        n = len(inputs) - len(self.reads)
        given = dict(zip(self.reads, inputs[n:]))
        features, mask = self.features(*inputs[:n])
        features = cast_for_network(features, self.network)
        context = self._make_context(given, inputs[:n])
        output, extras = self._body_in_precision()(features, mask, context)
        output = output if self.pick is None else self.pick(output)
        output = output if self.head is None else self.head(output)
        if not self.writes:
            return output
        outputs = output if isinstance(output, tuple) else (output,)
        return *outputs, *(extra for extra in extras if extra is not None)

    def _body_in_precision(self) -> Callable[..., tuple[Tensor, Extras]]:
        if self.precision != "bf16":
            return self.network
        from torchrl_marl.modules.precision import in_bfloat16

        return in_bfloat16(self.network)

    def used_links(self, *inputs: Tensor) -> Tensor:
        """Returns the links that were used, ``[*B, N, N]``: True where the agent of a row heard
        that of a column."""
        n = len(inputs) - len(self.reads)
        body_inputs = inputs[:n]
        agents = cast(AgentInput, self.features)
        mask = (
            body_inputs[-1]
            if agents.masked
            else torch.ones_like(agents.rows(*body_inputs)[..., 0]).bool()
        )
        channel = cast(TeamNetwork, self.network).channel
        assert channel is not None
        return channel.used_links(
            mask, self._make_context(dict(zip(self.reads, inputs[n:])), body_inputs)
        )

    def _make_context(self, given: Mapping[str, Tensor], body_inputs: Sequence[Tensor]) -> Context:
        links, position = self.links, None
        if self.hears:
            links = given["links"] if links is None else given["links"] & links
        if self.position:
            rows = cast(AgentInput, self.features).rows(*body_inputs)
            position = torch.stack([rows[..., i] for i in self.position], -1)
            position = cast_for_network(position, self.network)
        return Context(
            links=links,
            state=given.get("state"),
            is_init=given.get("is_init"),
            position=position,
            drawn=given.get("channel"),
        )


def position_columns(config: CommunicationConfig) -> list[int]:
    """Returns the observation columns of an agent's position, if distances are needed."""
    needed = config.kind == "graph" or config.links in ("radius", "nearest")
    return config.position if needed else []
