"""Settings of HAPPO."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Annotated, Any

from torchrl_marl.errors import ConfigError, quoted
from torchrl_marl.learners.config import CentralInput, OnPolicyConfig
from torchrl_marl.modules.config import (
    RecurrentCriticConfig,
    TeamNetworkConfig,
    communicates,
    sharing_of,
)
from torchrl_marl.modules.registry import BODIES
from torchrl_marl.settings import ReadWhere

__all__ = ["SHARED", "HAPPOConfig", "check_own_policies", "with_own_policies"]

SHARED = (
    *("sharing", "sharing_index", "agent_id", "agent_id_size", "mask_ratio", "mask_seed"),
    *("n_clusters", "clustering_frames"),
)
"""Settings of a network's parameter sharing."""


@dataclass(frozen=True)
class HAPPOConfig(OnPolicyConfig):
    """Settings of HAPPO: MAPPO with sequential updates of agents, each with its own network."""

    algorithm: str = "happo"
    """Learning algorithm of the agents."""
    central_input: CentralInput = "observations"
    """Input of the critic."""
    critic: RecurrentCriticConfig = field(default_factory=RecurrentCriticConfig)
    """The critic's network."""
    actor: Annotated[
        TeamNetworkConfig,
        ReadWhere("algorithm", "happo", but=True, of=(*SHARED, "communication")),
    ] = field(default_factory=lambda: TeamNetworkConfig(sharing="none"))
    """The actor's network, one for each agent."""

    def __post_init__(self) -> None:
        super().__post_init__()
        with_own_policies(self)

    @property
    def central(self) -> bool:
        """True if critics read more than their agent's observation."""
        return True

    def check(self, at: str = "") -> None:
        """Refuses policies that agents share, since one agent's update would change the others."""
        super().check(at)
        check_own_policies(self, at, "mappo")


def with_own_policies(config: Any) -> None:
    """Lets ``actor.share_params`` decide about sharing; ``none`` is the default of these settings.

    Args:
        config (LearnerConfig): settings of a learner with sequential updates.
    """
    if config.actor.share_params and config.actor.sharing == "none":
        object.__setattr__(config, "actor", replace(config.actor, sharing="group"))


def check_own_policies(config: Any, at: str, instead: str) -> None:
    """Refuses policies that agents share, for a learner that updates one agent after the other.

    Args:
        config (LearnerConfig): settings of the learner.
        at (str): prefix of the settings' names in messages.
        instead (str): algorithm to suggest, which updates all agents at once.

    Raises:
        ConfigError: a channel, a shared network or a network over all agents; the message names the
            setting, the reason and the fix.
    """
    actor = config.actor
    if communicates(actor):
        raise ConfigError(
            f"{at}actor.communication.kind is {quoted(actor.communication.kind)}, but "
            f"{config.algorithm} updates one agent after the other, and all share the channel; "
            f"use {at}actor.communication=none, or {at}algorithm={instead}."
        )
    sharing, body = sharing_of(actor), BODIES.find(actor.body)
    if sharing != "none":
        raise ConfigError(
            f"{at}actor.sharing is {quoted(sharing)}, but {config.algorithm} updates one agent "
            f"after the other, each with a network of its own; use {at}actor.sharing=none, or "
            f"{at}algorithm={instead}."
        )
    if body is not None and body.body is not None:
        raise ConfigError(
            f"{at}actor.body is {quoted(actor.body)}, one network over all agents, but "
            f"{config.algorithm} updates one agent after the other; use {at}actor.body=mlp, or "
            f"{at}algorithm={instead}."
        )
