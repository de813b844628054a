"""What is known of JaxMARL before it is imported."""

from __future__ import annotations

from typing import Any

from torchrl_marl.envs.libraries import Library

__all__ = ["LIBRARY"]


def _worlds() -> list[str]:
    return [
        "HeuristicEnemySMAX, MPE_simple_spread_v3, overcooked, hanabi and the others "
        "of jaxmarl.registered_envs"
    ]


def _owns(world: Any) -> bool:
    return callable(getattr(world, "step_env", None))


LIBRARY = Library(
    "JaxMARL's worlds, one jitted call a step",
    "torchrl_marl.envs.jaxmarl:JaxMarlEnv",
    settings=("num_envs", "max_steps", "continuous_actions", "info", "state", "group_map"),
    of_objects=("num_envs", "max_steps", "info", "state", "group_map"),
    worlds=_worlds,
    owns=_owns,
)
