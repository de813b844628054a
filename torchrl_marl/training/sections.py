"""Sections of a recipe: evaluation, league, population, evolution, distributed."""

from __future__ import annotations

import math
import random
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Any

from torchrl_marl.errors import ConfigError, nearest, quoted
from torchrl_marl.learners.capabilities import VARYING, Limit
from torchrl_marl.settings import Count, OneOf, Positive, Range, ReadWhere, Share

if TYPE_CHECKING:
    from torchrl_marl.training.config import TrainConfig


__all__ = [
    "DistributedConfig",
    "EvaluationConfig",
    "EvolutionConfig",
    "LeagueConfig",
    "PopulationConfig",
    "check_measuring",
    "check_shards_divide",
]


def check_measuring(run: TrainConfig) -> None:
    """Refuses to leave out evaluations that a run needs.

    Raises:
        ConfigError: naming the setting that needs them.
    """
    if run.evaluation.episodes:
        return
    needs = {
        "evaluation.every_frames": run.evaluation.every_frames,
        "population.size": run.population.size if run.population.size > 1 else None,
        "league.opponents or league.partners": "given" if run.league.enabled else None,
    }
    for key, value in needs.items():
        if value is not None:
            raise ConfigError(
                f"evaluation.episodes is 0, but {key} is {value}, which measures players; use "
                "evaluation.episodes=1 or more."
            )


@dataclass(frozen=True)
class EvaluationConfig:
    """How often and on how many whole episodes the policy is measured."""

    every_frames: Count | None = None
    """Frames between two evaluations in training; null: only before and after."""
    episodes: Annotated[int, Range(0)] = 200
    """Number of whole episodes, played side by side; 0: nothing is measured."""
    deterministic: bool = True
    """The likeliest action, or a drawn one."""
    both: bool = True
    """At the end measure by the other kind of actions, too, and say where they differ."""
    gif: bool = False
    """Write an animation of the first episodes at the end: ``episode.gif``."""
    animate_every: Count | None = None
    """Frames of training between two such animations, in ``animations/``; null: none."""
    episodes_shown: Annotated[int, Range(1, 16)] = 1
    """Episodes that an animation shows side by side."""


MATCHES = {
    "none": "there is no league",
    "self": "the policy itself; players are stored, and nobody plays them",
    "latest": "the player that was stored last",
    "uniform": "every stored player as often (fictitious play)",
    "pfsp": "those the more that win more (prioritized fictitious self-play)",
    "nash": "as the equilibrium of all stored players plays (PSRO)",
}
"""Who is drawn as an opponent or a partner."""


_OF_LEAGUES = (
    Limit("snapshot_at", "but nobody plays stored players", when=lambda own: own.match == "self"),
    Limit(
        "snapshot_at",
        "but snapshot_every is null, the frames after which a player is stored at the latest",
        when=lambda own: own.snapshot_every is None,
    ),
    Limit(
        "self_play",
        "which leaves no envs to stored players",
        (0.5,),
        lambda own: own.match not in ("none", "self") and own.self_play == 1.0,
    ),
)


