"""Trials that end early: successive halving, while others take the places of those that end.

Trials are the members of one population. At each rung (a quarter of the run, a sixteenth, a
sixty-fourth) a trial goes on only if its return is among the best quarter of those that have come
so far. Another begins in the rows of one that does not.

Reference: Li et al., 2020, https://arxiv.org/abs/1810.05934 (ASHA).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
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

_FACTOR = 4
_MOST_RUNGS = 3


def rungs_of(config: TrainConfig) -> list[int]:
    """Returns the env steps at which trials are judged, in rising order.

    Args:
        config (TrainConfig): of each trial.

    Raises:
        ConfigError: a run too short for a rung, an algorithm that stores steps, or schedules,
            which all members share.

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
                f"{at}algorithm is {learner.algorithm!r}, expected mappo or ippo for trials that "
                "are pruned: others would learn from what those before them stored; leave --prune "
                "out."
            )
        for name in ("lr_schedule", "entropy_schedule"):
            if getattr(learner, name, "constant") != "constant":
                raise ConfigError(
                    f"{at}{name} is {quoted(getattr(learner, name))}, but trials that are pruned "
                    f"begin at different times; use {at}{name}=constant, or leave --prune out."
                )
    longest = math.log(config.total_frames / config.frames_per_batch, _FACTOR)
    count = min(_MOST_RUNGS, int(longest + 1e-9))
    if count < 1:
        raise ConfigError(
            f"total_frames is {config.total_frames}, expected {_FACTOR} times frames_per_batch "
            f"({config.frames_per_batch}) or more, so that trials can be pruned; leave --prune out."
        )
    return [config.total_frames // _FACTOR**k for k in range(count, 0, -1)]


def pruner_of(rungs: Sequence[int]) -> Any:
    """Returns Optuna's pruner with these rungs; one that prunes nothing without any."""
    import optuna

    if not rungs:
        return optuna.pruners.NopPruner()
    return optuna.pruners.SuccessiveHalvingPruner(
        min_resource=rungs[0], reduction_factor=_FACTOR, min_early_stopping_rate=0
    )


class Halving:
    """The judge of a population of trials: a study of Optuna's.

    Args:
        study (optuna.Study): with a pruner of :func:`pruner_of`.
        suggest (callable): a trial -> name of each tuned setting and its value.
        trials (int): how many in all.
        rungs (sequence of int): from :func:`rungs_of`.
        said (callable): told how each trial ended.
    """

    def __init__(
        self,
        study: Any,
        suggest: Callable[[Any], dict[str, float]],
        trials: int,
        rungs: Sequence[int],
        said: Callable[[str], None],
    ) -> None:
        self.study, self.suggest, self.trials, self.rungs = study, suggest, trials, rungs
        self.said = said

    def first(self, count: int) -> list[dict[str, float]]:
        """Returns the settings of the first trials; of those that were proposed before, too."""
        while len(self._known()) < count:
            self.study.ask()
        return [self.suggest(self._trial(number)) for number in range(count)]

    def next(self) -> tuple[int, dict[str, float]] | None:
        """Returns the number and the learner's settings of another trial."""
        if len(self._known()) >= self.trials:
            return None
        trial = self.study.ask()
        settings = self.suggest(trial)
        return trial.number, {name.removeprefix("learner."): x for name, x in settings.items()}

    def gone(self, trial: int) -> bool:
        """Returns whether the study knows how a trial ended."""
        return self._known()[trial].state.is_finished()

    def prunes(self, trial: int, frames: int, value: float) -> bool:
        """Reports what a trial is worth at a rung."""
        asked = self._trial(trial)
        asked.report(value, frames)
        return asked.should_prune()

    def ended(self, trial: int, value: float | None, *, pruned: bool) -> None:
        """Tells the study how a trial ended."""
        from optuna.trial import TrialState

        known = self._known()[trial]
        settings = ", ".join(f"{name}={x:.4g}" for name, x in known.params.items())
        if value is not None and math.isfinite(value):
            self.study.tell(trial, value)
            best = " (the best so far)" if self.study.best_trial.number == trial else ""
            self.said(f"trial {trial}: return {value:.4g} with {settings}{best}")
            return
        fell_ill = value is not None or not pruned
        self.study.tell(trial, state=TrialState.FAIL if fell_ill else TrialState.PRUNED)
        frames = max(known.intermediate_values, default=0)
        how = "fell ill" if fell_ill else f"pruned after {frames:,} frames"
        self.said(f"trial {trial}: {how} with {settings}")

    def forget(self, running: Sequence[int | None]) -> None:
        """Gives up trials that were proposed, and are in nobody's rows: a process was killed."""
        from optuna.trial import TrialState

        for trial in self._known():
            if not trial.state.is_finished() and trial.number not in running:
                self.study.tell(trial.number, state=TrialState.FAIL)

    def _known(self) -> list[Any]:
        return self.study.get_trials(deepcopy=False)

    def _trial(self, number: int) -> Any:
        from optuna.trial import Trial

        return Trial(self.study, self._known()[number]._trial_id)


def prune_trials(
    study: Any,
    base: TrainConfig,
    suggest: Callable[[Any], dict[str, float]],
    folder: Path,
    trials: int,
    rungs: Sequence[int],
    said: Callable[[str], None],
) -> None:
    """Trains trials side by side until there are so many, or goes on with that.

    Args:
        study (optuna.Study): what is known.
        base (TrainConfig): of each trial; ``population.size`` are trained at once.
        suggest, trials, rungs, said: of :class:`Halving`.
        folder (Path): where everything is kept.
    """
    judge = Halving(study, suggest, trials, rungs, said)
    where, trials_of_judge = folder / "trials_0000", partial(Trials, judge=judge)
    if has_checkpoint(where):
        training = resume_training(where, None, trials=trials_of_judge)
    else:
        first = judge.first(base.population.size)
        vary = {name: [own[name] for own in first] for name in first[0]}
        population = replace(base.population, vary=vary)
        logging = replace(base.logging, progress=False)  # they do not end together
        config = replace(base, population=population, folder=str(where), logging=logging)
        training = start_training(config, None, trials=trials_of_judge)
    judge.forget(training.trials.numbers)
    finish(training)
