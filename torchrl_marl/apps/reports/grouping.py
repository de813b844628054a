"""Runs of a report: found, measured, and grouped by environment and algorithm."""

from __future__ import annotations

import dataclasses
import json
import os
import warnings
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from torchrl_marl.apps.reports.curves import (
    NOT_READ,
    Curves,
    by_settings,
    differences,
    environment_name,
    read_run,
)
from torchrl_marl.errors import CheckpointError, ConfigError, UserError
from torchrl_marl.training.config import read_run_config, seed_folders

__all__ = [
    "Record",
    "Task",
    "by_task",
    "each_seed_once",
    "find_runs",
    "group",
    "record_of",
    "without_copies",
]

Numbers = NDArray[np.float64]
REWARD = "/episode_reward"
"""How columns of a group's returns end."""


@dataclass(frozen=True)
class Progress:
    """Returns measured in the course of a training, ``[K]`` each; agent frames may be NaN."""

    frames: Numbers
    agent_frames: Numbers
    seconds: Numbers
    returns: Numbers

    def __len__(self) -> int:
        return len(self.frames)

    @property
    def end(self) -> float:
        """Frames of the last measurement."""
        return float(self.frames[-1])

    def at(self, frames: float) -> int | None:
        """Returns the place of the measurement nearest to some frames; None if not within 10 %."""
        place = int(np.abs(self.frames - frames).argmin())
        return place if abs(self.frames[place] - frames) <= 0.1 * frames else None


@dataclass(frozen=True)
class Record:
    """A run, as a report needs it."""

    run: Curves
    evaluation: Progress
    training: Progress
    finished: bool
    notes: tuple[str, ...]
    """Sentences on what is unlike other runs, without their subject."""

    @property
    def measured(self) -> Progress:
        """Evaluations; the returns of training where there are none."""
        return self.evaluation if len(self.evaluation) else self.training

    @property
    def is_evaluated(self) -> bool:
        """Whether :attr:`measured` is evaluations."""
        return bool(len(self.evaluation))

    @property
    def name(self) -> str:
        """The run folder, as it was given."""
        return str(self.run.folder)

    @property
    def frames(self) -> int:
        """Frames it was trained for."""
        tables = (self.run.training, self.run.evaluation)
        return int(max(table["frames"][-1] for table in tables if len(table.get("frames", ()))))

    @property
    def total_frames(self) -> int:
        """Frames it was meant to be trained for."""
        return int(self.run.settings.get("total_frames", 0))

    def summarized(self, key: str) -> float | None:
        """Returns a finite figure of ``summary.json``, or None."""
        value = self.run.summary.get(key)
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            return None
        return float(value) if np.isfinite(value) else None


def record_of(run: Curves) -> Record | str:
    """Reads the returns out of a run's tables.

    Args:
        run (Curves): of :func:`~torchrl_marl.apps.reports.curves.read_run`.

    Returns:
        Record or str: or a sentence that says why there is nothing to report.
    """
    notes = list(run.notes)
    evaluation, broken = _progress(run, run.evaluation.get("return_mean"), run.evaluation)
    training, diverged = _progress(run, _training_returns(run), run.training)
    if broken is not None and not len(evaluation):
        return (
            f"{str(run.folder)!r} has a return that is no finite number at its first evaluation, "
            f"frame {broken:,}, and so no score; train it anew."
        )
    if broken is not None:
        notes.append(f"has a return that is no finite number at frame {broken:,}; used up to there")
    notes += [f"has a half last line in {name}, which is not used" for name in run.cut]
    if not len(evaluation) and not len(training):
        return (
            f"{str(run.folder)!r} has no finite return yet; "
            "wait until an episode has ended or an evaluation is done."
        )
    if not len(evaluation):
        notes.append("has no evaluations; returns are those of training episodes")
    finished = _is_finished(run)
    found = Record(run, evaluation, training, finished, ())
    if not finished:
        of = f" of {found.total_frames:,}" if found.total_frames > found.frames else ""
        notes.insert(0, f"has not finished; used up to frame {found.frames:,}{of}")
    if run.settings and len(evaluation) and np.isnan(evaluation.agent_frames[-1]):
        known = run.training.get("frames", np.empty(0))
        end = f"ends at frame {known[-1]:,.0f}" if len(known) else "has no row"
        notes.append(f"has a metrics.csv that {end}; agent frames of later evaluations are unknown")
    return Record(run, evaluation, training, finished, tuple(notes))


