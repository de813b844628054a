"""Environment of robots that walk in a formation, all envs in one batch.

Shapes: E envs, N agents, J joints of a robot, P pairs of robots.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from tensordict import TensorDictBase
from torch import Tensor
from torchrl.data import Bounded, Unbounded

from torchrl_marl.envs.agents.declaration import check_least
from torchrl_marl.envs.marl_env import MarlEnv
from torchrl_marl.envs.mjlab.build import Scenery, build_scenery, key_of
from torchrl_marl.envs.mjlab.engine import advance
from torchrl_marl.envs.mjlab.formation import (
    Commands,
    commands,
    moved,
    of_mates,
    places,
    relative,
    rotated,
    slots,
)
from torchrl_marl.envs.mjlab.rewards import FormationReward
from torchrl_marl.envs.mjlab.robots import CONES, FORMATIONS, ROBOTS, TASKS
from torchrl_marl.envs.scene import Picture, Stage
from torchrl_marl.errors import ConfigError, nearest, quoted
from torchrl_marl.specs import AgentSpec

__all__ = ["MjlabEnv"]

GROUP = "robot"
SHIFT, TURN, LIFT = 0.1, 0.3, (0.01, 0.05)  # of initial poses: meters, radians, meters
LARGEST = 100.0  # absolute value in observations


class Robots(NamedTuple):
    """State of all robots."""

    position: Tensor
    """In meters, ``[E, N, 3]``."""
    heading: Tensor
    """In radians, ``[E, N, 1]``."""
    gravity: Tensor
    """Direction of gravity in the robot's frame, ``[E, N, 3]``."""
    velocity: Tensor
    """Linear velocity in the scene's frame, in m/s, ``[E, N, 3]``."""
    own_velocity: Tensor
    """Linear velocity in the robot's frame, in m/s, ``[E, N, 3]``."""
    spin: Tensor
    """Angular velocity in the robot's frame, in rad/s, ``[E, N, 3]``."""
    joints: Tensor
    """Angles of the joints less those of the default posture, in radians, ``[E, N, J]``."""
    joint_speeds: Tensor
    """In rad/s, ``[E, N, J]``."""


