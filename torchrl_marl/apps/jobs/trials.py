"""Trials of a tuning: runs that start and end independently, as members of one population.

Shapes: P members, L learners.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import torch
from tensordict import TensorDictBase
from torch import Tensor

from torchrl_marl.errors import ConfigError
from torchrl_marl.learners.on_policy import OnPolicyLearner
from torchrl_marl.learners.rows import make_member_view
from torchrl_marl.runtime.random_state import RandomState
from torchrl_marl.training.config import TrainConfig, member_of
from torchrl_marl.training.evolution import Fitness
from torchrl_marl.training.part import Part, Progress

if TYPE_CHECKING:
    from torchrl_marl.training.population import Population
    from torchrl_marl.training.training import Training

__all__ = ["TrialScheduler", "Trials", "adam_correction"]

_MIN_EPISODES = 10  # of which a trial's value at a rung is the mean


class TrialScheduler(Protocol):
    """Protocol of a scheduler that proposes trials and prunes them.

    Attributes:
        rungs (sequence of int): environment steps at which trials are compared, ascending.
    """

    rungs: Sequence[int]

    def next(self) -> tuple[int, dict[str, float]] | None:
        """Returns the number and the settings of the next trial; None if no trial is left."""

    def is_finished(self, trial: int) -> bool:
        """Returns whether a trial has ended already."""

    def should_prune(self, trial: int, frames: int, value: float) -> bool:
        """Records a trial's value at a rung, and returns whether to prune it."""

    def ended(self, trial: int, value: float | None, *, pruned: bool) -> None:
        """Records an ended trial's value, which is None if the trial was pruned or has diverged."""


