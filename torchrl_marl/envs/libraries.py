"""Registry of the libraries of environments: a description of each, available before its import.

Imports neither torch nor a library. A new library is a folder with an adapter and a record, and
one line: below, by :func:`register_library`, or in the ``setup.py`` of a package of one's own::

    entry_points={"torchrl_marl.libraries": ["grid = my_package.library:LIBRARY"]}
"""

from __future__ import annotations

import importlib
import inspect
import textwrap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torchrl_marl.errors import ConfigError, MissingExtraError, nearest, quoted
from torchrl_marl.runtime.import_path import refuse_current
from torchrl_marl.settings.formatting import expectation, shown
from torchrl_marl.settings.registry import Registry

if TYPE_CHECKING:
    from torchrl_marl.envs.config import EnvConfig

__all__ = [
    "DEFAULT_LIBRARY",
    "LIBRARIES",
    "MAKERS_LIBRARY",
    "Libraries",
    "Library",
    "check_kinds",
    "environment_rows",
    "find_library",
    "library_of",
    "register_library",
]


DEFAULT_LIBRARY = "vmas"
"""The library of an environment that is named without one."""
MAKERS_LIBRARY = "pettingzoo"
"""The library of any function, or class with ``reset`` and ``step``, that no other one owns."""


@dataclass(frozen=True)
class Library:
    """Description of a library of environments, available before it is imported.

    Args:
        meaning (str): one line for ``torchrl-marl list settings``.
        adapter (str): ``"module:Class"`` of the environment (or a function), called as
            ``adapter(name, seed=, device=, **settings, **env.kwargs)``.
        settings (tuple of str): those of :class:`EnvConfig` that the adapter takes.
        of_objects (tuple of str): those of them that it takes around an environment that is built,
            or around what makes one.
        states (tuple of str): what ``env.state`` may be, beside null.
        environments (callable, optional): returns names of its environments; another name is
            refused.
        unlisted (bool): it has environments that ``worlds`` does not name, which are not refused.
        own_limit (bool): its environments end by themselves, or say that they do not.
        owns (callable, optional): ``owns(environment)`` tells whether an object is an environment
            of it, or makes environments.
        check (callable, optional): ``check(config)`` refuses a name or argument that it has not.
        foreign (callable, optional): ``foreign(config)`` returns the module or ``.py`` file that
            a name would run which is no known package's, or None.
        arguments (str, optional): ``"module:Class"`` of a dataclass with settings of the adapter
            itself that stand in ``env.kwargs``: their types, ranges and meanings.
        captured (bool): its environments' steps can be compiled, by the ``captured()`` of the
            adapter.
        drawn (bool): its adapter takes ``drawn=True``, for environments that draw themselves.
        clients (bool): its simulators come as clients, and say only then what their agents are.
        files (bool): an environment's name may be the path of a Python file.
        one_per_process (bool): a process can hold one simulation of it only.
        collector (str, optional): ``"module:function"`` that makes the collector of a run on its
            environments, called as ``collector(config, env, policy, remembers, asked)``.
        declared (str, optional): ``"module:function"`` that returns a run's settings with what its
            environments declare about themselves, called as ``declared(config, env)``.
        packages (tuple of str): that its adapter imports; they are never the current folder's.
        kwargs_name (str, optional): the argument as which ``env.kwargs`` are handed on; by
            default each under its own name.

    Examples:
        >>> find_library("vmas").states
        ('observations',)
    """

    meaning: str
    adapter: str
    settings: tuple[str, ...] = ("num_envs", "max_steps", "state", "group_map")
    of_objects: tuple[str, ...] = ("num_envs", "max_steps", "state", "group_map")
    states: tuple[str, ...] = ("observations", "world")
    environments: Callable[[], Sequence[str]] | None = None
    unlisted: bool = False
    own_limit: bool = True
    owns: Callable[[Any], bool] | None = None
    check: Callable[[EnvConfig], None] | None = None
    foreign: Callable[[EnvConfig], str | None] | None = None
    arguments: str | None = None
    captured: bool = False
    drawn: bool = False
    clients: bool = False
    files: bool = False
    one_per_process: bool = False
    kwargs_name: str | None = None
    packages: tuple[str, ...] = ()
    collector: str | None = None
    declared: str | None = None

    def make(self, env: Any, settings: Mapping[str, Any], kwargs: Mapping[str, Any]) -> Any:
        """Returns the adapter around an environment, which may be a name.

        Args:
            environment (str or environment): which.
            settings (mapping): arguments of the adapter.
            kwargs (mapping): arguments of the environment.
        """
        for package in self.packages:
            refuse_current(package)
        module, _, name = self.adapter.partition(":")
        adapter = getattr(importlib.import_module(module), name)
        own = {self.kwargs_name: dict(kwargs)} if self.kwargs_name else kwargs
        return adapter(env, **settings, **own)

    def check_environment(self, config: EnvConfig) -> None:
        """Refuses a name or an argument that the library does not have.

        Args:
            config (EnvConfig): the settings.

        Raises:
            ConfigError: naming what is unknown and what comes nearest.
        """
        if self.check is not None:
            self.check(config)
        elif self.environments is not None and not self.unlisted:
            names = self.environments()
            if config.name not in names:
                raise ConfigError(
                    f"unknown environment {quoted(config.name)} of {config.library}; "
                    f"{nearest(config.name, names)}expected one of {', '.join(names)}."
                )

    def read(self, config: EnvConfig, *, of_object: bool = False) -> dict[str, Any]:
        """Returns the arguments of the adapter that a run's settings hold.

        Args:
            config (EnvConfig): the settings.
            of_object (bool): around an environment that is built, or what makes one.
        """
        names = self.of_objects if of_object else self.settings
        read = {name: getattr(config, name) for name in names}
        if "group_map" in read:
            read["group_map"] = dict(config.group_map) or None
        return read


