"""Settings of an environment."""

from __future__ import annotations

import importlib.machinery
import os
import sys
from dataclasses import dataclass, field
from typing import Annotated, Any

from torchrl_marl.envs.libraries import DEFAULT_LIBRARY, LIBRARIES, Library
from torchrl_marl.envs.ranges import IsRanges
from torchrl_marl.errors import ConfigError, quoted
from torchrl_marl.settings import Arguments, Count, Formerly, OneOf, Positive, Range, ReadWhere
from torchrl_marl.settings.formatting import listed

__all__ = ["OWN_ENVIRONMENT", "EnvConfig", "is_module", "own_environment_hint"]

OWN_ENVIRONMENT = "module:Class"
"""Placeholder for the name of a custom environment; ``path/to/file.py:Class`` is also valid."""


def is_module(name: str) -> bool:
    """Returns True for the name of an importable module outside the standard library.

    Searches the path of ``python -m``; imports nothing.
    """
    top = name.partition(".")[0]
    if not name.replace(".", "").isidentifier() or top in sys.stdlib_module_names:
        return False
    finder = importlib.machinery.PathFinder
    return finder.find_spec(top, [os.getcwd(), *sys.path]) is not None


def own_environment_hint(name: str) -> str:
    """Returns advice if a name refers to a custom environment, otherwise an empty text.

    Recognizes names of modules and ``module:Class``; imports nothing.

    Examples:
        >>> own_environment_hint("mine:Reach")
        'a custom environment is a library: use env.library=mine:Reach; '
        >>> own_environment_hint("balance")
        ''
    """
    place, colon, kind = name.partition(":")
    if not colon and not is_module(name):
        return ""
    return f"a custom environment is a library: use env.library={place}:{kind or 'MyEnv'}; "


class _NotAModule:
    """Marks a setting that must not name a file or module without naming a class in it."""

    def misfit(self, key: str, value: Any, default: Any) -> str | None:
        """Returns an error message if a value names a file or module, but no class in it."""
        file = value.endswith(".py")
        named = value in LIBRARIES.names() or LIBRARIES.advice(value) is not None
        if not file and (named or not is_module(value)):
            return None
        return (
            f"{key} is {quoted(value)}, expected a class or function after the "
            f"{'file' if file else 'module'}, such as {key}={value}:MyEnv."
        )


class _ReadByLibraries(ReadWhere):
    """Marks a setting that only custom environments and some of the libraries read."""

    def __init__(self, setting: str) -> None:
        self.key, self.but, self.of = "library", False, ()
        self._setting = setting

    @property
    def values(self) -> tuple[str, ...]:  # type: ignore[override]
        """Returns the libraries that read the setting; ``"module:Class"`` means custom ones."""
        reading = (name for name, library in LIBRARIES.items() if self._setting in library.settings)
        return (*reading, OWN_ENVIRONMENT)


