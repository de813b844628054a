"""Networks of actors and critics: an input, a body and a head in a row.

Shapes: B any batch dims, N agents, O observation features.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor, nn

from torchrl_marl.modules.bodies import Context, Feedforward
from torchrl_marl.modules.config import NetworkConfig, has_memory, sharing_of
from torchrl_marl.modules.inputs import agent_features, widest
from torchrl_marl.modules.precision import autocast_in
from torchrl_marl.modules.registry import body_of
from torchrl_marl.modules.sharing.builder import share
from torchrl_marl.modules.team_network import (
    TeamNetwork,
    encoder_maker,
    make_team_network,
    sharing_of_encoder,
)
from torchrl_marl.specs import GroupSpec

__all__ = ["AgentNetwork", "feedforward", "kinds_of", "links_of", "make_agent_network"]


class AgentNetwork(nn.Module):
    """Runs an input, a body and a head one after the other.

    Args:
        features (nn.Module): returns what the body reads, and the mask.
        network (nn.Module): the body, see :mod:`torchrl_marl.modules.bodies`.
        head (nn.Module, optional): what follows the body.
        pick (nn.Module, optional): takes some of the body's outputs before the head.
        links (Tensor, optional): ``[N, N]``, which agents may hear each other, for the body.

    A body with memory reads two more inputs, ``is_init`` and the state, and its next state is one
    more output.
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
        self.remembers = isinstance(network, TeamNetwork)
        self.register_buffer("links", links, persistent=False)

    def forward(self, *inputs: Tensor) -> Tensor | tuple[Tensor, ...]:
        """Runs them."""
        state = is_init = None
        if self.remembers:
            *inputs, is_init, state = inputs  # type: ignore[assignment]
        features, mask = self.features(*inputs)
        context = Context(links=self.links, state=state, is_init=is_init)
        output, state = autocast_in(self.precision, self.network, features, mask, context)
        output = output if self.pick is None else self.pick(output)
        output = output if self.head is None else self.head(output)
        if not self.remembers:
            return output
        return (*output, state) if isinstance(output, tuple) else (output, state)


def make_agent_network(
    group: GroupSpec,
    out_features: int,
    config: NetworkConfig,
    *,
    gain: float,
    standardized: bool = False,
    device: torch.device | str | None = None,
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
    if has_memory(config):
        width, own = config.num_cells[-1], sharing_of_encoder(config)
        settings: dict = {"gain": gain, "device": device}
        rows = [width] * group.n_agents
        encoder = feedforward(share(encoder_maker(make), inputs, rows, kinds, own, **settings))
        return make_team_network(encoder, out_features, kinds, cast(Any, config), **settings)
    one = shared == "full" or shared == "group" and len(set(kinds)) == 1
    if one and len({own.width for own in inputs}) == 1:
        return feedforward(make(widest(inputs), out_features, config, gain=gain, device=device))
    outputs = [out_features] * group.n_agents
    return feedforward(share(make, inputs, outputs, kinds, config, gain=gain, device=device))


def feedforward(network: nn.Module) -> Feedforward:
    """Returns a network of features as a body; the names of its parameters stay."""
    return Feedforward(*network) if isinstance(network, nn.Sequential) else Feedforward(network)


def kinds_of(group: GroupSpec) -> tuple[int, ...]:
    """Returns the kind of each agent."""
    return group.kinds or (0,) * group.n_agents


def links_of(
    group: GroupSpec, config: NetworkConfig, device: torch.device | str | None = None
) -> Tensor | None:
    """Returns which agents are of one group, ``[N, N]``, for a body over all agents.

    None where all may hear all, and for networks of single agents.
    """
    if len(group.groups) == 1 or body_of(config).make_body is None:
        return None
    owner = torch.tensor(group.group_index, device=device)
    return owner.unsqueeze(-1) == owner
