"""Shards on Ray actors: runs are exactly the same also after actor failures.

One Ray serves the whole file. Every actor takes seconds to import torch, so there are few.
"""

import collections
import os
import random
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import support.failing_arena
from support.listening import listening
from support.runs import assert_equal, final_state, small_config, table

import torchrl_marl
from torchrl_marl.apps.cli import main as cli
from torchrl_marl.collectors.ray_connection import connect
from torchrl_marl.errors import ConfigError, WorkerError
from torchrl_marl.recipes import save_config
from torchrl_marl.training import iterate

ray = pytest.importorskip("ray")

pytestmark = [pytest.mark.ray, pytest.mark.filterwarnings("ignore:the actor of shard")]
FAILING = support.failing_arena.__file__
ON_RAY = {"backend": "ray", "collectors": 4, "actors": 2, "spares": 0}
CPUS_OF_TESTS = 8


@pytest.fixture(scope="module", autouse=True)
def cluster():
    """A local Ray cluster that all runs of this file join."""
    connection = connect(None, CPUS_OF_TESTS)
    yield connection
    connection.close()
    assert not ray.is_initialized()


@pytest.mark.skipif(not Path("/proc/net/tcp").exists(), reason="reads /proc")
def test_local_ray_listens_only_on_this_machine():
    """The driver, raylet, GCS, agents, and the processes of actors."""
    pid_of_worker = ray.remote(lambda: os.getpid()).remote()
    assert ray.get(pid_of_worker) != os.getpid()
    found = listening(os.getpid())
    assert {"gcs_server", "raylet"} < set(found.values()) and len(found) > 5
    assert {host for host, _ in found} <= {"127.0.0.1", "::1"}, found


def test_other_users_of_this_machine_need_the_token(tmp_path):
    program = (
        "import sys; from ray._raylet import GcsClient\n"
        "client = GcsClient(address=sys.argv[1])\n"
        "print(client.internal_kv_keys(b'', namespace=None, timeout=10))"
    )
    where = ray.get_runtime_context().gcs_address
    assert where.startswith("127.0.0.1:")

    def asked(**variables):
        command = [sys.executable, "-c", program, where]
        env = {**os.environ, **variables}
        return subprocess.run(command, env=env, capture_output=True, text=True, timeout=60)

    assert asked().returncode == 0
    stranger = asked(RAY_AUTH_MODE="disabled", HOME=str(tmp_path))
    assert stranger.returncode and "token" in stranger.stderr.lower()


def settings_of(folder, world="FailingArena", on="ray", **overrides):
    orders = Path(folder).parent / "orders"
    where = {**ON_RAY, **overrides.pop("distributed", {})}
    if on == "here":
        where = {k: v for k, v in where.items() if k in ("collectors", "overlap")}
    orders.mkdir(parents=True, exist_ok=True)
    own = {"library": f"{FAILING}:{world}", "num_envs": 8, "max_steps": 13}
    own["kwargs"] = {"orders": str(orders), "n_agents": 4, "lives": 3, "years": 5}
    config = small_config(folder=str(folder), distributed=where, env=own, **overrides)
    return config, orders


def learned(folder):
    """The final state of a run without the settings of its placement."""
    state = final_state(folder)
    return {name: state[name] for name in ("iteration", "learners", "tracker", "random")}


def without_counters(rows):
    counters = ("collector_restarts", "episodes_lost")
    return [{k: v for k, v in row.items() if k not in counters} for row in rows]


def assert_same_learning(one, other):
    assert_equal(learned(one), learned(other))
    tables = [without_counters(table(run / "metrics.csv")) for run in (one, other)]
    assert tables[0] == tables[1]


def run_with(orders_at, folder, **overrides):
    """Train, give orders to fail before some iterations, and return the last metrics."""
    config, orders = settings_of(folder, **overrides)
    for step in iterate(config):
        for order in orders_at.get(step.number, ()):
            (orders / order).touch()
        last = step
    assert not list(orders.iterdir())  # all orders were carried out
    return last.metrics


@pytest.mark.parametrize("overlap", [0, 1])
def test_run_with_actor_failures_equals_one_without(overlap, tmp_path):
    """Actors are killed, hang and raise. Weights, metrics and random states stay the same."""
    own = {"distributed": {"overlap": overlap, "timeout": 20.0}, "total_frames": 640}
    (tmp_path / "a").mkdir(), (tmp_path / "b").mkdir()
    torchrl_marl.train(settings_of(tmp_path / "a" / "here", on="here", **own)[0])
    draw = random.Random(overlap)
    kinds = ["kill", "raise", "raise"] if overlap else ["kill", "hang", "raise"]
    orders_at = {}
    for kind in kinds:
        orders_at.setdefault(draw.randrange(1, 7), []).append(kind)
    timeout = 4.0 if "hang" in kinds else 60.0
    own["distributed"] = {"overlap": overlap, "timeout": timeout, "spares": 1 - overlap}
    metrics = run_with(orders_at, tmp_path / "b" / "ray", **own)
    assert metrics["collector_restarts"] >= len(kinds) - 1  # two orders at once may hit one actor
    assert metrics["episodes_lost"] == 0
    assert_same_learning(tmp_path / "a" / "here", tmp_path / "b" / "ray")


