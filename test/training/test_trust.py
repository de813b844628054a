"""Runs of strangers: their code runs only with trust."""

import os
import pickle
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from runs import assert_equal, final_state, small_config, table
from tensordict import TensorDict

import torchrl_marl
from torchrl_marl.apps.cli.main import main
from torchrl_marl.apps.reports.curves import read_run
from torchrl_marl.envs import make_env
from torchrl_marl.envs.config import EnvConfig
from torchrl_marl.envs.external_code import external_code
from torchrl_marl.errors import TrustError, UserError
from torchrl_marl.runtime.trust import is_signed_by_user, signature, trusting
from torchrl_marl.training import Run, iterate, train
from torchrl_marl.training.checkpoint import latest_checkpoint
from torchrl_marl.training.trainer import resume

pytest.importorskip("mpe2")

pytestmark = pytest.mark.runs

WORLD = """
from pathlib import Path
from mpe2.simple_speaker_listener_v4 import parallel_env
with Path("{mark}").open("a") as file:
    file.write("imported ")
"""


@pytest.fixture
def another_user(tmp_path, monkeypatch):
    def become():
        monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "another"))

    return become


@pytest.fixture
def module(tmp_path, monkeypatch):
    """An environment module that writes a file when imported. Returns a reset function."""
    place, mark = tmp_path / "modules" / "secret_meadow", tmp_path / "mark"
    place.mkdir(parents=True)
    (place / "__init__.py").touch()
    (place / "world.py").write_text(WORLD.format(mark=mark))
    monkeypatch.syspath_prepend(str(place.parent))

    def forget():
        for name in [name for name in sys.modules if name.startswith("secret_meadow")]:
            del sys.modules[name]
        mark.unlink(missing_ok=True)
        return mark

    yield forget
    forget()


def settings(name, folder):
    env = {"library": "pettingzoo", "name": name, "num_envs": 2, "kwargs": {}, "max_steps": None}
    sizes = {"total_frames": 60, "frames_per_batch": 20, "learner": {"minibatch_size": 10}}
    return small_config(**sizes, env=env, evaluation={"episodes": 2}, folder=str(folder))


# ------------------------------------------------------------------------------- the keyed hash


def test_signatures_are_valid_only_for_their_user(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "one"))
    own = signature(b"a", b"bc")
    assert is_signed_by_user(own, b"a", b"bc")
    for parts in [(b"ab", b"c"), (b"a", b"bd"), (b"abc",)]:
        assert not is_signed_by_user(own, *parts)
    for given in [None, 3, "", "é", own[:-1], own.encode(), torch.zeros(3)]:
        assert not is_signed_by_user(given, b"a", b"bc")
    key = tmp_path / "one" / "torchrl_marl" / "key"
    assert key.stat().st_mode & 0o777 == 0o600
    assert len(key.read_bytes()) == 32
    assert [path.name for path in key.parent.iterdir()] == ["key"]
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "two"))
    assert not is_signed_by_user(own, b"a", b"bc")
    with trusting():
        assert is_signed_by_user(None, b"a")
    with trusting(False):
        assert not is_signed_by_user(None, b"a")
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "one"))
    assert is_signed_by_user(own, b"a", b"bc")


