"""What settings of networks with memory must fit: windows, batches, minibatches."""

from __future__ import annotations

import math
from typing import Any

from torchrl_marl.errors import ConfigError
from torchrl_marl.modules.config import has_memory
from torchrl_marl.settings import ReadWhere

__all__ = ["NeedsMemory", "check_batch", "check_window"]


class NeedsMemory(ReadWhere):
    """A setting that is read where the actor or the critic remembers."""

    def __init__(self) -> None:
        super().__init__("actor.memory.kind", "none", but=True)

    def holds(self, section: Any, value_of: Any = None) -> bool:
        """Whether one of the two remembers."""
        return has_memory(section.actor) or has_memory(section.critic)

    def in_words(self, at: str) -> str:
        """Returns the condition as it stands in a sentence."""
        return f"{at}actor.memory.kind or {at}critic.memory.kind is not none"


def check_window(name: str, size: int, window: int, at: str) -> None:
    """Refuses numbers of steps that are no whole windows.

    Args:
        name (str): the setting.
        size (int): its steps.
        window (int): steps of a window.
        at (str): what stands before the names in messages.

    Raises:
        ConfigError: naming the next good number.
    """
    if size % window:
        raise ConfigError(
            f"{at}{name} is {size}, expected a multiple of {at}window, {window}; use "
            f"{at}{name}={math.ceil(size / window) * window}."
        )


def check_batch(steps: int, num_envs: int, window: int, at: str) -> None:
    """Refuses batches whose steps of an env are no whole windows.

    Args:
        steps (int): number T of steps of a batch.
        num_envs (int): number E of envs.
        window (int): steps of a window.
        at (str): what stands before the names in messages.

    Raises:
        ConfigError: naming the next good number of frames.
    """
    if steps % window:
        good = math.ceil(steps / window) * window
        raise ConfigError(
            f"{at}window is {window}, which does not divide a batch: {steps} steps of {num_envs} "
            f"envs; use frames_per_batch={good * num_envs}."
        )
