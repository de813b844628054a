"""Copies of an environment in processes of their own."""

from __future__ import annotations

import mmap
import os
import sys
import time
import warnings
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from torchrl_marl.envs.processes.copies import Copies, EnvInstance, Failure, RowLayout, open_block
from torchrl_marl.envs.processes.worker import PATIENCE, PLAY, Worker, WorkerLost
from torchrl_marl.errors import ConfigError, UserError, WorkerError

__all__ = ["EnvInstance", "Repeats", "Workers"]


class Repeats:
    """Position of each copy since it was made, and its number of failures there in a row.

    A copy that is made anew, gets other seeds and fails in the same step all the same does so by
    itself: no restart fixes it.

    Args:
        n_copies (int): how many there are.

    Examples:
        >>> repeats = Repeats(1)
        >>> for _ in range(2):
        ...     repeats.made([0])
        ...     repeats.played(np.array([False]))
        ...     times = repeats.failed(0)
        >>> times, repeats.place(0)
        (2, 'step 2 of its episode 1')
    """

    def __init__(self, n_copies: int) -> None:
        self._at = np.zeros((n_copies, 2), np.int64)  # episodes, and steps in the running one
        self._failed: dict[int, tuple[tuple[int, ...], int]] = {}

    def made(self, copies: Sequence[int]) -> None:
        """Resets the counts of copies that were made anew, and begin their first episode."""
        self._at[list(copies)] = 1, 0

    def begun(self, copies: Sequence[int]) -> None:
        """Notes that some copies begin an episode."""
        self._at[list(copies)] += (1, 0)
        self._at[list(copies), 1] = 0

    def played(self, ended: np.ndarray | None, failed: Sequence[int] = ()) -> None:
        """Notes a step of all copies but the failed ones; some episodes ``[E]`` ended in it."""
        self._at[:, 1] += 1
        self._at[list(failed), 1] -= 1
        if ended is not None and ended.any():
            self.begun(np.flatnonzero(ended).tolist())

    def failed(self, copy: int) -> int:
        """Returns how often a copy failed at its position, without one elsewhere in between."""
        at = tuple(self._at[copy].tolist())
        last, times = self._failed.get(copy, (at, 0))
        self._failed[copy] = at, (times if last == at else 0) + 1
        return self._failed[copy][1]

    def place(self, copy: int) -> str:
        """Returns the position of a copy, counted since it was made, as text."""
        episodes, steps = self._at[copy].tolist()
        return f"step {steps + 1} of its episode {episodes}"


MOST_RESTARTS = 10  # in a row, without a step in between that had no failure
MOST_REPEATS = 3  # failures of a copy in the same step until it counts as broken


