"""Which rows of a population's tensors are a member's, and an ordinary learner with its numbers.

Shapes: P members, R rows of a parameter.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from torchrl_marl.learners.adam import start_adam
from torchrl_marl.learners.member_copies import statistics_of
from torchrl_marl.learners.on_policy import OnPolicyLearner
from torchrl_marl.learners.population import PopulationLearner

__all__ = ["MemberRows", "Pair"]


@dataclass(frozen=True)
class Pair:
    """A tensor of a population, a member's rows in it, and the same of an ordinary learner."""

    all: Tensor
    rows: Tensor
    own: Tensor

    def take(self) -> None:
        self.own.copy_(self.all[self.rows].reshape(self.own.shape))

    def give(self) -> None:
        self.all[self.rows] = self.own.reshape(len(self.rows), *self.all.shape[1:])


class MemberRows:
    """Copies a member's numbers between a population's learner and an ordinary one.

    Networks, the optimizer's moments, and the statistics of observations and returns.

    Args:
        many (PopulationLearner): of P members.
        one (OnPolicyLearner): of the same groups and settings.

    Examples:
        >>> from torchrl_marl import TeamSpec
        >>> from torchrl_marl.envs import VmasEnv
        >>> from torchrl_marl.learners.config import OnPolicyConfig
        >>> groups = TeamSpec.from_env(VmasEnv("balance", num_envs=2, seed=0)).groups
        >>> many = PopulationLearner(groups, OnPolicyConfig(), n_members=3)
        >>> one = OnPolicyLearner(groups, OnPolicyConfig())
        >>> MemberRows(many, one).write(1)
        >>> first, again = next(one.parameters()), next(many.parameters())[1]
        >>> torch.equal(first, again)
        True
    """

    def __init__(self, many: PopulationLearner, one: OnPolicyLearner) -> None:
        self.many, self.one = many, one

    @torch.no_grad()
    def read(self, member: int) -> OnPolicyLearner:
        """Returns the ordinary learner, with the numbers of a member."""
        self._match_optimizer()
        for pair in self._pairs(member):
            pair.take()
        for own, every in zip(self._steps(self.one), self._steps(self.many)):
            own.copy_(every)
        for group in self.one.optimizer.param_groups:
            group["lr"] = float(self.many.settings["lr"][member])
        return self.one

    @torch.no_grad()
    def write(self, member: int) -> None:
        """Gives a member the numbers of the ordinary learner; moments of 0 where it has none."""
        self._match_optimizer()
        for pair in self._pairs(member):
            pair.give()

    def _pairs(self, member: int) -> Iterator[Pair]:
        many, one = self.many, self.one
        for name, clip in many.updates.clips.items():
            groups = clip.n_groups // many.n_members
            assert clip.row_groups is not None
            for p, q, owner in zip(
                clip.parameters,
                one.updates.clips[name].parameters,
                clip.row_groups.split(clip.sizes),
            ):
                rows = (owner // groups == member).nonzero().squeeze(-1)
                yield Pair(p.data, rows, q.data)
                for moment in ("exp_avg", "exp_avg_sq"):
                    state, own = many.optimizer.state.get(p), one.optimizer.state.get(q)
                    if state and own:
                        yield Pair(state[moment], rows, own[moment])
        yield from self._buffers(member)

    def _buffers(self, member: int) -> Iterator[Pair]:
        """Statistics: those of the members lie one after the other."""
        for x, y in zip(statistics_of(self.many), statistics_of(self.one), strict=True):
            rows = x.shape[0] // self.many.n_members
            index = torch.arange(member * rows, (member + 1) * rows, device=x.device)
            yield Pair(x, index, y)

    def _match_optimizer(self) -> None:
        """Makes the moments of the ordinary learner's parameters, where the members have them."""
        for name, clip in self.many.updates.clips.items():
            parameters = zip(clip.parameters, self.one.updates.clips[name].parameters)
            start_adam(
                self.one.optimizer, [q for p, q in parameters if self.many.optimizer.state.get(p)]
            )

    @staticmethod
    def _steps(learner: OnPolicyLearner) -> list[Tensor]:
        state = learner.optimizer.state
        found = learner.optimizer.param_groups[0]["params"]
        return [state[p]["step"] for p in found if state.get(p)]
