"""The learner of IQL, VDN and QMIX."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, cast

from tensordict import TensorDictBase
from tensordict.nn import TensorDictModuleBase
from torch import nn

from torchrl_marl.learners.adam import Adam
from torchrl_marl.learners.clipping import GradientClip
from torchrl_marl.learners.off_policy_config import ValueConfig
from torchrl_marl.learners.replay_learner import ReplayLearner
from torchrl_marl.learners.replay_updates import Step
from torchrl_marl.learners.team_checks import (
    check_cooperative,
    check_cooperative_agents,
    refuse_separate_groups,
)
from torchrl_marl.objectives.value_decomposition import ValueDecompositionLoss
from torchrl_marl.specs import GroupSpec
from torchrl_marl.specs.joining import as_single_group

__all__ = ["ValueLearner"]


class ValueLearner(ReplayLearner):
    """IQL, VDN or QMIX for one or more groups with the same settings and discrete actions.

    Agents act epsilon-greedily. Each group has its own mixer, so competing groups are never mixed.
    With ``mixer.over: team`` all groups share one mixer and one reward.

    Args:
        groups, team, device, execution: as in
            :class:`~torchrl_marl.learners.replay_learner.ReplayLearner`.
        config (ValueConfig): settings of the learner.

    Raises:
        ConfigError: continuous actions, or one mixer for agents or groups that compete.

    Examples:
        >>> from torchrl_marl import TeamSpec
        >>> from torchrl_marl.collectors import RolloutCollector
        >>> from torchrl_marl.envs.toy import TwoStepGame
        >>> env = TwoStepGame(4, seed=0)
        >>> config = ValueConfig("qmix", learning_starts=0, minibatch_size=16)
        >>> learner = ValueLearner(TeamSpec.from_env(env).groups, config)
        >>> batch = RolloutCollector(env, learner.actors["agents"], frames_per_batch=40).next()
        >>> metrics = learner.learn(batch)
        >>> metrics["agents", "updates"], len(learner.replay)
        (tensor(4.), 40)
    """

    config: ValueConfig
    losses: dict[str, ValueDecompositionLoss]  # type: ignore[assignment]
    rate_of = {"values": "lr"}

    def __init__(self, groups: Mapping[str, GroupSpec], config: ValueConfig, **kwargs: Any) -> None:
        super().__init__(groups, config, **kwargs)
        if config.mixes_team:
            refuse_separate_groups(self.losses)
        mixers = {name: loss.mixer_network for name, loss in self.losses.items() if loss.mixed}
        self.mixers = nn.ModuleDict(cast(Mapping[str, nn.Module], mixers))

    def build(self, group: GroupSpec) -> tuple[TensorDictModuleBase, ValueDecompositionLoss]:
        """Builds the actor and the loss of a group."""
        config, actor = self.config, self.builder.q_actor(group)
        mixed = as_single_group(group) if config.mixes_team else group
        loss = ValueDecompositionLoss(
            actor,
            self.builder.mixer(mixed),
            group=mixed,
            double_q=config.double_q,
            negative_weight=config.negative_weight,
            bootstrap=cast(Literal["team", "agent"], config.bootstrap),
            gamma=config.gamma,
            functional=False,
        )
        return actor, loss

    def inspect_first_batch(self, batch: TensorDictBase) -> None:
        """Refuses one mixer for agents or groups that compete in the first batch."""
        super().inspect_first_batch(batch)
        if self.config.mixes != "none":
            check_cooperative_agents(self.groups.values(), batch, "learner.algorithm=iql")
        if self.config.mixes_team and len(self.groups) > 1:
            check_cooperative(self.groups.values(), batch)

    def make_steps(self) -> list[Step]:
        """Returns the only step of an update, which trains all networks."""
        config, seen, clips = self.config, self.block.input_group, {}
        for name, loss in self.losses.items():
            own = [p for network, _ in loss.followed for p in network.parameters()]
            clips[name] = GradientClip.of_values(loss, own, config.max_grad_norm, input_group=seen)
        parameters = [p for clip in clips.values() for p in clip.parameters]
        return [Step("value", {"values": Adam(parameters, config.lr, config.adam_eps)}, clips)]
