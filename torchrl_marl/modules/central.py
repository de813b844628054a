"""Central critics: what they see, and the values of several agents from one network.

Shapes: B any batch dims, N agents, F features of all agents.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn

from torchrl_marl.errors import ConfigError
from torchrl_marl.modules.bodies import Feedforward
from torchrl_marl.modules.config import CriticConfig, NetworkConfig, has_memory, sharing_of
from torchrl_marl.modules.heads import AgentValues, PickAgents
from torchrl_marl.modules.inputs import Features, agent_features, side_by_side, widest
from torchrl_marl.modules.networks import kinds_of
from torchrl_marl.modules.registry import body_of
from torchrl_marl.modules.set_critic import SetNetwork
from torchrl_marl.modules.sharing.builder import share
from torchrl_marl.modules.stacks.building import stack
from torchrl_marl.modules.team_network import (
    encoder_maker,
    make_team_network,
    sharing_of_encoder,
)
from torchrl_marl.specs import GroupSpec

__all__ = [
    "columns_of_groups",
    "inputs_of_groups",
    "make_central_network",
    "make_set_network",
    "pick_of",
]


class GroupColumns(nn.Module):
    """Picks different columns of one row for each of several networks.

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
        flat = [column for row in rows for column in row]
        self.in_order = flat == list(range(len(flat)))

    def forward(self, features: Tensor) -> Tensor:
        if self.in_order and features.shape[-1] == self.index.numel():  # a view will do
            return features.unflatten(-1, tuple(self.index.shape))
        picked = features.index_select(-1, self.index.flatten())
        picked = picked.unflatten(-1, tuple(self.index.shape))
        return picked if self.own is None else torch.where(self.own, picked, 0.0)


def make_central_network(
    group: GroupSpec,
    columns: Sequence[Sequence[int]],
    inputs: Sequence[Features],
    config: NetworkConfig,
    *,
    per_agent: bool,
    gain: float,
    device: torch.device | str | None = None,
) -> nn.Module:
    """Builds a network that sees everything, with a value for every agent.

    One network serves each of the groups that are trained as one (``sharing: group``), or all
    (``full``), with an output for each agent; otherwise the agents have networks as
    ``config.sharing`` says.

    Args:
        group (GroupSpec): whose values; also several groups as one.
        columns (sequence of sequence of int): the features that each group's network reads.
        inputs (sequence of Features): what they are.
        config (NetworkConfig): body, widths, activation, sharing.
        per_agent (bool): a value for each agent, or one for each group.
        gain (float): scale of the last layer's orthogonal start.
        device (torch.device, optional): of the parameters.

    Shapes:
        - features: ``[*B, F]``; returns ``[*B, N, 1]``
    """
    make = body_of(config).make_network
    assert make is not None
    settings: dict = {"gain": gain, "device": device}
    if not has_memory(config):
        return _central(group, columns, inputs, config, make, per_agent, 1, settings)
    width, own, kinds = config.num_cells[-1], sharing_of_encoder(config), kinds_of(group)
    encoder = _central(group, columns, inputs, own, encoder_maker(make), True, width, settings)
    return make_team_network(encoder, 1, kinds, cast(Any, config), **settings)


def _central(
    group: GroupSpec,
    columns: Sequence[Sequence[int]],
    inputs: Sequence[Features],
    config: NetworkConfig,
    make: Callable[..., nn.Module],
    per_agent: bool,
    width: int,
    settings: dict[str, Any],
) -> Feedforward:
    """Builds a network that sees everything, with so many outputs for every agent."""
    shared, owner = sharing_of(config), group.group_index
    sizes = [own.n_agents if per_agent else 1 for own in group.groups]
    alike = all(list(own) == list(columns[0]) for own in columns)
    device = settings["device"]
    if shared not in ("group", "full"):
        own = [columns[k] for k in owner]
        rows = [inputs[k] for k in owner]
        networks = share(make, rows, [width] * len(own), kinds_of(group), config, **settings)
        return Feedforward(GroupColumns(own, device), networks)
    if len(sizes) == 1 or (shared == "full" and alike):
        index = list(range(group.n_agents)) if per_agent else list(owner)
        one = make(inputs[0], sum(sizes) * width, config, **settings)
        return Feedforward(one, AgentValues(index, False, sum(sizes), device, width))
    most = max(sizes)
    if shared == "full":
        network: nn.Module = make(widest(inputs), most * width, config, **settings)
    else:
        members = [make(row, n * width, config, **settings) for row, n in zip(inputs, sizes)]
        network = stack(members, pad=True)
    firsts = [owner.index(k) for k in owner]
    index = [
        k * most + (i - first if per_agent else 0)
        for i, (k, first) in enumerate(zip(owner, firsts))
    ]
    picked = AgentValues(index, True, most * len(sizes), device, width)
    return Feedforward(GroupColumns(columns, device), network, picked)


