"""Callbacks named in the settings: lookup from any folder, invalid names, and trust."""

import pytest
from runs import small_config, table

import torchrl_marl
from torchrl_marl.errors import ConfigError, TrustError
from torchrl_marl.recipes import load_config
from torchrl_marl.training import Run

FILE = """
import torch
from torchrl_marl import Callback

with open({mark!r}, "a") as file:
    file.write("imported ")

class Halving(Callback):
    count = 0

    def on_update(self, control, batch, metrics):
        self.count += 1
        control.change("lr", control.settings["lr"] / 2)
        if self.count == {until}:
            control.stop("it is small")
        return {{"own/count": self.count}}

    def state_dict(self):
        return {{"count": self.count}}

    def load_state_dict(self, state):
        self.count = state["count"]

class Asking(Callback):
    def __init__(self, answer):
        pass

number = 3
"""


@pytest.fixture
def file(tmp_path):
    """A file of callbacks; ``file.mark`` is written when it is imported."""
    path = tmp_path / "halving.py"
    path.write_text(FILE.format(mark=str(tmp_path / "mark"), until=4))
    return path


class Counting(torchrl_marl.Callback):
    calls = 0

    def on_batch(self, control, batch):
        self.calls += 1


def test_one_callback_needs_no_list(tmp_path):
    counting = Counting()
    torchrl_marl.train(small_config(), callbacks=counting, folder=str(tmp_path / "run"))
    frames = small_config().total_frames // small_config().frames_per_batch
    assert counting.calls == frames


def test_callback_by_name_in_a_recipe(tmp_path, file, monkeypatch):
    recipe = tmp_path / "recipe.yaml"
    monkeypatch.chdir(tmp_path)
    torchrl_marl.recipes.save_config(
        small_config(callbacks=["halving.py:Halving"], total_frames=160), recipe
    )
    run = torchrl_marl.train(recipe, folder=str(tmp_path / "run"))
    assert run.config.callbacks == [f"{file}:Halving"]  # found from any folder
    monkeypatch.chdir("/")
    run = torchrl_marl.resume(run.folder, total_frames=640)
    assert run.summary["stopped"] == "Halving: it is small"
    rows = table(run.folder / "metrics.csv")
    assert [row["own/count"] for row in rows] == list("1234")
    rates = [float(row["agents/lr"]) for row in rows]
    assert rates == [pytest.approx(0.5**i * rates[0]) for i in range(4)]
    assert Run.load(run.folder).evaluate(episodes=2)["episodes"] == 2


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("halving", "expected module:Class or path/to/file.py:Class; use for example callbacks="),
        ("not_there:Own", "callbacks is 'not_there:Own', but no module 'not_there' is installed"),
        ("not_there.py:Own", "but there is no file "),
        ("halving.py:Halfing", "no class or function 'Halfing'; did you mean 'Halving'?"),
        ("halving.py:Asking", "cannot be made without arguments .* pass an object: train"),
        ("collections:OrderedDict", "makes a OrderedDict, expected a subclass of torchrl_marl.Cal"),
    ],
)
def test_invalid_callback_names_raise(tmp_path, file, monkeypatch, name, reason):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=reason):
        torchrl_marl.train(small_config(folder=str(tmp_path / "run")), callbacks=[name])
    assert not (tmp_path / "run").exists()


def test_objects_that_are_not_callbacks_raise(tmp_path):
    with pytest.raises(ConfigError, match="callbacks holds 3, expected objects of a subclass"):
        torchrl_marl.train(small_config(folder=str(tmp_path / "run")), callbacks=[3])
    with pytest.raises(
        ConfigError, match="holds '<object>:Noting', an object that was given from Py"
    ):
        torchrl_marl.train(
            small_config(folder=str(tmp_path / "run"), callbacks=["<object>:Noting"])
        )


def test_callback_of_another_user_is_not_imported(tmp_path, file, monkeypatch):
    settings = {"callbacks": [f"{file}:Halving"], "total_frames": 160}
    run = torchrl_marl.train(small_config(folder=str(tmp_path / "run"), **settings))
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "another"))
    mark = tmp_path / "mark"
    mark.unlink()
    copied = str(run.folder / "config.yaml")
    for way in (
        lambda: torchrl_marl.resume(run.folder, total_frames=240),
        lambda: torchrl_marl.training.resume(run.folder),
        lambda: torchrl_marl.train(copied, folder=str(tmp_path / "new")),
    ):
        with pytest.raises(TrustError, match=r"would import file '.*halving.py' \(callbacks\)"):
            way()
    Run.load(run.folder)  # loading imports no callback
    assert not mark.exists()
    assert load_config(copied, {"callbacks": []}).callbacks == []
    torchrl_marl.resume(run.folder, total_frames=240, trust=True)
    assert mark.exists()
