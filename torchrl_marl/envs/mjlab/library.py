"""Description of mjlab's teams, which can be read without importing mjlab."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from torchrl_marl.envs.libraries import Library
from torchrl_marl.envs.mjlab.robots import CONES, FORMATIONS, TASKS
from torchrl_marl.settings import OneOf, Positive, Range

__all__ = ["LIBRARY", "MjlabArguments"]


@dataclass(frozen=True)
class MjlabArguments:
    """Arguments of the environment."""

    n_agents: Annotated[int, Range(1)] = 4
    """Number of robots in a scene."""
    robot: Annotated[str, OneOf({"go1": "quadruped", "g1": "humanoid"})] = "go1"
    """Robot of each agent."""
    formation: Annotated[str, OneOf(FORMATIONS)] = "circle"
    """Shape of the formation."""
    spacing: Positive = 1.2
    """Distance of neighbors in the formation, in meters."""
    speed: Annotated[float, Range(0.0)] = 1.0
    """Largest forward velocity of the formation, in m/s."""
    turn_rate: Annotated[float, Range(0.0)] = 0.5
    """Largest turn rate of the formation, in rad/s."""
    action_scale: Positive = 2.0
    """Scale of the actions, as a multiple of mjlab's."""
    cone: Annotated[str | None, OneOf(CONES)] = None
    """Friction cones of the physics. null: those of mjlab's task for the robot."""


LIBRARY = Library(
    "teams of mjlab's robots, on MuJoCo Warp",
    "torchrl_marl.envs.mjlab:MjlabEnv",
    settings=("num_envs", "max_steps"),
    of_objects=(),
    states=(),
    environments=lambda: TASKS,
    arguments="torchrl_marl.envs.mjlab.library:MjlabArguments",
    captured=True,
    packages=("mjlab", "mujoco", "mujoco_warp", "warp"),
)
