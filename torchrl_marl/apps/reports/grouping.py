"""Finds and reads the runs of a report, and groups them by task and algorithm."""

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
    REWARD,
    Curves,
    differences,
    environment_name,
    group_by_settings,
    read_run,
)
from torchrl_marl.errors import CheckpointError, ConfigError, UserError
from torchrl_marl.training.config import read_run_config, seed_folders

__all__ = [
    "Record",
    "Task",
    "extract_record",
    "find_runs",
    "group",
    "group_by_task",
    "keep_one_run_per_seed",
    "remove_duplicate_runs",
]

Numbers = NDArray[np.float64]


@dataclass(frozen=True)
class Progress:
    """Measurements at K points of a training, ``[K]`` each; agent frames may be NaN."""

    frames: Numbers
    agent_frames: Numbers
    seconds: Numbers
    returns: Numbers

    def __len__(self) -> int:
        return len(self.frames)

    @property
    def end(self) -> float:
        """Number of frames at the last measurement."""
        return float(self.frames[-1])

    def at(self, frames: float) -> int | None:
        """Returns the index of the measurement nearest to given frames; None if over 10 % off."""
        place = int(np.abs(self.frames - frames).argmin())
        return place if abs(self.frames[place] - frames) <= 0.1 * frames else None


@dataclass(frozen=True)
class Record:
    """A run of a report: its measured returns and notes."""

    run: Curves
    evaluation: Progress
    training: Progress
    finished: bool
    notes: tuple[str, ...]
    """Notes on peculiarities of the run, each a sentence without its subject."""
    row: str = ""
    """Run of a table, such as ``"'ippo' in 'balance', seed 0"``; empty for run folders."""

    @property
    def measured(self) -> Progress:
        """Measurements of evaluations or, without evaluations after frame 0, of training."""
        return self.evaluation if self.is_evaluated else self.training

    @property
    def is_evaluated(self) -> bool:
        """True if :attr:`measured` holds evaluations."""
        untrained = len(self.training) and not self.evaluation.frames.any()
        return bool(len(self.evaluation)) and not untrained

    @property
    def name(self) -> str:
        """Path of the run folder, as the user gave it."""
        return str(self.run.folder)

    @property
    def source(self) -> str:
        """Path and, for a run of a table, which one it is."""
        return f"{self.name} ({self.row})" if self.row else self.name

    @property
    def frames(self) -> int:
        """Number of frames for which the run has been trained."""
        tables = (self.run.training, self.run.evaluation)
        return int(max(table["frames"][-1] for table in tables if len(table.get("frames", ()))))

    @property
    def total_frames(self) -> int:
        """Number of frames for which the run was configured."""
        return int(self.run.settings.get("total_frames", 0))

    def summarized(self, key: str) -> float | None:
        """Returns a number from ``summary.json``; None if it is missing or not finite."""
        value = self.run.summary.get(key)
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            return None
        return float(value) if np.isfinite(value) else None


def extract_record(run: Curves) -> Record | str:
    """Extracts the returns from a run's tables.

    Args:
        run (Curves): result of :func:`~torchrl_marl.apps.reports.curves.read_run`.

    Returns:
        Record or str: the record, or a sentence that says why there is none.
    """
    notes = list(run.notes)
    evaluation, broken = _progress(run, run.evaluation.get("return_mean"), run.evaluation)
    training, diverged = _progress(run, _training_returns(run), run.training)
    if broken is not None and not len(evaluation):
        return (
            f"{str(run.folder)!r} has a return that is not finite at its first evaluation, "
            f"frame {broken:,}, and so no score; train it again."
        )
    ends = [broken] if evaluation.frames.any() else [broken, diverged]
    if cuts := [end for end in ends if end is not None]:
        notes.append(f"has a return that is not finite at frame {min(cuts):,}; used up to there")
        if len(ends) > 1:  # training returns are used
            training = Progress(*(x[training.frames < min(cuts)] for x in vars(training).values()))
    notes += [f"has an incomplete last line in {name}, which is not used" for name in run.cut]
    if not len(evaluation) and not len(training):
        return (
            f"{str(run.folder)!r} has no finite return yet; "
            "wait for the first episode or evaluation to end."
        )
    finished = _is_finished(run)
    found = Record(run, evaluation, training, finished, ())
    # Null stands for NaN, or for no evaluation.
    if len(evaluation) and run.summary.get("return_after", 0) is None:
        notes.append("has diverged; its returns are those of its frozen networks")
    if not found.is_evaluated:
        after = " after frame 0" if len(evaluation) else ""
        notes.append(f"has no evaluations{after}; returns are those of training episodes")
    if not finished:
        of = f" of {found.total_frames:,}" if found.total_frames > found.frames else ""
        notes.insert(0, f"has not finished; used up to frame {found.frames:,}{of}")
    if "env.name" in run.settings and len(evaluation) and np.isnan(evaluation.agent_frames[-1]):
        known = run.training.get("frames", np.empty(0))
        end = f"ends at frame {known[-1]:,.0f}" if len(known) else "has no row"
        notes.append(f"has a metrics.csv that {end}; later evaluations have no agent frames")
    return Record(run, evaluation, training, finished, tuple(notes))


