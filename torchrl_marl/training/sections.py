"""Sections of a recipe: evaluation, league, population, evolution and distributed."""

from __future__ import annotations

import math
import random
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from torchrl_marl.errors import ConfigError, nearest, quoted
from torchrl_marl.learners.capabilities import VARYING, Limit
from torchrl_marl.settings import Count, OneOf, Positive, Range, ReadWhere, Share, shown

if TYPE_CHECKING:
    from torchrl_marl.training.config import TrainConfig


__all__ = [
    "DataConfig",
    "DistributedConfig",
    "EvaluationConfig",
    "EvolutionConfig",
    "LeagueConfig",
    "PopulationConfig",
    "check_measuring",
    "check_shards_divide",
    "check_until",
]


def check_measuring(run: TrainConfig) -> None:
    """Refuses ``evaluation.episodes=0`` if other settings need evaluations.

    Raises:
        ConfigError: evaluations are needed; the message names the setting that needs them.
    """
    if run.evaluation.episodes:
        return
    needs = {
        "evaluation.every_frames": run.evaluation.every_frames,
        "evaluation.count": run.evaluation.count,
        "evaluation.absolute_episodes": run.evaluation.absolute_episodes or None,
        "population.size": run.population.size if run.population.size > 1 else None,
        "league.opponents or league.partners": "given" if run.league.enabled else None,
        "until": "given" if run.until else None,
    }
    for key, value in needs.items():
        if value is not None:
            raise ConfigError(
                f"evaluation.episodes is 0, but {key} is {value}, which needs evaluations; use "
                f"evaluation.episodes=1 or more{_WITHOUT.get(key, '')}."
            )


_WITHOUT = {
    "evaluation.every_frames": ", or evaluation.every_frames=null",
    "evaluation.count": ", or evaluation.count=null",
    "evaluation.absolute_episodes": ", or evaluation.absolute_episodes=0",
}

_EVALUATION_METRICS = re.compile(
    r"(return|length)(_mean|_min|_max)|return(_low|_high)?|.+/episode_reward"
)
"""Metrics of every evaluation."""


def check_until(run: TrainConfig) -> None:
    """Refuses values of ``until`` that no evaluation during training can reach.

    Raises:
        ConfigError: a metric is unknown, its value is not a number, or there are no evaluations.
    """
    limits = {name: value for name, value in run.until.items() if value is not None}
    for name, value in limits.items():
        if not isinstance(value, (int, float)) or not math.isfinite(value):
            raise ConfigError(
                f"until.{name} is {shown(value)}, expected a finite number; use for example "
                f"until.{name}=1."
            )
        if not (run.callbacks or _EVALUATION_METRICS.fullmatch(name)):
            raise ConfigError(
                f"until has {quoted(name)}, which no evaluation measures; expected return, "
                "return_min, return_max, length_mean, GROUP/episode_reward, or a metric that a "
                "callback logs in on_evaluation."
            )
    if limits and run.evaluation.every_frames is None and run.evaluation.count is None:
        raise ConfigError(
            "until is given, but evaluation.every_frames is null, so that no evaluation takes "
            f"place during training; use evaluation.every_frames={run.frames_per_batch}."
        )


@dataclass(frozen=True)
class EvaluationConfig:
    """Evaluation of the policy on whole episodes."""

    every_frames: Annotated[Count | None, ReadWhere("count", None)] = None
    """Frames between two evaluations during training; null: only before and after training."""
    count: Count | None = None
    """Number of evaluations after the first one, evenly spaced up to the end of training; null: by
    ``evaluation.every_frames``."""
    episodes: Annotated[int, Range(0)] = 200
    """Number of whole episodes per evaluation, played in parallel; 0: no evaluation."""
    deterministic: bool = True
    """Evaluate with the most likely actions; false: with sampled actions."""
    randomize: bool = False
    """Evaluate with the ranges of ``env.randomize``; false: with nominal values, without noise and
    delays."""
    both: bool = True
    """Evaluate with both deterministic and sampled actions at the end. A message is printed if
    their mean returns clearly differ."""
    absolute_episodes: Annotated[int, Range(0)] = 0
    """Number of episodes played after training with the parameters of the best evaluation; 0:
    none."""
    gif: bool = False
    """Write an animation of the first evaluation episodes to ``episode.gif`` after the run."""
    animate_every: Count | None = None
    """Training frames between two animations, which are written to ``animations/``; null: none."""
    episodes_shown: Annotated[int, Range(1, 16)] = 1
    """Number of episodes in one animation."""


