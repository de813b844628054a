"""Learner of implicit Q-learning."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

from tensordict import TensorDict
from tensordict.nn import TensorDictModuleBase
from torch import Tensor, nn

from torchrl_marl.learners.adam import Adam
from torchrl_marl.learners.clipping import GradientClip
from torchrl_marl.learners.off_policy import actor_clip
from torchrl_marl.learners.offline_config import ImplicitQConfig
from torchrl_marl.learners.replay_learner import ReplayLearner
from torchrl_marl.learners.replay_updates import Step
from torchrl_marl.modules.exploration import RandomActor
from torchrl_marl.objectives.implicit_q import ImplicitQLoss
from torchrl_marl.specs import GroupSpec

__all__ = ["ImplicitQLearner"]


class ImplicitQLearner(ReplayLearner):
    """Implicit Q-learning, for groups that have the same settings.

    The actors are those of MAPPO, so that MAPPO can start from them (``init_from``).

    Args:
        groups, team, device, execution: as in
            :class:`~torchrl_marl.learners.replay_learner.ReplayLearner`.
        config (ImplicitQConfig): settings of the learner.

    Examples:
        >>> from torchrl_marl import TeamSpec
        >>> from torchrl_marl.envs import VmasEnv
        >>> env = VmasEnv("balance", num_envs=4, max_steps=100, seed=0)
        >>> config = ImplicitQConfig(minibatch_size=16)
        >>> learner = ImplicitQLearner(TeamSpec.from_env(env).groups, config)
        >>> metrics = learner.learn(env.rollout(10, env.heuristic()))
        >>> metrics["agents", "updates"], len(learner.replay)
        (tensor(4.), 40)
    """

    config: ImplicitQConfig
    losses: dict[str, ImplicitQLoss]  # type: ignore[assignment]
    explores = False
    rates = "learner.actor_lr, learner.critic_lr"
    rate_of = {"actors": "actor_lr", "critics": "critic_lr"}

    def __init__(
        self, groups: Mapping[str, GroupSpec], config: ImplicitQConfig, **kwargs: Any
    ) -> None:
        super().__init__(groups, config, **kwargs)
        critics = {name: loss.qvalue_network for name, loss in self.losses.items()}
        values = {name: loss.value_network for name, loss in self.losses.items()}
        self.critics, self.values = nn.ModuleDict(critics), nn.ModuleDict(values)

    def build(self, group: GroupSpec) -> tuple[TensorDictModuleBase, ImplicitQLoss]:
        """Builds the actor and the loss of a group."""
        config, builder = self.config, self.builder
        networks = builder.actor(group), builder.action_critic(group, 2), builder.critic(group)
        return networks[0], ImplicitQLoss(
            *networks,
            group=group,
            bootstrap=cast(Any, config.bootstrap),
            gamma=config.gamma,
            expectile=config.expectile,
            beta=config.beta,
            noise=config.action_noise,
            functional=False,
        )

    def make_steps(self) -> list[Step]:
        """Returns two steps: one of the critics and values, and one of the actors."""
        config, eps, limit = self.config, self.config.adam_eps, self.config.max_grad_norm
        valuing = {name: self._value_clip(loss) for name, loss in self.losses.items()}
        acting = {name: actor_clip(loss, limit) for name, loss in self.losses.items()}
        critics, actors = (
            [p for clip in clips.values() for p in clip.parameters] for clips in (valuing, acting)
        )
        of_values = {"critics": Adam(critics, config.critic_lr, eps)}
        of_actions = {"actors": Adam(actors, config.actor_lr, eps)}
        return [
            Step("value", of_values, valuing, "grad_norm_critic"),
            Step("actor", of_actions, acting, "grad_norm_actor"),
        ]

    def _value_clip(self, loss: ImplicitQLoss) -> GradientClip:
        """Builds the gradient clip of the critics and of the values of steps."""
        networks = (loss.qvalue_network, loss.value_network)
        parameters = [p for network in networks for p in network.parameters()]
        act = RandomActor(loss.group, parameters[0].device)

        def outputs(td: TensorDict) -> Tensor:
            acted = act(td)
            return loss.values(acted).sum(-1) + loss.state_value(acted).squeeze(-1)

        return GradientClip.of_outputs(
            loss.group,
            parameters,
            outputs,
            self.config.max_grad_norm,
            input_group=self.block.input_group,
            states=loss.states,
        )