def test_resume_with_other_actors_is_exact(tmp_path):
    """Stopped on two actors, resumed on one, then without Ray: equal to an uninterrupted run."""
    (tmp_path / "a").mkdir(), (tmp_path / "b").mkdir()
    own = {"distributed": {"snapshot_every": 2}}
    torchrl_marl.train(settings_of(tmp_path / "a" / "here", on="here", **own)[0])
    run = tmp_path / "b" / "ray"
    for step in iterate(settings_of(run, **own)[0]):
        if step.number == 3:  # the last snapshot is that of the second batch
            break
    for step in iterate_resumed(run, distributed={"actors": 1}):
        if step.number == 4:
            break
    torchrl_marl.resume(run, distributed={"backend": "none", "actors": None})
    assert_same_learning(tmp_path / "a" / "here", run)


def iterate_resumed(folder, **overrides):
    """The iterations of a resumed run."""
    from torchrl_marl.recipes import read_config
    from torchrl_marl.training.config import read_run_config
    from torchrl_marl.training.trainer import _iterate, resume_training

    config = read_config(read_run_config(folder), overrides)
    return _iterate(resume_training(folder, None, config))


def test_envs_without_snapshot_restart_and_are_counted(tmp_path):
    """The failed actor has four shards of two envs each, so eight episodes are lost."""
    own = {"world": "ForgetfulArena", "distributed": {"actors": 1}}
    with pytest.warns(UserWarning, match="the actor of shard 0, 1, 2, 3 raised ValueError: the en"):
        metrics = run_with({2: ["raise"]}, tmp_path / "run", **own)
    assert metrics["collector_restarts"] == 1
    assert metrics["episodes_lost"] == 8
    rows = table(tmp_path / "run" / "metrics.csv")
    assert [row["episodes_lost"] for row in rows] == ["0"] * 2 + ["8"] * 4


def test_permanent_actor_failure_raises_once(tmp_path):
    own = {"checkpoint": {"every_iterations": 1}, "distributed": {"actors": 1}}
    config, orders = settings_of(tmp_path / "run", **own)
    iterations = iterate(config)
    next(iterations)
    (orders / "always").touch()
    message = (
        r"the actor of shard 0, 1, 2, 3 failed 2 times in one batch; at last it raised "
        r"ValueError: the engine broke \(.*failing_arena.py, line \d+\); the last checkpoint stays"
    )
    with pytest.raises(WorkerError, match=message) as caught:
        next(iterations)
    assert "ValueError: the engine broke" in caught.value.__notes__[0]
    (orders / "always").unlink()
    torchrl_marl.resume(tmp_path / "run", distributed={"backend": "none"})
    assert len(table(tmp_path / "run" / "metrics.csv")) == 6


def test_env_that_an_actor_cannot_build_raises(tmp_path):
    config, orders = settings_of(tmp_path / "run", distributed={"actors": 1})
    config = torchrl_marl.recipes.read_config(config, {"env.kwargs.orders": str(orders / "none")})
    (orders / "none").mkdir()
    from torchrl_marl.collectors.ray import RayPlacement
    from torchrl_marl.training.shards import ShardMaker

    (orders / "none" / "unbuildable").touch()
    message = "^shard 0, 1 cannot be made: .*ModuleNotFoundError No module named 'engine'"
    with pytest.raises(ConfigError, match=message) as caught:
        RayPlacement([ShardMaker(config, i) for i in range(2)], actors=1)
    assert "in make" in caught.value.__notes__[0]


def test_too_many_actors_for_the_cluster_raise(tmp_path):
    config, _ = settings_of(tmp_path / "run", distributed={"actors": 4, "cpus_per_actor": 4})
    began = time.monotonic()
    with pytest.raises(
        ConfigError, match=r"4 actors with 4 CPUs and 0 GPUs .* free resources of Ray, \d CPUs"
    ):
        torchrl_marl.train(config)
    assert time.monotonic() - began < 30  # it does not wait for free resources


def test_episodes_are_complete_in_asynchronous_collection(tmp_path):
    """Episode lengths equal the steps of each trajectory, also after an actor failure."""
    own = {"distributed": {"asynchronous": True}, "learner": {"estimator": "vtrace"}}
    config, orders = settings_of(tmp_path / "run", total_frames=80 * 8, **own)
    steps, ended = collections.Counter(), 0
    for step in iterate(config):
        if step.number == 3:
            (orders / "raise").touch()
        batch = step.batch
        assert batch.shape == (8, 10)
        ids, done = batch["collector", "traj_ids"], batch["next", "done"].squeeze(-1)
        lengths = batch["collector", "agents/episode_length"]
        for row in range(8):
            for t in range(10):
                steps[int(ids[row, t])] += 1
                if done[row, t]:
                    assert steps[int(ids[row, t])] == lengths[row, t]
                    ended += 1
        versions = batch["collector", "policy_version"]
        assert (versions < step.number).all() and (versions >= step.number - 1 - 4).all()
    assert ended > 30
    assert step.metrics["collector_restarts"] == 1
    assert final_state(tmp_path / "run")["collector"]["version"] == 8


