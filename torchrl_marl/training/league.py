"""A league: stored players, who is drawn among them, and when the next one is stored.

Shapes: E envs, T steps, R envs with stored players, K players.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from tensordict import TensorDictBase
from torch import Tensor

from torchrl_marl.collectors.matches import MatchPolicy
from torchrl_marl.collectors.team import TeamPolicy
from torchrl_marl.errors import ConfigError, SpecError, quoted
from torchrl_marl.games import nash, pfsp
from torchrl_marl.specs import TeamSpec
from torchrl_marl.training.config import TrainConfig
from torchrl_marl.training.entrants import HEURISTIC, RANDOM, find_players, scripted
from torchrl_marl.training.environments import Environments
from torchrl_marl.training.league_results import Results, by_seat, outcomes
from torchrl_marl.training.league_seats import envs_of_seats, find_seats
from torchrl_marl.training.payoffs import Payoffs
from torchrl_marl.training.pool import Networks, Pool, networks_of, with_networks
from torchrl_marl.training.run import EVALUATION_SEED

__all__ = ["League", "Stored"]

_SPARE = 2
"""Slots beside those that are drawn, where episodes of retired players may come to their end."""


@dataclasses.dataclass(frozen=True)
class Stored:
    """A stored player."""

    name: str
    frames: int
    """Env steps after which it was stored; -1: it was there from the start."""
    sha256: str
    active: bool = True
    """Whether it is drawn; a retired player plays its episodes to their end."""


class League:
    """Stored players of a run, and the policy that plays with them.

    Args:
        config (TrainConfig): of the run.
        team (TeamSpec): the groups.
        policy (TeamPolicy): that learns.
        environments (Environments): of the run; the one of the training then carries who plays,
            in that of evaluations stored players meet each other, for ``nash``.
        folder (Path): of the run.

    Attributes:
        policy: what the collector plays with: the policy itself where all envs are self-play.
        seats (dict): name -> group -> agents.
    """

    def __init__(
        self,
        config: TrainConfig,
        team: TeamSpec,
        policy: TeamPolicy,
        environments: Environments,
        folder: Path,
    ) -> None:
        self.settings, self.team, self._live = config.league, team, policy
        settings, against = self.settings, self.settings.opponents != "none"
        self.seats = find_seats(team, settings.seats, against=against)
        self.against, self.pool, env = against, Pool(folder), environments.training
        self.payoffs = Payoffs(
            team,
            lambda: environments.evaluation,
            episodes=config.evaluation.episodes,
            seed=config.seed + EVALUATION_SEED,
        )
        names = [name for name in settings.start_with if name in (RANDOM, HEURISTIC)]
        self.guests = {name: scripted(name, env, team, config.env) for name in names}
        for name, guest in self.guests.items():
            self.payoffs.knows(name, guest)
        n_slots = settings.slots + _SPARE
        self.policy: MatchPolicy | TeamPolicy = policy
        self.matches: MatchPolicy | None = None
        if settings.match != "self":
            envs = envs_of_seats(env.batch_size.numel(), len(self.seats), settings.self_play)
            seats, guests = list(self.seats.values()), list(self.guests.values())
            self.matches = MatchPolicy(policy, team, seats, envs, n_slots=n_slots, guests=guests)
            self.policy = self.matches
            environments.carry_players(team.groups)
        self.slots: list[Stored | None] = [None] * n_slots
        self.results = Results(len(self.seats), n_slots + len(self.guests))
        self.stored_at = 0

    # ---------------------------------------------------------------------------------- players

    @property
    def players(self) -> list[Stored]:
        """The stored players that may be drawn, guests aside."""
        return [stored for stored in self.slots if stored is not None and stored.active]

    def open(self, iterations: int) -> None:
        """Opens ``players.csv``, cut back to an iteration."""
        self.pool.open(iterations)

    def begin(self) -> None:
        """Stores who is there from the start: those named, or the policy as it is."""
        when = {"iteration": 0, "frames": 0}
        for given in self.settings.start_with:
            if given in self.guests:
                self.pool.note(given, None, {**when, "kind": given, "parent": given})
                continue
            for name, networks in find_players(given):
                self._import(name, networks, given, when)
        if not self.settings.start_with:
            self._store(networks_of(self._live), when, carry=None)
        self._match()

    def _import(self, name: str, networks: Networks, given: str, when: Mapping[str, int]) -> None:
        taken = [stored.name for stored in self.slots if stored is not None]
        name = name if name not in taken else f"{name}_{len(taken)}"
        if len(taken) >= self.settings.slots:
            raise ConfigError(
                f"league.start_with names more than league.slots, {self.settings.slots}, players; "
                f"use league.slots={2 * len(taken)}."
            )
        row = {**when, "kind": "imported", "parent": given}
        self._put(len(taken), name, networks, row, frames=-1)

    def _store(
        self, networks: Networks, when: Mapping[str, int], carry: TensorDictBase | None
    ) -> bool:
        """Stores a player in a slot that nobody plays, and retires one where they are too many."""
        used = set() if self.matches is None else self.matches.in_use(carry)
        free = [
            i
            for i, stored in enumerate(self.slots)
            if (stored is None or not stored.active) and i not in used
        ]
        if not free:
            return False
        newest = max(self.players, key=lambda own: own.frames, default=None)
        parent = "" if newest is None else newest.name
        name, row = f"{when['frames']:09d}", {**when, "kind": "snapshot", "parent": parent}
        self._put(free[0], name, networks, row, frames=when["frames"])
        self.stored_at = when["frames"]
        if len(self.players) > self.settings.slots:
            self._match()
            self._retire()
        return True

    def _put(
        self, slot: int, name: str, networks: Networks, row: Mapping[str, Any], frames: int
    ) -> None:
        self._load(slot, name, networks)
        sha256 = self.pool.add(name, networks, row)
        self.slots[slot] = Stored(name, frames, sha256)
        self.results.forget(slot)
        if self.settings.match == "nash":
            others = [own.name for own in self.slots if own is not None and own.active]
            self.payoffs.add(name, self._as_policy(networks), [*others, *self.guests])

    def _load(self, slot: int, name: str, networks: Networks) -> None:
        """Writes a player into its slot.

        Raises:
            ConfigError: networks of other shapes.
        """
        try:
            if self.matches is not None:
                for own in self.matches.players:
                    own.load(slot, networks[own.group.name])
        except (SpecError, KeyError) as error:
            why = error if isinstance(error, SpecError) else f"it has no actor {error}"
            raise ConfigError(
                f"player {quoted(name)} does not fit this run's networks: {why}"
            ) from None

    def _as_policy(self, networks: Networks) -> TeamPolicy:
        return with_networks(self._live, networks)

    def _retire(self) -> None:
        """Draws a player no more: who is drawn least; of equals, whose neighbors are closest."""
        newest = max(own.frames for own in self.players)
        may = [
            i
            for i, own in enumerate(self.slots)
            if own is not None and own.active and 0 <= own.frames < newest
        ]
        if not may:
            return
        frames = sorted(own.frames for own in self.players)
        chances = self._chances().mean(0)

        def kept(i: int) -> tuple[float, int]:
            place = frames.index(self.slots[i].frames)  # type: ignore[union-attr]
            before = frames[place - 1] if place else -frames[-1]
            return round(float(chances[i]), 9), frames[place + 1] - before

        least = min(may, key=kept)
        self.slots[least] = dataclasses.replace(self.slots[least], active=False)  # type: ignore

    # -------------------------------------------------------------------------------- matchmaking

    def _candidates(self) -> Tensor:
        own = [stored is not None and stored.active for stored in self.slots]
        return torch.tensor([*own, *[True] * len(self.guests)])

    def _chances(self) -> Tensor:
        """Returns with which probability each player is drawn, by seat that learns, ``[S, K]``."""
        may, match = self._candidates(), self.settings.match
        shape = len(self.seats), len(may)
        if match == "latest":
            frames = [-2 if own is None or not own.active else own.frames for own in self.slots]
            newest = max(range(len(frames)), key=lambda i: (frames[i], i))
            found = torch.zeros(shape, dtype=torch.float64)
            found[:, newest if frames[newest] > -2 else len(frames)] = 1.0
            return found
        if match == "pfsp":
            results = self.results
            rate = results.win_rate if self.against else results.standing(may)
            return pfsp(rate, self.settings.weighting, may.expand(shape))
        if match == "nash":
            return self._equilibrium(may)
        return (may.double() / may.sum()).expand(shape).clone()

    def _equilibrium(self, may: Tensor) -> Tensor:
        names = [None if own is None else own.name for own in self.slots] + [*self.guests]
        places = may.nonzero().squeeze(1)
        found = nash(self.payoffs.table([str(names[i]) for i in places.tolist()]))
        chances = torch.zeros(len(self.seats), len(may), dtype=torch.float64)
        # Against the seat that learns plays the other one's side of the equilibrium.
        chances[0, places], chances[1, places] = found.column, found.row
        return chances

    def _match(self) -> None:
        if self.matches is not None:
            self.matches.chances.copy_(self._chances())

    # ------------------------------------------------------------------------------ in the loop

    def update(
        self,
        batch: TensorDictBase,
        episodes: tuple[Mapping[str, Tensor], Tensor],
        when: Mapping[str, int],
        carry: TensorDictBase | None,
    ) -> dict[str, float]:
        """Takes in the matches of a batch, stores the policy when due, and matches anew.

        Args:
            batch (TensorDictBase): ``[E, T]``.
            episodes (tuple): group -> its return up to each step, and where episodes end.
            when (mapping): ``iteration`` and ``frames``.
            carry (TensorDictBase, optional): the collector's, ``[E]``.

        Returns:
            dict: metrics of the batch.
        """
        metrics = self._look_at(batch, episodes) if self.matches is not None else {}
        if self._due(when["frames"]):
            self._store(networks_of(self._live), when, carry)
        self._match()
        return {**metrics, "league/players": float(self._candidates().sum())}

    def _look_at(
        self, batch: TensorDictBase, episodes: tuple[Mapping[str, Tensor], Tensor]
    ) -> dict[str, float]:
        assert self.matches is not None
        rows, seat = self.matches.rows, self.matches.seat
        totals, done = episodes
        returns = by_seat(totals, list(self.seats.values()))[:, rows]
        player = torch.stack(
            [batch.get((name, "player")).amax(-1) for name in self.team.groups]
        ).amax(0)[rows]
        new = outcomes(returns, done[rows], player - 1, seat, self.results.sums.shape[2])
        self.results.saw(new)
        wins, draws, games, total = new.sum((1, 2)).tolist()
        value = (wins + draws / 2 if self.against else total) / games if games else float("nan")
        return {
            "league/games": games,
            "league/win_rate" if self.against else "league/return": value,
        }

    def _due(self, frames: int) -> bool:
        every, at = self.settings.snapshot_every, self.settings.snapshot_at
        if every is None:
            return False
        if frames - self.stored_at >= every:
            return True
        if at is None or self.matches is None:
            return False
        return bool((self.results.overall[self._candidates()] >= at).all())

    # -------------------------------------------------------------------------------------- state

    def state_dict(self) -> dict[str, Any]:
        """Returns the state for a checkpoint; the networks of players are in their files."""
        slots = [None if own is None else dataclasses.asdict(own) for own in self.slots]
        return {
            "slots": slots,
            "stored_at": self.stored_at,
            "results": self.results.state_dict(),
            "payoffs": self.payoffs.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores a saved state; players are read from their files.

        Raises:
            CheckpointError: a file that is not there or was changed.
        """
        self.slots = [None if own is None else Stored(**own) for own in state["slots"]]
        self.stored_at = state["stored_at"]
        self.results.load_state_dict(state["results"])
        self.payoffs.load_state_dict(state["payoffs"])
        for i, own in enumerate(self.slots):
            if own is not None:
                networks = self.pool.read(own.name, own.sha256)
                self._load(i, own.name, networks)
                self.payoffs.knows(own.name, self._as_policy(networks))
        self._match()