def remove_duplicate_runs(records: Sequence[Record]) -> tuple[list[Record], list[str]]:
    """Removes copies of runs: those with equal settings, seed and measurements.

    Args:
        records (list of Record): the runs.

    Returns:
        tuple: the remaining runs, and a sentence for each removed run.
    """
    first: dict[tuple[object, ...], Record] = {}
    left_out = []
    for record in records:
        run = record.run
        settings = tuple(sorted((key, str(value)) for key, value in run.settings.items()))
        tables = _numbers_as_bytes(run.training), _numbers_as_bytes(run.evaluation)
        one = first.setdefault((run.seed, settings, tables), record)
        if one is not record:
            left_out.append(
                f"{record.name!r} has the settings, the seed and every number of {one.name!r}; "
                "a copy of a run does not count."
            )
    return list(first.values()), left_out


def _numbers_as_bytes(table: dict[str, Numbers]) -> tuple[tuple[str, bytes], ...]:
    """Returns the bytes of a table's columns, except for columns with times."""
    return tuple((name, x.tobytes()) for name, x in table.items() if "second" not in name)


def _progress(
    run: Curves, returns: Numbers | None, table: dict[str, Numbers]
) -> tuple[Progress, int | None]:
    """Returns the measurements before the first non-finite return, and that return's frames.

    Training rows in which no episode ended have NaN as return; they are skipped.
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
        table[name][: len(known)][known]
        if name in table
        else _interpolate_counter(run, name, frames)
        for name in ("agent_frames", "seconds")
    )
    return Progress(frames, agent_frames, seconds, returns), broken


def _interpolate_counter(run: Curves, column: str, frames: Numbers) -> Numbers:
    """Interpolates a counter of ``metrics.csv`` at the given frames; unknown values are NaN."""
    table = run.training
    if column not in table or not len(table["frames"]):
        return np.where(frames == 0, 0.0, np.nan)
    x, y = np.append(0.0, table["frames"]), np.append(0.0, table[column])
    return np.interp(frames, x, y, right=np.nan)


def _training_returns(run: Curves) -> Numbers | None:
    """Returns the training returns if the task has one group, else None.

    With several groups, the mean would need the groups' sizes, which are not in the tables.
    """
    columns = [name for name in run.training if name.endswith(REWARD)]
    return run.training[columns[0]] if len(columns) == 1 else None


def _is_finished(run: Curves) -> bool:
    """Returns whether the run has ended.

    A run that was resumed after its end has more frames than its summary says; it has not ended.
    A pruned trial has a summary without a return after training.
    """
    if "return_random" in run.summary and "return_after" not in run.summary:
        return False
    frames = run.summary.get("frames")
    trained = run.training.get("frames", np.empty(0))
    return isinstance(frames, (int, float)) and (not len(trained) or trained[-1] <= frames)


_MAX_DEPTH = 6  # most levels of folders above a run


def find_runs(paths: Iterable[str | Path] | str | Path) -> tuple[list[Curves], list[str]]:
    """Reads all runs below the given folders.

    A folder may hold one run, several seeds, a population or a suite. A population whose members
    replace each other counts as two runs: its best member, and the mean of its members.

    Args:
        paths (list of paths): the folders.

    Returns:
        tuple: the runs, and a sentence for each run that cannot be read.

    Raises:
        CheckpointError: a folder holds no runs, or no run can be read.
        ConfigError: no folder is given.
    """
    given = [paths] if isinstance(paths, (str, os.PathLike)) else list(paths)
    if not given:
        raise ConfigError("no run folder is given, expected at least one; name it.")
    folders: dict[Path, Path] = {}
    for path in given:
        inside = list(_run_folders(Path(path)))
        if not inside and Path(path).is_dir():
            raise CheckpointError(
                f"{str(path)!r} is not a run folder, and no folder in it is one; give the folder "
                "of a run, a sweep, a suite or a tuning."
            )
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
        more = f" The other {len(left_out) - 1} cannot be read, either." * (len(left_out) > 1)
        raise CheckpointError(f"{left_out[0]}{more}")
    return runs, left_out


def _run_folders(folder: Path, depth: int = 0) -> Iterator[Path]:
    """Yields the run folders at a path: the path itself, a population's members, or runs below.

    If the members of a population replace each other, only the population's folder is a run.
    """
    if (folder / "config.yaml").is_file():
        evolved = next((path for path in (folder, folder.parent) if is_evolved(path)), None)
        yield from [evolved] if evolved else seed_folders(folder) or [folder]
        return
    if depth == _MAX_DEPTH or not folder.is_dir():
        return
    try:
        inner = sorted(path for path in folder.iterdir() if path.is_dir())
    except OSError:
        return
    for path in inner:
        if not path.name.startswith("."):
            yield from _run_folders(path, depth + 1)


SHOWN = "population.members"
"""Setting that says whether a run stands for a population's best member or its mean."""

