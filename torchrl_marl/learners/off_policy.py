"""Learners of off-policy actor-critic algorithms."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from tensordict import TensorDict, TensorDictBase
from tensordict.nn import TensorDictModuleBase
from torch import Tensor, nn

from torchrl_marl.learners.adam import Adam
from torchrl_marl.learners.clipping import GradientClip
from torchrl_marl.learners.off_policy_config import OffPolicyConfig
from torchrl_marl.learners.offline_config import TD3BCConfig
from torchrl_marl.learners.replay_learner import ReplayLearner
from torchrl_marl.learners.replay_updates import Step
from torchrl_marl.learners.team_checks import check_cooperative_agents
from torchrl_marl.modules.build import make_actor
from torchrl_marl.modules.q_actor import make_deterministic_actor
from torchrl_marl.modules.registry import body_of
from torchrl_marl.objectives.maddpg import MADDPGLoss
from torchrl_marl.objectives.masac import MASACLoss
from torchrl_marl.objectives.off_policy import OffPolicyLoss
from torchrl_marl.specs import GroupSpec

__all__ = ["OffPolicyLearner", "actor_clip", "build_loss"]


def build_loss(
    actor: Any, critic: Any, group: GroupSpec, config: OffPolicyConfig
) -> MADDPGLoss | MASACLoss:
    """Builds the loss of a group from its networks.

    Args:
        actor, critic: networks of the group, from :mod:`~torchrl_marl.learners.networks`.
        group (GroupSpec): a group, or several groups joined into one.
        config (OffPolicyConfig): settings of the learner.
    """
    common: dict[str, Any] = {
        "group": group,
        "bootstrap": config.bootstrap,
        "actor_gradient": _choose_actor_gradient(config, group),
        "gamma": config.gamma,
        "functional": False,
    }
    if config.soft:
        return MASACLoss(
            actor,
            critic,
            groups_apart=config.central_input == "observations",
            joint_entropy=config.joint_entropy,
            alpha_init=config.alpha_init,
            target_entropy=config.target_entropy,
            **common,
        )
    common |= {
        "mixed": config.mixed,
        "policy_noise": config.target_noise if config.delayed else 0.0,
        "noise_clip": config.target_noise_clip,
        "saturation_coeff": config.saturation_coeff,
    }
    if isinstance(config, TD3BCConfig):
        from torchrl_marl.objectives.td3_bc import TD3BCLoss

        return TD3BCLoss(actor, critic, bc_alpha=config.bc_alpha, **common)
    return MADDPGLoss(actor, critic, **common)


def _choose_actor_gradient(
    config: OffPolicyConfig, group: GroupSpec
) -> Literal["group", "agent", "all"]:
    """Returns the ``actor_gradient`` of a loss, in the cheapest of its equivalent forms."""
    if config.mixed:
        return "all"  # a group's value depends on its own actions alone
    if not config.central and body_of(config.critic).make_body is None:
        return "all"  # no agent's value depends on others' actions
    chosen = config.bootstrap if config.actor_gradient == "bootstrap" else config.actor_gradient
    if chosen == "agent":
        return "agent"
    if config.soft and group.discrete:
        return "group"  # each discrete action has a value
    return "group" if config.central and config.central_input != "observations" else "all"


class OffPolicyLearner(ReplayLearner):
    """MADDPG, MATD3, MASAC or an independent form, for groups that have the same settings.

    Each update takes an optimizer step of the critics. Every ``actor_interval``-th update (TD3)
    then also takes a step of the actors and a soft update of the targets.

    Args:
        groups, team, device, execution: as in
            :class:`~torchrl_marl.learners.replay_learner.ReplayLearner`.
        config (OffPolicyConfig): settings of the learner.

    Examples:
        >>> from torchrl_marl import TeamSpec
        >>> from torchrl_marl.collectors import RolloutCollector
        >>> from torchrl_marl.envs import VmasEnv
        >>> env = VmasEnv("balance", num_envs=4, max_steps=100, seed=0)
        >>> config = OffPolicyConfig(learning_starts=0, minibatch_size=16)
        >>> learner = OffPolicyLearner(TeamSpec.from_env(env).groups, config)
        >>> batch = RolloutCollector(env, learner.actors["agents"], frames_per_batch=40).next()
        >>> metrics = learner.learn(batch)
        >>> metrics["agents", "updates"], len(learner.replay)
        (tensor(4.), 40)
    """

    config: OffPolicyConfig
    losses: dict[str, MADDPGLoss | MASACLoss]  # type: ignore[assignment]
    per_agent = False
    rates = "learner.actor_lr, learner.critic_lr"
    rate_of = {"actors": "actor_lr", "critics": "critic_lr", "alphas": "alpha_lr"}

    def __init__(
        self, groups: Mapping[str, GroupSpec], config: OffPolicyConfig, **kwargs: Any
    ) -> None:
        super().__init__(groups, config, **kwargs)
        critics = {name: loss.qvalue_network for name, loss in self.losses.items()}
        self.critics = nn.ModuleDict(critics)
        if config.soft:
            alphas = {name: loss.log_alpha for name, loss in self.losses.items()}
            self.log_alphas = nn.ParameterDict(alphas)

    def build(self, group: GroupSpec) -> tuple[TensorDictModuleBase, MADDPGLoss | MASACLoss]:
        """Builds the actor and the loss of a group."""
        make = make_actor if self.config.soft else make_deterministic_actor
        actor = self.builder.actor(group, make)
        critic = self.builder.action_critic(group, 2 if self.config.twin else 1)
        return actor, build_loss(actor, critic, group, self.config)

    def inspect_first_batch(self, batch: TensorDictBase) -> None:
        """Refuses agents that share a mixer but have opposed rewards in the first batch."""
        super().inspect_first_batch(batch)
        if self.config.mixed:
            check_cooperative_agents(self.groups.values(), batch, "learner.mixer.kind=none")

    def make_steps(self) -> list[Step]:
        """Returns two steps: one of the critics, and one of the actors and temperatures."""
        config, losses, eps = self.config, self.losses, self.config.adam_eps
        limit, seen = config.max_grad_norm, self.block.input_group
        actors = [p for loss in losses.values() for p in loss.actor_network.parameters()]
        critics = [p for loss in losses.values() for p in loss.qvalue_network.parameters()]
        acting = {"actors": Adam(actors, config.actor_lr, eps)}
        if config.soft:
            alphas = [loss.log_alpha for loss in losses.values()]
            acting["alphas"] = Adam(alphas, config.alpha_lr, eps)
        valuing = {"critics": Adam(critics, config.critic_lr, eps)}
        critic_clips = {
            name: GradientClip.of_values(
                loss, loss.qvalue_network.parameters(), limit, input_group=seen
            )
            for name, loss in losses.items()
        }
        actor_clips = {
            name: actor_clip(loss, limit, self.per_agent) for name, loss in losses.items()
        }
        interval = config.actor_interval if config.delayed else 1
        return [
            Step("value", valuing, critic_clips, "grad_norm_critic"),
            Step("actor", acting, actor_clips, "grad_norm_actor", interval),
        ]


def actor_clip(loss: OffPolicyLoss, limit: float | None, per_agent: bool = False) -> GradientClip:
    """Builds the gradient clip of an actor; finds the groups of each parameter's rows.

    Args:
        loss (OffPolicyLoss): loss with the actor.
        limit (float, optional): maximum norm; None for no clipping.
        per_agent (bool): whether each agent is treated as a separate group.
    """
    group, actor = loss.group, loss.actor_network

    def outputs(td: TensorDict) -> Tensor:
        if group.discrete:
            return actor.get_dist(td).logits.clamp_min(-100.0).sum(-1)
        if group.branches or group.key("scale") in actor.out_keys:  # a stochastic one
            dist = actor.get_dist(td)
            return dist.log_prob(dist.sample())
        return actor(td).get(group.action_key).sum(-1)

    return GradientClip.of_outputs(
        group, actor.parameters(), outputs, limit, per_agent=per_agent, states=loss.states
    )