def without_copies(records: Sequence[Record]) -> tuple[list[Record], list[str]]:
    """Leaves out runs with the settings, the seed and every number of another.

    Args:
        records (list of Record): the runs.

    Returns:
        tuple: the others, and a sentence for each that is left out.
    """
    first: dict[tuple[object, ...], Record] = {}
    left_out = []
    for record in records:
        run = record.run
        settings = tuple(sorted((key, str(value)) for key, value in run.settings.items()))
        tables = _content(run.training), _content(run.evaluation)
        one = first.setdefault((run.seed, settings, tables), record)
        if one is not record:
            left_out.append(
                f"{record.name!r} has the settings, the seed and every number of {one.name!r}; "
                "the two are one run, and count once."
            )
    return list(first.values()), left_out


def _content(table: dict[str, Numbers]) -> tuple[tuple[str, bytes], ...]:
    """A table's numbers, but for the times it took."""
    return tuple((name, x.tobytes()) for name, x in table.items() if "second" not in name)


def _progress(
    run: Curves, returns: Numbers | None, table: dict[str, Numbers]
) -> tuple[Progress, int | None]:
    """Returns what was measured up to the first return of no sense, and that one's frames.

    Rows of training in which no episode ended hold NaN, and are left out.
    """
    nothing = Progress(*(np.empty(0),) * 4)
    if returns is None or not len(returns):
        return nothing, None
    frames, broken = table["frames"], None
    of_evaluation = table is run.evaluation
    bad = ~np.isfinite(returns) if of_evaluation else np.isinf(returns)
    if bad.any():
        first = int(bad.argmax())
        broken = int(np.nan_to_num(frames[first]))
        returns, frames = returns[:first], frames[:first]
    known = np.isfinite(returns) & np.isfinite(frames)
    if not known.any():
        return nothing, broken
    frames, returns = frames[known], returns[known]
    agent_frames, seconds = (
        table[name][: len(known)][known] if name in table else _over_frames(run, name, frames)
        for name in ("agent_frames", "seconds")
    )
    return Progress(frames, agent_frames, seconds, returns), broken


def _over_frames(run: Curves, column: str, frames: Numbers) -> Numbers:
    """Returns a counter of ``metrics.csv`` at some frames; NaN where there is none."""
    table = run.training
    if column not in table or not len(table["frames"]):
        return np.where(frames == 0, 0.0, np.nan)
    x, y = np.append(0.0, table["frames"]), np.append(0.0, table[column])
    return np.interp(frames, x, y, right=np.nan)


def _training_returns(run: Curves) -> Numbers | None:
    """Returns training's returns of a task of one group.

    Of several groups it is not known how many agents each has.
    """
    columns = [name for name in run.training if name.endswith(REWARD)]
    return run.training[columns[0]] if len(columns) == 1 else None


def _is_finished(run: Curves) -> bool:
    """Whether the run has ended; a run that goes on has more frames than its summary."""
    frames = run.summary.get("frames")
    trained = run.training.get("frames", np.empty(0))
    return isinstance(frames, (int, float)) and (not len(trained) or trained[-1] <= frames)


_DEEPEST = 6  # folders between what is given and a run


