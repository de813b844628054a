"""Facts about the tasks, robots and formations, available without importing mjlab."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["CONES", "FORMATIONS", "ROBOTS", "TASKS", "Robot"]

TASKS = ("formation",)
"""Names of the tasks."""
CONES = {"elliptic": "exact", "pyramidal": "faster on a CPU"}
"""Friction cones of the physics."""
FORMATIONS = {
    "circle": "a ring, the first agent in front",
    "column": "one behind the other",
    "line": "side by side",
    "wedge": "a V, the first agent in front",
}
"""Formations by name."""


@dataclass(frozen=True)
class Robot:
    """Robot of mjlab.

    Examples:
        >>> ROBOTS["go1"].task
        'Mjlab-Velocity-Flat-Unitree-Go1'
    """

    task: str
    """Task of mjlab with the robot's model, actuators, physics and scales."""
    length: float
    """Length of its body in pictures, in meters."""
    width: float
    """Width of its body in pictures, in meters."""


ROBOTS = {
    "g1": Robot("Mjlab-Velocity-Flat-Unitree-G1", 0.3, 0.5),
    "go1": Robot("Mjlab-Velocity-Flat-Unitree-Go1", 0.6, 0.3),
}
"""Robots by name: Unitree's humanoid G1, and Unitree's quadruped Go1."""
