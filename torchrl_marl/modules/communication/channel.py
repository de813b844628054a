"""Channel between agents: links, delays, gates and discrete messages.

Shapes: B any batch dims, N agents, H features, P coordinates of a position, S numbers in transit
for each agent.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextvars import ContextVar
from typing import Any, Literal, cast

import torch
import torch.nn.functional as F
from tensordict import TensorDictBase
from tensordict.nn import TensorDictModule, TensorDictModuleBase
from torch import Tensor, nn
from torch.types import Device

from torchrl_marl.modules.bodies import initialize
from torchrl_marl.modules.communication.rounds import Attention, Chain, Mean, Round
from torchrl_marl.modules.config import CommunicationConfig, DrawnCommunicationConfig
from torchrl_marl.modules.memory.cells import Layers, Memory, remember
from torchrl_marl.modules.networks import Context

__all__ = [
    "Channel",
    "Links",
    "OneStep",
    "channel_module",
    "channel_of",
    "drawing",
    "listening",
    "listening_by_group",
    "living_links",
    "make_delay",
    "nearest",
    "ring",
    "used_links",
    "within",
]


class OneStep(Memory):
    """Delay of one step: gives the input of the step before, and 0 in an episode's first step.

    A memory without parameters. An agent that does not act neither receives nor forgets a value.

    Args:
        size (int): number of values V.

    Shapes:
        - as :class:`~torchrl_marl.modules.memory.cells.Memory`; ``F = H = S = V``

    Examples:
        >>> heard = torch.tensor([1.0, 2.0, 3.0]).view(3, 1, 1)
        >>> OneStep(1)(heard, torch.zeros(1, 1), None, None)[0].flatten()
        tensor([0., 1., 2.])
        >>> begins = torch.tensor([False, False, True]).view(3, 1, 1)
        >>> OneStep(1)(heard, torch.zeros(1, 1), begins, None)[0].flatten()
        tensor([0., 1., 0.])
    """

    def __init__(self, size: int) -> None:
        super().__init__()
        self.state_size = self.out_features = size

    def forward(
        self, x: Tensor, state: Tensor, init: Tensor | None, mask: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Runs over the steps of a sequence."""
        x = x.to(state.dtype)
        states = x if mask is None else _latest_inputs(x, state, init, mask)
        before = torch.cat([state.unsqueeze(0), states[:-1]])
        return (before if init is None else torch.where(init, 0.0, before)), states


def _latest_inputs(x: Tensor, state: Tensor, init: Tensor | None, mask: Tensor) -> Tensor:
    """Returns an agent's latest input from a step of the episode in which it acted; else 0."""
    if len(x) == 1:
        kept = state if init is None else torch.where(init[0], 0.0, state)
        return torch.where(mask, x, kept.unsqueeze(0))
    rows = torch.cat([state.unsqueeze(0), x])
    steps = torch.arange(1, len(rows), device=x.device).view(-1, *[1] * (x.ndim - 1))
    latest = torch.where(mask, steps, 0).cummax(0).values
    found = rows.gather(0, latest.expand_as(x))
    if init is None:
        return found
    began = torch.where(init, steps, 0).cummax(0).values
    return torch.where(latest < began, 0.0, found)


def make_delay(size: int, steps: int) -> Memory | None:
    """Builds a delay of ``steps`` steps; None for 0.

    Args:
        size (int): number of values V.
        steps (int): delay.

    Examples:
        >>> heard = torch.tensor([1.0, 2.0, 3.0]).view(3, 1, 1)
        >>> make_delay(1, steps=2)(heard, torch.zeros(1, 2), None, None)[0].flatten()
        tensor([0., 0., 1.])
    """
    if steps < 2:
        return OneStep(size) if steps else None
    return Layers([OneStep(size) for _ in range(steps)])


