"""The channel: whose words reach whom, and what becomes of them on their way.

Shapes: B any batch dims, N agents, H features, K numbers of a message, D numbers that are drawn
for an agent in a step, S numbers of what an agent has heard and does not know yet.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextvars import ContextVar
from typing import Literal, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from torchrl_marl.modules.bodies import Context, initialize
from torchrl_marl.modules.communication.attention import Attention
from torchrl_marl.modules.communication.chain import Chain
from torchrl_marl.modules.communication.delay import make_delay
from torchrl_marl.modules.communication.links import Links
from torchrl_marl.modules.communication.mean import Mean
from torchrl_marl.modules.communication.rounds import Round
from torchrl_marl.modules.communication_config import (
    CommunicationConfig,
    DrawnCommunicationConfig,
)
from torchrl_marl.modules.memory.cells import Memory
from torchrl_marl.modules.memory.network import remember

__all__ = ["Channel", "channels_of", "drawing"]

_HOW: ContextVar[str] = ContextVar("how", default="replay")


@contextlib.contextmanager
def drawing(how: Literal["draw", "mode", "replay"]) -> Iterator[None]:
    """Says for a while where gates, lost links and noise come from.

    Args:
        how (str): ``draw`` them anew; ``mode``: the likeliest gate, no loss and no noise; or
            ``replay`` what was drawn before, as losses do.
    """
    token = _HOW.set(how)
    try:
        yield
    finally:
        _HOW.reset(token)


class Channel(nn.Module):
    """Lets the agents of a group hear each other.

    Whatever is drawn, gates, lost links and the noise on messages, is an output, which the update
    reads again. With a delay agents know later what they hear: who speaks and who hears whom, what
    is drawn, where agents are, and whom they attend to, are those of the step in which words are
    said. Until then they are part of what an agent remembers.

    Args:
        width (int): features H.
        config (CommunicationConfig): how they communicate; a
            :class:`~torchrl_marl.modules.DrawnCommunicationConfig` where something is drawn.
        n_agents (int): N.
        device (torch.device, optional): of the parameters.

    Attributes:
        draws (int): numbers D that are drawn for an agent in a step.
        numbers (int): numbers that an agent that speaks sends in a step.
        delay (Memory, optional): keeps what is heard until it is known.

    Raises:
        ConfigError: settings that do not fit together.

    Shapes:
        - features: ``[*B, N, H]``; mask: ``[*B, N]``; context.drawn: ``[*B, N, D]``;
          context.state: ``[*B, N, S]``
        - returns: ``[*B, N, H]``, what was drawn ``[*B, N, D]``, the logits of the gates
          ``[*B, N, 1]``, and what is not known yet ``[*B, N, S]``; the last three None where
          there are none

    Reference: Singh et al., 2019, https://arxiv.org/abs/1812.09755 (gate, IC3Net); Foerster et
    al., 2016, https://arxiv.org/abs/1605.06676 (DIAL); Jang et al., 2017,
    https://arxiv.org/abs/1611.01144 (Gumbel-softmax).

    Examples:
        >>> channel = Channel(8, CommunicationConfig("tarmac", message_size=4), n_agents=3)
        >>> channel(torch.zeros(5, 3, 8), None, Context())[0].shape, channel.draws
        (torch.Size([5, 3, 8]), 0)
    """

    def __init__(
        self,
        width: int,
        config: CommunicationConfig,
        n_agents: int,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        if not isinstance(config, DrawnCommunicationConfig):
            config = DrawnCommunicationConfig(**vars(config))
        config.check("communication.")
        self.config, self.n_agents = config, n_agents
        self.links = Links(config, n_agents, device)
        self.rounds = nn.ModuleList(_round(width, config, device) for _ in range(_rounds(config)))
        self.gate = None
        if config.gate:
            self.gate = nn.Linear(width, 1, device=device)
            initialize(self.gate, 0.01)
        self.delay = None
        if config.delay:
            self.delay = make_delay(int(cast(Round, self.rounds[0]).heard_size), config.delay)
        sizes = [int(one.message_size) for one in self.rounds]  # type: ignore[arg-type]
        self.numbers = sum(sizes)
        noise = self.numbers if config.discrete != "none" else 0
        self.columns = [int(config.gate), n_agents if config.dropout else 0, noise]
        self.draws = sum(self.columns)

    def forward(
        self, features: Tensor, mask: Tensor | None, context: Context
    ) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None]:
        """Runs the rounds."""
        alive = _alive(features, mask)
        # The dead may hold anything, NaN included.
        features = torch.where(alive.unsqueeze(-1), features, 0.0)
        position = context.position
        if position is not None:
            position = torch.where(alive.unsqueeze(-1), position, 0.0)
        logits = None if self.gate is None else self.gate(features)
        drawn = self._draw(features, logits, context.drawn) if self.draws else None
        links, speaks = self._heard(alive, context, drawn)
        noise = drawn.split(self.columns, -1)[2] if drawn is not None and self.columns[2] else None
        if self.delay is not None:
            heard = features, links, speaks, position, self._code(noise)
            features, kept = self._hear_later(self.delay, heard, mask, context)
            return features, drawn, logits, kept
        start = 0
        for one in self.rounds:
            end = start + int(one.message_size)  # type: ignore[arg-type]
            own = None if noise is None else noise[..., start:end]
            features = one(features, links, speaks, position, self._code(own))
            start = end
        return features, drawn, logits, None

    def _hear_later(
        self, delay: Memory, heard: tuple, mask: Tensor | None, context: Context
    ) -> tuple[Tensor, Tensor]:
        """Runs a round of which agents know some steps later; returns what they do not know yet."""
        kept: list[Tensor] = []

        def later(words: Tensor) -> Tensor:
            assert context.is_init is not None
            known, state = remember(delay, words, context.state, context.is_init, mask)
            kept.append(state)
            return known.to(words.dtype)

        return self.rounds[0](*heard, later=later), kept[0]

    def heard(self, mask: Tensor, context: Context) -> Tensor:
        """Returns who heard whom, ``[*B, N, N]``, given what was drawn in the channel.

        Of a :class:`Chain`, whose words go through everybody, it is whom an agent heard of.
        """
        return self._heard(mask, context, context.drawn)[0]

    def _heard(
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

    # ------------------------------------------------------------------------------ what is drawn

    def _draw(self, features: Tensor, logits: Tensor | None, drawn: Tensor | None) -> Tensor:
        how = _HOW.get()
        if how == "replay":
            assert drawn is not None
            return drawn
        batch, parts = features.shape[:-1], []
        if logits is not None:
            chance = torch.sigmoid(logits.detach())
            threshold = torch.full_like(chance, 0.5) if how == "mode" else torch.rand_like(chance)
            parts.append((threshold < chance).to(features.dtype))
        for width, draw in zip(self.columns[1:], (self._keep, self._noise)):
            if width:
                empty = features.new_empty(*batch, width)
                parts.append(draw(empty, how == "draw"))
        return torch.cat(parts, -1)

    def _keep(self, empty: Tensor, random: bool) -> Tensor:
        if not random:
            return torch.ones_like(empty)
        return (torch.rand_like(empty) >= self.config.dropout).to(empty.dtype)

    def _noise(self, empty: Tensor, random: bool) -> Tensor:
        if not random:
            return torch.zeros_like(empty)
        if self.config.discrete == "dial":
            return self.config.noise * torch.randn_like(empty)
        return -torch.empty_like(empty).exponential_().log()

    def _code(self, noise: Tensor | None):
        """Returns what makes symbols of messages; None where they stay numbers."""
        if noise is None:
            return None
        hard = _HOW.get() == "mode"
        if self.config.discrete == "dial":
            return lambda message: bits(message, noise, hard)
        return lambda message: symbol(message, noise, self.config.temperature)


def bits(message: Tensor, noise: Tensor, hard: bool) -> Tensor:
    """Returns DIAL's message: bits, or in training numbers between 0 and 1 with noise in them.

    Examples:
        >>> bits(torch.tensor([2.0, -1.0]), torch.zeros(2), hard=True)
        tensor([1., 0.])
    """
    return (message > 0).to(message.dtype) if hard else torch.sigmoid(message + noise)


def symbol(message: Tensor, noise: Tensor, temperature: float) -> Tensor:
    """Returns one symbol, one-hot, with the gradient of a softmax (straight through).

    Examples:
        >>> symbol(torch.tensor([2.0, -1.0]), torch.zeros(2), 1.0)
        tensor([1., 0.])
    """
    soft = ((message + noise) / temperature).softmax(-1)
    hard = F.one_hot(soft.argmax(-1), soft.shape[-1]).to(soft.dtype)
    return hard + (soft - soft.detach())


def channels_of(network: nn.Module) -> list[Channel]:
    """Returns the channels inside a network."""
    return [module for module in network.modules() if isinstance(module, Channel)]


def _alive(features: Tensor, mask: Tensor | None) -> Tensor:
    if mask is not None:
        return mask
    return torch.ones(features.shape[:-1], dtype=torch.bool, device=features.device)


def _rounds(config: CommunicationConfig) -> int:
    return 1 if config.kind == "bicnet" else config.rounds


def _round(
    width: int, config: CommunicationConfig, device: torch.device | str | None
) -> Round | Chain:
    if config.kind == "bicnet":
        return Chain(width, config.message_size, config.cell, device)
    if config.kind == "commnet":
        return Mean(width, config.message_size, device)
    places = len(config.position) if config.kind == "graph" else 0
    return Attention(width, config.message_size, config.key_size, places, device)
