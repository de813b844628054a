"""Geometry of a formation that moves in the plane, and the commands of its agents.

Shapes: E envs, N agents. A ``pose`` is ``[E, 3]``: x and y in meters, and the heading in radians. A
``twist`` is ``[E, 2]``: forward velocity in m/s, and turn rate in rad/s.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

__all__ = ["Commands", "commands", "moved", "of_mates", "places", "relative", "rotated", "slots"]

CATCH_UP = 0.5
"""Largest correction of a velocity in m/s, and of a turn rate in rad/s."""
SECONDS = 1.0
"""Time in which an error is corrected."""


class Commands(NamedTuple):
    """Commands of the agents, and their errors, in their own frames."""

    velocity: Tensor
    """Velocity forward and to the left, in m/s, ``[E, N, 2]``."""
    turn_rate: Tensor
    """Turn rate in rad/s, ``[E, N, 1]``."""
    place_error: Tensor
    """Vector to its slot in meters, ``[E, N, 2]``."""
    heading_error: Tensor
    """Angle to the formation's heading, from -pi to pi, ``[E, N, 1]``."""


def slots(formation: str, n_agents: int, spacing: float) -> Tensor:
    """Returns the slots of a formation that heads along x; their mean is 0.

    Args:
        formation (str): ``circle``, ``column``, ``line`` or ``wedge``.
        n_agents (int): number N of agents.
        spacing (float): distance of neighbors in meters.

    Shapes:
        - returns: ``[N, 2]``

    Examples:
        >>> slots("line", 3, 2.0)
        tensor([[ 0.,  2.],
                [ 0.,  0.],
                [ 0., -2.]])
    """
    i = torch.arange(n_agents)
    middle = (n_agents - 1) / 2
    if formation == "line":
        return torch.stack([torch.zeros(n_agents), spacing * (middle - i)], 1)
    if formation == "column":
        return torch.stack([spacing * (middle - i), torch.zeros(n_agents)], 1)
    if formation == "wedge":
        side, row = 1 - 2 * (i % 2), (i + 1) // 2
        found = torch.stack([-row, -side * row], 1) * (spacing / math.sqrt(2))
        return found - found.mean(0)
    # A chord of the ring is 2 r sin(pi / N).
    radius = spacing / (2 * math.sin(math.pi / n_agents)) if n_agents > 1 else 0.0
    angle = 2 * math.pi * i / n_agents
    return radius * torch.stack([angle.cos(), angle.sin()], 1)


def rotated(vector: Tensor, angle: Tensor) -> Tensor:
    """Rotates vectors in the plane.

    Shapes:
        - vector: ``[*B, 2]``; angle: ``[*B, 1]``; returns: ``[*B, 2]``
    """
    x, y = vector.split(1, -1)
    cos, sin = angle.cos(), angle.sin()
    return torch.cat([x * cos - y * sin, x * sin + y * cos], -1)


def places(pose: Tensor, offsets: Tensor) -> Tensor:
    """Returns where the slots of a formation are.

    Shapes:
        - pose: ``[E, 3]``; offsets: ``[N, 2]``; returns: ``[E, N, 2]``
    """
    pose = pose.unsqueeze(1)
    return pose[..., :2] + rotated(offsets.expand(len(pose), -1, -1), pose[..., 2:])


def moved(pose: Tensor, twist: Tensor, seconds: float) -> Tensor:
    """Returns the pose of a formation after some time, along a circular arc.

    Shapes:
        - pose: ``[E, 3]``; twist: ``[E, 2]``; returns: ``[E, 3]``
    """
    speed, turn = twist.split(1, -1)
    half = turn * seconds / 2
    chord = speed * seconds * torch.sinc(half / math.pi)  # sin(half) / half
    step = rotated(torch.cat([chord, torch.zeros_like(chord)], -1), pose[:, 2:] + half)
    return pose + torch.cat([step, 2 * half], -1)


def commands(
    pose: Tensor, twist: Tensor, offsets: Tensor, position: Tensor, heading: Tensor
) -> Commands:
    """Returns the command of each agent: the velocity of its slot, and a correction toward it.

    A slot moves as a point of a rigid body, so the outer agents of a turn walk faster.

    Args:
        pose (Tensor): pose of the formation.
        twist (Tensor): its velocity and turn rate.
        offsets (Tensor): its slots.
        position (Tensor): positions of the agents in the plane.
        heading (Tensor): their headings.

    Shapes:
        - pose: ``[E, 3]``; twist: ``[E, 2]``; offsets: ``[N, 2]``
        - position: ``[E, N, 2]``; heading: ``[E, N, 1]``
    """
    slot = places(pose, offsets)
    speed, turn = twist.unsqueeze(1).split(1, -1)
    arm = slot - pose[:, None, :2]
    along = torch.cat([speed, torch.zeros_like(speed)], -1)
    rigid = rotated(along, pose[:, None, 2:]) + turn * torch.stack([-arm[..., 1], arm[..., 0]], -1)
    error = slot - position
    correction = error / SECONDS
    length = correction.norm(dim=-1, keepdim=True)
    correction = correction * (CATCH_UP / length.clamp_min(CATCH_UP))
    off = pose[:, None, 2:] - heading
    off = torch.atan2(off.sin(), off.cos())
    return Commands(
        rotated(rigid + correction, -heading),
        turn + (off / SECONDS).clamp(-CATCH_UP, CATCH_UP),
        rotated(error, -heading),
        off,
    )


def relative(x: Tensor, heading: Tensor) -> Tensor:
    """Returns vectors of each agent's mates minus its own, in its own frame.

    Mates follow each other in the order of the agents, from the next one on.

    Shapes:
        - x: ``[E, N, 2]``; heading: ``[E, N, 1]``; returns: ``[E, N, N - 1, 2]``
    """
    mates = of_mates(x)
    return rotated(mates - x.unsqueeze(2), -heading.unsqueeze(2).expand(*mates.shape[:-1], 1))


def of_mates(x: Tensor) -> Tensor:
    """Returns the values of each agent's mates, from the next agent on.

    Shapes:
        - x: ``[E, N, F]``; returns: ``[E, N, N - 1, F]``
    """
    n = x.shape[1]
    i = torch.arange(n, device=x.device)
    mates = (i.unsqueeze(1) + i[1:]) % n
    return x[:, mates]
