"""Evolution while a population trains: fitness of members, selections, and their table.

Shapes: P members, E envs of a member, T steps.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from torchrl_marl.evolution import Bounds, perturb, tournament, truncation
from torchrl_marl.learners.population import PopulationLearner
from torchrl_marl.training.config import TrainConfig
from torchrl_marl.training.csv_table import CsvTable
from torchrl_marl.training.recorder import say

__all__ = ["Evolution", "Fitness"]


class Fitness:
    """Mean return of each member, of episodes that began after the last selection.

    An episode that was running at a selection was played by two policies, and does not count.

    Args:
        n_members (int): number P of members.

    Examples:
        >>> fitness = Fitness(2)
        >>> done = torch.tensor([[True, True], [False, True]])
        >>> fitness.saw(torch.tensor([[1.0, 3.0], [0.0, 5.0]]), done)
        >>> fitness.mean, fitness.episodes
        (tensor([2., 5.], dtype=torch.float64), tensor([2, 1]))
        >>> fitness.begin()
        >>> fitness.saw(torch.tensor([[1.0, 3.0], [0.0, 5.0]]), done)
        >>> fitness.mean
        tensor([3., nan], dtype=torch.float64)
    """

    def __init__(self, n_members: int) -> None:
        self.n_members = n_members
        self.total = torch.zeros(n_members, dtype=torch.float64)
        self.episodes = torch.zeros(n_members, dtype=torch.int64)
        self._spoiled: Tensor | None = None

    @property
    def mean(self) -> Tensor:
        """Mean return, ``[P]``; NaN without an episode."""
        return self.total / self.episodes

    def saw(self, returns: Tensor, done: Tensor) -> None:
        """Takes in a batch.

        Args:
            returns (Tensor): of each episode up to each step.
            done (Tensor): bool, where episodes end.

        Shapes:
            - both: ``[P * E, T]``
        """
        counted = done
        if self._spoiled is not None:
            first = done & (done.cumsum(1) == 1)
            counted = done & ~(first & self._spoiled.to(done.device).unsqueeze(1))
        ended = done.any(1).cpu()
        before = torch.zeros_like(ended) if self._spoiled is None else self._spoiled
        self._spoiled = before & ~ended
        shape = self.n_members, -1
        total = torch.where(counted, returns, 0.0).double().reshape(shape).sum(1)
        self.total += total.cpu()
        self.episodes += counted.reshape(shape).sum(1).cpu()

    def begin(self, members: Sequence[int] | None = None) -> None:
        """Begins anew after a selection, for some members or all."""
        chosen = list(range(self.n_members) if members is None else members)
        self.total[chosen] = 0.0
        self.episodes[chosen] = 0
        if self._spoiled is not None:
            spoiled = self._spoiled.reshape(self.n_members, -1).clone()
            spoiled[chosen] = True
            self._spoiled = spoiled.flatten()

    def state_dict(self) -> dict[str, Any]:
        """Returns the state for a checkpoint."""
        return {"total": self.total, "episodes": self.episodes, "spoiled": self._spoiled}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores a saved state."""
        self.total, self.episodes = state["total"].clone(), state["episodes"].clone()
        self._spoiled = state["spoiled"]


class Evolution:
    """Selects among the members of a population, copies, and varies the copies.

    Args:
        config (TrainConfig): of the population.
        folder (Path): where ``evolution.csv`` is written: a row for each member of a selection.
    """

    def __init__(self, config: TrainConfig, folder: Path) -> None:
        self.config, self.seeds = config, range(config.seed, config.seed + config.population.size)
        self.fitness = Fitness(config.population.size)
        self.generator = torch.Generator().manual_seed(config.seed)
        self.bounds = {name: Bounds(*limits) for name, limits in config.population.bounds().items()}
        self.selected_at = 0
        self._folder = folder
        self._table: CsvTable | None = None

    def open(self, iterations: int) -> None:
        """Opens its table, cut back to an iteration; says so if nobody will be selected."""
        batch, every = self.config.frames_per_batch, self.config.evolution.every_frames
        total = self.config.total_frames
        if math.ceil(every / batch) >= math.ceil(total / batch):
            say(
                f"evolution.every_frames is {every:,} and total_frames {total:,}: nobody is "
                "selected, for the last batch of a run selects nobody; lower the first"
            )
        self._table = CsvTable(self._folder / "evolution.csv", keep_iterations=iterations)

    def due(self, frames: int) -> bool:
        """Returns whether it is time for a selection, and every member has been seen enough.

        Args:
            frames (int): env steps of each member so far.
        """
        settings = self.config.evolution
        late = frames - self.selected_at >= settings.every_frames
        if not late or settings.fitness != "return":
            return late
        return bool((self.fitness.episodes >= settings.least_episodes).all())

    def select(
        self, learners: Sequence[PopulationLearner], fitness: Tensor, *, iteration: int, frames: int
    ) -> Tensor:
        """Copies members to others, varies the copies, and writes it down.

        Args:
            learners (sequence of PopulationLearner): of all groups.
            fitness (Tensor): of each member, ``[P]``.
            iteration, frames (int): when.

        Returns:
            Tensor: whose copy each member has become, ``[P]``.
        """
        settings = self.config.evolution
        sick = torch.stack([learner.sick.cpu() for learner in learners]).any(0)
        fitness = fitness.cpu().masked_fill(sick, torch.nan)
        if settings.method == "pbt":
            parent = truncation(fitness, settings.worst, self.generator)
        else:
            parent = tournament(fitness, settings.drawn, settings.elite, self.generator)
        known: dict[str, Tensor] = {}
        for name, bounds in self.bounds.items():
            known[name] = perturb(
                learners[0].settings[name],
                parent,
                bounds,
                factors=settings.factors,
                resample=settings.resample,
                generator=self.generator,
            )
        for learner in learners:
            learner.copy_members(parent.to(learner.sick.device))
            for name, values in known.items():
                learner.settings[name].copy_(values)
        self._write(parent, fitness, known, {"iteration": iteration, "frames": frames})
        self.fitness.begin()
        self.selected_at = frames
        return parent

    def _write(
        self, parent: Tensor, fitness: Tensor, known: Mapping[str, Tensor], when: dict[str, int]
    ) -> None:
        assert self._table is not None
        for i, source in enumerate(parent.tolist()):
            row = {
                **when,
                "seed": self.seeds[i],
                "parent": self.seeds[source],
                "fitness": float(fitness[i]),
                **{name: float(values[i]) for name, values in known.items()},
            }
            self._table.write(row)

    def state_dict(self) -> dict[str, Any]:
        """Returns the state for a checkpoint."""
        return {
            "fitness": self.fitness.state_dict(),
            "generator": self.generator.get_state(),
            "selected_at": self.selected_at,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores a saved state."""
        self.fitness.load_state_dict(state["fitness"])
        self.generator.set_state(state["generator"])
        self.selected_at = state["selected_at"]
