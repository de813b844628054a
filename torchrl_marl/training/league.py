"""League: players stored during training, as opponents and partners."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from tensordict import TensorDictBase
from torch import Tensor

from torchrl_marl.collectors.matches import MatchPolicy
from torchrl_marl.collectors.team import TeamPolicy
from torchrl_marl.errors import ConfigError, SpecError, nearest, quoted
from torchrl_marl.learners.learner import Learner
from torchrl_marl.modules.communication.channel import channel_module, channel_of
from torchrl_marl.specs import TeamSpec
from torchrl_marl.training.config import TrainConfig
from torchrl_marl.training.crossplay import Payoffs
from torchrl_marl.training.entrants import HEURISTIC, RANDOM, find_players, scripted_policy
from torchrl_marl.training.environments import Environments
from torchrl_marl.training.evaluation import EVALUATION_SEED
from torchrl_marl.training.league_results import Exploiter, Results, by_seat, matchmaking, outcomes
from torchrl_marl.training.part import Part
from torchrl_marl.training.pool import Networks, Pool, networks_of, with_networks

if TYPE_CHECKING:
    from torchrl_marl.training.training import Training

__all__ = ["League", "Stored", "envs_of_seats", "find_seats"]

Seat = dict[str, list[int]]
"""Group -> indices of its agents."""


def find_seats(team: TeamSpec, given: Mapping[str, Any], *, against: bool) -> dict[str, Seat]:
    """Returns the seats of a team by name.

    Args:
        team (TeamSpec): the groups.
        given (mapping): name of a seat -> group or agent, or a list of them. If it is empty, each
            group is a seat; with a single group, each agent is a seat.
        against (bool): whether seats are opponents, which must consist of whole groups.

    Raises:
        ConfigError: opponents are requested for a single team, a seat has an unknown name, or an
            agent is in no seat or in several.

    Examples:
        >>> from torchrl_marl.envs.toy import MatchingLevers
        >>> team = TeamSpec.from_env(MatchingLevers(2))
        >>> find_seats(team, {}, against=False)
        {'agent_0': {'agents': [0]}, 'agent_1': {'agents': [1]}}
    """
    known: dict[str, tuple[str, list[int]]] = {}
    for name, group in team.groups.items():
        known[name] = name, list(range(group.n_agents))
    if against and len(known) == 1:
        raise ConfigError(
            "league.opponents is given, but the environment has one team, "
            f"{quoted(next(iter(known)))}; use league.partners, or put each side into a "
            "separate group (env.group_map)."
        )
    groups = list(known)
    if not against:
        for name, group in team.groups.items():
            for i, agent in enumerate(group.agent_names):
                known.setdefault(agent, (name, [i]))
    if not given:
        names = groups if len(groups) > 1 else list(team.groups[groups[0]].agent_names)
        given = {name: [name] for name in names}
    seats = {name: _make_seat(name, members, known) for name, members in given.items()}
    _check_seats(team, seats)
    return seats


def _make_seat(name: str, members: Any, known: Mapping[str, tuple[str, list[int]]]) -> Seat:
    seat: Seat = {}
    for member in [members] if isinstance(members, str) else members:
        if member not in known:
            raise ConfigError(
                f"league.seats.{name} has {quoted(member)}; {nearest(str(member), known)}expected "
                f"some of {', '.join(known)}."
            )
        group, agents = known[member]
        seat.setdefault(group, []).extend(agents)
    return seat


def _check_seats(team: TeamSpec, seats: Mapping[str, Seat]) -> None:
    if len(seats) < 2:
        raise ConfigError(
            f"a league has {len(seats)} seat, {', '.join(seats)}, expected two or more; use an "
            "environment with several agents."
        )
    for name, group in team.groups.items():
        taken = [agent for seat in seats.values() for agent in seat.get(name, ())]
        for i, agent in enumerate(group.agent_names):
            if taken.count(i) != 1:
                raise ConfigError(
                    f"agent {agent!r} of group {name!r} is in {taken.count(i)} seats of "
                    "league.seats, expected each agent in one."
                )


def envs_of_seats(num_envs: int, n_seats: int, self_play: float) -> list[int]:
    """Returns the number of envs in which all seats learn, then in which each seat learns alone.

    Args:
        num_envs (int): number of envs.
        n_seats (int): number of seats.
        self_play (float): share of envs in which all seats learn.

    Raises:
        ConfigError: there are too few envs to give each seat at least one.

    Examples:
        >>> envs_of_seats(64, 2, 0.5), envs_of_seats(10, 3, 0.0)
        ([32, 16, 16], [0, 4, 3, 3])
    """
    others = num_envs - round(self_play * num_envs)
    if self_play > 0:
        others -= others % n_seats
    if others < n_seats:
        raise ConfigError(
            f"league.self_play is {self_play:g} of {num_envs} envs, which leaves {others} to "
            f"{n_seats} seats, expected one or more for each; raise env.num_envs."
        )
    share, more = divmod(others, n_seats)
    counts: Sequence[int] = [share + (i < more) for i in range(n_seats)]
    return [num_envs - others, *counts]


_EXTRA_SLOTS = 2
"""Number of extra slots, in which retired players finish their episodes."""


@dataclasses.dataclass(frozen=True)
class Stored:
    """A stored player."""

    name: str
    frames: int
    """Number of environment steps at which it was stored; -1 if it was stored before training."""
    sha256: str
    active: bool = True
    """True if it can be sampled for new episodes; a retired player only finishes its episodes."""


class League(Part):
    """The stored players of a run, and the policy that plays against or with them.

    Args:
        config (TrainConfig): config of the run.
        team (TeamSpec): the groups.
        policy (TeamPolicy): the learning policy.
        learners (sequence of Learner): learners of the policy.
        environments (Environments): environments of the run. The key ``player`` is added to the
            training environment. For ``nash``, stored players play each other in the evaluation
            environment.
        folder (Path): folder of the run.

    Attributes:
        policy: policy for the collector; the learning policy itself if all envs are used for
            self-play.
        seats (dict): name of a seat -> group -> indices of its agents.
    """

    def __init__(
        self,
        config: TrainConfig,
        team: TeamSpec,
        policy: TeamPolicy,
        learners: Sequence[Learner],
        environments: Environments,
        folder: Path,
    ) -> None:
        self.settings, self.team, self._learning_policy = config.league, team, policy
        self._learners = learners
        settings, against = self.settings, self.settings.opponents != "none"
        self.seats = find_seats(team, settings.seats, against=against)
        self.against, self.pool, env = against, Pool(folder), environments.training
        if settings.match == "nash" and (settings.seats or len(self.seats) != 2):
            raise ConfigError(
                f"league.opponents is 'nash', but there are the seats {', '.join(self.seats)}; "
                "expected two, each a group; use league.opponents=pfsp."
            )
        self.payoffs = Payoffs(
            team,
            lambda: environments.evaluation,
            episodes=config.evaluation.episodes,
            seed=config.seed + EVALUATION_SEED,
        )
        names = [name for name in settings.start_with if name in (RANDOM, HEURISTIC)]
        self.guests = {name: scripted_policy(name, env, team, config.env) for name in names}
        for name, guest in self.guests.items():
            self.payoffs.register(name, guest)
        n_slots = settings.slots + _EXTRA_SLOTS
        self.exploiters = [
            Exploiter(config, team, len(self.seats)) for _ in range(settings.exploiters)
        ]
        self.policy: Any = policy
        self.matches: MatchPolicy | None = None
        if settings.match != "self":
            self._check_channels()
            self.policy = self._make_policy(env.batch_size.numel(), n_slots)
            environments.carry_players(team.groups)
        self.slots: list[Stored | None] = [None] * n_slots
        self.results = Results(len(self.seats), n_slots + len(self.guests))
        self.stored_at = 0

    def _check_channels(self) -> None:
        """Refuses messages between seats: the other seat's player does not send them."""
        for actor in self._learning_policy.module:
            module = channel_module(actor)
            if module is None:
                continue
            config = channel_of(module).config
            groups, across = [own.name for own in actor.group.sources], config.across_groups
            for listeners in [groups] if across else [[name] for name in groups]:
                seats = [seat for seat, own in self.seats.items() if own.keys() & set(listeners)]
                if len(seats) > 1:
                    hint = ".across_groups=false" if len(listeners) > 1 else "=none"
                    raise ConfigError(
                        f"learner.actor.communication is {quoted(config.kind)}, but the agents of "
                        f"seats {', '.join(seats)} would hear each other, and stored players send "
                        f"no messages to others; use learner.actor.communication{hint}."
                    )

    def _make_policy(self, num_envs: int, n_slots: int) -> MatchPolicy:
        """Returns the policy that plays matches; exploiters get the first envs."""
        settings, seats = self.settings, list(self.seats.values())
        exploiter_counts: list[int] = []
        if self.exploiters:
            each = round(settings.exploited * num_envs / len(self.exploiters))
            if each < len(seats) or num_envs - each * len(self.exploiters) < len(seats):
                raise ConfigError(
                    f"league.exploited is {settings.exploited:g} of {num_envs} envs for "
                    f"{len(self.exploiters)} exploiters, {each} for each, expected one or more for "
                    f"each of {len(seats)} seats, and as many left; raise env.num_envs or change "
                    "league.exploited."
                )
            exploiter_counts = envs_of_seats(each, len(seats), 0.0)[1:]
        n_exploiter_envs = sum(exploiter_counts) * len(self.exploiters)
        envs = envs_of_seats(num_envs - n_exploiter_envs, len(seats), settings.self_play)
        envs[0] += n_exploiter_envs
        guests = list(self.guests.values())
        self.matches = MatchPolicy(
            self._learning_policy,
            self.team,
            seats,
            envs,
            n_slots=n_slots,
            guests=guests,
            exploiters=[exploiter.policy for exploiter in self.exploiters],
            exploited=exploiter_counts,
        )
        return self.matches

    # ---------------------------------------------------------------------------------- players

    @property
    def players(self) -> list[Stored]:
        """The stored players that can be sampled for new episodes, without guests."""
        return [stored for stored in self.slots if stored is not None and stored.active]

    def open(self, iteration: int) -> None:
        """Opens ``players.csv``, and removes rows after the given iteration."""
        self.pool.open(iteration)

    def begin(self, training: Training) -> None:
        """Stores the first players: those in ``start_with``, or else the untrained policy."""
        when = {"iteration": 0, "frames": 0}
        for name in self.guests:
            self.pool.note(name, None, {**when, "kind": name, "parent": name})
        self._import_players(when)
        for exploiter in self.exploiters:
            exploiter.begin(self._learners, 0)
        if not self.settings.start_with:
            self._store_player(self._learning_policy, when, carry=None)
        self._update_probabilities()

    def _import_players(self, when: Mapping[str, int]) -> None:
        sources = [given for given in self.settings.start_with if given not in self.guests]
        found = [(given, *own) for given in sources for own in find_players(given)]
        self._check_slots(len(found))
        for slot, (given, name, networks) in enumerate(found):
            # A number makes the name unique: files of several runs may have equal names.
            row = {**when, "kind": "imported", "parent": given}
            self._fill_slot(slot, f"start{slot}_{name}", networks, row, frames=-1)

    def _check_slots(self, n_imported: int) -> None:
        """Refuses fewer slots than players that are never replaced, or stored at one time."""
        settings = self.settings
        stored_later = 0 if settings.snapshot_every is None else 1 + settings.exploiters
        needed = n_imported + stored_later
        if needed > settings.slots:
            raise ConfigError(
                f"league.slots is {settings.slots}, expected at least {needed}: "
                f"{n_imported} players of league.start_with keep their slots, and {stored_later} "
                f"can be stored at one time; use league.slots={needed}."
            )

    def _store_player(
        self,
        policy: TeamPolicy,
        when: Mapping[str, int],
        carry: TensorDictBase | None,
        exploiter: str = "",
        began_at: int | None = None,
    ) -> bool:
        """Stores a player in a free slot; retires another one if there are too many."""
        used = set() if self.matches is None else self.matches.in_use(carry)
        free = [
            i
            for i, stored in enumerate(self.slots)
            if (stored is None or not stored.active) and i not in used
        ]
        if not free:
            return False
        kind = "exploiter" if exploiter else "snapshot"
        parent = self._find_version(when["frames"] if began_at is None else began_at)
        row = {**when, "kind": kind, "parent": parent}
        name = f"{when['frames']:09d}{exploiter}"
        self._fill_slot(free[0], name, networks_of(policy), row, frames=when["frames"])
        if len(self.players) > self.settings.slots:
            self._update_probabilities()
            self._retire_player()
        return True

    def _find_version(self, frames: int) -> str:
        """Returns the last stored version of the learning policy at a time; "" if there is none."""
        versions = (name for name in reversed(self.pool.names) if name.isdigit())
        return next((name for name in versions if int(name) <= frames), "")

    def _fill_slot(
        self, slot: int, name: str, networks: Networks, row: Mapping[str, Any], frames: int
    ) -> None:
        self._load_into_slot(slot, name, networks)
        sha256 = self.pool.add(name, networks, row)
        self.slots[slot] = Stored(name, frames, sha256)
        self.results.forget(slot)
        if self.settings.match == "nash":
            others = [*(own.name for own in self.players), *self.guests]
            self.payoffs.add(name, with_networks(self._learning_policy, networks), others)

    def _load_into_slot(self, slot: int, name: str, networks: Networks) -> None:
        """Writes a player into its slot.

        Raises:
            ConfigError: the player's networks differ in shape from the run's.
        """
        try:
            if self.matches is not None:
                for stored_players in self.matches.players:
                    stored_players.load(slot, networks[stored_players.group.name])
        except (SpecError, KeyError) as error:
            reason = error if isinstance(error, SpecError) else f"it has no actor {error}"
            raise ConfigError(
                f"player {quoted(name)} does not fit this run's networks: {reason}"
            ) from None

    def _retire_player(self) -> None:
        """Retires the least probable player; in a tie, the one closest in time to its neighbors."""
        newest = max(stored.frames for stored in self.players)
        eligible = [
            i
            for i, stored in enumerate(self.slots)
            if stored is not None and stored.active and 0 <= stored.frames < newest
        ]
        if not eligible:
            return
        frames = sorted(stored.frames for stored in self.players)
        probabilities = self._match_probabilities().mean(0)

        def sort_key(i: int) -> tuple[float, int]:
            place = frames.index(self.slots[i].frames)  # type: ignore[union-attr]
            before = frames[place - 1] if place else -frames[-1]
            return round(float(probabilities[i]), 9), frames[place + 1] - before

        retired = min(eligible, key=sort_key)
        self.slots[retired] = dataclasses.replace(self.slots[retired], active=False)  # type: ignore

    # -------------------------------------------------------------------------------- matchmaking

    @property
    def _all_players(self) -> list[Stored | None]:
        """The player in each slot, then the guests, in the same order as in the results."""
        return [*self.slots, *(Stored(name, -1, "") for name in self.guests)]

    def _candidate_mask(self) -> Tensor:
        return torch.tensor([own is not None and own.active for own in self._all_players])

    def _match_probabilities(self) -> Tensor:
        """Returns the probability that each of S seats meets each of K players, ``[S, K]``."""
        candidates = self._candidate_mask()
        rate = self.results.win_rate if self.against else self.results.standing(candidates)
        names = ["" if own is None else own.name for own in self._all_players]
        frames = [-1 if own is None else own.frames for own in self._all_players]

        def payoff(places: Sequence[int]) -> Tensor:
            return self.payoffs.table([names[i] for i in places])

        return matchmaking(self.settings, rate, candidates, frames, payoff)

    def _update_probabilities(self) -> None:
        if self.matches is not None:
            self.matches.chances.copy_(self._match_probabilities())

    # ------------------------------------------------------------------------------ in the loop

    def update(self, training: Training, batch: TensorDictBase) -> dict[str, float]:
        """Records the matches of a batch, stores the policy when due, and updates probabilities.

        Args:
            training (Training): the training, with its episodes, current step and progress.
            batch (TensorDictBase): the batch, ``[E, T]``.

        Returns:
            dict: metrics of the batch.
        """
        episodes, carry = training.tracker.episodes, training.collector.carry
        frames = training.frames
        metrics = self._record_matches(batch, episodes) if self.matches is not None else {}
        when = {"iteration": training.iteration, "frames": frames}
        if self._snapshot_is_due(frames) and self._store_player(self._learning_policy, when, carry):
            self.stored_at = frames
        for i, exploiter in enumerate(self.exploiters):
            name = f"_exploiter{i}"
            # An exploiter is stored before it is reset to a copy of the main policy.
            began_at = exploiter.began_at
            if exploiter.done(frames) and self._store_player(
                exploiter.policy, when, carry, name, began_at
            ):
                exploiter.begin(self._learners, frames)
        self._update_probabilities()
        return {**metrics, "league/players": float(self._candidate_mask().sum())}

    def _record_matches(
        self, batch: TensorDictBase, episodes: tuple[Mapping[str, Tensor], Tensor]
    ) -> dict[str, float]:
        assert self.matches is not None
        rows, (totals, done) = self.matches.rows, episodes
        returns = by_seat(totals, list(self.seats.values()))
        player = torch.stack(
            [batch.get((name, "player")).amax(-1) for name in self.team.groups]
        ).amax(0)[rows]
        n_players = self.results.sums.shape[2]
        sums = outcomes(returns[:, rows], done[rows], player - 1, self.matches.seat, n_players)
        self.results.update(sums)
        wins, draws, games, total = sums.sum((1, 2)).tolist()
        value = (wins + draws / 2 if self.against else total) / games if games else math.nan
        metrics = {
            "league/games": games,
            "league/win_rate" if self.against else "league/return": value,
        }
        win_rates = [
            self._record_exploiter_matches(i, returns, done) for i in range(len(self.exploiters))
        ]
        if win_rates:
            metrics["league/exploited"] = sum(win_rates) / len(win_rates)
        return metrics

    def _record_exploiter_matches(self, i: int, returns: Tensor, done: Tensor) -> float:
        """Records an exploiter's matches, and returns its win rate in the batch."""
        rows, no_player = (
            self._exploiter_envs(i),
            torch.zeros_like(done[self._exploiter_envs(i)], dtype=torch.int64),
        )
        sums = outcomes(returns[:, rows], done[rows], no_player, self.policy.exploited_seat, 1)
        self.exploiters[i].results.update(sums)
        wins, draws, games, _ = sums.sum((1, 2)).tolist()
        return (wins + draws / 2) / games if games else math.nan

    def _exploiter_envs(self, i: int) -> slice:
        """Returns the indices of an exploiter's envs."""
        return slice(i * self.policy.n_exploited, (i + 1) * self.policy.n_exploited)

    @property
    def n_exploiter_envs(self) -> int:
        """Number of envs in which exploiters learn, the first ones of a batch."""
        return len(self.exploiters) * self.policy.n_exploited if self.exploiters else 0

    def take(self, batch: TensorDictBase) -> TensorDictBase:
        """Returns the part of a batch without the exploiters' envs."""
        return batch[self.n_exploiter_envs :] if self.exploiters else batch

    def learn(self, batch: TensorDictBase, progress: float) -> None:
        """Lets exploiters learn from their envs in a batch.

        Args:
            batch (TensorDictBase): the batch as it was collected, ``[E, T]``.
            progress (float): progress of the run, from 0 to 1.
        """
        for i, exploiter in enumerate(self.exploiters):
            exploiter.learn(batch[self._exploiter_envs(i)], progress)

    def _snapshot_is_due(self, frames: int) -> bool:
        every, at = self.settings.snapshot_every, self.settings.snapshot_at
        if every is None or frames - self.stored_at >= every:
            return every is not None
        if at is None or self.matches is None:
            return False
        return bool((self.results.overall[self._candidate_mask()] >= at).all())

    # -------------------------------------------------------------------------------------- state

    def state_dict(self) -> dict[str, Any]:
        """Returns the state for a checkpoint, without the players' networks, which are in files."""
        slots = [None if own is None else dataclasses.asdict(own) for own in self.slots]
        return {
            "slots": slots,
            "stored_at": self.stored_at,
            "players": list(self.pool.names),
            "results": self.results.state_dict(),
            "payoffs": self.payoffs.state_dict(),
            "exploiters": [exploiter.state_dict() for exploiter in self.exploiters],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores a saved state, and reads the players from their files.

        Raises:
            CheckpointError: the file of a player is missing or was changed.
        """
        self.slots = [None if own is None else Stored(**own) for own in state["slots"]]
        self.stored_at, self.pool.names = state["stored_at"], list(state["players"])
        self.results.load_state_dict(state["results"])
        self.payoffs.load_state_dict(state["payoffs"])
        for exploiter, own in zip(self.exploiters, state["exploiters"]):
            exploiter.load_state_dict(own)
        for i, own in enumerate(self.slots):
            if own is not None:
                networks = self.pool.read(own.name, own.sha256)
                self._load_into_slot(i, own.name, networks)
                self.payoffs.register(own.name, with_networks(self._learning_policy, networks))
        self._update_probabilities()
