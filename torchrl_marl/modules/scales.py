"""Standard deviations of actions that do not depend on the observation.

Shapes: B any batch dims, N agents, L outputs of a network, D numbers of an action.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.types import Device

from torchrl_marl.errors import ConfigError, quoted
from torchrl_marl.modules.config import NetworkConfig, sharing_of
from torchrl_marl.modules.inputs import Features
from torchrl_marl.modules.networks import Feedforward, TeamNetwork
from torchrl_marl.modules.sharing.builder import share
from torchrl_marl.modules.stacks.module_stack import ModuleStack

__all__ = ["AppendScale", "append_scales"]


class AppendScale(nn.Module):
    """Appends parameters to the outputs of a network, for the standard deviations of its actions.

    They are raw values: the head maps them to standard deviations, as it does outputs; 0 is the
    first standard deviation.

    Args:
        n (int): number D of parameters.
        device (torch.device, optional): device of the parameters.

    Shapes:
        - outputs: ``[*B, L]``; returns ``[*B, L + D]``

    Reference: :class:`torchrl.modules.AddStateIndependentNormalScale` does the same for one agent.

    Examples:
        >>> AppendScale(2)(torch.ones(3, 1))[0].tolist()
        [1.0, 0.0, 0.0]
    """

    def __init__(self, n: int, device: Device = None) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.zeros(n, device=device))

    def forward(self, outputs: Tensor) -> Tensor:
        """Appends the parameters."""
        return torch.cat([outputs, self.scale.expand(*outputs.shape[:-1], -1)], -1)


def append_scales(
    body: nn.Module,
    n_outputs: int,
    n_scales: int,
    kinds: Sequence[int],
    config: NetworkConfig,
    device: Device = None,
    teams: Sequence[int] | None = None,
) -> nn.Module:
    """Adds parameters to the outputs of an actor's body; agents share them as they share networks.

    With ``trunk`` sharing each agent has its own, as it has its own last layer; agents of one
    network that reads their ids share them.

    Args:
        body (nn.Module): body of all agents, with L outputs for each.
        n_outputs (int): number L of outputs.
        n_scales (int): number D of parameters of each agent.
        kinds (sequence of int): kind of each of the N agents.
        config (NetworkConfig): sharing of the networks.
        device (torch.device, optional): device of the parameters.
        teams (sequence of int, optional): team of each agent; teams share no parameters.

    Raises:
        ConfigError: one network over all agents.
    """
    if isinstance(body, TeamNetwork):
        settings = (n_outputs, n_scales, kinds, config, device, teams)
        body.head = append_scales(body.head, *settings)
        return body
    if not isinstance(body, Feedforward):
        raise ConfigError(
            f"actor.state_independent_scale is true, but actor.body is {quoted(config.body)}, one "
            "network over all agents; use actor.body=mlp, or actor.state_independent_scale=false."
        )
    if not any(isinstance(step, ModuleStack) for step in body):  # one network for all agents
        return Feedforward(*body, AppendScale(n_scales, device))
    # These ways of sharing differ in layers before the last one.
    way = {"trunk": "none", "agent_id": "full", "masks": "full"}
    own = NetworkConfig(
        sharing=way.get(sharing_of(config), sharing_of(config)), sharing_index=config.sharing_index
    )
    inputs, outputs = [Features(n_outputs)] * len(kinds), [n_outputs + n_scales] * len(kinds)
    scales = share(_make_scale, inputs, outputs, kinds, own, gain=1.0, device=device, teams=teams)
    return Feedforward(*body, *scales)


def _make_scale(
    inputs: Features, out_features: int, config: NetworkConfig, *, device: Device, **_: Any
) -> AppendScale:
    """Builds the parameters of one network, as :func:`~..bodies.make_mlp` builds its layers."""
    return AppendScale(out_features - inputs.width, device)
