"""Evolution of a population: selection of members, and mutation of copies.

Shapes: P members.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from tensordict import TensorDictBase
from torch import Tensor
from torchrl.envs import EnvBase

from torchrl_marl.errors import ConfigError
from torchrl_marl.games import bradley_terry
from torchrl_marl.learners.on_policy import OnPolicyLearner
from torchrl_marl.specs import TeamSpec
from torchrl_marl.training.config import TrainConfig
from torchrl_marl.training.crossplay import cross_play, seats_of
from torchrl_marl.training.evaluation import EVALUATION_SEED
from torchrl_marl.training.member import MemberPolicy
from torchrl_marl.training.messages import print_message
from torchrl_marl.training.part import Part
from torchrl_marl.training.recorder import CsvTable

if TYPE_CHECKING:
    from torchrl_marl.training.training import Training

__all__ = ["Bounds", "Evolution", "Fitness", "MemberRating", "perturb", "tournament", "truncation"]


def truncation(fitness: Tensor, share: float, generator: torch.Generator | None = None) -> Tensor:
    """Returns each member's parent after truncation selection: the best replace the worst.

    For each of the worst members, a parent is drawn uniformly from an equal number of best members.
    NaN is the lowest fitness; a member with NaN is copied only if all have NaN. Ties are broken in
    favor of the lower index.

    Args:
        fitness (Tensor): fitness of each member; higher is better.
        share (float): share of members to replace, at most 0.5. If it is above 0, at least one
            member is replaced.
        generator (Generator, optional): random generator.

    Shapes:
        - fitness, returns: ``[P]``; a member that is not replaced is its own parent

    Raises:
        ValueError: the share is not between 0 and 0.5.

    Reference: Jaderberg et al., 2017, https://arxiv.org/abs/1711.09846 (population-based
    training).

    Examples:
        >>> truncation(torch.tensor([3.0, float("nan"), 9.0, 1.0]), 0.25)
        tensor([0, 2, 2, 3])
    """
    if not 0.0 <= share <= 0.5:
        raise ValueError(f"share is {share}, expected 0 to 0.5.")
    n_members = len(fitness)
    count = min(max(int(share * n_members), 1), n_members // 2) if share else 0
    order = _rank_by_fitness(fitness)
    parent = torch.arange(n_members)
    n_parents = min(max(count, 1), len(_known_members(fitness)))
    chosen = torch.randint(n_parents, (count,), generator=generator)
    parent[order[n_members - count :]] = order[chosen]
    return parent


def tournament(
    fitness: Tensor, size: int, elite: int = 1, generator: torch.Generator | None = None
) -> Tensor:
    """Returns each member's parent after a tournament: the best of a few randomly drawn members.

    Args:
        fitness (Tensor): fitness of each member; higher is better. Members with NaN are drawn only
            if all have NaN.
        size (int): number of members drawn for each tournament, with replacement.
        elite (int): number of best members that are not replaced.
        generator (Generator, optional): random generator.

    Shapes:
        - fitness, returns: ``[P]``

    Raises:
        ValueError: the size is below 1, or the elite is larger than the population.

    Examples:
        >>> tournament(torch.tensor([1.0, 5.0, 3.0]), size=50)
        tensor([1, 1, 1])
    """
    n_members = len(fitness)
    if size < 1 or not 0 <= elite <= n_members:
        raise ValueError(
            f"size is {size} and elite {elite}, expected 1 or more, and 0 to {n_members}."
        )
    order = _rank_by_fitness(fitness)
    rank = torch.empty_like(order)
    rank[order] = torch.arange(n_members)
    known = _known_members(fitness)
    drawn = known[torch.randint(len(known), (n_members, size), generator=generator)]
    parent = drawn.gather(1, rank[drawn].argmin(1, keepdim=True)).squeeze(1)
    parent[order[:elite]] = order[:elite]
    return parent


def _rank_by_fitness(fitness: Tensor) -> Tensor:
    return fitness.cpu().nan_to_num(-torch.inf).argsort(descending=True, stable=True)


def _known_members(fitness: Tensor) -> Tensor:
    """Returns the indices of the members whose fitness is not NaN; all, if it always is."""
    known = (~fitness.cpu().isnan()).nonzero().squeeze(1)
    return known if len(known) else torch.arange(len(fitness))


class Bounds(NamedTuple):
    """Range of a setting."""

    low: float
    high: float
    log: bool = False
    """True if resampling is uniform in the logarithm of the value."""


def perturb(
    values: Tensor,
    parent: Tensor,
    bounds: Bounds,
    *,
    factors: Sequence[float] = (0.8, 1.25),
    resample: float = 0.25,
    generator: torch.Generator | None = None,
) -> Tensor:
    """Returns each member's value of a setting after a selection.

    A member that was not replaced keeps its value. A copy gets its parent's value times a random
    factor, or a value resampled from the range. Values are clipped to the range.

    Args:
        values (Tensor): values before the selection.
        parent (Tensor): index of each member's parent, for example from
            :func:`~torchrl_marl.training.evolution.truncation`.
        bounds (Bounds): range of the setting.
        factors (sequence of float): factors, which are equally probable.
        resample (float): probability that a copy's value is resampled.
        generator (Generator, optional): random generator.

    Shapes:
        - values, parent, returns: ``[P]``

    Reference: Jaderberg et al., 2017, https://arxiv.org/abs/1711.09846 (perturb, resample).

    Examples:
        >>> values, parent = torch.tensor([1.0, 2.0, 4.0]), torch.tensor([0, 2, 2])
        >>> perturb(values, parent, Bounds(0.5, 6.0), factors=[2.0], resample=0.0)
        tensor([1., 6., 4.])
    """
    n_members = len(values)
    # Numbers are drawn for all members, to make a value independent of the number of copies.
    factor = torch.tensor(factors)[torch.randint(len(factors), (n_members,), generator=generator)]
    share = torch.rand(n_members, generator=generator, dtype=torch.float64)
    anew = torch.rand(n_members, generator=generator) < resample
    low, high = (torch.tensor(x, dtype=torch.float64) for x in bounds[:2])
    drawn = low * (high / low) ** share if bounds.log else low + share * (high - low)
    copied = parent != torch.arange(n_members)
    own = values.cpu().double()
    child = torch.where(anew, drawn, own[parent] * factor).clamp(low, high)
    return torch.where(copied, child, own).to(values)


class Fitness:
    """Mean return of each member over episodes that began after the last selection.

    An episode that spans a selection was played by two policies, and is not counted.

    Args:
        n_members (int): number P of members.

    Examples:
        >>> fitness = Fitness(2)
        >>> returns = torch.tensor([[1.0, 3.0], [0.0, 5.0]])
        >>> fitness.update(returns, torch.tensor([[True, False], [False, True]]))
        >>> fitness.mean, fitness.episodes
        (tensor([1., 5.], dtype=torch.float64), tensor([1, 1]))
        >>> fitness.begin()  # the second episode of member 0 is running
        >>> fitness.update(returns, torch.tensor([[True, True], [False, True]]))
        >>> fitness.mean
        tensor([3., 5.], dtype=torch.float64)
    """

    def __init__(self, n_members: int) -> None:
        self.n_members = n_members
        self.total = torch.zeros(n_members, dtype=torch.float64)
        self.episodes = torch.zeros(n_members, dtype=torch.int64)
        self._in_episode: Tensor | None = None  # envs in the middle of an episode, [P * E]
        self._began_before_selection: Tensor | None = (
            None  # those whose episode began before the selection
        )

    @property
    def mean(self) -> Tensor:
        """Mean return of each member, ``[P]``; NaN for members without an episode."""
        return self.total / self.episodes

    def update(self, returns: Tensor, done: Tensor) -> None:
        """Adds the episodes of a batch.

        Args:
            returns (Tensor): return of the running episode up to each step.
            done (Tensor): mask of the last steps of episodes, bool.

        Shapes:
            - both: ``[P * E, T]``
        """
        counted = done
        if self._began_before_selection is not None:
            first = done & (done.cumsum(1) == 1)
            counted = done & ~(first & self._began_before_selection.to(done.device).unsqueeze(1))
        ended = done.any(1).cpu()
        before = (
            torch.zeros_like(ended)
            if self._began_before_selection is None
            else self._began_before_selection
        )
        self._began_before_selection, self._in_episode = before & ~ended, ~done[:, -1].cpu()
        shape = self.n_members, -1
        total = torch.where(counted, returns, 0.0).double().reshape(shape).sum(1)
        self.total += total.cpu()
        self.episodes += counted.reshape(shape).sum(1).cpu()

    def begin(self, members: Sequence[int] | None = None) -> None:
        """Discards the episodes of some or all members, after a selection."""
        chosen = list(range(self.n_members) if members is None else members)
        self.total[chosen] = 0.0
        self.episodes[chosen] = 0
        if self._began_before_selection is not None and self._in_episode is not None:
            shape = self.n_members, -1
            spoiled = self._began_before_selection.reshape(shape).clone()
            spoiled[chosen] = self._in_episode.reshape(shape)[chosen]
            self._began_before_selection = spoiled.flatten()

    def state_dict(self) -> dict[str, Any]:
        """Returns the state for a checkpoint."""
        return {
            "total": self.total,
            "episodes": self.episodes,
            "running": self._in_episode,
            "spoiled": self._began_before_selection,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores a saved state."""
        self.total, self.episodes = state["total"].clone(), state["episodes"].clone()
        self._in_episode, self._began_before_selection = state.get("running"), state["spoiled"]


