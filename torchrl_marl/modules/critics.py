"""Critics: the value of a step for every agent, in reward units.

Shapes: B any batch dims, N agents, O observation features, S state features.
"""

from __future__ import annotations

from typing import Literal

import torch
from tensordict.nn import TensorDictModule
from torch import Tensor, nn

from torchrl_marl.errors import ConfigError
from torchrl_marl.modules.config import CriticConfig, NetworkConfig, sharing_of
from torchrl_marl.modules.networks import (
    AgentInput,
    AgentNetwork,
    StateInput,
    TeamInput,
    columns_of_parts,
    make_agent_network,
    make_central_network,
)
from torchrl_marl.modules.normalization import ObservationNorm, ValueNorm
from torchrl_marl.modules.precision import run_in
from torchrl_marl.modules.size import check_size
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


class _Shown(nn.Module):
    """A value for every agent from a network over a set of agents, of which some are shown.

    Args:
        features (AgentInput): of all agents that the critic sees.
        network (SetNetwork): ``[*B, M, O]`` and a mask ``[*B, M]`` to ``[*B, M, K]``.
        shown (tuple of int): whose values are wanted.
        outputs (tuple of int): which of the K outputs is whose value.
        head (nn.Module, optional): what ends it.
    """

    index: Tensor | None
    output: Tensor | None

    def __init__(
        self,
        features: AgentInput,
        network: nn.Module,
        shown: tuple[int, ...],
        outputs: tuple[int, ...],
        head: nn.Module | None,
        device: torch.device | str | None,
    ) -> None:
        super().__init__()
        self.features = features
        self.network = network
        self.head = head
        self.precision = "float32"
        everyone = shown == tuple(range(features.n_agents))
        index = None if everyone else torch.tensor(shown, device=device)
        self.register_buffer("index", index, persistent=False)
        several = len(set(outputs)) > 1
        output = torch.tensor(outputs, device=device).unsqueeze(-1) if several else None
        self.register_buffer("output", output, persistent=False)

    def forward(self, *inputs: Tensor) -> Tensor:
        """Reads the living, of all that it sees."""
        features = self.features(*inputs)
        living = inputs[-1] if self.features.masked else None
        if living is None:
            living = torch.ones(features.shape[:-1], dtype=torch.bool, device=features.device)
        value = run_in(self.precision, self.network, features, living)
        if self.index is not None:
            value = value.index_select(-2, self.index)
        if self.output is not None:
            value = value.gather(-1, self.output.expand(*value.shape[:-1], 1))
        return value if self.head is None else self.head(value)


