"""One agent's part of the networks of a team.

Shapes: N agents, I input features, O output features.
"""

from __future__ import annotations

import copy

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from torchrl_marl.errors import ConfigError
from torchrl_marl.modules.bodies import Feedforward, PictureNetwork
from torchrl_marl.modules.memory.cells import AgentLinear, Memory
from torchrl_marl.modules.normalization import ObservationNorm
from torchrl_marl.modules.sharing.layers import AgentId, AgentMask
from torchrl_marl.modules.stacks.module_stack import ModuleStack
from torchrl_marl.modules.team_network import TeamNetwork

__all__ = ["OneObservation", "body_of_agent", "memory_of_agent"]


class OneObservation(nn.Module):
    """Reads one agent's observation, unpadded, as the team's input reads everyone's.

    Args:
        width (int): the agent's own features.
        widest (int): features I that its network takes.
        norm (ObservationNorm, optional): standardizes.
        place (int): the agent's number among those of the norm.

    Shapes:
        - leaves: ``[*features]``, each of its own; returns ``[1, I]``
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
        """Puts the leaves side by side, and standardizes."""
        features = self.raw(*leaves)
        if self.mean is not None:
            features = (features - self.mean) * (self.variance + self.epsilon).rsqrt()
            features = features.clamp(-self.clip, self.clip)
        return F.pad(features, (0, self.behind)).unsqueeze(0)

    def raw(self, *leaves: Tensor) -> Tensor:
        """Returns the leaves side by side, as the environment gives them."""
        dtype = torch.get_default_dtype()
        rows = [leaf if leaf.is_floating_point() else leaf.to(dtype) for leaf in leaves]
        return torch.cat([row.flatten() for row in rows])


def _of_kind(norm: ObservationNorm, name: str, place: int) -> Tensor:
    statistic = getattr(norm, name).detach().to(torch.get_default_dtype())
    return statistic if norm.kind_of is None else statistic[norm.kind_of[place]]


def body_of_agent(body: nn.Module, agent: int, n_agents: int) -> nn.Module:
    """Returns one agent's part of a body, as a body of a team of one.

    Args:
        body (nn.Module): of :mod:`torchrl_marl.modules.bodies`; it stays as it is.
        agent (int): whose.
        n_agents (int): number N of agents of the body.

    Raises:
        ConfigError: a body over all agents, of which no agent has a part.

    Examples:
        >>> from torchrl_marl.modules.bodies import Context
        >>> from torchrl_marl.modules.stacks.building import stack
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
        f"an actor's body is a {type(body).__name__}, one network over all agents, of which no "
        "agent has a part that runs alone; use body=mlp, and communication to let agents talk."
    )


def memory_of_agent(memory: Memory, agent: int) -> Memory:
    """Returns one agent's memory, as that of a team of one.

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


class _Narrow(nn.Module):
    """Cuts what only wider networks read."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.width = width

    def forward(self, features: Tensor) -> Tensor:
        return features[..., : self.width]


class _OneOfRows(nn.Module):
    """Runs layers of all agents on one agent's features; agents do not hear each other."""

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
        return own if width is None else nn.Sequential(_Narrow(width), own)
    if isinstance(layer, AgentMask):
        return AgentMask(layer.mask[agent : agent + 1].clone())
    if isinstance(layer, AgentId):
        return AgentId(layer.agent_id[agent : agent + 1].detach().clone())
    layer = copy.deepcopy(layer)
    # What is known to read each agent's features by themselves, with the same weights.
    known = type(layer).__module__.startswith(("torch.nn.", "torchrl.modules."))
    if known or isinstance(layer, PictureNetwork):
        return layer
    return _OneOfRows(layer, agent, n_agents)