class MemberRating:
    """Rates members by games between all pairs, which are played in one batch of envs.

    Args:
        env (EnvBase): the environment, with any number of envs.
        learners (sequence of OnPolicyLearner): learners of all groups.
        make (callable): function that returns the learners of an ordinary run; members are copied
            into these learners to play.

    Raises:
        ConfigError: the environment does not have two sides.
    """

    def __init__(
        self,
        env: EnvBase,
        learners: Sequence[OnPolicyLearner],
        make: Callable[[], list[OnPolicyLearner]],
    ) -> None:
        self.env = env
        team = TeamSpec.from_env(env)
        if len(team.groups) != 2 or not seats_of(team).apart:
            raise ConfigError(
                f"evolution.fitness is 'rating', but the environment has {len(team.groups)} "
                f"{'group' if len(team.groups) == 1 else 'groups'} ({', '.join(team.groups)}), "
                "expected two that play against each other; use evolution.fitness=return."
            )
        self._members = [MemberPolicy(learners, make()) for _ in range(learners[0].n_members)]

    def rate(self, episodes: int, seed: int) -> Tensor:
        """Returns the Bradley-Terry rating of each member.

        Args:
            episodes (int): number of games for each ordered pair of members.
            seed (int): random seed of the games.

        Shapes:
            - returns: ``[P]``, float64

        Raises:
            ConfigError: every game was a draw.
        """
        policies = [member.read(i) for i, member in enumerate(self._members)]
        # Actions are sampled: the most likely actions of a mixed strategy are another strategy.
        table = cross_play(policies, policies, self.env, episodes, seed=seed)
        wins, draws, games = (table[key].double() for key in ("wins", "draws", "games"))
        if bool((draws == games).all()):
            raise ConfigError(
                "evolution.fitness is 'rating', but every game between members is a draw: both "
                "sides earn the same; use evolution.fitness=return."
            )
        return bradley_terry(wins + (games - wins - draws).mT, draws + draws.mT).rating