@dataclass(frozen=True)
class LeagueConfig:
    """Stored players that act in some envs and seats instead of the policy that learns."""

    opponents: Annotated[str, OneOf(MATCHES)] = "none"
    """Who the opponents are, in environments of several sides."""
    partners: Annotated[
        str, OneOf({name: words for name, words in MATCHES.items() if name != "nash"})
    ] = "none"
    """Who the partners are, of one team (fictitious co-play)."""
    self_play: Annotated[float, Range(0, 1)] = 0.5
    """Share of the envs in which all seats learn; in the others each seat learns as often."""
    weighting: Annotated[
        str,
        OneOf(
            {
                "squared": "(1 - w) ** 2 of a win rate w: the hardest most",
                "linear": "1 - w",
                "variance": "w * (1 - w): the equal ones most",
            }
        ),
    ] = "squared"
    """How ``pfsp`` weighs players; of partners, w is the return from 0, the worst, to 1."""
    slots: Annotated[int, Range(1, 1000)] = 16
    """Stored players that may be drawn at once; who is drawn least gives way to a new one."""
    snapshot_every: Count | None = 100_000
    """Frames between two players that are stored; null: those of ``start_with`` alone."""
    snapshot_at: Share | None = None
    """Win rate against every stored player at which the next one is stored, before
    ``snapshot_every`` frames are over; null: by frames alone."""
    exploiters: Annotated[int, Range(0)] = 0
    """More policies that learn, each only against the one that is trained. One is stored, and
    begins anew as a copy of that, when it wins ``snapshot_at`` of its games, or 0.7, and after
    ``snapshot_every`` frames at the latest."""
    exploited: Share = 0.25
    """Share of the envs that all exploiters have together."""
    seats: dict[str, Any] = field(default_factory=dict)
    """Seat -> groups, or agents of one group, that one player has; empty: each group, or each
    agent where there is one group."""
    start_with: list[str] = field(default_factory=list)
    """Players from the start: run folders, files of stored players or folders of such, ``random``,
    ``heuristic``; empty: the untrained policy."""

    @property
    def enabled(self) -> bool:
        """Whether there is a league."""
        return self.match != "none"

    @property
    def match(self) -> str:
        """Who is drawn, as opponents or as partners."""
        return self.partners if self.opponents == "none" else self.opponents

    def check(self, at: str = "") -> None:
        """Refuses what does not fit together.

        Args:
            at (str): what stands before the names in messages.

        Raises:
            ConfigError: naming the settings and the fix.
        """
        for limit in _OF_LEAGUES:
            limit.check(self, at)
        if not self.enabled and self.start_with:
            raise ConfigError(
                f"{at}start_with is {quoted(self.start_with)}, but {at}opponents and {at}partners "
                f"are none, so that nobody plays them; use {at}opponents=uniform, or so."
            )
        twice = [name for i, name in enumerate(self.start_with) if name in self.start_with[:i]]
        if twice:
            raise ConfigError(
                f"{at}start_with has {quoted(twice[0])} twice, expected each player once."
            )
        if "none" not in (self.opponents, self.partners):
            raise ConfigError(
                f"{at}opponents is {quoted(self.opponents)} and {at}partners "
                f"{quoted(self.partners)}, expected one of them to be none; use {at}partners=none."
            )
        if self.enabled and self.snapshot_every is None and not self.start_with:
            raise ConfigError(
                f"{at}snapshot_every is null and {at}start_with is empty, so that nobody is "
                f"stored; use {at}snapshot_every=100000, or name players."
            )
        if self.exploiters and (self.opponents in ("none", "self") or self.snapshot_every is None):
            raise ConfigError(
                f"{at}exploiters is {self.exploiters}, expected 0 where {at}opponents is "
                f"{quoted(self.opponents)} and {at}snapshot_every {quoted(self.snapshot_every)}: "
                f"they are stored for others to play; use {at}opponents=pfsp."
            )


_SECTION = "learner"


