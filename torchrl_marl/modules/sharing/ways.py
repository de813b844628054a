"""Ways of sharing, which build the networks of all agents. :mod:`..registry` names them.

Shapes: N agents.
"""

from __future__ import annotations

import torch
from torch import nn

from torchrl_marl.errors import ConfigError, nearest
from torchrl_marl.modules.config import AGENT_IDS
from torchrl_marl.modules.sharing.builder import HIDDEN_GAIN, AgentId, AgentMask, NetworkBuilder

__all__ = ["agent_id", "full", "group", "index", "masks", "none", "trunk"]


def none(builder: NetworkBuilder) -> nn.Sequential:
    """Builds a network for each agent."""
    return builder.by_index(range(builder.n_agents))


def full(builder: NetworkBuilder) -> nn.Sequential:
    """Builds one network for all agents of a team."""
    return builder.by_index(builder.teams)


def group(builder: NetworkBuilder) -> nn.Sequential:
    """Builds a network for each group and kind."""
    numbers = {group: number for number, group in enumerate(dict.fromkeys(builder.groups))}
    return builder.by_index([numbers[group] for group in builder.groups])


def index(builder: NetworkBuilder) -> nn.Sequential:
    """Builds one network for each index in ``sharing_index``."""
    sharing, index = builder.config.sharing, builder.config.sharing_index
    n_agents = builder.n_agents
    if index is None:
        advice = "find it first by cluster_agents" if sharing == "clusters" else "set it"
        raise ConfigError(f"sharing is {sharing!r}, but sharing_index is not set; {advice}.")
    if len(index) != n_agents:
        raise ConfigError(
            f"sharing_index has {len(index)} entries, expected {n_agents}, one for each agent."
        )
    if set(index) != set(range(len(set(index)))):
        missing = next(number for number in range(n_agents) if number not in index)
        what = "holds a negative number" if min(index) < 0 else f"leaves out network {missing}"
        raise ConfigError(f"sharing_index {list(index)} {what}; number the networks 0, 1, 2, ...")
    return builder.by_index(list(index))


def trunk(builder: NetworkBuilder) -> nn.Sequential:
    """Builds shared hidden layers and a last layer for each agent."""
    *cells, last = _hidden_widths(builder)
    shared = builder.network(
        out_features=last, num_cells=cells, gain=HIDDEN_GAIN, activate_last_layer=True
    )
    heads = [builder.last_layer(last, width) for width in builder.out_features]
    layers = [builder.same(shared), builder.heads(heads)]
    widths = [max(builder.widths)] * builder.n_agents
    return builder.bounded(layers, widths, builder.out_features)


def agent_id(builder: NetworkBuilder) -> nn.Sequential:
    """Builds one network for all agents of a team that also reads the agent's id."""
    word, teams = builder.config.agent_id, builder.teams
    if word not in AGENT_IDS:
        raise ConfigError(
            f"agent_id is {word!r}; {nearest(str(word), AGENT_IDS)}"
            f"expected one of {', '.join(AGENT_IDS)}."
        )
    if word == "onehot":
        places = [teams[:agent].count(team) for agent, team in enumerate(teams)]
        ids = torch.eye(max(places) + 1, device=builder.device)[places]
    else:
        shape = (builder.n_agents, builder.config.agent_id_size)
        ids = nn.Parameter(torch.randn(shape, device=builder.device))
    inputs = builder.common.wider(ids.shape[-1])
    return builder.for_all(
        [AgentId(ids), builder.one_module_per_team(lambda: builder.network(inputs))]
    )


def masks(builder: NetworkBuilder) -> nn.Sequential:
    """Builds one network for all agents, with a mask of hidden units for each agent."""
    widths = _hidden_widths(builder)
    *hidden, last = _split_into_layers(builder.network())
    generator = torch.Generator().manual_seed(builder.config.mask_seed)
    steps: list[nn.Module] = []
    for layer, width in zip(hidden, widths):
        lacking = min(round(builder.config.mask_ratio * width), width - 1)
        rank = torch.rand(builder.n_agents, width, generator=generator).argsort(-1)
        # Part of the state: other masks would make it another network.
        mask = AgentMask((rank >= lacking).to(builder.device), persistent=True)
        steps += [builder.same(layer), mask]
    return builder.for_all([*steps, builder.same(last)])


def _hidden_widths(builder: NetworkBuilder) -> list[int]:
    if not builder.config.num_cells:
        raise ConfigError(
            f"sharing is {builder.config.sharing!r}, which needs hidden layers; set num_cells."
        )
    return list(builder.config.num_cells)


def _split_into_layers(network: nn.Module) -> list[nn.Sequential]:
    """Returns each linear layer with the activation after it."""
    steps = [*network] if isinstance(network, nn.Sequential) else [network]
    if not all(isinstance(step, nn.Linear) or not [*step.parameters()] for step in steps):
        raise ConfigError("sharing is 'masks', which needs linear layers only; use body=mlp.")
    layers: list[list[nn.Module]] = []
    for step in steps:
        if isinstance(step, nn.Linear):
            layers.append([])
        layers[-1].append(step)
    return [nn.Sequential(*layer) for layer in layers]
