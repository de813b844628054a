"""A league's results, matchmaking, and exploiters.

Shapes: S seats, K players, R envs with stored players, T steps.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import torch
from tensordict import TensorDictBase
from torch import Tensor, nn

from torchrl_marl.collectors.team import TeamPolicy
from torchrl_marl.games import nash, pfsp, smoothed
from torchrl_marl.learners.build import build_learners
from torchrl_marl.learners.on_policy import OnPolicyLearner
from torchrl_marl.specs import TeamSpec
from torchrl_marl.training.checkpoint import load_learners
from torchrl_marl.training.config import TrainConfig
from torchrl_marl.training.sections import LeagueConfig

__all__ = ["Exploiter", "Results", "by_seat", "matchmaking", "outcomes"]


def matchmaking(
    settings: LeagueConfig,
    rate: Tensor,
    may: Tensor,
    frames: Sequence[int],
    payoff: Callable[[Sequence[int]], Tensor],
) -> Tensor:
    """Returns the probability with which each learning seat meets each player.

    Args:
        settings (LeagueConfig): settings of the league.
        rate (Tensor): win rate against each opponent, or return with each partner, scaled to the
            range from 0 to 1.
        may (Tensor): mask of the players that can be sampled, bool.
        frames (sequence of int): environment steps at which each player was stored, for ``latest``.
        payoff (callable): function that returns the payoff matrix of players from their indices,
            for ``nash``.

    Shapes:
        - rate: ``[S, K]``; may: ``[K]``; returns ``[S, K]``, float64, each row sums to 1

    Examples:
        >>> rate = torch.tensor([[0.5, 0.0, 1.0]])
        >>> may = torch.tensor([True, True, False])
        >>> def chances(match):
        ...     settings = LeagueConfig(opponents=match)
        ...     return matchmaking(settings, rate, may, [0, 9, 5], lambda _: None).tolist()
        >>> chances("uniform"), chances("latest"), chances("pfsp")
        ([[0.5, 0.5, 0.0]], [[0.0, 1.0, 0.0]], [[0.2, 0.8, 0.0]])
    """
    found = torch.zeros(rate.shape, dtype=torch.float64)
    places = may.nonzero().squeeze(1).tolist()
    if settings.match == "latest":
        found[:, max(places, key=lambda i: (frames[i], i))] = 1.0
        return found
    if settings.match == "pfsp":
        return pfsp(rate, settings.weighting, may.expand(rate.shape))
    if settings.match == "nash":
        equilibrium = nash(payoff(places))
        # The opponents of a seat follow the equilibrium strategy of the other seat.
        found[0, places], found[1, places] = equilibrium.column, equilibrium.row
        return found
    found[:, places] = 1.0 / len(places)
    return found


_DECAY = 0.99
"""Factor by which each game against a player decays the weights of earlier batches' games."""


