"""Parameter sharing: the networks of all agents as one batched network, whoever shares what.

Shapes: B any batch dims, N agents, I input features of the widest agent, O outputs of the widest,
D features of who an agent is, F features of a layer.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torchrl.modules import MLP

from torchrl_marl.errors import ConfigError, nearest
from torchrl_marl.modules.bodies import make_mlp
from torchrl_marl.modules.config import AGENT_IDS, NetworkConfig, sharing_of
from torchrl_marl.modules.stacks.building import stack
from torchrl_marl.modules.stacks.module_stack import ModuleStack

__all__ = ["AgentId", "AgentMask", "make_shared_mlp"]

HIDDEN_GAIN = 2**0.5

Device = torch.device | str | None


class AgentMask(nn.Module):
    """Features that an agent has; what stands in the others, NaN included, becomes 0.

    Args:
        mask (Tensor): True for features that it has.
        persistent (bool): the mask belongs to the ``state_dict``.

    Shapes:
        - mask: ``[N, F]``; features: ``[*B, N, F]``; returns ``[*B, N, F]``
    """

    mask: Tensor

    def __init__(self, mask: Tensor, persistent: bool = False) -> None:
        super().__init__()
        self.register_buffer("mask", mask, persistent=persistent)

    def forward(self, features: Tensor) -> Tensor:
        """Replaces the others."""
        return torch.where(self.mask, features, 0.0)


class AgentId(nn.Module):
    """Who an agent is, beside its features.

    Args:
        agent_id (Tensor): a parameter if it is learned.

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
        """Puts them side by side."""
        return torch.cat([features, self.agent_id.expand(*features.shape[:-1], -1)], -1)


def make_shared_mlp(
    in_features: Sequence[int],
    out_features: Sequence[int],
    index_of_group: Sequence[Hashable],
    config: NetworkConfig,
    *,
    gain: float,
    device: Device = None,
) -> nn.Sequential:
    """Multi-layer perceptrons of N agents that share parameters as the config says, in one call.

    Agents may differ in widths. Where they share a network, it is as wide as the widest of them;
    where they do not, narrower ones are stored padded. Either way nothing of what stands behind
    an agent's own input reaches anything, and the outputs behind its own are 0.

    Args:
        in_features (sequence of int): input features of each agent.
        out_features (sequence of int): outputs of each agent.
        index_of_group (sequence): the group and kind of each agent, for ``sharing: group``.
        config (NetworkConfig): widths, activation, sharing.
        gain (float): scale of the last layer's orthogonal start; hidden layers have sqrt(2).
        device (torch.device, optional): of the parameters.

    Shapes:
        - features: ``[*B, N, I]``; returns ``[*B, N, O]``

    Reference: ``masks`` is SNP-PS of Kim and Sung, 2023, https://arxiv.org/abs/2303.00912;
    ``clusters`` is SePS of Christianos et al., 2021, https://arxiv.org/abs/2102.07475, whose
    index :func:`cluster_agents` finds.

    Raises:
        ConfigError: a sharing that is unknown or does not fit the agents, or contradictions.
        ValueError: arguments that differ in their number of agents.

    Examples:
        >>> config = NetworkConfig([8], sharing="trunk")
        >>> network = make_shared_mlp([5, 5, 3], [2, 2, 1], [0, 0, 1], config, gain=0.01)
        >>> network(torch.randn(7, 3, 5)).shape
        torch.Size([7, 3, 2])
    """
    lengths = {len(in_features), len(out_features), len(index_of_group)}
    if len(lengths) > 1 or not in_features:
        raise ValueError(
            f"{len(in_features)} in_features, {len(out_features)} out_features and "
            f"{len(index_of_group)} groups, expected one of each for every agent."
        )
    sharing = sharing_of(config)
    if sharing in ("trunk", "masks") and not config.num_cells:
        raise ConfigError(f"sharing is {sharing!r}, which needs hidden layers; set num_cells.")
    maker = _Maker(tuple(in_features), tuple(out_features), config, gain, device)
    if sharing == "trunk":
        return maker.trunk()
    if sharing == "agent_id":
        return maker.agent_id()
    if sharing == "masks":
        return maker.masks()
    return maker.index(_index(sharing, index_of_group, config))


def _index(sharing: str, groups: Sequence[Hashable], config: NetworkConfig) -> list[int]:
    """The network of each agent."""
    n_agents = len(groups)
    if sharing == "none":
        return list(range(n_agents))
    if sharing == "full":
        return [0] * n_agents
    if sharing == "group":
        numbers = {group: number for number, group in enumerate(dict.fromkeys(groups))}
        return [numbers[group] for group in groups]
    index = config.sharing_index
    if index is None:
        how = "find it first by cluster_agents" if sharing == "clusters" else "set it"
        raise ConfigError(f"sharing is {sharing!r}, but sharing_index is not set; {how}.")
    if len(index) != n_agents:
        raise ConfigError(
            f"sharing_index has {len(index)} entries, expected {n_agents}, one for each agent."
        )
    if set(index) != set(range(len(set(index)))):
        missing = next(number for number in range(n_agents) if number not in index)
        what = "holds a negative number" if min(index) < 0 else f"leaves out network {missing}"
        raise ConfigError(f"sharing_index {list(index)} {what}; number the networks 0, 1, 2, ...")
    return list(index)


