"""Rewards of the robots, and when they fall."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor

__all__ = ["Reward"]

Interval = tuple[float, float]
_UNBOUNDED: Interval = (-math.inf, math.inf)


@dataclass(frozen=True)
class Reward:
    """Reward of one step: forward velocity and health, less the cost of actions and contacts.

    The fields are Gymnasium's arguments of the same names. An interval of None is not tested.

    Shapes: E envs, with Q positions, V velocities, A actions and F contact forces.

    Reference: https://gymnasium.farama.org/environments/mujoco, version 5.

    Examples:
        >>> reward = Reward(ctrl_cost_weight=0.5)
        >>> velocity, action = torch.tensor([[3.0]]), torch.tensor([[1.0, 1.0]])
        >>> reward.earned(velocity, action, torch.tensor([[True]]), None)
        tensor([[2.]])
    """

    forward_reward_weight: float = 1.0
    ctrl_cost_weight: float = 0.0
    contact_cost_weight: float = 0.0
    contact_force_range: Interval = _UNBOUNDED
    contact_cost_range: Interval = _UNBOUNDED
    healthy_reward: float = 0.0
    healthy_z_range: Interval | None = None
    healthy_angle_range: Interval | None = None
    healthy_state_range: Interval | None = None
    terminate_when_unhealthy: bool = False
    free: bool = False
    """True for a robot that moves in space; other robots move in a plane."""

    @classmethod
    def of(cls, robot: Any) -> Reward:
        """Reads the weights and intervals of Gymnasium's environment."""
        known = {field.name: f"_{field.name}" for field in fields(cls)}
        read = {name: getattr(robot, own) for name, own in known.items() if hasattr(robot, own)}
        read = {name: tuple(x) if isinstance(x, list) else x for name, x in read.items()}
        return cls(**read, free=robot.model.nq > robot.model.nv)

    def healthy(self, qpos: Tensor, qvel: Tensor) -> Tensor:
        """Returns False where the robot has fallen.

        Shapes:
            - qpos: ``[E, Q]``; qvel: ``[E, V]``; returns: ``[E, 1]``
        """
        state = torch.cat([qpos, qvel], 1)
        height = qpos[:, 2:3] if self.free else qpos[:, 1:2]
        healthy = torch.ones_like(height, dtype=torch.bool)
        if self.healthy_z_range is not None:
            healthy = _is_within(height, self.healthy_z_range)
        if self.healthy_angle_range is not None:
            healthy = healthy & _is_within(qpos[:, 2:3], self.healthy_angle_range)
        if self.healthy_state_range is not None:
            healthy = healthy & _is_within(state[:, 2:], self.healthy_state_range)
        return healthy & state.isfinite().all(1, keepdim=True)

    def earned(
        self, velocity: Tensor, action: Tensor, healthy: Tensor, forces: Tensor | None
    ) -> Tensor:
        """Returns the reward of a step.

        Args:
            velocity (Tensor): forward velocity in m/s.
            action (Tensor): torques.
            healthy (Tensor): output of :meth:`healthy`.
            forces (Tensor, optional): external forces on the bodies.

        Shapes:
            - velocity, healthy: ``[E, 1]``; action: ``[E, A]``; forces: ``[E, F]``
            - returns: ``[E, 1]``
        """
        cost = self.ctrl_cost_weight * action.square().sum(1, keepdim=True)
        if forces is not None:
            squares = forces.clamp(*self.contact_force_range).square().sum(1, keepdim=True)
            cost = cost + (self.contact_cost_weight * squares).clamp(*self.contact_cost_range)
        return self.forward_reward_weight * velocity + self.healthy_reward * healthy - cost


def _is_within(x: Tensor, interval: Interval) -> Tensor:
    low, high = interval
    return ((low < x) & (x < high)).all(1, keepdim=True)