class Results:
    """Wins, draws, games and returns of the learning policy with each stored player.

    The policy changes, so the weight of a game decays with each game of a later batch.

    Args:
        n_seats (int): number S of learning seats.
        n_players (int): number K of players.

    Shapes:
        - ``sums``: ``[4, S, K]``, float64: wins, draws, games and sum of returns

    Examples:
        >>> results = Results(1, 2)
        >>> new = torch.zeros(4, 1, 2, dtype=torch.float64)
        >>> new[0, 0, 1], new[2, 0, 1] = 3.0, 4.0
        >>> results.update(new)
        >>> [round(x, 4) for x in results.win_rate[0].tolist()]
        [0.5, 0.6667]
    """

    def __init__(self, n_seats: int, n_players: int) -> None:
        self.sums = torch.zeros(4, n_seats, n_players, dtype=torch.float64)

    def update(self, new: Tensor) -> None:
        """Adds the sums of a batch, ``[4, S, K]``."""
        self.sums = self.sums * _DECAY ** new[2] + new

    def forget(self, player: int) -> None:
        """Resets the results of a player."""
        self.sums[:, :, player] = 0.0

    @property
    def win_rate(self) -> Tensor:
        """Win rate by seat and player, ``[S, K]``, shrunk toward 1/2.

        A draw counts as half a win.
        """
        wins, draws, games, _ = self.sums
        return smoothed(wins, draws, games)

    @property
    def overall(self) -> Tensor:
        """Win rate against each player over all seats, ``[K]``, shrunk toward 1/2."""
        wins, draws, games, _ = self.sums.sum(1)
        return smoothed(wins, draws, games)

    def standing(self, candidates: Tensor) -> Tensor:
        """Returns the mean return with each player, scaled to [0, 1]; 1/2 if unknown.

        Args:
            candidates (Tensor): mask of the players to compare, bool, ``[K]``.

        Shapes:
            - returns: ``[S, K]``
        """
        games, total = self.sums[2], self.sums[3]
        known = (games > 0) & candidates
        mean = total / games.clamp_min(1e-12)
        low = torch.where(known, mean, torch.inf).amin(-1, keepdim=True)
        high = torch.where(known, mean, -torch.inf).amax(-1, keepdim=True)
        between = (mean - low) / (high - low).clamp_min(1e-12)
        return torch.where(known & (high > low), between, 0.5)

    def state_dict(self) -> dict[str, Any]:
        """Returns the state for a checkpoint."""
        return {"sums": self.sums}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores a saved state."""
        self.sums = state["sums"].double().cpu().clone()


def outcomes(returns: Tensor, done: Tensor, player: Tensor, seat: Tensor, n_players: int) -> Tensor:
    """Returns the sums of a batch: wins, draws, games and returns.

    Args:
        returns (Tensor): return of each seat up to each step of an episode.
        done (Tensor): mask of the last steps of episodes, bool.
        player (Tensor): index of the stored player in each step.
        seat (Tensor): index of the learning seat in each env.
        n_players (int): number K of players.

    Shapes:
        - returns: ``[S, R, T]``; done, player: ``[R, T]``; seat: ``[R]``; result: ``[4, S, K]``

    Examples:
        >>> returns = torch.tensor([[[0.0, 1.0]], [[0.0, -1.0]]])
        >>> done = torch.tensor([[False, True]])
        >>> found = outcomes(returns, done, torch.tensor([[2, 2]]), torch.tensor([1]), 3)
        >>> found[:, 1, 2].tolist()  # the second seat learns, and lost to player 2
        [0.0, 0.0, 1.0, -1.0]
    """
    n_seats = len(returns)
    returns = returns.double()
    index = seat.view(1, -1, 1).expand(1, *done.shape)
    own = returns.gather(0, index)[0]
    others = (returns.sum(0) - own) / max(n_seats - 1, 1)
    close = torch.isclose(own, others, rtol=1e-6, atol=1e-6)
    found = torch.stack([(own > others) & ~close, close, torch.ones_like(close), own]).double()
    found = torch.where(done, found, 0.0).flatten(1)
    place = (seat.unsqueeze(-1) * n_players + player).flatten()
    sums = found.new_zeros(4, n_seats * n_players).index_add(1, place, found)
    return sums.view(4, n_seats, n_players).cpu()


def by_seat(totals: Mapping[str, Tensor], seats: Sequence[Mapping[str, Sequence[int]]]) -> Tensor:
    """Averages returns over the agents of each seat, ``[S, ...]``.

    Args:
        totals (mapping): group -> mean return of its agents, ``[...]``.
        seats (sequence of mapping): for each seat, group -> indices of its agents.
    """
    found = []
    for seat in seats:
        n_agents = sum(map(len, seat.values()))
        found.append(sum(totals[name] * (len(own) / n_agents) for name, own in seat.items()))
    return torch.stack(found)  # type: ignore[arg-type]


_TARGET_WIN_RATE = 0.7
"""Default win rate at which an exploiter is stored."""


class Exploiter:
    """A policy that learns only from matches against the main policy.

    Args:
        config (TrainConfig): config of the run, with the settings of the learner.
        team (TeamSpec): the groups.
        n_seats (int): number S of seats.

    Attributes:
        policy (TeamPolicy): policy of all groups.
        results (Results): results of its matches.
        began_at (int): environment steps of the run at the exploiter's last reset.
    """

    def __init__(self, config: TrainConfig, team: TeamSpec, n_seats: int) -> None:
        self.settings, self._n_seats = config.league, n_seats
        self.learners = build_learners(
            team, config.learner, config.groups, device=config.device, execution=config.execution
        )
        self.policy = TeamPolicy(
            actor for learner in self.learners for actor in learner.actors.values()
        )
        self.begin([], 0)

    def begin(self, learners: Sequence[Any], frames: int) -> None:
        """Resets the exploiter, in place, to a copy of the main policy.

        Args:
            learners (sequence): learners of the main policy, including critics and optimizers.
            frames (int): environment steps of the run so far.
        """
        self.results, self.began_at = Results(self._n_seats, 1), frames
        for own, other in zip(self.learners, learners):
            if isinstance(own, OnPolicyLearner):
                copy_in_place(own, other)
            else:
                own.load_state_dict(copy.deepcopy(other.state_dict()))

    def done(self, frames: int) -> bool:
        """Returns whether the exploiter has reached its target win rate or its number of frames."""
        won = _TARGET_WIN_RATE if self.settings.snapshot_at is None else self.settings.snapshot_at
        every = cast(int, self.settings.snapshot_every)
        return frames - self.began_at >= every or bool(self.results.overall[0] >= won)

    def learn(self, batch: TensorDictBase, progress: float) -> None:
        """Learns from the exploiter's part of a batch."""
        for learner in self.learners:
            learner.set_progress(progress)
            learner.learn(batch)

    def state_dict(self) -> dict[str, Any]:
        """Returns the state for a checkpoint."""
        return {
            "learners": [learner.state_dict() for learner in self.learners],
            "results": self.results.state_dict(),
            "began_at": self.began_at,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores a saved state."""
        load_learners(self.learners, state["learners"])
        self.results.load_state_dict(state["results"])
        self.began_at = state["began_at"]


@torch.no_grad()
def copy_in_place(target: OnPolicyLearner, source: OnPolicyLearner) -> None:
    """Copies another learner's networks, statistics and optimizer moments into a learner.

    Tensors keep their addresses, so recorded graphs remain valid.
    """
    for mine, theirs in zip(_parameters_and_buffers(target), _parameters_and_buffers(source)):
        mine.copy_(theirs)
    steps = target.optimizer, source.optimizer
    parameters = ([p for group in one.param_groups for p in group["params"]] for one in steps)
    for mine, theirs in zip(*parameters):
        known = source.optimizer.state.get(theirs, {})
        if known and not target.optimizer.state.get(mine):
            target.optimizer.state[mine] = {name: value.clone() for name, value in known.items()}
        for name, value in known.items():
            target.optimizer.state[mine][name].copy_(value)
    target.critic_states = {name: value.clone() for name, value in source.critic_states.items()}


def _parameters_and_buffers(learner: nn.Module) -> list[Tensor]:
    return [*learner.parameters(), *learner.buffers()]
