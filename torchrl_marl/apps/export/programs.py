"""Programs of one agent, made from the networks of its team.

Shapes: I input features of a network, H features, S numbers of a hidden state, P coordinates of a
position, M messages of K numbers each, V numbers of their aggregate, D numbers of a message that a
relaying agent passes on.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from torchrl_marl.apps.export.interface import Field, Program
from torchrl_marl.errors import ConfigError
from torchrl_marl.modules.bodies import PictureNetwork, Residual
from torchrl_marl.modules.communication.channel import Channel, bits, symbol
from torchrl_marl.modules.communication.rounds import Chain, Round
from torchrl_marl.modules.memory.cells import AgentLinear, Memory, remember
from torchrl_marl.modules.networks import Context, Feedforward, TeamNetwork
from torchrl_marl.modules.normalization import ObservationNorm
from torchrl_marl.modules.scales import AppendScale
from torchrl_marl.modules.sharing.builder import AgentId, AgentMask
from torchrl_marl.modules.stacks.module_stack import ModuleStack

__all__ = [
    "Act",
    "ActOnMessages",
    "AgentState",
    "FirstMessage",
    "MessageDecoder",
    "NextMessage",
    "OneObservation",
    "Relay",
    "body_of_agent",
    "communication_programs",
    "memory_of_agent",
]


class OneObservation(nn.Module):
    """Input of one agent's network: its observation, standardized and padded as in the team.

    Args:
        width (int): number of features of the agent's observation.
        widest (int): number I of input features of its network.
        norm (ObservationNorm, optional): norm that standardizes observations.
        place (int): index of the agent in the norm.

    Shapes:
        - leaves: ``[*features]`` each; returns ``[1, I]``
    """

    mean: Tensor | None
    variance: Tensor  # where there is a mean

    def __init__(
        self, width: int, widest: int, norm: ObservationNorm | None = None, place: int = 0
    ) -> None:
        super().__init__()
        self.behind = widest - width
        self.clip, self.epsilon = (0.0, 0.0) if norm is None else (norm.clip, norm.epsilon)
        for name in ("mean", "variance"):
            value = None if norm is None else _of_kind(norm, name, place)[:width]
            self.register_buffer(name, value)

    def forward(self, *leaves: Tensor) -> Tensor:
        """Concatenates and standardizes the leaves."""
        features = self.raw(*leaves)
        if self.mean is not None:
            mean, variance = self.mean.to(features.dtype), self.variance.to(features.dtype)
            features = (features - mean) * (variance + self.epsilon).rsqrt()
            features = features.clamp(-self.clip, self.clip)
        features = features.to(torch.get_default_dtype())  # as the team casts for its network
        return F.pad(features, (0, self.behind)).unsqueeze(0)

    def raw(self, *leaves: Tensor) -> Tensor:
        """Concatenates the leaves without standardizing them."""
        dtype = torch.get_default_dtype()
        rows = [leaf if leaf.is_floating_point() else leaf.to(dtype) for leaf in leaves]
        return torch.cat([row.flatten() for row in rows])


def _of_kind(norm: ObservationNorm, name: str, place: int) -> Tensor:
    statistic = getattr(norm, name).detach().to(torch.get_default_dtype())
    return statistic if norm.kind_of is None else statistic[norm.kind_of[place]]


def body_of_agent(body: nn.Module, agent: int, n_agents: int) -> nn.Module:
    """Returns a body for one agent, with its parameters from the team's body.

    Args:
        body (nn.Module): the team's body from :mod:`torchrl_marl.modules.bodies`; not changed.
        agent (int): index of the agent.
        n_agents (int): number N of agents in the body.

    Raises:
        ConfigError: the body mixes all agents, so it cannot be split.

    Examples:
        >>> from torchrl_marl.modules.bodies import Context
        >>> from torchrl_marl.modules.stacks.module_stack import stack
        >>> body = Feedforward(stack([nn.Linear(4, 2), nn.Linear(4, 2)], pad=True))
        >>> own, x = body_of_agent(body, 1, 2), torch.randn(2, 4)
        >>> torch.allclose(own(x[1:])[0], body(x)[0][1:])
        True
    """
    if isinstance(body, Feedforward):
        return Feedforward(*(_layer_of(layer, agent, n_agents) for layer in body))
    if isinstance(body, TeamNetwork):
        own = copy.deepcopy(body)
        own.encoder, own.head = (
            body_of_agent(part, agent, n_agents) for part in (body.encoder, body.head)
        )
        own.memory = None if body.memory is None else memory_of_agent(body.memory, agent)
        return own
    raise ConfigError(
        f"an actor's body is a {type(body).__name__}, one network over all agents, expected one "
        "that can be split by agent; use body=mlp, with communication where agents should talk."
    )


def memory_of_agent(memory: Memory, agent: int) -> Memory:
    """Returns a memory for one agent, with its parameters from the team's memory.

    Examples:
        >>> from torchrl_marl.modules.memory.cells import GRU
        >>> memory_of_agent(GRU(4, 8, index=[0, 1, 1]), 2).hh.weight.shape
        torch.Size([1, 24, 8])
    """
    own = copy.deepcopy(memory)
    for cell in own.modules():
        linear = cell if isinstance(cell, AgentLinear) else getattr(cell, "input", None)
        for name, parameter in list(cell.named_parameters(recurse=False)):
            assert isinstance(linear, AgentLinear)
            rows = linear.of_agents(parameter)
            k = 0 if linear.shared else agent
            setattr(cell, name, nn.Parameter(rows[k : k + 1].detach().clone()))
    for linear in own.modules():
        if isinstance(linear, AgentLinear):
            linear.shared, linear.index = True, None
    return own


class _FirstFeatures(nn.Module):
    """Keeps the first features, which drops the padding for wider networks."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.width = width

    def forward(self, features: Tensor) -> Tensor:
        return features[..., : self.width]