_METHOD_NAMES = {"pbt": "PBT", "tournament": "tournaments"}
_AVERAGED_COLUMNS = ("iteration", "frames", "agent_frames", "seconds", "frames_per_second")
Table = Mapping[str, np.ndarray]


def is_evolved(folder: Path) -> bool:
    """Returns whether a folder holds a population in which members replace each other."""
    if not (folder / "config.yaml").is_file():
        return False
    try:
        config = read_run_config(folder)
    except UserError:  # reported where the run is read
        return False
    return config.population.size > 1 and config.evolution.method != "none"


def population_name(settings: Mapping[str, object]) -> str | None:
    """Returns a name such as ``best of PBT of 4``, or None for an ordinary run."""
    if SHOWN not in settings:
        return None
    method = str(settings.get("evolution.method"))
    of = f"{_METHOD_NAMES.get(method, method)} of {settings.get('population.size')}"
    return f"{settings[SHOWN]} of {of}"


def read_population(folder: Path) -> list[Curves]:
    """Reads a population as two runs: the best member at each measurement, and the mean.

    Args:
        folder (Path): folder of the population, which holds the members' folders.

    Raises:
        CheckpointError: the population has no members, or a member cannot be read.
    """
    members = [read_run(member) for member in seed_folders(folder)]
    if not members:
        raise CheckpointError(f"population {str(folder)!r} has no member's folder.")
    own = dataclasses.replace(read_run(folder), evaluation={})
    size = len(members)
    together = f"all members together have been trained for {size} times its frames"
    notes = {
        "best": f"is the best of {size} members at each measurement, and so partly luck; "
        f"{together}",
        "mean": f"is the mean of {size} members; {together}",
    }
    cut = tuple(sorted({name for member in members for name in member.cut}))
    summaries = {"best": {**own.summary, **_absolute_of_best(members)}, "mean": own.summary}
    return [
        dataclasses.replace(
            own,
            summary=summaries[shown],
            settings={**own.settings, SHOWN: shown},
            training=_combine_members([member.training for member in members], shown),
            evaluation=_combine_members([member.evaluation for member in members], shown),
            cut=cut,
            notes=(note,),
        )
        for shown, note in notes.items()
    ]


def _absolute_of_best(members: Sequence[Curves]) -> dict[str, Any]:
    """Returns ``return_absolute`` of the member with the best evaluation, if there is one."""
    known = [own for own in members if own.summary.get("return_absolute") is not None]
    best = max(known, key=lambda own: np.nanmax(own.evaluation["return_mean"]), default=None)
    return {} if best is None else {"return_absolute": best.summary["return_absolute"]}


