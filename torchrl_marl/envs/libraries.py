"""Registry of environment libraries; it describes a library without importing it.

Imports neither torch nor a library. A new library is a folder with an adapter and a
:class:`Library`, its description. Register it in ``LIBRARIES`` below, with
:func:`register_library`, or in the ``setup.py`` of your package::

    entry_points={"torchrl_marl.libraries": ["grid = my_package.library:LIBRARY"]}
"""

from __future__ import annotations

import importlib
import inspect
import textwrap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torchrl_marl.errors import ConfigError, UserError, nearest, quoted
from torchrl_marl.runtime.import_path import check_not_in_current_folder
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
"""Library that is used if none is named."""
MAKERS_LIBRARY = "pettingzoo"
"""Library for functions, and for classes with ``reset`` and ``step``, that no other one owns."""


@dataclass(frozen=True)
class Library:
    """Description of an environment library, available before the library is imported.

    Args:
        meaning (str): one-line summary, shown by ``torchrl-marl list settings``.
        adapter (str): ``"module:Class"`` of the environment (or a function), called as
            ``adapter(name, seed=, device=, **settings, **env.kwargs)``.
        settings (tuple of str): names of the fields of :class:`EnvConfig` that the adapter takes.
        of_objects (tuple of str): those of ``settings`` that also apply to an existing environment,
            or to a function that makes one.
        states (tuple of str): valid values of ``env.state``, besides null.
        environments (callable, optional): function that returns the names of the environments.
            Other names are refused, unless ``unlisted`` is True.
        unlisted (bool): True to also accept names that ``environments`` does not list.
        own_limit (bool): the environments have their own time limit, so none is set by default.
        owns (callable, optional): ``owns(environment)`` returns True for this library's
            environments, and for functions that make them.
        check (callable, optional): ``check(config)`` raises an error for unknown names or
            arguments.
        foreign (callable, optional): ``foreign(config)`` returns the module or ``.py`` file of
            external code that a name would run, or None.
        arguments (str, optional): ``"module:Class"`` of a dataclass that defines the adapter's
            settings in ``env.kwargs``, with their types, ranges and docs.
        captured (bool): True if the steps can be captured and compiled. The adapter then has a
            method ``captured()``.
        drawn (bool): True if the adapter takes ``drawn=True``, for environments with their own
            renderer.
        clients (bool): True if the simulators connect as clients; each client declares its agents.
        files (bool): True if an environment's name may be the path of a Python file.
        one_per_process (bool): True if a process can run only one simulation.
        collector (str, optional): ``"module:function"`` that makes the collector of a run, called
            as ``collector(config, env, policy, remembers, asked)``.
        declared (str, optional): ``"module:function"`` that adds an environment's declared
            settings to the settings of a run, called as ``declared(config, env)``.
        packages (tuple of str): packages that the adapter imports. They are never imported from the
            current folder.
        kwargs_name (str, optional): the adapter's argument that takes ``env.kwargs`` as a dict. By
            default the entries of ``env.kwargs`` are passed as keyword arguments.

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
        """Builds the adapter of an environment.

        Args:
            env (str or environment): the environment or its name.
            settings (mapping): arguments of the adapter.
            kwargs (mapping): arguments of the environment.
        """
        for package in self.packages:
            check_not_in_current_folder(package)
        module, _, name = self.adapter.partition(":")
        adapter = getattr(importlib.import_module(module), name)
        own = {self.kwargs_name: dict(kwargs)} if self.kwargs_name else kwargs
        return adapter(env, **settings, **own)

    def check_environment(self, config: EnvConfig) -> None:
        """Raises an error for a name or argument that the library does not have.

        Args:
            config (EnvConfig): the settings.

        Raises:
            ConfigError: unknown name or argument; the message names the nearest known one.
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
        """Returns those settings of a run that are arguments of the adapter.

        Args:
            config (EnvConfig): the settings.
            of_object (bool): True for an existing environment, or a function that makes one.
        """
        names = self.of_objects if of_object else self.settings
        read = {name: getattr(config, name) for name in names}
        if "group_map" in read:
            read["group_map"] = dict(config.group_map) or None
        return read


_PETTINGZOO_PACKAGES = ("magent2", "sisl", "butterfly", "classic", "atari")
_SMAX = "JaxMARL has SMAC's battles as SMAX: use env=jaxmarl/HeuristicEnemySMAX"
_MPE = "use env=pettingzoo/mpe2/simple_spread_v3"
_FORAGING = "it is in foraging: use env=foraging/lbf-8x8-2p-2f-coop or foraging/rware-tiny-4ag"
_ROBOTS = "its robots are in mujoco: use env=mujoco/ant"
_TORCHRL = "pass the TorchRL environment in Python: train(RECIPE, env={})".format
# Advice for names that users may try, but that are no registered library.
_ADVICE = {
    **dict.fromkeys(("smac", "smacv2", "smax", "starcraft"), _SMAX),
    **dict.fromkeys(("mpe", "mpe2"), _MPE),
    **dict.fromkeys(("mamujoco", "gymnasium_robotics"), _ROBOTS),
    **dict.fromkeys(("lbf", "lbforaging", "rware"), _FORAGING),
    "overcooked": "it is in jaxmarl: use env=jaxmarl/overcooked",
    "hanabi": "it is in jaxmarl: use env=jaxmarl/hanabi",
    **{
        name: f"it is in pettingzoo: use env=pettingzoo/{name}/ENVIRONMENT"
        for name in _PETTINGZOO_PACKAGES
    },
    **dict.fromkeys(("isaac", "isaacsim", "isaacgym"), "use env.library=isaaclab"),
    **dict.fromkeys(
        ("gym", "gymnasium"), f"their environments have one agent each; for a team {_MPE}"
    ),
    "openspiel": _TORCHRL("OpenSpielEnv(...)"),
    "meltingpot": _TORCHRL("MeltingpotEnv(...)"),
    "torchrl": _TORCHRL("..."),
}


