"""Critics: the value of a step for every agent, in reward units.

Shapes: B any batch dims, N agents, O observation features, S state features.
"""

from __future__ import annotations

from typing import Literal

import torch
from tensordict.nn import TensorDictModule
from torch import Tensor, nn

from torchrl_marl.modules.config import NetworkConfig
from torchrl_marl.modules.networks import AgentInput, AgentNetwork, StateInput, make_network
from torchrl_marl.modules.normalization import ObservationNorm, ValueNorm
from torchrl_marl.specs import GroupSpec

__all__ = ["make_critic"]


class Denormalize(nn.Module):
    """The end of a critic: from normalized returns to reward units."""

    def __init__(self, value_norm: ValueNorm) -> None:
        super().__init__()
        self.value_norm = value_norm

    def forward(self, value: Tensor) -> Tensor:
        """Applies the affine of the statistics."""
        return self.value_norm.denormalize(value)


def make_critic(
    group: GroupSpec,
    config: NetworkConfig | None = None,
    *,
    centralized: bool | Literal["state"] = True,
    value_norm: ValueNorm | None = None,
    observation_norm: ObservationNorm | None = None,
    device: torch.device | str | None = None,
) -> TensorDictModule:
    """A value for every agent of a group.

    What the critic sees is what makes MAPPO (``True`` or ``"state"``) or IPPO (``False``). A
    shared central critic has an output for each agent: rewards of their own have values of
    their own.

    Args:
        group (GroupSpec): keys, sizes and masks, from :class:`TeamSpec`.
        config (NetworkConfig, optional): the network.
        centralized (bool or "state"): all observations of the group, each agent's own
            (``False``), or the environment's ``"state"``.
        value_norm (ValueNorm, optional): the network then works in normalized returns.
        observation_norm (ObservationNorm, optional): standardizes observations.
        device (torch.device, optional): of the parameters.

    Shapes:
        - observation: ``[*B, N, O]``; mask: ``[*B, N]``; state: ``[*B, S]``
        - state_value: ``[*B, N, 1]``

    Keys:
        - reads: ``group.observation_keys`` and ``group.mask_key``, or ``group.state_key``
        - writes: ``(group, "state_value")``

    Raises:
        ValueError: ``"state"`` where the environment has none, or a heterogeneous group.

    Examples:
        >>> from torchrl.data import Bounded, Unbounded
        >>> from torchrl_marl import AgentSpec, TeamSpec
        >>> from tensordict import TensorDict
        >>> team = TeamSpec([AgentSpec("car", 3, Unbounded((4,)), Bounded(-1, 1, (2,)))])
        >>> critic = make_critic(team.groups["car"], centralized=True)
        >>> td = TensorDict({"car": {"observation": torch.zeros(5, 3, 4),
        ...                          "mask": torch.ones(5, 3, dtype=torch.bool)}}, [5])
        >>> critic(td)["car", "state_value"].shape
        torch.Size([5, 3, 1])
    """
    if centralized not in (True, False, "state"):
        raise ValueError(f"centralized is {centralized!r}, expected True, False or 'state'.")
    config = NetworkConfig() if config is None else config
    if centralized == "state":
        features: nn.Module = StateInput(group.n_agents, _state_ndim(group))
        keys = [group.state_key]
        in_features = group.state_dim
    else:
        masked = group.mask_key is not None
        features = AgentInput(group.observation_ndims, masked, observation_norm)
        keys = list(group.observation_keys) + ([group.mask_key] if masked else [])
        in_features = group.observation_dim
    network = make_network(
        in_features,
        1,
        group.n_agents,
        config,
        centralized=centralized is True,
        same_input=centralized == "state",
        gain=1.0,
        device=device,
    )
    head = None if value_norm is None else Denormalize(value_norm)
    critic = AgentNetwork(features, network, head)
    return TensorDictModule(critic, in_keys=keys, out_keys=[group.key("state_value")])


def _state_ndim(group: GroupSpec) -> int:
    if group.state_spec is None:
        return group.state_dim  # raises, and says why
    return group.state_spec.ndim
