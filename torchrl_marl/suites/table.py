"""The table of a suite: one YAML file with the settings of every task and algorithm."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torchrl_marl.errors import ConfigError, nearest, quoted
from torchrl_marl.learners.algorithms import ALGORITHMS
from torchrl_marl.recipes import load_config
from torchrl_marl.settings import Reader, flatten, merged, normalized, read_yaml, unfold, unread
from torchrl_marl.training.config import TrainConfig

__all__ = ["OF_A_RUN", "Suite", "SuiteRun", "read_suite", "suite_names"]

_FOLDER = Path(__file__).parent
_PARTS = ("about", "default", "common", "algorithms", "tasks")
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.+-]*")
OF_A_RUN = ("seed", "folder", "recipe", "population", "evolution")
"""What each run of a suite has for itself."""


def suite_names() -> list[str]:
    """Returns the names of the suites that come with the package, sorted.

    Examples:
        >>> "toy" in suite_names()
        True
    """
    return sorted(path.stem for path in _FOLDER.glob("*.yaml"))


@dataclass(frozen=True)
class SuiteRun:
    """One run of a suite: a task, an algorithm, a seed, and all its settings."""

    task: str
    algorithm: str
    seed: int
    config: TrainConfig

    @property
    def pair(self) -> tuple[str, str]:
        """The task and the algorithm."""
        return self.task, self.algorithm

    @property
    def place(self) -> Path:
        """Where the run is in its suite's folder."""
        return Path(self.task, self.algorithm, f"seed{self.seed}")


@dataclass(frozen=True)
class Suite:
    """A table of settings.

    Settings of a run are, each above the one before: the defaults, those that all runs have in
    common, the algorithm's, the task's, those of this task with this algorithm, and what is given
    beside the suite. What a table says that an algorithm does not have is left out for it, unless
    it is said of that algorithm.

    Args:
        name (str): the suite's.
        about (str): one line.
        default (tuple of str): the algorithms that are trained where none are named.
        common (dict): settings of all runs.
        algorithms (dict): algorithm -> its settings. A name that is no algorithm's is a variant
            of one and has ``learner.algorithm`` among its settings.
        tasks (dict): task -> its settings.
        exceptions (dict): (task, algorithm) -> what differs for the two.
    """

    name: str
    about: str
    default: tuple[str, ...]
    common: dict[str, Any]
    algorithms: dict[str, dict[str, Any]]
    tasks: dict[str, dict[str, Any]]
    exceptions: dict[tuple[str, str], dict[str, Any]] = field(default_factory=dict)

    def run(
        self, task: str, algorithm: str, seed: int = 0, overrides: Mapping[str, Any] | None = None
    ) -> SuiteRun:
        """Returns one run with its settings, checked.

        Args:
            task (str): of the table.
            algorithm (str): of the table.
            seed (int): the run's.
            overrides (mapping, optional): settings above all of the table.

        Raises:
            ConfigError: an unknown setting, or settings that do not fit.
            MissingExtraError: the task's library is not installed.

        Examples:
            >>> run = read_suite("toy").run("arena", "mappo", 3, {"learner.lr": 0.5})
            >>> run.config.learner.lr, str(run.place)
            (0.5, 'arena/mappo/seed3')
        """
        named = {"learner": {"algorithm": algorithm}} if ALGORITHMS.find(algorithm) else {}
        own = [
            named,
            self.algorithms[algorithm],
            self.exceptions.get((task, algorithm), {}),
            overrides or {},
        ]
        mentioned = {key for layer in own for key in flatten(normalized(TrainConfig, layer))}
        try:
            settings = _merged(self.common, *own[:2], self.tasks[task], *own[2:])
            return SuiteRun(task, algorithm, seed, _config(settings, mentioned, algorithm, seed))
        except ConfigError as error:
            raise ConfigError(f"{task} with {algorithm}: {error}") from None


def _merged(*layers: Mapping[str, Any]) -> dict[str, Any]:
    settings: dict[str, Any] = {}
    for layer in layers:
        settings = merged(settings, normalized(TrainConfig, layer))
    return settings


def _config(
    settings: dict[str, Any], mentioned: set[str], algorithm: str, seed: int
) -> TrainConfig:
    """Reads settings, without those which this algorithm lacks and nobody gave it by name."""
    reader = Reader(TrainConfig)
    config = reader.read(settings)
    idle = (reader.inapplicable.keys() | unread(config).keys()) - mentioned
    flat = {key: value for key, value in flatten(settings).items() if key not in idle}
    return load_config({**unfold(flat), "recipe": algorithm, "seed": seed})


