"""The libraries of worlds: what is known of each before it is imported, and users' own.

Nothing here imports torch, nor a library of worlds.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from importlib.metadata import entry_points
from typing import Any

from torchrl_marl.envs.config import EnvConfig
from torchrl_marl.errors import ConfigError, nearest, quoted

__all__ = [
    "LIBRARIES",
    "Library",
    "check_world",
    "find_library",
    "library_names",
    "library_of",
    "refuse_repeated",
    "register_library",
]

LIBRARIES: dict[str, str | Library] = {
    "vmas": "torchrl_marl.envs.vmas.library:LIBRARY",
    "pettingzoo": "torchrl_marl.envs.pettingzoo.library:LIBRARY",
    "jaxmarl": "torchrl_marl.envs.jaxmarl.library:LIBRARY",
    "isaaclab": "torchrl_marl.envs.isaaclab.library:LIBRARY",
    "toy": "torchrl_marl.envs.toy.library:LIBRARY",
}
"""Name of a library -> its record, or where that is: ``module:NAME``."""

# Settings that every adapter takes, and those of which the world itself knows what it has.
_OF_ALL = ("library", "name", "num_envs", "max_steps", "kwargs")
_SEEN_WHEN_BUILT = ("continuous_actions",)


@dataclass(frozen=True)
class Library:
    """What is known of a library of worlds before it is imported.

    Args:
        adapter (str): ``module:Class`` of the environment (or a function), called as
            ``adapter(name, seed=, device=, **settings, **env.kwargs)``.
        settings (tuple of str): those of :class:`EnvConfig` that the adapter takes; others are
            refused where they are set.
        of_objects (tuple of str): those of them that it takes around a world that is built, or
            around what makes one.
        states (tuple of str): what ``env.state`` may be, beside null.
        worlds (callable, optional): names of its worlds, or sentences about them.
        own_limit (bool): its worlds end by themselves, or say that they do not.
        owns (callable, optional): ``owns(world)`` tells whether an object is a world of it, or
            makes worlds.
        check (callable, optional): ``check(config)`` refuses a name or argument that it has not.
        foreign (callable, optional): ``foreign(config)`` returns the module or ``.py`` file that
            a name would run which is no known package's, or None.
        kwargs_name (str, optional): the argument under which ``env.kwargs`` are handed on; by
            default each under its own name.

    Examples:
        >>> find_library("vmas").states
        ('observations',)
    """

    adapter: str
    settings: tuple[str, ...] = ("num_envs", "max_steps", "state", "group_map")
    of_objects: tuple[str, ...] = ("num_envs", "max_steps", "state", "group_map")
    states: tuple[str, ...] = ("observations", "world")
    worlds: Callable[[], Sequence[str]] | None = None
    own_limit: bool = True
    owns: Callable[[Any], bool] | None = None
    check: Callable[[EnvConfig], None] | None = None
    foreign: Callable[[EnvConfig], str | None] | None = None
    kwargs_name: str | None = None

    def make(self, world: Any, settings: Mapping[str, Any], kwargs: Mapping[str, Any]) -> Any:
        """Returns the adapter around a world, which may be a name.

        Args:
            world (str or world): which.
            settings (mapping): arguments of the adapter.
            kwargs (mapping): arguments of the world.
        """
        module, _, name = self.adapter.partition(":")
        adapter = getattr(importlib.import_module(module), name)
        own = {self.kwargs_name: dict(kwargs)} if self.kwargs_name else kwargs
        return adapter(world, **settings, **own)

    def read(self, config: EnvConfig, *, of_object: bool = False) -> dict[str, Any]:
        """Returns the arguments of the adapter that a run's settings hold.

        Args:
            config (EnvConfig): the settings.
            of_object (bool): around a world that is built, or what makes one.
        """
        read = {
            key: getattr(config, key)
            for key in self.settings
            if key in self.of_objects or not of_object
        }
        if "group_map" in read:
            read["group_map"] = dict(config.group_map) or None
        return read

    def refuse_unread(self, config: EnvConfig) -> None:
        """Refuses settings that the adapter does not take, or that are arguments of no world.

        Raises:
            ConfigError: naming the setting.
        """
        if self.kwargs_name is None:
            refuse_repeated(config)
        for field in fields(EnvConfig):
            if field.name in {*self.settings, *_OF_ALL, *_SEEN_WHEN_BUILT, "state"}:
                continue
            value, default = getattr(config, field.name), getattr(EnvConfig(), field.name)
            if value != default:
                use = str(default).lower() if isinstance(default, bool) else default
                raise ConfigError(
                    f"env.{field.name} is {quoted(value)}, but worlds of {config.library} do not "
                    f"take it; use env.{field.name}={use}."
                )


def check_world(config: EnvConfig) -> None:
    """Refuses a library, a world or a setting of it that cannot be, before anything is built.

    Args:
        config (EnvConfig): of a known library's world.

    Raises:
        ConfigError: naming what was found, what was expected and the fix.
        MissingExtraError: the library is not installed.
    """
    library = find_library(config.library)
    if library.states and config.state not in (None, *library.states):
        raise ConfigError(
            f"env.state is {quoted(config.state)}, expected {', '.join(library.states)} or null; "
            "use env.state=observations."
        )
    if library.check is not None:
        library.check(config)
    library.refuse_unread(config)


def refuse_repeated(config: EnvConfig) -> None:
    """Refuses ``env.kwargs`` that are settings already.

    Raises:
        ConfigError: naming the first of them.
    """
    repeated = {field.name for field in fields(EnvConfig)}.intersection(config.kwargs)
    if repeated:
        name = min(repeated)
        raise ConfigError(
            f"env.kwargs has {name!r}, which is a setting of its own; set env.{name} instead."
        )


def register_library(name: str, library: Library) -> None:
    """Adds a library of worlds of one's own; its worlds are then ``"name/world"``.

    Installed packages do the same by an entry point ``name = "module:NAME"`` of the group
    ``torchrl_marl.libraries``, where ``NAME`` is a :class:`Library`.

    Args:
        name (str): as in ``env.library``.
        library (Library): its record.

    Raises:
        ConfigError: a name that is taken.

    Examples:
        >>> register_library("vmas", Library("mine:Env"))
        Traceback (most recent call last):
            ...
        torchrl_marl.errors.ConfigError: there is a library 'vmas' already; take another name.
    """
    if name in library_names():
        raise ConfigError(f"there is a library {quoted(name)} already; take another name.")
    LIBRARIES[name] = library


def library_names() -> tuple[str, ...]:
    """Returns the names of all libraries, those of installed packages last."""
    return tuple(dict.fromkeys([*LIBRARIES, *_of_packages()]))


def find_library(name: str) -> Library:
    """Returns the record of a library.

    Raises:
        ConfigError: an unknown name.
    """
    place = LIBRARIES.get(name) or _of_packages().get(name)
    if place is None:
        names = library_names()
        raise ConfigError(
            f"unknown library of environments {quoted(name)}; {nearest(name, names)}expected one "
            f"of {', '.join(names)}; worlds of PettingZoo are called 'pettingzoo/package/world'."
        )
    if isinstance(place, str):
        module, _, attribute = place.partition(":")
        place = getattr(importlib.import_module(module), attribute)
    if not isinstance(place, Library):
        raise ConfigError(
            f"library {quoted(name)} is a {type(place).__name__}, expected a "
            "torchrl_marl.envs.libraries.Library."
        )
    return place


def library_of(world: Any) -> str | None:
    """Returns the library of an object that is a world or makes worlds; None of all else.

    Examples:
        >>> library_of(3), library_of(lambda: "a world")
        (None, 'pettingzoo')
    """
    kind = world if inspect.isclass(world) else type(world)
    modules = {cls.__module__.partition(".")[0] for cls in kind.__mro__}
    if {"torchrl", "torchrl_marl"} & modules:
        return None
    # PettingZoo's is the widest: any class with reset and step.
    for name in sorted(library_names(), key=lambda name: name == "pettingzoo"):
        owns = find_library(name).owns
        if owns is not None and owns(world):
            return name
    return None


def _of_packages() -> dict[str, str]:
    return {point.name: point.value for point in entry_points(group="torchrl_marl.libraries")}
