"""Networks of centralized critics, which read all observations, the state, or a set of agents.

Shapes: B any batch dims, N agents, F input features.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import groupby
from typing import TYPE_CHECKING, Any, Literal, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.types import Device

from torchrl_marl.errors import ConfigError
from torchrl_marl.modules.bodies import ACTIVATIONS, initialize
from torchrl_marl.modules.build import (
    encoder_maker,
    kinds_of,
    make_team_network,
    sharing_of_encoder,
    teams_of,
)
from torchrl_marl.modules.config import CriticConfig, NetworkConfig, has_memory, sharing_of
from torchrl_marl.modules.inputs import (
    AgentValues,
    Features,
    PickAgents,
    agent_features,
    concatenate,
    register_constants,
    widest,
)
from torchrl_marl.modules.networks import Context, Extras, Feedforward, TeamNetwork
from torchrl_marl.modules.registry import body_of
from torchrl_marl.modules.sharing.builder import share
from torchrl_marl.modules.stacks.module_stack import stack
from torchrl_marl.specs import GroupSpec

if TYPE_CHECKING:
    from torchrl_marl.modules.memory.cells import Memory

__all__ = [
    "SetNetwork",
    "columns_of_groups",
    "columns_of_state",
    "inputs_of_groups",
    "make_central_network",
    "make_set_network",
    "make_value_picker",
]


class SetNetwork(nn.Module):
    r"""Encodes each agent by its kind, pools the encodings of living agents, and reads the pool.

    .. math::
        h_i = \phi_{k(i)}(x_i), \qquad c = \tfrac{1}{|\text{living}|} \sum_{j \text{ living}} h_j,
        \qquad y_i = \rho(h_i, c) \ \text{ or } \ y = \rho(c)

    With ``pooling="attention"`` each agent attends to the living agents: the result is the agent's
    context :math:`c_i`. A team's context :math:`c` is the mean of these contexts over the living
    agents.

    Features of masked agents may hold anything, NaN included. The outputs of masked agents are
    finite, but meaningless unless ``per_agent`` is False. If no agent is alive, the context is 0.

    Args:
        in_features (int): features per agent; narrower kinds are padded with zeros.
        out_features (int): number of outputs per agent.
        kinds (sequence of int): kind of each agent, from 0; agents of a kind share an encoder.
            Parameters grow with the number of kinds, not of agents.
        num_cells (sequence of int): width of each layer of the encoders, at least one; the
            last is H, which is also the width of the head's hidden layer.
        activation (str): ``tanh``, ``relu``, ``elu``, ``gelu`` or ``silu``.
        pooling ("mean" or "attention"): attention takes time quadratic in the number of agents.
        num_heads (int): number of attention heads; divides H.
        per_agent (bool): whether each agent has an output; otherwise the team's output is repeated
            for every agent.
        device (torch.device, optional): device of the parameters.

    Shapes:
        - features: ``[*B, N, F]``; mask: ``[*B, N]``, bool; returns ``[*B, N, out]`` and no state

    Raises:
        ValueError: invalid settings, or features or a mask that do not fit ``kinds``.

    Reference: Zaheer et al., 2017, https://arxiv.org/abs/1703.06114 (mean); Lee et al., 2019,
    https://arxiv.org/abs/1810.00825 (attention). Differs from Lee et al.: no normalization, and a
    team's context is a mean, not a learned query.

    Reduces to: mean pooling, if the query weights of attention are 0.

    Examples:
        >>> network = SetNetwork(5, 1, [0, 0, 1], num_cells=[16], activation="tanh",
        ...                      pooling="mean")
        >>> mask = torch.tensor([True, False, True])
        >>> features = torch.randn(3, 5)
        >>> value, _ = network(features, mask)
        >>> value.shape
        torch.Size([3, 1])
        >>> features[1] = float("nan")
        >>> torch.equal(network(features, mask)[0][mask], value[mask])
        True
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        kinds: Sequence[int],
        *,
        num_cells: Sequence[int],
        activation: str,
        pooling: Literal["mean", "attention"],
        num_heads: int = 4,
        per_agent: bool = True,
        device: Device = None,
    ) -> None:
        super().__init__()
        _check_settings(kinds, num_cells, activation, pooling, num_heads)
        self.in_features = in_features
        self.n_agents = len(kinds)
        self.per_agent = per_agent
        width = num_cells[-1]
        self.encoder = _KindEncoder(in_features, num_cells, kinds, activation, device)
        attends = pooling == "attention"
        self.attention = _LivingAttention(width, num_heads, device) if attends else None
        self.head = nn.Sequential(
            nn.Linear(2 * width if per_agent else width, width, device=device),
            ACTIVATIONS[activation](),
            nn.Linear(width, out_features, device=device),
        )
        initialize(self, 1.0)

    def forward(
        self, features: Tensor, mask: Tensor | None = None, context: Context | None = None
    ) -> tuple[Tensor, None]:
        """Reads the living agents of every team; without a mask, all agents."""
        if mask is None:
            mask = torch.ones(features.shape[:-1], dtype=torch.bool, device=features.device)
        self._check_inputs(features, mask)
        features = torch.where(mask.unsqueeze(-1), features, 0.0)
        encoding = self.encoder(features)
        attended = encoding if self.attention is None else self.attention(encoding, mask)
        if not self.per_agent:
            output = self.head(_mean_of_living(attended, mask))
            return output.expand(*mask.shape, output.shape[-1]), None
        if self.attention is None:
            attended = _mean_of_living(encoding, mask).expand_as(encoding)
        return self.head(torch.cat([encoding, attended], -1)), None

    def _check_inputs(self, features: Tensor, mask: Tensor) -> None:
        if features.shape[-2:] != (self.n_agents, self.in_features):
            raise ValueError(
                f"features are {tuple(features.shape)}, expected [*batch, {self.n_agents} agents, "
                f"{self.in_features} features]."
            )
        if mask.dtype is not torch.bool or mask.shape != features.shape[:-1]:
            raise ValueError(
                f"a mask is {mask.dtype} {tuple(mask.shape)}, expected torch.bool "
                f"{tuple(features.shape[:-1])}."
            )


