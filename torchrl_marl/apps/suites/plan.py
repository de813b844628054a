"""The plan of a suite: its table of runs, and how long they will take."""

from __future__ import annotations

import heapq
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torchrl_marl.errors import ConfigError, nearest, quoted
from torchrl_marl.learners.algorithms import ALGORITHMS
from torchrl_marl.recipes import load_config
from torchrl_marl.settings import Reader, flatten, merged, normalized, read_yaml, unfold, unread
from torchrl_marl.training.config import TrainConfig

__all__ = ["Plan", "Suite", "SuiteRun", "make_plan", "read_suite", "suite_names"]

Pair = tuple[str, str]


@dataclass(frozen=True)
class Pace:
    """Frames, and the seconds that they took: compiling, evaluating and all.

    Examples:
        >>> Pace(1000, 2.0) + Pace(2000, 10.0)
        Pace(frames=3000, seconds=12.0)
    """

    frames: int = 0
    seconds: float = 0.0

    def __add__(self, other: Pace) -> Pace:
        return Pace(self.frames + other.frames, self.seconds + other.seconds)


def seconds_left(
    left: Iterable[tuple[Pair, int]], paces: Mapping[Pair, Pace], jobs: int = 1
) -> float | None:
    """Returns the seconds until all runs have ended, or None where nothing is known yet.

    A task and algorithm of which nothing was seen goes as fast as the algorithm does elsewhere, or
    else as everything together. Runs begin in their order, each where a place is free first.

    Args:
        left (iterable of (pair, frames)): the frames that each run has to go; the running ones
            first.
        paces (mapping): (task, algorithm) -> what was seen of it.
        jobs (int): how many run at once.

    Examples:
        >>> paces = {("balance", "mappo"): Pace(1000, 2.0)}
        >>> seconds_left([(("balance", "mappo"), 500), (("wheel", "mappo"), 1000)], paces)
        3.0
        >>> seconds_left([(("balance", "mappo"), 500), (("wheel", "mappo"), 1000)], paces, jobs=2)
        2.0
    """
    known = {pair: pace for pair, pace in paces.items() if pace.frames > 0}
    places = [0.0] * max(jobs, 1)
    for pair, frames in left:
        if not frames:
            continue
        if not known:
            return None
        alike = [pace for (_, algorithm), pace in known.items() if algorithm == pair[1]]
        pace = known.get(pair) or sum(alike or known.values(), Pace())
        heapq.heapreplace(places, places[0] + frames * pace.seconds / pace.frames)
    return max(places)


def clock(seconds: float) -> str:
    """Returns a time as one says it.

    Examples:
        >>> clock(42), clock(150), clock(7260), clock(200_000)
        ('42 s', '2 min 30 s', '2 h 01 min', '2 d 7 h')
    """
    whole = max(0, round(seconds))
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    if whole < 86_400:
        return f"{whole // 3600} h {whole % 3600 // 60:02d} min"
    return f"{whole // 86_400} d {whole % 86_400 // 3600} h"


SEEDS = 5
"""Seeds of each task and algorithm, where no number is given."""
WORDS = ("algorithms", "tasks", "seeds", "frames")
"""What says which runs; everything else is a setting of all of them."""


@dataclass(frozen=True)
class Plan:
    """The runs of a suite that are meant, in the order in which they begin.

    Attributes:
        suite (Suite): the table.
        runs (tuple of SuiteRun): seed by seed, so that every task is seen early.
        words (dict): by which the same plan is made again.
    """

    suite: Suite
    runs: tuple[SuiteRun, ...]
    words: dict[str, Any]

    @property
    def frames(self) -> int:
        """Env steps of all runs together."""
        return sum(run.config.total_frames for run in self.runs)


