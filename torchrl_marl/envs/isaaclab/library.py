"""What is known of Isaac Lab before it is imported."""

from __future__ import annotations

import inspect
from typing import Any

from torchrl_marl.envs.libraries import Library

__all__ = ["LIBRARY"]


def _worlds() -> list[str]:
    return ["your Isaac Lab's multi-agent tasks: Isaac-Cart-Double-Pendulum-Direct-v0"]


def _owns(world: Any) -> bool:
    kind = world if inspect.isclass(world) else type(world)
    return any(cls.__module__.partition(".")[0] == "isaaclab" for cls in kind.__mro__)


LIBRARY = Library(
    "Isaac Lab's multi-agent tasks",
    "torchrl_marl.envs.isaaclab:IsaacLabEnv",
    of_objects=("state", "group_map"),  # a simulation has its envs and its limit
    worlds=_worlds,
    owns=_owns,
)
