"""Tuning: Optuna proposes settings; each is a trial, and populations train trials in parallel.

With pruning, trials are the members of one population, and successive halving may end them early.
At each rung (a sixty-fourth, a sixteenth and a quarter of the run), a trial continues only if its
return is in the best quarter of the returns seen at this rung. A new trial takes the place of a
pruned one.

Reference: Li et al., 2020, https://arxiv.org/abs/1810.05934 (ASHA).
"""

from __future__ import annotations

import contextlib
import csv
import importlib.util
import math
import os
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from torchrl_marl.apps.jobs.jobs import train_or_resume
from torchrl_marl.apps.jobs.trials import Trials
from torchrl_marl.errors import ConfigError, MissingExtraError, NonFiniteError, closest, quoted
from torchrl_marl.learners.capabilities import VARYING
from torchrl_marl.recipes import load_config
from torchrl_marl.settings import flatten, override, shown
from torchrl_marl.settings.layers import plain
from torchrl_marl.training.config import TrainConfig, read_run_config, seed_folders
from torchrl_marl.training.files import explain_write_errors, open_atomically, open_to_append
from torchrl_marl.training.folder import RunFolder, has_checkpoint
from torchrl_marl.training.origin import signed_yaml
from torchrl_marl.training.trainer import finish, resume_training, start_training

if TYPE_CHECKING:
    from torchrl_marl.training.run import Run

__all__ = ["Choice", "Halving", "parse_choice", "tune"]

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
    folder = Path(folder)
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

    optuna.logging.set_verbosity(optuna.logging.WARNING)
    with explain_write_errors(folder / "study.log"):
        open_to_append(folder / "study.log").close()  # Optuna would follow a hard link
    return optuna.create_study(
        storage=JournalStorage(JournalFileBackend(str(folder / "study.log"))),
        study_name="tune",
        load_if_exists=True,
        direction="maximize",
        sampler=_make_sampler(seed),
        pruner=pruner,
    )


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
    running = [trial for trial in study.get_trials() if not trial.state.is_finished()]
    size = base.population.size
    _check_size(folder, running, size)
    proposed_all = all(c.name in trial.params for trial in running for c in choices)
    if len(running) not in (0, size) or not proposed_all:  # interrupted while proposing
        for trial in running:
            study.tell(trial.number, state=_failed_state())
        running = []
    if running:
        numbers = [trial.number for trial in running]
        proposed = [trial.params for trial in running]
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
        if value is None:
            study.tell(number, state=_failed_state())
            continue
        study.tell(number, value)
        if value > best:
            best = value
            shown = ", ".join(f"{k}={v:.4g}" for k, v in proposed[numbers.index(number)].items())
            log(f"trial {number}: return {value:.4g} with {shown} ({member.folder})")


def _check_size(folder: Path, running: Sequence[Any], size: int) -> None:
    """Refuses another size for a population whose training was interrupted."""
    if len(running) in (0, size):
        return
    if (_population_folder(folder, running[0].number) / "checkpoints").exists():
        raise ConfigError(
            f"{str(folder)!r} has {len(running)} unfinished trials, trained together; resume it "
            f"with --together {len(running)}, or give another --out."
        )


def _population_folder(folder: Path, first: int) -> Path:
    """Returns the run folder of a population of trials, by the number of its first trial."""
    return folder / f"trials_{first:04d}"


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
    for population in sorted(folder.glob("trials_*")):
        first = int(population.name.partition("_")[2])
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


_REDUCTION = 4
_MAX_RUNGS = 3