def make_plan(
    suite: str | Path | Suite,
    *,
    algorithms: Collection[str] | str | None = None,
    tasks: Collection[str] | str | None = None,
    seeds: int | Sequence[int] | None = None,
    frames: int | None = None,
    settings: Mapping[str, Any] | None = None,
) -> Plan:
    """Returns the runs of a suite, all of their settings checked.

    Args:
        suite (str, Path or Suite): a name, the path of a YAML file, or the table itself.

    Keyword Args:
        algorithms (list of str, optional): by default those that the suite names as its default.
        tasks (list of str, optional): by default all.
        seeds (int or list of int, optional): how many, from 0 on, or which; by default 5.
        frames (int, optional): of each run, in place of the table's.
        settings (mapping, optional): of all runs, such as ``{"execution": "compile"}``.

    Raises:
        ConfigError: naming what is unknown, and what comes nearest.

    Examples:
        >>> [str(run.place) for run in make_plan("toy", tasks="arena", seeds=1).runs]
        ['arena/mappo/seed0', 'arena/ippo/seed0']
    """
    table = suite if isinstance(suite, Suite) else read_suite(suite)
    algorithms = _chosen(algorithms, table.algorithms, "algorithm", table) or table.default
    tasks = _chosen(tasks, table.tasks, "task", table) or list(table.tasks)
    numbers = seeds_of(SEEDS if seeds is None else seeds)
    overrides = _overrides(settings or {}, frames)
    runs = [
        table.run(task, algorithm, seed, overrides)
        for seed in numbers
        for task in tasks
        for algorithm in algorithms
    ]
    words = {
        "algorithms": list(algorithms),
        "tasks": list(tasks),
        "seeds": numbers,
        "settings": flatten(overrides),
    }
    return Plan(table, tuple(runs), words)


def seeds_of(value: Any) -> list[int]:
    """Returns the seeds that ``5``, ``[0, 2]``, ``"0..4"`` and ``"0,2"`` mean.

    Raises:
        ConfigError: none of them.

    Examples:
        >>> seeds_of(3), seeds_of([4, 2]), seeds_of("1..3"), seeds_of("7,9")
        ([0, 1, 2], [4, 2], [1, 2, 3], [7, 9])
    """
    found: list[Any] = []
    if isinstance(value, str):
        first, dots, last = value.partition("..")
        if dots and first.isdecimal() and last.isdecimal():
            found = list(range(int(first), min(int(last), int(first) + 10_000) + 1))
        elif all(part.isdecimal() for part in value.split(",")):
            found = [int(part) for part in value.split(",")]
            found = list(range(found[0])) if "," not in value else found
    elif isinstance(value, int) and not isinstance(value, bool):
        found = list(range(min(value, 10_000)))
    elif isinstance(value, Iterable):
        found = list(value)
    right = all(isinstance(seed, int) and 0 <= seed < 2**32 for seed in found)
    if not found or not right or len(set(found)) < len(found):
        raise ConfigError(
            f"seeds is {quoted(value)}, expected how many, such as seeds=5, or which, each once: "
            "seeds=0,2 or seeds=3..7."
        )
    return found


def _chosen(
    given: Collection[str] | str | None, known: Mapping[str, Any], what: str, suite: Suite
) -> list[str]:
    if given is None:
        return []
    names = given.split(",") if isinstance(given, str) else [str(one) for one in given]
    names = [name.strip() for name in names if name.strip()]
    for name in names:
        if name not in known:
            raise ConfigError(
                f"unknown {what} {quoted(name)} of suite {suite.name!r}; {nearest(name, known)}"
                f"choose among {', '.join(known)}."
            )
    if not names or len(set(names)) < len(names):
        raise ConfigError(
            f"{what}s is {quoted(','.join(names))}, expected one or more, each once, of "
            f"{', '.join(known)}."
        )
    return names


def _overrides(settings: Mapping[str, Any], frames: int | None) -> dict[str, Any]:
    overrides = normalized(TrainConfig, settings)
    for key in OF_A_RUN:
        if key in overrides:
            fix = "give seeds=... instead" if key == "seed" else "leave it out"
            fix = "give --out instead" if key == "folder" else fix
            raise ConfigError(f"{key} is given, which each run of a suite has for itself; {fix}.")
    if frames is not None and "total_frames" in overrides:
        raise ConfigError("frames and total_frames are both given, which are one; leave one out.")
    if frames is not None:
        if isinstance(frames, bool) or not isinstance(frames, int) or frames < 1:
            raise ConfigError(
                f"frames is {quoted(frames)}, expected a whole number above 0, such as "
                "frames=600000."
            )
        overrides = unfold({**overrides, "total_frames": frames})
    return overrides


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
