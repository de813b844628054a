"""Critics of actions: the value Q of what all agents see and do, for every agent.

A critic of actions is a critic of agents that observe their actions, too: what they see and do is
put side by side, and any network of :func:`~torchrl_marl.modules.make_critic` reads it.

Shapes: B any batch dims, N agents, M agents that a critic sees, A action features, K critics.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Literal, cast

import torch
from tensordict.nn import TensorDictModule, TensorDictSequential
from torch import Tensor, nn
from torchrl.data import Composite, Unbounded

from torchrl_marl.joining import JoinedGroup
from torchrl_marl.modules.action_inputs import ActionFeatures, BesideObservations, BesideState
from torchrl_marl.modules.config import CriticConfig, NetworkConfig
from torchrl_marl.modules.critics import make_critic
from torchrl_marl.modules.inputs import AgentInput
from torchrl_marl.modules.normalization import ObservationNorm
from torchrl_marl.specs import GroupSpec

__all__ = ["make_action_critic"]

_BOTH = "observation_action"
_STATE = "state_action"


def make_action_critic(
    group: GroupSpec,
    config: CriticConfig | NetworkConfig | None = None,
    *,
    centralized: bool | Literal["state"] = True,
    team: GroupSpec | None = None,
    n_critics: int = 1,
    observation_norm: ObservationNorm | None = None,
    device: torch.device | str | None = None,
) -> TensorDictSequential:
    """Builds critics that value every agent's step by what is seen and done in it.

    Args:
        group (GroupSpec): whose values and actions; also several groups as one.
        config (CriticConfig or NetworkConfig, optional): the network of each critic.
        centralized (bool or "state"): what is seen, and by whom, as in
            :func:`~torchrl_marl.modules.make_critic`. With ``False`` a critic sees its own agent's
            action, else those of all agents that it sees, as far as they are of ``group``; with
            ``"state"`` those of all agents of ``group``.
        team (GroupSpec, optional): a critic across groups: the agents that it sees.
        n_critics (int): number K of critics that learn the same, from different starts.
        observation_norm (ObservationNorm, optional): standardizes observations.
        device (torch.device, optional): of the parameters.

    Shapes:
        - observation: ``[*B, N, O]``; mask: ``[*B, N]``; state: ``[*B, S]``
        - action: ``[*B, N, A]``, ``[*B, N]``, or one-hot ``[*B, N, n_actions]``, also of a discrete
          group whose actions are numbers
        - state_action_value: ``[*B, N, K]``

    Keys:
        - reads: what a critic of :func:`~torchrl_marl.modules.make_critic` reads, and
          ``group.action_key``
        - writes: ``(group, "state_action_value")``

    Raises:
        ConfigError: settings that do not fit.

    Examples:
        >>> from tensordict import TensorDict
        >>> from torchrl.data import Bounded
        >>> from torchrl_marl import AgentSpec, TeamSpec
        >>> team = TeamSpec([AgentSpec("car", 3, Unbounded((4,)), Bounded(-1, 1, (2,)))])
        >>> critic = make_action_critic(team.groups["car"], n_critics=2)
        >>> td = TensorDict({"car": {"observation": torch.zeros(5, 3, 4),
        ...                          "action": torch.zeros(5, 3, 2),
        ...                          "mask": torch.ones(5, 3, dtype=torch.bool)}}, [5])
        >>> critic(td)["car", "state_action_value"].shape
        torch.Size([5, 3, 2])
    """
    seen = group if team is None else team
    actions = ActionFeatures(group, device)
    if centralized == "state" and group.state_spec is not None:
        together = _state_and_actions(group, actions)
        of_state = Unbounded((group.state_dim + sum(actions.widths),))
        wide = replace(group, state_key=_STATE, state_spec=of_state)
        wide_team = None
    else:
        together = _observations_and_actions(seen, group, actions, observation_norm, device)
        widths = dict(zip((one.name for one in group.groups), _split(group, actions.widths)))
        wide = _widened(group, widths)
        wide_team = None if team is None else _widened(team, widths)
    critics = [
        make_critic(wide, config, centralized=centralized, team=wide_team, device=device)
        for _ in range(n_critics)
    ]
    values = Ensemble([cast(nn.Module, critic.module) for critic in critics])
    last = TensorDictModule(values, critics[0].in_keys, [group.key("state_action_value")])
    return TensorDictSequential(together, last)


class Ensemble(nn.Module):
    """Runs several networks on the same inputs, with their outputs side by side."""

    def __init__(self, networks: Sequence[nn.Module]) -> None:
        super().__init__()
        self.networks = nn.ModuleList(networks)

    def forward(self, *inputs: Tensor) -> Tensor:
        """Returns ``[*B, N, K]``."""
        return torch.cat([network(*inputs) for network in self.networks], -1)


def _observations_and_actions(seen, group, actions, norm, device) -> TensorDictModule:
    module = BesideObservations(seen, group, actions, norm, device)
    return TensorDictModule(
        module, [*AgentInput.keys(seen), group.action_key], [(seen.name, _BOTH)]
    )


def _state_and_actions(group: GroupSpec, actions: ActionFeatures) -> TensorDictModule:
    keys = [group.state_key, group.action_key, *([group.mask_key] if group.mask_key else [])]
    return TensorDictModule(BesideState(group, actions), keys, [_STATE])


def _widened(group: GroupSpec, widths: Mapping[str, list[int]]) -> GroupSpec:
    """Returns a group of the same agents, of which those of the named groups observe actions."""
    own = [widths.get(one.name, [0] * one.n_agents) for one in group.groups]
    parts = tuple(_wide(one, actions) for one, actions in zip(group.groups, own))
    if not isinstance(group, JoinedGroup):
        return parts[0]
    return replace(cast(JoinedGroup, _wide(group, sum(own, []))), groups=parts)


def _wide(group: GroupSpec, actions: Sequence[int]) -> GroupSpec:
    widths = [seen + own for seen, own in zip(group.observation_dims, actions)]
    members = tuple(Composite({_BOTH: Unbounded((width,))}) for width in widths)
    key = group.key(_BOTH)
    return replace(group, members=members, observation_keys=(key,), action_mask_key=None)


def _split(group: GroupSpec, widths: Sequence[int]) -> list[list[int]]:
    """Returns the numbers of all agents by group."""
    owner = group.group_index
    return [[w for w, k in zip(widths, owner) if k == i] for i in range(len(group.groups))]