def _combine_members(tables: Sequence[Table], shown: str) -> dict[str, np.ndarray]:
    """Combines the columns that all members have, at their common frames, ``[K]`` each."""
    if not all("frames" in table for table in tables):
        return {}
    frames = tables[0]["frames"]
    for table in tables[1:]:
        frames = np.intersect1d(frames, table["frames"])
    rows = [np.searchsorted(table["frames"], frames, side="right") - 1 for table in tables]
    names = [name for name in tables[0] if all(name in table for table in tables)]
    every = {name: np.stack([t[name][at] for t, at in zip(tables, rows)]) for name in names}
    returns = [name for name in names if name.endswith(REWARD)]
    score = "return_mean" if "return_mean" in names else returns[0] if len(returns) == 1 else None
    if shown == "best" and score is not None:
        known = np.where(np.isnan(every[score]), -np.inf, every[score])
        best = known.argmax(0), np.arange(len(frames))
        return {
            name: mean_of_known(x, 0) if name in _AVERAGED_COLUMNS else x[best]
            for name, x in every.items()
        }
    return {name: mean_of_known(x, 0) for name, x in every.items()}


def mean_of_known(values: Numbers, axis: int) -> Numbers:
    """Returns the mean over all numbers that are not NaN; NaN if there are none."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # none has it
        return np.asarray(np.nanmean(values, axis))


# Settings of `env` that change the meaning of a return.
_TASK_SETTINGS = ("env.library", "env.name", "env.max_steps", "env.group_map")
# Settings that change a run's speed or length, but not the policy after a number of frames.
_SETTINGS_WITHOUT_EFFECT = ("execution", "total_frames", "stop_at_return", "until")
_SECTIONS_WITHOUT_EFFECT = ("distributed.", "until.", "env.worker", "env.restart_workers")
# Settings of `distributed` that change the random states or the lag of a policy.
_LEARNING_SETTINGS = tuple(
    f"distributed.{name}" for name in ("collectors", "overlap", "asynchronous", "max_lag")
)
_ASYNCHRONOUS = "distributed.asynchronous"


@dataclass(frozen=True)
class Task:
    """A task with its arguments, and the runs of each algorithm."""

    name: str
    settings: dict[str, Any]
    algorithms: dict[str, list[Record]]

    @property
    def records(self) -> list[Record]:
        """The runs of all algorithms."""
        return [record for seeds in self.algorithms.values() for record in seeds]


def is_task_setting(setting: str) -> bool:
    """Returns whether a setting is part of the task."""
    return setting in _TASK_SETTINGS or setting.startswith("env.kwargs.")


def group(records: Sequence[Record]) -> list[Task]:
    """Groups runs by task and, within a task, by algorithm.

    Names are as short as possible: a task's name without its path, and ``MAPPO`` for an algorithm.
    The recipe and differing settings are added only if needed.

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
        (Task(*row) for row in zip(names, all_settings, map(_group_by_algorithm, groups))),
        key=lambda task: task.name,
    )


def group_by_task(runs: Sequence[Curves]) -> dict[str, dict[str, list[Curves]]]:
    """Groups runs as :func:`group` does; returns a dict: task -> algorithm -> runs.

    Args:
        runs (list of Curves): results of :func:`~torchrl_marl.apps.reports.curves.read_run`.
    """
    nothing = Progress(*(np.empty(0),) * 4)
    records = [Record(run, nothing, nothing, False, ()) for run in runs]
    return {
        task.name: {name: [own.run for own in seeds] for name, seeds in task.algorithms.items()}
        for task in group(records)
    }


def keep_one_run_per_seed(records: Sequence[Record]) -> tuple[list[Record], list[str]]:
    """Keeps one run of each algorithm and seed.

    Several may exist, for example if a population's member repeats another run.

    A finished run is preferred to an unfinished one, then a longer run, then the first.

    Args:
        records (list of Record): the runs.

    Returns:
        tuple: the remaining runs, and a sentence for each removed run.
    """
    best: dict[str, Record] = {}
    for record in records:
        one = best.setdefault(_seed_key(record), record)
        if (record.finished, record.frames) > (one.finished, one.frames):
            best[_seed_key(record)] = record
    left_out = [
        f"{record.name!r} has the seed {record.run.seed} and the learning settings of "
        f"{best[_seed_key(record)].name!r}; a seed counts once."
        for record in records
        if best[_seed_key(record)] is not record
    ]
    return list(best.values()), left_out


