"""Shards on Ray actors."""

from __future__ import annotations

import contextlib
import math
import re
import warnings
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torchrl_marl.capture.program import announce_slow_work
from torchrl_marl.collectors.ray_connection import Connection, connect
from torchrl_marl.collectors.shard import Shard, ShardActor, is_exact, to_arrays, unpack
from torchrl_marl.collectors.sharded import ReplayLog, ShardResult, Weights, WeightsRecord
from torchrl_marl.errors import ConfigError, UserError, WorkerError
from torchrl_marl.runtime.trust import is_trusting

__all__ = ["ActorFailure", "RayPlacement", "get_answer"]


@dataclass(frozen=True)
class ActorFailure:
    """Reason why an actor has not answered.

    Args:
        reason (str): one line that continues a sentence about the actor.
        lost (bool): True if the actor's process is dead, silent or unreachable; False if the code
            of its environment raised an error.
        traceback (str): traceback in the actor's process.
    """

    reason: str
    lost: bool
    traceback: str = ""

    def error(self, before: str, after: str = "") -> WorkerError:
        """Returns the error to raise, with the traceback as a note."""
        error = WorkerError(f"{before} {self.reason}{after}")
        if self.traceback:
            error.add_note(f"There:\n{self.traceback}")
        return error


def get_answer(ray: Any, result: Any, ready: bool, timeout: float, prefix: str = "") -> Any:
    """Returns the answer of an actor, or its :class:`ActorFailure`.

    Args:
        ray (module): Ray.
        result (ObjectRef): result of the call.
        ready (bool): whether the call has ended.
        timeout (float): time waited for the call, in seconds.
        prefix (str): prefix of the message of a :class:`UserError`.

    Raises:
        UserError: the actor raised a :class:`UserError`, whose cause the user can correct.
    """
    if not ready:
        return ActorFailure(f"was silent for {timeout:g} s (distributed.timeout)", lost=True)
    try:
        return ray.get(result)
    except ray.exceptions.RayTaskError as error:
        cause = error.cause
        if isinstance(cause, UserError) and not isinstance(cause, WorkerError):
            raise _prefix_error(cause, prefix, str(error)) from None
        return ActorFailure(_describe_error(error), lost=False, traceback=str(error))
    except ray.exceptions.RayError as error:
        lines = str(error).strip().splitlines() or [type(error).__name__]
        return ActorFailure(f"is gone ({lines[0]})", lost=True, traceback=str(error))


def _prefix_error(cause: UserError, prefix: str, traceback: str) -> UserError:
    if not prefix:
        return cause
    kind = type(cause)
    error = kind.__new__(
        kind, f"{prefix}: {cause}"
    )  # the error's __init__ may have other arguments
    error.add_note(f"There:\n{traceback}")
    return error


def _describe_error(error: Any) -> str:
    """Describes an error, as in ``"raised ValueError: it broke (environment.py, line 3)"``."""
    text = " ".join(str(error.cause).split())[:500]
    places = re.findall(r'File "([^"]+)", line (\d+)', str(error))
    where = f" ({places[-1][0]}, line {places[-1][1]})" if places else ""
    return f"raised {type(error.cause).__name__}" + (f": {text}" if text else "") + where


_BUILD_TIMEOUT = 300.0  # minimum timeout, in seconds, for an actor to import and build its shards