class Libraries(Registry[Library]):
    """Registry of libraries; the chosen library determines the schema of ``env.kwargs``."""

    def advice(self, word: str) -> str | None:
        """Returns advice for a common name that is not registered; None for other names."""
        return _ADVICE.get(word.lower())

    def hook(self, word: str, name: str) -> Any:
        """Returns a library's training hook, or None.

        Args:
            word (str): the library's name, as in ``env.library``.
            name (str): ``"collector"`` or ``"declared"``.
        """
        library = self.find(word)
        place = None if library is None else getattr(library, name)
        return None if place is None else self.load(word, place)

    def schema(self, word: str) -> type | None:
        """Returns the dataclass of a library's adapter arguments; None if it has none."""
        library = self.find(word)
        if library is None or library.arguments is None:
            return None
        return self.load(word, library.arguments)


LIBRARIES = Libraries(
    "environment library",
    Library,
    "torchrl_marl.libraries",
    {
        "vmas": "torchrl_marl.envs.vmas.library:LIBRARY",
        "pettingzoo": "torchrl_marl.envs.pettingzoo.library:LIBRARY",
        "jaxmarl": "torchrl_marl.envs.jaxmarl.library:LIBRARY",
        "isaaclab": "torchrl_marl.envs.isaaclab.library:LIBRARY",
        "mujoco": "torchrl_marl.envs.mujoco.library:LIBRARY",
        "mjlab": "torchrl_marl.envs.mjlab.library:LIBRARY",
        "foraging": "torchrl_marl.envs.foraging.library:LIBRARY",
        "toy": "torchrl_marl.envs.toy.library:LIBRARY",
        "external": "torchrl_marl.apps.external.library:LIBRARY",
    },
)
"""All environment libraries."""


def register_library(name: str, library: Library) -> None:
    """Registers an environment library; its environments are then named ``"name/environment"``.

    Args:
        name (str): value of ``env.library`` that selects the library.
        library (Library): description of the library.

    Raises:
        ConfigError: the name is taken.

    Examples:
        >>> register_library("grid", Library("squares", "my_package.grid:GridEnv"))
        >>> find_library("grid").meaning
        'squares'
        >>> LIBRARIES.remove("grid")
    """
    LIBRARIES.add(name, library)


def find_library(name: str) -> Library:
    """Returns the description of a library.

    Raises:
        ConfigError: unknown library.
    """
    library = LIBRARIES.find(name)
    if library is None:
        names, advice = LIBRARIES.names(), LIBRARIES.advice(name)
        near = ", "
        if advice is None:
            near = f"; {nearest(name, names)}"
            advice = "PettingZoo's environments are named 'pettingzoo/package/environment'"
        raise ConfigError(
            f"unknown environment library {quoted(name)}{near}expected one of "
            f"{', '.join(names)}; {advice}."
        )
    return library


def check_kinds(arguments: Mapping[str, Any], defaults: Mapping[str, Any]) -> None:
    """Raises an error for an argument that is text although its default is a number or bool.

    Args:
        arguments (mapping): values of ``env.kwargs``.
        defaults (mapping): default of each argument, as far as it is known.

    Raises:
        ConfigError: an argument is text instead of a number or bool; the message names it.

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
    """Returns the library of an environment, or of a function that makes one.

    Returns None if no library owns the object.

    Examples:
        >>> library_of(3), library_of(lambda: "an environment")
        (None, 'pettingzoo')
    """
    kind = env if inspect.isclass(env) else type(env)
    modules = {cls.__module__.partition(".")[0] for cls in kind.__mro__}
    if {"torchrl", "torchrl_marl"} & modules:
        return None
    # PettingZoo accepts the most objects, so its test comes last.
    for name in sorted(LIBRARIES.names(), key=lambda name: name == MAKERS_LIBRARY):
        owns = find_library(name).owns
        if owns is not None and owns(env):
            return name
    return None


def environment_rows() -> list[tuple[str, str]]:
    """Returns pairs of library and environment, for ``torchrl-marl list environments``."""
    rows = []
    for name in LIBRARIES.names():
        lines = textwrap.wrap(_list_environments(name), 88, break_on_hyphens=False)
        rows += [(name, lines[0]), *(("", line) for line in lines[1:])]
    own = "a custom environment, as env.library; also path/to/file.py:Class"
    return [*rows, ("module:Class", own)]


def _list_environments(name: str) -> str:
    """Returns a library's environments, its description, or why it cannot be imported."""
    try:
        environments = find_library(name).environments
        return LIBRARIES.words()[name] if environments is None else ", ".join(environments())
    except UserError as error:
        return str(error)
