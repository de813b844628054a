"""What there is to see in a VMAS world: its entities as plain shapes, read without its renderer."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import torchrl.envs
from torch import Tensor
from torchrl.envs import EnvBase

from torchrl_marl.errors import ConfigError

if TYPE_CHECKING:
    from vmas.simulator.core import Agent, Entity, Landmark

__all__ = ["Shape", "Stage", "scene", "stage"]


@dataclass(frozen=True)
class Shape:
    """One entity of a world at one time: where it is and how it looks.

    Lengths are the world's; a length lies along x where ``rotation`` is 0.
    """

    name: str
    """The entity's name."""
    role: Literal["agent", "object", "goal", "joint"]
    """An agent; a landmark that others run into; one that they do not; what ties two entities."""
    kind: Literal["circle", "box", "line"]
    """The form."""
    x: float
    """Middle."""
    y: float
    """Middle."""
    rotation: float
    """Radians, counter-clockwise."""
    color: tuple[float, float, float]
    """Red, green and blue, from 0 to 1."""
    radius: float = 0.0
    """Of a circle."""
    length: float = 0.0
    """Of a box or a line."""
    width: float = 0.0
    """Of a box."""
    hollow: bool = False
    """Whether a box is an outline."""
    visible: bool = True
    """Whether the world shows the entity now."""

    @property
    def reach(self) -> tuple[float, float]:
        """Half the extent along x and y."""
        if self.kind == "circle":
            return self.radius, self.radius
        cos, sin = abs(math.cos(self.rotation)), abs(math.sin(self.rotation))
        return (
            (self.length * cos + self.width * sin) / 2,
            (self.length * sin + self.width * cos) / 2,
        )


@dataclass(frozen=True)
class Stage:
    """The part of the plane in which a world plays."""

    name: str
    """The scenario's name."""
    center: tuple[float, float]
    """Middle of the view."""
    half_size: tuple[float, float]
    """Half the width and height of the view that the scenario's author chose."""
    border: tuple[float, float] | None
    """Half the width and height of the box that no entity's middle leaves, where there is one."""


def scene(env: EnvBase, index: int = 0) -> list[Shape]:
    """The entities of one of the envs, always in the same order.

    Args:
        env (VmasEnv): this package's or TorchRL's, also under transforms.
        index (int): which of its E envs.

    Raises:
        ConfigError: an environment of another kind.

    Examples:
        >>> from torchrl_marl.envs import VmasEnv
        >>> env = VmasEnv("balance", num_envs=2, seed=0)
        >>> [shape.name for shape in scene(env)]
        ['agent_0', 'agent_1', 'agent_2', 'goal', 'package', 'line', 'floor']
    """
    world = _vmas_of(env)._env.world
    agents = [_shape(agent, "agent", index) for agent in world.agents]
    return agents + [_shape(entity, _role(entity), index) for entity in world.landmarks]


def stage(env: EnvBase) -> Stage:
    """The view of a scenario, and its border.

    Args:
        env (VmasEnv): this package's or TorchRL's, also under transforms.

    Raises:
        ConfigError: an environment of another kind.
    """
    vmas_env = _vmas_of(env)
    scenario, world = vmas_env._env.scenario, vmas_env._env.world
    zoom, aspect = scenario.viewer_zoom, scenario.viewer_size[0] / scenario.viewer_size[1]
    name = vmas_env.scenario_name
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


def _vmas_of(env: EnvBase) -> Any:
    inner: Any = env
    while not isinstance(inner, torchrl.envs.VmasEnv):
        inner = getattr(inner, "base_env", None)
        if inner is None:
            raise ConfigError(
                f"{type(env).__name__} cannot be drawn, expected a VMAS world; leave out the GIF."
            )
    return inner


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
