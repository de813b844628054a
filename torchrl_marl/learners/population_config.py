"""What learners of a population can do: settings that differ by member, and those that must not."""

from __future__ import annotations

from typing import Any

from torchrl_marl.errors import ConfigError
from torchrl_marl.modules.communication_config import communicates
from torchrl_marl.modules.config import sharing_of

__all__ = ["VARYING", "check_members"]

VARYING = (
    "lr",
    "entropy_coeff",
    "critic_coeff",
    "clip_epsilon",
    "gamma",
    "lmbda",
    "max_grad_norm",
)
"""Settings of a learner that may differ from member to member."""


def check_members(config: Any, at: str = "learner.") -> None:
    """Refuses settings with which members of a population would not learn by themselves.

    Args:
        config (LearnerConfig): how they learn.
        at (str): what stands before the names in messages.

    Raises:
        ConfigError: naming the setting and the fix.
    """
    if config.algorithm not in ("mappo", "ippo"):
        raise ConfigError(
            f"{at}algorithm is {config.algorithm!r}, expected mappo or ippo for a population; "
            "train its members one after the other: --seeds without --together."
        )
    if config.central and config.central_input == "state":
        raise ConfigError(
            f"{at}central_input is 'state', which all members of a population would see; use "
            f"{at}central_input=observations, or population.size=1."
        )
    if config.unshare_at is not None:
        raise ConfigError(
            f"{at}unshare_at is {config.unshare_at:g}, which a population does not have; use "
            f"{at}unshare_at=null, or population.size=1."
        )
    for name in ("actor", "critic"):
        _check_network(f"{at}{name}.", getattr(config, name))


def _check_network(at: str, network: Any) -> None:
    """Refuses networks in which members would meet."""
    if sharing_of(network) not in ("group", "none"):
        raise ConfigError(
            f"{at}sharing is {sharing_of(network)!r}, which links members of a population; "
            f"use {at}sharing=group or none, or population.size=1."
        )
    if communicates(network):
        raise ConfigError(
            f"{at}communication.kind is {network.communication.kind!r}, which a population does "
            f"not have yet; use {at}communication=none, or population.size=1."
        )
    for word, allowed in (("architecture", ("mlp",)), ("body", ("mlp", "cnn"))):
        found = getattr(network, word, "mlp")
        if found not in allowed:
            raise ConfigError(
                f"{at}{word} is {found!r}, which reads all agents, those of other members too; "
                f"use {at}{word}=mlp, or population.size=1."
            )