def find_runs(paths: Iterable[str | Path] | str | Path) -> tuple[list[Curves], list[str]]:
    """Reads all runs in the given folders, however deep they lie.

    A folder may be a run, hold the runs of several seeds, be a population's or a suite's. A
    population whose members replace each other is two runs: its best member and its mean.

    Args:
        paths (list of paths): the folders.

    Returns:
        tuple: the runs, and a sentence for each that cannot be read.

    Raises:
        CheckpointError: a folder without runs, or no run at all that can be read.
        ConfigError: no folder is given.
    """
    given = [paths] if isinstance(paths, (str, os.PathLike)) else list(paths)
    if not given:
        raise ConfigError("no run folder is given, expected one or more; name them.")
    folders: dict[Path, Path] = {}
    for path in given:
        inside = list(_run_folders(Path(path)))
        if not inside:
            read_run_config(path)  # which says what is missing
        folders |= {folder.resolve(): folder for folder in inside}
    runs, left_out = [], []
    for folder in folders.values():
        try:
            runs += read_population(folder) if is_evolved(folder) else [read_run(folder)]
        except UserError as error:
            left_out.append(str(error))
        except (OSError, UnicodeError) as error:
            left_out.append(f"{str(folder)!r} cannot be read: {error}.")
    if not runs:
        more = f" None of the other {len(left_out) - 1} can be read, either." * (len(left_out) > 1)
        raise CheckpointError(f"{left_out[0]}{more}")
    return runs, left_out


def _run_folders(folder: Path, depth: int = 0) -> Iterator[Path]:
    """Yields a run's folder itself, a population's members, or the runs below, by name.

    Of members that replace each other none is a run by itself: theirs is the population's folder.
    """
    if (folder / "config.yaml").is_file():
        evolved = next((path for path in (folder, folder.parent) if is_evolved(path)), None)
        yield from [evolved] if evolved else seed_folders(folder) or [folder]
        return
    if depth == _DEEPEST or not folder.is_dir():
        return
    try:
        inner = sorted(path for path in folder.iterdir() if path.is_dir())
    except OSError:
        return
    for path in inner:
        if not path.name.startswith("."):
            yield from _run_folders(path, depth + 1)


SHOWN = "population.members"
"""The setting that tells the two apart."""

_METHODS = {"pbt": "PBT", "tournament": "tournaments"}
_OF_ALL = ("iteration", "frames", "agent_frames", "seconds", "frames_per_second")
Table = Mapping[str, np.ndarray]


def is_evolved(folder: Path) -> bool:
    """Whether a folder is that of a population whose members replace each other."""
    if not (folder / "config.yaml").is_file():
        return False
    try:
        config = read_run_config(folder)
    except UserError:  # said where the run is read
        return False
    return config.population.size > 1 and config.evolution.method != "none"


def population_name(settings: Mapping[str, object]) -> str | None:
    """Returns ``best of PBT of 4``, or None for an ordinary run's settings."""
    if SHOWN not in settings:
        return None
    method = str(settings.get("evolution.method"))
    of = f"{_METHODS.get(method, method)} of {settings.get('population.size')}"
    return f"{settings[SHOWN]} of {of}"


def read_population(folder: Path) -> list[Curves]:
    """Reads a population: its best member at each measurement, and the mean of all.

    Args:
        folder (Path): the population's, in which its members' folders are.

    Raises:
        CheckpointError: one without members, or of which a member cannot be read.
    """
    members = [read_run(member) for member in seed_folders(folder)]
    if not members:
        raise CheckpointError(f"{str(folder)!r} is a population's and holds no member's folder.")
    own = dataclasses.replace(read_run(folder), evaluation={})
    size = len(members)
    together = f"together its members have been trained for {size} times its frames"
    notes = {
        "best": f"is the best of {size} members at each measurement, of which chance is part; "
        f"{together}",
        "mean": f"is the mean of {size} members; {together}",
    }
    cut = tuple(sorted({name for member in members for name in member.cut}))
    return [
        dataclasses.replace(
            own,
            settings={**own.settings, SHOWN: shown},
            training=_together([member.training for member in members], shown),
            evaluation=_together([member.evaluation for member in members], shown),
            cut=cut,
            notes=(note,),
        )
        for shown, note in notes.items()
    ]