@dataclass(frozen=True)
class EnvConfig:
    """Settings of the environment and of its parallel copies."""

    library: Annotated[
        str, _NotAModule(), OneOf(LIBRARIES.words, form=OWN_ENVIRONMENT, advice=LIBRARIES.advice)
    ] = DEFAULT_LIBRARY
    """Library of the environment. A custom environment is given as ``module:Class`` or
    ``path/to/file.py:Class``."""
    name: str = "balance"
    """Name of the environment in its library, such as ``balance`` or ``mpe2/simple_spread_v3``.

    For VMAS, this can also be the path of a scenario's Python file."""
    num_envs: Annotated[Count, Formerly("n_envs")] = 64
    """Number of parallel copies of the environment."""
    max_steps: Annotated[Count | None, _ReadByLibraries("max_steps")] = 100
    """Number of steps after which an episode is truncated; null: no limit."""
    continuous_actions: bool = True
    """Continuous instead of discrete actions, in environments that support both."""
    state: str | None = None
    """Content of ``"state"``, an input of central critics: ``observations``, ``world`` or null.

    ``observations``: the observations of all agents. ``world``: the environment's own state.
    Null: environments that always have a state keep it; the others have no ``"state"``."""
    info: Annotated[bool, _ReadByLibraries("info")] = False
    """Compute the environment's ``info`` entries and collect them in the batch."""
    group_map: Annotated[dict[str, Any], _ReadByLibraries("group_map")] = field(
        default_factory=dict
    )
    """Names of the agents of each group, such as ``{team: [speaker_0, listener_0]}``.

    Empty: the library's grouping. VMAS groups agents by the prefixes of their names."""
    workers: Annotated[int, Range(0), _ReadByLibraries("workers")] = 0
    """Number of processes that run the copies of a Python environment; 0: the training process."""
    worker_timeout: Annotated[
        Positive, _ReadByLibraries("worker_timeout"), ReadWhere("workers", 0, but=True)
    ] = 60.0
    """Seconds after which a worker that does not answer counts as hanging."""
    restart_workers: Annotated[bool, _ReadByLibraries("restart_workers")] = False
    """Restart workers that crash or hang, instead of stopping the run. The metric
    ``worker_restarts`` counts the restarts."""
    kwargs: Annotated[dict[str, Any], Arguments("library", LIBRARIES)] = field(default_factory=dict)
    """Keyword arguments of the environment, such as ``n_agents``."""
    randomize: Annotated[dict[str, Any], IsRanges()] = field(default_factory=dict)
    """Values that each new training episode draws, such as ``{agent_mass: [0.7, 1.3]}``.

    A value is a number, ``[low, high]`` or ``[low, high, log]``. ``observation_noise``,
    ``observation_delay``, ``action_noise`` and ``action_delay`` work in all environments; others
    are parameters of the environment."""

    reward_scale: Positive = 1.0
    """Factor of the rewards that learners and ``metrics.csv`` see. Evaluations report the
    environment's own rewards."""
    other_play: bool = False
    """Let each agent draw a symmetry of the environment in every training episode (Other-Play).

    A symmetry is an order of labels, such as colors. Evaluations draw none. For environments with
    symmetries: ``toy/matching_levers``, JaxMARL's Hanabi and OvercookedV2."""

    @property
    def record(self) -> Library | None:
        """Description of the environment's library; None for a custom environment."""
        return LIBRARIES.find(self.library)

    @property
    def has_clients(self) -> bool:
        """True if the simulators connect as clients; each client then declares its agents."""
        return self.record is not None and self.record.clients

    @property
    def is_stateless(self) -> bool:
        """True if environments return no ``"state"``, as none is requested and none is built in."""
        return (
            self.state is None
            and self.record is not None
            and self.record.states == ("observations",)
        )

    def check(self, at: str = "") -> None:
        """Raises an error for a ``state`` or ``randomize`` that the library does not have.

        Raises:
            ConfigError: unknown state; the message lists the library's states. Or ``randomize`` is
                given for simulators that connect as clients.
        """
        if self.randomize and self.has_clients:
            raise ConfigError(
                f"{at}randomize is {quoted(self.randomize)}, but the simulators are clients of "
                f"{self.library}; randomize in the client, and leave {at}randomize out."
            )
        if self.other_play and self.has_clients:
            raise ConfigError(
                f"{at}other_play is true, but the simulators are clients of {self.library}, which "
                f"declare no symmetries; leave {at}other_play out."
            )
        library = self.record
        if self.state is None or library is None or self.state in library.states:
            return
        if not library.states:
            raise ConfigError(
                f"{at}state is {quoted(self.state)}, expected null, since {self.library} "
                f"environments decide themselves whether they have a state; use {at}state=null."
            )
        raise ConfigError(
            f"{at}state is {quoted(self.state)}, expected {listed([*library.states, 'null'])}; "
            f"use {at}state={library.states[0]}."
        )
