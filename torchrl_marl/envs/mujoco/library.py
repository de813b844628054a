"""Description of the MuJoCo robots, which can be read without importing MuJoCo."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from torchrl_marl.envs.libraries import Library
from torchrl_marl.envs.mujoco.robots import ROBOTS
from torchrl_marl.settings import OneOf, Range

__all__ = ["LIBRARY", "MujocoArguments"]


@dataclass(frozen=True)
class MujocoArguments:
    """Arguments that the environment itself takes; others are arguments of Gymnasium's robot."""

    agent_conf: str | None = None
    """Partition of the joints: agents x joints, such as ``4x2``. null: the robot's default."""
    agent_obsk: Annotated[int | None, Range(0)] = 1
    """Distance in joints up to which an agent observes other joints. Null: each agent observes the
    whole state."""
    engine: Annotated[
        str, OneOf({"c": "MuJoCo on CPU threads", "warp": "MuJoCo Warp, for GPUs"})
    ] = "c"
    """Physics engine."""


LIBRARY = Library(
    "MuJoCo robots with joints as agents",
    "torchrl_marl.envs.mujoco:MujocoEnv",
    settings=("num_envs", "max_steps"),
    of_objects=(),
    states=(),
    environments=lambda: sorted(ROBOTS),
    arguments="torchrl_marl.envs.mujoco.library:MujocoArguments",
    captured=True,
    packages=("gymnasium", "gymnasium_robotics", "mujoco"),
)
