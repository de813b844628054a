"""TensorBoard, Weights & Biases and MLflow: logged values are compared with the tables.

Installed clients are tested themselves. Fakes of their interfaces are always tested.
"""

import csv
import errno
import importlib.machinery
import importlib.util
import json
import os
import subprocess
import sys
import types
from pathlib import Path

import pytest

from torchrl_marl import train
from torchrl_marl.apps.cli import main as cli
from torchrl_marl.errors import CheckpointError, ConfigError, WriteError
from torchrl_marl.runs import resume
from torchrl_marl.training.config import LoggingConfig
from torchrl_marl.training.recorder import check_logging, open_backend

pytestmark = pytest.mark.loggers

TOY = "toy_matrix_game_mappo"
SMALL = [
    "total_frames=640",
    "frames_per_batch=320",
    "env.num_envs=32",
    "learner.minibatch_size=160",
    "evaluation.episodes=4",
    "logging.progress=false",
]
CLOCK = ("seconds", "frames_per_second")


@pytest.fixture(autouse=True)
def offline(monkeypatch):
    for name in ("WANDB_API_KEY", "MLFLOW_TRACKING_URI"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("MLFLOW_DISABLE_TELEMETRY", "true")


def run_small(folder, *settings):
    """Train in a separate process. Returns its exit status and stderr."""
    if "--resume" not in settings:
        settings = [TOY, f"folder={folder}", *SMALL, *settings]
    command = [sys.executable, "-m", "torchrl_marl", "train", *settings]
    path = f"{Path(cli.__file__).parents[1]}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"
    done = subprocess.run(
        command,
        env={**os.environ, "PYTHONPATH": path},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=240,
    )
    return done.returncode, done.stderr


def tables_of(folder):
    """``{(name, frames): value}`` of the tables of a run."""
    values = {}
    for file, prefix in (("metrics.csv", ""), ("evaluation.csv", "evaluation/")):
        with (folder / file).open(newline="") as opened:
            for row in csv.DictReader(opened):
                for name, cell in row.items():
                    own = prefix and name in ("iteration", "frames", *CLOCK)
                    if cell and not own:
                        values[prefix + name, int(row["frames"])] = float(cell)
    return values


def assert_logged(found, folder):
    """Check ``found``, all logged tuples of name, frames and value."""
    expected, summary = tables_of(folder), json.loads((folder / "summary.json").read_text())
    of_summary = [one for one in found if one[0].startswith("summary/")]
    found = [one for one in found if one not in of_summary]
    last = {name.removeprefix("summary/"): value for name, _, value in of_summary}
    for name in ("return_before", "return_after", "frames"):
        assert last[name] == pytest.approx(summary[name], rel=1e-5)
    assert {(name, frames) for name, frames, _ in found} == set(expected)
    for name, frames, value in found:
        if name not in CLOCK:
            assert value == pytest.approx(expected[name, frames], rel=1e-5, abs=1e-9), name


def read_tensorboard(folder):
    loading = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    events = loading.EventAccumulator(str(folder / "tensorboard")).Reload()
    return [
        (name, event.step, event.value)
        for name in events.Tags()["scalars"]
        for event in events.Scalars(name)
    ]


def read_mlflow(folder, uri=None):
    client = pytest.importorskip("mlflow").MlflowClient(uri or f"sqlite:///{folder / 'mlflow.db'}")
    (experiment,) = [e for e in client.search_experiments() if e.name == "torchrl_marl"]
    runs = client.search_runs([experiment.experiment_id])
    (run,) = [run for run in runs if run.info.run_name == folder.name]
    assert run.info.status == "FINISHED"
    return [
        (name, entry.step, entry.value)
        for name in run.data.metrics
        for entry in client.get_metric_history(run.info.run_id, name)
    ]


def read_wandb(folder):
    """Read the files that `wandb sync` sends: records in blocks of 32 KiB."""
    proto = pytest.importorskip("wandb.proto.wandb_internal_pb2")
    found = []
    for path in sorted((folder / "wandb").glob("offline-run-*/run-*.wandb")):
        data, at, record = path.read_bytes(), 7, b""
        while at + 7 <= len(data):
            if at % 32768 > 32768 - 7:
                at += 32768 - at % 32768
                continue
            length, kind = int.from_bytes(data[at + 4 : at + 6], "little"), data[at + 6]
            record += data[at + 7 : at + 7 + length]
            at += 7 + length
            if kind in (1, 4):  # complete, or the last part
                whole = proto.Record.FromString(record)
                found += [
                    ("/".join(i.nested_key) or i.key, 0, json.loads(i.value_json))
                    for i in whole.summary.update
                    if "summary/" in ("/".join(i.nested_key) or i.key)
                ]
                items = whole.history.item
                row = {i.key or "/".join(i.nested_key): json.loads(i.value_json) for i in items}
                found += [
                    (name, row[f"{name.rpartition('/')[0]}/step".lstrip("/")], value)
                    for name, value in row.items()
                    if not name.startswith("_") and name.rpartition("/")[2] != "step"
                ]
                record = b""
    return found


READERS = {"tensorboard": read_tensorboard, "wandb": read_wandb, "mlflow": read_mlflow}


def test_logged_values_equal_the_tables(tmp_path):
    """After training, and after resuming with more frames."""
    backends = [name for name in READERS if importlib.util.find_spec(name) is not None]
    if not backends:
        pytest.skip("no backend is installed")
    folder = tmp_path / "run"
    assert run_small(folder, f"logging.backends=[{','.join(backends)}]")[0] == 0
    for backend in backends:
        assert_logged(READERS[backend](folder), folder)
    names = folder / "loggers.json"
    before = names.read_text() if names.exists() else None
    assert run_small(folder, "--resume", str(folder), "total_frames=1280")[0] == 0
    for backend in backends:
        found = READERS[backend](folder)
        assert_logged(found, folder)
        assert max(frames for _, frames, _ in found) == 1280
    assert (names.read_text() if names.exists() else None) == before
    if "wandb" in backends:
        assert len({p.name for p in (folder / "wandb").glob("offline-run-*/run-*.wandb")}) == 1


def small(folder, *backends, **settings):
    return {
        "folder": str(folder),
        "total_frames": 640,
        "frames_per_batch": 320,
        "env": {"num_envs": 32},
        "learner": {"minibatch_size": 160},
        "evaluation": {"episodes": 4},
        "logging": {"progress": False, "backends": list(backends)},
        **settings,
    }


def test_tensorboard_continues_on_resume(tmp_path):
    """Also if the folder was moved in between."""
    pytest.importorskip("tensorboard")
    train(TOY, **small(tmp_path / "run", "tensorboard"))
    folder = (tmp_path / "run").rename(tmp_path / "moved")
    assert_logged(read_tensorboard(folder), folder)
    resume(folder, total_frames=1280)
    assert_logged(read_tensorboard(folder), folder)
    assert {path.name for path in folder.iterdir() if path.is_dir()} == {
        "checkpoints",
        "tensorboard",
    }


# ---------------------------------------------------------------------------------------- fakes


def install(monkeypatch, name, **contents):
    module = types.ModuleType(name)
    module.__spec__ = importlib.machinery.ModuleSpec(name, None)
    vars(module).update(contents)
    monkeypatch.setitem(sys.modules, name, module)
    return module


class FakeRun:
    """A fake of what ``wandb.init`` returns."""

    def __init__(self, **settings):
        self.settings, self.id, self.rows, self.finished = settings, settings["id"], [], 0
        self.of_summary, self.hyperparameters = {}, {}
        self.config = self

    def update(self, values, **kwargs):
        """Update the config."""
        self.hyperparameters |= values

    def define_metric(self, name, step_metric=None):
        """Set the x-axis of a metric."""

    def log(self, payload, **kwargs):
        self.rows.append(payload)

    def finish(self):
        self.finished += 1

    @property
    def summary(self):
        return self.of_summary


class UsageError(Exception):
    """The error of wandb for a missing login."""


@pytest.fixture
def fake_wandb(monkeypatch):
    runs = []

    def init(**settings):
        runs.append(FakeRun(**settings))
        return runs[-1]

    def login(verify=True):
        raise UsageError("No API key configured. Use `wandb login` to log in.")

    def setup():
        mode = os.environ.get("WANDB_MODE", "online")
        return types.SimpleNamespace(settings=types.SimpleNamespace(mode=mode))

    module = install(
        monkeypatch,
        "wandb",
        init=init,
        login=login,
        setup=setup,
        errors=types.SimpleNamespace(UsageError=UsageError),
        runs=runs,
    )
    import torchrl.record.loggers.wandb as torchrl_wandb

    monkeypatch.setattr(torchrl_wandb, "_has_wandb", True)
    return module


@pytest.fixture
def fake_mlflow(monkeypatch):
    class Client:
        stores = {}

        def __init__(self, uri):
            self.store = self.stores.setdefault(uri, {"experiments": {}, "runs": {}})

        def get_experiment_by_name(self, name):
            known = self.store["experiments"].get(name)
            return known and types.SimpleNamespace(experiment_id=known)

        def create_experiment(self, name, artifact_location=None):
            return self.store["experiments"].setdefault(name, f"id of {name}")

        def create_run(self, experiment, run_name):
            run_id = f"run{len(self.store['runs'])}"
            run = {"name": run_name, "status": "RUNNING", "rows": [], "params": {}, "tags": {}}
            self.store["runs"][run_id] = {**run, "files": []}
            return types.SimpleNamespace(info=types.SimpleNamespace(run_id=run_id))

        def update_run(self, run_id, status):
            if run_id not in self.store["runs"]:
                raise LookupError(f"Run with id={run_id} not found\nmore")
            self.store["runs"][run_id]["status"] = status

        def log_batch(self, run_id, metrics=(), params=()):
            run = self.store["runs"][run_id]
            assert run["status"] == "RUNNING" and len(params) <= 100
            assert not run["params"].keys() & dict(params)
            run["rows"] += metrics
            run["params"] |= dict(params)

        def get_run(self, run_id):
            params = self.store["runs"][run_id]["params"]
            return types.SimpleNamespace(data=types.SimpleNamespace(params=params))

        def set_tag(self, run_id, name, value):
            self.store["runs"][run_id]["tags"][name] = value

        def log_artifact(self, run_id, path, folder):
            self.store["runs"][run_id]["files"].append((Path(path).name, folder))

        def set_terminated(self, run_id):
            self.store["runs"][run_id]["status"] = "FINISHED"

    entities = install(
        monkeypatch, "mlflow.entities", Metric=lambda *entry: entry, Param=lambda *entry: entry
    )
    return install(monkeypatch, "mlflow", MlflowClient=Client, entities=entities)


def test_wandb_resumes_its_run(tmp_path, fake_wandb):
    folder = tmp_path / "run"
    train(TOY, **small(folder, "wandb"))
    resume(folder, total_frames=1280)
    first, second = fake_wandb.runs
    assert first.id == second.id == json.loads((folder / "loggers.json").read_text())["wandb"]
    assert first.finished == second.finished == 1
    assert first.settings["project"] == "torchrl_marl" and first.settings["name"] == "run"
    assert first.settings["resume"] == "allow"
    assert first.hyperparameters["learner.lr"] == 5e-4 and first.hyperparameters["recipe"] == TOY
    assert (first.hyperparameters["total_frames"], second.hyperparameters["total_frames"]) == (
        640,
        1280,
    )
    found = [
        (name, row[f"{name.rpartition('/')[0]}/step".lstrip("/")], value)
        for run in fake_wandb.runs
        for row in run.rows
        for name, value in row.items()
        if name.rpartition("/")[2] != "step"
    ]
    assert second.of_summary["summary/evaluation/drawn/episodes"] == 4
    numbers = second.of_summary.items()
    found += [(name, 1280, x) for name, x in numbers if not isinstance(x, str)]
    assert_logged(found, folder)
    train(TOY, **small(tmp_path / "other", "wandb"))
    assert fake_wandb.runs[2].id != first.id


def test_mlflow_resumes_its_run(tmp_path, fake_mlflow, monkeypatch):
    folder = tmp_path / "run"
    train(TOY, **small(folder, "mlflow"))
    resume(folder, total_frames=1280)
    ((uri, store),) = fake_mlflow.MlflowClient.stores.items()
    assert uri == f"sqlite:///{folder / 'mlflow.db'}"
    (run,) = store["runs"].values()
    assert run["params"]["total_frames"] == "640" and run["params"]["learner.lr"] == "0.0005"
    assert run["tags"] == {"resumed.total_frames": "1280", "summary.recipe": TOY}
    assert (run["name"], run["status"]) == ("run", "FINISHED")
    assert_logged([(name, step, value) for name, value, _, step in run["rows"]], folder)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://somewhere")
    train(TOY, **small(tmp_path / "other", "mlflow"))
    assert len(fake_mlflow.MlflowClient.stores["http://somewhere"]["runs"]) == 1


def test_settings_are_logged_as_hyperparameters(tmp_path):
    pytest.importorskip("tensorboard")
    loading = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    plugin = pytest.importorskip("tensorboard.plugins.hparams.plugin_data_pb2")
    folder = tmp_path / "run"
    backends = ["tensorboard", *["mlflow"] * (importlib.util.find_spec("mlflow") is not None)]
    train(TOY, **small(folder, *backends))
    events = loading.EventAccumulator(str(folder / "tensorboard")).Reload()
    found = {}
    for content in events.PluginTagToContent("hparams").values():
        data = plugin.HParamsPluginData.FromString(content)
        found |= dict(data.session_start_info.hparams)
    assert found["learner.lr"].number_value == 5e-4 and found["recipe"].string_value == TOY
    if "mlflow" in backends:
        import mlflow

        client = mlflow.MlflowClient(f"sqlite:///{folder / 'mlflow.db'}")
        (experiment,) = [e for e in client.search_experiments() if e.name == "torchrl_marl"]
        (run,) = client.search_runs([experiment.experiment_id])
        assert run.data.params["learner.lr"] == "0.0005" and run.data.params["recipe"] == TOY
        assert run.data.tags["summary.recipe"] == TOY


def test_animations_are_logged(tmp_path, fake_wandb, fake_mlflow):
    """Each as a file with its number of frames."""
    pytest.importorskip("tensorboard")
    loading = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    fake_wandb.Video = lambda path, format: (Path(path).name, format)
    folder, names = tmp_path / "run", ("tensorboard", "wandb", "mlflow")
    drawn = {"episodes": 4, "gif": True, "animate_every": 320}
    train("vmas_balance_mappo", **small(folder, *names, evaluation=drawn, execution="eager"))
    (run,) = fake_wandb.runs
    videos = [(x["step"], x[k]) for x in run.rows for k in ("animation", "episode") if k in x]
    assert videos == [(320, ("episode_320.gif", "gif")), (640, ("episode.gif", "gif"))]
    (store,) = fake_mlflow.MlflowClient.stores.values()
    (run,) = store["runs"].values()
    assert run["files"] == [("episode_320.gif", "animation"), ("episode.gif", "episode")]
    events = loading.EventAccumulator(str(folder / "tensorboard")).Reload()
    (shown,) = events.Images("episode")
    assert shown.step == 640 and shown.encoded_image_string == (folder / "episode.gif").read_bytes()
    assert shown.width > 0 and shown.height > 0


def test_two_concurrent_runs_are_logged_separately(tmp_path, fake_mlflow):
    monday, tuesday = tmp_path / "monday", tmp_path / "tuesday"
    for folder in (monday, tuesday):
        folder.mkdir()
    config = LoggingConfig(backends=["mlflow"])
    one, other = (open_backend("mlflow", config, folder) for folder in (monday, tuesday))
    one.log_metrics({"a": 1.0, "odd[0]": 2.0}, step=3)
    other.log_metrics({"a": 5.0}, step=4)
    one.shutdown()
    other.shutdown()
    rows = [
        [(name, value, step) for name, value, _, step in run["rows"]]
        for store in fake_mlflow.MlflowClient.stores.values()
        for run in store["runs"].values()
    ]
    assert rows == [[("a", 1.0, 3), ("odd_0_", 2.0, 3)], [("a", 5.0, 4)]]


def test_run_that_is_missing_on_the_service_raises(tmp_path, fake_mlflow):
    (tmp_path / "loggers.json").write_text('{"mlflow": "gone"}')
    with pytest.raises(ConfigError, match=r"cannot be opened \(Run with id=gone not found\)"):
        open_backend("mlflow", LoggingConfig(), tmp_path)


@pytest.mark.parametrize("text", [b"", b'{"mlf', b"\xff\xfe", b"[1]", b'{"mlflow": 5}'])
def test_broken_loggers_file_raises_with_a_fix(tmp_path, fake_mlflow, text):
    path = tmp_path / "loggers.json"
    path.write_bytes(text)
    with pytest.raises(CheckpointError, match=r"loggers.json' is broken.*; delete it to continue"):
        open_backend("mlflow", LoggingConfig(), tmp_path)
    path.unlink()
    open_backend("mlflow", LoggingConfig(), tmp_path).shutdown()
    assert list(json.loads(path.read_text())) == ["mlflow"]


def test_loggers_file_is_written_completely_or_not_at_all(tmp_path, fake_mlflow, monkeypatch):
    before = '{"wandb": "abc"}'
    (tmp_path / "loggers.json").write_text(before)

    def full(descriptor):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(WriteError, match="loggers.json' cannot be written"):
        open_backend("mlflow", LoggingConfig(), tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["loggers.json"]
    assert (tmp_path / "loggers.json").read_text() == before


def test_wandb_without_login_raises_before_the_run_starts(
    tmp_path, fake_wandb, monkeypatch, capsys
):
    monkeypatch.setenv("WANDB_MODE", "online")
    folder = tmp_path / "run"
    command = ["train", TOY, *SMALL, "logging.backends=[wandb]", f"folder={folder}"]
    for more in ([], ["--seeds", "0,1"]):
        assert cli.main([*command, *more]) == 2
        text = capsys.readouterr().err
        assert text.count("\n") == 1 and "run `wandb login`" in text
    with pytest.raises(ConfigError, match="WANDB_MODE=offline"):
        train(TOY, **small(folder, "wandb"))
    assert not folder.exists() and not fake_wandb.runs
    # A run that was started offline.
    monkeypatch.setenv("WANDB_MODE", "offline")
    train(TOY, **small(folder, "wandb"))
    monkeypatch.setenv("WANDB_MODE", "online")
    assert cli.main(["train", "--resume", str(folder), "total_frames=1280"]) == 2
    assert "run `wandb login`" in capsys.readouterr().err
    check_logging(LoggingConfig(backends=["tensorboard"]))


def test_installed_wandb_without_login_raises(tmp_path, monkeypatch):
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "online")
    monkeypatch.setenv("HOME", str(tmp_path))
    code, text = run_small(tmp_path / "run", "logging.backends=[wandb]")
    assert code == 2 and "run `wandb login`" in text and "Traceback" not in text
    assert not (tmp_path / "run").exists()