@dataclass(frozen=True)
class DataConfig:
    """Recorded steps, or actions of an expert, to learn from."""

    folder: str | None = None
    """Dataset of ``torchrl-marl record`` that batches are read from; null: from the environment.
    With a dataset, the environment is only used in evaluations."""
    expert: str | None = None
    """Policy whose actions replace those in the batches: ``heuristic``, of the environment, or the
    folder of a run; null: none. With ``bc`` this is DAgger."""

    def check(self, at: str = "") -> None:
        """Refuses a dataset together with an expert."""
        if self.folder is not None and self.expert is not None:
            raise ConfigError(
                f"{at}folder and {at}expert are both given, expected one of them; an expert acts "
                f"in the environment: use {at}folder=null, or {at}expert=null."
            )

    def absolute(self) -> DataConfig:
        """Returns the section with absolute paths, which a resumed run finds from any folder."""
        given = {"folder": self.folder, "expert": self.expert}
        places = {k: v for k, v in given.items() if v is not None and v != "heuristic"}
        return replace(self, **{k: str(Path(v).expanduser().absolute()) for k, v in places.items()})


MATCHES = {
    "none": "no stored players",
    "self": "the current policy (self-play); players are stored, but not played",
    "latest": "the most recently stored player",
    "uniform": "stored players with equal probability (fictitious play)",
    "pfsp": "stored players, weighted by win rates (prioritized fictitious self-play)",
    "nash": "stored players with the probabilities of a Nash equilibrium (PSRO)",
}
"""Distribution of opponents or partners -> its meaning."""


_LEAGUE_LIMITS = (
    Limit("snapshot_at", "but stored players are not played", when=lambda own: own.match == "self"),
    Limit(
        "snapshot_at",
        "but snapshot_every is null, the largest number of frames between two stored players",
        when=lambda own: own.snapshot_every is None,
    ),
    Limit(
        "self_play",
        "which leaves no envs for stored players",
        (0.5,),
        lambda own: own.match not in ("none", "self") and own.self_play == 1.0,
    ),
)


@dataclass(frozen=True)
class LeagueConfig:
    """Stored players that act in some envs and seats in place of the learning policy."""

    opponents: Annotated[str, OneOf(MATCHES)] = "none"
    """Distribution of opponents, in environments with several opposing groups."""
    partners: Annotated[
        str, OneOf({name: meaning for name, meaning in MATCHES.items() if name != "nash"})
    ] = "none"
    """Distribution of partners within a team (fictitious co-play)."""
    self_play: Annotated[float, Range(0, 1)] = 0.5
    """Share of the envs in which the learning policy plays all seats. In the remaining
    envs the learning policy plays one seat; they are divided evenly among the seats."""
    weighting: Annotated[
        str,
        OneOf(
            {
                "squared": "(1 - w) ** 2: strongly prefers strong players",
                "linear": "1 - w: prefers strong players",
                "variance": "w * (1 - w): prefers players of about equal strength",
            }
        ),
    ] = "squared"
    """Weighting of stored players in ``pfsp``, by the win rate w of the policy against each. For a
    partner, w is the return achieved with it, scaled to [0, 1]."""
    slots: Annotated[int, Range(1, 1000)] = 16
    """Maximum number of stored players to draw from. Beyond this number, each new player
    replaces the stored player with the lowest probability."""
    snapshot_every: Count | None = 100_000
    """Frames between two stored players; null: only the players of ``start_with``."""
    snapshot_at: Share | None = None
    """Win rate against every stored player at which the policy is stored early. Null: the
    policy is stored only every ``snapshot_every`` frames."""
    exploiters: Annotated[int, Range(0)] = 0
    """Number of exploiters: policies that learn only against the main policy. An exploiter is
    stored when its win rate reaches ``snapshot_at`` (null: 0.7), at the latest after
    ``snapshot_every`` frames. It then restarts as a copy of the main policy."""
    exploited: Share = 0.25
    """Total share of the envs used by all exploiters."""
    seats: dict[str, Any] = field(default_factory=dict)
    """Seats by name, each with the groups or agents that one player controls. Empty: one seat
    per group, or with a single group, one seat per agent."""
    start_with: list[str] = field(default_factory=list)
    """Players stored before training; empty: the untrained policy. Each entry is a run folder, a
    file of a stored player, a folder of such files, ``random`` or ``heuristic``."""

    @property
    def enabled(self) -> bool:
        """True if the run has a league."""
        return self.match != "none"

    @property
    def match(self) -> str:
        """The distribution of opponents if there are any, else that of partners."""
        return self.partners if self.opponents == "none" else self.opponents

    def check(self, at: str = "") -> None:
        """Refuses settings that contradict each other.

        Args:
            at (str): prefix of the names in messages.

        Raises:
            ConfigError: settings are contradictory; the message names them and the fix.
        """
        for limit in _LEAGUE_LIMITS:
            limit.check(self, at)
        if not self.enabled and self.start_with:
            raise ConfigError(
                f"{at}start_with is {quoted(self.start_with)}, but {at}opponents and {at}partners "
                f"are none, so that they are never played; use for example {at}opponents=uniform."
            )
        twice = [name for i, name in enumerate(self.start_with) if name in self.start_with[:i]]
        if twice:
            raise ConfigError(
                f"{at}start_with has {quoted(twice[0])} twice, expected every player once."
            )
        if "none" not in (self.opponents, self.partners):
            raise ConfigError(
                f"{at}opponents is {quoted(self.opponents)} and {at}partners "
                f"{quoted(self.partners)}, expected one of them to be none; use {at}partners=none."
            )
        if self.enabled and self.snapshot_every is None and not self.start_with:
            raise ConfigError(
                f"{at}snapshot_every is null and {at}start_with is empty, so that no player is "
                f"stored; use {at}snapshot_every=100000, or list players in {at}start_with."
            )
        idle = self.opponents in ("none", "self")
        if self.exploiters and (idle or self.snapshot_every is None):
            name, use = ("opponents", "pfsp") if idle else ("snapshot_every", "100000")
            raise ConfigError(
                f"{at}exploiters is {self.exploiters}, expected 0 where {at}{name} is "
                f"{shown(getattr(self, name))}: exploiters are stored as opponents; use "
                f"{at}{name}={use}."
            )


