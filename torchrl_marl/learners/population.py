"""The learner of a population: members that learn side by side, each by itself.

Shapes: P members, G groups of all members, E envs of a member, T steps, N agents of a member.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from tensordict import TensorDict, TensorDictBase
from torch import Tensor

from torchrl_marl.errors import ConfigError, NonFiniteError
from torchrl_marl.learners.clipping import GradientClip
from torchrl_marl.learners.config import OnPolicyConfig
from torchrl_marl.learners.member_copies import (
    check_parents,
    copy_rows,
    copy_statistics,
    statistics_of,
)
from torchrl_marl.learners.member_settings import settings_of_members
from torchrl_marl.learners.member_stop import MemberStop
from torchrl_marl.learners.on_policy import OnPolicyLearner
from torchrl_marl.learners.population_config import check_members
from torchrl_marl.objectives.ppo import MAPPOLoss
from torchrl_marl.specs import GroupSpec, TeamSpec

__all__ = ["PopulationLearner"]


class PopulationLearner(OnPolicyLearner):
    """MAPPO or IPPO of P members, which are trained in one program, each as it would be alone.

    A member whose gradients become NaN or infinite stays as it was before; the others go on, equal
    to the bit to what they were without it.

    Args:
        groups (mapping of name to GroupSpec): the groups of one member.
        config (OnPolicyConfig): how they learn.
        n_members (int): number P of members, 2 or more.
        settings (mapping, optional): name -> a setting of each member, ``[P]``, instead of that of
            ``config``; of :func:`~torchrl_marl.learners.population_config.varying_of`.
        **kwargs: of :class:`OnPolicyLearner`.

    Attributes:
        settings (dict): name -> ``[P]``, of ``lr`` and those that were given. What is written into
            them holds from the next batch on, and records no graph again.
        sick (Tensor): bool, ``[P]``, members that are frozen since a gradient was not finite.

    Shapes:
        - batch: ``[P * E, T]``, the envs of a member one after the other
        - metrics: ``[P]``

    Raises:
        ConfigError: settings with which members would not learn by themselves.
        NonFiniteError: no member is left.

    Reference: Flajolet et al., 2022, https://arxiv.org/abs/2206.08888 (vectorized populations).

    Reduces to: :class:`OnPolicyLearner`, for each member.

    Examples:
        >>> from torchrl_marl.collectors import RolloutCollector, TeamPolicy
        >>> from torchrl_marl.envs import VmasEnv
        >>> env = VmasEnv("balance", num_envs=8, max_steps=100, seed=0)
        >>> groups = TeamSpec.from_env(env).groups
        >>> lr = torch.tensor([1e-3, 1e-4])
        >>> config = OnPolicyConfig(minibatch_size=40)
        >>> learner = PopulationLearner(groups, config, n_members=2, settings={"lr": lr})
        >>> policy = TeamPolicy(learner.actors.values())
        >>> batch = RolloutCollector(env, policy, frames_per_batch=80).next()
        >>> learner.learn(batch)["agents", "loss_critic"].shape
        torch.Size([2])
    """

    over_ranks = False
    settings: dict[str, Tensor]
    sick: Tensor

    def __init__(
        self,
        groups: Mapping[str, GroupSpec],
        config: OnPolicyConfig,
        *,
        n_members: int,
        settings: Mapping[str, Tensor] | None = None,
        team: TeamSpec | None = None,
        device: torch.device | str | None = None,
        execution: str = "eager",
    ) -> None:
        check_members(config)
        # Plain tensors: state_dict() holds them in its extra state.
        own = settings_of_members(config, n_members, settings or {}, device)
        self.__dict__["settings"] = own
        self.__dict__["sick"] = torch.zeros(n_members, dtype=torch.bool, device=device)
        super().__init__(
            groups, config, team=team, device=device, execution=execution, n_members=n_members
        )
        self._progress = 0.0

    def make_clip(self, name: str) -> GradientClip:
        """Returns the limits of each member's actor and critic together."""
        clip = super().make_clip(name)
        assert clip.row_groups is not None and int(clip.row_groups.max()) < clip.n_groups
        if "max_grad_norm" in self.settings:
            clip.limit = torch.zeros(clip.n_groups + 1, device=self.sick.device)
        return clip

    def make_stop(self, clips: Mapping[str, GradientClip], device: torch.device) -> MemberStop:
        """Returns what moves each member by its own learning rate, and leaves out the sick."""
        return MemberStop(clips, self.config.target_kl, device, self.n_members)

    def set_progress(self, fraction: float) -> None:
        """Moves the schedules to a fraction, 0 to 1, of the run."""
        self._progress = fraction
        super().set_progress(fraction)

    def learn(self, batch: TensorDictBase) -> TensorDict:
        """Trains on a batch; metrics are tensors, ``(group, name)``, ``[P]``."""
        if batch.shape[0] % self.n_members:
            raise ConfigError(
                f"a batch of {batch.shape[0]} envs, expected as many for each of {self.n_members} "
                "members."
            )
        self._take_settings()
        before = {p: p.detach().clone() for p in self.parameters()}
        metrics = super().learn(batch)
        self._leave_out_the_sick(before)
        return metrics

    @torch.no_grad()
    def _leave_out_the_sick(self, before: Mapping[Any, Tensor]) -> None:
        """Puts members back that are sick to what they were when they acted last.

        Sick are also those whose parameters have a norm that overflows. Their statistics are made
        finite, too: they are saved.
        """
        for clip in self.updates.clips.values():
            finite = torch.cat(
                [
                    p.reshape(rows, -1).square().sum(1).isfinite()
                    for p, rows in zip(clip.parameters, clip.sizes)
                ]
            )
            self.sick |= self._members(~finite, clip)
        if not bool(self.sick.any()):
            return
        for clip in self.updates.clips.values():
            flags = self.sick.repeat_interleave(clip.n_groups // self.n_members)
            for p, rows in zip(clip.parameters, clip.spread(torch.cat([flags, flags[:1]]))):
                p.copy_(torch.where(rows, before[p], p))
        for statistic in (*self.buffers(), *self.critic_states.values()):
            if statistic.is_floating_point():
                statistic.nan_to_num_(0.0, 0.0, 0.0)

    def _members(self, rows: Tensor, clip: GradientClip) -> Tensor:
        """Returns the members of which a row of a parameter is flagged, bool, ``[P]``."""
        groups = rows.new_zeros(clip.n_groups, dtype=torch.float32)
        assert clip.row_groups is not None
        groups.index_add_(0, clip.row_groups, rows.float())
        return (groups > 0).unflatten(0, (self.n_members, -1)).any(-1)

    @torch.no_grad()
    def _take_settings(self) -> None:
        """Writes what differs by member to where updates and targets read it."""
        config, left, stop = self.config, 1.0 - self._progress, self.updates.stop
        assert isinstance(stop, MemberStop)
        lr = self.settings["lr"] * (left if config.lr_schedule == "linear" else 1.0)
        stop.prepare(lr, self.sick)
        for group in self.optimizer.param_groups:
            group["lr"] = float(stop.largest_lr)
        for name, loss in self.losses.items():
            self._take_settings_of(loss, self.block.joined[name])
            limits = self.updates.clips[name].limit
            if isinstance(limits, Tensor):
                own = self._by_group(self.settings["max_grad_norm"], self.block.joined[name])
                limits[:-1].copy_(own)

    def _take_settings_of(self, loss: MAPPOLoss, group: GroupSpec) -> None:
        loss.entropy_bonus |= "entropy_coeff" in self.settings
        falling = 1.0 - self._progress if self.config.entropy_schedule == "linear" else 1.0
        by_agent = {
            name: self._by_agent(values, group).unsqueeze(-1)
            for name, values in self.settings.items()
        }
        for name in ("entropy_coeff", "critic_coeff", "clip_epsilon"):
            if name in by_agent:
                factor = falling if name == "entropy_coeff" else 1.0
                _fill(loss, name, by_agent[name] * factor)
        if "clip_epsilon" in by_agent and self.config.clip_value:
            _fill(loss, "clip_value", by_agent["clip_epsilon"])
        gamma, lmbda = self.config.gamma, self.config.lmbda
        loss.value_estimator.set_discount(
            by_agent.get("gamma", gamma), by_agent.get("lmbda", lmbda)
        )

    def _by_group(self, values: Tensor, group: GroupSpec) -> Tensor:
        """``[P]`` to ``[G]``."""
        return values.repeat_interleave(len(group.groups) // self.n_members)

    def _by_agent(self, values: Tensor, group: GroupSpec) -> Tensor:
        """``[P]`` to ``[P * N]``."""
        return values.repeat_interleave(group.n_agents // self.n_members)

    def _summary(self, history: Any, finite: bool, epochs: Any) -> TensorDict:
        stop = self.updates.stop
        assert isinstance(stop, MemberStop)
        self.sick |= stop.sick_members
        if bool(self.sick.all()):
            raise NonFiniteError(
                "the gradients of every member of the population became NaN or infinite; lower "
                "learner.lr or learner.max_grad_norm, or look at the rewards' scale."
            )
        summary = super()._summary(history, True, epochs)
        for name in self.groups:
            summary[name, "lr"] = stop.lr_of_members.clone()
        return summary

    @torch.no_grad()
    def copy_members(self, parent: Tensor) -> None:
        """Makes members copies of others: networks, the optimizer's moments and statistics.

        Their settings stay; who is a copy of a healthy member is healthy.

        Args:
            parent (Tensor): whose copy each member becomes, ``[P]``; its own number for itself.
        """
        check_parents(parent, self.n_members)
        for clip in self.updates.clips.values():
            assert clip.row_groups is not None
            groups = clip.n_groups // self.n_members
            for p, owner in zip(clip.parameters, clip.row_groups.split(clip.sizes)):
                state = self.optimizer.state.get(p, {})
                moments = (state[name] for name in ("exp_avg", "exp_avg_sq") if name in state)
                copy_rows([p, *moments], owner // groups, parent)
        copy_statistics(statistics_of(self), parent)
        for x in self.critic_states.values():
            x.copy_(x.unflatten(1, (self.n_members, -1))[:, parent].flatten(1, 2))
        self.sick.copy_(self.sick[parent])

    def get_extra_state(self) -> dict[str, Any]:
        """What ``state_dict()`` holds beside networks and statistics."""
        own = {"settings": dict(self.settings), "sick": self.sick}
        return {**super().get_extra_state(), **own}

    def set_extra_state(self, state: dict[str, Any]) -> None:
        """Takes the optimizer's state, the members' settings and who is sick back."""
        super().set_extra_state(state)
        for name, values in state["settings"].items():
            self.settings[name].copy_(values)
        self.sick.copy_(state["sick"])


def _fill(loss: MAPPOLoss, name: str, values: Tensor) -> None:
    """Writes a coefficient of each agent in place: graphs hold the tensor."""
    own = getattr(loss, name)
    if own.shape == values.shape:
        own.copy_(values)
    else:
        setattr(loss, name, values.to(own).clone())
