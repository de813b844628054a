"""The learner of MAPPO and IPPO.

Shapes: E envs, T steps, N agents of a group, G groups that are trained as one, P members of a
population, S numbers of a hidden state.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal, cast

import torch
from tensordict import TensorDictBase
from torch import nn
from torchrl.objectives import ValueEstimators

from torchrl_marl.learners.clipping import GradientClip
from torchrl_marl.learners.config import OnPolicyConfig
from torchrl_marl.learners.epoch_learner import EpochLearner
from torchrl_marl.learners.team_checks import warn_of_turns
from torchrl_marl.learners.updates import KLStop
from torchrl_marl.modules.config import draws
from torchrl_marl.objectives.flags import learned_steps
from torchrl_marl.objectives.ppo import MAPPOLoss
from torchrl_marl.specs import GroupSpec

if TYPE_CHECKING:
    from torchrl_marl.learners.kl_rate import KLRate

__all__ = ["OnPolicyLearner"]


class OnPolicyLearner(EpochLearner):
    """MAPPO or IPPO for one or more groups with the same settings, with one optimizer.

    Groups with actions of the same type are trained as one: their agents are stacked and padded,
    and actor, critic and loss run once for all of them. Statistics, means and gradient clips are
    separate for each group, so each group learns as it would alone.

    ``state_dict()`` holds everything that resuming needs, including the optimizer's state.

    Args:
        groups (mapping of name to GroupSpec): the groups that it trains.
        config (OnPolicyConfig): settings of the learner.
        team (TeamSpec, optional): all groups of the environment, for a critic across groups.
        device (torch.device, optional): device of networks and optimizer.
        execution ("eager", "compile" or "cudagraph"): how updates run: eagerly, or as compiled
            graphs. One graph is a whole update, from the minibatch to Adam; ``cudagraph`` replays
            it on a GPU.
        members (Members, optional): members of a population, each of which learns independently
            from its envs of a batch.

    Attributes:
        actors (GroupActors): actors by group; groups that are trained as one also act as one.
        critics (ModuleDict): critics by the name of a group, or of several joined groups
            (``"a+b"``).
        critic_states (dict): the same names -> the hidden states, ``[E, N, S]``, that a critic with
            memory has after the last batch.

    Shapes:
        - batch: ``[E, T]``, or ``[P * E, T]`` for a population; heterogeneous groups are padded
        - metrics: scalars; ``[P]`` for a population

    Keys:
        - reads: the inputs of actors, critics and losses
        - writes: advantage, value_target and state_value of each group, into the batch

    Raises:
        NonFiniteError: a loss or gradient is NaN or infinite.

    Examples:
        >>> from torchrl_marl import TeamSpec
        >>> from torchrl_marl.collectors import RolloutCollector
        >>> from torchrl_marl.envs import VmasEnv
        >>> env = VmasEnv("balance", num_envs=4, max_steps=100, seed=0)
        >>> learner = OnPolicyLearner(TeamSpec.from_env(env).groups, OnPolicyConfig())
        >>> batch = RolloutCollector(env, learner.actors["agents"], frames_per_batch=40).next()
        >>> metrics = learner.learn(batch)
        >>> metrics["agents", "loss_critic"].shape
        torch.Size([])
    """

    over_ranks = True
    per_agent = False
    """True if means, gradient clips and the early stop are per agent instead of per group."""
    stopping = KLStop
    """Early stop of a batch's epochs."""
    written = ("advantage", "value_target", "state_value", "loss_mask")
    kl_rate: KLRate | None = None
    """Learning rates that follow the KL divergence, if ``lr_schedule`` is ``kl``."""

    def __init__(
        self,
        groups: Mapping[str, GroupSpec],
        config: OnPolicyConfig,
        *,
        device: torch.device | str | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(groups, config, device=device, **kwargs)
        self.critics = nn.ModuleDict()
        for name, group in self.block.joined.items():
            actor, critic = self.builder.actor(group), self.builder.critic(group)
            self.actors.add(group, actor)
            self.critics[name] = critic
            self.losses[name] = loss = _make_loss(
                actor, critic, group, config, device, self.per_agent
            )
            # Compiled updates round differently, too.
            on_cpu = next(critic.parameters()).device.type == "cpu"
            loss.value_estimator.fast_values = self.execution == "compile" and on_cpu
        self.start_optimizer()

    @property
    def acted(self) -> tuple[str, ...]:  # type: ignore[override]
        """Entries that the losses read and that policies write when they act."""
        drawn = ("channel",) if draws(self.config.actor.communication) else ()
        return ("action", "action_log_prob", *drawn)

    def networks(self, loss: MAPPOLoss) -> tuple[Any, Any]:
        """Returns the actor and the critic of a loss."""
        return loss.actor_network, loss.critic_network

    def make_clip(self, name: str) -> GradientClip:
        """Returns one gradient clip for actor and critic."""
        group, networks = self.block.joined[name], self.networks(self.losses[name])
        limit = self.config.max_grad_norm
        return GradientClip.of_networks(
            group, self.block.input_group, *networks, limit, self.per_agent
        )

    def make_stop(self, clips: Mapping[str, GradientClip], device: torch.device) -> KLStop:
        """Returns the early stop at the KL limit of the policy."""
        if self.config.lr_schedule == "kl" and self.kl_rate is None:
            self.kl_rate = _make_kl_rate(
                self.config, sum(c.n_groups for c in clips.values()), device
            )
        return self.stopping(clips, self.config.target_kl, device, rate=self.kl_rate)

    def set_progress(self, fraction: float) -> None:
        """Moves the schedules to a fraction, 0 to 1, of the run."""
        config = self.config
        if config.entropy_schedule == "linear":
            for loss in self.losses.values():
                loss.entropy_coeff.fill_(config.entropy_coeff * (1.0 - fraction))
        super().set_progress(fraction)

    def add_targets(self, data: TensorDictBase) -> None:
        """Writes advantages and the critics' targets."""
        self.add_advantage(data)

    @torch.no_grad()
    def add_advantage(self, data: TensorDictBase) -> None:
        """Estimates advantages, and standardizes those of each group over the whole batch."""
        excluded = {"none": None, "pooled": (), "agent": (-2,)}[self.config.normalize_advantage]
        for name, loss in self.losses.items():
            self._estimate(name, loss, data)
            if excluded is None:
                continue
            key, mask = loss.tensor_keys.advantage, learned_steps(data, self.block.joined[name])
            data.set(key, loss.per_group.standardize(data.get(key), mask, excluded))

    def _estimate(self, name: str, loss: MAPPOLoss, data: TensorDictBase) -> None:
        """Writes advantages; a critic with memory continues from the end of the last batch."""
        if not loss.value_estimator.remembers:
            loss.value_estimator(data)
            return
        group = self.block.joined[name]
        key, before = group.key("critic_hidden"), self.critic_states.get(name)
        init = data.get(group.key("is_init"))
        if before is not None and before.shape[:2] == (init.shape[0], init.shape[2]):
            data.set(key, before.to(init.device).unsqueeze(1).expand(*init.shape[:-1], -1))
        loss.value_estimator(data)
        self.critic_states[name] = data.get(("next", *key))[:, -1].clone()

    def cut(self) -> None:
        """Forgets running episodes, and with them the critics' hidden states."""
        super().cut()
        self.critic_states = {}

    def get_extra_state(self) -> dict[str, Any]:
        """The part of ``state_dict()`` in addition to networks and statistics."""
        states = {"critic_states": dict(self.critic_states)} if self.critic_states else {}
        rates = {} if self.kl_rate is None else {"kl_rates": self.kl_rate.values}
        return {**super().get_extra_state(), **states, **rates}

    def set_extra_state(self, state: dict[str, Any]) -> None:
        """Restores the optimizer's state, the critics' hidden states and the learning rates."""
        super().set_extra_state(state)
        if self.kl_rate is not None and "kl_rates" in state:
            self.kl_rate.values.copy_(state["kl_rates"])
        self.critic_states = dict(state.get("critic_states", {}))

    def inspect_first_batch(self, batch: TensorDictBase) -> None:
        """Warns if agents act in turns but get no credit for rewards between their turns."""
        warn_of_turns(self.groups.values(), batch, self.config.bootstrap)


def _make_kl_rate(config: OnPolicyConfig, n_groups: int, device: torch.device) -> KLRate:
    from torchrl_marl.learners.kl_rate import KLRate

    bounds = config.lr_min, config.lr_max
    return KLRate(n_groups, config.lr, config.lr_kl, bounds, device)


def _make_loss(
    actor: Any,
    critic: Any,
    group: GroupSpec,
    config: OnPolicyConfig,
    device: torch.device | str | None,
    per_agent: bool,
) -> MAPPOLoss:
    loss = MAPPOLoss(
        actor,
        critic,
        group=group,
        bootstrap=cast(Literal["team", "agent"], config.bootstrap),
        clip_epsilon=config.clip_epsilon,
        clip_value=config.clip_value,
        critic_coeff=config.critic_coeff,
        loss_critic_type=config.loss_critic_type,
        huber_delta=config.huber_delta,
        entropy_bonus=config.entropy_coeff > 0,
        entropy_coeff=config.entropy_coeff,
        normalize_advantage=False,  # done over the whole batch
        per_agent=per_agent,
        functional=False,
        device=device,
    )
    kind, settings = None, {"centering": config.value_centering}
    if config.estimator == "vtrace":
        kind = ValueEstimators.VTrace
        settings |= {name: getattr(config, name) for name in ("rho_clip", "c_clip", "ratio")}
    loss.make_value_estimator(kind, gamma=config.gamma, lmbda=config.lmbda, **settings)
    return loss
