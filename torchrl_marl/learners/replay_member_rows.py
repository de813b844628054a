"""Which rows of a population with stored steps are a member's, and an ordinary learner with them.

Shapes: P members.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from torchrl_marl.learners.member_rows import Pair
from torchrl_marl.learners.replay_learner import ReplayLearner
from torchrl_marl.learners.replay_population import ReplayPopulation, replay_statistics_of

__all__ = ["ReplayMemberRows"]


class ReplayMemberRows:
    """Copies a member's numbers between a population's learner and an ordinary one.

    Networks and targets, the optimizers' moments, statistics, and (to read) what is stored.

    Args:
        many (ReplayPopulation): of P members.
        one (ReplayLearner): of the same groups and settings.

    Examples:
        >>> from torchrl_marl import TeamSpec
        >>> from torchrl_marl.envs.toy import TwoStepGame
        >>> from torchrl_marl.learners.replay_population import ValuePopulation
        >>> from torchrl_marl.learners.value_config import ValueConfig
        >>> from torchrl_marl.learners.value_learner import ValueLearner
        >>> groups = TeamSpec.from_env(TwoStepGame(2, seed=0)).groups
        >>> many = ValuePopulation(groups, ValueConfig(), n_members=3)
        >>> one = ValueLearner(groups, ValueConfig())
        >>> ReplayMemberRows(many, one).write(1)
        >>> torch.equal(next(one.actors.parameters()), next(many.actors.parameters())[1])
        True
    """

    def __init__(self, many: ReplayPopulation, one: ReplayLearner) -> None:
        self.many, self.one = many, one

    @torch.no_grad()
    def read(self, member: int) -> ReplayLearner:
        """Returns the ordinary learner, with the numbers and the stored steps of a member."""
        many, one = self.many, self.one
        for pair in self._pairs(member):
            pair.take()
        for name, optimizer in one.updates.optimizers.items():
            torch._foreach_copy_(optimizer.steps, many.updates.optimizers[name].steps)
            optimizer.lr.fill_(float(many.settings[many.rate_of[name]][member]))
        for own, every in zip(one.explorers, many.explorers):
            epsilon = every.epsilon.expand(every.group.n_agents)
            own.epsilon.copy_(epsilon.unflatten(0, (many.n_members, -1))[member, 0])
            own.sigma.copy_(every.sigma)
        one.frames, one.owed, one.progress = many.frames, many.owed, many.progress
        one.updates.count = many.updates.count
        if many.replay is not None:
            if one.replay is None:
                one.replay = one._make_replay(many.replay.num_envs)
            keys = one._store_settings(many.replay.num_envs)[1]
            one.replay.load_state_dict(many.replay.state_of(member, keys))
        return one

    @torch.no_grad()
    def write(self, member: int) -> None:
        """Gives a member the numbers of the ordinary learner."""
        for pair in self._pairs(member):
            pair.give()

    def _pairs(self, member: int) -> Iterator[Pair]:
        many, one = self.many, self.one
        owners, every, own = many.owners, many.updates.moments, one.updates.moments
        for p, q in zip(self._parameters(many), self._parameters(one), strict=True):
            rows = (owners[p] == member).nonzero().squeeze(-1)
            yield Pair(p.data, rows, q.data)
            if p in every:
                yield Pair(every[p]["mean"], rows, own[q]["mean"])
                yield Pair(every[p]["square"], rows, own[q]["square"])
        for x, y in zip(replay_statistics_of(many), replay_statistics_of(one), strict=True):
            n = x.shape[0] // many.n_members
            yield Pair(x, torch.arange(member * n, (member + 1) * n, device=x.device), y)

    @staticmethod
    def _parameters(learner: ReplayLearner) -> list[Tensor]:
        return [*learner.updates.moments, *learner.updates.targets]
