"""Copies of an environment in worker processes."""

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
from torchrl_marl.envs.processes.worker import END_TIMEOUT, PLAY, Worker, WorkerLost
from torchrl_marl.errors import ConfigError, UserError, WorkerError

__all__ = ["EnvInstance", "Repeats", "Workers"]


class Repeats:
    """Counts the steps and episodes of each copy since it was made, and repeated failures.

    A copy that fails again and again in the same step, although its seeds differ, is broken.
    Restarts do not help then.

    Args:
        n_copies (int): number of copies.

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
        self._progress = np.zeros((n_copies, 2), np.int64)  # episodes, and steps in the current one
        self._failed: dict[int, tuple[tuple[int, ...], int]] = {}

    def made(self, copies: Sequence[int]) -> None:
        """Resets the counts of restarted copies, which start their first episode."""
        self._progress[list(copies)] = 1, 0

    def begun(self, copies: Sequence[int]) -> None:
        """Counts a new episode of the given copies."""
        self._progress[list(copies)] += (1, 0)
        self._progress[list(copies), 1] = 0

    def played(self, ended: np.ndarray | None, failed: Sequence[int] = ()) -> None:
        """Counts a step of all copies except failed ones; ``ended`` is a mask ``[E]``."""
        self._progress[:, 1] += 1
        self._progress[list(failed), 1] -= 1
        if ended is not None and ended.any():
            self.begun(np.flatnonzero(ended).tolist())

    def failed(self, copy: int) -> int:
        """Counts a failure of a copy; returns the number of its failures in a row in this step."""
        progress = tuple(self._progress[copy].tolist())
        last, times = self._failed.get(copy, (progress, 0))
        self._failed[copy] = progress, (times if last == progress else 0) + 1
        return self._failed[copy][1]

    def place(self, copy: int) -> str:
        """Returns a text that gives a copy's step and episode, counted since it was made."""
        episodes, steps = self._progress[copy].tolist()
        return f"step {steps + 1} of its episode {episodes}"


MAX_RESTARTS_IN_A_ROW = 10  # restarts in a row without a successful step between them
MAX_SAME_FAILURES = 3  # number of failures in the same step after which a copy counts as broken


