"""Scenes: pictures of an environment that are made of shapes."""

from __future__ import annotations

import contextlib
import inspect
import math
from abc import abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias, get_args

import numpy as np
from tensordict import TensorDictBase
from torchrl.envs import EnvBase

from torchrl_marl.errors import ConfigError, nearest, quoted

__all__ = [
    "AGENT_COLORS",
    "FinalFrames",
    "Picture",
    "Shape",
    "Stage",
    "check_scene",
    "scene",
    "stage",
    "text",
    "watched",
]

AGENT_COLORS = (
    (0.35, 0.50, 0.80),
    (0.90, 0.55, 0.25),
    (0.35, 0.65, 0.40),
    (0.60, 0.45, 0.75),
    (0.80, 0.40, 0.40),
    (0.35, 0.65, 0.70),
)
"""Red, green and blue of the agents of a team, in order; with more agents they repeat."""

Role: TypeAlias = Literal["agent", "object", "goal", "joint"]
Kind: TypeAlias = Literal["circle", "box", "line", "text"]


@dataclass(frozen=True)
class Shape:
    """Position and look of one entity in a picture.

    Roles: ``"agent"``, ``"object"`` (a landmark or obstacle with collisions), ``"goal"`` (a
    landmark without collisions) and ``"joint"`` (a connection of two entities). Kinds:
    ``"circle"``, ``"box"``, ``"line"`` and ``"text"``. Sizes are in the environment's units; at
    ``rotation=0`` the length is measured along x.

    Raises:
        ConfigError: unknown role or kind.

    Examples:
        >>> gray = (0.5, 0.5, 0.5)
        >>> Shape("rock", "object", "box", 1.0, 0.0, 0.0, gray, length=2.0, width=1.0).reach
        (1.0, 0.5)
    """

    name: str
    """Name of the entity."""
    role: Role
    """Role of the entity; see above."""
    kind: Kind
    """Geometric form; use :func:`text` to make a text."""
    x: float
    """Horizontal position of the center."""
    y: float
    """Vertical position of the center."""
    rotation: float
    """Angle in radians, counterclockwise."""
    color: tuple[float, float, float]
    """RGB color, each from 0 to 1."""
    radius: float = 0.0
    """Radius of a circle."""
    length: float = 0.0
    """Length of a box or line."""
    width: float = 0.0
    """Width of a box."""
    hollow: bool = False
    """True to draw only the outline."""
    text: str = ""
    """Words of a text, drawn upright at the center, in letters as high as ``width``."""
    visible: bool = True
    """False hides the entity."""

    def __post_init__(self) -> None:
        for what, known in (("role", get_args(Role)), ("kind", get_args(Kind))):
            found = vars(self)[what]
            if found not in known:
                raise ConfigError(
                    f"shape {quoted(self.name)} has the {what} {quoted(found)}, expected one of "
                    f"{', '.join(known)}; {nearest(str(found), known)}use one of these in scene()."
                )

    @property
    def reach(self) -> tuple[float, float]:
        """Half the extent along x and y."""
        if self.kind == "circle":
            return self.radius, self.radius
        if self.kind == "text":
            return 0.3 * self.width * len(self.text), self.width / 2
        cos, sin = abs(math.cos(self.rotation)), abs(math.sin(self.rotation))
        return (
            (self.length * cos + self.width * sin) / 2,
            (self.length * sin + self.width * cos) / 2,
        )


@dataclass(frozen=True)
class Stage:
    """Visible part of the plane."""

    name: str
    """Name of the scenario."""
    center: tuple[float, float]
    """Center of the view."""
    half_size: tuple[float, float]
    """Half the width and height of the scenario's view."""
    border: tuple[float, float] | None
    """Half the width and height of the box that no entity's center leaves; None without bounds."""


Picture: TypeAlias = Sequence[Shape] | np.ndarray | str