class _AgentOfTeam(nn.Module):
    """Runs a team's layer, which must not mix agents, on the features of one agent."""

    def __init__(self, layer: nn.Module, agent: int, n_agents: int) -> None:
        super().__init__()
        self.layer, self.agent, self.n_agents = layer, agent, n_agents

    def forward(self, features: Tensor) -> Tensor:
        rows = features.expand(*features.shape[:-2], self.n_agents, features.shape[-1])
        return self.layer(rows)[..., self.agent : self.agent + 1, :]


def _layer_of(layer: nn.Module, agent: int, n_agents: int) -> nn.Module:
    if isinstance(layer, ModuleStack):
        bucket, k = layer.bucket(agent)
        width = bucket.width(k)
        own = layer.copy_of(agent)
        return own if width is None else nn.Sequential(_FirstFeatures(width), own)
    if isinstance(layer, AgentMask):
        return AgentMask(layer.mask[agent : agent + 1].clone())
    if isinstance(layer, AgentId):
        return AgentId(layer.agent_id[agent : agent + 1].detach().clone())
    layer = copy.deepcopy(layer)
    # These layers are known to read each agent's features separately, with the same weights.
    known = type(layer).__module__.startswith(("torch.nn.", "torchrl.modules."))
    if known or isinstance(layer, PictureNetwork | Residual | AppendScale):
        return layer
    return _AgentOfTeam(layer, agent, n_agents)


