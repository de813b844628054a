"""Reward of a robot that walks in a formation."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

__all__ = ["FormationReward"]


@dataclass(frozen=True)
class FormationReward:
    """Reward of each agent, per second.

    Tracking of velocity and turn rate, posture, upright body and smoothness have the weights and
    widths of mjlab's velocity task. The agent's place in the formation and contacts with other
    robots are added to them.

    Shapes: E envs, N agents, J joints.

    Reference: Zakka et al., 2026, https://arxiv.org/abs/2601.22074 (mjlab).
    """

    velocity: float = 2.0
    turn_rate: float = 2.0
    upright: float = 1.0
    posture: float = 1.0
    place: float = 1.0
    action_rate: float = -0.1
    contact: float = -1.0
    velocity_width: float = 0.25
    """Squared width in (m/s)²."""
    turn_rate_width: float = 0.5
    """Squared width in (rad/s)²."""
    upright_width: float = 0.2
    """Squared width of the horizontal part of gravity's direction."""
    place_width: float = 0.25
    """Squared width in m²."""
    contact_force: float = 1.0
    """Force in N above which robots count as in contact."""

    def earned(
        self,
        *,
        velocity_error: Tensor,
        turn_rate_error: Tensor,
        gravity: Tensor,
        joint_error: Tensor,
        place_error: Tensor,
        action_change: Tensor,
        force: Tensor,
    ) -> Tensor:
        """Returns the reward per second in such a state.

        Args:
            velocity_error (Tensor): difference of the velocity from the command, with the vertical
                velocity, in m/s.
            turn_rate_error (Tensor): difference of the angular velocity from the command, in rad/s.
            gravity (Tensor): direction of gravity in the robot's frame.
            joint_error (Tensor): difference of the joints from the default posture, in units of
                mjlab's widths.
            place_error (Tensor): vector to the slot, in meters.
            action_change (Tensor): difference from the last action.
            force (Tensor): sum of the contact forces with other robots, in N.

        Shapes:
            - velocity_error, turn_rate_error, gravity: ``[E, N, 3]``; place_error: ``[E, N, 2]``
            - joint_error, action_change: ``[E, N, J]``; force: ``[E, N, 1]``
            - returns: ``[E, N, 1]``
        """
        return (
            self.velocity * _gaussian(velocity_error, self.velocity_width)
            + self.turn_rate * _gaussian(turn_rate_error, self.turn_rate_width)
            + self.upright * _gaussian(gravity[..., :2], self.upright_width)
            + self.posture * _gaussian(joint_error, joint_error.shape[-1])
            + self.place * _gaussian(place_error, self.place_width)
            + self.action_rate * action_change.square().sum(-1, keepdim=True)
            + self.contact * (force > self.contact_force)
        )


def _gaussian(error: Tensor, squared_width: float) -> Tensor:
    """Returns 1 without an error, and less with one."""
    return (-error.square().sum(-1, keepdim=True) / squared_width).exp()
