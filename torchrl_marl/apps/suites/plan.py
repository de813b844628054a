"""Plan of a suite: the table of settings, the runs, and a forecast of the time they take."""

from __future__ import annotations

import contextlib
import heapq
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from torchrl_marl.errors import ConfigError, nearest, quoted
from torchrl_marl.learners.algorithms import ALGORITHMS
from torchrl_marl.recipes import load_config
from torchrl_marl.settings import Reader, flatten, merged, normalized, read_yaml, unfold, unread
from torchrl_marl.settings.layers import UNFIT, converted
from torchrl_marl.training.config import TrainConfig, seed_folders
from torchrl_marl.training.sections import PopulationConfig

__all__ = [
    "Plan",
    "Suite",
    "SuiteRun",
    "explain_population_errors",
    "make_plan",
    "populations",
    "read_suite",
    "suite_names",
    "with_run_folder",
]

Pair = tuple[str, str]


@dataclass(frozen=True)
class Pace:
    """Number of frames, and the seconds they took, including compilation and evaluation.

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
    """Returns the estimated seconds until all runs have ended, or None without any data.

    A pair of task and algorithm without measurements is assumed to be as fast as the algorithm in
    other tasks or, if there is no such measurement, as all runs together. Runs start in order, each
    in the first free slot.

    Args:
        left (iterable of (pair, frames)): (task, algorithm) and remaining frames of each run,
            running runs first.
        paces (mapping): (task, algorithm) -> measured pace.
        jobs (int): number of concurrent runs.

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
        same = [pace for (_, algorithm), pace in known.items() if algorithm == pair[1]]
        pace = known.get(pair) or sum(same or known.values(), Pace())
        heapq.heapreplace(places, places[0] + frames * pace.seconds / pace.frames)
    return max(places)


