"""The networks inside actors and critics: one MLP for all agents of a group, or one each.

Shapes: B any batch dims, N agents, O observation features, S state features.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from tensordict import TensorDictBase
from torch import Tensor, nn
from torchrl.modules import MLP, MultiAgentMLP

from torchrl_marl.modules.config import NetworkConfig
from torchrl_marl.modules.normalization import ObservationNorm
from torchrl_marl.specs import GroupSpec

__all__ = [
    "ACTIVATIONS",
    "AgentInput",
    "AgentNetwork",
    "StateInput",
    "gather_observation",
    "make_network",
]

ACTIVATIONS: dict[str, type[nn.Module]] = {
    "tanh": nn.Tanh,
    "relu": nn.ReLU,
    "elu": nn.ELU,
    "gelu": nn.GELU,
    "silu": nn.SiLU,
}


class AgentInput(nn.Module):
    """Observations at the door of a network: flattened, side by side, masked, standardized.

    Args:
        ndims (sequence of int): feature dims of each observation leaf.
        masked (bool): the last input is the mask; masked agents' features become 0.
        norm (ObservationNorm, optional): standardizes.

    Shapes:
        - leaves: ``[*B, N, *features]``; mask: ``[*B, N]``; returns ``[*B, N, O]``
    """

    def __init__(self, ndims: Sequence[int], masked: bool, norm: ObservationNorm | None) -> None:
        super().__init__()
        self.ndims = tuple(ndims)
        self.masked = masked
        self.norm = norm

    def forward(self, *inputs: Tensor) -> Tensor:
        """Puts the leaves side by side."""
        leaves = inputs[: len(self.ndims)]
        rows = [self._flat(leaf, ndim) for leaf, ndim in zip(leaves, self.ndims)]
        features = rows[0] if len(rows) == 1 else torch.cat(rows, -1)
        if self.norm is not None:
            features = self.norm(features)
        if self.masked:
            features = torch.where(inputs[len(self.ndims)].unsqueeze(-1), features, 0.0)
        return features

    @staticmethod
    def _flat(leaf: Tensor, ndim: int) -> Tensor:
        leaf = leaf if leaf.is_floating_point() else leaf.to(torch.get_default_dtype())
        if ndim == 1:
            return leaf
        return leaf.unsqueeze(-1) if ndim == 0 else leaf.flatten(-ndim)


class StateInput(nn.Module):
    """The state at the door of a critic, repeated for every agent.

    Shapes:
        - state: ``[*B, *state]``; returns ``[*B, N, S]``
    """

    def __init__(self, n_agents: int, ndim: int) -> None:
        super().__init__()
        self.n_agents = n_agents
        self.ndim = ndim

    def forward(self, state: Tensor) -> Tensor:
        """Repeats the state without a copy."""
        state = state.flatten(-self.ndim) if self.ndim > 1 else state
        return state.unsqueeze(-2).expand(*state.shape[:-1], self.n_agents, state.shape[-1])


class AgentNetwork(nn.Module):
    """Features, a network and what ends it, in a row; the features take several inputs.

    Args:
        features (nn.Module): brings the inputs to ``[*B, N, F]``.
        network (nn.Module): ``[*B, N, F] -> [*B, N, out]``.
        head (callable, optional): what ends it.
    """

    def __init__(
        self, features: nn.Module, network: nn.Module, head: nn.Module | None = None
    ) -> None:
        super().__init__()
        self.features = features
        self.network = network
        self.head = head

    def forward(self, *inputs: Tensor) -> Tensor | tuple[Tensor, ...]:
        """Runs them."""
        output = self.network(self.features(*inputs))
        return output if self.head is None else self.head(output)


class _SharedByTeam(nn.Module):
    """One network whose input is the whole team and whose output each agent gets."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, features: Tensor) -> Tensor:
        output = self.network(features.flatten(-2))
        return output.unsqueeze(-2).expand(*output.shape[:-1], features.shape[-2], -1)


class _SharedState(nn.Module):
    """One network that reads the state once, since all agents' rows are the same."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, features: Tensor) -> Tensor:
        output = self.network(features.select(-2, 0))
        return output.unsqueeze(-2).expand(*output.shape[:-1], features.shape[-2], -1)


def make_network(
    in_features: int,
    out_features: int,
    n_agents: int,
    config: NetworkConfig,
    *,
    centralized: bool,
    same_input: bool = False,
    gain: float,
    device: torch.device | str | None = None,
) -> nn.Module:
    """A multi-layer perceptron over an agent dim, ``[*B, N, in] -> [*B, N, out]``.

    Args:
        in_features (int): features of one agent.
        out_features (int): outputs for one agent.
        n_agents (int): number N of agents.
        config (NetworkConfig): widths, activation, sharing.
        centralized (bool): the input of each agent is all agents' features.
        same_input (bool): all agents' features are equal, so a shared network reads them once.
        gain (float): scale of the last layer's orthogonal start.
        device (torch.device, optional): of the parameters.
    """
    keywords = {
        "num_cells": list(config.num_cells),
        "activation_class": ACTIVATIONS[config.activation],
        "device": device,
    }
    if config.share_params:
        width = in_features * n_agents if centralized else in_features
        network: nn.Module = MLP(in_features=width, out_features=out_features, **keywords)
        _initialize(network, gain)
        if centralized:
            return _SharedByTeam(network)
        return _SharedState(network) if same_input else network
    network = MultiAgentMLP(
        n_agent_inputs=in_features,
        n_agent_outputs=out_features,
        n_agents=n_agents,
        centralized=centralized,
        share_params=False,
        use_td_params=False,
        **keywords,
    )
    _initialize(network, gain)
    return network


@torch.no_grad()
def _initialize(network: nn.Module, gain: float) -> None:
    """Orthogonal weights, per agent where parameters are stacked; biases 0."""
    weights = []
    for name, parameter in network.named_parameters():
        if name.endswith("bias"):
            parameter.zero_()
        else:
            weights.append(parameter)
    for weight in weights:
        scale = gain if weight is weights[-1] else math.sqrt(2.0)
        for member in weight if weight.ndim == 3 else [weight]:
            nn.init.orthogonal_(member, scale)


def gather_observation(
    group: GroupSpec, tensordict: TensorDictBase
) -> tuple[Tensor, Tensor | None]:
    """A group's observation leaves side by side, ``[*B, N, O]``, and its mask."""
    features = AgentInput(group.observation_ndims, False, None)
    leaves = [tensordict.get(key) for key in group.observation_keys]
    mask = None if group.mask_key is None else tensordict.get(group.mask_key)
    return features(*leaves), mask