def rungs_of(config: TrainConfig) -> list[int]:
    """Returns the environment steps at which trials are compared, ascending.

    Args:
        config (TrainConfig): settings of each trial.

    Raises:
        ConfigError: the run is too short for a rung, the algorithm is off-policy, or there are
            schedules. All members would share a schedule, although their trials begin at different
            times.

    Examples:
        >>> rungs_of(TrainConfig(total_frames=640_000, frames_per_batch=6_400))
        [10000, 40000, 160000]
        >>> rungs_of(TrainConfig(total_frames=64_000, frames_per_batch=6_400))
        [16000]
    """
    learners = {"learner.": config.learner}
    learners |= {f"groups.{name}.": override(config, "groups", name) for name in config.groups}
    for at, learner in learners.items():
        if learner.algorithm not in ("mappo", "ippo"):
            raise ConfigError(
                f"{at}algorithm is {learner.algorithm!r}, expected mappo or ippo with --prune: "
                "others would learn from the replay buffer of the trial before; leave --prune out."
            )
        for name in ("lr_schedule", "entropy_schedule"):
            if getattr(learner, name, "constant") != "constant":
                raise ConfigError(
                    f"{at}{name} is {quoted(getattr(learner, name))}, expected constant with "
                    "--prune, since trials begin at different times; use "
                    f"{at}{name}=constant, or leave --prune out."
                )
    longest = math.log(config.total_frames / config.frames_per_batch, _REDUCTION)
    count = min(_MAX_RUNGS, int(longest + 1e-9))
    if count < 1:
        raise ConfigError(
            f"total_frames is {config.total_frames}, expected {_REDUCTION} times frames_per_batch "
            f"({config.frames_per_batch}) or more with --prune; leave --prune out."
        )
    return [config.total_frames // _REDUCTION**k for k in range(count, 0, -1)]


def pruner_of(rungs: Sequence[int]) -> Any:
    """Returns an Optuna pruner with the given rungs; without rungs, the pruner never prunes."""
    import optuna

    if not rungs:
        return optuna.pruners.NopPruner()
    return optuna.pruners.SuccessiveHalvingPruner(
        min_resource=rungs[0], reduction_factor=_REDUCTION, min_early_stopping_rate=0
    )


@dataclass
class Halving:
    """Scheduler of a population of trials, backed by an Optuna study.

    Args:
        study (optuna.Study): study with a pruner from :func:`pruner_of`.
        suggest (callable): maps a trial to the values of its tuned settings, by name.
        trials (int): total number of trials.
        rungs (sequence of int): environment steps from :func:`rungs_of`.
        log (callable): called with a line of text for each ended trial.
    """

    study: Any
    suggest: Callable[[Any], dict[str, float]]
    trials: int
    rungs: Sequence[int]
    log: Callable[[str], None]

    def first(self, count: int) -> list[dict[str, float]]:
        """Returns the settings of the first trials; proposes the trials that the study lacks."""
        while len(self._all_trials()) < count:
            self.study.ask()
        return [self.suggest(self._trial_by_number(number)) for number in range(count)]

    def next(self) -> tuple[int, dict[str, float]] | None:
        """Returns the number and the learner settings of the next trial."""
        if len(self._all_trials()) >= self.trials:
            return None
        trial = self.study.ask()
        settings = self.suggest(trial)
        return trial.number, {name.removeprefix("learner."): x for name, x in settings.items()}

    def is_finished(self, trial: int) -> bool:
        """Returns whether the study records a trial as ended."""
        return self._all_trials()[trial].state.is_finished()

    def should_prune(self, trial: int, frames: int, value: float) -> bool:
        """Reports a trial's value at a rung, and returns whether to prune it."""
        asked = self._trial_by_number(trial)
        asked.report(value, frames)
        return asked.should_prune()

    def ended(self, trial: int, value: float | None, *, pruned: bool) -> None:
        """Records the end of a trial in the study."""
        from optuna.trial import TrialState

        known = self._all_trials()[trial]
        settings = ", ".join(f"{name}={x:.4g}" for name, x in known.params.items())
        if value is not None and math.isfinite(value):
            self.study.tell(trial, value)
            best = " (the best so far)" if self.study.best_trial.number == trial else ""
            self.log(f"trial {trial}: return {value:.4g} with {settings}{best}")
            return
        diverged = value is not None or not pruned
        self.study.tell(trial, state=TrialState.FAIL if diverged else TrialState.PRUNED)
        frames = max(known.intermediate_values, default=0)
        ending = "diverged" if diverged else f"pruned after {frames:,} frames"
        self.log(f"trial {trial}: {ending} with {settings}")

    def forget(self, running: Sequence[int | None]) -> None:
        """Marks unfinished trials as failed if they no longer run, as after a killed process."""
        for trial in self._all_trials():
            if not trial.state.is_finished() and trial.number not in running:
                self.study.tell(trial.number, state=_failed_state())

    def _all_trials(self) -> list[Any]:
        return self.study.get_trials(deepcopy=False)

    def _trial_by_number(self, number: int) -> Any:
        from optuna.trial import Trial

        return Trial(self.study, self._all_trials()[number]._trial_id)


def prune_trials(scheduler: Halving, base: TrainConfig, folder: Path) -> None:
    """Trains all trials in one population, with pruning; resumes an interrupted search.

    Args:
        scheduler (Halving): proposes trials and prunes them.
        base (TrainConfig): settings of each trial; ``population.size`` trials run in parallel.
        folder (Path): folder of the search.
    """
    where, trials = folder / "trials_0000", partial(Trials, scheduler=scheduler)
    if has_checkpoint(where):
        training = resume_training(where, None, trials=trials)
    else:
        first = scheduler.first(base.population.size)
        vary = {name: [own[name] for own in first] for name in first[0]}
        population = replace(base.population, vary=vary)
        logging = replace(base.logging, progress=False)  # they do not end together
        config = replace(base, population=population, folder=str(where), logging=logging)
        training = start_training(config, None, trials=trials)
    scheduler.forget(training.trials.numbers)
    finish(training)