class MjlabEnv(MarlEnv):
    """Environment of mjlab's robots that walk in a formation, and collide with each other.

    The formation moves on a plane, with a velocity and a turn rate that are drawn for each episode.
    Each robot has its own command: the velocity of its slot, and a correction toward the slot. It
    earns its own reward, and is terminated when it falls. A fallen robot lies in the way of the
    others, and the episode goes on until all have fallen.

    Robots, actuators, physics and scales are those of mjlab's velocity tasks. Physics are float32.

    Args:
        task (str): ``"formation"``.
        num_envs (int): number E of parallel envs.

    Keyword Args:
        n_agents (int): number N of robots in a scene.
        robot (str): ``"go1"`` (quadruped) or ``"g1"`` (humanoid).
        formation (str): ``"circle"``, ``"column"``, ``"line"`` or ``"wedge"``.
        spacing (float): distance of neighbors in the formation, in meters.
        speed (float): largest forward velocity of the formation, in m/s.
        turn_rate (float): largest turn rate of the formation, in rad/s.
        action_scale (float): scale of the actions, as a multiple of mjlab's.
        cone (str, optional): friction cones, ``"elliptic"`` or ``"pyramidal"``, which is faster on
            a CPU; None: those of mjlab's task for the robot.
        max_steps (int, optional): time limit of an episode in steps of 20 ms, 1,000 by default.
        seed, device, check: as in :class:`MarlEnv`.

    Shapes:
        - ``("robot", "observation")``: ``[E, N, 16 + 3 J + 5 (N - 1)]``
        - ``("robot", "action")``: ``[E, N, J]``, from -1 to 1: target angles of the joints
        - ``("next", "robot", "reward")``, ``("next", "robot", "terminated")``: ``[E, N, 1]``
        - ``"state"``: ``[E, N (14 + 3 J) + 2]``

    Raises:
        ConfigError: unknown task, robot or formation, or a number out of range.
        MissingExtraError: mjlab is not installed.

    Reference: Zakka et al., 2026, https://arxiv.org/abs/2601.22074 (mjlab); Lewis and Tan, 1997,
    https://doi.org/10.1023/A:1008814708459 (virtual structures).

    Examples:
        >>> env = MjlabEnv("formation", 2, n_agents=3, seed=0)  # doctest: +SKIP
        >>> env.rollout(3)["robot", "observation"].shape  # doctest: +SKIP
        torch.Size([2, 3, 3, 62])
    """

    def __init__(
        self,
        task: str,
        num_envs: int,
        *,
        n_agents: int = 4,
        robot: str = "go1",
        formation: str = "circle",
        spacing: float = 1.2,
        speed: float = 1.0,
        turn_rate: float = 0.5,
        action_scale: float = 2.0,
        cone: str | None = None,
        max_steps: int | None = None,
        seed: int | None = None,
        device: torch.device | str | None = None,
        check: bool = False,
        **unknown: Any,
    ) -> None:
        limit = 1000 if max_steps is None else max_steps
        super().__init__(
            num_envs, max_steps=limit, seed=seed, device=device, check=check, **unknown
        )
        _check_names(task=task, robot=robot, formation=formation, cone=cone)
        check_least("MjlabEnv", n_agents=(n_agents, 1), speed=(speed, 0), turn_rate=(turn_rate, 0))
        if spacing <= 0 or action_scale <= 0:
            raise ConfigError(
                f"MjlabEnv: spacing is {spacing} and action_scale is {action_scale}, expected "
                "numbers above 0."
            )
        self._robot, self._key = robot, key_of(robot, n_agents, cone)
        self._limits = speed, turn_rate
        self._rewards = FormationReward()
        scenery = self.scenery
        self._offsets = slots(formation, n_agents, spacing).to(self.device)
        self._start = self._to_tensor(scenery.start)
        self._scale = self._to_tensor(action_scale * scenery.scale)
        self._posture = self._to_tensor(scenery.posture)
        self._joints = torch.as_tensor(scenery.joints, device=self.device)
        # Each pair's force belongs to both of its robots.
        pairs = torch.tensor(scenery.pairs, dtype=torch.int64).reshape(-1, 2)
        touching = torch.zeros(len(pairs), n_agents).scatter(1, pairs, 1.0)
        self._of_pairs = touching.to(self.device)
        self._declare_robots(n_agents, scenery.n_joints)

    def _declare_robots(self, n_agents: int, n_joints: int) -> None:
        observation = Unbounded((16 + 3 * n_joints + 5 * (n_agents - 1),))
        action = Bounded(-1.0, 1.0, (n_joints,))
        self.register_agent(AgentSpec(GROUP, n_agents, observation, action))
        self.register_state(Unbounded((n_agents * (14 + 3 * n_joints) + 2,)))

    def _to_tensor(self, values: Any) -> Tensor:
        return torch.as_tensor(values, dtype=torch.float32, device=self.device)

    @property
    def scenery(self) -> Scenery:
        """The scene's model, and the scales of its task."""
        return build_scenery(self._key)

    # ------------------------------------------------------------------------------ dynamics

    def _reset(self, tensordict: TensorDictBase | None) -> dict[str, Any]:
        n_agents, n_joints = len(self._offsets), self.scenery.n_joints
        options = {"device": self.device}
        drawn = 2 * torch.rand(self.num_envs, n_agents, 4, **options) - 1
        twist = torch.rand(self.num_envs, 2, **options)
        speed, turn_rate = self._limits
        self.twist = torch.stack([speed * twist[:, 0], turn_rate * (2 * twist[:, 1] - 1)], 1)
        self.pose = torch.zeros(self.num_envs, 3, **options)
        robots = self._start.expand(self.num_envs, n_agents, -1).clone()
        robots[..., :2] = places(self.pose, self._offsets) + SHIFT * drawn[..., :2]
        robots[..., 2] += LIFT[0] + (LIFT[1] - LIFT[0]) * (drawn[..., 2] + 1) / 2
        half = TURN * drawn[..., 3:] / 2
        zero = torch.zeros_like(half)
        robots[..., 3:7] = torch.cat([half.cos(), zero, zero, half.sin()], -1)
        at_rest = torch.zeros(self.num_envs, 2 * n_agents * (6 + n_joints), **options)
        self.physics = torch.cat([robots.flatten(1), at_rest], 1)
        self.force = torch.zeros(self.num_envs, n_agents, 1, **options)
        self.action = torch.zeros(self.num_envs, n_agents, n_joints, **options)
        return self._observe(self.robots())

    def _step(self, tensordict: TensorDictBase) -> dict[str, Any]:
        action, before = tensordict[GROUP, "action"], self.action
        commands = self.commands(self.robots())
        targets = self._start[7:] + self._scale * action
        physics, force = advance(self.physics, targets[..., self._joints].flatten(1), self._key)
        diverged = ~physics.isfinite().all(1, keepdim=True)
        self.physics, self.action = torch.where(diverged, self.physics, physics), action
        self.force = (force @ self._of_pairs).unsqueeze(-1)
        self.pose = moved(self.pose, self.twist, self.scenery.seconds)
        robots = self.robots()
        output = self._observe(robots)
        output[GROUP]["reward"] = self._compute_reward(robots, commands, action - before)
        fallen = -robots.gravity[..., 2:] < math.cos(self.scenery.tilt)
        output[GROUP]["terminated"] = fallen | diverged.unsqueeze(1)
        return output

    def _compute_reward(self, robots: Robots, commands: Commands, change: Tensor) -> Tensor:
        """Returns the reward of a step in which these commands were given."""
        planar_velocity = rotated(robots.velocity[..., :2], -robots.heading)
        velocity_error = torch.cat(
            [commands.velocity - planar_velocity, robots.velocity[..., 2:]], -1
        )
        turn_rate_error = torch.cat(
            [robots.spin[..., :2], robots.spin[..., 2:] - commands.turn_rate], -1
        )
        reward = self._rewards.earned(
            velocity_error=velocity_error,
            turn_rate_error=turn_rate_error,
            gravity=robots.gravity,
            joint_error=robots.joints / self._posture,
            place_error=self.commands(robots).place_error,
            action_change=change,
            force=self.force,
        )
        return self.scenery.seconds * reward

    def robots(self) -> Robots:
        """Returns the state of all robots."""
        n_agents, n_joints = len(self._offsets), self.scenery.n_joints
        sizes = [n_agents * (7 + n_joints), n_agents * (6 + n_joints)]
        qpos, qvel, _ = self.physics.split([*sizes, sizes[1]], 1)
        qpos, qvel = qpos.unflatten(1, (n_agents, -1)), qvel.unflatten(1, (n_agents, -1))
        position, quaternion, joints = qpos.split([3, 4, n_joints], -1)
        velocity, spin, joint_speeds = qvel.split([3, 3, n_joints], -1)
        axes = _rotation_matrices(quaternion)
        return Robots(
            position,
            torch.atan2(axes[..., 1, :1], axes[..., 0, :1]),
            -axes[..., 2, :],
            velocity,
            (axes * velocity.unsqueeze(-1)).sum(-2),
            spin,
            joints - self._start[7:],
            joint_speeds,
        )

    def commands(self, robots: Robots) -> Commands:
        """Returns the robots' commands at this moment.

        Args:
            robots (Robots): output of :meth:`robots`.
        """
        position = robots.position[..., :2]
        return commands(self.pose, self.twist, self._offsets, position, robots.heading)

    def _observe(self, robots: Robots) -> dict[str, Any]:
        commands = self.commands(robots)
        own_features = [
            *(robots.own_velocity, robots.spin, robots.gravity),
            *(robots.joints, robots.joint_speeds, self.action),
        ]
        angle = [commands.heading_error.sin(), commands.heading_error.cos()]
        mates = torch.cat(
            [
                relative(robots.position[..., :2], robots.heading),
                relative(robots.velocity[..., :2], robots.heading),
                -of_mates(robots.gravity[..., 2:]),
            ],
            -1,
        )
        features = [
            *own_features,
            commands.velocity,
            commands.turn_rate,
            commands.place_error,
            *angle,
            mates.flatten(2),
        ]
        relative_position = rotated(
            robots.position[..., :2] - self.pose[:, None, :2],
            -self.pose[:, None, 2:].expand_as(robots.heading),
        )
        state = torch.cat(
            [*own_features, relative_position, robots.position[..., 2:], *angle], -1
        ).flatten(1)
        return {
            GROUP: {"observation": _clamp(torch.cat(features, -1))},
            "state": _clamp(torch.cat([state, self.twist], 1)),
        }

    # ------------------------------------------------------------------------------- drawing

    def scene(self, index: int = 0) -> Picture:
        """Returns a picture of one env from above: robots, and the slots of the formation."""
        from torchrl_marl.envs.mjlab.drawing import draw_formation

        robots = self.robots()
        slot = places(self.pose, self._offsets)[index]
        center, upright = self.pose[index, :2], -robots.gravity[index, :, 2]
        place, heading = robots.position[index, :, :2], robots.heading[index, :, 0]
        return draw_formation(ROBOTS[self._robot], center, slot, place, heading, upright)

    def stage(self) -> Stage:
        """Returns the view of the pictures, around the formation's middle."""
        half = 1.5 + float(self._offsets.abs().max())
        return Stage("formation", (0.0, 0.0), (half, half), None)


