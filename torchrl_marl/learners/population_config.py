"""What learners of a population can do: settings that differ by member, and those that must not."""

from __future__ import annotations

from typing import Any

from torchrl_marl.errors import ConfigError
from torchrl_marl.learners.off_policy_config import ReplayLearnerConfig
from torchrl_marl.modules.config import communicates, sharing_of

__all__ = ["VARYING", "check_members", "varying_of"]

_ON_POLICY = (
    "lr",
    "entropy_coeff",
    "critic_coeff",
    "clip_epsilon",
    "gamma",
    "lmbda",
    "max_grad_norm",
)
_EPSILON = ("exploration.epsilon", "exploration.epsilon_end")
_VALUES = ("lr", "gamma", "max_grad_norm", *_EPSILON)
_OFF_POLICY = ("actor_lr", "critic_lr", "gamma", "max_grad_norm", *_EPSILON)
_OF_ALGORITHM = {
    **dict.fromkeys(("mappo", "ippo"), _ON_POLICY),
    "pqn": ("lr", "gamma", "lmbda", "max_grad_norm"),
    **dict.fromkeys(("qmix", "vdn", "iql"), _VALUES),
    **dict.fromkeys(("maddpg", "iddpg", "matd3", "itd3"), _OFF_POLICY),
    **dict.fromkeys(("masac", "isac"), (*_OFF_POLICY, "alpha_lr")),
}

VARYING = tuple(dict.fromkeys(name for names in _OF_ALGORITHM.values() for name in names))
"""Settings of a learner that may differ from member to member, of any algorithm."""


def varying_of(config: Any) -> tuple[str, ...]:
    """Returns the settings that may differ from member to member.

    Args:
        config (LearnerConfig): how they learn.

    Examples:
        >>> from torchrl_marl.learners.off_policy_config import ValueConfig
        >>> varying_of(ValueConfig())[:2]
        ('lr', 'gamma')
    """
    return _OF_ALGORITHM.get(config.algorithm, ())


def check_members(config: Any, at: str = "learner.") -> None:
    """Refuses settings with which members of a population would not learn by themselves.

    Args:
        config (LearnerConfig): how they learn.
        at (str): what stands before the names in messages.

    Raises:
        ConfigError: naming the setting and the fix.
    """
    if config.algorithm not in _OF_ALGORITHM:
        raise ConfigError(
            f"{at}algorithm is {config.algorithm!r}, expected one of {', '.join(_OF_ALGORITHM)} "
            "for a population; train its members one after the other: --seeds without --together."
        )
    if isinstance(config, ReplayLearnerConfig):
        _check_stored(config, at)
    if getattr(config, "mixes_team", False):
        raise ConfigError(
            f"{at}mixer.over is 'team', which a population does not have yet; use "
            f"{at}mixer.over=group, or population.size=1."
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
        if hasattr(config, name):
            _check_network(f"{at}{name}.", getattr(config, name))


def _check_stored(config: Any, at: str) -> None:
    """Refuses what populations that learn from stored steps do not have."""
    if config.remembers:
        raise ConfigError(
            f"{at}actor.memory.kind is {config.actor.memory.kind!r}, which a population that "
            "learns from stored steps does not have yet; use "
            f"{at}actor.memory=none, or population.size=1."
        )
    if config.replay.alpha:
        raise ConfigError(
            f"{at}replay.alpha is {config.replay.alpha:g}, but a population draws stored steps "
            f"alike; use {at}replay.alpha=0, or population.size=1."
        )


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