class _KindEncoder(nn.Module):
    """Perceptron for each kind of agent, run as one batched matmul per layer.

    Kinds with fewer agents than the largest are padded with empty rows.

    Shapes:
        - features: ``[*B, N, F]``; returns ``[*B, N, H]``
    """

    def __init__(self, in_features, num_cells, kinds, activation, device) -> None:
        super().__init__()
        # Integers, not an index buffer, which TorchRL's losses would treat as a parameter.
        self.n_kinds = max(kinds) + 1
        self.n_rows = max(list(kinds).count(kind) for kind in kinds)
        self.agents, self.rows = _slices_by_kind(kinds)
        widths = [in_features, *num_cells]
        self.layers = nn.ModuleList(
            _KindLinear(self.n_kinds, *sizes, device) for sizes in zip(widths, num_cells)
        )
        self.activation = ACTIVATIONS[activation]()

    def forward(self, features: Tensor) -> Tensor:
        """Sorts agents by kind, runs the layers, and restores the order."""
        batch = features.shape[:-2]
        n_rows = batch.numel() * self.n_rows
        encoding = self._sort_by_kind(features).reshape(self.n_kinds, n_rows, features.shape[-1])
        for layer in self.layers:
            encoding = self.activation(layer(encoding))
        encoding = encoding.reshape(self.n_kinds, *batch, self.n_rows, encoding.shape[-1])
        return _concatenate_agents([encoding[kind, ..., rows, :] for kind, rows in self.rows])

    def _sort_by_kind(self, features: Tensor) -> Tensor:
        if self.n_kinds == 1:
            return features.unsqueeze(0)
        sorted_kinds = []
        for runs in self.agents:
            rows = _concatenate_agents([features[..., run, :] for run in runs])
            sorted_kinds.append(F.pad(rows, (0, 0, 0, self.n_rows - rows.shape[-2])))
        return torch.stack(sorted_kinds)


