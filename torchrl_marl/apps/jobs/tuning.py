"""Tuning: Optuna proposes settings; each is a trial, and populations train trials in parallel.

With pruning, :mod:`~torchrl_marl.apps.jobs.halving` ends poor trials early.
"""

from __future__ import annotations

import contextlib
import csv
import importlib.util
import json
import math
import os
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from torchrl_marl.apps.jobs.halving import (
    Halving,
    prune_trials,
    pruner_of,
    rungs_of,
)
from torchrl_marl.apps.jobs.jobs import train_or_resume
from torchrl_marl.errors import (
    CheckpointError,
    ConfigError,
    MissingExtraError,
    NonFiniteError,
    closest,
    quoted,
)
from torchrl_marl.learners.capabilities import VARYING
from torchrl_marl.recipes import load_config
from torchrl_marl.settings import flatten, shown
from torchrl_marl.settings.layers import plain
from torchrl_marl.training.config import TrainConfig, read_run_config, seed_folders
from torchrl_marl.training.files import (
    append,
    explain_write_errors,
    open_atomically,
    open_to_append,
)
from torchrl_marl.training.folder import RunFolder
from torchrl_marl.training.origin import signed_yaml

if TYPE_CHECKING:
    from torchrl_marl.training.run import Run

__all__ = ["Choice", "parse_choice", "tune"]

_RANGE = re.compile(r"(?P<low>[^.:\s]+(?:\.\d[^.:\s]*)?)\.\.(?P<high>[^:\s]+?)(?P<log>:log)?")

# Settings that may differ when a search is resumed.
_CHANGEABLE_SETTINGS = (
    "device",
    "threads",
    "execution",
    "folder",
    "checkpoint.",
    "logging.",
    "population.",
)


@dataclass(frozen=True)
class Choice:
    """A setting to tune, and its range."""

    name: str
    """Dotted name, such as ``learner.lr``."""
    low: float
    high: float
    log: bool = False
    """Logarithmic scale."""


def parse_choice(text: str) -> Choice | None:
    """Parses a range such as ``learner.lr=1e-4..1e-2:log``; returns None for a single value.

    Raises:
        ConfigError: the range is invalid, or the setting cannot differ between members of a
            population.

    Examples:
        >>> parse_choice("learner.lr=1e-4..1e-2:log")
        Choice(name='learner.lr', low=0.0001, high=0.01, log=True)
        >>> parse_choice("learner.lr=1e-3") is None
        True
    """
    name, _, value = text.partition("=")
    if ".." not in value or "/" in value:
        return None
    found = _RANGE.fullmatch(value)
    try:
        low, high = (float(found[part]) for part in ("low", "high")) if found else (1.0, 0.0)
    except ValueError:
        low, high = 1.0, 0.0
    log = bool(found and found["log"])
    if not (math.isfinite(low) and math.isfinite(high) and low < high) or (log and low <= 0):
        raise ConfigError(
            f"{name} is {quoted(value)}, expected a range such as 1e-4..1e-2:log or 0..0.05, with "
            "the smaller number first (above 0 with :log)."
        )
    known = [f"learner.{one}" for one in VARYING]
    if name not in known:
        near = closest(name, known)
        raise ConfigError(
            f"{name} cannot differ between parallel trials; "
            f"{f'did you mean {near!r}? ' if near else ''}expected one of {', '.join(known)}."
        )
    return Choice(name, low, high, log)


def tune(
    recipe: str | Path,
    choices: Sequence[Choice],
    settings: Sequence[str] = (),
    *,
    trials: int = 32,
    together: int = 8,
    folder: str | Path,
    prune: str | None = None,
    log: Callable[[str], None] = print,
) -> Path:
    """Searches for good settings with Optuna's TPE sampler; trains trials together as populations.

    If the search is interrupted, the same call resumes it. The search writes ``trials.csv``, a run
    folder for each trial, and the recipe ``best.yaml`` with the best settings.

    Args:
        recipe (str or Path): name or file of a recipe.
        choices (sequence of Choice): settings to tune.
        settings (sequence of str): further settings, each as ``key=value``.

    Keyword Args:
        trials (int): total number of trials; without ``prune`` it is rounded up to whole
            populations of ``together``.
        together (int): number of parallel trials.
        folder (str or Path): folder of the search.
        prune (str, optional): ``"asha"``: end poor trials early, and start others in their place.
        log (callable): called with a line of text for each new best trial; with ``prune``, for
            each trial that ends.

    Returns:
        Path: ``best.yaml``.

    Raises:
        ConfigError: there is nothing to tune, fewer than two trials are parallel, or settings are
            incompatible, given twice or set by the search itself.
        CheckpointError: another search is running in the folder.
        MissingExtraError: Optuna is not installed.

    Reference: Akiba et al., 2019, https://arxiv.org/abs/1907.10902 (Optuna).
    """
    _check_request(choices, settings, trials, together, prune)
    base, folder = _read_recipe(recipe, choices, settings, together, prune), Path(folder)
    rungs = rungs_of(base) if prune else []
    with _lock_folder(folder):
        study = _open_study(folder, base.seed, pruner_of(rungs))
        _check_options(study, {"prune": prune, "together": together if prune else None}, folder)
        _check_search(study, _describe_search(base, choices), folder)
        if prune:
            scheduler = Halving(
                study, partial(_suggest_values, choices, base.seed), trials, rungs, log
            )
            prune_trials(scheduler, base, folder)
        while len(_ended_trials(study)) < trials:
            with _fail_diverged_trials(study, log):
                _run_trials(study, base, choices, folder, log)
        _write_table(study, choices, folder)
        return _write_best(study, folder)


