"""Trials of a tuning: runs that begin and end while others go on, in the rows of one population.

Shapes: P members, L learners.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor
from torchrl.envs import EnvBase

from torchrl_marl.errors import ConfigError
from torchrl_marl.learners.on_policy import OnPolicyLearner
from torchrl_marl.learners.rows import rows_of
from torchrl_marl.runtime.random_state import RandomState
from torchrl_marl.training.config import member_of
from torchrl_marl.training.evolution import Fitness
from torchrl_marl.training.member import Begun, Member
from torchrl_marl.training.population import PopulationTraining
from torchrl_marl.training.progress import figures_of, write_summary
from torchrl_marl.training.training import in_its_own_state

__all__ = ["Judge", "TrialsTraining", "adam_correction"]

_LEAST_EPISODES = 10  # of which a trial's value at a rung is the mean


class Judge(Protocol):
    """Who proposes trials, and says which of them end early.

    Attributes:
        rungs (sequence of int): env steps at which a trial is judged, in rising order.
    """

    rungs: Sequence[int]

    def next(self) -> tuple[int, dict[str, float]] | None:
        """Returns the number and the settings of another trial; None when there is none."""

    def gone(self, trial: int) -> bool:
        """Returns whether a trial has ended already."""

    def prunes(self, trial: int, frames: int, value: float) -> bool:
        """Takes in what a trial is worth at a rung; returns whether it ends there."""

    def ended(self, trial: int, value: float | None, *, pruned: bool) -> None:
        """Takes in the value of a trial that has ended; None for the pruned and the sick."""


class TrialsTraining(PopulationTraining):
    """A population whose members are trials: who ends gives its rows to the next.

    The shapes of everything stay, so that nothing is recorded again. A trial begins with networks
    of its own seed and an optimizer without moments; the episodes that run then count for nobody.

    Args:
        config, folder, env: of :class:`PopulationTraining`; ``config.population.vary`` holds the
            settings of the first trials.

    Attributes:
        judge (Judge): set before it begins.
        trials (list): number of the trial in each member's rows, None where it is the last.
    """

    judge: Judge

    def _build(self, env: EnvBase | None) -> None:
        super()._build(env)
        if self.config.learner.algorithm not in ("mappo", "ippo"):
            raise ConfigError(
                f"learner.algorithm is {self.config.learner.algorithm!r}, expected mappo or ippo "
                "where trials end early; leave --prune out."
            )
        size = self.config.population.size
        self.trials: list[int | None] = list(range(size))
        self.fitness = Fitness(size)
        self._reached = [0] * size
        self._lr = torch.stack([learner.settings["lr"].cpu() for learner in self._populations])
        self._began = torch.zeros_like(self._lr)  # updates of each learner when the trial began
        self._before = torch.zeros(len(self._populations))

    @property
    def done(self) -> bool:
        """Whether all trials have ended."""
        return all(trial is None for trial in self.trials)

    def begin(self) -> None:
        """Evaluates the untrained; gives rows of trials that have ended to others."""
        super().begin()
        gone = [i for i, x in enumerate(self.trials) if x is None or self.judge.gone(x)]
        for i in gone:
            self._leave(i)
            self._enter_next(i)
        if not all(self.members[i].idle for i in gone):
            self.saved_at = None
            self.save()

    # ------------------------------------------------------------------------------ who comes

    def _enter_next(self, i: int) -> None:
        """Begins the next trial in the rows of a member, if there is one."""
        self.trials[i] = None
        proposed = self.judge.next()
        if proposed is None:
            return
        number, settings = proposed
        begun = Begun(self.iteration, self.frames, self.seconds)
        self._seat(i, number, settings, begun)
        member = self.members[i]
        member.open(iteration=self.iteration, frames=self.frames)
        first = self.run.summary
        member.summary = {key: first.get(key) for key in ("return_random", "return_heuristic")}
        self._begin_anew(i, settings)

    def _seat(self, i: int, number: int, settings: Mapping[str, float], begun: Begun) -> None:
        placed = dataclasses.replace(self.config, folder=str(self.folder))
        self.trials[i], self._reached[i] = number, 0
        self.configs[i] = member_of(placed, number, settings)
        self.members[i] = Member(self.configs[i], begun)

    @torch.no_grad()
    @in_its_own_state
    def _begin_anew(self, i: int, settings: Mapping[str, float]) -> None:
        """Gives a member new networks, an optimizer without moments, and settings."""
        with RandomState(self.configs[i].seed, self.device).active():
            alone = self._alone(self.configs[i])
        for k, (learner, one) in enumerate(zip(self._populations, alone)):
            rows_of(learner, one).write(i)
            for state in learner.critic_states.values():
                state.unflatten(1, (learner.n_members, -1))[:, i] = 0.0
            learner.sick[i] = False
            for name, value in settings.items():
                learner.settings[name][i] = value
            self._lr[k, i] = settings.get("lr", learner.config.lr)
            self._began[k, i] = _updates_of(learner)
        self._told.discard(i)
        self.fitness.begin([i])

    # ------------------------------------------------------------------------------- who goes

    def _do_what_is_due(self, collected: int) -> None:
        if self.tracker.returns is not None:
            self.fitness.saw(*self.tracker.returns)
        sick = self._sick().tolist()
        running = [i for i, trial in enumerate(self.trials) if trial is not None]
        whole = [
            i for i in running if not sick[i] and self._frames_of(i) >= self.config.total_frames
        ]
        over = {i for i in running if sick[i] or i in whole or self._falls_behind(i)}
        if over:
            found = self._values_of(whole)
            self._save_members(self.state_dict())
            for i in sorted(over):
                trial = self.trials[i]
                assert trial is not None
                self._leave(i)
                self.judge.ended(trial, found.get(i), pruned=not sick[i])
                self._enter_next(i)
            self.saved_at = None
            self.save()
        self._save_if_due()

    def _frames_of(self, i: int) -> int:
        return self.frames - self.members[i].begun.frames

    def _falls_behind(self, i: int) -> bool:
        """Returns whether a trial has come to a rung, and is pruned there."""
        rungs, reached, trial = self.judge.rungs, self._reached[i], self.trials[i]
        if reached == len(rungs) or self._frames_of(i) < rungs[reached]:
            return False
        if self.fitness.episodes[i] < _LEAST_EPISODES or trial is None:
            return False
        value = float(self.fitness.mean[i])
        self._reached[i] += 1
        self.fitness.begin([i])
        return self.judge.prunes(trial, rungs[reached], value)

    def _values_of(self, whole: Sequence[int]) -> dict[int, float]:
        """Evaluates trials that have come to their end, and notes it."""
        results = self._measure_members(self.policy) if whole else []
        for i in whole:
            member = self.members[i]
            member.recorder.evaluation(self._progress_of(member), results[i])
            member.note("after", results[i])
        return {i: results[i]["return_mean"] for i in whole}

    def _leave(self, i: int) -> None:
        """Ends a member's run; its rows are free."""
        member = self.members[i]
        if not member.idle:
            member.end(frames=self.frames, seconds=self.seconds)
            member.close()
            member.idle = True

    @in_its_own_state
    def end(self) -> None:
        """Saves and writes the summary."""
        self.recorder.close_bar()
        self.run.summary |= figures_of(self.config, self.frames, self.seconds)
        self.save()
        write_summary(self.folder, self.run.summary)

    # ------------------------------------------------------------------------------ learning

    def _learn(self, batch: Any) -> dict[str, Tensor]:
        for k, learner in enumerate(self._populations):
            now = _updates_of(learner)
            half = (now - float(self._before[k])) / 2  # of the updates of a batch
            factor = adam_correction(now - self._began[k] + half, now + half)
            learner.settings["lr"].copy_(self._lr[k] * factor)
            self._before[k] = now
        return super()._learn(batch)

    # --------------------------------------------------------------------------------- state

    def _save_members(self, state: dict[str, Any]) -> None:
        super()._save_members({key: value for key, value in state.items() if key != "trials"})

    @in_its_own_state
    def state_dict(self) -> dict[str, Any]:
        """Returns all state that exact resuming needs."""
        own = {
            "numbers": list(self.trials),
            "settings": [self._settings_of(i) for i in range(len(self.trials))],
            "begun": [tuple(member.begun) for member in self.members],
            "reached": list(self._reached),
            "fitness": self.fitness.state_dict(),
            "updates": [self._lr, self._began, self._before],
        }
        return {**super().state_dict(), "trials": own}

    def _settings_of(self, i: int) -> dict[str, float]:
        names = self.config.population.bounds()
        return {name: float(getattr(self.configs[i].learner, name)) for name in names}

    @in_its_own_state
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restores a checkpoint of all together."""
        own = state["trials"]
        for i, number in enumerate(own["numbers"]):
            if number != self.trials[i]:
                self.members[i].close()
                if number is None:
                    self.trials[i], self.members[i].idle = None, True
                else:
                    self._seat(i, number, own["settings"][i], Begun(*own["begun"][i]))
        super().load_state_dict(state)
        self._reached = list(own["reached"])
        self.fitness.load_state_dict(own["fitness"])
        self._lr, self._began, self._before = (x.clone() for x in own["updates"])


def adam_correction(own: Tensor, shared: float) -> Tensor:
    """Returns the factor of the learning rate of members whose moments are younger than the rest.

    The optimizer counts updates for all members together. A step is as large as with a count of
    their own when its learning rate is multiplied by this factor (but for Adam's epsilon).

    Args:
        own (Tensor): updates of each member, at least 1.
        shared (float): updates that the optimizer has counted.

    Shapes:
        - own, returns: ``[P]``

    Reference: Kingma and Ba, 2015, https://arxiv.org/abs/1412.6980 (section 3: bias correction).

    Examples:
        >>> adam_correction(torch.tensor([1.0, 50_000.0]), 50_000.0)
        tensor([0.3162, 1.0000])
    """
    first, second = 0.9, 0.999
    many = torch.as_tensor(shared, dtype=torch.float64)

    def size(count: Tensor) -> Tensor:
        count = count.double().clamp(min=1.0)
        return (1.0 - second**count).sqrt() / (1.0 - first**count)

    return (size(own) / size(many)).to(own)


def _updates_of(learner: OnPolicyLearner) -> float:
    """Returns how many updates the optimizer has counted."""
    steps = [state["step"] for state in learner.optimizer.state.values() if "step" in state]
    return float(steps[0]) if steps else 0.0
