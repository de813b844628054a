"""Builds scenes of several robots from mjlab's robots and its velocity tasks.

Shapes: N robots with J joints each, P pairs of robots.
"""

from __future__ import annotations

import functools
import itertools
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from torchrl_marl.envs.mjlab.robots import ROBOTS
from torchrl_marl.errors import MissingExtraError

__all__ = ["Scenery", "build_scenery", "key_of"]

_CONTACTS_PER_ROBOT = 64  # if mjlab's task gives no number
_DISTANCE_AT_REST = 2.0  # meters


@dataclass(frozen=True)
class Scenery:
    """Model of a scene with several robots of one kind, and the scales of its task."""

    model: Any
    """MuJoCo's model."""
    simulation: Any
    """mjlab's settings of the physics."""
    substeps: int
    """Steps of the physics in a step of the environment."""
    seconds: float
    """Duration of a step of the environment."""
    n_agents: int
    joints: np.ndarray
    """The joint that each actuator of a robot moves, ``[J]``."""
    start: np.ndarray
    """Position, orientation and joints of a robot that stands at the origin, ``[7 + J]``."""
    scale: np.ndarray
    """mjlab's scale of the action of each joint, in radians, ``[J]``."""
    posture: np.ndarray
    """mjlab's width of the reward for the default posture, by joint, in radians, ``[J]``."""
    tilt: float
    """Tilt in radians above which a robot counts as fallen."""
    forces: np.ndarray
    """Columns of the contact forces of each pair of robots in ``sensordata``, ``[P, 3]``."""

    @property
    def n_joints(self) -> int:
        """Number of joints of a robot."""
        return len(self.start) - 7

    @property
    def pairs(self) -> list[tuple[int, int]]:
        """The pairs of robots."""
        return list(itertools.combinations(range(self.n_agents), 2))


def key_of(robot: str, n_agents: int, cone: str | None = None) -> str:
    """Returns a text that names a scene; see :func:`build_scenery`.

    Args:
        robot (str): name of the robot.
        n_agents (int): number of robots.
        cone (str, optional): friction cones; None for those of mjlab's task.
    """
    return json.dumps([robot, n_agents, cone])


@functools.cache
def build_scenery(key: str) -> Scenery:
    """Returns a scene, which all its environments in this process share.

    The robots stand on one plane, and collide with each other. Physics, actuators and scales are
    those of mjlab's velocity task of the robot on flat ground.

    Args:
        key (str): output of :func:`key_of`.

    Raises:
        MissingExtraError: mjlab is not installed.
    """
    robot, n_agents, cone = json.loads(key)
    task = _load_task(ROBOTS[robot].task)
    physics = task.sim.mujoco if cone is None else replace(task.sim.mujoco, cone=cone)
    model, sensors = _compile_scene(task.scene.entities["robot"], n_agents)
    n_joints = model.nu // n_agents
    order = [_without_robot_name(model.joint(1 + i).name) for i in range(n_joints)]
    moved = [_without_robot_name(model.joint(i).name) for i in model.actuator_trnid[:n_joints, 0]]
    columns = [model.sensor(name).adr[0] for name in sensors]
    return Scenery(
        model=model,
        simulation=replace(
            task.sim,
            mujoco=physics,
            nconmax=n_agents * (task.sim.nconmax or _CONTACTS_PER_ROBOT),
            njmax=n_agents * task.sim.njmax,
        ),
        substeps=task.decimation,
        seconds=task.decimation * task.sim.mujoco.timestep,
        n_agents=n_agents,
        joints=np.array([order.index(name) for name in moved]),
        start=model.key_qpos[0].reshape(n_agents, -1)[0],
        scale=_values_by_joint(task.actions["joint_pos"].scale, order),
        posture=_values_by_joint(task.rewards["pose"].params["std_walking"], order),
        tilt=task.terminations["fell_over"].params["limit_angle"],
        forces=np.array(columns, dtype=np.int64).reshape(-1, 1) + np.arange(3),
    )


def _load_task(name: str) -> Any:
    """Returns the config of a task of mjlab."""
    os.environ.setdefault("MJLAB_WARP_QUIET", "1")  # else it prints each kernel that it loads
    try:
        import mjlab.tasks  # noqa: F401 - registers the tasks
        from mjlab.tasks.registry import load_env_cfg
    except ImportError as error:
        if error.name == "mjlab":
            raise MissingExtraError("mjlab", "mjlab") from None
        raise MissingExtraError("mjlab", "mjlab", f"cannot be imported ({error})") from None
    return load_env_cfg(name)


def _compile_scene(robot: Any, n_agents: int) -> tuple[Any, list[str]]:
    """Returns the model of a scene, and the name of the contact sensor of each pair of robots."""
    from mjlab.scene import Scene, SceneCfg
    from mjlab.sensor import ContactMatch, ContactSensorCfg
    from mjlab.terrains import TerrainEntityCfg

    root = robot.build().body_names[0]
    names = [f"robot_{i}" for i in range(n_agents)]
    pairs = list(itertools.combinations(names, 2))
    sensors = [
        ContactSensorCfg(
            name=f"{one}_{other}",
            primary=ContactMatch("subtree", root, one),
            secondary=ContactMatch("subtree", root, other),
            fields=("force",),
            reduce="netforce",
        )
        for one, other in pairs
    ]

    def move_apart(spec: Any) -> None:
        # The simulation's memory is sized at the model's own positions, where robots may not touch.
        for i, name in enumerate(names):
            spec.body(f"{name}/{root}").pos[0] = _DISTANCE_AT_REST * i

    scene = SceneCfg(
        terrain=TerrainEntityCfg(terrain_type="plane"),
        entities=dict.fromkeys(names, robot),
        sensors=tuple(sensors),
        spec_fn=move_apart,
    )
    sensor_names = [f"{one}_{other}_{root}_force" for one, other in pairs]
    return Scene(scene, device="cpu").compile(), sensor_names


def _without_robot_name(name: str) -> str:
    """Returns a joint's name without its robot's."""
    return name.partition("/")[2]


def _values_by_joint(values: Mapping[str, float], joints: list[str]) -> np.ndarray:
    """Returns the value of each joint, from values by patterns of names."""
    from mjlab.utils.lab_api.string import resolve_matching_names_values

    return np.array(resolve_matching_names_values(dict(values), joints)[2], dtype=np.float32)