def _concatenate_agents(agents: list[Tensor]) -> Tensor:
    return agents[0] if len(agents) == 1 else torch.cat(agents, -2)


class _KindLinear(nn.Module):
    """A linear layer for each kind, ``[K, rows, in] -> [K, rows, out]``."""

    def __init__(self, n_kinds, in_features, out_features, device) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(n_kinds, in_features, out_features, device=device))
        self.bias = nn.Parameter(torch.empty(n_kinds, 1, out_features, device=device))

    def forward(self, features: Tensor) -> Tensor:
        return torch.baddbmm(self.bias, features, self.weight)


class _LivingAttention(nn.Module):
    """Attention of every agent to the living agents; 0 if none is alive.

    Shapes:
        - encoding: ``[*B, N, H]``; mask: ``[*B, N]``; returns ``[*B, N, H]``
    """

    def __init__(self, width, num_heads, device) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.projection = nn.Linear(width, 3 * width, device=device)
        self.output = nn.Linear(width, width, device=device)

    def forward(self, encoding: Tensor, mask: Tensor) -> Tensor:
        """Mixes the encodings of the living agents."""
        any_alive = mask.any(-1, keepdim=True)
        # A softmax over no agents is NaN, and so is its gradient. Such rows therefore attend to all
        # agents, and their result is dropped.
        n_teams, n_agents = mask.shape[:-1].numel(), mask.shape[-1]
        readable = (mask | ~any_alive).reshape(n_teams, 1, 1, n_agents)
        features = encoding.shape[-1] // self.num_heads
        heads = self.projection(encoding).reshape(n_teams, n_agents, 3, self.num_heads, features)
        query, key, value = heads.movedim(2, 0).transpose(2, 3)
        mixed = F.scaled_dot_product_attention(query, key, value, attn_mask=readable)
        mixed = self.output(mixed.transpose(1, 2).reshape(encoding.shape))
        return torch.where(any_alive.unsqueeze(-1), mixed, 0.0)


def _mean_of_living(value: Tensor, mask: Tensor) -> Tensor:
    """Returns the mean over the living agents, ``[*B, 1, H]``; 0 if none is alive."""
    living = mask.unsqueeze(-1)
    total = torch.where(living, value, 0.0).sum(-2, keepdim=True)
    return total / living.sum(-2, keepdim=True).clamp_min(1)


def _slices_by_kind(kinds: Sequence[int]) -> tuple[list[list[slice]], list[tuple[int, slice]]]:
    """Returns slices of the agents of each kind, and each slice's place among its kind's rows."""
    agents: list[list[slice]] = [[] for _ in range(max(kinds) + 1)]
    rows, filled, start = [], [0] * len(agents), 0
    for kind, run in groupby(kinds):
        count = len(list(run))
        agents[kind].append(slice(start, start + count))
        rows.append((kind, slice(filled[kind], filled[kind] + count)))
        filled[kind] += count
        start += count
    return agents, rows


def _check_settings(kinds, num_cells, activation, pooling, num_heads) -> None:
    if not kinds or set(kinds) != set(range(max(kinds) + 1)):
        raise ValueError(
            f"kinds are {list(kinds)}, expected each agent's kind, numbered from 0 without gaps."
        )
    if not num_cells:
        raise ValueError("num_cells is empty, expected the width of at least one layer.")
    if activation not in ACTIVATIONS:
        raise ValueError(f"activation is {activation!r}, expected one of {', '.join(ACTIVATIONS)}.")
    if pooling not in ("mean", "attention"):
        raise ValueError(f"pooling is {pooling!r}, expected 'mean' or 'attention'.")
    if pooling == "attention" and (num_heads < 1 or num_cells[-1] % num_heads):
        raise ValueError(
            f"num_heads is {num_heads}, expected a divisor of the last width, {num_cells[-1]}."
        )