_ZOO = ("magent2", "sisl", "butterfly", "classic", "atari")
_SMAX = "SMAC's battles are there in JAX, as SMAX: use env=jaxmarl/HeuristicEnemySMAX"
_MPE = "use env=pettingzoo/mpe2/simple_spread_v3"
_ROBOTS = "they are in gymnasium_robotics: use env=pettingzoo/gymnasium_robotics/Ant"
_TORCHRL = "hand an environment of TorchRL over in Python: train(RECIPE, env={})".format
# Where environments are that people look for under another library's name.
_ELSEWHERE = {
    **dict.fromkeys(("smac", "smacv2", "smax", "starcraft"), _SMAX),
    **dict.fromkeys(("mpe", "mpe2"), _MPE),
    **dict.fromkeys(("mujoco", "mamujoco", "gymnasium_robotics"), _ROBOTS),
    "overcooked": "it is in jaxmarl: use env=jaxmarl/overcooked",
    "hanabi": "it is in jaxmarl: use env=jaxmarl/hanabi",
    **{name: f"it is in pettingzoo: use env=pettingzoo/{name}/ENVIRONMENT" for name in _ZOO},
    **dict.fromkeys(("isaac", "isaacsim", "isaacgym"), "use env.library=isaaclab"),
    **dict.fromkeys(("gym", "gymnasium"), f"theirs have one agent each; of teams {_MPE}"),
    "openspiel": _TORCHRL("OpenSpielEnv(...)"),
    "meltingpot": _TORCHRL("MeltingpotEnv(...)"),
    "torchrl": _TORCHRL("..."),
}


class Libraries(Registry[Library]):
    """Registry of libraries; the variants of ``env.kwargs``."""

    def words(self) -> dict[str, str]:
        """Returns the name and the summary of every library."""
        return {name: library.meaning for name, library in self.items()}

    def advice(self, word: str) -> str | None:
        """Returns where the environments are of a library of another name, or None."""
        return _ELSEWHERE.get(word.lower())

    def hook(self, word: str, name: str) -> Any:
        """Returns what a library brings for training, ``collector`` or ``declared``; None without.

        Args:
            word (str): the library's name, as in ``env.library``.
            name (str): which.
        """
        library = self.find(word)
        place = None if library is None else getattr(library, name)
        return None if place is None else self.load(word, place)

    def schema(self, word: str) -> type | None:
        """Returns the dataclass of the adapter's own arguments, or None where it has none."""
        library = self.find(word)
        if library is None or library.arguments is None:
            return None
        return self.load(word, library.arguments)