def _check_request(
    choices: Sequence[Choice],
    settings: Sequence[str],
    trials: int,
    together: int,
    prune: str | None,
) -> None:
    """Checks the arguments of a search that do not depend on the recipe."""
    if prune not in (None, "asha"):
        raise ConfigError(f"prune is {quoted(prune)}, expected asha or nothing.")
    if importlib.util.find_spec("optuna") is None:
        raise MissingExtraError("optuna", "tune")
    if not choices:
        raise ConfigError(
            "no setting has a range, expected one or more, such as learner.lr=1e-4..1e-2:log."
        )
    if together < 2 or trials < together:
        raise ConfigError(
            f"trials is {trials} and together {together}, expected together >= 2 and trials >= "
            "together; use --trials 32 --together 8."
        )
    _check_names(choices, settings)


def _read_recipe(
    recipe: str | Path,
    choices: Sequence[Choice],
    settings: Sequence[str],
    together: int,
    prune: str | None,
) -> TrainConfig:
    """Returns the settings that all trials share, checked together with the ranges."""
    base = load_config(recipe, [*settings, f"population.size={together}"])
    load_config(
        replace(base, population=replace(base.population, vary=_ranges_as_settings(choices))), {}
    )
    if base.evolution.method != "none":
        raise ConfigError(
            f"evolution.method is {base.evolution.method!r}, expected none: a trial keeps its "
            "settings; use evolution.method=none."
        )
    if prune and base.evaluation.absolute_episodes:
        raise ConfigError(
            f"evaluation.absolute_episodes is {base.evaluation.absolute_episodes}, expected 0 with "
            "--prune, which ends trials at different times; use evaluation.absolute_episodes=0."
        )
    return base


def _check_names(choices: Sequence[Choice], settings: Sequence[str]) -> None:
    """Refuses settings that the search sets for each trial, and settings given twice."""
    names = [one.name for one in choices] + [text.partition("=")[0] for text in settings]
    for name in names:
        if name.partition(".")[0] in ("folder", "population"):
            raise ConfigError(
                f"{name} cannot be given, since the search sets it for each trial; use --out for "
                "the folder, and --together for the number of parallel trials."
            )
        if names.count(name) > 1:
            raise ConfigError(f"{name} is given twice, expected once; leave one out.")


@contextlib.contextmanager
def _lock_folder(folder: Path) -> Iterator[None]:
    """Creates the folder of a search, and keeps other searches out of it."""
    with explain_write_errors(folder):
        folder.mkdir(parents=True, exist_ok=True)
    lock = RunFolder(folder, "folder of a tuning")
    try:
        yield
    finally:
        lock.release()


def _ranges_as_settings(choices: Sequence[Choice]) -> dict[str, Any]:
    return {c.name: {"low": c.low, "high": c.high, "log": c.log} for c in choices}


def _suggest_values(choices: Sequence[Choice], seed: int, trial: Any) -> dict[str, float]:
    """Returns a trial's values. A resumed search draws what it would have drawn uninterrupted."""
    drawn = np.random.SeedSequence([seed, trial.number]).generate_state(1)[0]
    trial.study.sampler = _make_sampler(int(drawn))
    return {c.name: trial.suggest_float(c.name, c.low, c.high, log=c.log) for c in choices}


def _make_sampler(seed: int) -> Any:
    import optuna

    # Parallel trials get proposals far apart from each other.
    return optuna.samplers.TPESampler(seed=seed, constant_liar=True)


