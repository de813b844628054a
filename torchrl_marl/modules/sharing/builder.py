"""Networks of several agents that share parameters as the settings say.

Shapes: B any batch dims, N agents, F features, D features of an id, I inputs, O outputs.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.types import Device

from torchrl_marl.errors import ConfigError
from torchrl_marl.modules.bodies import make_mlp
from torchrl_marl.modules.config import NetworkConfig, sharing_of
from torchrl_marl.modules.inputs import Features, widest
from torchrl_marl.modules.registry import SHARINGS
from torchrl_marl.modules.stacks.module_stack import ModuleStack, stack

__all__ = ["HIDDEN_GAIN", "AgentId", "AgentMask", "NetworkBuilder", "make_shared_mlp", "share"]


class AgentMask(nn.Module):
    """Replaces padding features of each agent, NaN included, by 0.

    Args:
        mask (Tensor): True for an agent's real features.
        persistent (bool): whether the mask belongs to the ``state_dict``.

    Shapes:
        - mask: ``[N, F]``; features: ``[*B, N, F]``; returns ``[*B, N, F]``
    """

    mask: Tensor

    def __init__(self, mask: Tensor, persistent: bool = False) -> None:
        super().__init__()
        self.register_buffer("mask", mask, persistent=persistent)

    def forward(self, features: Tensor) -> Tensor:
        """Masks the features."""
        return torch.where(self.mask, features, 0.0)


class AgentId(nn.Module):
    """Appends an agent's id to its features.

    Args:
        agent_id (Tensor): encoding of each agent's id; a parameter if it is learned.

    Shapes:
        - agent_id: ``[N, D]``; features: ``[*B, N, F]``; returns ``[*B, N, F + D]``
    """

    agent_id: Tensor

    def __init__(self, agent_id: Tensor) -> None:
        super().__init__()
        if isinstance(agent_id, nn.Parameter):
            self.agent_id = agent_id
        else:
            self.register_buffer("agent_id", agent_id, persistent=False)

    def forward(self, features: Tensor) -> Tensor:
        """Concatenates features and ids."""
        return torch.cat([features, self.agent_id.expand(*features.shape[:-1], -1)], -1)


HIDDEN_GAIN = 2**0.5

NetworkMaker = Callable[..., nn.Module]


@dataclass(frozen=True)
class NetworkBuilder:
    """Tools that each way of sharing uses to build the networks of N agents.

    Args:
        make (callable): builds one network, as :func:`~torchrl_marl.modules.bodies.make_mlp` does.
        inputs (tuple of Features): input layout of each agent.
        out_features (tuple of int): number of outputs of each agent.
        groups (tuple): group and kind of each agent.
        config (NetworkConfig): widths, activation, settings of the way of sharing.
        gain (float): gain of the last layers' orthogonal initialization.
        device (torch.device, optional): device of the parameters.
        teams (tuple of int): team of each agent, from 0. Teams share no parameters.
    """

    make: NetworkMaker
    inputs: tuple[Features, ...]
    out_features: tuple[int, ...]
    groups: tuple[Hashable, ...]
    config: NetworkConfig
    gain: float
    device: Device
    teams: tuple[int, ...]

    @property
    def n_agents(self) -> int:
        """Number N of agents."""
        return len(self.inputs)

    @property
    def widths(self) -> tuple[int, ...]:
        """Number of input features of each agent."""
        return tuple(row.width for row in self.inputs)

    @property
    def common(self) -> Features:
        """Input layout of one network that serves all agents."""
        return widest(self.inputs)

    def network(
        self,
        inputs: Features | None = None,
        out_features: int | None = None,
        *,
        gain: float | None = None,
        **kwargs: object,
    ) -> nn.Module:
        """Builds one network; by default one that can serve all agents.

        Args:
            inputs (Features, optional): its input layout.
            out_features (int, optional): number of outputs.
            gain (float, optional): gain of the last layer; default: the builder's.
            **kwargs: ``num_cells`` and ``activate_last_layer`` of the ``make`` function.
        """
        inputs = self.common if inputs is None else inputs
        outputs = max(self.out_features) if out_features is None else out_features
        gain = self.gain if gain is None else gain
        return self.make(inputs, outputs, self.config, gain=gain, device=self.device, **kwargs)

    def last_layer(self, in_features: int, out_features: int) -> nn.Module:
        """Builds a single linear layer."""
        settings: dict[str, Any] = {"gain": self.gain, "num_cells": [], "device": self.device}
        return make_mlp(Features(in_features), out_features, self.config, **settings)

    def by_index(self, index: Sequence[int]) -> nn.Sequential:
        """Builds networks by index, each as wide as the widest of its agents.

        Args:
            index (sequence of int): number of each agent's network, 0, 1, 2, ...

        Raises:
            ConfigError: an agent without a number, or a number without an agent.
        """
        if len(index) != self.n_agents or {*index} != {*range(len({*index}))}:
            raise ConfigError(
                f"sharing is {self.config.sharing!r}, whose index is {list(index)}, expected a "
                f"number for each of {self.n_agents} agents; number the networks 0, 1, 2, ..."
            )
        members = {
            number: [agent for agent, k in enumerate(index) if k == number] for number in index
        }
        inputs = [widest(self.inputs[agent] for agent in members[number]) for number in index]
        outputs = [max(self.out_features[agent] for agent in members[number]) for number in index]
        firsts = [index.index(number) for number in range(max(index) + 1)]
        networks = [self.network(inputs[first], outputs[first]) for first in firsts]
        together = stack([networks[number] for number in index], pad=True)
        return self.bounded([together], [row.width for row in inputs], outputs)

    def same(self, module: nn.Module) -> ModuleStack:
        """Returns one module for all agents."""
        return self.one_module_per_team(lambda: module)

    def one_module_per_team(self, make: Callable[[], nn.Module]) -> ModuleStack:
        """Returns one module for all agents of a team, made for each team."""
        modules = [make() for _ in range(max(self.teams) + 1)]
        # Padded although all widths agree. Padded perceptrons are compared by their layers only, so
        # un-shared copies also run as one call.
        return stack([modules[team] for team in self.teams], pad=True)

    def heads(self, modules: Sequence[nn.Module]) -> ModuleStack:
        """Returns a module for each agent."""
        return stack(modules, pad=True)

    def bounded(
        self, steps: Sequence[nn.Module], widths_in: Sequence[int], widths_out: Sequence[int]
    ) -> nn.Sequential:
        """Adds masks before and after layers, for agents narrower than their network."""
        before = self._masks_of_narrow_agents(self.widths, widths_in)
        after = self._masks_of_narrow_agents(self.out_features, widths_out)
        return nn.Sequential(*before, *steps, *after)

    def for_all(self, steps: Sequence[nn.Module]) -> nn.Sequential:
        """Adds masks as :meth:`bounded` does, for networks as wide as the widest agent."""
        n = self.n_agents
        return self.bounded(steps, [max(self.widths)] * n, [max(self.out_features)] * n)

    def _masks_of_narrow_agents(
        self, own: Sequence[int], widths: Sequence[int]
    ) -> Iterator[AgentMask]:
        if list(own) != list(widths):
            feature = torch.arange(max(widths), device=self.device)
            yield AgentMask(feature < torch.tensor(own, device=self.device).unsqueeze(-1))


def share(
    make: NetworkMaker,
    inputs: Sequence[Features],
    out_features: Sequence[int],
    groups: Sequence[Hashable],
    config: NetworkConfig,
    *,
    gain: float,
    device: Device = None,
    teams: Sequence[int] | None = None,
) -> nn.Sequential:
    """Builds networks of N agents that share parameters as ``config`` says and run in one call.

    Agents may differ in widths. A shared network is as wide as its widest agent; separate networks
    are stored padded. Padding of inputs has no effect, and padding of outputs is 0.

    Args:
        make (callable): builds one network, as :func:`~torchrl_marl.modules.bodies.make_mlp` does.
        inputs (sequence of Features): input layout of each agent.
        out_features (sequence of int): number of outputs of each agent.
        groups (sequence): group and kind of each agent, for ``sharing: group``.
        config (NetworkConfig): widths, activation, sharing.
        gain (float): gain of the last layer's orthogonal initialization; hidden layers use sqrt(2).
        device (torch.device, optional): device of the parameters.
        teams (sequence of int, optional): team of each agent, from 0, for ``sharing: full`` and
            ``agent_id``; by default all agents are one team.

    Shapes:
        - features: ``[*B, N, I]``; returns ``[*B, N, O]``

    Reference: ``masks`` is SNP-PS of Kim and Sung, 2023, https://arxiv.org/abs/2303.00912;
    ``clusters`` is SePS of Christianos et al., 2021, https://arxiv.org/abs/2102.07475, whose
    index is found by :func:`cluster_agents`.

    Raises:
        ConfigError: an unknown way of sharing, one that does not fit the agents, or contradictory
            settings.
        ValueError: arguments for different numbers of agents.
    """
    if len({len(inputs), len(out_features), len(groups)}) > 1 or not inputs:
        raise ValueError(
            f"{len(inputs)} in_features, {len(out_features)} out_features and "
            f"{len(groups)} groups, expected one of each for every agent."
        )
    sharing = SHARINGS.of(sharing_of(config))
    of_agents = tuple(inputs), tuple(out_features), tuple(groups)
    teams = (0,) * len(groups) if teams is None else tuple(teams)
    builder = NetworkBuilder(make, *of_agents, config, gain, device, teams)
    networks: Any = sharing.make(builder)
    is_module = isinstance(networks, nn.Module)
    if not is_module:
        raise ConfigError(
            f"sharing is {config.sharing!r}, which returns a {type(networks).__name__}, expected "
            "a torch.nn.Module, such as builder.by_index([0, 0, 1, 1])."
        )
    return networks


def make_shared_mlp(
    in_features: Sequence[int],
    out_features: Sequence[int],
    index_of_group: Sequence[Hashable],
    config: NetworkConfig,
    *,
    gain: float,
    device: Device = None,
) -> nn.Sequential:
    """Builds multi-layer perceptrons of N agents, see :func:`share`.

    Args:
        in_features (sequence of int): number of input features of each agent.
        out_features, index_of_group, config, gain, device: as in :func:`share`.

    Examples:
        >>> config = NetworkConfig([8], sharing="trunk")
        >>> network = make_shared_mlp([5, 5, 3], [2, 2, 1], [0, 0, 1], config, gain=0.01)
        >>> network(torch.randn(7, 3, 5)).shape
        torch.Size([7, 3, 2])
    """
    inputs = [Features(width) for width in in_features]
    return share(make_mlp, inputs, out_features, index_of_group, config, gain=gain, device=device)
