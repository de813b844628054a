"""Learner of behavior cloning."""

from __future__ import annotations

from tensordict import TensorDictBase
from tensordict.nn import TensorDictModuleBase

from torchrl_marl.learners.adam import Adam
from torchrl_marl.learners.off_policy import actor_clip
from torchrl_marl.learners.offline_config import ImitationConfig
from torchrl_marl.learners.replay_learner import ReplayLearner
from torchrl_marl.learners.replay_updates import Step
from torchrl_marl.objectives.imitation import ImitationLoss
from torchrl_marl.specs import GroupSpec

__all__ = ["ImitationLearner"]


class ImitationLearner(ReplayLearner):
    """Behavior cloning, for groups that have the same settings.

    The actors are those of MAPPO, so that MAPPO can start from them (``init_from``). With actions
    of an expert for the observations of the learning policy, this is DAgger: the replay buffer
    holds the steps of all batches.

    Args:
        groups, team, device, execution: as in
            :class:`~torchrl_marl.learners.replay_learner.ReplayLearner`.
        config (ImitationConfig): settings of the learner.

    Reference: Ross et al., 2011, https://arxiv.org/abs/1011.0686 (DAgger).

    Examples:
        >>> from torchrl_marl import TeamSpec
        >>> from torchrl_marl.envs import VmasEnv
        >>> env = VmasEnv("balance", num_envs=4, max_steps=100, seed=0)
        >>> config = ImitationConfig(minibatch_size=16)
        >>> learner = ImitationLearner(TeamSpec.from_env(env).groups, config)
        >>> metrics = learner.learn(env.rollout(10, env.heuristic()))
        >>> metrics["agents", "updates"], len(learner.replay)
        (tensor(4.), 40)
    """

    config: ImitationConfig
    losses: dict[str, ImitationLoss]  # type: ignore[assignment]
    explores = False
    rate_of = {"actors": "lr"}

    def build(self, group: GroupSpec) -> tuple[TensorDictModuleBase, ImitationLoss]:
        """Builds the actor and the loss of a group."""
        actor = self.builder.actor(group)
        noise = self.config.action_noise
        return actor, ImitationLoss(actor, group=group, noise=noise, functional=False)

    def inspect_first_batch(self, batch: TensorDictBase) -> None:
        """Accepts any batch: turns and rewards do not matter to copied actions."""

    def make_steps(self) -> list[Step]:
        """Returns the only step of an update, which trains the actors."""
        config = self.config
        clips = {name: actor_clip(loss, config.max_grad_norm) for name, loss in self.losses.items()}
        parameters = [p for clip in clips.values() for p in clip.parameters]
        return [Step("actor", {"actors": Adam(parameters, config.lr, config.adam_eps)}, clips)]
