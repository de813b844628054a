"""Runs on external simulators: training, resume, Ctrl-C while waiting, invalid settings."""

import signal
import socket
import threading

import pytest
import yaml
from external import free_port, run_meeting_clients
from runs import table

import torchrl_marl
from torchrl_marl.errors import ConfigError
from torchrl_marl.recipes import load_config
from torchrl_marl.training.config import read_run_config
from torchrl_marl.training.trainer import start_training

pytestmark = pytest.mark.clients

WALKERS = {"walker": {"n": 3, "observation": 6, "action": 2}}
SMALL = {
    "threads": 1,
    "total_frames": 240,
    "frames_per_batch": 120,
    "learner": {"minibatch_size": 60, "num_epochs": 1},
    "logging": {"progress": False},
}


def small(tmp_path, port, **more):
    env = {"num_envs": 2, "kwargs": {"port": port, **more.pop("kwargs", {})}}
    return {**SMALL, "folder": str(tmp_path / "run"), "env": env, **more}


def test_external_run_trains_and_resumes_with_its_clients(tmp_path, capfd):
    port = free_port()
    with run_meeting_clients(port):
        run = torchrl_marl.train("external_meet_mappo", **small(tmp_path, port))
        rows = table(run.folder / "metrics.csv")
        assert [int(row["frames"]) for row in rows] == [120, 240]
        assert float(rows[0]["walker/episode_reward"]) < 0
        assert float(rows[1]["walker/episode_length"]) == 25
        assert all(row["server/refused"] == row["server/truncated"] == "0" for row in rows)
        assert int(rows[1]["server/clients"]) == 2
        assert run.summary["return_after"] is None and run.summary["frames"] == 240
        assert not (run.folder / "evaluation.csv").exists()
        said = capfd.readouterr().err
        assert f"listens at 127.0.0.1:{port} and waits for a client that declares" in said
        config = yaml.safe_load((run.folder / "config.yaml").read_text())
        assert config["env"]["kwargs"]["agents"] == WALKERS
        # The same clients reconnect and continue their episodes.
        run = torchrl_marl.resume(run.folder, total_frames=480)
    rows = table(run.folder / "metrics.csv")
    assert [int(row["frames"]) for row in rows] == [120, 240, 360, 480]
    assert f"listens at 127.0.0.1:{port} and waits for clients" in capfd.readouterr().err


@pytest.mark.parametrize(
    "more",
    [
        {"kwargs": {"hold": False}},
        {"learner": {"algorithm": "masac", "learning_starts": 120, "minibatch_size": 32}},
        {
            "learner": {
                **SMALL["learner"],
                "minibatch_size": 60,
                "window": 20,
                "actor": {"memory": {"kind": "gru", "size": 8}},
                "critic": {"memory": {"kind": "gru", "size": 8}},
            }
        },
    ],
    ids=["clients play on", "stored steps", "memory"],
)
def test_external_run_with_other_learners(tmp_path, more):
    port = free_port()
    with run_meeting_clients(port):
        run = torchrl_marl.train("external_meet_mappo", **small(tmp_path, port, **more))
    assert len(table(run.folder / "metrics.csv")) == 2


def test_two_algorithms_on_one_listener(tmp_path):
    port = free_port()
    more = {"groups": {"caller": {"learning_starts": 120, "minibatch_size": 32}}}
    with run_meeting_clients(port, caller=True):
        run = torchrl_marl.train("external_meet_mappo_iql", **small(tmp_path, port, **more))
    row = table(run.folder / "metrics.csv")[-1]
    assert float(row["caller/updates"]) > 0 and "walker/clip_fraction" in row
    assert "caller/clip_fraction" not in row


def test_replay_sequences_end_with_each_external_batch(tmp_path):
    port = free_port()
    learner = {"algorithm": "masac", "learning_starts": 120, "n_step": 3, "minibatch_size": 8}
    config = load_config("external_meet_mappo", small(tmp_path, port, learner=learner))
    with run_meeting_clients(port):
        training = start_training(config, None)
        try:
            training.step()
            training.step()
            ends = training.learners[0].replay.ring.marks["ends"][: training.config.total_frames]
        finally:
            training.close()
    assert ends[59].all() and not ends[50].all()  # the last of 60 steps of each row


@pytest.mark.parametrize("declared", [False, True], ids=["anybody", "clients"])
def test_ctrl_c_ends_the_wait_for_clients(tmp_path, declared):
    """While waiting for declared agents, and while waiting for a batch."""
    settings = small(tmp_path, 0, kwargs={"agents": WALKERS} if declared else {})
    # A process in the background of a shell ignores Ctrl-C.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    timer = threading.Timer(0.5, signal.pthread_kill, (threading.get_ident(), signal.SIGINT))
    timer.start()
    try:
        with pytest.raises(KeyboardInterrupt) as stopped:
            torchrl_marl.train("external_meet_mappo", **settings)
    finally:
        signal.signal(signal.SIGINT, before)
    if declared:  # it is saved and can be resumed
        assert stopped.value.args == (tmp_path / "run",)
        assert read_run_config(tmp_path / "run").env.kwargs["agents"] == WALKERS
    else:
        assert not (tmp_path / "run").exists()


def test_port_in_use_raises(tmp_path):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=f"cannot listen on 127.0.0.1:{port} .*or 0 for"):
            torchrl_marl.train("external_meet_mappo", **small(tmp_path, port))
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"evaluation.episodes": 5}, "evaluation.episodes is 5, but an external simulator plays"),
        ({"population.size": 2}, "population.size is 2"),
        ({"distributed.collectors": 2}, "distributed.collectors is 2, but an external simulator"),
        ({"evaluation.every_frames": 800}, "evaluation.episodes is 0, but evaluation.every_frames"),
        ({"env.kwargs.port": -1}, "env.kwargs.port is -1, expected from 0 to 65535"),
        ({"env.kwargs.grace": 0}, "env.kwargs.grace is 0.0, expected above 0"),
        ({"env.kwargs.prot": 1}, "env.kwargs has 'prot', did you mean 'port'? expected"),
        ({"env.kwargs.agents": {"a": {"n": 0, "observation": 1, "action": 1}}},
         "env.kwargs.agents: agents 'a': n is 0, expected a whole number, 1 to 10,000"),
        ({"env.kwargs.tls_key": "k.pem"}, "expected tls_certificate beside it"),
        ({"env.max_steps": 7}, "env.max_steps is 7, which is read only where"),
    ],
)  # fmt: skip
def test_invalid_external_settings_raise(settings, said):
    with pytest.raises(ConfigError) as refused:
        load_config("external_meet_mappo", settings)
    assert said in str(refused.value)


def test_public_host_without_token_raises(tmp_path, monkeypatch):
    monkeypatch.delenv("TORCHRL_MARL_TOKEN", raising=False)
    settings = small(tmp_path, 0, kwargs={"host": "0.0.0.0"})
    with pytest.raises(ConfigError, match="host is '0.0.0.0', which other machines reach"):
        torchrl_marl.train("external_meet_mappo", **settings)
    (tmp_path / "token").write_text("\n")
    settings = small(tmp_path, 0, kwargs={"token_file": str(tmp_path / "token")})
    with pytest.raises(ConfigError, match="which is empty; write a token into it"):
        torchrl_marl.train("external_meet_mappo", **settings)


def test_missing_msgpack_names_the_extra(monkeypatch):
    import importlib.util

    from torchrl_marl.errors import MissingExtraError

    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *a: None if name == "msgpack" else find(name, *a)
    )
    with pytest.raises(MissingExtraError, match=r"pip install '\.\[serve\]'"):
        load_config("external_meet_mappo")