@dataclass(frozen=True)
class _Maker:
    """What the networks of all ways of sharing are made from."""

    in_features: tuple[int, ...]
    out_features: tuple[int, ...]
    config: NetworkConfig
    gain: float
    device: Device

    @property
    def n_agents(self) -> int:
        return len(self.in_features)

    def index(self, index: Sequence[int]) -> nn.Sequential:
        """Networks by number; each as wide as the widest of its agents."""
        widths = [
            [max(f for f, k in zip(features, index) if k == number) for number in index]
            for features in (self.in_features, self.out_features)
        ]
        shapes = [*zip(*widths)]
        members = [self._mlp(*shapes[index.index(number)]) for number in range(max(index) + 1)]
        network = stack([members[number] for number in index], pad=True)
        return self._bounded([network], *widths)

    def trunk(self) -> nn.Sequential:
        """Hidden layers of all, a last layer of each."""
        *cells, last = self.config.num_cells
        trunk = self._mlp(max(self.in_features), last, cells, HIDDEN_GAIN, activate_last_layer=True)
        heads = [self._mlp(last, width, []) for width in self.out_features]
        layers = [self._same(trunk), stack(heads, pad=True)]
        return self._bounded(layers, [max(self.in_features)] * self.n_agents, self.out_features)

    def agent_id(self) -> nn.Sequential:
        """One network of all, that reads who the agent is."""
        word = self.config.agent_id
        if word not in AGENT_IDS:
            raise ConfigError(
                f"agent_id is {word!r}; {nearest(str(word), AGENT_IDS)}"
                f"expected one of {', '.join(AGENT_IDS)}."
            )
        if word == "onehot":
            agent_id = torch.eye(self.n_agents, device=self.device)
        else:
            shape = (self.n_agents, self.config.agent_id_size)
            agent_id = nn.Parameter(torch.randn(shape, device=self.device))
        features, outputs = max(self.in_features), max(self.out_features)
        network = self._mlp(features + agent_id.shape[-1], outputs)
        layers = [AgentId(agent_id), self._same(network)]
        return self._bounded(layers, [features] * self.n_agents, [outputs] * self.n_agents)

    def masks(self) -> nn.Sequential:
        """One network of all, of which each agent lacks some hidden units."""
        features, outputs = max(self.in_features), max(self.out_features)
        *hidden, last = _layers_of(self._mlp(features, outputs))
        generator = torch.Generator().manual_seed(self.config.mask_seed)
        steps: list[nn.Module] = []
        for layer, width in zip(hidden, self.config.num_cells):
            lacking = min(round(self.config.mask_ratio * width), width - 1)
            rank = torch.rand(self.n_agents, width, generator=generator).argsort(-1)
            # In the state: with masks of another seed, it would be another network.
            mask = AgentMask((rank >= lacking).to(self.device), persistent=True)
            steps += [self._same(layer), mask]
        steps.append(self._same(last))
        return self._bounded(steps, [features] * self.n_agents, [outputs] * self.n_agents)

    def _mlp(
        self,
        in_features: int,
        out_features: int,
        num_cells: Sequence[int] | None = None,
        gain: float | None = None,
        **kwargs: Any,
    ) -> MLP:
        gain = self.gain if gain is None else gain
        return make_mlp(
            in_features,
            out_features,
            self.config,
            num_cells=num_cells,
            gain=gain,
            device=self.device,
            **kwargs,
        )

    def _same(self, module: nn.Module) -> ModuleStack:
        # Padded, though all widths agree: perceptrons are then compared by their layers only, so
        # that un-shared copies also run as one call.
        return stack([module] * self.n_agents, pad=True)

    def _bounded(
        self, steps: Sequence[nn.Module], widths_in: Sequence[int], widths_out: Sequence[int]
    ) -> nn.Sequential:
        """With masks before and after, where an agent is narrower than the network it uses."""
        before = self._own(self.in_features, widths_in)
        after = self._own(self.out_features, widths_out)
        return nn.Sequential(*before, *steps, *after)

    def _own(self, own: Sequence[int], widths: Sequence[int]) -> Iterator[AgentMask]:
        if list(own) != list(widths):
            feature = torch.arange(max(widths), device=self.device)
            yield AgentMask(feature < torch.tensor(own, device=self.device).unsqueeze(-1))


def _layers_of(network: nn.Sequential) -> list[nn.Sequential]:
    """Each linear map with the activation behind it."""
    layers: list[list[nn.Module]] = []
    for step in network:
        if isinstance(step, nn.Linear):
            layers.append([])
        layers[-1].append(step)
    return [nn.Sequential(*layer) for layer in layers]