def _check_names(**names: str | None) -> None:
    known = {"task": TASKS, "robot": sorted(ROBOTS), "formation": sorted(FORMATIONS), "cone": CONES}
    for kind, value in names.items():
        if value is not None and value not in known[kind]:
            raise ConfigError(
                f"unknown {kind} {quoted(value)} of mjlab; {nearest(value, known[kind])}expected "
                f"one of {', '.join(known[kind])}."
            )


def _rotation_matrices(quaternion: Tensor) -> Tensor:
    """Returns rotation matrices; their columns are the robots' axes.

    Shapes:
        - quaternion: ``[*B, 4]``, w first; returns: ``[*B, 3, 3]``
    """
    w, x, y, z = (quaternion / quaternion.norm(dim=-1, keepdim=True)).unbind(-1)
    rows = [
        *(1 - 2 * (y * y + z * z), 2 * (x * y - w * z), 2 * (x * z + w * y)),
        *(2 * (x * y + w * z), 1 - 2 * (x * x + z * z), 2 * (y * z - w * x)),
        *(2 * (x * z - w * y), 2 * (y * z + w * x), 1 - 2 * (x * x + y * y)),
    ]
    return torch.stack(rows, -1).unflatten(-1, (3, 3))


def _clamp(x: Tensor) -> Tensor:
    return x.clamp(-LARGEST, LARGEST)
