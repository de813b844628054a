"""Which rows of any population's tensors are a member's."""

from __future__ import annotations

from typing import Any

from torchrl_marl.learners.member_rows import MemberRows
from torchrl_marl.learners.replay_member_rows import ReplayMemberRows
from torchrl_marl.learners.replay_population import ReplayPopulation

__all__ = ["rows_of"]


def rows_of(many: Any, one: Any) -> MemberRows | ReplayMemberRows:
    """Returns what copies a member's numbers between a population's learner and an ordinary one.

    Args:
        many (PopulationLearner or ReplayPopulation): of P members.
        one (OnPolicyLearner or ReplayLearner): of the same groups and settings.
    """
    pairs = ReplayMemberRows if isinstance(many, ReplayPopulation) else MemberRows
    return pairs(many, one)