def _describe_search(base: TrainConfig, choices: Sequence[Choice]) -> dict[str, str]:
    """Returns what a resumed search keeps, by name: its recipe, settings and ranges, as text."""
    found = {
        key: shown(plain(value))
        for key, value in flatten(asdict(base)).items()
        if not key.startswith(_CHANGEABLE_SETTINGS)
    }
    ranges = {c.name: f"{c.low}..{c.high}{':log' * c.log}" for c in choices}
    return {**found, **ranges, "recipe": base.recipe}


def _check_search(study: Any, given: dict[str, str], folder: Path) -> None:
    """Raises an error if a folder holds a search of other ranges or with other settings."""
    begun = study.get_trials(deepcopy=False) and study.user_attrs.get("search")
    known: dict[str, str] = begun or given  # earlier versions did not write it down
    keys = [key for key in given | known if known.get(key) != given.get(key)]
    if keys and keys != ["recipe"]:
        before, now = (
            f"{keys[0]}={one[keys[0]]}" if keys[0] in one else f"no {keys[0]}"
            for one in (known, given)
        )
        raise ConfigError(
            f"{str(folder)!r} was begun with {before}, and {now} is asked for; resume it with the "
            "same settings and ranges, or give another --out."
        )
    study.set_user_attr("search", given)


def _check_options(study: Any, given: dict[str, Any], folder: Path) -> None:
    """Raises an error if a search is resumed with other options than it was started with."""
    known = {key: study.user_attrs.get(key) for key in given}
    if study.get_trials(deepcopy=False) and known != given:
        words = {
            True: f"with --prune asha --together {known['together']}",
            False: "without --prune",
        }
        raise ConfigError(
            f"{str(folder)!r} was begun {words[bool(known['prune'])]}; resume it with the same "
            "options, or give another --out."
        )
    for key, value in given.items():
        study.set_user_attr(key, value)


def _open_study(folder: Path, seed: int, pruner: Any) -> Any:
    import optuna
    from optuna.storages import JournalStorage
    from optuna.storages.journal import JournalFileBackend

    path = folder / "study.log"

    class StudyLog(JournalFileBackend):
        """Log whose lines are written completely or not at all; the folder has one writer."""

        def append_logs(self, logs: list[dict[str, Any]]) -> None:
            append(path, "".join(json.dumps(log) + "\n" for log in logs))

    optuna.logging.set_verbosity(optuna.logging.WARNING)
    _cut_incomplete_line(path)
    try:
        storage = JournalStorage(StudyLog(str(path)))
        study = optuna.create_study(
            storage=storage,
            study_name="tune",
            load_if_exists=True,
            direction="maximize",
            sampler=_make_sampler(seed),
            pruner=pruner,
        )
        (_,) = storage.get_all_studies()  # a damaged name would have begun a second study
    except (ValueError, LookupError, TypeError, AssertionError) as error:
        raise CheckpointError(
            f"{str(path)!r} is damaged ({type(error).__name__}); restore it, or search in another "
            "folder with --out."
        ) from error
    return study


def _cut_incomplete_line(path: Path) -> None:
    """Creates a log, or cuts the last line if a crash has left it incomplete."""
    with (
        explain_write_errors(path),
        open_to_append(path) as file,
    ):  # Optuna would follow a hard link
        file.truncate(path.read_bytes().rfind(b"\n") + 1)


@contextlib.contextmanager
def _fail_diverged_trials(study: Any, log: Callable[[str], None]) -> Iterator[None]:
    """Marks the running trials as failed if all of them diverge, so that others can follow.

    Raises:
        NonFiniteError: no trial before them has a return, so the ranges may be wrong.
    """
    try:
        yield
    except NonFiniteError as error:
        for trial in study.get_trials(deepcopy=False):
            if not trial.state.is_finished():
                study.tell(trial.number, state=_failed_state())
        if not _complete_trials(study):
            raise
        log(f"trials failed: {error}")


def _complete_trials(study: Any) -> list[Any]:
    return [trial for trial in _ended_trials(study) if trial.state.name == "COMPLETE"]


def _ended_trials(study: Any) -> list[Any]:
    return [trial for trial in study.get_trials(deepcopy=False) if trial.state.is_finished()]


