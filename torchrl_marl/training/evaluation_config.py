"""Settings of evaluations: when, on how many episodes, by which actions, and what is drawn."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from torchrl_marl.settings import Count, Range

__all__ = ["EvaluationConfig"]


@dataclass(frozen=True)
class EvaluationConfig:
    """How often and on how many whole episodes the policy is measured."""

    every_frames: Count | None = None
    """Frames between two evaluations in training; null: only before and after."""
    episodes: Annotated[int, Range(0)] = 200
    """Number of whole episodes, played side by side; 0: nothing is measured."""
    deterministic: bool = True
    """The likeliest action, or a drawn one."""
    both: bool = True
    """At the end measure by the other kind of actions, too, and say where they differ."""
    gif: bool = False
    """Write an animation of the first episodes at the end: ``episode.gif``."""
    animate_every: Count | None = None
    """Frames of training between two such animations, in ``animations/``; null: none."""
    episodes_shown: Annotated[int, Range(1, 16)] = 1
    """Episodes that an animation shows side by side."""
