"""Clusters, addresses, services and environments in a stranger's settings need trust."""

import dataclasses
import json
import shutil
import socket
import threading

import pytest
from runs import small_config

from torchrl_marl.apps.choosing import algorithms_for
from torchrl_marl.apps.cli.main import main
from torchrl_marl.apps.suites import run_suite
from torchrl_marl.errors import ConfigError, TrustError
from torchrl_marl.recipes import load_config, save_config
from torchrl_marl.runs import resume
from torchrl_marl.runtime.trust import trusting
from torchrl_marl.settings import to_yaml
from torchrl_marl.training import iterate, trainer
from torchrl_marl.training.config import read_run_config
from torchrl_marl.training.origin import check_origin, external_references, sign_run, signed_yaml

pytestmark = pytest.mark.runs

WORLD = """
from torchrl_marl.envs.toy import MatrixGame
with open({mark!r}, "a") as file:
    file.write("imported ")

class Meadow(MatrixGame):
    pass
"""


@pytest.fixture
def another_user(tmp_path, monkeypatch):
    return lambda: monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "another"))


@pytest.fixture
def world(tmp_path):
    path = tmp_path / "my_meadow.py"
    path.write_text(WORLD.format(mark=str(tmp_path / "mark")))
    return f"{path}:Meadow"