def _run_trials(
    study: Any,
    base: TrainConfig,
    choices: Sequence[Choice],
    folder: Path,
    log: Callable[[str], None],
) -> None:
    """Trains a population of proposed trials, or resumes an interrupted one."""
    size = base.population.size
    numbers = _interrupted_population(study, choices, folder, size)
    if numbers:
        proposed = [study.get_trials(deepcopy=False)[number].params for number in numbers]
    else:
        asked = [study.ask() for _ in range(size)]
        numbers = [trial.number for trial in asked]
        proposed = [_suggest_values(choices, base.seed, trial) for trial in asked]
    where = _population_folder(folder, numbers[0])
    vary = {c.name: [own[c.name] for own in proposed] for c in choices}
    config = replace(base, population=replace(base.population, vary=vary), folder=str(where))
    run = train_or_resume(config, where if (where / "checkpoints").exists() else None)
    best = study.best_value if any(t.value is not None for t in _ended_trials(study)) else -math.inf
    for number, member in zip(numbers, cast(Any, run).members):
        value = _final_return(member)
        if study.get_trials(deepcopy=False)[number].state.is_finished():
            continue  # recorded before an interruption
        if value is None:
            study.tell(number, state=_failed_state())
            continue
        study.tell(number, value)
        if value > best:
            best = value
            shown = ", ".join(f"{k}={v:.4g}" for k, v in proposed[numbers.index(number)].items())
            log(f"trial {number}: return {value:.4g} with {shown} ({member.folder})")


def _interrupted_population(
    study: Any, choices: Sequence[Choice], folder: Path, size: int
) -> list[int]:
    """Returns the trials of a population whose training or results are incomplete; else none.

    Raises:
        ConfigError: they were trained in a population of another size.
    """
    running = [trial for trial in study.get_trials() if not trial.state.is_finished()]
    if not running:
        return []
    at = running[0].number
    for first, population in reversed(_populations(folder)):
        members = len(seed_folders(population))
        if first <= at < first + members and (population / "checkpoints").exists():
            _check_size(folder, members, size)
            return list(range(first, first + size))
    if len(running) == size and all(c.name in x.params for x in running for c in choices):
        return [trial.number for trial in running]
    for trial in running:  # interrupted while proposing
        study.tell(trial.number, state=_failed_state())
    return []


def _check_size(folder: Path, members: int, size: int) -> None:
    """Refuses another size for a population whose training was interrupted."""
    if members != size:
        raise ConfigError(
            f"{str(folder)!r} has {members} unfinished trials, trained together; resume it "
            f"with --together {members}, or give another --out."
        )


def _population_folder(folder: Path, first: int) -> Path:
    """Returns the run folder of a population of trials, by the number of its first trial."""
    return folder / f"trials_{first:04d}"


def _populations(folder: Path) -> list[tuple[int, Path]]:
    """Returns the number of the first trial and the run folder of each population, ascending."""
    named = [(path.name.removeprefix("trials_"), path) for path in folder.glob("trials_*")]
    return sorted((int(number), path) for number, path in named if number.isdecimal())


def _final_return(member: Run) -> float | None:
    value = member.summary.get("return_after")
    return value if value is not None and math.isfinite(value) else None


def _failed_state() -> Any:
    from optuna.trial import TrialState

    return TrialState.FAIL


def _write_table(study: Any, choices: Sequence[Choice], folder: Path) -> None:
    places = _trial_folders(folder)
    with open_atomically(folder / "trials.csv", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["trial", *(c.name for c in choices), "return", "state", "folder"])
        for trial in _ended_trials(study):
            values = [f"{trial.params.get(c.name, math.nan):.6g}" for c in choices]
            found = "" if trial.value is None else f"{trial.value:.6g}"
            state, place = trial.state.name.lower(), places.get(trial.number, "")
            writer.writerow([trial.number, *values, found, state, place])


def _trial_folders(folder: Path) -> dict[int, str]:
    """Returns the run folder of each trial, by the trial's number."""
    found = {}
    for first, population in _populations(folder):
        for i, member in enumerate(seed_folders(population)):
            found[first + i] = os.path.relpath(member, folder)
    return found


def _write_best(study: Any, folder: Path) -> Path:
    """Writes the settings of the best trial as a recipe."""
    if not _complete_trials(study):
        raise ConfigError(f"no trial in {str(folder)!r} has a finite return; narrow the ranges.")
    place = _trial_folders(folder)[study.best_trial.number]
    config = read_run_config(folder / place)
    own = replace(config, folder=None, recipe="custom")
    with open_atomically(folder / "best.yaml") as file:
        file.write(
            f"# Trial {study.best_trial.number} of {len(_ended_trials(study))}: return "
            f"{study.best_value:.4g}, in {place}.\n" + signed_yaml(own)
        )
    return folder / "best.yaml"