def living_links(alive: Tensor) -> Tensor:
    """Returns the links between living agents; no agent hears itself.

    Shapes:
        - alive: ``[*B, N]``, bool; returns ``[*B, N, N]``, True where the agent of a row hears
          the agent of a column

    Examples:
        >>> living_links(torch.tensor([True, True, False])).int()
        tensor([[0, 1, 0],
                [1, 0, 0],
                [0, 0, 0]], dtype=torch.int32)
    """
    others = ~torch.eye(alive.shape[-1], dtype=torch.bool, device=alive.device)
    return alive.unsqueeze(-1) & alive.unsqueeze(-2) & others


def ring(n_agents: int, device: Device = None) -> Tensor:
    """Returns the links of a ring, ``[N, N]``: from each agent to those before and after it.

    Examples:
        >>> ring(4)[0].tolist()
        [False, True, False, True]
    """
    agent = torch.arange(n_agents, device=device)
    apart = (agent.unsqueeze(-1) - agent) % n_agents
    return (apart == 1 % n_agents) | (apart == (n_agents - 1) % n_agents)


def within(position: Tensor, radius: float) -> Tensor:
    """Returns the links between agents within a radius.

    Shapes:
        - position: ``[*B, N, P]``; returns ``[*B, N, N]``

    Examples:
        >>> within(torch.tensor([[0.0, 0.0], [3.0, 4.0], [9.0, 9.0]]), 5.0)[0].tolist()
        [True, True, False]
    """
    return _squared_distance(position) <= radius**2


def nearest(position: Tensor, count: int, alive: Tensor) -> Tensor:
    """Returns the links to the nearest living agents; if two are equally near, to the first.

    Shapes:
        - position: ``[*B, N, P]``; alive: ``[*B, N]``; returns ``[*B, N, N]``

    Examples:
        >>> position = torch.tensor([[0.0], [1.0], [5.0]])
        >>> nearest(position, 1, torch.tensor([True, False, True]))[0].tolist()
        [False, False, True]
    """
    linked = living_links(alive)
    distance = torch.where(linked, _squared_distance(position), torch.inf)
    rank = distance.argsort(dim=-1, stable=True).argsort(dim=-1)
    return (rank < count) & linked


def _squared_distance(position: Tensor) -> Tensor:
    return (position.unsqueeze(-2) - position.unsqueeze(-3)).square().sum(-1)


class Links(nn.Module):
    """Communication graph of the living agents, built from the settings.

    Args:
        config (CommunicationConfig): communication settings.
        n_agents (int): number N of agents.
        device (torch.device, optional): device of the links.

    Shapes:
        - alive: ``[*B, N]``; position: ``[*B, N, P]``; given: ``[N, N]`` or ``[*B, N, N]``;
          returns ``[*B, N, N]``
    """

    fixed: Tensor | None

    def __init__(self, config: CommunicationConfig, n_agents: int, device: Device = None) -> None:
        super().__init__()
        self.kind, self.radius, self.nearest = config.links, config.radius, config.nearest
        fixed = ring(n_agents, device) if config.links == "ring" else None
        self.register_buffer("fixed", fixed, persistent=False)

    def forward(self, alive: Tensor, position: Tensor | None, given: Tensor | None) -> Tensor:
        """Returns the links. If ``given`` links are passed, only links among them remain."""
        links = living_links(alive)
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


_SAMPLE_SOURCE: ContextVar[str] = ContextVar("how", default="replay")


@contextlib.contextmanager
def drawing(how: Literal["draw", "mode", "replay"]) -> Iterator[None]:
    """Sets the source of gates, dropped links and noise within a context.

    Args:
        how (str): ``draw`` samples them; ``mode`` takes the most likely gate, without dropout and
            noise; ``replay`` reads the samples in the batch, as losses do.
    """
    token = _SAMPLE_SOURCE.set(how)
    try:
        yield
    finally:
        _SAMPLE_SOURCE.reset(token)


