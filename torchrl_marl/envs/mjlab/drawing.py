"""Pictures of a formation from above."""

from __future__ import annotations

import math
from typing import Any

from torch import Tensor

from torchrl_marl.envs.mjlab.robots import Robot
from torchrl_marl.envs.scene import AGENT_COLORS, Shape

__all__ = ["draw_formation"]

_GROUND, _SLOT = (0.85, 0.85, 0.85), (0.55, 0.55, 0.55)
_MARKS_RADIUS = 4  # meters from the middle, up to which the ground has marks


def draw_formation(
    robot: Robot, center: Tensor, slot: Tensor, place: Tensor, heading: Tensor, upright: Tensor
) -> list[Shape]:
    """Returns the robots, their slots, and marks on the ground, one a meter.

    A robot's nose shows its heading. A robot that leans is drawn pale.

    Args:
        robot (Robot): kind of robot.
        center (Tensor): middle of the formation, and of the picture.
        slot, place (Tensor): positions of the slots and robots.
        heading (Tensor): headings of the robots.
        upright (Tensor): cosine of the angle between each robot and the vertical.

    Shapes:
        - center: ``[2]``; slot, place: ``[N, 2]``; heading, upright: ``[N]``
    """
    x, y = center.tolist()
    shapes = _ground_marks(x, y)
    for i, (left, up) in enumerate((slot - center).tolist()):
        shapes.append(
            Shape(f"slot {i}", "goal", "circle", left, up, 0.0, _SLOT, radius=0.2, hollow=True)
        )
    rows = zip((place - center).tolist(), heading.tolist(), upright.tolist())
    for i, ((left, up), angle, cos) in enumerate(rows):
        pale = 0.6 * (1 - max(cos, 0.0))
        red, green, blue = (
            shade + (1 - shade) * pale for shade in AGENT_COLORS[i % len(AGENT_COLORS)]
        )
        color = (red, green, blue)
        size: Any = {"length": robot.length, "width": robot.width}
        shapes.append(Shape(f"robot {i}", "agent", "box", left, up, angle, color, **size))
        reach, radius = robot.length / 2, robot.width / 4
        nose = left + reach * math.cos(angle), up + reach * math.sin(angle)
        shapes.append(Shape(f"nose {i}", "object", "circle", *nose, 0.0, color, radius=radius))
    return shapes


def _ground_marks(x: float, y: float) -> list[Shape]:
    steps = range(-_MARKS_RADIUS, _MARKS_RADIUS + 1)
    return [
        Shape("mark", "goal", "circle", i + left, j + up, 0.0, _GROUND, radius=0.04)
        for left, up in [(round(x) - x, round(y) - y)]
        for i in steps
        for j in steps
    ]
