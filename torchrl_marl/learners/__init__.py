"""Learners: networks, losses and optimizer of groups that have the same settings."""

from typing import TYPE_CHECKING

from torchrl_marl._lazy import attach

if TYPE_CHECKING:
    from torchrl_marl.learners.build import build_learners
    from torchrl_marl.learners.config import OnPolicyConfig
    from torchrl_marl.learners.fixed_policy import FixedPolicy, RandomPlayers
    from torchrl_marl.learners.learner import Learner
    from torchrl_marl.learners.off_policy import OffPolicyLearner
    from torchrl_marl.learners.off_policy_config import (
        OffPolicyConfig,
        ParallelQConfig,
        ValueConfig,
    )
    from torchrl_marl.learners.on_policy import OnPolicyLearner
    from torchrl_marl.learners.parallel_q import ParallelQLearner
    from torchrl_marl.learners.replay.priorities import Priority
    from torchrl_marl.learners.replay.team_replay import TeamReplay
    from torchrl_marl.learners.value_learner import ValueLearner

__getattr__, __dir__, __all__ = attach(__name__, moved={"TreeSampler": "torchrl_marl.contrib"})