def test_seed_tasks_resume_after_their_process_is_killed(tmp_path, capfd):
    """Two runs at once, one of whose processes is killed, equal the runs alone."""
    long = {"total_frames": 80 * 40, "checkpoint": {"every_iterations": 1}}
    config, orders = settings_of(tmp_path / "on_ray" / "runs", distributed=TASKS, **long)
    save_config(config, tmp_path / "recipe.yaml")
    killing = threading.Thread(target=kill_later, args=(tmp_path / "on_ray" / "runs", orders))
    killing.start()
    assert cli.main(["train", str(tmp_path / "recipe.yaml"), "--seeds", "0,1"]) == 0
    killing.join()
    assert not list(orders.iterdir())
    _, _, rows = capfd.readouterr().out.partition("return by seed:\n")
    assert [line.split()[0] for line in rows.splitlines()[:4]] == ["seed", "0", "1", "mean"]
    for seed in (0, 1):
        alone = tmp_path / "here" / f"seed{seed}"
        torchrl_marl.train(settings_of(alone, distributed=TASKS, on="here", seed=seed, **long)[0])
        found = tmp_path / "on_ray" / "runs" / f"seed{seed}"
        assert_equal(final_state(alone)["learners"], final_state(found)["learners"])
        assert table(alone / "metrics.csv") == table(found / "metrics.csv")


TASKS = {"collectors": None, "actors": None}


def kill_later(folder, orders):
    """Give the order to kill once both runs have saved checkpoints."""
    while not all(list((folder / f"seed{i}").glob("checkpoints/*[3-9].pt")) for i in (0, 1)):
        time.sleep(0.01)
    (orders / "kill").touch()


def test_single_run_on_ray_without_shards_raises(tmp_path, capsys):
    with pytest.raises(ConfigError, match="expected the number of shards of the run; use"):
        torchrl_marl.train(settings_of(tmp_path / "run", distributed=TASKS)[0])
    assert cli.main(["train", "toy_arena_mappo", "distributed=ray", f"folder={tmp_path}/x"]) == 2
    assert "expected the number of shards of the run; use" in capsys.readouterr().err


SCRIPT = """
import sys
from torchrl_marl.recipes import save_config
from torchrl_marl.training import iterate
from test_ray import settings_of
if __name__ == "__main__":
    iterations = iterate(settings_of(sys.argv[1], distributed={"actors": 1})[0])
    print(next(iterations).number, flush=True)
    raise SystemExit("left open")
"""


def test_unfinished_iterate_loop_ends_with_its_process(tmp_path):
    """An ``iterate`` loop that is not finished, in a process with its own Ray."""
    folders = (
        Path(__file__).parent,
        Path(__file__).parents[1],
        Path(torchrl_marl.__file__).parents[1],
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, folders))}
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(tmp_path / "run")],
        env=environment,
        capture_output=True,
        text=True,
        timeout=180,
        check=False,
    )
    assert (done.returncode, done.stdout) == (1, "1\n"), done.stderr
    assert done.stderr.strip().splitlines()[-1] == "left open"
    assert final_state(tmp_path / "run")["iteration"] == 1


def test_missing_cluster_raises(monkeypatch):
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    asked, ports = {}, []

    def init(**options):
        asked.update(options)
        ports.append(random.random())  # as Ray does
        raise ConnectionError("nobody listens")

    random.seed(3)
    monkeypatch.setattr(ray, "init", init)
    monkeypatch.setattr(ray, "shutdown", lambda: None)
    listening = socket.create_server(("127.0.0.1", 0))
    here = f"127.0.0.1:{listening.getsockname()[1]}"
    with pytest.raises(ConfigError, match=f"answers at '{here}' .'nobody listens'"):
        connect(here)
    assert asked.pop("address") == here
    monkeypatch.setenv("RAY_ADDRESS", f"ray://{here}")
    with pytest.raises(ConfigError, match=f"no cluster of Ray answers at 'ray://{here}'"):
        connect(None)
    listening.close()
    asked.clear()
    with pytest.raises(ConfigError, match=f"'ray://{here}' .*[Rr]efused"):  # Ray is not asked
        connect(None)
    assert not asked
    monkeypatch.delenv("RAY_ADDRESS")
    with pytest.raises(ConfigError, match="Ray does not start on this machine ..nobody listens"):
        connect(None)
    assert asked["address"] == "local" and asked["_node_ip_address"] == "127.0.0.1"
    # The random state of the run is unchanged, and every start uses other ports.
    assert random.random() == random.Random(3).random()
    assert len(set(ports)) == len(ports) == 4
