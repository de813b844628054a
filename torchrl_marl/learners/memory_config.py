"""What settings of networks with memory must fit: windows, batches, minibatches."""

from __future__ import annotations

import math
from typing import Any

from torchrl_marl.errors import ConfigError
from torchrl_marl.modules.communication_config import delays
from torchrl_marl.modules.config import carries, has_memory
from torchrl_marl.settings import ReadWhere

__all__ = [
    "NeedsMemory",
    "check_batch",
    "check_run_windows",
    "check_window",
    "check_windows",
    "remembers",
    "without_memory",
]


def remembers(section: Any) -> bool:
    """Returns whether the actor or the critic of a learner carries something from step to step."""
    critic = getattr(section, "critic", None)
    return carries(section.actor) or critic is not None and carries(critic)


def without_memory(section: Any, at: str) -> str:
    """Returns the settings with which an actor that carries something would carry nothing."""
    found = {"memory=none": has_memory(section.actor)}
    found["communication.delay=0"] = delays(section.actor)
    return " and ".join(f"{at}actor.{setting}" for setting, carried in found.items() if carried)


class NeedsMemory(ReadWhere):
    """A setting that is read where the actor or the critic remembers.

    Args:
        critic (bool): critics may remember, too.
    """

    def __init__(self, *, critic: bool = True) -> None:
        super().__init__("actor.memory.kind", "none", but=True)
        self.critic = critic

    def holds(self, section: Any, value_of: Any = None) -> bool:
        """Whether one of the two remembers."""
        return remembers(section)

    def in_words(self, at: str) -> str:
        """Returns the condition as it stands in a sentence."""
        critic = f" or {at}critic.memory.kind" if self.critic else ""
        delay = f"{at}actor.communication.delay is above 0"
        return f"{at}actor.memory.kind{critic} is not none, or {delay}"


def check_windows(section: Any, at: str) -> None:
    """Refuses minibatches that are no whole windows, and windows without a step to learn from.

    Args:
        section: settings of a learner with memory.
        at (str): what stands before the names in messages.

    Raises:
        ConfigError: naming the setting and the fix.
    """
    check_window("minibatch_size", section.minibatch_size, section.window, at)
    if section.burn_in >= section.window:
        raise ConfigError(
            f"{at}burn_in is {section.burn_in}, expected less than {at}window, {section.window}, "
            f"so that there are steps to learn from; use {at}burn_in={section.window // 2}."
        )


def check_run_windows(section: Any, run: Any, at: str) -> None:
    """Refuses batches of a run that are no whole windows.

    Args:
        section: settings of a learner with memory that trains on whole batches.
        run (TrainConfig): the run's settings.
        at (str): what stands before the names in messages.
    """
    num_envs = run.env.num_envs
    check_batch(math.ceil(run.frames_per_batch / num_envs), num_envs, section.window, at)


def check_window(name: str, size: int, window: int, at: str) -> None:
    """Refuses numbers of steps that are no whole windows.

    Args:
        name (str): the setting.
        size (int): its steps.
        window (int): steps of a window.
        at (str): what stands before the names in messages.

    Raises:
        ConfigError: naming the next good number, and the largest window that fits, if any does.
    """
    if size % window:
        shorter = next((steps for steps in range(window, 1, -1) if size % steps == 0), None)
        raise ConfigError(
            f"{at}{name} is {size}, expected a multiple of {at}window, {window}; use "
            f"{at}{name}={math.ceil(size / window) * window}"
            f"{f', or {at}window={shorter}' if shorter else ''}."
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