def columns_of_groups(seen: GroupSpec, group: GroupSpec, own_group: bool) -> list[list[int]]:
    """Returns the columns of a :class:`TeamInput` of ``seen`` that each of ``group.groups`` reads.

    Args:
        seen (GroupSpec): whose observations are in the row.
        group (GroupSpec): whose values are wanted.
        own_group (bool): only a group's own agents, or all.
    """
    own = seen.observation_dims
    starts = [sum(own[:i]) for i in range(len(own))]
    return [
        [start + j for i, start in enumerate(starts) if reads[i] for j in range(own[i])]
        for reads in _who_is_seen(seen, group, own_group)
    ]


def inputs_of_groups(
    seen: GroupSpec, group: GroupSpec, own_group: bool, standardized: bool
) -> list[Features]:
    """Returns what the columns of :func:`columns_of_groups` hold, for each of ``group.groups``."""
    rows = agent_features(seen, standardized)
    return [
        side_by_side(row for row, read in zip(rows, reads) if read)
        for reads in _who_is_seen(seen, group, own_group)
    ]


def _who_is_seen(seen: GroupSpec, group: GroupSpec, own_group: bool) -> list[list[bool]]:
    """Returns which agents of ``seen`` each of ``group.groups`` sees: its team's, or its own."""
    agents = [(seen.groups[i].name, seen.teams[i]) for i in seen.group_index]
    return [
        [name == one.name if own_group else theirs == team for name, theirs in agents]
        for one, team in zip(group.groups, group.teams)
    ]


def make_set_network(
    group: GroupSpec,
    seen: GroupSpec,
    config: CriticConfig,
    device: torch.device | str | None = None,
) -> SetNetwork:
    """Builds a critic's network over the set of living agents.

    Args:
        group (GroupSpec): whose values.
        seen (GroupSpec): the agents that the critic sees.
        config (CriticConfig): widths, activation, architecture.
        device (torch.device, optional): of the parameters.

    Raises:
        ConfigError: a body or a way of sharing that such a network does not have.
        ValueError: groups that would see each other.
    """
    if config.body != "mlp":
        raise ConfigError(
            f"group {group.name!r}: a critic of architecture {config.architecture!r} has "
            f"perceptrons, but body is {config.body!r}; use architecture=mlp or body=mlp."
        )
    if config.layer_norm:
        raise ConfigError(
            f"group {group.name!r}: layer_norm is true, but a critic of architecture "
            f"{config.architecture!r} has none; use architecture=mlp or layer_norm=false."
        )
    if sharing_of(config) not in ("group", "full"):
        raise ValueError(
            f"group {group.name!r}: a critic of architecture {config.architecture!r} is one "
            f"network for all, but sharing is {sharing_of(config)!r}; use sharing=group."
        )
    if seen is group and len(group.groups) > 1:
        raise ValueError(
            f"group {group.name!r}: a critic of architecture {config.architecture!r} would let "
            "groups see each other; give each its own critic, or team= to let them."
        )
    per_agent = config.value_per == "agent"
    return SetNetwork(
        seen.observation_dim,
        max(_outputs_of(group, per_agent)) + 1,
        kinds_of(seen),
        num_cells=config.num_cells,
        activation=config.activation,
        pooling="attention" if config.architecture == "attention" else "mean",
        per_agent=per_agent,
        device=device,
    )


def pick_of(
    group: GroupSpec,
    seen: GroupSpec,
    per_agent: bool = True,
    device: torch.device | str | None = None,
) -> PickAgents:
    """Returns what picks a group's values from those of all agents that a critic sees."""
    names = [one.name for one in group.groups]
    agents = [i for i, k in enumerate(seen.group_index) if seen.groups[k].name in names]
    return PickAgents(agents, _outputs_of(group, per_agent), seen.n_agents, device)


def _outputs_of(group: GroupSpec, per_agent: bool) -> tuple[int, ...]:
    """A team's value is its group's: one output for each, where several are trained as one."""
    return (0,) * group.n_agents if per_agent else group.group_index