def format_duration(seconds: float) -> str:
    """Formats a duration in seconds as a short text.

    Examples:
        >>> format_duration(42), format_duration(7260), format_duration(200_000)
        ('42 s', '2 h 01 min', '2 d 7 h')
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
"""Default number of seeds of each task and algorithm."""
MOST_SEEDS = 10_000
"""Largest number of seeds of a suite."""
SELECTION_KEYS = ("algorithms", "tasks", "seeds", "frames")
"""Arguments of a suite that select its runs; all others are settings of every run."""


@dataclass(frozen=True)
class Plan:
    """Selected runs of a suite, in the order of their start.

    Attributes:
        suite (Suite): table of settings.
        runs (tuple of SuiteRun): runs ordered by seed, so that every task starts early.
        selection (dict): arguments from which :func:`make_plan` makes this plan again.
    """

    suite: Suite
    runs: tuple[SuiteRun, ...]
    selection: dict[str, Any]

    @property
    def frames(self) -> int:
        """Total env steps of all runs."""
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
    """Selects runs of a suite and checks their settings.

    Args:
        suite (str, Path or Suite): name of a suite, path of a YAML file, or the suite itself.

    Keyword Args:
        algorithms (list of str, optional): algorithms; default: the suite's ``default``.
        tasks (list of str, optional): tasks; default: all.
        seeds (int or list of int, optional): number of seeds from 0 on, or list of seeds;
            default: 5.
        frames (int, optional): frames of each run; default: as in the table.
        settings (mapping, optional): settings of all runs, such as ``{"execution": "compile"}``.

    Raises:
        ConfigError: an unknown name or setting; the message names the nearest known one.

    Examples:
        >>> [str(run.place) for run in make_plan("toy", tasks="arena", seeds=1).runs]
        ['arena/mappo/seed0', 'arena/ippo/seed0']
    """
    table = suite if isinstance(suite, Suite) else read_suite(suite)
    algorithms = _check_selection(algorithms, table.algorithms, "algorithm", table) or table.default
    tasks = _check_selection(tasks, table.tasks, "task", table) or list(table.tasks)
    numbers = seeds_of(SEEDS if seeds is None else seeds)
    overrides = _overrides(settings or {}, frames)
    runs = [
        table.run(task, algorithm, seed, overrides)
        for seed in numbers
        for task in tasks
        for algorithm in algorithms
    ]
    selection = {
        "algorithms": list(algorithms),
        "tasks": list(tasks),
        "seeds": numbers,
        "settings": flatten(overrides),
    }
    return Plan(table, tuple(runs), selection)


def populations(plan: Plan, folder: Path) -> list[list[SuiteRun]]:
    """Returns the runs of each task and algorithm, which are trained as one population.

    Args:
        plan (Plan): the runs.
        folder (Path): output folder.

    Raises:
        ConfigError: the seeds are not consecutive, a setting does not fit a population, or the
            folder has runs of other seeds.
    """
    seeds = plan.selection["seeds"]
    if seeds != list(range(seeds[0], seeds[0] + len(seeds))):
        raise ConfigError(
            f"seeds is {','.join(map(str, seeds))}, expected consecutive numbers with --together; "
            f"use seeds={min(seeds)}..{min(seeds) + len(seeds) - 1}."
        )
    pairs = dict.fromkeys(run.pair for run in plan.runs)
    units = [[run for run in plan.runs if run.pair == pair] for pair in pairs]
    for unit in units:
        own = with_run_folder(unit, folder)
        with explain_population_errors(" with ".join(unit[0].pair) + ": "):
            own.check()
        known = [path.name for path in seed_folders(str(own.folder))]
        begun = Path(str(own.folder), "config.yaml").is_file() or len(unit) == 1
        if known and not (begun and known == [run.place.name for run in unit]):
            raise ConfigError(
                f"{str(own.folder)!r} has {', '.join(known)}, which are not the members of this "
                "population; use the same seeds or another --out, or leave out --together if the "
                "suite began without it."
            )
    return units


@contextlib.contextmanager
def explain_population_errors(at: str = "") -> Iterator[None]:
    """Names ``--together`` in errors of a population's settings, instead of its size.

    Args:
        at (str): start of the message.
    """
    try:
        yield
    except ConfigError as error:
        text = re.sub(r"(use )?population\.size=1", "leave --together out", str(error))
        raise ConfigError(
            f"{at}--together makes the runs members of a population: {text}"
        ) from None


def with_run_folder(unit: Sequence[SuiteRun], out: Path) -> TrainConfig:
    """Returns the settings of a run, or of several runs as a population, with their folder."""
    first = unit[0]
    if len(unit) == 1:
        return replace(first.config, folder=str(out / first.place))
    members = PopulationConfig(size=len(unit))
    place = str(out / first.place.parent)
    return replace(first.config, folder=place, population=members)


def seeds_of(value: Any) -> list[int]:
    """Parses seeds given as ``5``, ``[0, 2]``, ``"0..4"`` or ``"0,2"``.

    Raises:
        ConfigError: the seeds have another form, a seed is repeated, or they are too many.

    Examples:
        >>> seeds_of(3), seeds_of([4, 2]), seeds_of("1..3"), seeds_of("7,9")
        ([0, 1, 2], [4, 2], [1, 2, 3], [7, 9])
    """
    found: list[Any] = []
    if isinstance(value, str):
        first, dots, last = value.partition("..")
        if dots and first.isdecimal() and last.isdecimal():
            begin = _parse_number(first)
            found = list(range(begin, min(_parse_number(last), begin + MOST_SEEDS) + 1))
        elif all(part.isdecimal() for part in value.split(",")):
            found = [_parse_number(part) for part in value.split(",")]
            found = list(range(min(found[0], MOST_SEEDS + 1))) if "," not in value else found
    elif isinstance(value, int) and not isinstance(value, bool):
        found = list(range(min(value, MOST_SEEDS + 1)))
    elif isinstance(value, Iterable):
        found = list(value)
    if len(found) > MOST_SEEDS:
        raise ConfigError(
            f"seeds is {quoted(value)}, expected at most {MOST_SEEDS:,} seeds; use fewer, such as "
            "seeds=5."
        )
    right = all(isinstance(seed, int) and 0 <= seed < 2**32 for seed in found)
    if not found or not right or len(set(found)) < len(found):
        raise ConfigError(
            f"seeds is {quoted(value)}, expected a number of seeds (seeds=5), or different seeds "
            "(seeds=0,2 or seeds=3..7)."
        )
    return found


def _parse_number(digits: str) -> int:
    """Returns the number of decimal digits; one above all seeds if there are more than ten."""
    return int(digits) if len(digits) <= 10 else 2**32


def _check_selection(
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
            f"{what}s is {quoted(','.join(names))}, expected different ones of "
            f"{', '.join(known)}, at least one."
        )
    return names


def _overrides(settings: Mapping[str, Any], frames: int | None) -> dict[str, Any]:
    overrides = normalized(TrainConfig, settings)
    for key in PER_RUN_SETTINGS:
        if key in overrides:
            fix = "give seeds=... instead" if key == "seed" else "leave it out"
            fix = "give --out instead" if key == "folder" else fix
            raise ConfigError(f"{key} is given, but the suite sets it for each run; {fix}.")
    if frames is not None and "total_frames" in overrides:
        raise ConfigError("frames and total_frames are the same setting; leave one out.")
    if frames is not None:
        whole = converted(int, frames)
        if whole is UNFIT or whole < 1:
            raise ConfigError(
                f"frames is {quoted(frames)}, expected a whole number above 0, such as "
                "frames=600000."
            )
        overrides = unfold({**overrides, "total_frames": whole})
    return overrides


_FOLDER = Path(__file__).parent
_SECTIONS = ("about", "default", "score", "common", "algorithms", "tasks")
SCORES = ("return", "crossplay")
"""Scores of a suite: the return of each run, or also the cross-play of runs with other seeds."""
_NAME_PATTERN = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.+-]*")
_RESERVED_NAMES = ("suite.json", "results.csv", "crossplay.csv", "logs")
PER_RUN_SETTINGS = ("seed", "folder", "recipe", "population", "evolution")
"""Settings that the suite itself sets for each run."""


def suite_names() -> list[str]:
    """Returns the sorted names of the package's suites.

    Examples:
        >>> "toy" in suite_names()
        True
    """
    return sorted(path.stem for path in _FOLDER.glob("*.yaml"))


@dataclass(frozen=True)
class SuiteRun:
    """One run of a suite: task, algorithm, seed and settings."""

    task: str
    algorithm: str
    seed: int
    config: TrainConfig

    @property
    def pair(self) -> tuple[str, str]:
        """Task and algorithm."""
        return self.task, self.algorithm

    @property
    def place(self) -> Path:
        """Folder of the run, relative to the suite's folder."""
        return Path(self.task, self.algorithm, f"seed{self.seed}")


