"""Algorithms by their names: what each is, its settings and its learner. Imports no torch.

A new algorithm is a config, a learner and one line: below, by :func:`register_algorithm`, or in
the ``setup.py`` of a package of one's own, whose entry point names an :class:`Algorithm`::

    entry_points={"torchrl_marl.algorithms": ["reinforce = my_package.reinforce:ALGORITHM"]}
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from importlib import import_module
from importlib.metadata import EntryPoint, entry_points
from typing import Any

from torchrl_marl.errors import ConfigError, UserError, quoted
from torchrl_marl.learners.config import LearnerConfig
from torchrl_marl.settings import Tagged, overridden

__all__ = [
    "ALGORITHMS",
    "Algorithm",
    "Algorithms",
    "LearnerSettings",
    "group_config",
    "register_algorithm",
]

_ENTRY_POINTS = "torchrl_marl.algorithms"


@dataclass(frozen=True)
class Algorithm:
    """An algorithm: what it is, and where its settings and its learner are.

    Args:
        meaning (str): one line for ``torchrl-marl list algorithms``.
        config (str): ``"module:Class"`` of its settings, a :class:`LearnerConfig`.
        learner (str): ``"module:Class"`` of its learner, which is made as
            ``Learner(groups, config, team=, device=, execution=)``.
    """

    meaning: str
    config: str
    learner: str


_PPO = (
    "torchrl_marl.learners.config:OnPolicyConfig",
    "torchrl_marl.learners.on_policy:OnPolicyLearner",
)
_RANDOM = "torchrl_marl.learners.config:RandomConfig", "torchrl_marl.learners.nobody:RandomPlayers"


class Algorithms:
    """Registry of algorithms; the variants of ``learner``."""

    def __init__(self, known: Mapping[str, Algorithm]) -> None:
        self._known = dict(known)

    def words(self) -> dict[str, str]:
        """Returns the name of every algorithm and what it is."""
        installed = {
            name: self._installed(point)
            for name, point in self._points().items()
            if name not in self._known
        }
        return {name: one.meaning for name, one in {**self._known, **installed}.items()}

    def schema(self, word: str) -> type[LearnerConfig] | None:
        """Returns the dataclass of an algorithm's settings, or None for an unknown name."""
        found = self.find(word)
        return None if found is None else _loaded(word, found.config)

    def learner(self, word: str) -> Any:
        """Returns the class of an algorithm's learner."""
        found = self.find(word)
        assert found is not None
        return _loaded(word, found.learner)

    def find(self, word: str) -> Algorithm | None:
        """Returns an algorithm by its name, or None."""
        if word in self._known:
            return self._known[word]
        point = self._points().get(word)
        return None if point is None else self._installed(point)

    def add(self, word: str, algorithm: Algorithm) -> None:
        """Adds an algorithm.

        Raises:
            ConfigError: another algorithm has the name.
        """
        if self._known.get(word, algorithm) != algorithm:
            raise ConfigError(
                f"algorithm {quoted(word)} is registered already ({self._known[word].meaning}); "
                "choose another name."
            )
        self._known[word] = algorithm

    def remove(self, word: str) -> None:
        """Removes an algorithm that was added."""
        del self._known[word]

    def _points(self) -> dict[str, EntryPoint]:
        return {point.name: point for point in entry_points(group=_ENTRY_POINTS)}

    def _installed(self, point: EntryPoint) -> Algorithm:
        try:
            found = point.load()
        except Exception as error:
            raise ConfigError(
                f"algorithm {quoted(point.name)} of an installed package cannot be imported "
                f"({type(error).__name__}: {error}); mend or uninstall the package."
            ) from error
        if not isinstance(found, Algorithm):
            raise ConfigError(
                f"algorithm {quoted(point.name)} of an installed package is {quoted(found)}, "
                "expected a torchrl_marl.learners.algorithms.Algorithm."
            )
        return found


ALGORITHMS = Algorithms(
    {
        "mappo": Algorithm(
            "PPO for a team; the critic sees what all agents of the group see, or the state", *_PPO
        ),
        "ippo": Algorithm("PPO for a team; each agent's critic sees what the agent sees", *_PPO),
        "random": Algorithm(
            "random actions, nothing is learned: for a group that the others play against", *_RANDOM
        ),
    }
)
"""Every algorithm that there is."""

LearnerSettings = Tagged("algorithm", ALGORITHMS)
"""How the schema of ``learner`` is chosen."""


def register_algorithm(name: str, meaning: str, *, config: str, learner: str) -> None:
    """Makes an algorithm of one's own known, as ``learner.algorithm``.

    Args:
        name, meaning, config, learner: as in :class:`Algorithm`.

    Raises:
        ConfigError: another algorithm has the name.

    Examples:
        >>> register_algorithm("mine", "my own", config="mine:Config", learner="mine:Learner")
        >>> ALGORITHMS.words()["mine"]
        'my own'
        >>> ALGORITHMS.remove("mine")
    """
    ALGORITHMS.add(name, Algorithm(meaning, config, learner))


def group_config(default: LearnerConfig, own: Mapping[str, Any] | None, name: str) -> LearnerConfig:
    """Returns the settings of a group's learner: the default ones, and what differs.

    Args:
        default (LearnerConfig): settings of all groups.
        own (mapping, optional): what differs for this one.
        name (str): the group's.

    Raises:
        ConfigError: an unknown setting or a wrong type.
    """
    return overridden(LearnerSettings, default, own or {}, at=f"groups.{name}.")


def _loaded(word: str, place: str) -> Any:
    module, _, name = place.partition(":")
    try:
        return getattr(import_module(module), name)
    except UserError:
        raise
    except Exception as error:
        raise ConfigError(
            f"algorithm {quoted(word)} needs {place}, which cannot be imported "
            f"({type(error).__name__}: {error}); mend it."
        ) from error
