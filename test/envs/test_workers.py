"""Copies of an environment in processes: equal bit for bit, and their failures."""

from __future__ import annotations

import os
import pickle
import signal
import threading
import time
import warnings
from functools import partial

import numpy as np
import pytest
from support.tiers import second_tier_cases

from torchrl_marl.envs.processes.copies import RowLayout
from torchrl_marl.envs.processes.workers import Workers
from torchrl_marl.errors import ConfigError, NonFiniteError, SpecError, WorkerError

LAYOUT = RowLayout({"action": ((2,), "float32"), "seen": ((3,), "float64"), "done": ((), "bool")})
RAISE, EXIT, HANG, KILL, NAN, SPEC, CRASH = range(101, 108)


class Walk:
    """Adds actions and noise up, for five steps an episode; some actions break it."""

    def begin(self, row, seed):
        if seed is not None:
            self.rng = np.random.default_rng(seed)
        self.place, self.steps = self.rng.normal(size=3), 0
        row["seen"][...] = self.place
        row["done"][...] = False

    def play(self, row):
        self._break(row["action"][0])
        self.place = self.place + row["action"].sum() + self.rng.normal(size=3)
        self.steps += 1
        row["seen"][...] = self.place
        row["done"][...] = self.steps == 5
        if self.steps == 5:
            self.steps = 0

    def _break(self, action):
        if action == RAISE:
            raise ZeroDivisionError("no more ground")
        if action == EXIT:
            os._exit(3)
        if action == HANG:
            time.sleep(1000)
        if action == KILL:
            os.kill(os.getpid(), signal.SIGKILL)
        if action == CRASH:
            os.abort()
        if action == NAN:
            raise NonFiniteError("the reward is nan")
        if action == SPEC:
            raise SpecError("the space changed")

    def save(self):
        return pickle.dumps((self.rng, self.place, self.steps))

    def load(self, state):
        self.rng, self.place, self.steps = pickle.loads(state)

    def close(self):
        pass


def workers_of(n_workers, n_copies=4, make=Walk, **options):
    """Copies after a seeded reset."""
    made = Workers(make, LAYOUT, n_copies, n_workers, name="walk", **options)
    made.begin(seeds=range(n_copies))
    return made


def played(workers, n_steps, seed=0):
    """The rows after each of some steps with random actions."""
    rng, seen = np.random.default_rng(seed), []
    for _ in range(n_steps):
        workers.rows["action"][:] = rng.random(workers.rows["action"].shape)
        assert workers.play() is None
        seen.append({key: array.copy() for key, array in workers.rows.items()})
    return {key: np.stack([step[key] for step in seen]) for key in seen[0]}


def after(workers, copy, action):
    """A step in which one copy gets an action that breaks it."""
    workers.rows["action"][:] = 0.0
    workers.rows["action"][copy, 0] = action
    return workers.play()


@pytest.fixture(params=[0, 2], ids=["here", "two workers"])
def workers(request):
    made = workers_of(request.param, timeout=30.0)
    yield made
    made.close()


def test_layout_gives_aligned_rows_without_overlap():
    layout = RowLayout({"a": ((3,), "uint8"), "b": ((2, 2), "float64"), "c": ((), "bool")})
    rows = layout.views(bytearray(layout.n_bytes(5)), 5)
    assert {k: (x.shape, x.dtype.name) for k, x in rows.items()} == {
        "a": ((5, 3), "uint8"),
        "b": ((5, 2, 2), "float64"),
        "c": ((5,), "bool"),
    }
    start = rows["a"].ctypes.data
    assert [(x.ctypes.data - start) % 64 for x in rows.values()] == [0, 0, 0]
    for i, array in enumerate(rows.values()):
        array[...] = i
    assert [array.astype(float).mean() for array in rows.values()] == [0.0, 1.0, 1.0]
    rows["c"][...] = False
    assert (rows["b"] == 1.0).all() and RowLayout({}).n_bytes(3) == 0


def test_results_do_not_depend_on_workers():
    results = []
    for n_workers in (0, 1, 2, 3, 9):
        workers = workers_of(n_workers)
        fresh = np.array([True, False, True, False])
        first = played(workers, 7)
        workers.begin(fresh, seeds=[50, 51, 52, 53])
        begun = workers.rows["seen"].copy()
        workers.begin(fresh)
        results.append((first, begun, played(workers, 6, seed=1)))
        workers.close()
    first, begun, _ = results[0]
    assert first["done"][:, 0].tolist() == [False] * 4 + [True] + [False] * 2
    np.testing.assert_array_equal(begun[0], np.random.default_rng(50).normal(size=3))
    np.testing.assert_array_equal(begun[1], first["seen"][-1, 1])
    for other in results[1:]:
        for one, same in zip(results[0], other):
            np.testing.assert_equal(same, one)


