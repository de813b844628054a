"""Drawing of worlds: entities as plain shapes, and the view of them."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal

from torchrl.envs import EnvBase

from torchrl_marl.errors import ConfigError

__all__ = ["Shape", "Stage", "scene", "stage"]


@dataclass(frozen=True)
class Shape:
    """One entity of a world at one time: its place and its look.

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
        """Returns half the extent along x and y."""
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
    """Returns the entities of one of the envs, always in the same order.

    Args:
        env (EnvBase): a world with a method ``scene(index)`` and a method ``stage()``, such as
            :class:`~torchrl_marl.envs.VmasEnv`, also under transforms.
        index (int): which of its E envs.

    Raises:
        ConfigError: a world that cannot be drawn.

    Examples:
        >>> from torchrl_marl.envs import VmasEnv
        >>> env = VmasEnv("balance", num_envs=2, seed=0)
        >>> [shape.name for shape in scene(env)]
        ['agent_0', 'agent_1', 'agent_2', 'goal', 'package', 'line', 'floor']
    """
    return _drawable(env).scene(index)


def stage(env: EnvBase) -> Stage:
    """Returns the view of a world, and its border.

    Args:
        env (EnvBase): as :func:`scene` takes it.

    Raises:
        ConfigError: a world that cannot be drawn.
    """
    return _drawable(env).stage()


def _drawable(env: EnvBase) -> Any:
    world, inner = env, env  # type: Any, Any
    while inner is not None:
        if callable(getattr(type(inner), "scene", None)):
            return inner
        world, inner = inner, getattr(inner, "base_env", None)
    raise ConfigError(
        f"{type(world).__name__} cannot be drawn, expected a VMAS world, or one with methods scene "
        "and stage; leave out the GIF."
    )
