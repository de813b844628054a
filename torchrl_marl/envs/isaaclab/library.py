"""Description of Isaac Lab, which can be read without importing Isaac Lab."""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import Any

from torchrl_marl.envs.libraries import Library

__all__ = ["LIBRARY", "IsaacLabArguments"]


def _owns(env: Any) -> bool:
    kind = env if inspect.isclass(env) else type(env)
    return any(cls.__module__.partition(".")[0] == "isaaclab" for cls in kind.__mro__)


@dataclass(frozen=True)
class IsaacLabArguments:
    """Arguments that the adapter itself takes; other arguments are settings of the task."""

    terminal_observations: bool = True
    """Read the last observation of an episode before the reset."""


LIBRARY = Library(
    "Isaac Lab multi-agent tasks",
    "torchrl_marl.envs.isaaclab:IsaacLabEnv",
    of_objects=("state", "group_map"),  # a simulation fixes its number of envs and its time limit
    arguments="torchrl_marl.envs.isaaclab.library:IsaacLabArguments",
    environments=lambda: [
        "your Isaac Lab's multi-agent tasks: Isaac-Pendulum-MARL-Direct (3.0), "
        "Isaac-Cart-Double-Pendulum-Direct-v0 (2.3)"
    ],
    unlisted=True,
    one_per_process=True,
    owns=_owns,
    packages=("gymnasium", "isaaclab", "isaaclab_tasks"),
)
