"""Critics: state values for every agent, in reward units.

Shapes: B any batch dims, N agents, O observation features, S state features.
"""

from __future__ import annotations

from typing import Literal

from tensordict import NestedKey
from tensordict.nn import TensorDictModule
from torch import nn
from torch.types import Device

from torchrl_marl.errors import ConfigError
from torchrl_marl.modules.build import extra_keys, links_of, make_agent_network
from torchrl_marl.modules.central import (
    columns_of_groups,
    columns_of_state,
    inputs_of_groups,
    make_central_network,
    make_set_network,
    make_value_picker,
)
from torchrl_marl.modules.config import CriticConfig, NetworkConfig, communicates, sharing_of
from torchrl_marl.modules.inputs import (
    AgentInput,
    Denormalize,
    StateInput,
    TeamInput,
    state_features,
)
from torchrl_marl.modules.networks import AgentNetwork
from torchrl_marl.modules.normalization import ObservationNorm, ValueNorm
from torchrl_marl.modules.registry import body_of
from torchrl_marl.modules.size import check_size
from torchrl_marl.specs import GroupSpec
from torchrl_marl.specs.teams import check_group

__all__ = ["make_critic"]


def make_critic(
    group: GroupSpec,
    config: CriticConfig | NetworkConfig | None = None,
    *,
    centralized: bool | Literal["state", "agent_state"] = True,
    team: GroupSpec | None = None,
    value_norm: ValueNorm | None = None,
    observation_norm: ObservationNorm | None = None,
    device: Device = None,
) -> TensorDictModule:
    """Builds a critic with a value for every agent of a group.

    The critic's input, ``centralized``, distinguishes MAPPO (``True``, ``"state"`` or
    ``"agent_state"``) from IPPO (``False``). A shared critic of the team's observations or state
    has an output for each agent, so that agents with separate rewards have separate values. A
    critic of each agent's own state values every agent by that agent's row.

    Args:
        group (GroupSpec): keys, sizes and masks, from :class:`TeamSpec`, or several groups joined
            into one by :func:`~torchrl_marl.specs.joining.join`.
        config (CriticConfig or NetworkConfig, optional): the network. ``mlp`` reads the agents'
            concatenated observations. ``set`` (their mean) and ``attention`` read any number of
            living agents in any order.
        centralized (bool, "state" or "agent_state"): input: all observations of the group
            (``True``), each agent's observation (``False``), the environment's ``"state"``, or each
            agent's own state, ``(group, "state")``.
        team (GroupSpec, optional): agents of several joined groups that a critic across groups
            sees; default: the agents of ``group``.
        value_norm (ValueNorm, optional): statistics of returns; with them, the network predicts
            normalized returns.
        observation_norm (ObservationNorm, optional): standardizes observations, but not states.
        device (torch.device, optional): device of the parameters.

    Shapes:
        - observation: ``[*B, N, O]``; mask: ``[*B, N]``
        - state: ``[*B, S]``; the agents' own: ``[*B, N, S]``
        - state_value: ``[*B, N, 1]``

    Keys:
        - reads: observation and mask of ``group`` or of ``team``, or ``group.state_key``, or
          ``group.agent_state_key`` and the mask
        - writes: ``(group, "state_value")``
        - with ``config.memory`` it also reads ``(group, "is_init")`` and
          ``(group, "critic_hidden")``, and writes ``("next", group, "critic_hidden")``. With one
          value per group, its agents have equal hidden states

    Raises:
        ValueError: a state that the environment does not give, or contradictory settings.

    Reduces to: for ``"agent_state"``, the critic of IPPO if each agent's state is its observation.

    Examples:
        >>> import torch
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
    check_group(group, "make_critic")
    if centralized not in (True, False, "state", "agent_state"):
        raise ValueError(
            f"centralized is {centralized!r}, expected True, False, 'state' or 'agent_state'."
        )
    config = CriticConfig() if config is None else config
    per_agent = getattr(config, "value_per", "agent") == "agent"
    architecture = getattr(config, "architecture", "mlp")
    if architecture != "mlp" and centralized is not True:
        raise ConfigError(
            f"group {group.name!r}: a critic of architecture {architecture!r} reads agents, but "
            f"centralized is {centralized!r}, expected True; use algorithm=mappo with "
            "central_input=observations or team, or architecture=mlp."
        )
    if not per_agent:
        _check_value_per_team(group, config, centralized)
    if centralized == "agent_state":
        group, centralized, observation_norm = group.of_states, False, None
    check_size("critic", group, config, device)
    head = None if value_norm is None else Denormalize(value_norm)
    keys = AgentInput.keys(group if team is None or centralized is not True else team)
    if centralized == "state":
        keys = [group.state_key]
        critic = _make_state_critic(group, config, per_agent, head, device)
    elif centralized is False:
        agents = AgentInput(group, observation_norm, device)
        norm = observation_norm is not None
        network = make_agent_network(group, 1, config, gain=1.0, standardized=norm, device=device)
        critic = AgentNetwork(agents, network, head, links=links_of(group, config, device))
    else:
        critic = _make_central_critic(group, team, config, observation_norm, head, device)
    values: list[NestedKey] = [group.key("state_value")]
    if critic.remembers:
        _check_memory_of_groups(group, team if centralized is True else None)
    read, written = extra_keys(critic, group, "critic_hidden")
    return TensorDictModule(critic, [*keys, *read], [*values, *written])


def _check_memory_of_groups(group: GroupSpec, team: GroupSpec | None) -> None:
    if team is not None and team.agent_names != group.agent_names:
        raise ConfigError(
            f"group {group.name!r}: its critic has a memory, but sees agents of groups that are "
            "trained apart; use central_input=observations, or critic.memory=none."
        )


def _make_state_critic(group, config, per_agent, head, device) -> AgentNetwork:
    if group.state_spec is None:
        raise ConfigError(
            f"group {group.name!r}: this environment gives no 'state' for the critic; use "
            "central_input=observations, or env.state=world or observations where it has one."
        )
    reads_agents = body_of(config).make_body is not None
    if reads_agents or communicates(config):
        found = f"body is {config.body!r}" if reads_agents else "agents communicate"
        raise ConfigError(
            f"group {group.name!r}: a critic's {found}, which reads agents, but it sees the state; "
            f"use {'body=mlp' if reads_agents else 'communication=none'}, or "
            "central_input=observations."
        )
    columns = columns_of_state(group)
    inputs = [state_features(group)] * len(group.groups)
    network = make_central_network(
        group, columns, inputs, config, per_agent=per_agent, gain=1.0, device=device
    )
    return AgentNetwork(StateInput(group.state_spec.ndim), network, head)


def _make_central_critic(group, team, config, norm, head, device) -> AgentNetwork:
    """Builds a critic that reads all agents of the group or team."""
    seen = group if team is None else team
    agents = AgentInput(seen, norm, device)
    per_agent = getattr(config, "value_per", "agent") == "agent"
    if getattr(config, "architecture", "mlp") != "mlp":
        network: nn.Module = make_set_network(group, seen, config, device)
        return AgentNetwork(
            agents, network, head, pick=make_value_picker(group, seen, per_agent, device)
        )
    body = make_agent_network if communicates(config) else body_of(config).make_body
    if body is not None:
        if not per_agent:
            raise ConfigError(
                f"group {group.name!r}: a critic's value_per is 'team', but a network over agents "
                "has a value for each agent; use value_per=agent."
            )
        network = body(seen, 1, config, gain=1.0, device=device)
        links = links_of(group, config, device) if team is None else None
        pick = make_value_picker(group, seen, device=device)
        return AgentNetwork(agents, network, head, pick=pick, links=links)
    columns = columns_of_groups(seen, group, own_group=team is None)
    inputs = inputs_of_groups(seen, group, team is None, standardized=norm is not None)
    network = make_central_network(
        group, columns, inputs, config, per_agent=per_agent, gain=1.0, device=device
    )
    return AgentNetwork(TeamInput(agents, seen.observation_dims), network, head)


def _check_value_per_team(group: GroupSpec, config: NetworkConfig, centralized: bool | str) -> None:
    """Refuses settings with one value per group if the network cannot have one.

    Raises:
        ConfigError: contradictory settings; the message names them.
    """
    found = ""
    if centralized == "agent_state":
        found = ", but it sees each agent's own state; use value_per=agent."
    elif not centralized:
        found = ", but it sees one agent's observation; use value_per=agent, or algorithm=mappo."
    elif sharing_of(config) not in ("group", "full"):
        found = (
            f", which needs a network per group, but sharing is {sharing_of(config)!r}; use "
            "sharing=group."
        )
    if found:
        raise ConfigError(f"group {group.name!r}: a critic's value_per is 'team'{found}")
