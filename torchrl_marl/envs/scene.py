"""Scenes of environments: what pictures of them show."""

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
    "LastPictures",
    "Picture",
    "Shape",
    "Stage",
    "check_scene",
    "scene",
    "stage",
    "text",
    "watched",
]

Role: TypeAlias = Literal["agent", "object", "goal", "joint"]
Kind: TypeAlias = Literal["circle", "box", "line", "text"]


@dataclass(frozen=True)
class Shape:
    """One entity of an environment at one time: its place and its look.

    Its ``role`` is ``"agent"``, ``"object"`` (a landmark or an obstacle that others run into),
    ``"goal"`` (a landmark that they do not run into) or ``"joint"`` (what ties two entities); its
    ``kind`` is ``"circle"``, ``"box"``, ``"line"`` or ``"text"``. Lengths are the environment's; a
    length lies along x where ``rotation`` is 0.

    Raises:
        ConfigError: another role or kind.

    Examples:
        >>> gray = (0.5, 0.5, 0.5)
        >>> Shape("rock", "object", "box", 1.0, 0.0, 0.0, gray, length=2.0, width=1.0).reach
        (1.0, 0.5)
    """

    name: str
    """The entity's name."""
    role: Role
    """An agent; a landmark that others run into; one that they do not; what ties two entities."""
    kind: Kind
    """The form; :func:`text` makes a text."""
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
    """Whether it is an outline."""
    text: str = ""
    """What is written, upright, in the middle of the form; of a text, in letters as high as its
    width."""
    visible: bool = True
    """Whether the environment shows the entity now."""

    def __post_init__(self) -> None:
        for what, known in (("role", get_args(Role)), ("kind", get_args(Kind))):
            found = vars(self)[what]
            if found not in known:
                raise ConfigError(
                    f"shape {quoted(self.name)} has the {what} {quoted(found)}, expected one of "
                    f"{', '.join(known)}; {nearest(str(found), known)}name one of these in scene()."
                )

    @property
    def reach(self) -> tuple[float, float]:
        """Returns half the extent along x and y."""
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
    """The part of the plane in which an environment plays."""

    name: str
    """The scenario's name."""
    center: tuple[float, float]
    """Middle of the view."""
    half_size: tuple[float, float]
    """Half the width and height of the view that the scenario's author chose."""
    border: tuple[float, float] | None
    """Half the width and height of the box that no entity's middle leaves, where there is one."""


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
    """Returns a text as a shape.

    Args:
        name (str): of the shape.
        words (str): what is written.
        x, y (float): its middle.

    Keyword Args:
        height (float): of its letters, in the environment's lengths.
        color (tuple of float): red, green and blue, from 0 to 1.
        visible (bool): whether it is shown now.
    """
    look: dict[str, Any] = {"width": height, "text": words, "visible": visible}
    return Shape(name, "object", "text", x, y, 0.0, color, **look)


def scene(env: EnvBase, index: int = 0, step: TensorDictBase | None = None) -> Picture:
    """Returns what one of the envs looks like.

    Args:
        env (EnvBase): an environment with a method ``scene``, such as
            :class:`~torchrl_marl.envs.VmasEnv`, also under transforms.
        index (int): which of its E envs.
        step (TensorDictBase, optional): the step of that env which led there.

    Raises:
        ConfigError: an environment that cannot be drawn.

    Examples:
        >>> from torchrl_marl.envs import VmasEnv
        >>> env = VmasEnv("balance", num_envs=2, seed=0)
        >>> [shape.name for shape in scene(env)]
        ['agent_0', 'agent_1', 'agent_2', 'goal', 'package', 'line', 'floor']
    """
    draw = _drawable(env).scene
    return draw(index, step) if len(inspect.signature(draw).parameters) > 1 else draw(index)


def stage(env: EnvBase) -> Stage | None:
    """Returns the view of an environment, and its border; None where all that is drawn is shown.

    Args:
        env (EnvBase): as :func:`scene` takes it.

    Raises:
        ConfigError: an environment that cannot be drawn.
    """
    found = getattr(_drawable(env), "stage", None)
    return None if found is None else found()


def check_scene(env: EnvBase) -> None:
    """Refuses environments that cannot be drawn, before anything is played.

    Raises:
        ConfigError: naming the environment, and what would let it be drawn.
    """
    check = getattr(_drawable(env), "check_scene", None)
    if check is not None:
        check()


@contextlib.contextmanager
def watched(env: EnvBase, number: int) -> Iterator[None]:
    """Lets environments that begin the next episode in the step that ends one keep its last
    picture.

    Args:
        env (EnvBase): as :func:`scene` takes it.
        number (int): how many of its envs are drawn, from the first on.
    """
    watch = getattr(_drawable(env), "watch", None)
    if watch is None:
        yield
        return
    watch(number)
    try:
        yield
    finally:
        watch(0)


def _drawable(env: EnvBase) -> Any:
    inner: Any = env
    while inner is not None:
        if callable(getattr(type(inner), "scene", None)):
            return inner
        env, inner = inner, getattr(inner, "base_env", None)
    raise ConfigError(
        f"{type(env).__name__} cannot be drawn, expected an environment with a method "
        "scene(index), which gives shapes, pixels or a text; write one, or leave the animation out."
    )


class LastPictures:
    """Keeps what the first envs look like after a step, before ended ones begin anew.

    An adapter gives ``_draw(index)`` and calls ``_look()`` between the step of its environment and
    the start of the next episodes, ``_forget()`` where all begin.
    """

    _watched = 0
    _pictures: tuple[Any, ...] = ()

    def watch(self, number: int) -> None:
        """Draws so many envs in each step from now on, from the first; 0 for none.

        Args:
            number (int): of envs.
        """
        self._watched, self._pictures = number, ()

    def scene(self, index: int = 0) -> Picture:
        """Returns what one of the envs looks like: shapes, pixels or a text.

        Args:
            index (int): which; after the end of an episode that is watched, its last state.
        """
        return self._pictures[index] if self._pictures else self._draw(index)

    def _look(self) -> None:
        if self._watched:
            self._pictures = tuple(self._draw(i) for i in range(self._watched))

    def _forget(self) -> None:
        self._pictures = ()

    @abstractmethod
    def _draw(self, index: int) -> Picture: ...