def read_suite(suite: str | Path) -> Suite:
    """Reads a suite of the package, or one's own.

    Args:
        suite (str or Path): a name, or the path of a YAML file.

    Raises:
        ConfigError: an unknown name, a file that cannot be read, or a table that is none.

    Examples:
        >>> "balance" in read_suite("vmas").tasks
        True
    """
    path = Path(suite)
    if str(suite) in suite_names():
        path = _FOLDER / f"{suite}.yaml"
    elif path.suffix not in (".yaml", ".yml"):
        names = suite_names()
        raise ConfigError(
            f"unknown suite {quoted(str(suite))}; {nearest(str(suite), names)}choose among "
            f"{', '.join(names)}, or give the path of a YAML file."
        )
    return _suite(path.stem, read_yaml(path), repr(str(path)))


def _suite(name: str, read: Mapping[str, Any], where: str) -> Suite:
    for part in read:
        if part not in _PARTS:
            raise ConfigError(
                f"suite {where} has {quoted(part)}, {nearest(part, _PARTS)}expected "
                f"{', '.join(_PARTS)}."
            )
    sections = {part: _section(read.get(part), part, where) for part in _PARTS[2:]}
    algorithms = _spread(sections["algorithms"], "algorithms", where)
    for part, found in (("algorithms", algorithms), ("tasks", sections["tasks"])):
        if not found:
            raise ConfigError(f"suite {where} has no {part}, expected one or more under {part}.")
    for algorithm, own in algorithms.items():
        learner = own.get("learner")
        variant = isinstance(learner, str) or "algorithm" in (learner or {})
        if ALGORITHMS.find(algorithm) is None and not variant:
            raise ConfigError(
                f"suite {where} has algorithms.{algorithm}, which is none; "
                f"{nearest(algorithm, ALGORITHMS.words())}a variant of one says which by "
                "learner.algorithm."
            )
    tasks: dict[str, dict[str, Any]] = {}
    exceptions: dict[tuple[str, str], dict[str, Any]] = {}
    for task, own in sections["tasks"].items():
        own = _section(own, f"tasks.{task}", where)
        differing = {key: own[key] for key in own if _names_algorithms(key, algorithms)}
        tasks[task] = {key: value for key, value in own.items() if key not in differing}
        for algorithm, settings in _spread(differing, f"tasks.{task}", where).items():
            exceptions[task, algorithm] = settings
    for one in (*tasks, *algorithms):
        if not _NAME.fullmatch(one):
            raise ConfigError(
                f"suite {where} names {quoted(one)}, which is to be a folder; use letters, digits "
                "and _ in names."
            )
    default = _algorithms(read.get("default"), algorithms, where)
    about = str(read.get("about", ""))
    return Suite(name, about, default, sections["common"], algorithms, tasks, exceptions)


def _section(value: Any, name: str, where: str) -> dict[str, Any]:
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise ConfigError(
            f"suite {where} has {quoted(value)} under {name}, expected settings there."
        )
    section = {str(key): inner for key, inner in value.items()}
    own = next((key for key in section if key in OF_A_RUN), None)
    if own is not None and name not in ("algorithms", "tasks"):
        raise ConfigError(
            f"suite {where} has {own} under {name}, which each run has for itself; leave it out."
        )
    return section


def _spread(section: Mapping[str, Any], name: str, where: str) -> dict[str, dict[str, Any]]:
    """Returns settings by algorithm, where ``mappo, ippo`` are those of both."""
    found: dict[str, dict[str, Any]] = {}
    for names, value in section.items():
        for algorithm in map(str.strip, names.split(",")):
            own = unfold(_section(value, f"{name}.{names}", where))
            found[algorithm] = merged(found.get(algorithm, {}), own)
    return found


def _names_algorithms(key: str, algorithms: Iterable[str]) -> bool:
    """Whether a key of a task is an algorithm of the table, or several with commas."""
    return all(one.strip() in algorithms for one in key.split(","))


def _algorithms(
    value: Any, algorithms: Mapping[str, dict[str, Any]], where: str
) -> tuple[str, ...]:
    if value is None:
        return tuple(algorithms)
    names = [str(one) for one in value] if isinstance(value, list) else [str(value)]
    for one in names:
        if one not in algorithms:
            raise ConfigError(
                f"suite {where} has {quoted(one)} as default, {nearest(one, algorithms)}expected "
                f"some of {', '.join(algorithms)}."
            )
    return tuple(names)