_LEARNER = "learner"
_MEMBER_FOLDER = re.compile(r"(?:[^./\\\x00-\x1f][^/\\\x00-\x1f]*/)?seed\d+")


@dataclass(frozen=True)
class PopulationConfig:
    """Several runs (members) trained in parallel, in one program."""

    size: Count = 1
    """Number of members, with seeds ``seed``, ``seed + 1`` and so on; 1: an ordinary run. Each
    member has ``env.num_envs`` envs, ``total_frames`` frames and its own run folder."""
    vary: dict[str, Any] = field(default_factory=dict)
    """Learner settings that differ between members, each with a list or a range of values. A list
    has one value per member. A range ``{low: 1e-4, high: 1e-2, log: true}`` spreads the values
    evenly, here on a logarithmic scale."""
    share_replay: bool = False
    """Share one replay buffer among all members; off-policy algorithms only."""
    folders: list[str] = field(default_factory=list)
    """Folder of each member in the run folder, with its seed, such as ``lr=0.001/seed3``. Empty:
    ``seedN``, with the seeds ``seed``, ``seed + 1`` and so on. Sweeps set it."""

    def check(self, at: str = "") -> None:
        """Refuses settings that cannot vary over members, and wrong values or numbers of values.

        Args:
            at (str): prefix of the names in messages.

        Raises:
            ConfigError: a setting or value is wrong; the message names it.
        """
        if self.vary and self.size == 1:
            raise ConfigError(f"{at}vary is given, but {at}size is 1; use for example {at}size=8.")
        self._check_folders(f"{at}folders")
        for name, given in _flatten_vary(self.vary).items():
            for word in (name, *(given if isinstance(given, Mapping) else ())):
                if ":" in str(word):  # YAML takes the whole text for a key
                    raise ConfigError(
                        f"{at}vary has {word!r}, expected a space after each colon: "
                        "{low: 1e-4, high: 1e-2, log: true}."
                    )
            self._check_name(f"{at}vary", name)
            self._check_values(f"{at}vary.{name}", given)

    def values(self, seed: int) -> dict[str, list[float]]:
        """Returns one value per member for every learner setting that varies over members.

        A range gives equally spaced values; with ``log``, their logarithms are equally spaced.
        The values of all settings except the first are shuffled among the members.

        Args:
            seed (int): random seed of the shuffling.

        Examples:
            >>> lr = {"low": 0.1, "high": 10.0, "log": True}
            >>> PopulationConfig(3, {"learner.lr": lr}).values(seed=0)
            {'lr': [0.1, 1.0, 10.0]}
        """
        found: dict[str, list[float]] = {}
        for i, (name, given) in enumerate(_flatten_vary(self.vary).items()):
            own = list(map(float, given)) if isinstance(given, list) else _spaced(given, self.size)
            if i and not isinstance(given, list):
                random.Random(f"{seed} {name}").shuffle(own)
            found[name.removeprefix(f"{_LEARNER}.")] = own
        return found

    def place(self, number: int, seed: int) -> tuple[str, int]:
        """Returns the folder of a member in the population's, and the member's seed.

        Args:
            number (int): index of the member, 0 for the first.
            seed (int): random seed of the population.

        Examples:
            >>> PopulationConfig(2).place(1, seed=3)
            ('seed4', 4)
            >>> PopulationConfig(2, folders=["lr=0.1/seed0", "lr=0.2/seed0"]).place(1, seed=0)
            ('lr=0.2/seed0', 0)
        """
        if self.folders:
            name = self.folders[number]
            return name, int(name.rpartition("seed")[2])
        return f"seed{seed + number}", seed + number

    def bounds(self) -> dict[str, tuple[float, float, bool]]:
        """Returns the low end, the high end and the ``log`` flag of each varied setting.

        Examples:
            >>> PopulationConfig(2, {"learner.gamma": [0.9, 0.99]}).bounds()
            {'gamma': (0.9, 0.99, False)}
        """
        found = {}
        for name, given in _flatten_vary(self.vary).items():
            limits = (min(given), max(given)) if isinstance(given, list) else None
            low, high = limits or (given["low"], given["high"])
            logarithmic = limits is None and bool(given.get("log", False))
            found[name.removeprefix(f"{_LEARNER}.")] = (float(low), float(high), logarithmic)
        return found

    def _check_folders(self, at: str) -> None:
        if self.folders and len(set(self.folders)) != self.size:
            raise ConfigError(
                f"{at} has {len(set(self.folders))} different names, expected {self.size}, one for "
                "each member (population.size)."
            )
        for name in self.folders:
            if not _MEMBER_FOLDER.fullmatch(name):
                raise ConfigError(
                    f"{at} has {quoted(name)}, expected a name such as seed3 or lr=0.001/seed3."
                )

    def _check_name(self, at: str, name: str) -> None:
        section, _, setting = name.partition(".")
        if section != _LEARNER or setting not in VARYING:
            known = [f"{_LEARNER}.{one}" for one in VARYING]
            raise ConfigError(
                f"{at} has {name!r}; {nearest(name, known)}expected one of {', '.join(known)}; "
                "settings that change shapes cannot differ between members."
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
                f"{at} goes from {quoted(low)} to {quoted(high)}, expected two numbers, the "
                "smaller one first."
            )
        if not isinstance(logarithmic, bool) or (logarithmic and low <= 0):
            raise ConfigError(
                f"{at} begins at {quoted(low)} with log: {quoted(logarithmic)}, expected more than "
                "0 with log: true; use log: false."
            )


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def _flatten_vary(nested: Mapping[str, Any], at: str = "") -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in nested.items():
        if isinstance(value, Mapping) and not {"low", "high", "log"} & set(value):
            found |= _flatten_vary(value, f"{at}{key}.")
        else:
            found[f"{at}{key}"] = value
    return found