class Evolution(Part):
    """Replaces members of a population by mutated copies of better ones.

    Args:
        config (TrainConfig): config of the population.
        folder (Path): folder of ``evolution.csv``, which has a row per member and selection.
        make_rating (callable): function that returns a :class:`MemberRating`; called only for
            ``fitness=rating``.
    """

    def __init__(
        self, config: TrainConfig, folder: Path, make_rating: Callable[[], MemberRating]
    ) -> None:
        self.config, self.seeds = config, range(config.seed, config.seed + config.population.size)
        self.fitness = Fitness(config.population.size)
        self.generator = torch.Generator().manual_seed(config.seed)
        self.bounds = {name: Bounds(*limits) for name, limits in config.population.bounds().items()}
        self.selected_at = 0
        self._folder = folder
        self._table: CsvTable | None = None
        rated = config.evolution.fitness == "rating"
        self.rating = make_rating() if rated else None

    def open(self, iteration: int) -> None:
        """Opens ``evolution.csv``, without later iterations; warns if no selection will happen."""
        batch, every = self.config.frames_per_batch, self.config.evolution.every_frames
        total = self.config.total_frames
        if math.ceil(every / batch) >= math.ceil(total / batch):
            print_message(
                f"evolution.every_frames is {every:,} and total_frames {total:,}: no "
                "selection happens, since there is none after the last batch; lower the first"
            )
        self._table = CsvTable(self._folder / "evolution.csv", keep_iterations=iteration)

    def begin(self, training: Training) -> None:
        """Refuses ``fitness=rating`` for an environment in which every game is a draw."""
        if self.rating is not None:
            self.rate(training.iteration)

    def rate(self, iteration: int) -> Tensor:
        """Returns ratings from ``evaluation.episodes`` games between members."""
        assert self.rating is not None
        episodes = max(2, self.config.evaluation.episodes // self.config.population.size)
        return self.rating.rate(episodes, self.config.seed + EVALUATION_SEED + iteration)

    def update(self, training: Training, batch: TensorDictBase) -> dict[str, float]:
        """Adds the returns of the episodes that ended in a batch."""
        if training.tracker.returns is not None:
            self.fitness.update(*training.tracker.returns)
        return {}

    def finish(self, training: Training) -> None:
        """Makes a selection, if one is due."""
        if training.done or not self.due(training.frames):
            return
        fitness = self.fitness.mean
        if self.config.evolution.fitness == "evaluation":
            fitness = torch.tensor([result["return_mean"] for result in training.evaluate()])
        elif self.rating is not None:
            fitness = self.rate(training.iteration)
        when = {"iteration": training.iteration, "frames": training.frames}
        self.select(training.learners, fitness, **when)
        training.results.take_settings()

    def due(self, frames: int) -> bool:
        """Returns whether a selection is due and every member has finished enough episodes.

        Args:
            frames (int): environment steps of each member so far.
        """
        settings = self.config.evolution
        late = frames - self.selected_at >= settings.every_frames
        if not late or settings.fitness != "return":
            return late
        return bool((self.fitness.episodes >= settings.least_episodes).all())

    def select(
        self, learners: Sequence[OnPolicyLearner], fitness: Tensor, *, iteration: int, frames: int
    ) -> Tensor:
        """Replaces members by mutated copies of others, and writes ``evolution.csv``.

        Args:
            learners (sequence of OnPolicyLearner): learners of all groups.
            fitness (Tensor): fitness of each member, ``[P]``.
            iteration, frames (int): iterations and environment steps so far.

        Returns:
            Tensor: parent of each member, ``[P]``.
        """
        settings = self.config.evolution
        diverged = torch.stack([learner.diverged.cpu() for learner in learners]).any(0)
        fitness = fitness.cpu().masked_fill(diverged, torch.nan)
        if settings.method == "pbt":
            parent = truncation(fitness, settings.worst, self.generator)
        else:
            parent = tournament(fitness, settings.drawn, settings.elite, self.generator)
        vary = partial(perturb, factors=settings.factors, resample=settings.resample)
        known, before = {}, learners[0].settings
        for name, bounds in self.bounds.items():
            known[name] = vary(before[name], parent, bounds, generator=self.generator)
        for learner in learners:
            learner.copy_members(parent.to(learner.diverged.device))
            for name, values in known.items():
                learner.settings[name].copy_(values)
        self._write_table(parent, fitness, known, {"iteration": iteration, "frames": frames})
        self.fitness.begin()
        self.selected_at = frames
        return parent

    def _write_table(
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
