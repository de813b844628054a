"""Drawing of VMAS environments without VMAS's renderer."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, Literal

import torchrl.envs
from torch import Tensor

from torchrl_marl.envs.scene import Shape, Stage, text

if TYPE_CHECKING:
    from vmas.simulator.core import Agent, Entity, Landmark

__all__ = ["VmasScene"]


class VmasScene:
    """Draws a VMAS environment: its entities become shapes, seen in the scenario's view.

    Args:
        env (VmasEnv): VMAS environment from this package or from TorchRL.
    """

    def __init__(self, env: torchrl.envs.VmasEnv) -> None:
        self._env = env

    def scene(self, index: int = 0) -> list[Shape]:
        """Returns the entities of one env as shapes, agents first."""
        world = self._env._env.world
        agents = [_shape(agent, "agent", index) for agent in world.agents]
        others = [_shape(entity, _role(entity), index) for entity in world.landmarks]
        return (
            agents
            + others
            + [_message_label(agent, index) for agent in world.agents if _sends_messages(agent)]
        )

    def stage(self) -> Stage:
        """Returns the scenario's view and border."""
        env = self._env
        scenario, world, name = env._env.scenario, env._env.world, env.scenario_name
        zoom, aspect = scenario.viewer_zoom, scenario.viewer_size[0] / scenario.viewer_size[1]
        border = None
        if None not in (world.x_semidim, world.y_semidim):
            border = (float(world.x_semidim), float(world.y_semidim))
            border = border if all(map(math.isfinite, border)) else None
        return Stage(
            name=name if isinstance(name, str) else type(name).__name__,
            center=(float(scenario.render_origin[0]), float(scenario.render_origin[1])),
            half_size=(zoom, zoom / aspect) if aspect < 1 else (zoom * aspect, zoom),
            border=border,
        )


def _role(landmark: Landmark) -> Literal["object", "goal", "joint"]:
    if landmark.is_joint:
        return "joint"
    return "object" if landmark.collide else "goal"


def _shape(entity: Agent | Entity, role: Any, index: int) -> Shape:
    x, y = entity.state.pos[index].tolist()
    return Shape(
        name=entity.name,
        role=role,
        x=x,
        y=y,
        rotation=float(entity.state.rot[index]),
        color=_color(entity.color, index),
        visible=bool(entity.is_rendering[index]),
        **_form(entity.shape),
    )


def _sends_messages(agent: Agent) -> bool:
    return not agent.silent and isinstance(agent.state.c, Tensor) and agent.state.c.shape[-1] > 0


def _message_label(agent: Agent, index: int) -> Shape:
    """Returns an agent's label: the index and value of the largest component of its message."""
    message = agent.state.c[index].tolist()
    largest = max(range(len(message)), key=lambda i: abs(message[i]))
    label = f"{largest}: {message[largest]:.1f}" if message[largest] else ""
    x, y = agent.state.pos[index].tolist()
    height = 1.2 * agent.shape.circumscribed_radius()
    return text(f"{agent.name} says", label, x, y + 1.8 * height, height=height)


def _form(shape: Any) -> dict[str, Any]:
    from vmas.simulator.core import Box, Line

    if isinstance(shape, Box):
        return {
            "kind": "box", "length": shape.length, "width": shape.width, "hollow": shape.hollow
        }  # fmt: skip
    if isinstance(shape, Line):
        return {"kind": "line", "length": shape.length}
    return {"kind": "circle", "radius": shape.circumscribed_radius()}


def _color(color: Any, index: int) -> tuple[float, float, float]:
    if isinstance(color, Tensor):
        color = (color[index] if color.ndim > 1 else color).tolist()
    red, green, blue = (min(max(float(part), 0.0), 1.0) for part in color[:3])
    return red, green, blue