@dataclass(frozen=True)
class Suite:
    """Table of settings of a suite.

    Later settings override earlier ones: the defaults, ``common``, the algorithm's, the task's,
    those of the task with the algorithm, and the overrides of the caller. A setting that the
    algorithm lacks is skipped if it comes from ``common`` or from the task. It raises an error if
    it comes from the algorithm, from the task with the algorithm, or from the caller.

    Args:
        name (str): name of the suite.
        about (str): description, one line.
        default (tuple of str): algorithms to train by default.
        common (dict): settings of all runs.
        algorithms (dict): algorithm -> settings. A name that is not an algorithm is a variant,
            which needs ``learner.algorithm`` in its settings.
        tasks (dict): task -> settings.
        exceptions (dict): (task, algorithm) -> settings of this pair.
        score (str): one of :data:`SCORES`.
    """

    name: str
    about: str
    default: tuple[str, ...]
    common: dict[str, Any]
    algorithms: dict[str, dict[str, Any]]
    tasks: dict[str, dict[str, Any]]
    exceptions: dict[tuple[str, str], dict[str, Any]] = field(default_factory=dict)
    score: str = "return"

    def run(
        self, task: str, algorithm: str, seed: int = 0, overrides: Mapping[str, Any] | None = None
    ) -> SuiteRun:
        """Returns a run with checked settings.

        Args:
            task (str): task of the table.
            algorithm (str): algorithm of the table.
            seed (int): random seed of the run.
            overrides (mapping, optional): settings that override the table.

        Raises:
            ConfigError: an unknown setting, or settings that do not fit together.
            MissingExtraError: the task's library is not installed.

        Examples:
            >>> run = read_suite("toy").run("arena", "mappo", 3, {"learner.lr": 0.5})
            >>> run.config.learner.lr, str(run.place)
            (0.5, 'arena/mappo/seed3')
        """
        named = {"learner": {"algorithm": algorithm}} if ALGORITHMS.find(algorithm) else {}
        exception = self.exceptions.get((task, algorithm), {})
        own = [named, self.algorithms[algorithm], exception]
        try:
            settings = _merge_layers(self.common, *own[:2], self.tasks[task], exception)
            written = _setting_keys(*own) & _unread_settings(settings)
            settings = _merge_layers(settings, overrides or {})
            _check_evaluations(settings, _setting_keys(overrides or {}))
            kept = written | _setting_keys(overrides or {})
            return SuiteRun(task, algorithm, seed, _read_config(settings, kept, algorithm, seed))
        except ConfigError as error:
            raise ConfigError(f"{task} with {algorithm}: {error}") from None


