"""Un-sharing in the middle of training: from one network for many agents to one for each.

Shapes: N agents of a group.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from torchrl_marl.modules.bodies import Feedforward
from torchrl_marl.modules.inputs import AgentInput
from torchrl_marl.modules.networks import AgentNetwork
from torchrl_marl.modules.unsharing import carry_state, unshare

__all__ = ["unshare_networks"]


def unshare_networks(
    networks: dict[nn.Module, int], optimizer: torch.optim.Adam
) -> torch.optim.Adam:
    """Gives every agent its own copy of what it shares; outputs stay equal.

    The optimizer goes on where it was: each copy has the moments of what it was copied from.

    Args:
        networks (dict): actor or critic -> number N of its agents. Networks that see the whole
            team at once have no agent's copy and stay.
        optimizer (Adam): of all their parameters.

    Returns:
        Adam: of the new parameters.
    """
    replaced: dict[int, list[nn.Parameter]] = {}
    state: dict[Any, Any] = dict(optimizer.state)
    for network, n_agents in networks.items():
        for module in network.modules():
            if not isinstance(module, AgentNetwork) or not isinstance(module.features, AgentInput):
                continue
            if not isinstance(module.network, Feedforward):
                continue
            own, origins = unshare(module.network, n_agents)
            named = dict(module.network.named_parameters())
            before = {name: optimizer.state.get(p, {}) for name, p in named.items()}
            new = dict(own.named_parameters())
            for name, moments in carry_state(before, origins).items():
                state[new[name]] = moments
            old = [p for p in named.values() if p.requires_grad]
            replaced |= {id(p): [] for p in old} | {id(old[0]): list(new.values())}
            module.network = Feedforward(*own)
    settings = {k: v for k, v in optimizer.param_groups[0].items() if k != "params"}
    parameters = [
        new for p in optimizer.param_groups[0]["params"] for new in replaced.get(id(p), [p])
    ]
    fresh = torch.optim.Adam(parameters, **settings)
    for parameter in parameters:
        if state.get(parameter):
            fresh.state[parameter] = state[parameter]
    return fresh
