"""Builders of the actors, critics and mixers of a learner's groups.

Shapes: N agents of a group, G groups that are trained as one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any, Literal, cast

import torch
from tensordict import TensorDictBase
from tensordict.nn import TensorDictModule, TensorDictModuleBase, TensorDictSequential
from torch import nn

from torchrl_marl.errors import ConfigError
from torchrl_marl.learners.config import ActorCriticConfig, TrainedConfig
from torchrl_marl.modules.build import make_actor
from torchrl_marl.modules.config import communicates, sharing_of
from torchrl_marl.modules.critics import make_critic
from torchrl_marl.modules.inputs import gather_observation
from torchrl_marl.modules.normalization import ObservationNorm, ValueNorm
from torchrl_marl.modules.precision import set_precision
from torchrl_marl.objectives.flags import learning_mask
from torchrl_marl.specs import GroupSpec, TeamSpec
from torchrl_marl.specs.joining import join, without_member_names

__all__ = [
    "NetworkBuilder",
    "ObservationNorms",
    "check_channels",
    "check_networks_of_members",
    "critic_input_group",
    "need_separate_networks",
]


class ObservationNorms(nn.ModuleDict):
    """Running statistics of the observations of each group, created on first use.

    Args:
        enabled (bool): whether observations are normalized.
        device (torch.device, optional): device of the statistics.
    """

    def __init__(self, enabled: bool, device: torch.device | str | None = None) -> None:
        super().__init__()
        self.enabled, self.device = enabled, device
        self.groups: dict[str, GroupSpec] = {}

    def of(self, group: GroupSpec) -> ObservationNorm | None:
        """Returns the statistics of a group, or of several groups joined into one."""
        if not self.enabled:
            return None
        if group.name not in self:
            self.groups[group.name] = group
            self[group.name] = ObservationNorm(
                group.observation_dim, kinds=group.kinds, device=self.device
            )
        return cast(ObservationNorm, self[group.name])

    def update_all(self, data: TensorDictBase) -> None:
        """Updates the statistics with a batch in which all groups are gathered."""
        for name, group in self.groups.items():
            observation, acts = gather_observation(group, data)
            cast(ObservationNorm, self[name]).update(observation, learning_mask(data, group, acts))


class NetworkBuilder:
    """Builds the networks of a learner's groups from its settings.

    Args:
        config (TrainedConfig): settings of the learner.
        norms (ObservationNorms): running statistics of observations.
        input_group (GroupSpec, optional): agents in the input of a critic or a mixer across groups.
        device (torch.device, optional): device of the networks.

    Raises:
        ConfigError: each method raises it for settings that the group does not support; the message
            names the group and the network.
    """

    def __init__(
        self,
        config: Any,
        norms: ObservationNorms,
        input_group: GroupSpec | None,
        device: torch.device | str | None,
    ) -> None:
        self.config, self.norms, self.input_group, self.device = config, norms, input_group, device

    def actor(
        self, group: GroupSpec, make: Callable[..., TensorDictModuleBase] = make_actor
    ) -> Any:
        """Builds the actor of a group.

        Args:
            group (GroupSpec): the group.
            make (callable, optional): builder of the actor, such as ``make_deterministic_actor``.
        """
        if make is not make_actor:
            self._refuse_branches(group)
        make = partial(make, group, self.config.actor, observation_norm=self.norms.of(group))
        return self._build(group, "actor", make)

    def q_actor(self, group: GroupSpec) -> Any:
        """Builds the Q-network of a group, from which its agents act.

        Raises:
            ConfigError: unsupported settings, or continuous or multi-discrete actions.
        """
        from torchrl_marl.modules.q_actor import make_q_actor

        self._refuse_branches(group)
        if not group.discrete:
            raise ConfigError(
                f"group {group.name!r}: its actions are continuous, expected discrete ones for "
                f"{self.config.algorithm}; use env.continuous_actions=false, or algorithm=maddpg."
            )
        return self.actor(group, partial(make_q_actor, dueling=self.config.actor.dueling))

    def critic(self, group: GroupSpec) -> TensorDictModule:
        """Builds the critic of a group, with its value norm."""
        config, value_norm = self.config, None
        if config.value_norm:
            value_norm = ValueNorm(
                config.value_norm_decay, membership=group.membership, device=self.device
            )
        settings = {
            **self._critic_input_settings(group),
            "team": self.input_group,
            "value_norm": value_norm,
        }
        return self._build(group, "critic", partial(make_critic, group, config.critic, **settings))

    def action_critic(self, group: GroupSpec, n_critics: int = 1) -> TensorDictSequential:
        """Builds the critics of a group's observations and actions.

        Args:
            group (GroupSpec): the group.
            n_critics (int): number of critics that are trained on the same targets.

        Raises:
            ConfigError: multi-discrete actions.
        """
        from torchrl_marl.modules.action_critics import make_action_critic
        from torchrl_marl.modules.mixers import make_mixed_critic

        self._refuse_branches(group)
        config = self.config
        make: Callable[..., TensorDictSequential] = make_action_critic
        settings: dict[str, Any] = {"team": self.input_group}
        if config.mixed:
            make, settings = make_mixed_critic, vars(config.mixer)
        settings = {**self._critic_input_settings(group), **settings, "n_critics": n_critics}
        if not config.central and settings["centralized"] == "agent_state":
            group = group.of_states  # each critic reads one agent's state and action
            settings |= {"centralized": False, "observation_norm": None}
        return self._build(group, "critic", partial(make, group, config.critic, **settings))

    def mixer(self, group: GroupSpec) -> TensorDictModule | None:
        """Builds the mixer of a group's values, or returns None if the algorithm has none."""
        from torchrl_marl.modules.mixers import make_mixer

        own = self.config.mixer
        settings = {**self._critic_input_settings(group), "team": self.input_group}
        settings |= {"hidden": own.hidden, "init_scale": own.init_scale}
        return self._build(
            group, "mixer", partial(make_mixer, group, self.config.mixes, **settings)
        )

    def _refuse_branches(self, group: GroupSpec) -> None:
        if group.branches:
            raise ConfigError(
                f"group {group.name!r}: its actions are {group.choices}, which "
                f"{self.config.algorithm} does not support; use algorithm=mappo, ippo, happo or bc."
            )

    def _critic_input_settings(self, group: GroupSpec) -> dict[str, Any]:
        """Returns the settings of a critic's or mixer's input, with observation statistics."""
        config = self.config
        norm = self.norms.of(group if self.input_group is None else self.input_group)
        read = _state_to_read(group, config) or config.central
        return {"centralized": read, "observation_norm": norm}

    def _build(self, group: GroupSpec, network: str, make: Callable[..., Any]) -> Any:
        """Builds a network in the learner's precision; errors name the group and the network."""
        try:
            built = make(device=self.device)
        except ConfigError as error:
            text = without_member_names(str(error))
            text = text.removeprefix(f"group {group.name!r}: ")
            raise ConfigError(f"group {group.name!r}: {network}: {text}") from None
        if built is not None:
            set_precision(built, self.config.precision)
        return built