def _check_evaluations(settings: dict[str, Any], given: set[str]) -> None:
    """Refuses the caller's period of evaluations beside the table's number of them."""
    found = flatten(settings)
    every, count = (found.get(f"evaluation.{name}") for name in ("every_frames", "count"))
    if "evaluation.every_frames" in given and "evaluation.count" not in given and count and every:
        raise ConfigError(
            f"evaluation.every_frames is {every}, but the suite sets evaluation.count={count}, "
            "which replaces it; leave evaluation.every_frames out, or add evaluation.count=null."
        )


def _setting_keys(*layers: Mapping[str, Any]) -> set[str]:
    return {key for layer in layers for key in flatten(normalized(TrainConfig, layer))}


def _merge_layers(*layers: Mapping[str, Any]) -> dict[str, Any]:
    settings: dict[str, Any] = {}
    for layer in layers:
        settings = merged(settings, normalized(TrainConfig, layer))
    return settings


def _unread_settings(settings: dict[str, Any]) -> set[str]:
    """Returns the settings that nothing reads, such as those that the algorithm lacks."""
    reader = Reader(TrainConfig)
    config = reader.read(settings)
    return reader.inapplicable.keys() | unread(config).keys()


def _read_config(
    settings: dict[str, Any], required: set[str], algorithm: str, seed: int
) -> TrainConfig:
    """Reads a run's settings.

    Settings that nothing reads are skipped. Those in ``required`` raise an error instead: they are
    given for this algorithm or by the caller. Settings of the table that the caller's overrides
    leave without effect are not among them.
    """
    idle = _unread_settings(settings) - required
    flat = {key: value for key, value in flatten(settings).items() if key not in idle}
    return load_config({**unfold(flat), "recipe": algorithm, "seed": seed})


