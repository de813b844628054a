"""The losses of the algorithms that learn from stored steps, as their settings say."""

from __future__ import annotations

from typing import Any, Literal, cast

from torchrl_marl.learners.off_policy_config import OffPolicyConfig
from torchrl_marl.modules.registry import body_of
from torchrl_marl.objectives.maddpg import MADDPGLoss
from torchrl_marl.objectives.masac import MASACLoss
from torchrl_marl.specs import GroupSpec

__all__ = ["build_loss"]


def build_loss(
    actor: Any, critic: Any, group: GroupSpec, config: OffPolicyConfig
) -> MADDPGLoss | MASACLoss:
    """Builds the loss of a group, with the networks as they are.

    Args:
        actor, critic: of the group, as :mod:`~torchrl_marl.learners.networks` builds them.
        group (GroupSpec): also several groups as one.
        config (OffPolicyConfig): how it learns.
    """
    build = _soft_loss if config.soft else _deterministic_loss
    return build(actor, critic, group, config)


def _deterministic_loss(
    actor: Any, critic: Any, group: GroupSpec, config: OffPolicyConfig
) -> MADDPGLoss:
    return MADDPGLoss(
        actor,
        critic,
        group=group,
        bootstrap=cast(Literal["team", "agent"], config.bootstrap),
        actor_gradient=_whose(config, group),
        gamma=config.gamma,
        mixed=config.mixed,
        policy_noise=config.target_noise if config.delayed else 0.0,
        noise_clip=config.target_noise_clip,
        saturation_coeff=config.saturation_coeff,
        functional=False,
    )


def _soft_loss(actor: Any, critic: Any, group: GroupSpec, config: OffPolicyConfig) -> MASACLoss:
    return MASACLoss(
        actor,
        critic,
        group=group,
        bootstrap=cast(Literal["team", "agent"], config.bootstrap),
        actor_gradient=_whose(config, group),
        groups_apart=config.central_input == "observations",
        gamma=config.gamma,
        alpha_init=config.alpha_init,
        target_entropy=config.target_entropy,
        functional=False,
    )


def _whose(config: OffPolicyConfig, group: GroupSpec) -> Literal["group", "agent", "all"]:
    """Returns whose values actions raise, with as few passes as that takes."""
    if config.mixed:
        return "all"  # a group's value depends on its own actions alone
    if not config.central and body_of(config.critic).make_body is None:
        return "all"  # nobody's value depends on others' actions
    chosen = config.bootstrap if config.actor_gradient == "bootstrap" else config.actor_gradient
    if chosen == "agent":
        return "agent"
    if config.soft and group.discrete:
        return "group"  # every choice is valued apart
    return "group" if config.central and config.central_input != "observations" else "all"
