"""Settings of HADDPG, HATD3 and HASAC."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated

from torchrl_marl.learners.happo_config import SHARED, check_own_policies, with_own_policies
from torchrl_marl.learners.off_policy_config import OffPolicyConfig
from torchrl_marl.modules.config import RecurrentNetworkConfig
from torchrl_marl.settings import ReadWhere, Share

__all__ = ["HARLConfig"]

_HARL = ("haddpg", "hatd3", "hasac")


@dataclass(frozen=True)
class HARLConfig(OffPolicyConfig):
    """Settings of HADDPG, HATD3 and HASAC: sequential updates of agents with own actors.

    Examples:
        >>> config = HARLConfig("hatd3")
        >>> config.actor.sharing, config.central, config.delayed
        ('none', True, True)
    """

    algorithm: str = "hatd3"
    """Learning algorithm of the agents."""
    actor: Annotated[
        RecurrentNetworkConfig,
        ReadWhere("algorithm", *_HARL, but=True, of=(*SHARED, "communication")),
    ] = field(default_factory=lambda: RecurrentNetworkConfig(sharing="none"))
    """The actor's network, one for each agent."""
    unshare_at: Annotated[Share | None, ReadWhere("algorithm", *_HARL, but=True)] = None
    """Fraction of the run after which each agent trains its own copy of shared networks; null:
    never."""

    def __post_init__(self) -> None:
        super().__post_init__()
        with_own_policies(self)

    @property
    def central(self) -> bool:
        """True if critics read more than their agent's observation."""
        return True

    @property
    def joint_entropy(self) -> bool:
        """True if values contain the entropy bonus of all agents of the group (HASAC)."""
        return self.soft

    def check(self, at: str = "") -> None:
        """Refuses policies that agents share, since one agent's update would change the others."""
        super().check(at)
        check_own_policies(self, at, self.algorithm.replace("ha", "ma", 1))
