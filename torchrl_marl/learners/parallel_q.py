"""The learner of PQN.

Shapes: E envs, T steps, N agents of a group, G groups that are trained as one.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, cast

import torch
from tensordict import TensorDict, TensorDictBase
from tensordict.nn import TensorDictSequential
from torch import nn

from torchrl_marl.learners.clipping import GradientClip
from torchrl_marl.learners.epoch_learner import EpochLearner
from torchrl_marl.learners.off_policy_config import ParallelQConfig
from torchrl_marl.learners.team_checks import (
    check_cooperative,
    check_cooperative_agents,
    check_turn_based,
    refuse_separate_groups,
)
from torchrl_marl.modules.exploration import Explore
from torchrl_marl.objectives.parallel_q import ParallelQLoss
from torchrl_marl.specs import GroupSpec
from torchrl_marl.specs.joining import as_single_group

__all__ = ["ParallelQLearner"]


class ParallelQLearner(EpochLearner):
    """PQN for one or more groups with the same settings and discrete actions.

    Agents act epsilon-greedily. The lambda-returns of a batch are computed once, with the
    parameters that collected the batch. Then the networks train in epochs of minibatches. There is
    no replay buffer and no target network: layer norm keeps the values stable. Each group has its
    own mixer, so competing groups are never mixed. With ``mixer.over: team`` all groups share one
    mixer and one reward.

    Args:
        groups, team, device, execution: as in
            :class:`~torchrl_marl.learners.epoch_learner.EpochLearner`.
        config (ParallelQConfig): settings of the learner.

    Attributes:
        actors (GroupActors): actors by group, including exploration.
        mixers (ModuleDict): mixers by the name of a group, or of several joined groups (``"a+b"``).

    Shapes:
        - batch: ``[E, T]``; heterogeneous groups are padded

    Keys:
        - reads: the inputs of networks and losses
        - writes: value_target of each group, into the batch

    Raises:
        ConfigError: continuous actions, turns with ``bootstrap="agent"``, or one mixer for agents
            or groups that compete.
        NonFiniteError: a loss or gradient is NaN or infinite.

    Reference: Gallici et al., 2024, https://arxiv.org/abs/2407.04811 (algorithm 1).

    Examples:
        >>> from torchrl_marl import TeamSpec
        >>> from torchrl_marl.collectors import RolloutCollector
        >>> from torchrl_marl.envs.toy import TwoStepGame
        >>> env = TwoStepGame(4, seed=0)
        >>> config = ParallelQConfig(minibatch_size=20)
        >>> learner = ParallelQLearner(TeamSpec.from_env(env).groups, config)
        >>> batch = RolloutCollector(env, learner.actors["agents"], frames_per_batch=40).next()
        >>> metrics = learner.learn(batch)
        >>> metrics["agents", "loss_value"].shape, metrics["agents", "epsilon"]
        (torch.Size([]), tensor(1.))
    """

    losses: dict[str, ParallelQLoss]

    def __init__(
        self,
        groups: Mapping[str, GroupSpec],
        config: ParallelQConfig,
        *,
        device: torch.device | str | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(groups, config, device=device, **kwargs)
        self.mixers = nn.ModuleDict()
        for name, group in self.block.joined.items():
            actor = self.builder.q_actor(group)
            mixed = as_single_group(group) if config.mixes_team else group
            mixer = self.builder.mixer(mixed)
            explore = Explore(group, epsilon=config.exploration.epsilon, device=device)
            self.actors.add(group, TensorDictSequential(actor, explore))
            self.explorers.append(explore)
            if mixer is not None:
                self.mixers[name] = mixer
            self.losses[name] = ParallelQLoss(
                actor,
                mixer,
                group=mixed,
                lmbda=config.lmbda,
                bootstrap=cast(Literal["team", "agent"], config.bootstrap),
                gamma=config.gamma,
                functional=False,
            )
        if config.mixes_team:
            refuse_separate_groups(self.losses)
        self.start_optimizer()

    def networks(self, loss: ParallelQLoss) -> list[nn.Module]:
        """Returns the Q-network and, if there is one, the mixer."""
        found = (loss.qvalue_network, loss.mixer_network if loss.mixed else None)
        return [network for network in found if network is not None]

    def make_clip(self, name: str) -> GradientClip:
        """Returns one gradient clip for the Q-network and the mixer."""
        loss, limit = self.losses[name], self.config.max_grad_norm
        parameters = [p for network in self.networks(loss) for p in network.parameters()]
        return GradientClip.of_values(loss, parameters, limit, input_group=self.block.input_group)

    def set_progress(self, fraction: float) -> None:
        """Moves the schedules to a fraction, 0 to 1, of the run."""
        super().set_progress(fraction)
        for explore in self.explorers:
            explore.epsilon.fill_(self.config.exploration.at(fraction))

    def add_targets(self, data: TensorDictBase) -> None:
        """Writes the lambda-returns."""
        for loss in self.losses.values():
            loss.add_targets(data)

    def inspect_first_batch(self, batch: TensorDictBase) -> None:
        """Refuses turns with ``bootstrap="agent"``, and one mixer for agents that compete."""
        check_turn_based(self.groups.values(), batch, self.config)
        if self.config.mixes != "none":
            check_cooperative_agents(self.groups.values(), batch, "learner.mixer.kind=none")
        if self.config.mixes_team and len(self.groups) > 1:
            check_cooperative(self.groups.values(), batch)

    def _learn(self, batch: TensorDictBase) -> TensorDict:
        metrics = super()._learn(batch)
        epsilon = self.explorers[0].epsilon
        epsilon = epsilon.clone() if self.members is None else epsilon.repeat(self.n_members)
        for group in self.groups:
            metrics[group, "epsilon"] = epsilon
        return metrics
