"""Learners of a population that learn from stored steps, each member by itself.

Shapes: P members, G groups of all members, E envs of a member, T steps, N agents of a member.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar

import torch
from tensordict import TensorDict, TensorDictBase
from torch import Tensor

from torchrl_marl.errors import ConfigError, NonFiniteError
from torchrl_marl.learners.clipping import GradientClip
from torchrl_marl.learners.member_copies import (
    check_parents,
    copy_rows,
    copy_statistics,
    statistics_of,
)
from torchrl_marl.learners.member_settings import settings_of_members
from torchrl_marl.learners.member_updates import MemberAdam, MemberUpdates
from torchrl_marl.learners.off_policy import OffPolicyLearner
from torchrl_marl.learners.population_config import check_members
from torchrl_marl.learners.replay.member_replay import MemberReplay
from torchrl_marl.learners.replay_learner import ReplayLearner
from torchrl_marl.learners.replay_updates import History, Step
from torchrl_marl.learners.value_learner import ValueLearner
from torchrl_marl.population import fold, unfold
from torchrl_marl.specs import GroupSpec, TeamSpec

__all__ = ["OffPolicyPopulation", "ReplayPopulation", "ValuePopulation"]


class ReplayPopulation(ReplayLearner):
    """What populations of all families have in common that learn from stored steps.

    Members stand side by side as agents, and have as many rows in the store each; an update draws
    as many of each, the same that each would draw alone. A member whose gradients become NaN or
    infinite stays as it was before; the others go on, equal to the bit to what they were without
    it.

    Args:
        groups (mapping of name to GroupSpec): the groups of one member.
        config (ReplayLearnerConfig): how they learn, in numbers of one member.
        n_members (int): number P of members, 2 or more.
        settings (mapping, optional): name -> a setting of each member, ``[P]``, of
            :func:`~torchrl_marl.learners.population_config.varying_of`.
        share_replay (bool): all members learn from the steps of all.
        team, device, execution: of :class:`ReplayLearner`.

    Attributes:
        settings (dict): name -> ``[P]``, of learning rates and those that were given. What is
            written into them holds from the next batch on, and records no graph again.
        sick (Tensor): bool, ``[P]``, members that are frozen since a gradient was not finite.

    Shapes:
        - batch: ``[P * E, T]``, the envs of a member one after the other
        - metrics: ``[P]``

    Raises:
        ConfigError: settings with which members would not learn by themselves.
        NonFiniteError: no member is left.

    Reduces to: :class:`ReplayLearner`, for each member.
    """

    updating = MemberUpdates
    rate_of: ClassVar[Mapping[str, str]]
    """Name of an optimizer -> the setting that is its learning rate."""
    replay: MemberReplay | None  # type: ignore[assignment]
    settings: dict[str, Tensor]
    sick: Tensor

    def __init__(
        self,
        groups: Mapping[str, GroupSpec],
        config: Any,
        *,
        n_members: int,
        settings: Mapping[str, Tensor] | None = None,
        share_replay: bool = False,
        team: TeamSpec | None = None,
        device: torch.device | str | None = None,
        execution: str = "eager",
    ) -> None:
        check_members(config)
        # Plain tensors: state_dict() holds them in its extra state.
        own = settings_of_members(config, n_members, settings or {}, device)
        self.__dict__["settings"] = own
        self.__dict__["sick"] = torch.zeros(n_members, dtype=torch.bool, device=device)
        self.share_replay = share_replay
        super().__init__(
            groups, config, team=team, device=device, execution=execution, n_members=n_members
        )
        for loss in self.losses.values():
            loss.set_keys(discount=loss.group.key("discount"))

    # ------------------------------------------------------------------------------- its parts

    def make_steps(self, seen: GroupSpec | None) -> list[Step]:
        """Returns the family's steps, each with an Adam that moves members by themselves."""
        found = []
        for step in super().make_steps(seen):  # type: ignore[safe-super]
            owners = {p: own for clip in step.clips.values() for p, own in self._owners(clip)}
            for p in (p for x in step.optimizers.values() for p in x.parameters):
                if p not in owners:  # a number of each group, such as a temperature
                    members = torch.arange(self.n_members, device=p.device)
                    owners[p] = members.repeat_interleave(len(p) // self.n_members)
            moved = {
                name: MemberAdam(x.parameters, float(x.lr), x.eps, owners, self.sick)
                for name, x in step.optimizers.items()
            }
            found.append(replace(step, optimizers=moved))
        return found

    def _owners(self, clip: GradientClip) -> list[tuple[Tensor, Tensor]]:
        """Returns a limit's parameters, and the member that each row of one is of."""
        assert clip.row_groups is not None and int(clip.row_groups.max()) < clip.n_groups
        if "max_grad_norm" in self.settings:
            clip.limit = torch.full((clip.n_groups + 1,), torch.inf, device=self.sick.device)
        members = clip.row_groups // (clip.n_groups // self.n_members)
        return list(zip(clip.parameters, members.split(clip.sizes)))

    @property
    def owners(self) -> dict[Tensor, Tensor]:
        """Parameter, of networks and targets -> the member that each of its rows is of."""
        steps = self.updates.steps
        found = {
            p: rows.flatten()
            for step in steps
            for x in step.optimizers.values()
            for p, rows in zip(x.parameters, x.owners)  # type: ignore[attr-defined]
        }
        return found | {
            target: found[source]
            for source, target in zip(self.updates.sources, self.updates.targets)
        }

    def _more_for_updates(self) -> dict[str, Any]:
        return {"sick": self.sick}

    def _make_replay(self, num_envs: int) -> MemberReplay:
        n_steps, keys, options = self._store_settings(num_envs)
        return MemberReplay(
            n_steps, num_envs, keys, n_members=self.n_members, shared=self.share_replay, **options
        )

    def _rows_of(self, data: TensorDictBase, batch: TensorDictBase) -> TensorDictBase:
        """Returns the members' steps in envs of their own."""
        rows = TensorDict({}, batch.batch_size, device=data.device)
        rows.set(("next", "done"), batch.get(("next", "done")))
        for key, value in data.items(True, True):
            rows.set(key, unfold(value, self.n_members, batch.ndim))
        return rows

    def _arranged(self, rows: Tensor) -> Tensor:
        return fold(rows.transpose(0, 1), self.n_members, 2)

    def _restored(self, rows: Tensor) -> Tensor:
        return unfold(rows, self.n_members, 2).transpose(0, 1).contiguous()

    # ------------------------------------------------------------------------------- learning

    def learn(self, batch: TensorDictBase) -> TensorDict:
        """Stores a batch and makes its updates; metrics are tensors, ``(group, name)``, ``[P]``."""
        if batch.shape[0] % self.n_members:
            raise ConfigError(
                f"a batch of {batch.shape[0]} envs, expected as many for each of {self.n_members} "
                "members."
            )
        self._take_settings()
        before = {p: p.detach().clone() for p in self.owners}
        metrics = super().learn(batch)
        self._leave_out_the_sick(before)
        return metrics

    @torch.no_grad()
    def _take_settings(self) -> None:
        """Writes what differs by member to where updates read it."""
        for step in self.updates.steps:
            for name, optimizer in step.optimizers.items():
                assert isinstance(optimizer, MemberAdam)
                optimizer.prepare(self.settings[self.rate_of[name]])
            for clip in step.clips.values():
                if isinstance(clip.limit, Tensor):
                    own = self.settings["max_grad_norm"]
                    clip.limit[:-1].copy_(own.repeat_interleave(clip.n_groups // self.n_members))
        if "gamma" in self.settings:
            self.updates.gamma.copy_(self.settings["gamma"])  # type: ignore[attr-defined]

    @torch.no_grad()
    def _leave_out_the_sick(self, before: Mapping[Tensor, Tensor]) -> None:
        """Puts members back that are sick to what they were when they acted last.

        Sick are also those whose parameters have a norm that overflows.
        """
        owners = self.owners
        for p, rows in owners.items():
            broken = ~p.reshape(len(rows), -1).square().sum(1).isfinite()
            self.sick.index_put_((rows,), broken, accumulate=True)
        if not bool(self.sick.any()):
            return
        for p, rows in owners.items():
            sick = self.sick[rows].reshape(-1, *(1,) * (p.ndim - 1))
            p.copy_(torch.where(sick, before[p], p))
        for statistic in self.buffers():
            if statistic.is_floating_point():
                statistic.nan_to_num_(0.0, 0.0, 0.0)

    def _check(self, history: History) -> None:
        """Waits for the device."""
        if bool(self.sick.all()):
            raise NonFiniteError(
                "the gradients of every member of the population became NaN or infinite; lower "
                f"{self.rates} or learner.max_grad_norm, or look at the rewards' scale."
            )

    @torch.no_grad()
    def _explore(self) -> None:
        """Fills in how actions are explored from now on, by each member."""
        for explore in self.explorers if self._epsilons else ():
            if not explore.epsilon.ndim:
                explore.epsilon = explore.epsilon.repeat(explore.group.n_agents)
        super()._explore()
        if not self.started or not self._epsilons:
            return
        settings, known = self.config.exploration, self._epsilons
        first = known.get("epsilon", settings.epsilon)
        last = known.get("epsilon_end", settings.epsilon_end)
        epsilon = first + self._annealed * (last - first)
        for explore in self.explorers:
            own = epsilon.repeat_interleave(explore.group.n_agents // self.n_members)
            explore.epsilon.copy_(own)

    @property
    def _epsilons(self) -> dict[str, Tensor]:
        """How often members act at random, as far as that differs."""
        at = "exploration."
        found = self.settings.items()
        return {name.removeprefix(at): values for name, values in found if name.startswith(at)}

    def _summary(self, history: History, n_updates: int) -> TensorDict:
        nothing = torch.full((), torch.nan, device=self.sick.device)
        summary: dict[str, dict[str, Tensor]] = {name: {} for name in self.groups}
        joined = zip(self.losses.items(), self.block.joined.values(), self.explorers)
        for (name, loss), whole, explore in joined:
            for key in (*loss.out_keys, *(step.norm for step in self.updates.steps)):
                values = history.get((name, key))
                mean = nothing if values is None else values.mean(0).reshape(-1)
                for group, own in whole.by_source(mean):  # type: ignore[attr-defined]
                    summary[group.name][key] = own
            epsilon = explore.epsilon.expand(whole.n_agents).unflatten(0, (self.n_members, -1))
            numbers = {"updates": float(n_updates), "stored": float(len(self.replay or ()))}
            for group in whole.sources:  # type: ignore[attr-defined]
                summary[group.name]["epsilon"] = epsilon[:, 0].clone()
                for key, number in numbers.items():
                    summary[group.name][key] = nothing.new_full((self.n_members,), number)
                if self.config.noisy:
                    summary[group.name]["sigma"] = explore.sigma.repeat(self.n_members)
        return TensorDict(summary, [self.n_members], device=nothing.device)  # type: ignore[arg-type]

    # ------------------------------------------------------------------------------- members

    @torch.no_grad()
    def copy_members(self, parent: Tensor) -> None:
        """Makes members copies of others: networks, targets, moments and statistics.

        Their settings and their stored steps stay; who is a copy of a healthy member is healthy.

        Args:
            parent (Tensor): whose copy each member becomes, ``[P]``; its own number for itself.
        """
        check_parents(parent, self.n_members)
        moments = self.updates.moments
        for p, owner in self.owners.items():
            known = moments.get(p)
            own = (known["mean"], known["square"]) if known else ()
            copy_rows([p, *own], owner, parent)
        copy_statistics(self.statistics, parent)
        self.sick.copy_(self.sick[parent])

    @property
    def statistics(self) -> list[Tensor]:
        """What is saved beside parameters; of the members, one after the other."""
        return replay_statistics_of(self)

    # ------------------------------------------------------------------------------- state

    def get_extra_state(self) -> dict[str, Any]:
        """What ``state_dict()`` holds beside networks and statistics."""
        own = {"settings": dict(self.settings), "sick": self.sick}
        return {**super().get_extra_state(), **own}

    def set_extra_state(self, state: dict[str, Any]) -> None:
        """Takes the members' settings, and who is sick, back, too."""
        super().set_extra_state(state)
        for name, values in state["settings"].items():
            self.settings[name].copy_(values)
        self.sick.copy_(state["sick"])


def replay_statistics_of(learner: ReplayLearner) -> list[Tensor]:
    """Returns what a learner saves beside parameters and how it explores."""
    return statistics_of(learner, (x for own in learner.explorers for x in own.buffers()))


class ValuePopulation(ReplayPopulation, ValueLearner):
    """IQL, VDN or QMIX of P members, which are trained in one program, each as it would be alone.

    Args:
        groups, config, n_members, settings, share_replay, team, device, execution: of
            :class:`ReplayPopulation`.

    Examples:
        >>> from torchrl_marl import TeamSpec
        >>> from torchrl_marl.collectors import RolloutCollector
        >>> from torchrl_marl.envs.toy import TwoStepGame
        >>> from torchrl_marl.learners.value_config import ValueConfig
        >>> env = TwoStepGame(2 * 4, seed=0)
        >>> config = ValueConfig("qmix", learning_starts=0, minibatch_size=16)
        >>> learner = ValuePopulation(TeamSpec.from_env(env).groups, config, n_members=2)
        >>> batch = RolloutCollector(env, learner.actors["agents"], frames_per_batch=80).next()
        >>> metrics = learner.learn(batch)
        >>> metrics["agents", "updates"], len(learner.replay)
        (tensor([4., 4.]), 40)
    """

    rate_of = {"values": "lr"}


class OffPolicyPopulation(ReplayPopulation, OffPolicyLearner):
    """MADDPG, MATD3, MASAC or their independent forms of P members, trained in one program.

    Args:
        groups, config, n_members, settings, share_replay, team, device, execution: of
            :class:`ReplayPopulation`.

    Examples:
        >>> from torchrl_marl import TeamSpec
        >>> from torchrl_marl.collectors import RolloutCollector
        >>> from torchrl_marl.envs import VmasEnv
        >>> from torchrl_marl.learners import OffPolicyConfig
        >>> env = VmasEnv("balance", num_envs=2 * 4, max_steps=100, seed=0)
        >>> config = OffPolicyConfig(learning_starts=0, minibatch_size=16)
        >>> learner = OffPolicyPopulation(TeamSpec.from_env(env).groups, config, n_members=2)
        >>> batch = RolloutCollector(env, learner.actors["agents"], frames_per_batch=80).next()
        >>> learner.learn(batch)["agents", "updates"]
        tensor([4., 4.])
    """

    rate_of = {"actors": "actor_lr", "critics": "critic_lr", "alphas": "alpha_lr"}