class Act(nn.Module):
    """Program of an agent without communication: maps observation and hidden state to the action.

    Args:
        observe (OneObservation): input of the agent's network.
        body (nn.Module): the agent's part of its actor's body.
        choose (nn.Module): maps outputs and action mask to the action and its parameters.
        n_leaves (int): number of observation inputs; they are followed by action mask, hidden
            state and ``is_init``.
    """

    def __init__(
        self, observe: OneObservation, body: nn.Module, choose: nn.Module, n_leaves: int
    ) -> None:
        super().__init__()
        self.observe, self.body, self.choose, self.n_leaves = observe, body, choose, n_leaves
        self.remembers = isinstance(body, TeamNetwork) and body.memory is not None

    def forward(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        """Returns the action, its parameters and the next hidden state."""
        leaves, others = inputs[: self.n_leaves], list(inputs[self.n_leaves :])
        context = Context()
        if self.remembers:
            *others, hidden, is_init = others
            context = Context(state=hidden.unsqueeze(0), is_init=is_init.unsqueeze(0))
        output, extras = self.body(self.observe(*leaves), None, context)
        chosen = self.choose(output.squeeze(0), *others)
        return (*chosen, extras.state.squeeze(0)) if self.remembers else chosen


class AgentState(nn.Module):
    """Code shared by the programs of an agent that communicates.

    In each step, every program passes a state to the next program. The state concatenates the
    agent's features, hidden state and position.

    Args:
        observe (OneObservation): input of the agent.
        body (TeamNetwork): the agent's part of its actor's body.
        choose (nn.Module): maps outputs and action mask to the action and its parameters.
        n_leaves (int): number of observation inputs.
        position (sequence of int): columns of the observation that hold the agent's position.

    Shapes:
        - a state: ``[H + S + P]``
    """

    def __init__(
        self,
        observe: OneObservation,
        body: TeamNetwork,
        choose: nn.Module,
        n_leaves: int,
        position: Sequence[int],
    ) -> None:
        super().__init__()
        self.observe, self.body, self.choose, self.n_leaves = observe, body, choose, n_leaves
        self.position = list(position)
        self.channel = cast(Channel, body.channel)
        self.remembers = body.memory is not None

    def encode(self, *inputs: Tensor) -> list[Tensor]:
        """Returns features ``[1, H]``, hidden state ``[1, S]`` and position ``[1, P]``."""
        leaves, others = inputs[: self.n_leaves], inputs[self.n_leaves :]
        x = self.body.encoder(self.observe(*leaves), None, Context())[0]
        raw = self.observe.raw(*leaves).to(x.dtype)
        place = torch.stack([raw[i] for i in self.position]) if self.position else raw[:0]
        hidden = x[:, :0]
        if self.remembers:
            hidden, is_init = (other.unsqueeze(0) for other in others)
            hidden = torch.where(is_init, 0.0, hidden)
            if not self.body.communicate_first:
                x, hidden = self._update_memory(x, hidden)
        return [x, hidden, place.unsqueeze(0)]

    def act(self, parts: Sequence[Tensor], *legal: Tensor) -> tuple[Tensor, ...]:
        """Returns the action, its parameters and the next hidden state."""
        x, hidden, _ = parts
        if self.remembers and self.body.communicate_first:
            x, hidden = self._update_memory(x, hidden)
        output = self.body.head(x, None, Context())[0]
        chosen = self.choose(output.squeeze(0), *legal)
        return (*chosen, hidden.squeeze(0)) if self.remembers else chosen

    def message(self, parts: Sequence[Tensor], number: int) -> Tensor:
        """Returns the agent's message in a round, ``[K]``."""
        x, _, place = parts
        one = cast(Round, self.channel.rounds[number])
        message = one.send(x, place if self.position else None).squeeze(0)
        if self.channel.config.discrete == "dial":
            return bits(message, torch.zeros_like(message), hard=True)
        if self.channel.config.discrete == "gumbel":
            return symbol(message, torch.zeros_like(message), 1.0)
        return message

    def aggregate(
        self, parts: Sequence[Tensor], inbox: Tensor, heard: Tensor, number: int
    ) -> Tensor:
        """Returns the aggregate ``[1, V]`` of a round's messages ``[M, K]``."""
        x, _, place = parts
        inbox = torch.where(heard.unsqueeze(-1), inbox, 0.0)
        one = cast(Round, self.channel.rounds[number])
        return one.mix(x, inbox, heard.unsqueeze(0), place if self.position else None)

    def update(self, parts: Sequence[Tensor], words: Tensor, number: int = 0) -> list[Tensor]:
        """Updates the parts of the state with a round's aggregated messages, ``[1, V]``."""
        x, hidden, place = parts
        return [cast(Round, self.channel.rounds[number]).update_features(x, words), hidden, place]

    def receive(
        self, parts: Sequence[Tensor], inbox: Tensor, heard: Tensor, number: int
    ) -> list[Tensor]:
        """Updates the parts of the state with the messages of a round."""
        return self.update(parts, self.aggregate(parts, inbox, heard, number), number)

    def _update_memory(self, x: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor]:
        assert self.body.memory is not None
        begins = torch.zeros(1, 1, dtype=torch.bool)
        x, hidden = remember(self.body.memory, x, hidden, begins, None)
        return x if self.body.norm is None else self.body.norm(x), hidden


class FirstMessage(nn.Module):
    """Program ``speak``: maps observation and hidden state to the first message and a state.

    The later programs of the step read this state. A relaying agent has no first message. With a
    gate the program also returns ``gate_logits``, which are positive if the agent sends its
    message.
    """

    def __init__(self, agent: AgentState) -> None:
        super().__init__()
        self.agent = agent
        self.relays = isinstance(agent.channel.rounds[0], Chain)

    def forward(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        """Returns the first message, the state and the gate's logits."""
        parts = self.agent.encode(*inputs)
        gate = self.agent.channel.gate
        logits = () if gate is None else (gate(parts[0]).squeeze(0),)
        state = torch.cat(parts, -1).squeeze(0)
        return (state, *logits) if self.relays else (self.agent.message(parts, 0), state, *logits)


class _StateProgram(nn.Module):
    """Base class of the later programs of a step, which read a state."""

    def __init__(self, agent: AgentState, sizes: Sequence[int]) -> None:
        super().__init__()
        self.agent, self.sizes = agent, list(sizes)

    def parts(self, state: Tensor) -> Sequence[Tensor]:
        """Splits a state into features, hidden state and position."""
        return state.unsqueeze(0).split(self.sizes, -1)


class NextMessage(_StateProgram):
    """Program ``hear_i``: maps one round's messages to the agent's next message and state.

    Args:
        agent (AgentState): the agent.
        sizes (sequence of int): H, S and P.
        number (int): index of the round whose messages the program reads, from 0.
    """

    def __init__(self, agent: AgentState, sizes: Sequence[int], number: int) -> None:
        super().__init__(agent, sizes)
        self.number = number

    def forward(self, state: Tensor, inbox: Tensor, heard: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the next message and state."""
        parts = self.agent.receive(self.parts(state), inbox, heard, self.number)
        return self.agent.message(parts, self.number + 1), torch.cat(parts, -1).squeeze(0)


class MessageDecoder(_StateProgram):
    """Program ``listen``: maps delayed messages to their aggregate, ``[V]``."""

    def forward(self, state: Tensor, inbox: Tensor, heard: Tensor) -> tuple[Tensor]:
        """Returns the aggregated messages."""
        return (self.agent.aggregate(self.parts(state), inbox, heard, 0).squeeze(0),)


class Relay(_StateProgram):
    """Programs ``forth`` and ``back``: map the received message ``[D]`` to the message to pass on.

    Args:
        agent, sizes: as for :class:`NextMessage`.
        back (bool): True for the program ``back``, in which messages go from the last agent to the
            first.
    """

    def __init__(self, agent: AgentState, sizes: Sequence[int], back: bool) -> None:
        super().__init__(agent, sizes)
        self.back = back

    def forward(self, state: Tensor, handed: Tensor) -> tuple[Tensor]:
        """Returns the message passed on."""
        chain = cast(Chain, self.agent.channel.rounds[0])
        x = self.parts(state)[0]
        return (chain.pass_on(x, handed.unsqueeze(0), back=self.back).squeeze(0),)


class ActOnMessages(_StateProgram):
    """Program ``act`` of an agent that communicates: maps state and messages to the action."""

    def forward(self, state: Tensor, *inputs: Tensor) -> tuple[Tensor, ...]:
        """Returns the action, its parameters and the next hidden state.

        After the state come ``inbox`` and ``heard``. Instead of these, a relaying agent reads the
        messages of both directions, and an agent with delayed messages reads the aggregate of an
        earlier step.
        """
        parts = self.parts(state)
        if self.agent.channel.delay is not None:
            words, *legal = inputs
            return self.agent.act(self.agent.update(parts, words.unsqueeze(0)), *legal)
        one, other, *legal = inputs
        chain = self.agent.channel.rounds[0]
        if isinstance(chain, Chain):
            x, hidden, place = parts
            before, behind = (way[: chain.size].unsqueeze(0) for way in (one, other))
            parts = [chain.read(x, before, behind), hidden, place]
        else:
            parts = self.agent.receive(parts, one, other, len(self.agent.channel.rounds) - 1)
        return self.agent.act(parts, *legal)


def communication_programs(
    agent: AgentState,
    observation_fields: tuple[Field, ...],
    mask_fields: tuple[Field, ...],
    output_names: list[str],
    channel: Channel,
    size: int,
) -> Iterator[Program]:
    """Builds the programs of an agent that communicates.

    Args:
        agent (AgentState): the agent.
        observation_fields (tuple of Field): inputs for the agent's observation and hidden state.
        mask_fields (tuple of Field): input for the agent's action mask; empty without a mask.
        output_names (list of str): names of the outputs of the last program.
        channel (Channel): channel between the agents.
        size (int): size S of the agent's hidden state.
    """
    one = channel.rounds[0]
    gate = [] if channel.gate is None else ["gate_logits"]
    speak = FirstMessage(agent)
    says = [] if speak.relays else ["message"]
    first = Program.of("speak", speak, observation_fields, [*says, "state", *gate])
    yield first
    state = next(field for field in first.outputs if field.name == "state")
    places = len(agent.position)
    sizes = [state.shape[0] - size - places, size, places]
    if isinstance(one, Chain):
        handed = [Field(name, (one.state_size,)) for name in ("handed", "before", "behind")]
        for name, back in (("forth", False), ("back", True)):
            yield Program.of(name, Relay(agent, sizes, back), (state, handed[0]), ["handed_on"])
        heard = tuple(handed[1:])
    else:
        inbox = Field("inbox", (channel.n_agents, int(cast(int, one.message_size))))
        heard = inbox, Field("heard", (channel.n_agents,), "bool")
        for number in range(len(channel.rounds) - 1):
            hear = NextMessage(agent, sizes, number)
            inputs = (state, *heard)
            yield Program.of(f"hear_{number + 1}", hear, inputs, ["message", "next_state"])
        if channel.delay is not None:
            listen = Program.of("listen", MessageDecoder(agent, sizes), (state, *heard), ["words"])
            yield listen
            heard = listen.outputs
    yield Program.of(
        "act", ActOnMessages(agent, sizes), (state, *heard, *mask_fields), output_names
    )