def test_state_is_saved_and_loaded(workers):
    played(workers, 3)
    states, expected = workers.save(), played(workers, 6, seed=1)
    assert len(states) == 4
    workers.load(states)
    np.testing.assert_equal(played(workers, 6, seed=1), expected)


def test_large_state_is_saved_and_loaded():
    class Large(Walk):
        def save(self):
            return bytes(3_000_000) + super().save()

        def load(self, state):
            super().load(state[3_000_000:])

    workers = workers_of(2, make=Large)
    states, expected = workers.save(), played(workers, 2)
    workers.load(states)
    np.testing.assert_equal(played(workers, 2), expected)
    workers.close()


def test_error_names_its_copy_and_others_continue(workers):
    steps = workers.rows["seen"].copy()
    with pytest.raises(
        WorkerError, match=r"^Copy 2 of walk.* raised ZeroDivisionError: no more ground"
    ):
        after(workers, 2, RAISE)
    assert (workers.rows["seen"][[0, 1, 3]] != steps[[0, 1, 3]]).all()
    np.testing.assert_array_equal(workers.rows["seen"][2], steps[2])
    try:
        after(workers, 3, RAISE)
    except WorkerError as error:
        assert "in _break" in "".join(error.__notes__)
        assert str(error).count("\n") == 0 and "restart_workers=True" in str(error)
    played(workers, 3)


@pytest.mark.parametrize("action, kind", [(NAN, NonFiniteError), (SPEC, SpecError)])
def test_own_error_types_are_propagated(workers, action, kind):
    with pytest.raises(kind, match=r"^Copy 1 of walk.*: the "):
        after(workers, 1, action)
    played(workers, 1)


@pytest.mark.environments
@pytest.mark.parametrize(
    "action, words",
    [
        (EXIT, "died with exit code 3 (in copy 2)"),
        (KILL, "was killed by SIGKILL (in copy 2)"),
        (CRASH, "was killed by SIGABRT (in copy 2)"),
        (HANG, "did not answer within 1 s (worker_timeout) and was ended (in copy 2)"),
    ],
)
def test_lost_worker_raises_and_others_continue(action, words):
    workers = workers_of(2, timeout=1.0)
    start = time.monotonic()
    with pytest.raises(WorkerError) as raised:
        after(workers, 2, action)
    assert f"Worker 1 of walk {words}" in str(raised.value)
    assert time.monotonic() - start < 8.0
    where = "".join(getattr(raised.value, "__notes__", []))
    assert ("in _break" in where) == (action in (HANG, CRASH))
    with pytest.raises(WorkerError, match="Worker 1 of walk"):
        workers.play()
    workers.begin(np.array([True, True, False, False]), seeds=[7, 8, None, None])
    np.testing.assert_array_equal(workers.rows["seen"][0], np.random.default_rng(7).normal(size=3))
    workers.close()


@pytest.mark.parametrize(
    "action, n_workers, expected",
    [
        (RAISE, 0, [1]),
        (EXIT, 2, [0, 1]),
        *second_tier_cases("environments", (NAN, 2, [1]), (RAISE, 2, [1]), (HANG, 2, [0, 1])),
    ],
)
def test_restart_replaces_failed_copies(action, n_workers, expected):
    workers = workers_of(n_workers, restart=True, timeout=1.0)
    before = workers.rows["seen"].copy()
    with pytest.warns(RuntimeWarning, match="of walk.*; restarted .restart 1"):
        anew = after(workers, 1, action)
    assert np.flatnonzero(anew).tolist() == expected and workers.restarts == 1
    assert not workers.rows["done"].any()
    begins = workers.rows["seen"].copy()
    assert (begins != before).all()
    played(workers, 2)
    again = workers_of(n_workers, restart=True, timeout=1.0)
    with pytest.warns(RuntimeWarning):
        after(again, 1, action)
    np.testing.assert_array_equal(again.rows["seen"], begins)  # new seeds derive from the first
    workers.close()
    again.close()


def test_spec_error_is_not_restarted():
    workers = workers_of(0, restart=True)
    with pytest.raises(SpecError):
        after(workers, 1, SPEC)
    assert workers.restarts == 0