class GroupColumns(nn.Module):
    """Picks the columns of a row of features that each of several networks reads.

    Args:
        columns (sequence of sequence of int): columns of each of the K networks.

    Shapes:
        - features: ``[*B, F]``; returns ``[*B, K, widest]``, padded with zeros
    """

    index: Tensor
    own: Tensor | None

    def __init__(self, columns: Sequence[Sequence[int]], device: Device) -> None:
        super().__init__()
        widths = torch.tensor([len(mask) for mask in columns])
        widest = int(widths.max())
        rows = [[*mask, *[0] * (widest - len(mask))] for mask in columns]
        mask = torch.arange(widest) < widths.unsqueeze(-1)
        padded = mask if not bool(mask.all()) else None
        register_constants(self, device, index=torch.tensor(rows), own=padded)
        flat = [column for row in rows for column in row]
        self.in_order = flat == list(range(len(flat)))

    def forward(self, features: Tensor) -> Tensor:
        if self.in_order and features.shape[-1] == self.index.numel():  # a view is enough
            return features.unflatten(-1, tuple(self.index.shape))
        picked = features.index_select(-1, self.index.flatten())
        picked = picked.unflatten(-1, tuple(self.index.shape))
        return picked if self.own is None else torch.where(self.own, picked, 0.0)


class GroupMemory(nn.Module):
    """Runs a network with one memory for each group, whose agents all get its outputs and state.

    A memory is reset where all agents of its group begin an episode. It continues while agents are
    dead or wait.

    Args:
        network (TeamNetwork): network with a row for each of G groups.
        group_index (sequence of int): group of each agent, in order.
        device (torch.device, optional): device of the indices.

    Shapes:
        - features: ``[*B, F]``; context.state: ``[*B, N, S]``, equal within a group
        - context.is_init: ``[*B, N, 1]``
        - returns: ``[*B, N, O]`` and :class:`~torchrl_marl.modules.networks.Extras`
    """

    index: Tensor
    first: Tensor
    members: Tensor

    def __init__(self, network: TeamNetwork, group_index: Sequence[int], device: Device) -> None:
        super().__init__()
        self.network, index = network, torch.tensor(group_index)
        members = index == torch.arange(int(index.max()) + 1).unsqueeze(-1)
        first = members.int().argmax(-1)
        register_constants(self, device, index=index, first=first, members=members.unsqueeze(-1))

    @property
    def memories(self) -> list[Memory]:
        """Modules with a state across steps."""
        return self.network.memories

    def forward(
        self, features: Tensor, mask: Tensor | None, context: Context
    ) -> tuple[Tensor, Extras]:
        """Runs the network; it does not read the agents' mask."""
        assert context.is_init is not None
        init = (context.is_init.unsqueeze(-3) | ~self.members).all(-2)
        state = context.state.index_select(-2, self.first)
        output, extras = self.network(features, None, replace(context, state=state, is_init=init))
        assert extras.state is not None
        return self._of_agents(output), Extras(self._of_agents(extras.state))

    def _of_agents(self, x: Tensor) -> Tensor:
        """Repeats the row of a group for each of its agents."""
        if len(self.members) == 1:
            return x.expand(*x.shape[:-2], len(self.index), x.shape[-1])  # without a copy
        return x.index_select(-2, self.index)


