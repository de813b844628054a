"""Checks of settings of networks with memory, and of the windows that they are trained on."""

from __future__ import annotations

import math
from typing import Any

from torchrl_marl.errors import ConfigError
from torchrl_marl.modules.config import carries, delays, has_memory
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
    """Returns whether the actor or the critic of a learner carries state from step to step."""
    critic = getattr(section, "critic", None)
    return carries(section.actor) or critic is not None and carries(critic)


def without_memory(section: Any, at: str) -> str:
    """Returns a text with the settings for an actor that carries no state from step to step."""
    found = {"memory=none": has_memory(section.actor)}
    found["communication.delay=0"] = delays(section.actor)
    return " and ".join(f"{at}actor.{setting}" for setting, carried in found.items() if carried)


class NeedsMemory(ReadWhere):
    """Condition of a setting: it is read only if the actor or the critic has memory.

    Args:
        critic (bool): whether critics may have memory, too.
    """

    def __init__(self, *, critic: bool = True) -> None:
        super().__init__("actor.memory.kind", "none", but=True)
        self.critic = critic

    def holds(self, section: Any, value_of: Any = None) -> bool:
        """Returns whether the actor or the critic has memory."""
        return remembers(section)

    def in_words(self, at: str) -> str:
        """Returns the condition as part of a sentence."""
        critic = f" or {at}critic.memory.kind" if self.critic else ""
        delay = f"{at}actor.communication.delay is above 0"
        return f"{at}actor.memory.kind{critic} is not none, or {delay}"


def check_windows(section: Any, at: str) -> None:
    """Refuses minibatches of incomplete windows, and windows that consist of burn-in only.

    Args:
        section: settings of a learner with memory.
        at (str): prefix of the settings' names in messages.

    Raises:
        ConfigError: invalid settings; the message names the setting and the fix.
    """
    check_window("minibatch_size", section.minibatch_size, section.window, at)
    if section.burn_in >= section.window:
        raise ConfigError(
            f"{at}burn_in is {section.burn_in}, expected less than {at}window, {section.window}, "
            f"to leave steps to train on; use {at}burn_in={section.window // 2}."
        )


def check_run_windows(section: Any, run: Any, at: str) -> None:
    """Refuses a run with batches that do not hold whole windows.

    Args:
        section: settings of a learner with memory that trains on whole batches.
        run (TrainConfig): settings of the run.
        at (str): prefix of the settings' names in messages.

    Raises:
        ConfigError: incomplete windows; the message names the next valid number of frames.
    """
    num_envs = run.env.num_envs
    check_batch(math.ceil(run.frames_per_batch / num_envs), num_envs, section.window, at)


def check_window(name: str, size: int, window: int, at: str) -> None:
    """Refuses a number of steps that is not a multiple of the window.

    Args:
        name (str): name of the setting.
        size (int): number of steps that the setting has as its value.
        window (int): steps of a window.
        at (str): prefix of the setting's name in messages.

    Raises:
        ConfigError: the number is not a multiple of the window. The message names the next multiple
            and, if there is one, the largest window that divides the number.
    """
    if size % window:
        shorter = next((steps for steps in range(window, 1, -1) if size % steps == 0), None)
        raise ConfigError(
            f"{at}{name} is {size}, expected a multiple of {at}window, {window}; use "
            f"{at}{name}={math.ceil(size / window) * window}"
            f"{f', or {at}window={shorter}' if shorter else ''}."
        )


def check_batch(steps: int, num_envs: int, window: int, at: str) -> None:
    """Refuses batches in which an env does not play whole windows.

    Args:
        steps (int): number T of steps of a batch.
        num_envs (int): number E of envs.
        window (int): steps of a window.
        at (str): prefix of the setting's name in messages.

    Raises:
        ConfigError: incomplete windows; the message names the next valid number of frames.
    """
    if steps % window:
        good = math.ceil(steps / window) * window
        raise ConfigError(
            f"{at}window is {window}, which does not divide a batch: {steps} steps of {num_envs} "
            f"envs; use frames_per_batch={good * num_envs}."
        )
