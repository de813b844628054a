"""Replay buffers, and uniform or prioritized sampling from them."""

from typing import TYPE_CHECKING

from torchrl_marl._lazy import attach

if TYPE_CHECKING:
    from torchrl_marl.learners.replay.priorities import Priority
    from torchrl_marl.learners.replay.team_replay import TeamReplay

__getattr__, __dir__, __all__ = attach(__name__, moved={"TreeSampler": "torchrl_marl.contrib"})