@pytest.fixture
def port():
    """A port with a server that records connections."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        callers = []

        def listen():
            while True:
                try:
                    callers.append(server.accept())
                except OSError:
                    return

        threading.Thread(target=listen, daemon=True).start()
        yield server.getsockname()[1], callers


def begun(folder, **settings):
    config = small_config(folder=str(folder), total_frames=320, **settings)
    for _ in iterate(config):
        break
    return config


def rewritten(folder, **changes):
    """Rewrite the settings of a run as a stranger would, without a signature."""
    config = dataclasses.replace(read_run_config(folder), **changes)
    (folder / "config.yaml").write_text(to_yaml(config))
    return config


def on_ray(config, address):
    there = {"backend": "ray", "collectors": 2, "address": address}
    return dataclasses.replace(config.distributed, **there)


def test_cluster_address_of_a_stranger_is_not_contacted(tmp_path, port, capsys):
    pytest.importorskip("ray")
    folder = tmp_path / "run"
    begun(folder)
    config = read_run_config(folder)
    address = f"127.0.0.1:{port[0]}"
    rewritten(folder, distributed=on_ray(config, address))
    for way in (resume, trainer.resume):
        with pytest.raises(
            TrustError, match=f"connect to the Ray cluster '{address}' .distributed"
        ):
            way(folder)
    assert main(["train", "--resume", str(folder)]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and address in error and "distributed.address=..." in error
    with pytest.raises(TrustError, match="Ray cluster"):
        load_config(folder / "config.yaml")
    assert not port[1]


def test_own_or_given_addresses_are_accepted(tmp_path, another_user):
    folder = tmp_path / "run"
    folder.mkdir()
    config = small_config("toy_arena_mappo")
    config = dataclasses.replace(config, distributed=on_ray(config, "10.0.0.1:6379"))
    file = folder / "config.yaml"
    file.write_text(to_yaml(config))
    with pytest.raises(TrustError):
        check_origin(file, config)
    check_origin(file, config, overridden=["distributed.address"])
    with trusting():
        check_origin(file, config)
    file.write_text(signed_yaml(config))
    assert read_run_config(folder) == config
    check_origin(file, config)
    another = dataclasses.replace(config, distributed=on_ray(config, "10.0.0.2:6379"))
    with pytest.raises(TrustError, match=r"10\.0\.0\.2"):
        check_origin(file, another)
    file.write_text(to_yaml(config))
    sign_run(folder, config)  # as after resuming the run oneself
    check_origin(file, config)
    another_user()
    with pytest.raises(TrustError):
        check_origin(file, config)


@pytest.mark.parametrize(
    ("settings", "deed"),
    [
        ({"env": {"kwargs": {"host": "0.0.0.0"}}}, r"listen at '0\.0\.0\.0' .env\.kwargs"),
        ({"env": {"kwargs": {"token_file": "/home/me/.netrc"}}}, "read the token_file from '/home"),
        ({"env": {"kwargs": {"tls_certificate": "/x.pem"}}}, "read the tls_certificate"),
        ({"logging": {"backends": ["tensorboard", "wandb"]}}, "send its metrics to 'wandb'"),
    ],
)
def test_hosts_files_and_services_of_a_stranger_need_trust(tmp_path, settings, deed):
    env = {"library": "external", "name": "x"} if "env" in settings else {}
    env |= settings.pop("env", {})
    config = small_config("external_meet_mappo", **({"env": env} if env else {}), **settings)
    (tmp_path / "config.yaml").write_text(to_yaml(config))
    with pytest.raises(TrustError, match=deed):
        check_origin(tmp_path / "config.yaml", config)
    with pytest.raises(TrustError, match=deed):
        trainer.resume(tmp_path)
    (tmp_path / "config.yaml").write_text(signed_yaml(config))
    check_origin(tmp_path / "config.yaml", config)


def test_local_addresses_and_services_need_no_trust(monkeypatch):
    config = small_config("external_meet_mappo", env={"kwargs": {"host": "localhost", "port": 0}})
    assert not external_references(config)
    config = dataclasses.replace(config, logging=config.logging)
    config = small_config(logging={"backends": ["tensorboard", "mlflow"]})
    assert not external_references(config)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "https://tracking.example")
    assert [one.key for one in external_references(config)] == ["logging.backends"]


# ------------------------------------------------------------------------- copies of run settings


def test_copied_run_settings_need_trust(tmp_path, world, another_user, capsys):
    config = load_config("toy_matrix_game_mappo", {"env.library": world})
    own, copy = tmp_path / "own.yaml", tmp_path / "nice_recipe.yaml"
    save_config(config, own)
    assert load_config(own).env == config.env  # own file needs no trust
    copy.write_text(to_yaml(config))
    small = tmp_path / "small.yaml"  # written by hand, so chosen by the user
    small.write_text(f"env: {{library: '{world}'}}\n")
    assert load_config(small).env.library == world
    for path in (copy, own):
        another_user()
        with pytest.raises(TrustError, match=f"recipe '{path}' would import file"):
            load_config(path)
        with pytest.raises(TrustError):
            algorithms_for(str(path))
        commands = (
            ["train", str(path), f"folder={tmp_path / 'run'}"],
            ["tune", str(path), "learner.lr=1e-4..1e-3", "--out", str(tmp_path / "tune")],
            ["list", "algorithms", "--for", str(path)],
        )
        for words in commands:
            capsys.readouterr()
            assert main(words) == 2
            error = capsys.readouterr().err
            assert error.count("\n") == 1 and "--trust" in error and "my_meadow" in error
    assert not (tmp_path / "mark").exists()
    assert main(["list", "algorithms", "--for", str(copy), "--trust"]) == 0
    assert (tmp_path / "mark").exists()


# ---------------------------------------------------------------------------------- suite folders


@pytest.mark.parametrize("jobs", [0, 1])
def test_environment_of_a_stranger_s_suite_needs_trust(tmp_path, world, another_user, capsys, jobs):
    out = tmp_path / "suite"
    words = {"tasks": "matrix_game", "algorithms": "mappo", "seeds": 1, "frames": 256}
    settings = {"env.library": world, "env.name": "Meadow"}
    run_suite("toy", **words, **settings, jobs=0, out=out, log=lambda text: None)
    (tmp_path / "mark").unlink()
    shutil.rmtree(out / "matrix_game")
    resumed = ["suite", "toy", "--resume", "--out", str(out), "--jobs", str(jobs)]
    assert main(resumed) == 0  # own suite
    (tmp_path / "mark").unlink()
    shutil.rmtree(out / "matrix_game")
    another_user()
    for more in ([], ["--dry-run"], ["learner.lr=1e-3"]):
        capsys.readouterr()
        assert main([*resumed, *more]) == 2
        error = capsys.readouterr().err
        assert error.count("\n") == 1 and "my_meadow" in error and "suite.json" in error
    with pytest.raises(TrustError, match="suite.json"):
        run_suite("toy", out=out, resume=True, log=lambda text: None)
    assert not (tmp_path / "mark").exists()
    run_suite("toy", **settings, out=out, resume=True, jobs=0, log=lambda text: None)  # chosen
    shutil.rmtree(out / "matrix_game")
    (tmp_path / "mark").unlink()
    assert main([*resumed, "--trust"]) == 0
    assert (tmp_path / "mark").exists()


def test_malformed_signatures_are_refused(tmp_path, world):
    out = tmp_path / "suite"
    words = {"tasks": "matrix_game", "algorithms": "mappo", "seeds": 1, "frames": 256}
    run_suite("toy", **words, jobs=0, out=out, log=lambda text: None)
    record = json.loads((out / "suite.json").read_text())
    assert "signatures" not in record
    record["settings"] |= {"env.library": world, "env.name": "Meadow"}
    for found in ([], None, [3, None], "x", {"a": 1}):
        (out / "suite.json").write_text(json.dumps({**record, "signatures": found}))
        with pytest.raises((TrustError, ConfigError)):
            run_suite("toy", out=out, resume=True, log=lambda text: None)
    assert not (tmp_path / "mark").exists()