class Workers:
    """E copies of an environment, in worker processes or in this process.

    Each copy has a row in arrays in shared memory, so a step sends only one byte to each worker and
    one back. Workers are fresh interpreters. They are not forked, and do not import torch. They do
    not run the user's script again, so the script needs no ``if __name__ == "__main__"``. They end
    when this object is closed or deleted, and when this process ends.

    Args:
        make (callable): function that makes a copy, called in the copy's process. It is pickled
            with ``cloudpickle``, so lambdas and functions defined in notebooks work.
        layout (RowLayout): layout of the shared arrays.
        n_copies (int): number E of copies.
        n_workers (int): number of workers, at most one per copy; 0 runs the copies in this process.

    Keyword Args:
        timeout (float): time in seconds after which a worker without an answer counts as lost. At
            the start a worker has more time.
        restart (bool): True to restart failed copies and lost workers, with a warning and new
            seeds. There is no restart after a programming error, or after a copy has failed three
            times in the same step.
        seeds (sequence of int, optional): seeds of the copies, which are passed to ``make``.
        name (str): name of the environment in error messages.

    Attributes:
        rows (dict): arrays ``[E, ...]`` by field, read and written in place.
        restarts (int): number of restarts of copies and workers.

    Raises:
        WorkerError: a copy failed, or a worker died or hangs. The error's notes contain the
            traceback. The other copies can still be used.
        UserError: a copy raised an error of ``torchrl_marl.errors``.
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
        name: str = "environment",
    ) -> None:
        _check_arguments(n_copies, n_workers, timeout)
        self.restarts = 0
        self._name, self._may_restart, self._restarts_in_a_row = name, restart, 0
        self._n_copies, n_workers = n_copies, min(n_workers, n_copies)
        self._repeats = Repeats(n_copies)
        self._seeds: list[int | None] = [None] * n_copies if seeds is None else list(seeds)
        self._made_with_seed = seeds is not None
        self._lost_workers: dict[int, UserError] = {}
        self._local_copies: Copies | None = None
        self._workers: list[Worker] = []
        self._finalizer: weakref.finalize
        if n_workers:
            self._start_workers(make, layout, n_workers, timeout)
        else:
            self._make_local_copies(make, layout)
        try:
            self._call("make", {i: () if seeds is None else (seeds[i],) for i in range(n_copies)})
        except BaseException:
            self.close()
            raise

    def _make_local_copies(self, make: Callable[..., EnvInstance], layout: RowLayout) -> None:
        self.rows = layout.views(bytearray(layout.n_bytes(self._n_copies)), self._n_copies)
        self._current = np.zeros(1, np.int64)
        copies = range(self._n_copies)
        self._local_copies = Copies(make, self.rows, copies, self._current)
        self._finalizer = weakref.finalize(self, self._local_copies.close)

    def _start_workers(
        self,
        make: Callable[..., EnvInstance],
        layout: RowLayout,
        n_workers: int,
        timeout: float,
    ) -> None:
        size = layout.n_bytes(self._n_copies)
        block = open_block(size + 8 * n_workers)
        buffer = mmap.mmap(block, 0)
        self.rows = layout.views(buffer, self._n_copies)
        self._current = np.ndarray((n_workers,), np.int64, buffer, size)
        pickled = _pickle_maker(make, self._name)
        self._finalizer = weakref.finalize(self, _end_workers, self._workers, block, os.getpid())
        for i in range(n_workers):
            worker = Worker(pickled, layout, block, self._n_copies, n_workers, i, timeout)
            worker.start()
            self._workers.append(worker)
            self._current[i] = worker.copies[0]

    def begin(
        self, fresh: np.ndarray | None = None, seeds: Sequence[int | None] | None = None
    ) -> None:
        """Starts episodes.

        Args:
            fresh (numpy.ndarray, optional): mask ``[E]`` of the copies to reset; all by default.
            seeds (sequence of int or None, optional): seed of each copy; a copy whose seed is None
                is not seeded again.
        """
        numbers = range(self._n_copies) if fresh is None else np.flatnonzero(fresh).tolist()
        new_seeds = [None] * self._n_copies if seeds is None else seeds
        for i in numbers:
            self._seeds[i] = self._seeds[i] if new_seeds[i] is None else new_seeds[i]
        self._repeats.begun(numbers)
        _, failures = self._request("begin", {i: (new_seeds[i],) for i in numbers})
        self._restart_failed(failures)

    def play(self) -> np.ndarray | None:
        """Steps all copies, with the actions in their rows.

        Returns:
            numpy.ndarray or None: mask ``[E]`` of the copies that were restarted after a failure.
            The rows of these copies hold the start of an episode. None if no copy was restarted.
        """
        self._check_open()
        ended = self.rows.get("ended")
        if ended is not None:
            ended[...] = False  # a copy may fail before it writes this flag
        if self._local_copies is not None:
            failures = self._local_copies.play()
        else:
            for worker in self._check_not_lost(self._workers):
                worker.send(PLAY)
            _, failures = self._receive_answers(self._workers)
        failed = [failure.copy for failure in failures]
        self._repeats.played(None if ended is None else ended.reshape(self._n_copies), failed)
        if failures:
            return self._restart_failed(failures)
        self._restarts_in_a_row = 0
        return None

    def save(self) -> list[bytes]:
        """Returns the whole state of each copy."""
        results = self._call("save", dict.fromkeys(range(self._n_copies), ()))
        return [results[i] for i in range(self._n_copies)]

    def load(self, states: Sequence[bytes]) -> None:
        """Restores the states that :meth:`save` returned, one per copy."""
        self._call("load", {i: (state,) for i, state in enumerate(states)})

    def watch(self, number: int) -> None:
        """Lets the first copies keep a picture of each step, if the environment can be drawn."""
        self._call("watch", {i: (i < number,) for i in range(self._n_copies)})

    def draw(self, copy: int) -> Any:
        """Returns a picture of a copy, as pixels or text."""
        return self._call("draw", {copy: ()})[copy]

    def close(self) -> None:
        """Closes the copies and ends the processes; a second call has no effect."""
        self._finalizer()

    def _call(self, method: str, arguments: Mapping[int, tuple]) -> dict[int, Any]:
        results, failures = self._request(method, arguments)
        if failures:
            raise self._error_of(failures)
        return results

    def _request(
        self, method: str, arguments: Mapping[int, tuple]
    ) -> tuple[dict[int, Any], list[Failure]]:
        self._check_open()
        if self._local_copies is not None:
            return self._local_copies.call(method, arguments)
        workers = [w for w in self._workers if any(i in arguments for i in w.copies)]
        for worker in self._check_not_lost(workers):
            of_worker = {i: arguments[i] for i in worker.copies if i in arguments}
            worker.send((method, of_worker))
        return self._receive_answers(workers)

    def _check_open(self) -> None:
        if not self._finalizer.alive:
            raise WorkerError(f"The copies of {self._name} are closed; make a new environment.")

    def _check_not_lost(self, workers: list[Worker]) -> list[Worker]:
        """Raises the error of a lost worker if it is among the given ones, which are returned."""
        for worker in workers if self._lost_workers else ():
            if worker.number in self._lost_workers:
                raise self._lost_workers[worker.number]
        return workers

    def _receive_answers(self, workers: list[Worker]) -> tuple[dict[int, Any], list[Failure]]:
        """Returns the workers' results by copy, and their failures."""
        results: dict[int, Any] = {}
        failures: list[Failure] = []
        for worker in workers:
            try:
                of_worker, failed = worker.receive()
            except WorkerLost as lost:
                failures.append(self._record_lost_worker(worker, str(lost)))
                continue
            results |= of_worker
            failures += failed
        return results, failures

    def _record_lost_worker(self, worker: Worker, message: str) -> Failure:
        """Records the loss of a worker; returns it as a failure of the copy that was running."""
        copy = int(self._current[worker.number])
        failure = Failure(copy, worker.number, message, worker.traceback, lost=True)
        self._lost_workers[worker.number] = failure.error(self._name)
        return failure

    def _restart_failed(self, failures: list[Failure]) -> np.ndarray:
        """Restarts failed copies and lost workers; returns a mask ``[E]`` of these copies."""
        restarted = np.zeros(self._n_copies, bool)
        while failures:
            if not self._may_restart or not all(failure.repairable for failure in failures):
                raise self._error_of(failures)
            for failure in failures:
                self._count_restart(failure)
            numbers = [i for failure in failures for i in self._restart_worker_of(failure)]
            restarted[numbers] = True
            self._repeats.made(numbers)
            n_seeds = 2 if self._made_with_seed else 1  # seeds to make the copy, and to begin
            _, failures = self._request(
                "renew", {i: (self._fresh_seed(i),) * n_seeds for i in numbers}
            )
        return restarted

    def _error_of(self, failures: list[Failure]) -> UserError:
        first, *others = failures
        error = first.error(self._name)
        for other in others:
            error.add_note(f"In the same step: {other.describe(self._name)}.")
        return error

    def _count_restart(self, failure: Failure) -> None:
        """Counts a restart and warns; raises an error if further restarts would not help."""
        text, reason = failure.describe(self._name), None
        if self._repeats.failed(failure.copy) >= MAX_SAME_FAILURES:
            reason = (
                f"it failed {MAX_SAME_FAILURES} times in {self._repeats.place(failure.copy)} "
                "after it was made, so restarts do not help: fix the environment"
            )
        elif self._restarts_in_a_row >= MAX_RESTARTS_IN_A_ROW:
            reason = (
                f"there were {MAX_RESTARTS_IN_A_ROW} restarts without a successful step: fix the "
                "environment"
            )
        if reason is not None:
            error = WorkerError(f"{text}; {reason}.")
            error.add_note(failure.traceback)
            raise error
        self._restarts_in_a_row += 1
        self.restarts += 1
        warnings.warn(f"{text}; restarted (restart {self.restarts}).", RuntimeWarning, stacklevel=4)

    def _restart_worker_of(self, failure: Failure) -> Iterable[int]:
        """Restarts the lost worker of a failure; returns the copies that must be made again."""
        if not failure.lost:
            return [failure.copy]
        worker = self._workers[failure.worker or 0]
        del self._lost_workers[worker.number]
        worker.start()
        return worker.copies

    def _fresh_seed(self, copy: int) -> int | None:
        """Returns another seed for a restarted copy; None if the copy has no seed."""
        seed = self._seeds[copy]
        if seed is None:
            return None
        drawn = np.random.SeedSequence([seed, self.restarts]).generate_state(1)
        return int(drawn[0]) >> 1  # some environments accept seeds of 31 bits only