def _seed_key(record: Record) -> str:
    """Returns a key that is equal for runs with the same seed and algorithm."""
    return json.dumps([record.run.seed, _learning_settings(record.run)], sort_keys=True)


def _task_names(runs: Sequence[Curves], settings: Sequence[dict[str, Any]]) -> list[str]:
    plain = [environment_name(run) for run in runs]
    names = []
    for name, own in zip(plain, settings):
        alike = [other for other, of in zip(settings, plain) if of == name]
        names.append(", ".join([name, *differences(own, alike)]))
    return _number_duplicates(names)


def _group_by_algorithm(records: Sequence[Record]) -> dict[str, list[Record]]:
    """Returns the algorithms of a task by name, each with its runs sorted by seed."""
    learned = [
        dataclasses.replace(record.run, settings=_learning_settings(record.run))
        for record in records
    ]
    of_run = {id(run): record for run, record in zip(learned, records)}
    groups = group_by_settings(learned)
    names = _algorithm_names([seeds[0] for seeds in groups])
    found = {
        name: sorted((of_run[id(run)] for run in seeds), key=lambda record: record.run.seed)
        for name, seeds in zip(names, groups)
    }
    return dict(sorted(found.items()))


def _learning_settings(run: Curves) -> dict[str, Any]:
    """Returns the settings that decide which policy a run has after a given number of frames."""
    found = {name: value for name, value in run.settings.items() if _affects_learning(name)}
    if found.get(_ASYNCHRONOUS) == NOT_READ:  # without actors everything waits
        found[_ASYNCHRONOUS] = False
    return found


def _affects_learning(setting: str) -> bool:
    if setting in _LEARNING_SETTINGS:
        return True
    of_speed = setting in _SETTINGS_WITHOUT_EFFECT or setting.startswith(_SECTIONS_WITHOUT_EFFECT)
    return not of_speed and setting != "recipe"


def _algorithm_names(firsts: Sequence[Curves]) -> list[str]:
    """Returns names such as ``MAPPO``; equal names are extended, as ``MAPPO (rmappo, lr=0.01)``."""
    plain = [_algorithm_name(run) for run in firsts]
    kinds = [(name, _short_recipe(run)) for run, name in zip(firsts, plain)]
    names = []
    for run, (name, recipe) in zip(firsts, kinds):
        recipes = {other for of, other in kinds if of == name}
        more = [recipe] if len(recipes) > 1 and recipe.upper() != name else []
        alike = [other.settings for other, kind in zip(firsts, kinds) if kind == (name, recipe)]
        more += differences(run.settings, alike, most=3)
        names.append(f"{name} ({', '.join(more)})" if more else name)
    return _number_duplicates(names)


def _algorithm_name(run: Curves) -> str:
    """Returns a name such as ``MAPPO``, ``MAPPO + IQL`` or ``MAPPO, best of PBT of 4``."""
    keys = [key for key in run.settings if key.startswith("groups.") and key.endswith(".algorithm")]
    words = [run.settings.get("learner.algorithm"), *(run.settings[key] for key in keys)]
    name = " + ".join(dict.fromkeys(str(word).upper() for word in words))
    population = population_name(run.settings)
    return name if population is None else f"{name}, {population}"


def _short_recipe(run: Curves) -> str:
    """Returns the recipe's name without its prefix ``<library>_<task>_``."""
    return run.recipe.removeprefix(f"{run.settings.get('env.library')}_{environment_name(run)}_")


def _number_duplicates(names: Iterable[str]) -> list[str]:
    """Adds numbers to names that are still equal although the settings differ."""
    names, seen = list(names), Counter[str]()
    count = Counter(names)
    result = []
    for name in names:
        seen[name] += 1
        result.append(name if count[name] == 1 else f"{name} #{seen[name]}")
    return result
