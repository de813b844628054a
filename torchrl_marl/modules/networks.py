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


class _OneForTeam(nn.Module):
    """One network for the whole team, with an output of its own for each agent.

    Args:
        network (nn.Module): ``[*B, features] -> [*B, N * out]``.
        n_agents (int): number N of agents.
        same_input (bool): all agents' rows are equal, so the first is the input; otherwise all
            of them side by side are.
    """

    def __init__(self, network: nn.Module, n_agents: int, same_input: bool) -> None:
        super().__init__()
        self.network = network
        self.n_agents = n_agents
        self.same_input = same_input

    def forward(self, features: Tensor) -> Tensor:
        inputs = features.select(-2, 0) if self.same_input else features.flatten(-2)
        return self.network(inputs).unflatten(-1, (self.n_agents, -1))


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
        centralized (bool): the input of each agent is all agents' features; a shared network
            then has an output for each agent.
        same_input (bool): all agents' features are equal; likewise.
        gain (float): scale of the last layer's orthogonal start.
        device (torch.device, optional): of the parameters.
    """
    keywords = {
        "num_cells": list(config.num_cells),
        "activation_class": ACTIVATIONS[config.activation],
        "device": device,
    }
    if config.share_params:
        one_for_team = centralized or same_input
        network: nn.Module = MLP(
            in_features=in_features * n_agents if centralized else in_features,
            out_features=out_features * n_agents if one_for_team else out_features,
            **keywords,
        )
        _initialize(network, gain)
        return _OneForTeam(network, n_agents, same_input) if one_for_team else network
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