def make_central_network(
    group: GroupSpec,
    columns: Sequence[Sequence[int]],
    inputs: Sequence[Features],
    config: NetworkConfig,
    *,
    per_agent: bool,
    **settings: Any,
) -> nn.Module:
    """Builds a network of all agents' features, with a value for every agent.

    With ``sharing: group`` each group has a network, and with ``full`` all groups share one. In
    both cases a network has an output for each of its agents. With any other ``sharing``, networks
    are built for single agents and shared as ``config.sharing`` says.

    Args:
        group (GroupSpec): agents to value, or several groups joined into one.
        columns (sequence of sequence of int): input features of each group's network.
        inputs (sequence of Features): layout of each network's input.
        config (NetworkConfig): body, widths, activation, sharing.
        per_agent (bool): whether each agent has a value; otherwise each group has one.
        **settings: ``gain`` and ``device`` of the networks.

    Shapes:
        - features: ``[*B, F]``; returns ``[*B, N, 1]``
    """
    make = body_of(config).make_network
    assert make is not None
    if not has_memory(config):
        return _make_feedforward_central_network(
            group, columns, inputs, config, make, per_agent, 1, group.group_index, settings
        )
    width, own, encoder_of = config.num_cells[-1], sharing_of_encoder(config), encoder_maker(make)
    owner, kinds, teams = group.group_index, kinds_of(group), teams_of(group)
    if not per_agent:  # a memory for each group
        owner = kinds = tuple(range(len(group.groups)))
        teams = group.teams
    encoder = _make_feedforward_central_network(
        group, columns, inputs, own, encoder_of, per_agent, width, owner, settings
    )
    network = make_team_network(encoder, 1, kinds, cast(Any, config), teams=teams, **settings)
    if per_agent:
        return network
    return GroupMemory(network, group.group_index, settings.get("device"))


def _make_feedforward_central_network(
    group: GroupSpec,
    columns: Sequence[Sequence[int]],
    inputs: Sequence[Features],
    config: NetworkConfig,
    make: Callable[..., nn.Module],
    per_agent: bool,
    width: int,
    owner: Sequence[int],
    settings: dict[str, Any],
) -> Feedforward:
    """Builds a network of all features, with ``width`` outputs for every owner's group."""
    shared, device = sharing_of(config), settings.get("device")
    sizes = [own.n_agents if per_agent else 1 for own in group.groups]
    same_columns = all(list(own) == list(columns[0]) for own in columns)
    if shared not in ("group", "full"):
        own = [columns[k] for k in owner]
        rows = [inputs[k] for k in owner]
        of_agents = rows, [width] * len(own), kinds_of(group)
        networks = share(make, *of_agents, config, teams=teams_of(group), **settings)
        return Feedforward(GroupColumns(own, device), networks)
    if len(sizes) == 1 or (shared == "full" and same_columns):
        index = list(range(group.n_agents)) if per_agent else list(owner)
        network_of_group = make(inputs[0], sum(sizes) * width, config, **settings)
        return Feedforward(network_of_group, AgentValues(index, False, sum(sizes), device, width))
    largest_size = max(sizes)
    if shared == "full":
        network: nn.Module = make(widest(inputs), largest_size * width, config, **settings)
    else:
        members = [make(row, n * width, config, **settings) for row, n in zip(inputs, sizes)]
        network = stack(members, pad=True)
    index = [
        k * largest_size + (i - owner.index(k) if per_agent else 0) for i, k in enumerate(owner)
    ]
    picked = AgentValues(index, True, largest_size * len(sizes), device, width)
    return Feedforward(GroupColumns(columns, device), network, picked)


def columns_of_groups(
    input_group: GroupSpec, group: GroupSpec, own_group: bool, widths: Sequence[int] | None = None
) -> list[list[int]]:
    """Returns the columns that each of ``group.groups`` reads in a row of all input agents.

    Args:
        input_group (GroupSpec): agents whose observations are in the row.
        group (GroupSpec): agents to value.
        own_group (bool): whether a network reads its own group only, instead of all agents of its
            team.
        widths (sequence of int, optional): number of each agent's features in the row; by default
            that of its observation, as in a :class:`TeamInput`.
    """
    own = input_group.observation_dims if widths is None else widths
    starts = [sum(own[:i]) for i in range(len(own))]
    return [
        [start + j for i, start in enumerate(starts) if reads[i] for j in range(own[i])]
        for reads in _agents_read_by_groups(input_group, group, own_group)
    ]