class Workers:
    """E copies of an environment, played in a few processes or in this one.

    All copies read and write rows of one block of memory, so that a step costs one byte to each
    worker and one back. The processes are fresh interpreters: they are not forked, do not run
    the user's script again (so it needs no ``if __name__ == "__main__"``) and import no torch. They
    end when this object is closed or deleted, and when this process ends in whatever way.

    Args:
        make (callable): makes a copy, in its process; pickled with ``cloudpickle``, so that a
            lambda, or a function of a notebook, will do.
        layout (RowLayout): what a copy reads and writes.
        n_copies (int): number E of copies.
        n_workers (int): processes, at most one a copy; 0: all in this process.

    Keyword Args:
        timeout (float): seconds after which a worker that does not answer is taken for lost; the
            time limit of a start is longer.
        restart (bool): go on when copies raise, or workers die or hang: they are made anew, with
            a warning, and started with fresh seeds. Not after a mistake of a program, nor when a
            copy failed in the same step three times.
        seeds (sequence of int, optional): one a copy, given to ``make``.
        name (str): of the environment, for errors.

    Attributes:
        rows (dict): field -> array ``[E, ...]`` that is read and written in place.
        restarts (int): how many copies and workers were made anew.

    Raises:
        WorkerError: a copy raised, or a worker died or hangs; its notes have the traceback. The
            other copies can still be used.
        UserError: what a copy raised, if it is one of ``torchrl_marl.errors``.
    """

    def __init__(
        self,
        make: Callable[..., EnvInstance],
        layout: RowLayout,
        n_copies: int,
        n_workers: int = 0,
        *,
        timeout: float = 60.0,
        restart: bool = False,
        seeds: Sequence[int] | None = None,
        name: str = "world",
    ) -> None:
        _check(n_copies, n_workers, timeout)
        self.restarts = 0
        self._name, self._restart, self._in_a_row = name, restart, 0
        self._n_copies, n_workers = n_copies, min(n_workers, n_copies)
        self._repeats = Repeats(n_copies)
        self._seeds: list[int | None] = [None] * n_copies if seeds is None else list(seeds)
        self._made_with_seed = seeds is not None
        size = layout.n_bytes(n_copies)
        self._lost: dict[int, UserError] = {}
        self._here: Copies | None = None
        self._workers: list[Worker] = []
        self._close: weakref.finalize
        if not n_workers:
            self.rows = layout.views(bytearray(size), n_copies)
            self._current = np.zeros(1, np.int64)
            self._here = Copies(make, self.rows, range(n_copies), self._current)
            self._close = weakref.finalize(self, self._here.close)
        else:
            block = open_block(size + 8 * n_workers)
            buffer = mmap.mmap(block, 0)
            self.rows = layout.views(buffer, n_copies)
            self._current = np.ndarray((n_workers,), np.int64, buffer, size)
            pickled = _pickled(make, name)
            self._close = weakref.finalize(self, _end, self._workers, block, os.getpid())
            for i in range(n_workers):
                worker = Worker(pickled, layout, block, n_copies, n_workers, i, timeout)
                worker.start()
                self._workers.append(worker)
                self._current[i] = worker.copies[0]
        try:
            self._call("make", {i: () if seeds is None else (seeds[i],) for i in range(n_copies)})
        except BaseException:
            self.close()
            raise

    def begin(
        self, fresh: np.ndarray | None = None, seeds: Sequence[int | None] | None = None
    ) -> None:
        """Begins episodes.

        Args:
            fresh (numpy.ndarray, optional): ``[E]``; in which copies, otherwise in all.
            seeds (sequence of int or None, optional): one a copy; with None a copy's generator
                goes on.
        """
        numbers = range(self._n_copies) if fresh is None else np.flatnonzero(fresh).tolist()
        new_seeds = [None] * self._n_copies if seeds is None else seeds
        for i in numbers:
            self._seeds[i] = self._seeds[i] if new_seeds[i] is None else new_seeds[i]
        self._repeats.begun(numbers)
        _, failures = self._ask("begin", {i: (new_seeds[i],) for i in numbers})
        self._repair(failures)

    def play(self) -> np.ndarray | None:
        """Steps all copies, with the actions in their rows.

        Returns:
            numpy.ndarray or None: ``[E]``, the copies that were started anew, since they or their
            worker failed: their rows hold the begin of an episode. None if there are none.
        """
        self._check_open()
        ended = self.rows.get("ended")
        if ended is not None:
            ended[...] = False  # a copy may fail before it reports so, or afterwards
        if self._here is not None:
            failures = self._here.play()
        else:
            for worker in self._able(self._workers):
                worker.send(PLAY)
            _, failures = self._gather(self._workers)
        failed = [failure.copy for failure in failures]
        self._repeats.played(None if ended is None else ended.reshape(self._n_copies), failed)
        if failures:
            return self._repair(failures)
        self._in_a_row = 0
        return None

    def save(self) -> list[bytes]:
        """Returns the whole state of each copy."""
        results = self._call("save", dict.fromkeys(range(self._n_copies), ()))
        return [results[i] for i in range(self._n_copies)]

    def load(self, states: Sequence[bytes]) -> None:
        """Restores saved states, one per copy."""
        self._call("load", {i: (state,) for i, state in enumerate(states)})

    def watch(self, number: int) -> None:
        """Lets the first copies keep what they look like, where their kind can be drawn."""
        self._call("watch", {i: (i < number,) for i in range(self._n_copies)})

    def draw(self, copy: int) -> Any:
        """Returns what a copy looks like: pixels, or a text."""
        return self._call("draw", {copy: ()})[copy]

    def close(self) -> None:
        """Closes the copies and ends the processes; a second call has no effect."""
        self._close()

    def _call(self, method: str, arguments: Mapping[int, tuple]) -> dict[int, Any]:
        results, failures = self._ask(method, arguments)
        if failures:
            raise self._raised(failures)
        return results

    def _ask(
        self, method: str, arguments: Mapping[int, tuple]
    ) -> tuple[dict[int, Any], list[Failure]]:
        self._check_open()
        if self._here is not None:
            return self._here.call(method, arguments)
        asked = [w for w in self._workers if any(i in arguments for i in w.copies)]
        for worker in self._able(asked):
            of_worker = {i: arguments[i] for i in worker.copies if i in arguments}
            worker.send((method, of_worker))
        return self._gather(asked)

    def _check_open(self) -> None:
        if not self._close.alive:
            raise WorkerError(f"The copies of {self._name} are closed; make the environment anew.")

    def _able(self, asked: list[Worker]) -> list[Worker]:
        for worker in asked if self._lost else ():
            if worker.number in self._lost:
                raise self._lost[worker.number]
        return asked

    def _gather(self, asked: list[Worker]) -> tuple[dict[int, Any], list[Failure]]:
        results: dict[int, Any] = {}
        failures: list[Failure] = []
        for worker in asked:
            try:
                of_worker, failed = worker.receive()
            except WorkerLost as lost:
                failures.append(self._lose(worker, str(lost)))
                continue
            results |= of_worker
            failures += failed
        return results, failures

    def _lose(self, worker: Worker, what: str) -> Failure:
        copy = int(self._current[worker.number])
        failure = Failure(copy, worker.number, what, worker.traceback, lost=True)
        self._lost[worker.number] = failure.error(self._name)
        return failure

    def _repair(self, failures: list[Failure]) -> np.ndarray:
        anew = np.zeros(self._n_copies, bool)
        while failures:
            if not self._restart or not all(failure.repairable for failure in failures):
                raise self._raised(failures)
            for failure in failures:
                self._count(failure)
            numbers = [i for failure in failures for i in self._revived(failure)]
            anew[numbers] = True
            self._repeats.made(numbers)
            times = 2 if self._made_with_seed else 1  # to make it, and to begin
            _, failures = self._ask("renew", {i: (self._fresh_seed(i),) * times for i in numbers})
        return anew

    def _raised(self, failures: list[Failure]) -> UserError:
        first, *others = failures
        error = first.error(self._name)
        for other in others:
            error.add_note(f"In the same step: {other.words(self._name)}.")
        return error

    def _count(self, failure: Failure) -> None:
        words, hopeless = failure.words(self._name), None
        if self._repeats.failed(failure.copy) >= MOST_REPEATS:
            hopeless = (
                f"it failed {MOST_REPEATS} times in {self._repeats.place(failure.copy)} "
                "after it was made, which no restart fixes: correct the world"
            )
        elif self._in_a_row >= MOST_RESTARTS:
            hopeless = (
                f"there were {MOST_RESTARTS} restarts before, with no step in between "
                "that went well"
            )
        if hopeless is not None:
            error = WorkerError(f"{words}; {hopeless}.")
            error.add_note(failure.traceback)
            raise error
        self._in_a_row += 1
        self.restarts += 1
        warnings.warn(f"{words}; made anew, restart {self.restarts}.", RuntimeWarning, stacklevel=4)

    def _revived(self, failure: Failure) -> Iterable[int]:
        """Restarts a lost worker; returns the copies that must be made anew."""
        if not failure.lost:
            return [failure.copy]
        worker = self._workers[failure.worker or 0]
        del self._lost[worker.number]
        worker.start()
        return worker.copies

    def _fresh_seed(self, copy: int) -> int | None:
        seed = self._seeds[copy]
        if seed is None:
            return None
        drawn = np.random.SeedSequence([seed, self.restarts]).generate_state(1)
        return int(drawn[0]) >> 1  # some environments want 31 bits


def _check(n_copies: int, n_workers: int, timeout: float) -> None:
    if n_copies < 1:
        raise ConfigError(f"num_envs={n_copies}; give at least one copy of the environment.")
    if n_workers < 0:
        raise ConfigError(f"workers={n_workers}; give 0 for this process, or how many to start.")
    if not timeout > 0:
        raise ConfigError(f"worker_timeout={timeout}; give a number of seconds above 0.")
    if n_workers and sys.platform == "win32":
        raise ConfigError(f"workers={n_workers} need Linux or macOS; give workers=0 on Windows.")


def _pickled(make: Callable[..., EnvInstance], name: str) -> bytes:
    import cloudpickle

    try:
        return cloudpickle.dumps(make)
    except Exception as error:
        raise ConfigError(
            f"{name} cannot be sent to workers, since it cannot be pickled ({error}); give a "
            "function that makes it, or workers=0."
        ) from error


def _end(workers: list[Worker], block: int, process: int) -> None:
    if os.getpid() != process:
        return  # a fork of the process that owns these workers
    for worker in workers:
        worker.ask_to_end()
    last = time.monotonic() + PATIENCE
    for worker in workers:
        worker.end(max(last - time.monotonic(), 0.0))
    os.close(block)