def _state_to_read(
    group: GroupSpec, config: TrainedConfig
) -> Literal["state", "agent_state"] | None:
    """Returns the state that a group's critic or mixer reads; None if it reads observations."""
    if config.central_input == "agent_state":
        return "agent_state"
    if not config.central or config.central_input != "state":
        return None
    own_only = group.state_spec is None and group.agent_state_key is not None
    return "agent_state" if own_only else "state"


def critic_input_group(groups: Iterable[GroupSpec], config: TrainedConfig) -> GroupSpec | None:
    """Returns a group of all agents that a critic across groups reads; None if no critic does."""
    across = config.central and config.central_input == "team"
    return join(list(groups), same_actions=False) if across else None


def need_separate_networks(config: TrainedConfig) -> bool:
    """Returns whether groups need separate networks.

    This is the case if a network over a set of agents would otherwise read all groups. It is also
    the case if groups do not communicate with each other, since they cannot share a channel then.
    """
    networks = [config.actor, *([config.critic] if hasattr(config, "critic") else [])]
    talks = [own.communication for own in networks if communicates(own)]
    if any(not own.across_groups for own in talks):
        return True
    if not isinstance(config, ActorCriticConfig):
        return False
    return config.critic.architecture != "mlp" and config.central_input != "team"


def check_networks_of_members(joined: Iterable[GroupSpec], config: TrainedConfig) -> None:
    """Refuses networks that serve several groups of a population's member.

    Args:
        joined (iterable of GroupSpec): groups that are trained, each of which may be several groups
            that are trained as one.
        config (TrainedConfig): settings of the learner.

    Raises:
        ConfigError: ``sharing: agent_id`` for groups that are trained as one.
    """
    for name in ("actor", "critic"):
        network = getattr(config, name, None)
        if network is None or sharing_of(network) != "agent_id":
            continue
        for names in ([own.name for own in group.sources] for group in joined):
            if len(names) > 1:
                raise ConfigError(
                    f"learner.{name}.sharing is 'agent_id', which gives the groups "
                    f"{' and '.join(names)} one network, but a population needs a network for each "
                    f"group; use learner.{name}.sharing=group or none, or population.size=1."
                )


def check_channels(
    joined: Mapping[str, GroupSpec], config: TrainedConfig, team: TeamSpec | None
) -> None:
    """Refuses communication across groups that are not trained as one.

    Args:
        joined (mapping of name to GroupSpec): the groups that are trained.
        config (TrainedConfig): settings of the learner.
        team (TeamSpec, optional): all groups of the environment.

    Raises:
        ConfigError: unsupported communication. The message names the groups, or the network that
            does not support communication across groups.
    """
    networks = {"actor": config.actor, "critic": getattr(config, "critic", config.actor)}
    talks = {name: own for name, own in networks.items() if communicates(own)}
    across = [name for name, own in talks.items() if own.communication.across_groups]
    names = list(joined)
    trained = {own.name for group in joined.values() for own in group.groups}
    apart = [] if team is None else [name for name in team.groups if name not in trained]
    if len(names) > 1 and len(talks) == 2 and len(across) == 1:
        [within] = talks.keys() - set(across)
        raise ConfigError(
            f"{across[0]}.communication.across_groups is true, but {within}.communication."
            "across_groups is false; use the same for both."
        )
    if "actor" in across and (len(names) > 1 or apart):
        raise ConfigError(
            f"actor.communication.across_groups is true, but groups {', '.join(names + apart)} are "
            "not trained as one: their actions are of different types, or their settings differ; "
            "use across_groups=false, or the same settings for all."
        )
