"""The networks inside actors and critics: what goes in, and who shares what.

Shapes: B any batch dims, N agents, O observation features, S state features.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from tensordict import TensorDictBase
from torch import Tensor, nn

from torchrl_marl.joining import check_inputs, flat_observation, own_first
from torchrl_marl.modules.bodies import make_mlp
from torchrl_marl.modules.config import NetworkConfig, sharing_of
from torchrl_marl.modules.normalization import ObservationNorm
from torchrl_marl.modules.precision import run_in
from torchrl_marl.modules.sharing import make_shared_mlp
from torchrl_marl.modules.stacks.building import stack
from torchrl_marl.specs import GroupSpec

__all__ = [
    "AgentInput",
    "AgentNetwork",
    "StateInput",
    "TeamInput",
    "gather_observation",
    "make_agent_network",
    "make_central_network",
]


class AgentInput(nn.Module):
    """Observations at the door of a network: flattened, side by side, masked, standardized.

    Features of masked agents and of padding become 0; an agent's own come first.

    Args:
        group (GroupSpec): whose observations; the last input is the mask where it has one.
        norm (ObservationNorm, optional): standardizes.

    Shapes:
        - leaves: ``[*B, N, *features]``; mask: ``[*B, N]``; returns ``[*B, N, O]``

    Raises:
        SpecError: inputs of other shapes or types than the group's specs say.
    """

    own: Tensor | None
    order: Tensor | None

    def __init__(
        self,
        group: GroupSpec,
        norm: ObservationNorm | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        self.group = group
        self.ndims = group.observation_ndims
        self.n_agents = group.n_agents
        self.masked = group.mask_key is not None
        self.norm = norm
        dims = torch.tensor(group.observation_dims, device=device)
        padded = group.observation_mask is not None
        own = torch.arange(group.observation_dim, device=device) < dims.unsqueeze(-1)
        self.register_buffer("own", own if padded else None, persistent=False)
        order = group.observation_order
        order = None if order is None else order.to(device)
        self.register_buffer("order", order, persistent=False)

    @staticmethod
    def keys(group: GroupSpec) -> list:
        """The keys of its inputs."""
        return [*group.observation_keys, *([group.mask_key] if group.mask_key else [])]

    def forward(self, *inputs: Tensor) -> Tensor:
        """Puts the leaves side by side."""
        leaves = inputs[: len(self.ndims)]
        check_inputs(self.group, leaves, inputs[len(self.ndims)] if self.masked else None)
        rows = [self._flat(leaf, ndim) for leaf, ndim in zip(leaves, self.ndims)]
        features = rows[0] if len(rows) == 1 else torch.cat(rows, -1)
        if self.order is not None:
            features = own_first(features, self.order)
        real = inputs[len(self.ndims)].unsqueeze(-1) if self.masked else None
        if self.own is not None:
            real = self.own if real is None else real & self.own
        if self.norm is not None:
            features = self.norm(features)
        if real is not None:
            features = torch.where(real, features, 0.0)
        return features

    @staticmethod
    def _flat(leaf: Tensor, ndim: int) -> Tensor:
        leaf = leaf if leaf.is_floating_point() else leaf.to(torch.get_default_dtype())
        if ndim == 1:
            return leaf
        return leaf.unsqueeze(-1) if ndim == 0 else leaf.flatten(-ndim)


class TeamInput(nn.Module):
    """All agents' observations in one row.

    Args:
        agents (AgentInput): brings them to ``[*B, N, O]``.
        own (sequence of int): how many of an agent's features are its own, for each agent.

    Shapes:
        - inputs: of ``agents``; returns ``[*B, F]`` with F the sum of ``own``
    """

    index: Tensor | None

    def __init__(self, agents: AgentInput, own: Sequence[int]) -> None:
        super().__init__()
        self.agents = agents
        widest = max(own)
        index = [i * widest + j for i, width in enumerate(own) for j in range(width)]
        device = None if agents.own is None else agents.own.device
        packed = None if min(own) == widest else torch.tensor(index, device=device)
        self.register_buffer("index", packed, persistent=False)

    def forward(self, *inputs: Tensor) -> Tensor:
        """Puts the agents side by side, without their padding."""
        features = self.agents(*inputs).flatten(-2)
        return features if self.index is None else features.index_select(-1, self.index)


class StateInput(nn.Module):
    """The state at the door of a critic.

    Shapes:
        - state: ``[*B, *state]``; returns ``[*B, S]``
    """

    def __init__(self, ndim: int) -> None:
        super().__init__()
        self.ndim = ndim

    def forward(self, state: Tensor) -> Tensor:
        """Flattens the state."""
        return state.flatten(-self.ndim) if self.ndim > 1 else state


class AgentNetwork(nn.Module):
    """Features, a network and what ends it, in a row; the features take several inputs.

    Args:
        features (nn.Module): brings the inputs to what the network takes.
        network (nn.Module): gives ``[*B, N, out]``.
        head (callable, optional): what ends it.
    """

    def __init__(
        self, features: nn.Module, network: nn.Module, head: nn.Module | None = None
    ) -> None:
        super().__init__()
        self.features = features
        self.network: nn.Module = network
        self.head = head
        self.precision = "float32"

    def forward(self, *inputs: Tensor) -> Tensor | tuple[Tensor, ...]:
        """Runs them."""
        output = run_in(self.precision, self.network, self.features(*inputs))
        return output if self.head is None else self.head(output)


class _Columns(nn.Module):
    """Different columns of one row for each of several networks.

    Args:
        columns (sequence of sequence of int): of each network.

    Shapes:
        - features: ``[*B, F]``; returns ``[*B, K, widest]``, zeros behind what is narrower
    """

    index: Tensor
    own: Tensor | None

    def __init__(self, columns: Sequence[Sequence[int]], device: torch.device | str | None) -> None:
        super().__init__()
        widths = torch.tensor([len(own) for own in columns], device=device)
        widest = int(widths.max())
        rows = [[*own, *[0] * (widest - len(own))] for own in columns]
        self.register_buffer("index", torch.tensor(rows, device=device), persistent=False)
        own = torch.arange(widest, device=device) < widths.unsqueeze(-1)
        self.register_buffer("own", None if bool(own.all()) else own, persistent=False)

    def forward(self, features: Tensor) -> Tensor:
        picked = features.index_select(-1, self.index.flatten())
        picked = picked.unflatten(-1, tuple(self.index.shape))
        return picked if self.own is None else torch.where(self.own, picked, 0.0)


class _Outputs(nn.Module):
    """A value for every agent from the outputs of one network, or of several.

    Args:
        index (sequence of int): the output that is each agent's, numbered through.
        several (bool): there is a dim of networks before that of outputs.
        n_outputs (int): how many there are.
    """

    index: Tensor | None

    def __init__(
        self,
        index: Sequence[int],
        several: bool,
        n_outputs: int,
        device: torch.device | str | None,
    ) -> None:
        super().__init__()
        self.several = several
        plain = list(index) == list(range(n_outputs))
        chosen = None if plain else torch.tensor(index, device=device)
        self.register_buffer("index", chosen, persistent=False)

    def forward(self, values: Tensor) -> Tensor:
        values = values.flatten(-2) if self.several else values
        values = values if self.index is None else values.index_select(-1, self.index)
        return values.unsqueeze(-1)


def make_agent_network(
    group: GroupSpec,
    out_features: int,
    config: NetworkConfig,
    *,
    gain: float,
    device: torch.device | str | None = None,
) -> nn.Module:
    """A multi-layer perceptron for every agent, ``[*B, N, O] -> [*B, N, out]``.

    Args:
        group (GroupSpec): the agents, their features and kinds.
        out_features (int): outputs for one agent.
        config (NetworkConfig): widths, activation, sharing.
        gain (float): scale of the last layer's orthogonal start.
        device (torch.device, optional): of the parameters.
    """
    own = group.observation_dims
    kinds = _kinds(group)
    shared = sharing_of(config)
    if (shared == "full" or shared == "group" and len(set(kinds)) == 1) and min(own) == max(own):
        return make_mlp(own[0], out_features, config, gain=gain, device=device)
    outputs = [out_features] * group.n_agents
    return make_shared_mlp(own, outputs, kinds, config, gain=gain, device=device)


def make_central_network(
    group: GroupSpec,
    columns: Sequence[Sequence[int]],
    config: NetworkConfig,
    *,
    per_agent: bool,
    gain: float,
    device: torch.device | str | None = None,
) -> nn.Module:
    """A network that sees everything, with a value for every agent, ``[*B, F] -> [*B, N, 1]``.

    One network serves each part of the group (``sharing: group``) or all (``full``), with an
    output for each agent; otherwise the agents have networks as ``config.sharing`` says.

    Args:
        group (GroupSpec): whose values.
        columns (sequence of sequence of int): the features that each part's network reads.
        config (NetworkConfig): widths, activation, sharing.
        per_agent (bool): a value for each agent, or one for each part.
        gain (float): scale of the last layer's orthogonal start.
        device (torch.device, optional): of the parameters.
    """
    shared, parts = sharing_of(config), group.part_index
    sizes = [part.n_agents if per_agent else 1 for part in group.parts]
    alike = all(list(own) == list(columns[0]) for own in columns)
    if shared not in ("group", "full"):
        own = [columns[part] for part in parts]
        own_networks = make_shared_mlp(
            [len(row) for row in own],
            [1] * len(own),
            _kinds(group),
            config,
            gain=gain,
            device=device,
        )
        return nn.Sequential(_Columns(own, device), own_networks)
    if len(sizes) == 1 or (shared == "full" and alike):
        index = list(range(group.n_agents)) if per_agent else list(parts)
        one = make_mlp(len(columns[0]), sum(sizes), config, gain=gain, device=device)
        return nn.Sequential(one, _Outputs(index, False, sum(sizes), device))
    widest = max(sizes)
    network: nn.Module
    if shared == "full":
        network = make_mlp(max(map(len, columns)), widest, config, gain=gain, device=device)
    else:
        members = [
            make_mlp(len(own), n, config, gain=gain, device=device)
            for own, n in zip(columns, sizes)
        ]
        network = stack(members, pad=True)
    firsts = [parts.index(part) for part in parts]
    index = [
        part * widest + (i - first if per_agent else 0)
        for i, (part, first) in enumerate(zip(parts, firsts))
    ]
    picked = _Outputs(index, True, widest * len(sizes), device)
    return nn.Sequential(_Columns(columns, device), network, picked)


def columns_of_parts(seen: GroupSpec, group: GroupSpec, own_part: bool) -> list[list[int]]:
    """The columns of a :class:`TeamInput` of ``seen`` that each part of ``group`` reads.

    Args:
        seen (GroupSpec): whose observations are in the row.
        group (GroupSpec): whose values are wanted.
        own_part (bool): only the part's own agents, or all.
    """
    own = seen.observation_dims
    starts = [sum(own[:i]) for i in range(len(own))]
    everything = list(range(sum(own)))
    if not own_part:
        return [everything for _ in group.parts]
    names = [seen.parts[i].name for i in seen.part_index]
    return [
        [
            start + j
            for name, start, width in zip(names, starts, own)
            if name == part.name
            for j in range(width)
        ]
        for part in group.parts
    ]


def _kinds(group: GroupSpec) -> tuple[int, ...]:
    return group.kinds or (0,) * group.n_agents


def gather_observation(
    group: GroupSpec, tensordict: TensorDictBase
) -> tuple[Tensor, Tensor | None]:
    """A group's observation leaves side by side, ``[*B, N, O]``, and its mask."""
    mask = None if group.mask_key is None else tensordict.get(group.mask_key)
    observation = flat_observation(group, tensordict)
    if group.observation_mask is not None:
        dims = torch.tensor(group.observation_dims, device=observation.device)
        own = torch.arange(group.observation_dim, device=observation.device) < dims.unsqueeze(-1)
        observation = torch.where(own, observation, 0.0)
    return observation, mask
