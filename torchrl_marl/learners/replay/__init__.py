"""Stores of experience, and how rows are drawn from them."""

from typing import TYPE_CHECKING

from torchrl_marl._lazy import attach

if TYPE_CHECKING:
    from torchrl_marl.learners.replay.priorities import Priority
    from torchrl_marl.learners.replay.team_replay import TeamReplay
    from torchrl_marl.learners.replay.tree_sampler import TreeSampler

__getattr__, __dir__, __all__ = attach(
    __name__,
    {"priorities": ["Priority"], "team_replay": ["TeamReplay"], "tree_sampler": ["TreeSampler"]},
)
