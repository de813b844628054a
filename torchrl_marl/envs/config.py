"""Settings of an environment."""

from __future__ import annotations

import importlib.machinery
import os
import sys
from dataclasses import dataclass, field
from typing import Annotated, Any

from torchrl_marl.envs.libraries import DEFAULT_LIBRARY, LIBRARIES, Library
from torchrl_marl.errors import ConfigError, quoted
from torchrl_marl.settings import Arguments, Count, Formerly, OneOf, Positive, Range, ReadWhere
from torchrl_marl.settings.formatting import listed

__all__ = ["OWN_ENVIRONMENT", "EnvConfig", "is_module", "own_environment_hint"]

OWN_ENVIRONMENT = "module:Class"
"""Stands for any environment of one's own; ``path/to/file.py:Class`` is one, too."""


def is_module(name: str) -> bool:
    """Whether a name is that of a module that could be imported, but for Python's own.

    Looks for it where ``python -m`` would; imports nothing.
    """
    top = name.partition(".")[0]
    if not name.replace(".", "").isidentifier() or top in sys.stdlib_module_names:
        return False
    finder = importlib.machinery.PathFinder
    return finder.find_spec(top, [os.getcwd(), *sys.path]) is not None


def own_environment_hint(name: str) -> str:
    """Returns how an environment of one's own is named, where a name is a module or
    ``module:Class``.

    Imports nothing.

    Examples:
        >>> own_environment_hint("mine:Reach")
        'an environment of your own is a library: use env.library=mine:Reach; '
        >>> own_environment_hint("balance")
        ''
    """
    place, colon, kind = name.partition(":")
    if not colon and not is_module(name):
        return ""
    return f"an environment of your own is a library: use env.library={place}:{kind or 'MyEnv'}; "


class _NotAModule:
    """A file or module defines several classes, so the name must contain the environment's class."""

    def misfit(self, key: str, value: Any, default: Any) -> str | None:
        """Returns what to write behind the path of a file, or the name of a module."""
        file = value.endswith(".py")
        named = value in LIBRARIES.names() or LIBRARIES.advice(value) is not None
        if not file and (named or not is_module(value)):
            return None
        return (
            f"{key} is {quoted(value)}, expected what makes the environment behind the "
            f"{'file' if file else 'module'}, such as {key}={value}:MyEnv."
        )


class _TakenBy(ReadWhere):
    """A setting that some libraries' adapters read, and environments of one's own."""

    def __init__(self, setting: str) -> None:
        self.key, self.but, self.of = "library", False, ()
        self._setting = setting

    @property
    def values(self) -> tuple[str, ...]:  # type: ignore[override]
        """Returns the libraries, and the form of the names of environments of one's own."""
        taking = (name for name, library in LIBRARIES.items() if self._setting in library.settings)
        return (*taking, OWN_ENVIRONMENT)


@dataclass(frozen=True)
class EnvConfig:
    """Which environment is played, and how many copies of it side by side."""

    library: Annotated[
        str, _NotAModule(), OneOf(LIBRARIES.words, form=OWN_ENVIRONMENT, advice=LIBRARIES.advice)
    ] = DEFAULT_LIBRARY
    """Where the environment comes from; or an environment of your own, ``module:Class`` or
    ``path/to/file.py:Class``."""
    name: str = "balance"
    """World of the library, such as ``balance`` or ``mpe2/simple_spread_v3``; for VMAS also the
    path of a scenario's Python file."""
    num_envs: Annotated[Count, Formerly("n_envs")] = 64
    """Number E of vectorized envs."""
    max_steps: Annotated[Count | None, _TakenBy("max_steps")] = 100
    """Time limit of an episode (``truncated``); null for none."""
    continuous_actions: bool = True
    """Continuous or discrete actions, where the scenario has both."""
    state: str | None = None
    """What a central critic may see as ``"state"``: ``observations`` (of all agents), ``world``
    (the environment's own state, where it has one) or null."""
    info: Annotated[bool, _TakenBy("info")] = False
    """Whether the scenario's info is computed and collected."""
    group_map: Annotated[dict[str, Any], _TakenBy("group_map")] = field(default_factory=dict)
    """Group -> names of its agents, such as ``{team: [speaker_0, listener_0]}``; empty: by the
    library's own rule (VMAS: the names' prefixes)."""
    workers: Annotated[int, Range(0), _TakenBy("workers")] = 0
    """Processes in which the copies of an environment written in Python run; 0: in this one."""
    worker_timeout: Annotated[
        Positive, _TakenBy("worker_timeout"), ReadWhere("workers", 0, but=True)
    ] = 60.0
    """Seconds after which a worker that does not answer is an error."""
    restart_workers: Annotated[bool, _TakenBy("restart_workers")] = False
    """Start a worker that died or hangs anew, and count it, instead of stopping."""
    kwargs: Annotated[dict[str, Any], Arguments("library", LIBRARIES)] = field(default_factory=dict)
    """Arguments of the environment, such as ``n_agents``."""

    @property
    def record(self) -> Library | None:
        """The record of its library; None for an environment of one's own."""
        return LIBRARIES.find(self.library)

    @property
    def has_clients(self) -> bool:
        """Whether its simulators come as clients, and say only then what their agents are."""
        return self.record is not None and self.record.clients

    @property
    def is_stateless(self) -> bool:
        """Whether critics find no state, since none is asked for and its environments have none."""
        return (
            self.state is None
            and self.record is not None
            and self.record.states == ("observations",)
        )

    def check(self, at: str = "") -> None:
        """Refuses a state that the library does not have.

        Raises:
            ConfigError: naming the states that it gives.
        """
        library = self.record
        if self.state is None or library is None or self.state in library.states:
            return
        if not library.states:
            raise ConfigError(
                f"{at}state is {quoted(self.state)}, expected null, since {self.library} "
                f"environments have a state of their own; use {at}state=null."
            )
        raise ConfigError(
            f"{at}state is {quoted(self.state)}, expected {listed([*library.states, 'null'])}; "
            f"use {at}state={library.states[0]}."
        )