def make_critic(
    group: GroupSpec,
    config: CriticConfig | NetworkConfig | None = None,
    *,
    centralized: bool | Literal["state"] = True,
    team: GroupSpec | None = None,
    value_norm: ValueNorm | None = None,
    observation_norm: ObservationNorm | None = None,
    device: torch.device | str | None = None,
) -> TensorDictModule:
    """A value for every agent of a group.

    What the critic sees is what makes MAPPO (``True`` or ``"state"``) or IPPO (``False``). A
    shared central critic has an output for each agent: rewards of their own have values of
    their own.

    Args:
        group (GroupSpec): keys, sizes and masks, from :class:`TeamSpec`, or several groups as
            one from :func:`~torchrl_marl.joining.join`.
        config (CriticConfig or NetworkConfig, optional): the network. A ``mlp`` reads the agents
            side by side; a ``set`` (their mean) and ``attention`` read any number of living
            agents in any order.
        centralized (bool or "state"): all observations of the group, each agent's own
            (``False``), or the environment's ``"state"``.
        team (GroupSpec, optional): a critic across groups: the agents whose observations it
            sees, of several groups joined; by default those of the agent's own group.
        value_norm (ValueNorm, optional): the network then works in normalized returns.
        observation_norm (ObservationNorm, optional): standardizes what it sees.
        device (torch.device, optional): of the parameters.

    Shapes:
        - observation: ``[*B, N, O]``; mask: ``[*B, N]``; state: ``[*B, S]``
        - state_value: ``[*B, N, 1]``

    Keys:
        - reads: observation and mask of ``group`` or of ``team``, or ``group.state_key``
        - writes: ``(group, "state_value")``

    Raises:
        ValueError: ``"state"`` where the environment has none, or settings that do not fit.

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
    config = CriticConfig() if config is None else config
    per_agent = getattr(config, "value_per", "agent") == "agent"
    architecture = getattr(config, "architecture", "mlp")
    if architecture != "mlp" and centralized is not True:
        raise ConfigError(
            f"group {group.name!r}: a critic of architecture {architecture!r} reads agents, but "
            f"centralized is {centralized!r}, expected True; use algorithm=mappo with "
            "central_input=observations or team, or architecture=mlp."
        )
    _check_values(group, config, centralized is not False, per_agent)
    check_size("critic", group, config, device)
    head = None if value_norm is None else Denormalize(value_norm)
    if centralized == "state":
        if group.state_spec is None:
            raise ConfigError(
                f"group {group.name!r}: this environment gives no 'state' for a critic to see; "
                "VmasEnv(state='observations') adds one, or use central_input=observations."
            )
        columns = [list(range(group.state_dim))] * len(group.parts)
        network = make_central_network(
            group, columns, config, per_agent=per_agent, gain=1.0, device=device
        )
        critic: nn.Module = AgentNetwork(StateInput(group.state_spec.ndim), network, head)
        return TensorDictModule(critic, [group.state_key], [group.key("state_value")])
    seen = team if centralized is True and team is not None else group
    agents = AgentInput(seen, observation_norm, device)
    if centralized is False:
        network = make_agent_network(group, 1, config, gain=1.0, device=device)
        critic = AgentNetwork(agents, network, head)
    elif architecture == "mlp":
        columns = columns_of_parts(seen, group, own_part=team is None)
        network = make_central_network(
            group, columns, config, per_agent=per_agent, gain=1.0, device=device
        )
        critic = AgentNetwork(TeamInput(agents, seen.observation_dims), network, head)
    else:
        critic = _set_critic(group, seen, agents, config, head, device)
    return TensorDictModule(critic, AgentInput.keys(seen), [group.key("state_value")])


def _check_values(group: GroupSpec, config: NetworkConfig, central: bool, per_agent: bool) -> None:
    if not per_agent and not central:
        raise ConfigError(
            f"group {group.name!r}: a critic's value_per is 'team', but it sees what one agent "
            "sees; use value_per=agent, or algorithm=mappo."
        )
    if not per_agent and sharing_of(config) not in ("group", "full"):
        raise ConfigError(
            f"group {group.name!r}: a critic's value_per is 'team', which no agent has a network "
            f"for, but sharing is {sharing_of(config)!r}; use sharing=group."
        )


def _set_critic(group, seen, agents, config, head, device) -> nn.Module:
    if sharing_of(config) not in ("group", "full"):
        raise ValueError(
            f"group {group.name!r}: a critic of architecture {config.architecture!r} is one "
            f"network for all, but sharing is {sharing_of(config)!r}; use sharing=group."
        )
    if seen is group and len(group.parts) > 1:
        raise ValueError(
            f"group {group.name!r}: a critic of architecture {config.architecture!r} would let "
            "groups see each other; give each its own critic, or team= to let them."
        )
    from torchrl_marl.modules.set_critic import SetNetwork

    # A team's value is its group's: one output for each, where several are trained as one.
    per_agent = config.value_per == "agent"
    outputs = (0,) * group.n_agents if per_agent else group.part_index
    network = SetNetwork(
        seen.observation_dim,
        max(outputs) + 1,
        seen.kinds or (0,) * seen.n_agents,
        num_cells=config.num_cells,
        activation=config.activation,
        pooling="attention" if config.architecture == "attention" else "mean",
        per_agent=per_agent,
        device=device,
    )
    names = [part.name for part in group.parts]
    shown = tuple(i for i, part in enumerate(seen.part_index) if seen.parts[part].name in names)
    return _Shown(agents, network, shown, outputs, head, device)