class Trials(Part):
    """Runs trials as members of a population; when a trial ends, a new one takes its place.

    Shapes never change, so no graph is captured again. A trial begins with networks initialized
    from its seed and an optimizer without moments. Episodes that are already running when a trial
    begins do not count for that trial.

    Args:
        config (TrainConfig): settings of the run; ``population.vary`` holds the tuned settings
            of the first trials.
        population (Population): the members.
        learners (sequence of OnPolicyLearner): learners of all members.
        scheduler (TrialScheduler): proposes trials and prunes them.

    Attributes:
        numbers (list): number of the trial that each member runs; None if it runs none.

    Raises:
        ConfigError: the algorithm is neither MAPPO nor IPPO, or the run starts from another one.
    """

    def __init__(
        self,
        config: TrainConfig,
        population: Population,
        learners: Sequence[OnPolicyLearner],
        *,
        scheduler: TrialScheduler,
    ) -> None:
        if config.learner.algorithm not in ("mappo", "ippo"):
            raise ConfigError(
                f"learner.algorithm is {config.learner.algorithm!r}, expected mappo or ippo "
                "with --prune; leave --prune out."
            )
        if config.init_from is not None:
            raise ConfigError(
                "init_from is given, but trials that begin later have new networks with --prune; "
                "leave --prune or init_from out."
            )
        self.config, self.population, self.learners = config, population, learners
        self.scheduler = scheduler
        size = config.population.size
        self.numbers: list[int | None] = list(range(size))
        self.fitness = Fitness(size)
        self._next_rung = [0] * size
        self._ending: dict[int, tuple[float | None, bool]] = {}  # value and pruned, by member
        self._base_lr = torch.stack([learner.settings["lr"].cpu() for learner in learners])
        self._updates_at_start = torch.zeros_like(
            self._base_lr
        )  # updates of each learner when the trial began
        self._updates_before = torch.zeros(len(learners))

    @property
    def done(self) -> bool:
        """True once all trials have ended."""
        return all(number is None for number in self.numbers)

    # -------------------------------------------------------------------------------- next trial

    def replace_ended(self, training: Training) -> None:
        """Ends the trials that are over, and starts new trials in their places.

        A checkpoint is written before and after, so that a killed search continues from either.
        """
        if self._ending:
            training.save()
        before, now = list(self.numbers), training.progress
        for i, number in enumerate(before):
            if number is None or i in self._ending or self.scheduler.is_finished(number):
                self._end_trial(i, now)
                self._start_next_trial(i, now)
        if self.numbers != before:
            training.saved_at = None
            training.save()

    def _end_trial(self, i: int, now: Progress) -> None:
        """Ends a member's run, and records the end of its trial unless it is recorded already."""
        number, member = self.numbers[i], self.population.members[i]
        if not member.idle:
            member.end(now)
            member.close()
            member.idle = True
        if number is not None and not self.scheduler.is_finished(number):
            value, pruned = self._ending[i]
            self.scheduler.ended(number, value, pruned=pruned)

    def _start_next_trial(self, i: int, now: Progress) -> None:
        """Begins the next trial in the place of a member, if a trial is left."""
        self.numbers[i] = None
        self._ending.pop(i, None)
        proposed = self.scheduler.next()
        if proposed is None:
            return
        number, settings = proposed
        self._assign_trial(i, number, settings, now)
        member = self.population.members[i]
        member.open(now)
        first = self.population.run.summary
        member.summary = {key: first.get(key) for key in ("return_random", "return_heuristic")}
        self._reset_member(i, settings)

    def _assign_trial(
        self, i: int, number: int, settings: Mapping[str, float], begun: Progress
    ) -> None:
        placed = dataclasses.replace(self.config, folder=str(self.population.folder.path))
        self.numbers[i], self._next_rung[i] = number, 0
        self.population.replace(i, member_of(placed, number, settings), begun)

    @torch.no_grad()
    def _reset_member(self, i: int, settings: Mapping[str, float]) -> None:
        """Gives a member new networks, new settings, and an optimizer without moments."""
        with RandomState(self.population.configs[i].seed, self.population.device).active():
            alone = self.population.alone(i)
        for k, (learner, one) in enumerate(zip(self.learners, alone)):
            make_member_view(learner, one).write(i)
            for state in learner.critic_states.values():
                state.unflatten(1, (learner.n_members, -1))[:, i] = 0.0
            learner.diverged[i] = False
            for name, value in settings.items():
                learner.settings[name][i] = value
            self._base_lr[k, i] = settings.get("lr", learner.config.lr)
            self._updates_at_start[k, i] = _optimizer_updates(learner)
        self.fitness.begin([i])

    # ------------------------------------------------------------------------------ an iteration

    def take(self, batch: TensorDictBase) -> TensorDictBase:
        """Corrects the learning rate of members with trials that began after the optimizer."""
        for k, learner in enumerate(self.learners):
            now = _optimizer_updates(learner)
            half = (now - float(self._updates_before[k])) / 2  # of the updates of a batch
            factor = adam_correction(now - self._updates_at_start[k] + half, now + half)
            learner.settings["lr"].copy_(self._base_lr[k] * factor)
            self._updates_before[k] = now
        return batch

    def finish(self, training: Training) -> None:
        """Ends all trials that are complete, diverged or pruned, and starts new ones."""
        if training.tracker.returns is not None:
            self.fitness.update(*training.tracker.returns)
        now = training.progress
        diverged = self.population.diverged().tolist()
        running = [i for i, number in enumerate(self.numbers) if number is not None]
        whole = [
            i
            for i in running
            if not diverged[i] and self._trained_frames(i, now) >= self.config.total_frames
        ]
        over = {i for i in running if diverged[i] or i in whole or self._should_prune_now(i, now)}
        if not over:
            return
        found = self._evaluate_complete_trials(whole, now)
        self._ending = {i: (found.get(i), not diverged[i]) for i in over}
        training.saved_at = None
        self.replace_ended(training)

    def _trained_frames(self, i: int, now: Progress) -> int:
        return now.frames - self.population.members[i].begun.frames

    def _should_prune_now(self, i: int, now: Progress) -> bool:
        """Returns whether a trial has just reached a rung and must be pruned there."""
        rungs, reached, number = self.scheduler.rungs, self._next_rung[i], self.numbers[i]
        if reached == len(rungs) or self._trained_frames(i, now) < rungs[reached]:
            return False
        if self.fitness.episodes[i] < _MIN_EPISODES or number is None:
            return False
        value = float(self.fitness.mean[i])
        self._next_rung[i] += 1
        self.fitness.begin([i])
        return self.scheduler.should_prune(number, rungs[reached], value)

    def _evaluate_complete_trials(self, whole: Sequence[int], now: Progress) -> dict[int, float]:
        """Evaluates the complete trials, records their results and returns them."""
        results = self.population.play(self.population.policy) if whole else []
        for i in whole:
            member = self.population.members[i]
            member.recorder.evaluation(now.since(member.begun), results[i])
            member.note("after", results[i])
        return {i: results[i]["return_mean"] for i in whole}

    # ------------------------------------------------------------------------------------- state

    def state_dict(self) -> dict[str, Any]:
        """Returns the state for a checkpoint."""
        return {
            "numbers": list(self.numbers),
            "settings": [self._member_settings(i) for i in range(len(self.numbers))],
            "begun": [tuple(member.begun) for member in self.population.members],
            "reached": list(self._next_rung),
            "ending": dict(self._ending),
            "fitness": self.fitness.state_dict(),
            "updates": [self._base_lr, self._updates_at_start, self._updates_before],
        }

    def _member_settings(self, i: int) -> dict[str, float]:
        names, learner = self.config.population.bounds(), self.population.configs[i].learner
        return {name: float(getattr(learner, name)) for name in names}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores a saved state, including the trials that replaced the first ones."""
        for i, number in enumerate(state["numbers"]):
            if number != self.numbers[i]:
                self.population.members[i].close()
                if number is None:
                    self.numbers[i], self.population.members[i].idle = None, True
                else:
                    self._assign_trial(
                        i, number, state["settings"][i], Progress(*state["begun"][i])
                    )
        self._next_rung = list(state["reached"])
        self._ending = dict(state.get("ending", {}))  # earlier versions did not write it down
        self.fitness.load_state_dict(state["fitness"])
        self._base_lr, self._updates_at_start, self._updates_before = (
            x.clone() for x in state["updates"]
        )


def adam_correction(update_counts: Tensor, optimizer_count: float) -> Tensor:
    """Returns the learning-rate factor that gives each member its own Adam bias correction.

    The optimizer has one count of updates for all members. With this factor a member's step is as
    large as with a separate count, except for the effect of Adam's epsilon.

    Args:
        update_counts (Tensor): number of updates of each member, at least 1.
        optimizer_count (float): number of updates counted by the optimizer.

    Shapes:
        - update_counts, returns: ``[P]``

    Reference: Kingma and Ba, 2015, https://arxiv.org/abs/1412.6980 (section 3: bias correction).

    Examples:
        >>> adam_correction(torch.tensor([1.0, 50_000.0]), 50_000.0)
        tensor([0.3162, 1.0000])
    """
    first, second = 0.9, 0.999
    many = torch.as_tensor(optimizer_count, dtype=torch.float64)

    def size(count: Tensor) -> Tensor:
        count = count.double().clamp(min=1.0)
        return (1.0 - second**count).sqrt() / (1.0 - first**count)

    return (size(update_counts) / size(many)).to(update_counts)


def _optimizer_updates(learner: OnPolicyLearner) -> float:
    """Returns the number of updates counted by the optimizer."""
    steps = [state["step"] for state in learner.optimizer.state.values() if "step" in state]
    return float(steps[0]) if steps else 0.0
