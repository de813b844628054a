"""Facts about the robots, available without importing MuJoCo."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["ROBOTS", "Robot"]


@dataclass(frozen=True)
class Robot:
    """Properties of a robot's task.

    Examples:
        >>> ROBOTS["ant"].agent_conf
        '4x2'
    """

    scenario: str
    """Name in Gymnasium-Robotics."""
    agent_conf: str
    """Default partition of the joints."""
    sensed: tuple[str, ...] = ()
    """Fields of MuJoCo's ``MjData`` that are observed, besides positions and velocities."""
    place: str | None = None
    """Field from which the forward velocity is computed; None: the first position."""
    normal_velocities: bool = False
    """True if initial velocities are normal; otherwise they are uniform."""


_HUMANOID_FIELDS = ("cinert", "cvel", "qfrc_actuator", "cfrc_ext")

ROBOTS = {
    "ant": Robot("Ant", "4x2", ("cfrc_ext",), "xpos", normal_velocities=True),
    "halfcheetah": Robot("HalfCheetah", "6x1", normal_velocities=True),
    "hopper": Robot("Hopper", "3x1"),
    "humanoid": Robot("Humanoid", "9|8", _HUMANOID_FIELDS, "xipos"),
    "manysegmentant": Robot("ManySegmentAnt", "2x3", ("cfrc_ext",), "xpos", normal_velocities=True),
    "manysegmentswimmer": Robot("ManySegmentSwimmer", "10x2"),
    "swimmer": Robot("Swimmer", "2x1"),
    "walker2d": Robot("Walker2d", "2x3"),
}
"""Robots by name."""
