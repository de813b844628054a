"""Pictures of robots: pixels of MuJoCo's renderer, or shapes where there is no OpenGL."""

from __future__ import annotations

import functools
import math
import os
from typing import Any

import numpy as np
from torch import Tensor

from torchrl_marl.envs.mujoco.build import Task
from torchrl_marl.envs.scene import AGENT_COLORS, Picture, Shape, Stage

__all__ = ["draw_robot", "view_of"]

_HEIGHT_IN_PIXELS, _WIDTH_IN_PIXELS = 360, 480
_TORSO, _GROUND = (0.75, 0.72, 0.68), (0.45, 0.45, 0.45)


def draw_robot(task: Task, qpos: Tensor) -> Picture:
    """Returns a picture of a robot.

    MuJoCo renders it if the variable ``MUJOCO_GL`` or ``DISPLAY`` is set. Otherwise the robot is
    drawn as shapes: a swimmer from above, others from the side.

    Args:
        task (Task): the robot.
        qpos (Tensor): its positions.

    Shapes:
        - qpos: ``[Q]``; returns: pixels ``[H, W, 3]``, or a list of shapes
    """
    import mujoco

    data = mujoco.MjData(task.model)
    data.qpos[:] = qpos.cpu().numpy()
    mujoco.mj_forward(task.model, data)
    renderer = _make_renderer(task.model)
    if renderer is None:
        return _draw_shapes(task, data)
    renderer.update_scene(data, _make_camera(task))
    return renderer.render()


def view_of(task: Task) -> Stage:
    """Returns the visible part of the plane, for pictures made of shapes."""
    half = 1.5 * _robot_radius(task.model)
    center = 0.0 if _is_swimmer(task) else 0.6 * half
    return Stage(task.robot.scenario, (0.0, center), (half, 0.75 * half), None)


@functools.cache
def _robot_radius(model: Any) -> float:
    """Returns the largest distance of a limb's end from the first body, in meters."""
    import mujoco

    data = mujoco.MjData(model)
    mujoco.mj_forward(model, data)
    limbs = model.geom_bodyid > 0
    distances = np.linalg.norm(data.geom_xpos[limbs] - data.xpos[1], axis=1)
    return float((distances + model.geom_rbound[limbs]).max())


@functools.cache
def _make_renderer(model: Any) -> Any:
    """Returns MuJoCo's renderer, off screen; None without OpenGL."""
    import mujoco

    if not (os.environ.get("MUJOCO_GL") or os.environ.get("DISPLAY")):
        return None
    try:
        return mujoco.Renderer(model, _HEIGHT_IN_PIXELS, _WIDTH_IN_PIXELS)
    except Exception:  # each platform raises its own error
        return None


def _make_camera(task: Task) -> Any:
    """Returns a camera that follows the robot from the side."""
    import mujoco

    camera = mujoco.MjvCamera()
    camera.type, camera.trackbodyid = mujoco.mjtCamera.mjCAMERA_TRACKING, task.torso
    camera.distance, camera.azimuth, camera.elevation = 4 * _robot_radius(task.model), 90.0, -15.0
    return camera


def _is_swimmer(task: Task) -> bool:
    return task.robot.scenario.endswith("Swimmer")


def _draw_shapes(task: Task, data: Any) -> list[Shape]:
    """Returns the limbs around the torso, and marks on the ground, one a meter."""
    model, middle = task.model, float(data.xpos[task.torso, 0])
    vertical = 1 if _is_swimmer(task) else 2
    origin = np.array([middle, float(data.xpos[task.torso, 1]) if vertical == 1 else 0.0])
    colors = _body_colors(task)
    shapes = []
    for geom in np.flatnonzero(model.geom_bodyid > 0).tolist():
        x, y = (data.geom_xpos[geom][[0, vertical]] - origin).tolist()
        along = data.geom_xmat[geom].reshape(3, 3)[[0, vertical], 2]
        radius, half = (float(size) for size in model.geom_size[geom][:2])
        color, name = colors[model.geom_bodyid[geom]], f"geom {geom}"
        turn, length = math.atan2(along[1], along[0]), 2 * half * float(np.hypot(*along))
        size: Any = {"length": length + 2 * radius, "width": 2 * radius}
        shapes.append(Shape(name, "object", "box", x, y, turn, color, **size))
    reach = math.ceil(1.5 * _robot_radius(model))
    for meter in range(-reach, reach + 1):
        place, name = round(middle) + meter - middle, f"mark {meter}"
        size = {"length": 0.05, "width": 0.1}
        shapes.append(Shape(name, "object", "box", place, -0.05, 0.0, _GROUND, **size))
    return shapes


def _body_colors(task: Task) -> dict[int, tuple[float, float, float]]:
    """Returns the color of each body: that of the agent that moves it."""
    model = task.model
    bodies = model.jnt_bodyid[model.actuator_trnid[:, 0]]
    colors = dict.fromkeys(range(model.nbody), _TORSO)
    for i, agent in enumerate(task.agents):
        for body in bodies[list(agent.actuators)].tolist():
            colors[body] = AGENT_COLORS[i % len(AGENT_COLORS)]
    for body in range(1, model.nbody):  # parts without own joints belong to their parents
        if model.body_jntnum[body] == 0:
            colors[body] = colors[model.body_parentid[body]]
    return colors