class Channel(nn.Module):
    """Communication channel between the agents of a group.

    The rollout writes all samples (gates, dropped links, noise on messages) as outputs, and the
    update reads them back. With a delay, messages arrive some steps later. Gates, links, samples,
    positions and attention are then those of the sending step. Messages in transit are part of the
    hidden state.

    Args:
        width (int): number of features H.
        config (CommunicationConfig): communication settings; a
            :class:`~torchrl_marl.modules.DrawnCommunicationConfig` for random parts.
        n_agents (int): number N of agents.
        device (torch.device, optional): device of the parameters.

    Attributes:
        draws (int): number of samples D per agent and step.
        numbers (int): count of numbers that a sending agent transmits per step.
        delay (Memory, optional): memory of the messages in transit.

    Raises:
        ConfigError: settings that do not fit together.

    Shapes:
        - features: ``[*B, N, H]``; mask: ``[*B, N]``; context.drawn: ``[*B, N, D]``;
          context.state: ``[*B, N, S]``
        - returns: features ``[*B, N, H]``, samples ``[*B, N, D]``, gate logits ``[*B, N, 1]``, and
          messages in transit ``[*B, N, S]``; each of the last three is None if unused

    Reference: Singh et al., 2019, https://arxiv.org/abs/1812.09755 (gate, IC3Net); Foerster et
    al., 2016, https://arxiv.org/abs/1605.06676 (DIAL); Jang et al., 2017,
    https://arxiv.org/abs/1611.01144 (Gumbel-softmax).

    Examples:
        >>> channel = Channel(8, CommunicationConfig("tarmac", message_size=4), n_agents=3)
        >>> channel(torch.zeros(5, 3, 8), None, Context())[0].shape, channel.draws
        (torch.Size([5, 3, 8]), 0)
    """

    def __init__(
        self, width: int, config: CommunicationConfig, n_agents: int, device: Device = None
    ) -> None:
        super().__init__()
        if not isinstance(config, DrawnCommunicationConfig):
            config = DrawnCommunicationConfig(**vars(config))
        config.check("communication.")
        self.config, self.n_agents = config, n_agents
        self.links = Links(config, n_agents, device)
        n_rounds = 1 if config.kind == "bicnet" else config.rounds
        self.rounds = nn.ModuleList(_make_round(width, config, device) for _ in range(n_rounds))
        self.gate = nn.Linear(width, 1, device=device) if config.gate else None
        if self.gate is not None:
            initialize(self.gate, 0.01)
        self.delay = None
        if config.delay:
            self.delay = make_delay(int(cast(Round, self.rounds[0]).heard_size), config.delay)
        self.sizes = [int(cast(Round, one).message_size) for one in self.rounds]
        self.numbers = sum(self.sizes)
        noise = self.numbers if config.discrete != "none" else 0
        self.columns = [int(config.gate), n_agents if config.dropout else 0, noise]
        self.draws = sum(self.columns)

    def forward(
        self, features: Tensor, mask: Tensor | None, context: Context
    ) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None]:
        """Runs the rounds of messages."""
        alive = mask
        if alive is None:
            alive = torch.ones(features.shape[:-1], dtype=torch.bool, device=features.device)
        # Dead agents' features may hold anything, NaN included.
        features = torch.where(alive.unsqueeze(-1), features, 0.0)
        position = context.position
        if position is not None:
            position = torch.where(alive.unsqueeze(-1), position, 0.0)
        logits = None if self.gate is None else self.gate(features)
        drawn = self._draw_samples(features, logits, context.drawn) if self.draws else None
        links, speaks = self._links_and_speakers(alive, context, drawn)
        noise = drawn.split(self.columns, -1)[2] if drawn is not None and self.columns[2] else None
        if self.delay is not None:
            round_inputs = features, links, speaks, position, self._make_discretizer(noise)
            features, in_transit = self._run_delayed_round(self.delay, round_inputs, mask, context)
            return features, drawn, logits, in_transit
        parts = [None] * len(self.sizes) if noise is None else noise.split(self.sizes, -1)
        for one, own in zip(self.rounds, parts):
            features = one(features, links, speaks, position, self._make_discretizer(own))
        return features, drawn, logits, None

    def _run_delayed_round(
        self, delay: Memory, round_inputs: tuple, mask: Tensor | None, context: Context
    ) -> tuple[Tensor, Tensor]:
        """Runs a round with delayed messages; returns features and messages in transit."""
        in_transit: list[Tensor] = []

        def later(mixed: Tensor) -> Tensor:
            assert context.is_init is not None
            received, state = remember(delay, mixed, context.state, context.is_init, mask)
            in_transit.append(state)
            return received.to(mixed.dtype)

        return self.rounds[0](*round_inputs, later=later), in_transit[0]

    def used_links(self, mask: Tensor, context: Context) -> Tensor:
        """Returns the links that were used, ``[*B, N, N]``, given the samples of the channel.

        In a :class:`Chain`, whose messages pass along all agents, links include indirect ones.
        """
        return self._links_and_speakers(mask, context, context.drawn)[0]

    def _links_and_speakers(
        self, alive: Tensor, context: Context, drawn: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        links, speaks = self.links(alive, context.position, context.links), alive
        if drawn is None:
            return links, speaks
        gate, kept, _ = drawn.split(self.columns, -1)
        if self.columns[0]:
            speaks = speaks & (gate.squeeze(-1) > 0.5)
            links = links & speaks.unsqueeze(-2)
        return (links & (kept > 0.5) if self.columns[1] else links), speaks

    # --------------------------------------------------------------------------------- samples

    def _draw_samples(
        self, features: Tensor, logits: Tensor | None, drawn: Tensor | None
    ) -> Tensor:
        source = _SAMPLE_SOURCE.get()
        if source == "replay":
            assert drawn is not None
            return drawn
        batch, parts = features.shape[:-1], []
        if logits is not None:
            probability = torch.sigmoid(logits.detach())
            threshold = (
                torch.full_like(probability, 0.5)
                if source == "mode"
                else torch.rand_like(probability)
            )
            parts.append((threshold < probability).to(features.dtype))
        for width, draw in zip(self.columns[1:], (self._draw_kept_links, self._draw_noise)):
            if width:
                parts.append(draw(features.new_empty(*batch, width), source == "draw"))
        return torch.cat(parts, -1)

    def _draw_kept_links(self, empty: Tensor, random: bool) -> Tensor:
        if not random:
            return torch.ones_like(empty)
        return (torch.rand_like(empty) >= self.config.dropout).to(empty.dtype)

    def _draw_noise(self, empty: Tensor, random: bool) -> Tensor:
        if not random:
            return torch.zeros_like(empty)
        if self.config.discrete == "dial":
            return self.config.noise * torch.randn_like(empty)
        return -torch.empty_like(empty).exponential_().log()

    def _make_discretizer(self, noise: Tensor | None):
        """Returns the function that discretizes messages; None for continuous ones."""
        if noise is None:
            return None
        hard = _SAMPLE_SOURCE.get() == "mode"
        if self.config.discrete == "dial":
            return lambda message: bits(message, noise, hard)
        return lambda message: symbol(message, noise, self.config.temperature)


def bits(message: Tensor, noise: Tensor, hard: bool) -> Tensor:
    """Returns DIAL's message: bits, or noisy numbers between 0 and 1 in training.

    Examples:
        >>> bits(torch.tensor([2.0, -1.0]), torch.zeros(2), hard=True)
        tensor([1., 0.])
    """
    return (message > 0).to(message.dtype) if hard else torch.sigmoid(message + noise)


def symbol(message: Tensor, noise: Tensor, temperature: float) -> Tensor:
    """Returns a one-hot symbol with the gradient of a softmax (straight-through).

    Examples:
        >>> symbol(torch.tensor([2.0, -1.0]), torch.zeros(2), 1.0)
        tensor([1., 0.])
    """
    soft = ((message + noise) / temperature).softmax(-1)
    hard = F.one_hot(soft.argmax(-1), soft.shape[-1]).to(soft.dtype)
    return hard + (soft - soft.detach())


def _make_round(width: int, config: CommunicationConfig, device: Device) -> Round | Chain:
    if config.kind == "bicnet":
        return Chain(width, config.message_size, config.cell, device)
    if config.kind == "commnet":
        return Mean(width, config.message_size, device)
    places = len(config.position) if config.kind == "graph" else 0
    return Attention(width, config.message_size, config.key_size, places, device)


# ------------------------------------------------------------------------------ links of a batch


def channel_module(actor: nn.Module) -> TensorDictModule | None:
    """Returns the module of an actor with a channel, or None without communication.

    Args:
        actor (nn.Module): actor of a group, or of several groups joined into one.
    """
    for module in actor.modules():
        body = getattr(getattr(module, "module", None), "network", None)
        if isinstance(module, TensorDictModule) and isinstance(
            getattr(body, "channel", None), Channel
        ):
            return module
    return None


def channel_of(module: TensorDictModule) -> Channel:
    """Returns the channel of a module from :func:`channel_module`."""
    return cast(Channel, cast(Any, module.module).network.channel)


def used_links(module: TensorDictModule, data: TensorDictBase) -> Tensor:
    """Returns the links that were used in the steps of a batch.

    Args:
        module (TensorDictModule): from :func:`channel_module`.
        data (TensorDictBase): inputs of the module, with the samples of the channel.

    Shapes:
        - returns: bool, ``[*B, N, N]``, True where the agent of a row heard the agent of a
          column
    """
    return cast(Any, module.module).used_links(*(data.get(key) for key in module.in_keys))


@torch.no_grad()
def listening(actor: nn.Module, data: TensorDictBase) -> Tensor:
    """Returns the communication weights between agents, averaged over the rounds of a step.

    With attention, these are the attention weights; otherwise all agents that an agent hears have
    equal weights.

    Args:
        actor (nn.Module): actor of a group, or of several groups joined into one.
        data (TensorDictBase): steps of a batch collected by the actor.

    Shapes:
        - returns: ``[*B, N, N]``; rows sum to 1, or to 0 for an agent that hears no other

    Raises:
        ValueError: an actor without communication.

    Examples:
        >>> from torchrl_marl import TeamSpec
        >>> from torchrl_marl.envs.toy import Arena
        >>> from torchrl_marl.modules import CommunicationConfig, NetworkConfig, make_actor
        >>> env = Arena(2, n_agents=3)
        >>> config = NetworkConfig([8], communication=CommunicationConfig("commnet"))
        >>> actor = make_actor(TeamSpec.from_env(env).groups["agents"], config)
        >>> listening(actor, env.rollout(1, actor))[0, 0, 0]
        tensor([0.0000, 0.5000, 0.5000])
    """
    module = channel_module(actor)
    if module is None:
        raise ValueError("the agents of this actor do not communicate, so there are no weights.")
    actors = [part for part in actor.modules() if channel_module(part) is module]
    group = next((own for part in actors if (own := getattr(part, "group", None))), None)
    found: list[Tensor] = []

    def look(one: nn.Module, inputs: tuple) -> None:
        features, links, speaks, position, code = inputs
        if isinstance(one, Attention):
            messages = one.send(features, position)
            messages = messages if code is None else code(messages)
            found.append(one.weights(features, messages, links, position))
        else:
            weight = links.to(features.dtype)
            found.append(weight / weight.sum(-1, keepdim=True).clamp_min(1))

    hooks = [one.register_forward_pre_hook(look) for one in channel_of(module).rounds]
    try:
        with drawing("replay"):
            module((data if group is None else group.dense(data)).copy())
    finally:
        for hook in hooks:
            hook.remove()
    return torch.stack(found).mean(0)


def listening_by_group(policy: nn.Module, data: TensorDictBase) -> dict[str, Tensor]:
    """Returns :func:`listening` by group, for the groups that have a separate channel.

    Args:
        policy (nn.Module): policy with the groups' actors.
        data (TensorDictBase): steps collected by the policy.
    """
    actors = [part for part in policy.modules() if isinstance(part, TensorDictModuleBase)]
    groups = [(actor, getattr(actor, "group", None)) for actor in actors]
    return {
        group.name: listening(actor, data)
        for actor, group in groups
        if group is not None and group.name in data and channel_module(actor) is not None
    }