class RayPlacement:
    """Shards on Ray actors, which are replaced if they die, fail or stop answering.

    A lost shard is restored from its last snapshot and replays the batches since then, so a run
    with failures gives the same results, to the bit. Without a snapshot, the shard begins new
    episodes. Restarts and lost episodes are counted.

    Args:
        makers (sequence of callable): ``maker(n_restarts)`` builds a shard, in any process.
        actors (int, optional): number of actors; by default one per shard, if there
            are enough CPUs.
        address (str, optional): address of a cluster; by default ``RAY_ADDRESS``, or a local Ray
            started for the run.
        cpus (float): CPUs reserved for each actor.
        gpus (float): GPUs reserved for each actor.
        spares (int): number of idle actors that are kept ready to replace lost ones.
        timeout (float): seconds without an answer after which an actor counts as dead.
        max_restarts (int): maximum number of restarts of an actor within one batch.

    Attributes:
        counters (dict): counts of restarts and lost episodes, under ``collector_restarts`` and
            ``episodes_lost``.

    Raises:
        ConfigError: Ray cannot be reached, or has too few CPUs or GPUs for the actors.
        WorkerError: an actor cannot build its shards.
    """

    def __init__(
        self,
        makers: Sequence[Callable[[int], Shard]],
        *,
        actors: int | None = None,
        address: str | None = None,
        cpus: float = 1.0,
        gpus: float = 0.0,
        spares: int = 1,
        timeout: float = 300.0,
        max_restarts: int = 10,
    ) -> None:
        self.makers, self.timeout, self.max_restarts = list(makers), timeout, max_restarts
        self.counters = {"collector_restarts": 0, "episodes_lost": 0}
        self.connection: Connection = connect(address, cpus * (actors or 0))
        self._ray = self.connection.ray
        self._options = {"num_cpus": cpus, "num_gpus": gpus, "max_restarts": 0}
        self._n_spares = 0 if gpus else spares
        self._lives = [0] * len(makers)
        self._lost: set[int] = set()
        self._has_played = False
        self._pending_batches: deque[list[Any]] = deque()
        self._spares: list[Any] = []
        self.actors: list[Any] = []
        try:
            n = self._count_actors(actors, cpus, gpus)
            bounds = [round(i * len(makers) / n) for i in range(n + 1)]
            self.own = [range(*bounds[i : i + 2]) for i in range(n)]
            self.actors = [self._new_actor() for _ in range(n)]
            self._build_shards({})
        except BaseException:
            self.close()
            raise

    def _count_actors(self, actors: int | None, cpus: float, gpus: float) -> int:
        """Returns the number of actors, after checking it against Ray's free CPUs and GPUs."""
        capacity = min(
            self.connection.cpus / cpus if cpus else math.inf,
            self.connection.gpus / gpus if gpus else math.inf,
        )
        n = min(len(self.makers), int(min(capacity, 1e6))) if actors is None else actors
        if n < 1 or n > capacity:
            raise ConfigError(
                f"{actors or 1} actors with {cpus:g} CPUs and {gpus:g} GPUs each "
                "(distributed.actors, cpus_per_actor, gpus_per_actor) exceed the free resources of "
                f"Ray, {self.connection.cpus:g} CPUs and {self.connection.gpus:g} GPUs; use fewer "
                "or smaller actors, or wait until resources are free."
            )
        return n

    # ------------------------------------------------------------------------------- playing

    def begin(self, weights: Weights | None, with_state: bool = False) -> None:
        """Starts a batch on every shard."""
        assert weights is not None
        sent = self._ray.put(to_arrays(weights))
        self._pending_batches.append([actor.play.remote(sent, with_state) for actor in self.actors])

    def take(self, replay_log: ReplayLog) -> list[ShardResult]:
        """Returns every shard's part of the oldest batch in progress."""
        first = "the actors build their environments, compile graphs, and play a first batch"
        with contextlib.nullcontext() if self._has_played else announce_slow_work(first):
            answers = self._await(self._pending_batches.popleft())
        self._has_played = True
        played = [one for a, own in enumerate(answers) for one in self._results(a, own, replay_log)]
        self._refill_spares()
        return played

    def play(self, a: int, entry: WeightsRecord) -> Any:
        """Starts a batch on one actor, and returns the pending call."""
        return self.actors[a].play.remote(self._ray.put(to_arrays(entry.weights)), entry.with_state)

    def first(self, calls: Sequence[Any]) -> Any:
        """Returns the first of several calls that has ended; after the timeout, the oldest call."""
        ended, _ = self.connection.wait(calls, 1, self.timeout)
        return next(iter(ended), calls[0])

    def take_from_actor(self, a: int, call: Any, replay_log: ReplayLog) -> list[ShardResult]:
        """Returns the batches of one actor's shards.

        Args:
            a (int): index of the actor.
            call (ObjectRef): pending call from :meth:`play`.
            replay_log (ReplayLog): log from which lost shards are restored.
        """
        (answer,) = self._await([call])
        played = self._results(a, answer, replay_log)
        self._refill_spares()
        return played

    def _results(self, a: int, answer: Any, replay_log: ReplayLog) -> list[ShardResult]:
        """Returns the batches of an actor's shards; plays them again if the actor has failed."""
        if isinstance(answer, ActorFailure):
            answer = self._recover_actor(a, answer, replay_log)
        own = zip(self.own[a], answer)
        played = [ShardResult(unpack(batch), state, i in self._lost) for i, (batch, state) in own]
        self.counters["episodes_lost"] += sum(len(one.batch) for one in played if one.lost)
        self._lost.difference_update(self.own[a])
        return played

    def _await(self, results: Sequence[Any], min_timeout: float = 0.0, what: str = "") -> list[Any]:
        """Waits for calls to actors, and returns the answer or failure of each."""
        results, timeout = list(results), max(self.timeout, min_timeout)
        ended, _ = self.connection.wait(results, len(results), timeout)
        ready = set(ended)
        subjects = [f"shard {_shard_list(own)} {what}" if what else "" for own in self.own]
        return [
            get_answer(self._ray, x, x in ready, timeout, own) for x, own in zip(results, subjects)
        ]

    # -------------------------------------------------------------------------------- deaths

    def _recover_actor(self, a: int, failure: ActorFailure, replay_log: ReplayLog) -> Any:
        """Restores a failed actor's shards; returns their part of the batch that began first."""
        tries = 1
        while tries <= self.max_restarts:
            self._replace_actor(a, failure)
            answer = self._replay(a, replay_log)
            if not isinstance(answer, ActorFailure):
                return answer
            tries += 1
            if answer == failure and not failure.lost:  # the same error from the same state
                break
            failure = answer
        raise failure.error(
            f"the actor of shard {_shard_list(self.own[a])} failed {tries} times in one batch; "
            "at last it",
            "; the last checkpoint stays, and `torchrl-marl train --resume` resumes from it.",
        )

    def _replace_actor(self, a: int, failure: ActorFailure) -> None:
        """Counts a restart; replaces the actor if its process is lost."""
        self.counters["collector_restarts"] += 1
        warnings.warn(
            f"the actor of shard {_shard_list(self.own[a])} {failure.reason}; its shards are "
            "restored.",
            stacklevel=2,
        )
        if failure.lost:
            self._ray.kill(self.actors[a])
            self.actors[a] = self._spares.pop() if self._spares else self._new_actor()

    def _replay(self, a: int, replay_log: ReplayLog) -> Any:
        """Rebuilds an actor's shards, replays their batches, and starts the pending ones again."""
        call = self._start_building(a, self._snapshots_of(a, replay_log), trust=True)
        (answer,) = self._await([call], _BUILD_TIMEOUT)
        if isinstance(answer, ActorFailure):
            return answer
        # Shards with new episodes have nothing to replay.
        lost_episodes = not self._lost.isdisjoint(self.own[a])
        entries = replay_log.entries[replay_log.taken if lost_episodes else 0 :]
        results = [self.play(a, entry) for entry in entries]
        results = results[0 if lost_episodes else replay_log.taken :]
        for later, result in zip(self._pending_batches, results[1:]):
            later[a] = result
        return self._await(results[:1])[0]

    def _snapshots_of(self, a: int, replay_log: ReplayLog) -> dict[int, Mapping[str, Any]]:
        """Returns the snapshots of an actor's shards; a shard without one begins new episodes."""
        if replay_log.keep_records and replay_log.snapshots is None:
            return {}  # the shards' initial states
        states = {}
        for i in self.own[a]:
            if replay_log.keep_records and is_exact(replay_log.snapshots[i]):  # type: ignore[index]
                states[i] = replay_log.snapshots[i]  # type: ignore[index]
            else:
                self._mark_lost(i)
        return states

    def _mark_lost(self, shard: int) -> None:
        self._lives[shard] += 1
        self._lost.add(shard)

    # --------------------------------------------------------------------------------- actors

    def _new_actor(self, spare: bool = False) -> Any:
        options = {**self._options, "num_cpus": 0} if spare else self._options
        return self._ray.remote(ShardActor).options(**options).remote()

    def _refill_spares(self) -> None:
        while len(self._spares) < self._n_spares:
            spare = self._new_actor(spare=True)
            spare.ready.remote(self.makers[0])
            self._spares.append(spare)

    def _start_building(self, a: int, states: Mapping[int, Mapping[str, Any]], trust: bool) -> Any:
        """Starts to build an actor's shards; its answer says which shards have lost no episodes."""
        makers = {i: self.makers[i] for i in self.own[a]}
        lives = {i: self._lives[i] for i in makers}
        own_states = {i: states[i] for i in makers if i in states}
        return self.actors[a].make.remote(makers, lives, own_states, trust)

    def _build_shards(
        self,
        states: Mapping[int, Mapping[str, Any]],
        trust: bool = False,
        only: Sequence[int] | None = None,
    ) -> dict[int, bool]:
        """Builds the shards of the given actors; returns, per shard, True if it lost no episodes.

        Raises:
            WorkerError: an actor fails; the message names the actor's shards, and has its
                traceback.
        """
        continues: dict[int, bool] = {}
        actors = range(len(self.actors)) if only is None else only
        calls = [self._start_building(a, states, trust) for a in actors]
        for a, answer in zip(actors, self._await(calls, _BUILD_TIMEOUT, "cannot be made")):
            if isinstance(answer, ActorFailure):
                raise answer.error(
                    f"shard {_shard_list(self.own[a])} cannot be made: its actor",
                    "; in a cluster, one machine must have room for it "
                    "(distributed.cpus_per_actor).",
                )
            continues |= answer
        return continues

    # ---------------------------------------------------------------------------------- state

    def states(self) -> list[dict[str, Any]]:
        """Returns the states of the shards at the end of the batch that began last."""
        found: dict[int, dict[str, Any]] = {}
        answers = self._await([actor.states.remote() for actor in self.actors])
        for a, answer in enumerate(answers):
            found |= self._restart_actor(a, answer) if isinstance(answer, ActorFailure) else answer
        return [found[i] for i in range(len(self.makers))]

    def _restart_actor(self, a: int, failure: ActorFailure) -> dict[int, dict[str, Any]]:
        """Rebuilds an actor's shards with new episodes, and returns their states."""
        self._replace_actor(a, failure)
        for i in self.own[a]:
            self._mark_lost(i)
        self._build_shards({}, only=[a])
        (answer,) = self._await([self.actors[a].states.remote()])
        if isinstance(answer, ActorFailure):
            raise answer.error(f"the actor of shard {_shard_list(self.own[a])}", ".")
        return answer

    def load(self, states: Sequence[Mapping[str, Any]] | None) -> list[bool]:
        """Restores the shards; if there are no states, all shards start new episodes."""
        self._pending_batches.clear()
        given: dict[int, Mapping[str, Any]] = {}
        for i in range(len(self.makers)):
            life = self._lives[i] if states is None else states[i]["life"]
            if states is not None and is_exact(states[i]):
                given[i], self._lives[i] = states[i], life
            else:
                self._lives[i] = life + 1
        kept = self._build_shards(given, trust=is_trusting())
        return [i in given and kept[i] for i in range(len(self.makers))]

    def close(self) -> None:
        """Stops the actors; also stops Ray if it was started for them."""
        # When Python exits, Ray may have been shut down already, and a call would start it again.
        for actor in (*self.actors, *self._spares) if self._ray.is_initialized() else ():
            self._ray.kill(actor)
        self.actors, self._spares = [], []
        self._pending_batches.clear()
        self.connection.close()


def _shard_list(shards: range) -> str:
    return ", ".join(map(str, shards))