def columns_of_state(group: GroupSpec) -> list[list[int]]:
    """Returns the columns of the state that each of ``group.groups`` reads: those of its team."""
    spec = group.team_state_spec
    assert spec is not None
    width = spec.shape.numel()
    return [list(range(width * team, width * (team + 1))) for team in group.teams]


def inputs_of_groups(
    input_group: GroupSpec, group: GroupSpec, own_group: bool, standardized: bool
) -> list[Features]:
    """Returns the layout of the columns of :func:`columns_of_groups`, for each group."""
    rows = agent_features(input_group, standardized)
    return [
        concatenate(row for row, read in zip(rows, reads) if read)
        for reads in _agents_read_by_groups(input_group, group, own_group)
    ]


def _agents_read_by_groups(
    input_group: GroupSpec, group: GroupSpec, own_group: bool
) -> list[list[bool]]:
    """Returns a flag per group and input agent: whether the group's network reads the agent."""
    agents = [(input_group.groups[i].name, input_group.teams[i]) for i in input_group.group_index]
    return [
        [name == one.name if own_group else theirs == team for name, theirs in agents]
        for one, team in zip(group.groups, group.teams)
    ]


def make_set_network(
    group: GroupSpec, input_group: GroupSpec, config: CriticConfig, device: Device = None
) -> SetNetwork:
    """Builds a critic's network over the set of living agents.

    Args:
        group (GroupSpec): agents to value.
        input_group (GroupSpec): agents that the critic sees.
        config (CriticConfig): widths, activation, architecture.
        device (torch.device, optional): device of the parameters.

    Raises:
        ConfigError: a body or a layer norm that such a network does not support.
        ValueError: a way of sharing that such a network does not support, or several groups that
            would see each other without ``team``.
    """
    critic = f"a critic of architecture {config.architecture!r}"
    if config.body != "mlp":
        raise ConfigError(
            f"group {group.name!r}: {critic} needs perceptrons, but body is {config.body!r}; use "
            "architecture=mlp or body=mlp."
        )
    if config.layer_norm:
        raise ConfigError(
            f"group {group.name!r}: layer_norm is true, but {critic} has none; use "
            "architecture=mlp or layer_norm=false."
        )
    if sharing_of(config) not in ("group", "full"):
        raise ValueError(
            f"group {group.name!r}: {critic} is one network for all, but sharing is "
            f"{sharing_of(config)!r}; use sharing=group."
        )
    if input_group is group and len(group.groups) > 1:
        raise ValueError(
            f"group {group.name!r}: {critic} would let groups see each other; give each a separate "
            "critic, or team= to let them."
        )
    per_agent = config.value_per == "agent"
    return SetNetwork(
        input_group.observation_dim,
        max(_output_of_each_agent(group, per_agent)) + 1,
        kinds_of(input_group),
        num_cells=config.num_cells,
        activation=config.activation,
        pooling="attention" if config.architecture == "attention" else "mean",
        per_agent=per_agent,
        device=device,
    )


def make_value_picker(
    group: GroupSpec, input_group: GroupSpec, per_agent: bool = True, device: Device = None
) -> PickAgents:
    """Returns a module that picks a group's values from those of all agents that a critic sees."""
    names = [one.name for one in group.groups]
    agents = [
        i for i, k in enumerate(input_group.group_index) if input_group.groups[k].name in names
    ]
    return PickAgents(agents, _output_of_each_agent(group, per_agent), input_group.n_agents, device)


def _output_of_each_agent(group: GroupSpec, per_agent: bool) -> tuple[int, ...]:
    """Returns the index of each agent's output: its group's if values are per group, else 0."""
    return (0,) * group.n_agents if per_agent else group.group_index
