"""Mixers of agents' values, and critics with mixed values.

Shapes: B any batch dims, N agents, O observation features, S state features, K critics, F features
of a hypernetwork's input, G groups that are joined into one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, cast

import torch
import torch.nn.functional as F
from tensordict.nn import TensorDictModule, TensorDictSequential
from torch import Tensor, nn
from torch.types import Device

from torchrl_marl.errors import ConfigError, nearest
from torchrl_marl.functional.statistics import PerGroup
from torchrl_marl.modules.action_critics import make_action_critic
from torchrl_marl.modules.central import GroupColumns, columns_of_groups, columns_of_state
from torchrl_marl.modules.config import MIXERS, CriticConfig, NetworkConfig
from torchrl_marl.modules.inputs import (
    AgentInput,
    StateInput,
    TeamInput,
    cast_for_network,
    register_constants,
)
from torchrl_marl.modules.normalization import ObservationNorm
from torchrl_marl.modules.stacks.module_stack import stack
from torchrl_marl.specs import GroupSpec

__all__ = ["make_mixed_critic", "make_mixer"]


def make_mixer(
    group: GroupSpec,
    kind: Literal["none", "sum", "monotonic"] = "monotonic",
    *,
    hidden: int = 32,
    centralized: Literal[True, "state", "agent_state"] = True,
    team: GroupSpec | None = None,
    init_scale: float | None = None,
    observation_norm: ObservationNorm | None = None,
    device: Device = None,
) -> TensorDictModule | None:
    r"""Builds a mixer of the agents' action values into one Q_tot per group.

    .. math::
        Q_{tot} = \sum_i Q_i \quad \text{(sum)}, \qquad
        Q_{tot} = |w_2(s)|^T \, \mathrm{elu}\big(|W_1(s)|^T q + b_1(s)\big) + V(s)
        \quad \text{(monotonic)}

    Both mixers are monotonic in every agent's value, so the best joint action consists of each
    agent's best action. Masked agents have value 0. If several groups are joined into one, each has
    a separate mixer.

    Args:
        group (GroupSpec): agents to value, or several groups joined into one.
        kind ("none", "sum" or "monotonic"): mixer, as in IQL, VDN or QMIX, respectively.

    Keyword Args:
        hidden (int): hidden units H of the monotonic mixer.
        centralized (True, "state" or "agent_state"): input of the hypernetworks: the observations
            of the group's living agents, the environment's ``"state"``, or the own states of the
            group's living agents.
        team (GroupSpec, optional): agents of several joined groups whose observations are read
            instead of the group's.
        init_scale (float, optional): gain of the hypernetworks' orthogonal initialization;
            without it they are initialized as ``nn.Linear`` is, as in PyMARL. A small gain makes
            learning start slowly: at 1e-3 the gradient of an agent's value is 1e6 times smaller.
        observation_norm (ObservationNorm, optional): standardizes observations.
        device (torch.device, optional): device of the parameters.

    Returns:
        TensorDictModule: the mixer; None for ``"none"``.

    Shapes:
        - chosen_action_value: ``[*B, N, 1]``; observation: ``[*B, N, O]``; mask: ``[*B, N]``;
          state: ``[*B, S]``
        - returns: ``[*B, G]``, which is ``[*B, 1]`` for one group

    Keys:
        - reads: ``(group, "chosen_action_value")``, ``group.mask_key``; for ``"monotonic"`` also
          ``group.observation_keys``, those of ``team``, ``group.state_key`` or
          ``group.agent_state_key``
        - writes: ``"chosen_action_value"``

    Reference: Sunehag et al., 2018, https://arxiv.org/abs/1706.05296, equation 3 (sum); Rashid et
    al., 2018, https://arxiv.org/abs/1803.11485, section 4 (monotonic).

    Reduces to: TorchRL's ``VDNMixer`` and ``QMixer`` if no agent is masked.

    Raises:
        ConfigError: an unknown kind, or a state that the environment does not give.

    Examples:
        >>> from tensordict import TensorDict
        >>> from torchrl.data import Categorical, Unbounded
        >>> from torchrl_marl import AgentSpec, TeamSpec
        >>> team = TeamSpec([AgentSpec("car", 3, Unbounded((4,)), Categorical(2))])
        >>> mixer = make_mixer(team.groups["car"], "sum")
        >>> td = TensorDict({"car": {"chosen_action_value": torch.ones(5, 3, 1),
        ...                          "mask": torch.ones(5, 3, dtype=torch.bool)}}, [5])
        >>> mixer(td)["chosen_action_value"][0]
        tensor([3.])
    """
    if kind not in MIXERS:
        raise ConfigError(
            f"a mixer is {kind!r}; {nearest(str(kind), MIXERS)}expected one of {', '.join(MIXERS)}."
        )
    if kind == "none":
        return None
    keys = [group.key("chosen_action_value")]
    mask = [] if group.mask_key is None else [group.mask_key]
    if kind == "sum":
        mixer: nn.Module = SumMixer(group, device)
        keys += mask
    elif centralized == "state":
        if group.state_spec is None or group.state_key is None:
            raise ConfigError(
                f"group {group.name!r}: this environment gives no 'state' for the mixer, "
                "expected one; use centralized=True (central_input=observations)."
            )
        columns = columns_of_state(group)
        state = StateInput(group.state_spec.ndim)
        mixer = MonotonicMixer(group, state, columns, hidden, init_scale, device)
        keys += [group.state_key, *mask]
    elif centralized in (True, "agent_state"):
        seen = group if team is None else team
        if centralized == "agent_state":
            seen, team, observation_norm = group.of_states, None, None
        agents = TeamInput(AgentInput(seen, observation_norm, device), seen.observation_dims)
        columns = columns_of_groups(seen, group, own_group=team is None)
        mixer = MonotonicMixer(group, agents, columns, hidden, init_scale, device)
        mixer.n_inputs = len(AgentInput.keys(seen))
        keys += [*AgentInput.keys(seen), *(mask if seen is not group else [])]
    else:
        raise ConfigError(
            f"centralized is {centralized!r}, expected True, 'state' or 'agent_state'."
        )
    return TensorDictModule(mixer, keys, ["chosen_action_value"])


class SumMixer(nn.Module):
    """Sums the values of the living agents of each group.

    Shapes:
        - value: ``[*B, N, 1]``; mask: ``[*B, N]``; returns ``[*B, G]``
    """

    def __init__(self, group: GroupSpec, device: Device = None) -> None:
        super().__init__()
        self.group, self.per_group = group, PerGroup(group.membership, device)

    def forward(self, value: Tensor, mask: Tensor | None = None) -> Tensor:
        """Sums the values."""
        return self.per_group.sum(_zero_masked_values(self.group, value, mask))


class MonotonicMixer(nn.Module):
    """Mixes values by two layers with positive weights, which linear hypernetworks compute.

    Args:
        group (GroupSpec): agents to value, or several groups joined into one.
        features (nn.Module): maps the further inputs to features ``[*B, F]`` and a mask.
        columns (list of list of int): columns read by each group's hypernetworks.
        hidden (int): hidden units H.
        init_scale (float, optional): gain of the hypernetworks' initialization; default: that of
            ``nn.Linear``.

    Shapes:
        - value: ``[*B, N, 1]``; returns ``[*B, G]``
    """

    index: Tensor
    own: Tensor

    def __init__(
        self,
        group: GroupSpec,
        features: nn.Module,
        columns: list[list[int]],
        hidden: int,
        init_scale: float | None,
        device: Device = None,
    ) -> None:
        super().__init__()
        self.group, self.features, self.hidden = group, features, hidden
        self.n_inputs = 1 if isinstance(features, StateInput) else None
        sizes = [one.n_agents for one in group.groups]
        most = max(sizes)
        firsts = [sum(sizes[:g]) for g in range(len(sizes))]
        index = [[first + min(i, n - 1) for i in range(most)] for first, n in zip(firsts, sizes)]
        own = [[i < n for i in range(most)] for n in sizes]
        register_constants(self, device, index=torch.tensor(index), own=torch.tensor(own))
        self.columns = GroupColumns(columns, device)
        scale = None if init_scale is None else 2**0.5
        weights, biases = [], []
        for width in map(len, columns):
            weights.append(_make_linear(width, (most + 2) * hidden, init_scale, device))
            units = _make_linear(width, hidden, scale, device)
            biases.append(
                nn.Sequential(units, nn.ReLU(), _make_linear(hidden, 1, init_scale, device))
            )
        several = len(sizes) > 1
        self.weights: nn.Module = stack(weights, pad=True) if several else weights[0]
        self.bias: nn.Module = stack(biases, pad=True) if several else biases[0]

    def forward(self, value: Tensor, *inputs: Tensor) -> Tensor:
        """Mixes the values."""
        mask = None if self.group.mask_key is None else inputs[-1]
        mixer_input, _ = self.features(*inputs[: self.n_inputs])
        mixer_input = self.columns(cast_for_network(mixer_input, self.weights))
        agent_values = _zero_masked_values(self.group, value, mask)[..., self.index]
        agent_values = torch.where(self.own, agent_values, 0.0)
        weights = self.weights(mixer_input).unflatten(-1, (-1, self.hidden))
        first, bias, last = (
            weights[..., :-2, :].abs(),
            weights[..., -2, :],
            weights[..., -1, :].abs(),
        )
        units = F.elu((agent_values.unsqueeze(-2) @ first).squeeze(-2) + bias)
        return (units * last).sum(-1) + self.bias(mixer_input).squeeze(-1)


def _zero_masked_values(group: GroupSpec, value: Tensor, mask: Tensor | None) -> Tensor:
    """Returns values ``[*B, N, 1]`` as ``[*B, N]``, 0 where masked."""
    if value.shape[-2:] != (group.n_agents, 1):
        raise ValueError(
            f"group {group.name!r}: chosen_action_value has shape {tuple(value.shape)}, expected "
            f"[*B, {group.n_agents}, 1], a value for each agent."
        )
    value = value.squeeze(-1)
    return value if mask is None else torch.where(mask, value, 0.0)


def _make_linear(width: int, outputs: int, gain: float | None, device: Device) -> nn.Linear:
    layer = nn.Linear(width, outputs, device=device)
    if gain is not None:
        nn.init.orthogonal_(layer.weight, gain)
        nn.init.zeros_(layer.bias)
    return layer


def make_mixed_critic(
    group: GroupSpec,
    config: CriticConfig | NetworkConfig | None = None,
    kind: Literal["sum", "monotonic"] = "monotonic",
    *,
    hidden: int = 32,
    init_scale: float | None = None,
    centralized: Literal[True, "state", "agent_state"] = True,
    n_critics: int = 1,
    observation_norm: ObservationNorm | None = None,
    device: Device = None,
) -> TensorDictSequential:
    r"""Builds critics of each agent's observation and action, and mixers of the critics' values.

    .. math::
        Q_{tot}(s, a) = f_s\big(Q_1(o_1, a_1), \dots, Q_N(o_N, a_N)\big)

    Every agent gets the value of its group, so the gradient of an action flows through the mixer.
    Each critic has a separate mixer; masked agents have value 0.

    Args:
        group (GroupSpec): group whose agents act, or several groups joined into one.
        config (CriticConfig or NetworkConfig, optional): network of each critic, which reads one
            agent's observation and action.
        kind ("sum" or "monotonic"): mixer, as in :func:`~torchrl_marl.modules.make_mixer`.
        hidden, init_scale, centralized: settings of the mixer.
        n_critics (int): number K of critics, which differ only in their initialization.
        observation_norm (ObservationNorm, optional): standardizes observations.
        device (torch.device, optional): device of the parameters.

    Shapes:
        - observation: ``[*B, N, O]``; mask: ``[*B, N]``; state: ``[*B, S]``; action as in
          :func:`~torchrl_marl.modules.make_action_critic`
        - state_action_value: ``[*B, N, K]``, equal for all agents of a group

    Keys:
        - reads: ``group.observation_keys``, ``group.mask_key``, ``group.action_key``; for
          ``centralized="state"`` also ``group.state_key``, for ``"agent_state"``
          ``group.agent_state_key``
        - writes: ``(group, "state_action_value")``

    Raises:
        ConfigError: contradictory settings, or a state that the environment does not give.

    Reference: Peng et al., 2021, https://arxiv.org/abs/2003.06709 (FACMAC).

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
    settings: dict[str, Any] = {"observation_norm": observation_norm, "device": device}
    own = make_action_critic(group, config, centralized=False, n_critics=n_critics, **settings)
    settings |= {"hidden": hidden, "centralized": centralized, "init_scale": init_scale}
    mixers = [make_mixer(group, kind, **settings) for _ in range(n_critics)]
    modules = [cast(TensorDictModule, mixer) for mixer in mixers]
    value = group.key("state_action_value")
    mixed = MixedValues(group, [cast(nn.Module, mixer.module) for mixer in modules], device)
    last = TensorDictModule(mixed, [value, *modules[0].in_keys[1:]], [value])
    return TensorDictSequential(*own.module, last)


class MixedValues(nn.Module):
    """Mixes the values of each critic, and gives every agent its group's value.

    Args:
        group (GroupSpec): agents to value.
        mixers (sequence of Module): mixer of each critic.
        device (torch.device, optional): device of the indices.

    Shapes:
        - value, returns: ``[*B, N, K]``
    """

    def __init__(
        self, group: GroupSpec, mixers: Sequence[nn.Module], device: Device = None
    ) -> None:
        super().__init__()
        self.n_agents, self.mixers = group.n_agents, nn.ModuleList(mixers)
        self.per_group = PerGroup(group.membership, device)

    def forward(self, value: Tensor, *seen: Tensor) -> Tensor:
        """Mixes the values."""
        totals = [mixer(own, *seen) for mixer, own in zip(self.mixers, value.split(1, -1))]
        rows = [self.per_group.to_agents(total) for total in totals]
        return torch.stack([row.expand(*row.shape[:-1], self.n_agents) for row in rows], -1)