@pytest.mark.parametrize("fault", ["readable", "short", "no folder"])
def test_exposed_or_broken_key_is_not_used(tmp_path, monkeypatch, fault):
    """New signatures of the process are valid, earlier ones of the key are not."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    before = signature(b"a")
    key = tmp_path / "torchrl_marl" / "key"
    if fault == "readable":
        key.chmod(0o644)
    elif fault == "short":
        key.write_bytes(b"guess")
    else:
        shutil.rmtree(key.parent)
        key.parent.touch()
    assert not is_signed_by_user(before, b"a")
    assert is_signed_by_user(signature(b"a"), b"a")


# ------------------------------------------------------------------------- pickled environments


def assert_same_training(one, other):
    """Weights, optimizers and returns are equal. Signatures of pickles may differ."""
    for name in ("learners", "tracker", "random"):
        assert_equal(final_state(one)[name], final_state(other)[name])
    for name in ("metrics.csv", "evaluation.csv"):
        assert table(Path(one) / name) == table(Path(other) / name)


def test_pickled_envs_of_another_user_restart_or_need_trust(tmp_path, another_user):
    name = "mpe2/simple_speaker_listener_v4"
    whole, cut = (settings(name, tmp_path / folder) for folder in ("whole", "cut"))
    train(whole)
    for _ in iterate(cut):
        break
    theirs = tmp_path / "theirs"
    shutil.copytree(cut.folder, theirs)
    assert_same_training(whole.folder, resume(cut.folder).folder)  # own environments resume exactly
    shutil.rmtree(cut.folder)
    shutil.copytree(theirs, cut.folder)
    another_user()
    assert_same_training(whole.folder, resume(cut.folder, trust=True).folder)
    with pytest.warns(UserWarning, match="not written by you.*New episodes start.*--trust"):
        run = resume(theirs)
    assert run.summary["frames"] == 60


class Evil:
    """A malicious pickle."""

    def __init__(self, mark):
        self.mark = mark

    def __reduce__(self):
        return os.mkdir, (str(self.mark),)


def test_pickles_of_strangers_are_not_loaded(tmp_path):
    config, mark = settings("mpe2/simple_speaker_listener_v4", tmp_path / "run"), tmp_path / "mark"
    for _ in iterate(config):
        break
    state = final_state(config.folder)
    worlds = state["collector"]["env"]["base"]["worlds"]
    worlds["1"] = torch.frombuffer(bytearray(pickle.dumps(Evil(mark))), dtype=torch.uint8)
    path = latest_checkpoint(Path(config.folder))
    torch.save(state, path)
    assert Run.load(config.folder).evaluate(2)["episodes"] == 2
    env = make_env(config.env, seed=0)
    with pytest.raises(TrustError, match="can run any code"):
        env.restore(TensorDict(state["collector"]["env"]["base"]))
    with pytest.warns(UserWarning, match="New episodes start"):
        resume(config.folder)
    assert not mark.exists()
    torch.save(state, latest_checkpoint(Path(config.folder)))
    with pytest.raises(UserError):
        resume(config.folder, trust=True)
    assert mark.exists()  # so the pickle is able to run code


# ----------------------------------------------------------------------------- imported modules


def test_external_code_of_environment_names(tmp_path, monkeypatch):
    (tmp_path / "meadow.py").touch()
    monkeypatch.syspath_prepend(str(tmp_path))
    known = [
        ("vmas", "balance"),
        ("toy", "arena"),
        ("jaxmarl", "overcooked"),
        ("isaaclab", "Isaac-Cart-Double-Pendulum-Direct-v0"),
        ("pettingzoo", "mpe2/simple_spread_v3"),
        ("pettingzoo", "classic/connect_four_v3"),
        ("pettingzoo", "sisl/pursuit"),
        ("pettingzoo", "gymnasium_robotics/Ant"),
        ("pettingzoo", "not_there/world"),
        ("own", "Reach"),
    ]
    for library, name in known:
        assert external_code(EnvConfig(library=library, name=name)) is None, name
    foreign = {
        ("pettingzoo", "meadow/world"): "meadow.py",
        ("pettingzoo", "meadow.sub/world"): "meadow.py",
        ("pettingzoo", "json/decoder"): "json",
        ("meadow:World", ""): "meadow.py",
        ("subprocess:run", "balance"): "subprocess.py",
        ("not_there:World", "World"): os.getcwd(),
        ("some/meadow.py:World", "World"): "some/meadow.py",
        ("vmas", str(tmp_path / "meadow.py")): "meadow.py",
    }
    for (library, name), place in foreign.items():
        assert place in external_code(EnvConfig(library=library, name=name)), name
    # A backend that the registry does not have is looked up among modules.
    turns = EnvConfig(library="pettingzoo", name="json/tool", kwargs={"backend": "aec"})
    assert "json.tool" in external_code(turns)


def test_module_of_a_run_needs_trust_only_for_other_users(tmp_path, module, another_user, capsys):
    run = train(settings("secret_meadow/world", tmp_path / "run"))
    folder = run.folder
    module()
    assert Run.load(folder).evaluate(2)["episodes"] == 2  # needs no trust from its author
    resume(folder)
    another_user()
    mark = module()
    ways = [
        lambda: Run.load(folder),
        lambda: resume(folder),
        lambda: torchrl_marl.runs.resume(folder),
        lambda: torchrl_marl.train(str(folder / "config.yaml"), folder=str(tmp_path / "new")),
    ]
    for way in ways:
        with pytest.raises(TrustError, match="would import module 'secret_meadow.world' .in '.*if"):
            way()
    for command in (["evaluate"], ["train", "--resume"]):
        capsys.readouterr()
        assert main([*command, str(folder)]) == 2
        error = capsys.readouterr().err
        assert error.count("\n") == 1
        assert "secret_meadow.world" in error and "--trust" in error
    assert len(read_run(folder).training["frames"]) == 3  # reports import no environment
    assert main(["plot", str(folder)]) == 0
    assert not mark.exists()
    assert Run.load(folder, trust=True).evaluate(2)["episodes"] == 2
    assert mark.exists()
    module()
    resume(folder, trust=True)
    Run.load(folder)  # needs no trust after a resume


def test_module_of_the_same_name_in_another_folder_needs_trust(tmp_path, module, monkeypatch):
    run = train(settings("secret_meadow/world", tmp_path / "run"))
    mark = module()
    shutil.copytree(tmp_path / "modules", tmp_path / "strangers")
    monkeypatch.syspath_prepend(str(tmp_path / "strangers"))
    with pytest.raises(TrustError, match="strangers"):
        Run.load(run.folder)
    assert not mark.exists()


@pytest.mark.parametrize("name", ["yaml", "argparse"])
def test_files_of_current_folder_do_not_shadow_packages(tmp_path, name):
    (tmp_path / f"{name}.py").write_text("raise SystemExit('a stranger')")
    command = [sys.executable, "-m", "torchrl_marl", "list", "recipes"]
    environment = {**os.environ, "PYTHONPATH": str(Path(torchrl_marl.__file__).parents[1])}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "vmas_balance_mappo" in done.stdout