def _together(tables: Sequence[Table], shown: str) -> dict[str, np.ndarray]:
    """Returns the columns that all have, at the frames that all have measured, ``[K]`` each."""
    if not all("frames" in table for table in tables):
        return {}
    frames = tables[0]["frames"]
    for table in tables[1:]:
        frames = np.intersect1d(frames, table["frames"])
    rows = [np.searchsorted(table["frames"], frames, side="right") - 1 for table in tables]
    names = [name for name in tables[0] if all(name in table for table in tables)]
    every = {name: np.stack([t[name][at] for t, at in zip(tables, rows)]) for name in names}
    returns = [name for name in names if name.endswith("/episode_reward")]
    score = "return_mean" if "return_mean" in names else returns[0] if len(returns) == 1 else None
    if shown == "best" and score is not None:
        known = np.where(np.isnan(every[score]), -np.inf, every[score])
        best = known.argmax(0), np.arange(len(frames))
        return {
            name: mean_of_known(x, 0) if name in _OF_ALL else x[best] for name, x in every.items()
        }
    return {name: mean_of_known(x, 0) for name, x in every.items()}


def mean_of_known(values: Numbers, axis: int) -> Numbers:
    """The mean of the runs that have the number: which have come so far, and not diverged."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # none has it
        return np.asarray(np.nanmean(values, axis))


# Of `env`, what changes what a return means.
_OF_TASK = ("env.library", "env.name", "env.max_steps", "env.group_map")
# What changes how fast a run is, or how far it has come, but not what is learned in so many frames.
_NOT_LEARNED = ("execution", "total_frames", "stop_at_return")
_NOT_LEARNED_SECTIONS = ("distributed.", "env.worker", "env.restart_workers")
# Of `distributed`, what says with which random states, and how late, a policy learns.
_LEARNED = tuple(
    f"distributed.{name}" for name in ("collectors", "overlap", "asynchronous", "max_lag")
)
_WAITS_NOT = "distributed.asynchronous"


@dataclass(frozen=True)
class Task:
    """A task with its arguments, and the seeds of each algorithm."""

    name: str
    settings: dict[str, Any]
    algorithms: dict[str, list[Record]]

    @property
    def records(self) -> list[Record]:
        """All runs."""
        return [record for seeds in self.algorithms.values() for record in seeds]


def is_task_setting(setting: str) -> bool:
    """Whether runs that differ in a setting are of different tasks."""
    return setting in _OF_TASK or setting.startswith("env.kwargs.")


def group(records: Sequence[Record]) -> list[Task]:
    """Groups runs by task, and within it by what is learned; seeds of one algorithm together.

    Names are as short as tells them apart: of a task its own, of an algorithm ``MAPPO``, then
    the recipe's, then the settings that differ.

    Args:
        records (list of Record): the runs.
    """
    together: dict[str, list[Record]] = {}
    for record in records:
        task = {key: x for key, x in record.run.settings.items() if is_task_setting(key)}
        together.setdefault(json.dumps(task, sort_keys=True), []).append(record)
    groups = list(together.values())
    all_settings = [
        {key: x for key, x in own[0].run.settings.items() if is_task_setting(key)} for own in groups
    ]
    names = _task_names([own[0].run for own in groups], all_settings)
    return sorted(
        (Task(*row) for row in zip(names, all_settings, map(_algorithms, groups))),
        key=lambda task: task.name,
    )


def by_task(runs: Sequence[Curves]) -> dict[str, dict[str, list[Curves]]]:
    """Groups runs as :func:`group` does, by the names of tasks and algorithms.

    Args:
        runs (list of Curves): as :func:`~torchrl_marl.apps.reports.curves.read_run` gives them.
    """
    nothing = Progress(*(np.empty(0),) * 4)
    records = [Record(run, nothing, nothing, False, ()) for run in runs]
    return {
        task.name: {name: [own.run for own in seeds] for name, seeds in task.algorithms.items()}
        for task in group(records)
    }


def each_seed_once(records: Sequence[Record]) -> tuple[list[Record], list[str]]:
    """Leaves out runs with the seed of another that learns the same, such as a population's.

    The run that stays has finished, or come farther; of equals it is the first.

    Args:
        records (list of Record): the runs.

    Returns:
        tuple: the others, and a sentence for each that is left out.
    """
    best: dict[str, Record] = {}
    for record in records:
        one = best.setdefault(_key(record), record)
        if (record.finished, record.frames) > (one.finished, one.frames):
            best[_key(record)] = record
    left_out = [
        f"{record.name!r} has the seed {record.run.seed} and what is learned of "
        f"{best[_key(record)].name!r}; a seed counts once."
        for record in records
        if best[_key(record)] is not record
    ]
    return list(best.values()), left_out


def _key(record: Record) -> str:
    """What makes runs one seed of one algorithm."""
    return json.dumps([record.run.seed, _learned(record.run)], sort_keys=True)


def _task_names(runs: Sequence[Curves], settings: Sequence[dict[str, Any]]) -> list[str]:
    plain = [environment_name(run) for run in runs]
    names = []
    for name, own in zip(plain, settings):
        alike = [other for other, of in zip(settings, plain) if of == name]
        names.append(", ".join([name, *differences(own, alike)]))
    return _distinguishable(names)


def _algorithms(records: Sequence[Record]) -> dict[str, list[Record]]:
    """Returns the algorithms of a task by name, each with its runs by seed."""
    learned = [dataclasses.replace(record.run, settings=_learned(record.run)) for record in records]
    of_run = {id(run): record for run, record in zip(learned, records)}
    groups = by_settings(learned)
    names = _algorithm_names([seeds[0] for seeds in groups])
    found = {
        name: sorted((of_run[id(run)] for run in seeds), key=lambda record: record.run.seed)
        for name, seeds in zip(names, groups)
    }
    return dict(sorted(found.items()))


def _learned(run: Curves) -> dict[str, Any]:
    """The settings that say what is learned in so many frames."""
    found = {name: value for name, value in run.settings.items() if _is_learned(name)}
    if found.get(_WAITS_NOT) == NOT_READ:  # without actors everything waits
        found[_WAITS_NOT] = False
    return found


def _is_learned(setting: str) -> bool:
    if setting in _LEARNED:
        return True
    of_speed = setting in _NOT_LEARNED or setting.startswith(_NOT_LEARNED_SECTIONS)
    return not of_speed and setting != "recipe"


def _algorithm_names(firsts: Sequence[Curves]) -> list[str]:
    """``MAPPO``, or ``MAPPO (rmappo, lr=0.01)`` with what tells several of one name apart."""
    plain = [_algorithm(run) for run in firsts]
    kinds = [(name, _recipe(run)) for run, name in zip(firsts, plain)]
    names = []
    for run, (name, recipe) in zip(firsts, kinds):
        recipes = {other for of, other in kinds if of == name}
        more = [recipe] if len(recipes) > 1 and recipe.upper() != name else []
        alike = [other.settings for other, kind in zip(firsts, kinds) if kind == (name, recipe)]
        more += differences(run.settings, alike, most=3)
        names.append(f"{name} ({', '.join(more)})" if more else name)
    return _distinguishable(names)


def _algorithm(run: Curves) -> str:
    """``MAPPO``, ``MAPPO + IQL`` of two groups, or ``MAPPO, best of PBT of 4``."""
    keys = [key for key in run.settings if key.startswith("groups.") and key.endswith(".algorithm")]
    words = [run.settings.get("learner.algorithm"), *(run.settings[key] for key in keys)]
    name = " + ".join(dict.fromkeys(str(word).upper() for word in words))
    population = population_name(run.settings)
    return name if population is None else f"{name}, {population}"


def _recipe(run: Curves) -> str:
    """Returns a recipe's name without the task's, of ``<library>_<task>_<algorithm>``."""
    return run.recipe.removeprefix(f"{run.settings.get('env.library')}_{environment_name(run)}_")


def _distinguishable(names: Iterable[str]) -> list[str]:
    """Numbers names that are the same, where settings that are not shown differ."""
    names, seen = list(names), Counter[str]()
    count = Counter(names)
    result = []
    for name in names:
        seen[name] += 1
        result.append(name if count[name] == 1 else f"{name} #{seen[name]}")
    return result
