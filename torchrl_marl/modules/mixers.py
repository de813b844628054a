"""Mixers: the value of a team from the values of what its agents do.

Shapes: B any batch dims, N agents, G groups that are trained as one, F features, H hidden units.
"""

from __future__ import annotations

from typing import Literal

import torch
import torch.nn.functional as F
from tensordict.nn import TensorDictModule
from torch import Tensor, nn

from torchrl_marl.errors import ConfigError, nearest
from torchrl_marl.modules.central import GroupColumns, columns_of_groups
from torchrl_marl.modules.config import MIXERS
from torchrl_marl.modules.inputs import AgentInput, StateInput, TeamInput
from torchrl_marl.modules.normalization import ObservationNorm
from torchrl_marl.modules.stacks.building import stack
from torchrl_marl.per_group import PerGroup
from torchrl_marl.specs import GroupSpec

__all__ = ["make_mixer"]


def make_mixer(
    group: GroupSpec,
    kind: Literal["none", "sum", "monotonic"] = "monotonic",
    *,
    hidden: int = 32,
    centralized: Literal[True, "state"] = True,
    team: GroupSpec | None = None,
    init_scale: float | None = None,
    observation_norm: ObservationNorm | None = None,
    device: torch.device | str | None = None,
) -> TensorDictModule | None:
    r"""Builds what makes one value of a group of the values of its agents' actions.

    .. math::
        Q_{tot} = \sum_i Q_i \quad \text{(sum)}, \qquad
        Q_{tot} = |w_2(s)|^T \, \mathrm{elu}\big(|W_1(s)|^T q + b_1(s)\big) + V(s)
        \quad \text{(monotonic)}

    Both rise in every agent's value, so that the best joint action is each agent's best. Masked
    agents have a value of 0. Each of several groups as one has a mixer of its own.

    Args:
        group (GroupSpec): whose values; also several groups as one.
        kind ("none", "sum" or "monotonic"): of IQL, VDN and QMIX.

    Keyword Args:
        hidden (int): units H of the monotonic mixer.
        centralized (True or "state"): weights are made of the observations of the group's living
            agents, or of the environment's ``"state"``.
        team (GroupSpec, optional): the agents whose observations it sees instead of its group's,
            of several groups joined.
        init_scale (float, optional): gain of an orthogonal start of the layers that make weights;
            without it they start as ``nn.Linear`` does, as in PyMARL. With a small gain learning
            starts slowly: at 1e-3 the gradient of an agent's value is 1e6 times smaller.
        observation_norm (ObservationNorm, optional): standardizes observations.
        device (torch.device, optional): of the parameters.

    Returns:
        TensorDictModule: or None for ``"none"``.

    Shapes:
        - chosen_action_value: ``[*B, N, 1]``; observation: ``[*B, N, O]``; mask: ``[*B, N]``;
          state: ``[*B, S]``
        - returns: ``[*B, G]``, which is ``[*B, 1]`` for one group

    Keys:
        - reads: ``(group, "chosen_action_value")``, ``group.mask_key``; for ``"monotonic"`` also
          ``group.observation_keys``, those of ``team``, or ``group.state_key``
        - writes: ``"chosen_action_value"``

    Reference: Sunehag et al., 2018, https://arxiv.org/abs/1706.05296, equation 3 (sum); Rashid et
    al., 2018, https://arxiv.org/abs/1803.11485, section 4 (monotonic).

    Reduces to: TorchRL's ``VDNMixer`` and ``QMixer`` where nobody is masked.

    Raises:
        ConfigError: another kind, or a state that there is not.

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
                f"group {group.name!r}: this environment gives no 'state' for a mixer to see, "
                "expected one; use centralized=True (central_input=observations)."
            )
        columns = [list(range(group.state_dim))] * len(group.groups)
        state = StateInput(group.state_spec.ndim)
        mixer = MonotonicMixer(group, state, columns, hidden, init_scale, device)
        keys += [group.state_key, *mask]
    elif centralized is True:
        seen = group if team is None else team
        agents = TeamInput(AgentInput(seen, observation_norm, device), seen.observation_dims)
        columns = columns_of_groups(seen, group, own_group=team is None)
        mixer = MonotonicMixer(group, agents, columns, hidden, init_scale, device)
        mixer.n_inputs = len(AgentInput.keys(seen))
        keys += [*AgentInput.keys(seen), *(mask if seen is not group else [])]
    else:
        raise ConfigError(f"centralized is {centralized!r}, expected True or 'state'.")
    return TensorDictModule(mixer, keys, ["chosen_action_value"])


class SumMixer(nn.Module):
    """Adds the values of the living agents of each group.

    Shapes:
        - value: ``[*B, N, 1]``; mask: ``[*B, N]``; returns ``[*B, G]``
    """

    def __init__(self, group: GroupSpec, device: torch.device | str | None = None) -> None:
        super().__init__()
        self.group, self.per_group = group, PerGroup(group.membership, device)

    def forward(self, value: Tensor, mask: Tensor | None = None) -> Tensor:
        """Adds them."""
        return self.per_group.sum(_living(self.group, value, mask))


class MonotonicMixer(nn.Module):
    """Mixes by two layers of weights above 0, which linear maps make of what is seen.

    Args:
        group (GroupSpec): whose values; also several groups as one.
        features (nn.Module): returns ``[*B, F]``, and a mask, of the inputs behind the values.
        columns (list of list of int): the features that each group's weights are made of.
        hidden (int): units H.
        init_scale (float, optional): gain of the maps' start; that of ``nn.Linear`` without it.

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
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        self.group, self.features, self.hidden = group, features, hidden
        self.n_inputs = 1 if isinstance(features, StateInput) else None
        sizes = [one.n_agents for one in group.groups]
        most = max(sizes)
        firsts = [sum(sizes[:g]) for g in range(len(sizes))]
        index = [[first + min(i, n - 1) for i in range(most)] for first, n in zip(firsts, sizes)]
        own = [[i < n for i in range(most)] for n in sizes]
        self.register_buffer("index", torch.tensor(index, device=device), persistent=False)
        self.register_buffer("own", torch.tensor(own, device=device), persistent=False)
        self.columns = GroupColumns(columns, device)
        weights, biases = [], []
        for own_columns in columns:
            width = len(own_columns)
            weights.append(_linear(width, (most + 2) * hidden, init_scale, device))
            biases.append(
                nn.Sequential(
                    _linear(width, hidden, None if init_scale is None else 2**0.5, device),
                    nn.ReLU(),
                    _linear(hidden, 1, init_scale, device),
                )
            )
        several = len(sizes) > 1
        self.weights: nn.Module = stack(weights, pad=True) if several else weights[0]
        self.bias: nn.Module = stack(biases, pad=True) if several else biases[0]

    def forward(self, value: Tensor, *inputs: Tensor) -> Tensor:
        """Mixes."""
        mask = None if self.group.mask_key is None else inputs[-1]
        seen, _ = self.features(*inputs[: self.n_inputs])
        seen = self.columns(seen)
        living = _living(self.group, value, mask)[..., self.index]
        living = torch.where(self.own, living, 0.0)
        made = self.weights(seen).unflatten(-1, (-1, self.hidden))
        first, bias, last = made[..., :-2, :].abs(), made[..., -2, :], made[..., -1, :].abs()
        units = F.elu((living.unsqueeze(-2) @ first).squeeze(-2) + bias)
        return (units * last).sum(-1) + self.bias(seen).squeeze(-1)


def _living(group: GroupSpec, value: Tensor, mask: Tensor | None) -> Tensor:
    """Returns values ``[*B, N, 1]`` as ``[*B, N]``, 0 where masked."""
    if value.shape[-2:] != (group.n_agents, 1):
        raise ValueError(
            f"group {group.name!r}: chosen_action_value has shape {tuple(value.shape)}, expected "
            f"[*B, {group.n_agents}, 1], a value for each agent."
        )
    value = value.squeeze(-1)
    return value if mask is None else torch.where(mask, value, 0.0)


def _linear(
    width: int, outputs: int, gain: float | None, device: torch.device | str | None
) -> nn.Linear:
    layer = nn.Linear(width, outputs, device=device)
    if gain is not None:
        nn.init.orthogonal_(layer.weight, gain)
        nn.init.zeros_(layer.bias)
    return layer
