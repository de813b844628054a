"""Critics of actions whose agents' values are mixed into one for their group (FACMAC).

Shapes: B any batch dims, N agents, A action features, K critics, G groups that are trained as one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, cast

import torch
from tensordict.nn import TensorDictModule, TensorDictSequential
from torch import Tensor, nn

from torchrl_marl.modules.action_critics import make_action_critic
from torchrl_marl.modules.config import CriticConfig, NetworkConfig
from torchrl_marl.modules.mixers import make_mixer
from torchrl_marl.modules.normalization import ObservationNorm
from torchrl_marl.per_group import PerGroup
from torchrl_marl.specs import GroupSpec

__all__ = ["make_mixed_critic"]


def make_mixed_critic(
    group: GroupSpec,
    config: CriticConfig | NetworkConfig | None = None,
    kind: Literal["sum", "monotonic"] = "monotonic",
    *,
    hidden: int = 32,
    init_scale: float | None = None,
    centralized: Literal[True, "state"] = True,
    n_critics: int = 1,
    observation_norm: ObservationNorm | None = None,
    device: torch.device | str | None = None,
) -> TensorDictSequential:
    r"""Builds critics that value each agent's own action, and mixers of these values.

    .. math::
        Q_{tot}(s, a) = f_s\big(Q_1(o_1, a_1), \dots, Q_N(o_N, a_N)\big)

    Every agent is given the value of its group, so that the gradient of an action goes through the
    mixer. Each critic has a mixer of its own; masked agents are worth 0.

    Args:
        group (GroupSpec): whose values and actions; also several groups as one.
        config (CriticConfig or NetworkConfig, optional): the network of each critic, which sees
            what one agent sees and does.
        kind ("sum" or "monotonic"): the mixer, of :func:`~torchrl_marl.modules.make_mixer`.
        hidden, init_scale, centralized: of the mixer.
        n_critics (int): number K of critics that learn the same, from different starts.
        observation_norm (ObservationNorm, optional): standardizes observations.
        device (torch.device, optional): of the parameters.

    Shapes:
        - observation: ``[*B, N, O]``; mask: ``[*B, N]``; state: ``[*B, S]``; action as in
          :func:`~torchrl_marl.modules.make_action_critic`
        - state_action_value: ``[*B, N, K]``, equal for all agents of a group

    Keys:
        - reads: ``group.observation_keys``, ``group.mask_key``, ``group.action_key``; for
          ``centralized="state"`` also ``group.state_key``
        - writes: ``(group, "state_action_value")``

    Raises:
        ConfigError: settings that do not fit, or a state that there is not.

    Reference: Peng et al., 2021, https://arxiv.org/abs/2003.06709, section 4.1.

    Reduces to: ``make_action_critic(group, centralized=False)`` for one agent and ``"sum"``.

    Examples:
        >>> from tensordict import TensorDict
        >>> from torchrl.data import Bounded, Unbounded
        >>> from torchrl_marl import AgentSpec, TeamSpec
        >>> team = TeamSpec([AgentSpec("car", 3, Unbounded((4,)), Bounded(-1, 1, (2,)))])
        >>> critic = make_mixed_critic(team.groups["car"], n_critics=2)
        >>> td = TensorDict({"car": {"observation": torch.zeros(5, 3, 4),
        ...                          "action": torch.zeros(5, 3, 2),
        ...                          "mask": torch.ones(5, 3, dtype=torch.bool)}}, [5])
        >>> critic(td)["car", "state_action_value"].shape
        torch.Size([5, 3, 2])
    """
    own = make_action_critic(
        group,
        config,
        centralized=False,
        n_critics=n_critics,
        observation_norm=observation_norm,
        device=device,
    )
    mixers = [
        make_mixer(
            group,
            kind,
            hidden=hidden,
            centralized=centralized,
            init_scale=init_scale,
            observation_norm=observation_norm,
            device=device,
        )
        for _ in range(n_critics)
    ]
    modules = [cast(TensorDictModule, mixer) for mixer in mixers]
    value = group.key("state_action_value")
    mixed = MixedValues(group, [cast(nn.Module, mixer.module) for mixer in modules], device)
    last = TensorDictModule(mixed, [value, *modules[0].in_keys[1:]], [value])
    return TensorDictSequential(*own.module, last)


class MixedValues(nn.Module):
    """Mixes the values of each critic, and gives every agent that of its group.

    Args:
        group (GroupSpec): whose values.
        mixers (sequence of Module): one for each critic.
        device (torch.device, optional): of the indices.

    Shapes:
        - value, returns: ``[*B, N, K]``
    """

    def __init__(
        self,
        group: GroupSpec,
        mixers: Sequence[nn.Module],
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        self.n_agents, self.mixers = group.n_agents, nn.ModuleList(mixers)
        self.per_group = PerGroup(group.membership, device)

    def forward(self, value: Tensor, *seen: Tensor) -> Tensor:
        """Mixes."""
        totals = [mixer(own, *seen) for mixer, own in zip(self.mixers, value.split(1, -1))]
        rows = [self.per_group.to_agents(total) for total in totals]
        return torch.stack([row.expand(*row.shape[:-1], self.n_agents) for row in rows], -1)