@pytest.mark.parametrize("n_workers", [0, 1])
def test_three_failures_in_the_same_step_raise(n_workers):
    workers = workers_of(n_workers, n_copies=1, restart=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for n_steps in (1, 1, 2, 2):  # twice in the second step, then twice in the third
            played(workers, n_steps)
            assert after(workers, 0, RAISE).all()
        played(workers, 2)
        with pytest.raises(WorkerError, match="failed 3 times in step 3 of its episode 1"):
            after(workers, 0, RAISE)
    assert workers.restarts == 4
    workers.close()


def test_too_many_restarts_without_a_finished_episode_raise():
    workers = workers_of(0, n_copies=6, restart=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for copy in (0, 1, 2, 3, 4, 0, 1, 2, 3, 4):
            assert after(workers, copy, RAISE)[copy]
        with pytest.raises(WorkerError, match="10 restarts without"):
            after(workers, 5, RAISE)
    assert workers.restarts == 10
    workers.close()


def test_reset_that_always_fails_raises():
    class Stuck(Walk):
        def begin(self, row, seed):
            raise OSError("no level")

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with pytest.raises(WorkerError, match="OSError: no level; it failed 3 times in step 1"):
            workers_of(0, make=Stuck, restart=True, n_copies=1)


def test_errors_of_this_package_are_not_restarted():
    broken: dict = {"__name__": "torchrl_marl.envs.broken"}
    exec("def play(row): raise ValueError('a mistake')", broken)

    class Broken(Walk):
        def play(self, row):
            broken["play"](row)

    workers = workers_of(0, make=Broken, restart=True)
    with pytest.raises(WorkerError, match="raised ValueError: a mistake"):
        workers.play()
    assert workers.restarts == 0


@pytest.mark.parametrize("n_workers", [0, 2])
def test_environment_that_cannot_be_built_raises(n_workers):
    def refuse():
        raise ConfigError("unknown environment 'wlak'")

    def divide():
        return 1 / 0

    with pytest.raises(ConfigError, match=r"^Copy 0 of walk.*: unknown environment 'wlak'"):
        workers_of(n_workers, make=refuse, restart=True)
    with pytest.raises(WorkerError, match="raised ZeroDivisionError"):
        workers_of(n_workers, make=divide, restart=True)


def test_worker_that_dies_at_its_start_raises(monkeypatch, tmp_path):
    (tmp_path / "numpy.py").write_text("import os; os._exit(7)", encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(WorkerError, match=r"Worker 0 of walk died with exit code 7 \(in copy 0\)"):
        workers_of(2)


def test_factory_that_cannot_be_pickled_raises():
    lock = threading.Lock()
    with pytest.raises(ConfigError, match="walk cannot be sent to workers, since"):
        Workers(lambda: lock and Walk(), LAYOUT, 2, 1, name="walk")


@pytest.mark.parametrize(
    "wrong, words",
    [
        ({"n_copies": 0}, "num_envs is 0"),
        ({"n_workers": -1}, "workers is -1"),
        ({"timeout": 0.0}, "worker_timeout is 0.0"),
    ],
)
def test_invalid_numbers_raise(wrong, words):
    with pytest.raises(ConfigError, match=words):
        Workers(Walk, LAYOUT, **{"n_copies": 2, **wrong})


def test_closed_workers_raise_and_close_may_be_repeated(workers):
    processes = [worker._process for worker in workers._workers]
    workers.close()
    workers.close()
    assert all(process.returncode == 0 for process in processes)
    for use in (workers.play, workers.begin, workers.save):
        with pytest.raises(WorkerError, match="closed"):
            use()
    assert workers.rows["seen"].shape == (4, 3)  # still there to be read


def test_lambdas_and_partials_are_sent_to_workers():
    offset = np.arange(3.0)

    class Shifted(Walk):
        def __init__(self, by):
            self.by = by

        def begin(self, row, seed):
            super().begin(row, seed)
            row["seen"][...] = self.by

    for make in (lambda: Shifted(offset), partial(Shifted, offset)):
        workers = workers_of(1, make=make)
        np.testing.assert_array_equal(workers.rows["seen"], np.tile(offset, (4, 1)))
        workers.close()


def test_interrupted_step_does_not_affect_the_next():
    workers, same = workers_of(2), workers_of(0)
    for these in (workers, same):
        these.rows["action"][:] = 0.5
    for worker in workers._workers:
        worker.send(None)  # as play does, before Ctrl-C comes
    time.sleep(0.2)
    same.play()
    np.testing.assert_equal(played(workers, 3), played(same, 3))
    workers.close()


@pytest.mark.environments
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_workers_ignore_sigint_and_sigterm(number, workers):
    for worker in workers._workers:
        os.kill(worker._process.pid, number)
    time.sleep(0.2)
    played(workers, 2)


def test_unreferenced_workers_exit():
    workers = workers_of(1)
    process = workers._workers[0]._process
    del workers
    assert process.wait(10) == 0