@dataclass(frozen=True)
class PopulationConfig:
    """Members that are trained side by side, in one program."""

    size: Count = 1
    """Number of members, each with ``env.num_envs`` envs, ``total_frames`` and a run folder of its
    own, of the seeds ``seed``, ``seed + 1`` and so on; 1: an ordinary run."""
    vary: dict[str, Any] = field(default_factory=dict)
    """Setting of the learner -> a list with its value in each member, or a range,
    ``{low: 1e-4, high: 1e-2, log: true}``, over which the members are spread."""

    share_replay: bool = False
    """All members learn from the steps of all; only where steps are stored."""

    def check(self, at: str = "") -> None:
        """Refuses settings that cannot differ, and values that are none or not enough.

        Args:
            at (str): what stands before the names in messages.

        Raises:
            ConfigError: naming them.
        """
        if self.vary and self.size == 1:
            raise ConfigError(f"{at}vary is given, but {at}size is 1; use {at}size=8, or so.")
        for name, given in _flat(self.vary).items():
            for word in (name, *(given if isinstance(given, Mapping) else ())):
                if ":" in str(word):  # YAML takes the whole for a key
                    raise ConfigError(
                        f"{at}vary has {word!r}, expected a space after each colon: "
                        "{low: 1e-4, high: 1e-2, log: true}."
                    )
            self._check_name(f"{at}vary", name)
            self._check_values(f"{at}vary.{name}", given)

    def values(self, seed: int) -> dict[str, list[float]]:
        """Returns the value of each member, by name of a learner's setting.

        Ranges are cut into as many values at equal distances (of logarithms, if ``log``), which
        the members get in an order of their own for each setting but the first.

        Args:
            seed (int): of the orders.

        Examples:
            >>> lr = {"low": 0.1, "high": 10.0, "log": True}
            >>> PopulationConfig(3, {"learner.lr": lr}).values(seed=0)
            {'lr': [0.1, 1.0, 10.0]}
        """
        found: dict[str, list[float]] = {}
        for i, (name, given) in enumerate(_flat(self.vary).items()):
            own = list(map(float, given)) if isinstance(given, list) else _spread(given, self.size)
            if i and not isinstance(given, list):
                random.Random(f"{seed} {name}").shuffle(own)
            found[name.removeprefix(f"{_SECTION}.")] = own
        return found

    def bounds(self) -> dict[str, tuple[float, float, bool]]:
        """Returns the range of each setting that differs: its ends, and whether it is logarithmic.

        Examples:
            >>> PopulationConfig(2, {"learner.gamma": [0.9, 0.99]}).bounds()
            {'gamma': (0.9, 0.99, False)}
        """
        found = {}
        for name, given in _flat(self.vary).items():
            limits = (min(given), max(given)) if isinstance(given, list) else None
            low, high = limits or (given["low"], given["high"])
            logarithmic = limits is None and bool(given.get("log", False))
            found[name.removeprefix(f"{_SECTION}.")] = (float(low), float(high), logarithmic)
        return found

    def _check_name(self, at: str, name: str) -> None:
        section, _, setting = name.partition(".")
        if section != _SECTION or setting not in VARYING:
            known = [f"{_SECTION}.{one}" for one in VARYING]
            raise ConfigError(
                f"{at} has {name!r}; {nearest(name, known)}expected one of {', '.join(known)}; "
                "what changes shapes cannot differ by member."
            )

    def _check_values(self, at: str, given: Any) -> None:
        if isinstance(given, list):
            if len(given) != self.size or not all(map(_is_number, given)):
                raise ConfigError(
                    f"{at} is {quoted(given)}, expected {self.size} numbers, one for each member "
                    "(population.size)."
                )
            return
        if not isinstance(given, Mapping) or not {"low", "high"} <= set(given) <= {
            "low",
            "high",
            "log",
        }:
            raise ConfigError(
                f"{at} is {quoted(given)}, expected a list of {self.size} numbers, or "
                "{low: ..., high: ...}."
            )
        low, high = given["low"], given["high"]
        logarithmic = given.get("log", False)
        if not (_is_number(low) and _is_number(high) and low < high):
            raise ConfigError(
                f"{at} goes from {quoted(low)} to {quoted(high)}, expected two numbers, the first "
                "the smaller."
            )
        if not isinstance(logarithmic, bool) or (logarithmic and low <= 0):
            raise ConfigError(
                f"{at} begins at {quoted(low)} with log: {quoted(logarithmic)}, expected more than "
                "0 with log: true; use log: false."
            )


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def _flat(nested: Mapping[str, Any], at: str = "") -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in nested.items():
        if isinstance(value, Mapping) and not {"low", "high", "log"} & set(value):
            found |= _flat(value, f"{at}{key}.")
        else:
            found[f"{at}{key}"] = value
    return found


def _spread(given: Mapping[str, Any], size: int) -> list[float]:
    low, high = given["low"], given["high"]
    shares = [i / max(size - 1, 1) for i in range(size)]
    if not given.get("log"):
        return [low + share * (high - low) for share in shares]
    return [low * (high / low) ** share for share in shares]


_EVOLVING = ReadWhere("method", "none", but=True)
_TOURNAMENT = ReadWhere("method", "tournament")


@dataclass(frozen=True)
class EvolutionConfig:
    """Which members are replaced by copies of others, and how copies differ."""

    method: Annotated[
        str,
        OneOf(
            {
                "none": "nobody is replaced",
                "pbt": "the worst become copies of the best (population-based training)",
                "tournament": "every place goes to the best of a few that are drawn",
            }
        ),
    ] = "none"
    """Who is copied to whom."""
    every_frames: Annotated[int, Range(1), _EVOLVING] = 200_000
    """Env steps of a member between two selections."""
    fitness: Annotated[
        str,
        _EVOLVING,
        OneOf(
            {
                "return": "mean return of the episodes of training that began since the last one",
                "evaluation": "mean return of an evaluation",
                "rating": "Bradley-Terry rating of games between members, in environments of two sides",
            }
        ),
    ] = "return"
    """What is compared."""
    least_episodes: Annotated[int, Range(1), _EVOLVING, ReadWhere("fitness", "return")] = 10
    """Episodes that every member must have had; else it is selected later."""
    worst: Annotated[float, Range(0, 0.5), ReadWhere("method", "pbt")] = 0.25
    """Share of the members that ``pbt`` replaces."""
    drawn: Annotated[int, Range(1), _TOURNAMENT] = 2
    """Members among which ``tournament`` takes the best."""
    elite: Annotated[int, Range(0), _TOURNAMENT] = 1
    """The best members that ``tournament`` leaves as they are."""
    factors: Annotated[list[float], _EVOLVING] = field(default_factory=lambda: [0.8, 1.25])
    """A copy's varied settings are its parent's times one of these."""
    resample: Annotated[float, Range(0, 1), _EVOLVING] = 0.25
    """Chance that a copy's setting is drawn anew from its range instead."""

    def check(self, at: str = "") -> None:
        """Refuses factors that are none.

        Args:
            at (str): what stands before the names in messages.

        Raises:
            ConfigError: naming them.
        """
        if not self.factors or any(factor <= 0 for factor in self.factors):
            raise ConfigError(
                f"{at}factors is {quoted(self.factors)}, expected numbers above 0; use [0.8, 1.25]."
            )