def read_suite(suite: str | Path) -> Suite:
    """Reads a suite of the package or of a YAML file.

    Args:
        suite (str or Path): name of a suite, or path of a YAML file.

    Raises:
        ConfigError: an unknown name, a file that cannot be read, or an invalid table.

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
    return _parse_suite(path.stem, read_yaml(path), repr(str(path)))


def _parse_suite(name: str, read: Mapping[str, Any], where: str) -> Suite:
    for part in read:
        if part not in _SECTIONS:
            raise ConfigError(
                f"suite {where} has the section {quoted(part)}, {nearest(part, _SECTIONS)}expected "
                f"{', '.join(_SECTIONS)}."
            )
    sections = {part: _read_section(read.get(part), part, where) for part in _SECTIONS[3:]}
    algorithms = _split_algorithms(sections["algorithms"], "algorithms", where)
    for part, found in (("algorithms", algorithms), ("tasks", sections["tasks"])):
        if not found:
            raise ConfigError(f"suite {where} has no {part}, expected at least one under {part}.")
    for algorithm, own in algorithms.items():
        learner = own.get("learner")
        variant = isinstance(learner, str) or "algorithm" in (learner or {})
        if ALGORITHMS.find(algorithm) is None and not variant:
            raise ConfigError(
                f"suite {where} has algorithms.{algorithm}, which is not an algorithm; "
                f"{nearest(algorithm, ALGORITHMS.words())}set learner.algorithm for a variant."
            )
    tasks: dict[str, dict[str, Any]] = {}
    exceptions: dict[tuple[str, str], dict[str, Any]] = {}
    for task, own in sections["tasks"].items():
        own = _read_section(own, f"tasks.{task}", where)
        differing = {key: own[key] for key in own if _names_algorithms(key, algorithms)}
        tasks[task] = {key: value for key, value in own.items() if key not in differing}
        for algorithm, settings in _split_algorithms(differing, f"tasks.{task}", where).items():
            exceptions[task, algorithm] = settings
    _check_names(tasks, algorithms, where)
    default = _read_default(read.get("default"), algorithms, where)
    about, score = str(read.get("about", "")), str(read.get("score", "return"))
    if score not in SCORES:
        raise ConfigError(
            f"suite {where} has score: {quoted(score)}, {nearest(score, SCORES)}expected "
            f"{' or '.join(SCORES)}."
        )
    return Suite(name, about, default, sections["common"], algorithms, tasks, exceptions, score)


def _check_names(tasks: Iterable[str], algorithms: Iterable[str], where: str) -> None:
    """Refuses names that cannot be folders in the suite's folder."""
    for one in (*tasks, *algorithms):
        if not _NAME_PATTERN.fullmatch(one):
            raise ConfigError(
                f"suite {where} has the name {quoted(one)}, which cannot be a folder name; use "
                "letters, digits and _ in names."
            )
    for task in tasks:
        if task.lower() in _RESERVED_NAMES:
            raise ConfigError(
                f"suite {where} has the task {quoted(task)}, which is a file or folder of the "
                f"suite itself, as {', '.join(_RESERVED_NAMES)} are; give it another name."
            )


def _read_section(value: Any, name: str, where: str) -> dict[str, Any]:
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise ConfigError(f"suite {where} has {quoted(value)} under {name}, expected settings.")
    section = {str(key): inner for key, inner in value.items()}
    own = next((key for key in section if key in PER_RUN_SETTINGS), None)
    if own is not None and name not in ("algorithms", "tasks"):
        raise ConfigError(
            f"suite {where} has {own} under {name}, but the suite sets it for each run; leave it "
            "out."
        )
    return section


def _split_algorithms(
    section: Mapping[str, Any], name: str, where: str
) -> dict[str, dict[str, Any]]:
    """Returns settings by algorithm; a key such as ``mappo, ippo`` is split into both names."""
    found: dict[str, dict[str, Any]] = {}
    for names, value in section.items():
        for algorithm in map(str.strip, names.split(",")):
            own = unfold(_read_section(value, f"{name}.{names}", where))
            found[algorithm] = merged(found.get(algorithm, {}), own)
    return found


def _names_algorithms(key: str, algorithms: Iterable[str]) -> bool:
    """Returns whether a key consists of algorithms of the table, separated by commas."""
    return all(one.strip() in algorithms for one in key.split(","))


def _read_default(
    value: Any, algorithms: Mapping[str, dict[str, Any]], where: str
) -> tuple[str, ...]:
    if value is None:
        return tuple(algorithms)
    names = [str(one) for one in value] if isinstance(value, list) else [str(value)]
    for one in names:
        if one not in algorithms:
            raise ConfigError(
                f"suite {where} has {quoted(one)} as default, {nearest(one, algorithms)}expected "
                f"names of {', '.join(algorithms)}."
            )
    return tuple(names)
