"""Settings of HAPPO."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Annotated

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

__all__ = ["HAPPOConfig"]

# Settings of a network's parameter sharing.
_SHARED = (
    *("sharing", "sharing_index", "agent_id", "agent_id_size", "mask_ratio", "mask_seed"),
    *("n_clusters", "clustering_frames"),
)


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
        ReadWhere("algorithm", "happo", but=True, of=(*_SHARED, "communication")),
    ] = field(default_factory=lambda: TeamNetworkConfig(sharing="none"))
    """The actor's network, one for each agent."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.actor.share_params and self.actor.sharing == "none":
            # ``none`` is this class's default, too; share_params alone then decides about sharing.
            object.__setattr__(self, "actor", replace(self.actor, sharing="group"))

    @property
    def central(self) -> bool:
        """True if critics read more than their agent's observation."""
        return True

    def check(self, at: str = "") -> None:
        """Refuses policies that agents share, since one agent's update would change the others."""
        super().check(at)
        if communicates(self.actor):
            raise ConfigError(
                f"{at}actor.communication.kind is {quoted(self.actor.communication.kind)}, but "
                f"{self.algorithm} updates one agent after the other, and all share the channel; "
                f"use {at}actor.communication=none, or {at}algorithm=mappo."
            )
        sharing, body = sharing_of(self.actor), BODIES.find(self.actor.body)
        if sharing != "none":
            raise ConfigError(
                f"{at}actor.sharing is {quoted(sharing)}, but {self.algorithm} updates one agent "
                f"after the other, each with a network of its own; use {at}actor.sharing=none, or "
                f"{at}algorithm=mappo."
            )
        if body is not None and body.body is not None:
            raise ConfigError(
                f"{at}actor.body is {quoted(self.actor.body)}, one network over all agents, but "
                f"{self.algorithm} updates one agent after the other; use {at}actor.body=mlp, or "
                f"{at}algorithm=mappo."
            )
