"""Pruned tuning: trials are members of one population, and successive halving ends poor ones early.

At each rung (a sixty-fourth, a sixteenth and a quarter of the run), a trial continues only if its
return is in the best quarter of the returns seen at this rung. A new trial takes the place of a
pruned one.

Reference: Li et al., 2020, https://arxiv.org/abs/1810.05934 (ASHA).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from torchrl_marl.apps.jobs.trials import Trials
from torchrl_marl.errors import ConfigError, quoted
from torchrl_marl.settings import override
from torchrl_marl.training.config import TrainConfig
from torchrl_marl.training.folder import has_checkpoint
from torchrl_marl.training.trainer import finish, resume_training, start_training

__all__ = ["Halving", "prune_trials", "pruner_of", "rungs_of"]

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
    _lost: list[int] = field(default_factory=list, init=False)

    def first(self, count: int) -> list[dict[str, float]]:
        """Returns the settings of the first trials; proposes the trials that the study lacks."""
        while len(self._all_trials()) < count:
            self.study.ask()
        return [self.suggest(self._trial_by_number(number)) for number in range(count)]

    def next(self) -> tuple[int, dict[str, float]] | None:
        """Returns the number and the learner settings of the next trial."""
        if not self._lost and len(self._all_trials()) >= self.trials:
            return None
        number = self._lost.pop(0) if self._lost else self.study.ask().number
        settings = self.suggest(self._trial_by_number(number))
        return number, {name.removeprefix("learner."): x for name, x in settings.items()}

    def restart_lost(self, running: Sequence[int | None]) -> None:
        """Lets unfinished trials that no member runs come next, as after a killed process."""
        self._lost = [
            trial.number
            for trial in self._all_trials()
            if not trial.state.is_finished() and trial.number not in running
        ]

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
    scheduler.restart_lost(training.trials.numbers)
    finish(training)