def _spaced(given: Mapping[str, Any], size: int) -> list[float]:
    low, high = given["low"], given["high"]
    shares = [i / max(size - 1, 1) for i in range(size)]
    if not given.get("log"):
        return [low + share * (high - low) for share in shares]
    return [low * (high / low) ** share for share in shares]


_IF_EVOLVING = ReadWhere("method", "none", but=True)
_IF_TOURNAMENT = ReadWhere("method", "tournament")


@dataclass(frozen=True)
class EvolutionConfig:
    """Selection among the members of a population, and mutation of the copies."""

    method: Annotated[
        str,
        OneOf(
            {
                "none": "no selection",
                "pbt": "the worst members become copies of the best (population-based training)",
                "tournament": "each member becomes a copy of the best of some randomly drawn ones",
            }
        ),
    ] = "none"
    """Rule that selects the members to copy."""
    every_frames: Annotated[int, Range(1), _IF_EVOLVING] = 200_000
    """Frames of each member between two selections."""
    fitness: Annotated[
        str,
        _IF_EVOLVING,
        OneOf(
            {
                "return": "mean return of training episodes that began after the last selection",
                "evaluation": "mean return of an evaluation before the selection",
                "rating": "Bradley-Terry rating of games between members (two-sided environments)",
            }
        ),
    ] = "return"
    """Fitness by which members are compared."""
    least_episodes: Annotated[int, Range(1), _IF_EVOLVING, ReadWhere("fitness", "return")] = 10
    """Minimum number of episodes that every member must finish before a selection."""
    worst: Annotated[float, Range(0, 0.5), ReadWhere("method", "pbt")] = 0.25
    """Share of the members that ``pbt`` replaces."""
    drawn: Annotated[int, Range(1), _IF_TOURNAMENT] = 2
    """Number of members drawn for each ``tournament``."""
    elite: Annotated[int, Range(0), _IF_TOURNAMENT] = 1
    """Number of best members that stay unchanged in a ``tournament``."""
    factors: Annotated[list[float], _IF_EVOLVING] = field(default_factory=lambda: [0.8, 1.25])
    """Mutation factors of the varied settings. A copied member multiplies each varied setting of
    its parent by one of these factors, drawn at random."""
    resample: Annotated[float, Range(0, 1), _IF_EVOLVING] = 0.25
    """Probability that a varied setting of a copy is drawn from its range, instead of being
    multiplied by a factor."""

    def check(self, at: str = "") -> None:
        """Refuses factors of 0 or less, and an empty list of factors.

        Args:
            at (str): prefix of the names in messages.

        Raises:
            ConfigError: a setting or value is wrong; the message names it.
        """
        if not self.factors or any(factor <= 0 for factor in self.factors):
            raise ConfigError(
                f"{at}factors is {quoted(self.factors)}, expected numbers above 0; use [0.8, 1.25]."
            )


