"""Builds PettingZoo's worlds from a name, an object or a factory."""

from __future__ import annotations

import contextlib
import copy
import inspect
import os
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

from torchrl_marl.envs.pettingzoo.drawing import takes_mode
from torchrl_marl.envs.pettingzoo.library import Backend, by_name, continuous_argument, of_module
from torchrl_marl.errors import ConfigError

__all__ = ["Backend", "WorldMaker", "has_turns", "maker_of"]


@dataclass(frozen=True)
class WorldMaker:
    """Makes one copy of a world at each call; can be sent to other processes.

    Args:
        name (str): of the world, in messages.
        create (callable): gives the world.
        kwargs (dict): its arguments.
    """

    name: str
    create: Callable[..., Any]
    kwargs: dict[str, Any] = field(default_factory=dict)

    def __call__(self) -> Any:
        with _quiet():
            try:
                return self.create(**self.kwargs)
            except TypeError as error:
                if "argument" not in str(error):
                    raise
                raise ConfigError(
                    f"{self.name} cannot be built with {self.kwargs} ({error}); "
                    "check the arguments of the world."
                ) from error


def maker_of(
    world: Any,
    backend: Backend,
    kwargs: dict[str, Any],
    continuous: bool | None,
    n_copies: int,
    drawn: bool = False,
) -> WorldMaker:
    """Returns the maker of a world's copies.

    Args:
        world (str, module, callable or world): its name, what makes it, or itself.
        backend ("auto", "parallel" or "aec"): which of a named world's two forms.
        kwargs (dict): arguments of the world.
        continuous (bool, optional): kind of actions, where the world has both.
        n_copies (int): how many are made.
        drawn (bool): they are built so that they draw themselves, where they can be.

    Raises:
        ConfigError: an unknown name, a package that is not installed, a world that cannot be
            copied.
        MissingExtraError: a package of an extra is not installed.
    """
    if backend not in ("auto", "parallel", "aec"):
        raise ConfigError(f"backend is {backend!r}, expected 'auto', 'parallel' or 'aec'.")
    if isinstance(world, str):
        with _quiet():
            creator, own = by_name(world, backend)
        kwargs = {**own, **_mode(creator, drawn), **kwargs}
        return WorldMaker(
            world, creator, {**continuous_argument(creator, continuous, kwargs), **kwargs}
        )
    if isinstance(world, ModuleType):
        creator = of_module(world, backend)
        return WorldMaker(world.__name__, creator, {**_mode(creator, drawn), **kwargs})
    if hasattr(world, "reset") and hasattr(world, "step") and not inspect.isclass(world):
        return _of_object(world, kwargs, n_copies)
    if callable(world):
        kwargs = {**_mode(world, drawn), **kwargs}
        return WorldMaker(getattr(world, "__name__", type(world).__name__), world, kwargs)
    raise ConfigError(
        f"the world is a {type(world).__name__}, expected a name such as "
        "'mpe2/simple_spread_v3', a PettingZoo world or a callable that makes one."
    )


def _mode(creator: Callable[..., Any], drawn: bool) -> dict[str, Any]:
    """Returns the argument by which a world draws itself, where it takes it."""
    return {"render_mode": "rgb_array"} if drawn and takes_mode(creator) else {}


def has_turns(world: Any) -> bool:
    """Returns whether a world is AEC: its agents move one after another."""
    return hasattr(type(world), "last") or hasattr(type(world), "agent_iter")


def _of_object(world: Any, kwargs: dict[str, Any], n_copies: int) -> WorldMaker:
    name = type(getattr(world, "unwrapped", world)).__name__
    if kwargs:
        raise ConfigError(
            f"PettingZooEnv takes {', '.join(sorted(kwargs))} with a name or a factory only; "
            f"{name} is built already."
        )
    if n_copies == 1:
        return WorldMaker(name, _Given(world))
    try:
        copy.deepcopy(world)
    except Exception as error:
        raise ConfigError(
            f"{name} cannot be copied {n_copies} times ({type(error).__name__}: {error}); "
            "give a callable that makes one instead."
        ) from error
    return WorldMaker(name, _Copied(world))


@dataclass(frozen=True)
class _Given:
    world: Any

    def __call__(self) -> Any:
        return self.world


@dataclass(frozen=True)
class _Copied:
    world: Any

    def __call__(self) -> Any:
        return copy.deepcopy(self.world)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Suppresses greetings, windows and deprecations while worlds are imported and built."""
    ours = {"PYGAME_HIDE_SUPPORT_PROMPT": "hide", "SDL_VIDEODRIVER": "dummy"}
    added = {key: value for key, value in ours.items() if key not in os.environ}
    os.environ.update(added)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        for key in added:
            os.environ.pop(key, None)