LIBRARIES = Libraries(
    "library of worlds",
    Library,
    "torchrl_marl.libraries",
    {
        "vmas": "torchrl_marl.envs.vmas.library:LIBRARY",
        "pettingzoo": "torchrl_marl.envs.pettingzoo.library:LIBRARY",
        "jaxmarl": "torchrl_marl.envs.jaxmarl.library:LIBRARY",
        "isaaclab": "torchrl_marl.envs.isaaclab.library:LIBRARY",
        "toy": "torchrl_marl.envs.toy.library:LIBRARY",
        "external": "torchrl_marl.apps.external.library:LIBRARY",
    },
)
"""Every library of environments that there is."""


def register_library(name: str, library: Library) -> None:
    """Registers a library of environments; its environments are then ``"name/world"``.

    Args:
        name (str): as in ``env.library``.
        library (Library): its record.

    Raises:
        ConfigError: a name that is taken.

    Examples:
        >>> register_library("grid", Library("squares", "my_package.grid:GridEnv"))
        >>> find_library("grid").meaning
        'squares'
        >>> LIBRARIES.remove("grid")
    """
    LIBRARIES.add(name, library)


def find_library(name: str) -> Library:
    """Returns the record of a library.

    Raises:
        ConfigError: an unknown name.
    """
    library = LIBRARIES.find(name)
    if library is None:
        names, advice = LIBRARIES.names(), LIBRARIES.advice(name)
        near = ", "
        if advice is None:
            near = f"; {nearest(name, names)}"
            advice = "worlds of PettingZoo are called 'pettingzoo/package/environment'"
        raise ConfigError(
            f"unknown library of environments {quoted(name)}{near}expected one of "
            f"{', '.join(names)}; {advice}."
        )
    return library


def check_kinds(arguments: Mapping[str, Any], defaults: Mapping[str, Any]) -> None:
    """Refuses texts for arguments whose defaults are numbers, or true or false.

    Args:
        arguments (mapping): ``env.kwargs``.
        defaults (mapping): name of an argument -> its default, as far as they are known.

    Raises:
        ConfigError: naming the argument.

    Examples:
        >>> check_kinds({"n_agents": 3, "payoff": "climbing"}, {"n_agents": 2, "payoff": "penalty"})
    """
    for name in arguments.keys() & defaults.keys():
        value, default = arguments[name], defaults[name]
        if isinstance(value, str) and isinstance(default, (bool, int, float)):
            kind = expectation(type(default))
            raise ConfigError(
                f"env.kwargs.{name} is {quoted(value)}, expected {kind}; "
                f"use env.kwargs.{name}={shown(default)}."
            )


def library_of(env: Any) -> str | None:
    """Returns the library of an environment or of its maker; None for other objects.

    Examples:
        >>> library_of(3), library_of(lambda: "an environment")
        (None, 'pettingzoo')
    """
    kind = env if inspect.isclass(env) else type(env)
    modules = {cls.__module__.partition(".")[0] for cls in kind.__mro__}
    if {"torchrl", "torchrl_marl"} & modules:
        return None
    # Its test is the widest, so it comes last.
    for name in sorted(LIBRARIES.names(), key=lambda name: name == MAKERS_LIBRARY):
        owns = find_library(name).owns
        if owns is not None and owns(env):
            return name
    return None


def environment_rows() -> list[tuple[str, str]]:
    """Returns rows for ``torchrl-marl list environments``: library and names of its environments."""
    rows = []
    for name, library in LIBRARIES.items():
        try:
            text = (
                library.meaning
                if library.environments is None
                else ", ".join(library.environments())
            )
        except MissingExtraError as error:
            text = str(error)
        lines = textwrap.wrap(text, 88, break_on_hyphens=False)
        rows += [(name, lines[0]), *(("", line) for line in lines[1:])]
    own = "an environment of your own, as env.library; path/to/file.py:Class will do, too"
    return [*rows, ("module:Class", own)]