_ON_RAY = ReadWhere("backend", "ray")


@dataclass(frozen=True)
class DistributedConfig:
    """In which processes and on which machines a run collects."""

    backend: Annotated[
        str,
        OneOf({"none": "in this process", "ray": "on actors of Ray, here or in a cluster"}),
    ] = "none"
    """Where shards are; what is learned does not depend on it."""
    collectors: Count | None = None
    """Number of shards, each with as many of the envs and a random state of its own; what is
    learned depends on it. null: none, or one for each process that ``torchrun`` starts."""
    overlap: Annotated[int, Range(0, 100)] = 0
    """Batches that collecting runs ahead of learning; above 1 take ``learner.estimator=vtrace``."""
    asynchronous: Annotated[bool, _ON_RAY] = False
    """Actors play on without waiting, and batches are of whatever comes first: quicker where actors
    are not equally fast, and not reproducible; best with ``learner.estimator=vtrace``."""
    max_lag: Annotated[Count, _ON_RAY, ReadWhere("asynchronous", True)] = 4
    """Batches by which a policy may be old whose fragments are still learned from."""
    actors: Annotated[Count | None, _ON_RAY] = None
    """Processes for the shards; null: one for each shard, as far as there are CPUs."""
    address: Annotated[str | None, _ON_RAY] = None
    """A cluster of Ray: ``auto``, ``host:6379`` or ``ray://host:10001``; null: what
    ``RAY_ADDRESS`` says, or else a Ray of one's own on this machine."""
    cpus_per_actor: Annotated[float, Range(0), _ON_RAY] = 1.0
    """CPUs that Ray keeps for each actor."""
    gpus_per_actor: Annotated[float, Range(0), _ON_RAY] = 0.0
    """GPUs that Ray keeps for each; 0: environments and actors' networks are on the CPU."""
    spares: Annotated[int, Range(0, 100), _ON_RAY] = 1
    """Processes that have imported everything and wait to replace one that dies."""
    timeout: Annotated[Positive, _ON_RAY] = 300.0
    """Seconds after which an actor that has not played its batch counts as dead."""
    max_restarts: Annotated[int, Range(0), _ON_RAY] = 10
    """Actors that are replaced for one batch before the run gives up."""
    snapshot_every: Annotated[int, Range(0), _ON_RAY] = 1
    """Batches between the snapshots from which a lost shard is put back; 0: it begins anew."""

    @property
    def enabled(self) -> bool:
        """Returns whether the environments are split into shards."""
        return self.collectors is not None

    def check(self, at: str = "") -> None:
        """Refuses what does not fit together.

        Args:
            at (str): what stands before the names in messages.

        Raises:
            ConfigError: naming the settings and the fix.
        """
        if self.actors is not None and self.actors > (self.collectors or self.actors):
            raise ConfigError(
                f"{at}actors is {self.actors}, expected at most {at}collectors, "
                f"{self.collectors}; use {at}actors=null."
            )
        never_wait = "but asynchronous actors never wait"
        Limit("overlap", never_wait, (0,), lambda own: own.asynchronous).check(self, at)
        if self.overlap and self.backend == "ray" and not self.snapshot_every:
            raise ConfigError(
                f"{at}snapshot_every is 0, expected 1 or more beside {at}overlap={self.overlap}, "
                f"whose batches are played again on resuming; use {at}snapshot_every=1."
            )


def check_shards_divide(run: TrainConfig) -> None:
    """Refuses numbers of shards of which each cannot have as many envs.

    Args:
        run (TrainConfig): the settings.

    Raises:
        ConfigError: naming the next number that fits.
    """
    number, num_envs = run.distributed.collectors or 1, run.env.num_envs
    if num_envs % number:
        fitting = max(i for i in range(1, min(number, num_envs) + 1) if num_envs % i == 0)
        more = num_envs < number
        raise ConfigError(
            f"distributed.collectors is {number}, expected "
            f"{'at most' if more else 'a divisor of'} env.num_envs, {num_envs}; use "
            f"distributed.collectors={fitting}, or env.num_envs={-(-num_envs // number) * number}."
        )