def text(
    name: str,
    words: str,
    x: float,
    y: float,
    *,
    height: float = 0.3,
    color: tuple[float, float, float] = (0.25, 0.25, 0.25),
    visible: bool = True,
) -> Shape:
    """Returns a shape that shows a text.

    Args:
        name (str): name of the shape.
        words (str): words to show.
        x, y (float): position of the center.

    Keyword Args:
        height (float): height of the letters, in the environment's units.
        color (tuple of float): RGB color, each from 0 to 1.
        visible (bool): False hides the text.
    """
    look: dict[str, Any] = {"width": height, "text": words, "visible": visible}
    return Shape(name, "object", "text", x, y, 0.0, color, **look)


def scene(env: EnvBase, index: int = 0, step: TensorDictBase | None = None) -> Picture:
    """Returns a picture of one env.

    Args:
        env (EnvBase): environment with a method ``scene``, such as
            :class:`~torchrl_marl.envs.VmasEnv`; it may be wrapped in transforms.
        index (int): index of the env.
        step (TensorDictBase, optional): last step of that env, for environments that draw
            it, too.

    Raises:
        ConfigError: the environment cannot be drawn.

    Examples:
        >>> from torchrl_marl.envs import VmasEnv
        >>> env = VmasEnv("balance", num_envs=2, seed=0)
        >>> [shape.name for shape in scene(env)]
        ['agent_0', 'agent_1', 'agent_2', 'goal', 'package', 'line', 'floor']
    """
    draw = _find_drawable(env).scene
    return draw(index, step) if len(inspect.signature(draw).parameters) > 1 else draw(index)


def stage(env: EnvBase) -> Stage | None:
    """Returns an environment's view and border; None if it defines none, so all must fit in.

    Args:
        env (EnvBase): environment with a method ``scene``.

    Raises:
        ConfigError: the environment cannot be drawn.
    """
    found = getattr(_find_drawable(env), "stage", None)
    return None if found is None else found()


def check_scene(env: EnvBase) -> None:
    """Raises an error if an environment cannot be drawn; call it before the first step.

    Raises:
        ConfigError: the environment cannot be drawn; the message names what is missing.
    """
    check = getattr(_find_drawable(env), "check_scene", None)
    if check is not None:
        check()


@contextlib.contextmanager
def watched(env: EnvBase, number: int) -> Iterator[None]:
    """Context in which the last picture of an episode is kept if its env is reset in the step.

    Args:
        env (EnvBase): environment with a method ``scene``.
        number (int): number of envs to draw, counted from the first.
    """
    watch = getattr(_find_drawable(env), "watch", None)
    if watch is None:
        yield
        return
    watch(number)
    try:
        yield
    finally:
        watch(0)


def _find_drawable(env: EnvBase) -> Any:
    inner: Any = env
    while inner is not None:
        if callable(getattr(type(inner), "scene", None)):
            return inner
        env, inner = inner, getattr(inner, "base_env", None)
    raise ConfigError(
        f"{type(env).__name__} cannot be drawn, expected an environment with a method "
        "scene(index) that returns shapes, pixels or a text; write one, or leave the animation out."
    )


class FinalFrames:
    """Mixin that keeps pictures of the first envs after a step, before ended envs are reset.

    An adapter defines ``_draw(index)``. It calls ``_keep_frames()`` between the simulator's step
    and the reset of ended envs, and ``_drop_frames()`` when all envs are reset.
    """

    _watched = 0
    _frames: tuple[Any, ...] = ()

    def watch(self, number: int) -> None:
        """Draws the first envs in each step from now on.

        Args:
            number (int): number of envs to draw; 0 stops the drawing.
        """
        self._watched, self._frames = number, ()

    def scene(self, index: int = 0) -> Picture:
        """Returns a picture of one env: shapes, pixels or a text.

        Args:
            index (int): index of the env. If its episode has just ended and the env is watched, the
                picture shows the last state of that episode.
        """
        return self._frames[index] if self._frames else self._draw(index)

    def _keep_frames(self) -> None:
        if self._watched:
            self._frames = tuple(self._draw(i) for i in range(self._watched))

    def _drop_frames(self) -> None:
        self._frames = ()

    @abstractmethod
    def _draw(self, index: int) -> Picture: ...
