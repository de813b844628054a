"""Results between players of a league, who is matched by them, and exploiters."""

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
    """Returns with which probability each player is drawn, by seat that learns.

    Args:
        settings (LeagueConfig): how.
        rate (Tensor): how well the policy does against, or with, each player, 0 to 1.
        may (Tensor): bool, who may be drawn.
        frames (sequence of int): when each was stored; for ``latest``.
        payoff (callable): returns what the players at some places earn from each other; for
            ``nash``.

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
        # Against the seat that learns plays the other one's side of the equilibrium.
        found[0, places], found[1, places] = equilibrium.column, equilibrium.row
        return found
    found[:, places] = 1.0 / len(places)
    return found


_DECAY = 0.99
"""What a game counts for after each later one against the same player."""


class Results:
    """Wins, draws, games and returns of the policy that learns against each stored player.

    A game counts the less the more have been played since, as the policy changes.

    Args:
        n_seats (int): number S of seats that learn.
        n_players (int): number K of players.

    Shapes:
        - ``sums``: ``[4, S, K]`` float64: wins, draws, games, sum of returns

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
        """Takes in the sums of a batch, ``[4, S, K]``."""
        self.sums = self.sums * _DECAY ** new[2] + new

    def forget(self, player: int) -> None:
        """Begins anew with a player."""
        self.sums[:, :, player] = 0.0

    @property
    def win_rate(self) -> Tensor:
        """Win rate by seat and player, draws half, near 1/2 after few games; ``[S, K]``."""
        wins, draws, games, _ = self.sums
        return smoothed(wins, draws, games)

    @property
    def overall(self) -> Tensor:
        """Win rate against each player over all seats, ``[K]``."""
        wins, draws, games, _ = self.sums.sum(1)
        return smoothed(wins, draws, games)

    def standing(self, candidates: Tensor) -> Tensor:
        """Returns the mean return with each player, from 0, the worst, to 1; 1/2 if unknown.

        Args:
            candidates (Tensor): bool, the players that are compared, ``[K]``.

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
        returns (Tensor): of each seat up to each step of an episode.
        done (Tensor): bool, where episodes end.
        player (Tensor): the stored player of each step, from 0.
        seat (Tensor): which seat learns in each env.
        n_players (int): number K of players.

    Shapes:
        - returns: ``[S, R, T]``; done, player: ``[R, T]``; seat: ``[R]``; returns ``[4, S, K]``

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
    """Returns the return of each seat: the mean over its agents, ``[S, ...]``.

    Args:
        totals (mapping): group -> the mean return of its agents.
        seats (sequence of mapping): group -> agents, of each seat.
    """
    found = []
    for seat in seats:
        n_agents = sum(map(len, seat.values()))
        found.append(sum(totals[name] * (len(own) / n_agents) for name, own in seat.items()))
    return torch.stack(found)  # type: ignore[arg-type]


_WON = 0.7
"""Win rate at which an exploiter has done its work, where no other is given."""


class Exploiter:
    """A policy that learns from its matches against the one that is trained.

    Args:
        config (TrainConfig): of the run; it learns by the same settings.
        team (TeamSpec): the groups.
        n_seats (int): number S of seats.

    Attributes:
        policy (TeamPolicy): acts for all groups.
        results (Results): of its matches.
        began_at (int): env steps of the run after which it began.
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
        """Begins anew as a copy of the policy that is trained, written in place.

        Args:
            learners (sequence): of the policy, with critics, statistics and moments.
            frames (int): env steps of the run.
        """
        self.results, self.began_at = Results(self._n_seats, 1), frames
        for own, other in zip(self.learners, learners):
            if isinstance(own, OnPolicyLearner):
                copy_in_place(own, other)
            else:
                own.load_state_dict(copy.deepcopy(other.state_dict()))

    def done(self, frames: int) -> bool:
        """Returns whether it has won, or has had its time."""
        won = _WON if self.settings.snapshot_at is None else self.settings.snapshot_at
        every = cast(int, self.settings.snapshot_every)
        return frames - self.began_at >= every or bool(self.results.overall[0] >= won)

    def learn(self, batch: TensorDictBase, progress: float) -> None:
        """Learns from its envs of a batch, ``[R, T]``."""
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
def copy_in_place(own: OnPolicyLearner, other: OnPolicyLearner) -> None:
    """Copies a learner: networks, statistics, and the moments of its optimizer.

    Tensors stay where they are, so that graphs that were recorded serve on.
    """
    for mine, theirs in zip(_tensors(own), _tensors(other)):
        mine.copy_(theirs)
    steps = own.optimizer, other.optimizer
    parameters = ([p for group in one.param_groups for p in group["params"]] for one in steps)
    for mine, theirs in zip(*parameters):
        known = other.optimizer.state.get(theirs, {})
        if known and not own.optimizer.state.get(mine):
            own.optimizer.state[mine] = {name: value.clone() for name, value in known.items()}
        for name, value in known.items():
            own.optimizer.state[mine][name].copy_(value)
    own.critic_states = {name: value.clone() for name, value in other.critic_states.items()}


def _tensors(learner: nn.Module) -> list[Tensor]:
    return [*learner.parameters(), *learner.buffers()]