_IF_RAY = ReadWhere("backend", "ray")


@dataclass(frozen=True)
class DistributedConfig:
    """Processes and machines that collect batches."""

    backend: Annotated[
        str,
        OneOf({"none": "in the training process", "ray": "in Ray actors, here or on a cluster"}),
    ] = "none"
    """Processes in which the shards run. The choice does not affect the results."""
    collectors: Count | None = None
    """Number of shards: equal parts of the envs, each with its own random generator. The number
    affects the results. Null: one shard per process of ``torchrun``, and no shards without it."""
    overlap: Annotated[int, Range(0, 100)] = 0
    """Number of batches by which collection runs ahead of learning. Above 1, use
    ``learner.estimator=vtrace``."""
    asynchronous: Annotated[bool, _IF_RAY] = False
    """Asynchronous collection, in which actors never wait for each other. A batch holds the
    trajectory fragments that arrive first. This is faster if actors differ in speed, but not
    reproducible. Use it with ``learner.estimator=vtrace``."""
    max_lag: Annotated[Count, _IF_RAY, ReadWhere("asynchronous", True)] = 4
    """Maximum age of a fragment's policy, in batches; older fragments are dropped."""
    actors: Annotated[Count | None, _IF_RAY] = None
    """Number of actor processes; null: one per shard, at most the number of CPUs."""
    address: Annotated[str | None, _IF_RAY] = None
    """Address of a Ray cluster: ``auto``, ``host:6379`` or ``ray://host:10001``. Null: the
    address in ``RAY_ADDRESS``; if that is not set, the run starts Ray on this machine."""
    cpus_per_actor: Annotated[float, Range(0), _IF_RAY] = 1.0
    """Number of CPUs that Ray reserves for each actor."""
    gpus_per_actor: Annotated[float, Range(0), _IF_RAY] = 0.0
    """Number of GPUs that Ray reserves for each actor; 0: actors run on the CPU."""
    spares: Annotated[int, Range(0, 100), _IF_RAY] = 1
    """Number of spare processes that can replace a dead actor; their imports are already done."""
    timeout: Annotated[Positive, _IF_RAY] = 300.0
    """Seconds after which an actor that has not finished its batch counts as dead."""
    max_restarts: Annotated[int, Range(0), _IF_RAY] = 10
    """Maximum number of actors replaced during one batch; if more are needed, the run stops."""
    snapshot_every: Annotated[int, Range(0), _IF_RAY] = 1
    """Batches between two snapshots of a shard; 0: no snapshots. A lost shard is restored from its
    latest snapshot. Without snapshots it starts new episodes."""

    @property
    def enabled(self) -> bool:
        """True if the environments are split into shards."""
        return self.collectors is not None

    def check(self, at: str = "") -> None:
        """Refuses settings that contradict each other.

        Args:
            at (str): prefix of the names in messages.

        Raises:
            ConfigError: settings are contradictory; the message names them and the fix.
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
                f"{at}snapshot_every is 0, expected 1 or more with {at}overlap={self.overlap}, "
                f"whose batches are replayed when the run is resumed; use {at}snapshot_every=1."
            )


def check_shards_divide(run: TrainConfig) -> None:
    """Refuses a number of shards into which the envs cannot be divided equally.

    Args:
        run (TrainConfig): the settings.

    Raises:
        ConfigError: the number does not fit; the message names the next number that does.
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
