"""Un-sharing during training: a network that agents share becomes a copy for each agent.

Shapes: N agents of a group.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn

from torchrl_marl.learners.adam import Adam
from torchrl_marl.modules.inputs import AgentInput
from torchrl_marl.modules.networks import AgentNetwork, Feedforward, TeamNetwork
from torchrl_marl.modules.unsharing import Origin, carry_state, unshare, unshare_memory

__all__ = ["unshare_networks", "unshare_parts"]

_NamedParameters = dict[str, nn.Parameter]


def unshare_networks(networks: dict[nn.Module, int], optimizer: torch.optim.Adam) -> Adam:
    """Replaces shared networks by one copy for each agent; the outputs do not change.

    Each copy keeps the optimizer's moments of its original.

    Args:
        networks (dict): actor or critic -> number N of its agents. Networks that read the whole
            team are not un-shared.
        optimizer (Adam): optimizer of the parameters of all these networks.

    Returns:
        Adam: optimizer of the new parameters.
    """
    replaced: dict[int, list[nn.Parameter]] = {}
    state: dict[Any, Any] = dict(optimizer.state)
    for before, after, origins in _unshare_each(networks):
        state |= _transfer_state(before, after, origins, state)
        old = [p for p in before.values() if p.requires_grad]
        replaced |= {id(p): [] for p in old} | {id(old[0]): list(after.values())}
    settings = {k: v for k, v in optimizer.param_groups[0].items() if k != "params"}
    parameters = [
        new for p in optimizer.param_groups[0]["params"] for new in replaced.get(id(p), [p])
    ]
    fresh = Adam(parameters, settings["lr"], settings["eps"])
    fresh.param_groups[0].update(settings)
    for parameter in parameters:
        if state.get(parameter):
            fresh.state[parameter] = state[parameter]
    return fresh


def unshare_parts(
    networks: Mapping[nn.Module, int], state: Mapping[Any, Mapping[str, Any]]
) -> dict[Any, Mapping[str, Any]]:
    """Un-shares the networks within modules, such as a loss with targets.

    Args:
        networks (mapping): module that holds networks -> number N of their agents.
        state (mapping): trained parameter -> its optimizer state.

    Returns:
        dict: ``state`` and the optimizer state of the new parameters.
    """
    known = dict(state)
    for before, after, origins in _unshare_each(networks):
        known |= _transfer_state(before, after, origins, known)
        if not any(parameter.requires_grad for parameter in before.values()):  # a target network
            for parameter in after.values():
                parameter.requires_grad_(False)
    return known


def _unshare_each(
    networks: Mapping[nn.Module, int],
) -> Iterator[tuple[_NamedParameters, _NamedParameters, dict[str, Origin]]]:
    """Un-shares networks, and yields each network's parameters before and after."""
    for network, n_agents in networks.items():
        for module in network.modules():
            if not isinstance(module, AgentNetwork) or not isinstance(module.features, AgentInput):
                continue
            body = module.network
            if isinstance(body, Feedforward):
                yield _unshare_layers(module, "network", n_agents)
            elif isinstance(body, TeamNetwork) and body.channel is None:
                yield _unshare_layers(body, "encoder", n_agents)
                yield _unshare_layers(body, "head", n_agents)
                if body.memory is not None:
                    before = dict(body.memory.named_parameters())
                    body.memory, origins = unshare_memory(body.memory, n_agents)
                    yield before, dict(body.memory.named_parameters()), origins


def _unshare_layers(
    owner: nn.Module, name: str, n_agents: int
) -> tuple[_NamedParameters, _NamedParameters, dict[str, Origin]]:
    """Un-shares a stack of layers in a module."""
    layers = getattr(owner, name)
    own, origins = unshare(layers, n_agents)
    before = dict(layers.named_parameters())
    setattr(owner, name, Feedforward(*own))
    return before, dict(own.named_parameters()), origins


def _transfer_state(
    before: _NamedParameters,
    after: _NamedParameters,
    origins: Mapping[str, Origin],
    state: Mapping[Any, Any],
) -> dict[Any, Any]:
    """Returns the optimizer state of the new parameters."""
    known = {name: state.get(parameter, {}) for name, parameter in before.items()}
    return {after[name]: own for name, own in carry_state(known, origins).items()}