def _check_arguments(n_copies: int, n_workers: int, timeout: float) -> None:
    if n_copies < 1:
        raise ConfigError(f"num_envs is {n_copies}, expected 1 or more.")
    if n_workers < 0:
        raise ConfigError(
            f"workers is {n_workers}, expected 0 (this process) or the number of workers."
        )
    if not timeout > 0:
        raise ConfigError(f"worker_timeout is {timeout}, expected seconds above 0.")
    if n_workers and sys.platform == "win32":
        raise ConfigError(f"workers={n_workers} needs Linux or macOS; use workers=0 on Windows.")


def _pickle_maker(make: Callable[..., EnvInstance], name: str) -> bytes:
    import cloudpickle

    try:
        return cloudpickle.dumps(make)
    except Exception as error:
        raise ConfigError(
            f"{name} cannot be sent to workers, since it cannot be pickled ({error}); pass a "
            "function that makes it, or use workers=0."
        ) from error


def _end_workers(workers: list[Worker], block: int, owner_pid: int) -> None:
    if os.getpid() != owner_pid:
        return  # this process is a fork of the one that owns the workers
    for worker in workers:
        worker.ask_to_end()
    deadline = time.monotonic() + END_TIMEOUT
    for worker in workers:
        worker.end(max(deadline - time.monotonic(), 0.0))
    os.close(block)
