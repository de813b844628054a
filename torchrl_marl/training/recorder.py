"""The tables and loggers of a run, for metrics and evaluations."""

from __future__ import annotations

import csv
import dataclasses
import importlib.util
import io
import json
import math
import os
import re
import time
import uuid
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from torchrl_marl.errors import CheckpointError, ConfigError, MissingExtraError
from torchrl_marl.settings import flatten, shown
from torchrl_marl.training.config import LoggingConfig, TrainConfig
from torchrl_marl.training.files import append, open_atomically
from torchrl_marl.training.messages import progress_bar

__all__ = [
    "BACKENDS",
    "Backend",
    "CsvTable",
    "Loggers",
    "Recorder",
    "check_logging",
    "open_backend",
]


class CsvTable:
    """A CSV file, which is complete after every row.

    Args:
        path (Path): the file.
        keep_iterations (int, optional): last iteration to keep of an existing file; later rows are
            removed. By default, the file starts empty.

    Attributes:
        grows (bool): whether a row may add columns; False: unknown entries are left out.
    """

    def __init__(self, path: Path, keep_iterations: int | None = None) -> None:
        self.path, self.grows = path, False
        self.columns: list[str] = []
        if keep_iterations is not None and path.exists():
            self._drop_later_rows(keep_iterations)

    def _drop_later_rows(self, iterations: int) -> None:
        columns, rows = self._read()
        if rows and "iteration" not in columns:
            raise CheckpointError(
                f"{str(self.path)!r} is not a table of metrics: it has no column 'iteration'; "
                "move it away to continue."
            )
        # If the machine crashed while a row was written, the row lacks columns.
        whole = [row for row in rows if None not in row and None not in row.values()]
        kept = [
            r for r in whole if r["iteration"].isdecimal() and int(r["iteration"]) <= iterations
        ]
        # If there are no rows, even the header may be incomplete.
        self.columns = columns if rows else []
        with open_atomically(self.path, newline="") as file:
            writer = csv.DictWriter(file, self.columns)
            if rows:
                writer.writeheader()
            writer.writerows(kept)

    def _read(self) -> tuple[list[str], list[dict[str, str]]]:
        try:
            with self.path.open(newline="", encoding="utf-8", errors="replace") as file:
                reader = csv.DictReader(file)
                reader.fieldnames = [_current_name(name) for name in reader.fieldnames or ()]
                return list(reader.fieldnames), list(reader)
        except (OSError, csv.Error) as error:
            raise CheckpointError(
                f"{str(self.path)!r} cannot be read ({error}); move it away to continue."
            ) from None

    def write(self, row: Mapping[str, Any]) -> None:
        """Appends a row, completely or not at all.

        The first row determines the columns, unless the table grows.

        Raises:
            WriteError: the disk is full.
        """
        columns = self.columns or list(row)
        new = [name for name in row if name not in columns] if self.grows else []
        if new:
            columns = [*columns, *new]
            self._add_columns(columns)
        text = io.StringIO(newline="")
        writer = csv.DictWriter(text, columns, extrasaction="ignore")
        if not self.columns:
            writer.writeheader()
        writer.writerow({key: _format_cell(value) for key, value in row.items()})
        append(self.path, text.getvalue())
        self.columns = columns

    def _add_columns(self, columns: list[str]) -> None:
        """Writes the table again with more columns, which are empty in earlier rows."""
        _, rows = self._read()
        with open_atomically(self.path, newline="") as file:
            writer = csv.DictWriter(file, columns)
            writer.writeheader()
            writer.writerows(rows)


def _format_cell(value: Any) -> Any:
    if isinstance(value, float):
        return "" if math.isnan(value) else f"{value:.6g}"
    return value


class Recorder:
    """Writer of ``metrics.csv`` and ``evaluation.csv``, with the loggers and the progress bar.

    Args:
        config (TrainConfig): config of the run.
        folder (Path): folder of the run; existing tables are continued.
        iterations (int): number of finished iterations; later rows are removed.
        frames (int): environment steps so far.
        done (bool): whether the training is complete.
        resumed (bool): whether the last iteration is evaluated again, so that its row is removed.
        writes (bool): whether this rank writes files and shows the progress bar.

    Raises:
        CheckpointError: a table cannot be continued.
        MissingExtraError: a logging backend is not installed.
        ConfigError: a logging backend fails.
    """

    def __init__(
        self,
        config: TrainConfig,
        folder: Path,
        *,
        iterations: int,
        frames: int,
        done: bool,
        resumed: bool = False,
        writes: bool = True,
    ) -> None:
        self._writes = writes
        if writes:
            self._metrics = CsvTable(folder / "metrics.csv", keep_iterations=iterations)
            self._evaluation = CsvTable(folder / "evaluation.csv", iterations - resumed)
            self._loggers = Loggers(config.logging, folder)
            if self._loggers.backends:
                self._loggers.log_settings(flatten(dataclasses.asdict(config)))
        shows = writes and not done and config.logging.progress
        self._progress_bar = progress_bar(
            f"seed {config.seed}", config.total_frames, frames, enabled=shows
        )

    def iteration(self, row: Mapping[str, Any], returns: Sequence[float]) -> None:
        """Writes the row of an iteration, and shows the groups' returns."""
        if not self._writes:
            return
        frames = row["frames"]
        self._metrics.write(row)
        self._loggers.log(row, frames)
        values = ("-" if math.isnan(value) else f"{value:.2f}" for value in returns)
        self._progress_bar.set_postfix_str(f"return {', '.join(values)}", refresh=False)
        self._progress_bar.update(frames - self._progress_bar.n)

    def evaluation(self, progress: Mapping[str, Any], result: Mapping[str, float]) -> None:
        """Writes the row of an evaluation, with the progress at that time."""
        if not self._writes:
            return
        self._evaluation.write({**progress, **result})
        self._loggers.log({f"evaluation/{k}": v for k, v in result.items()}, progress["frames"])

    def summary(self, summary: Mapping[str, Any], frames: int) -> None:
        """Sends the run's summary to the loggers.

        Args:
            summary (mapping): the entries.
            frames (int): environment steps so far.
        """
        if self._writes and self._loggers.backends:
            flat = {name.replace(".", "/"): value for name, value in flatten(summary).items()}
            self._loggers.log_summary(flat, frames)

    def picture(self, path: Path, frames: int) -> None:
        """Sends an animation to the loggers.

        Args:
            path (Path): the GIF file.
            frames (int): environment steps so far.
        """
        if self._writes:
            self._loggers.log_picture(path, frames)

    def grow(self) -> None:
        """Lets rows add columns to the tables."""
        if self._writes:
            self._metrics.grows = self._evaluation.grows = True

    def show_slow_work(self, what: str) -> None:
        """Shows in the progress bar which slow work is being done, such as a compilation."""
        self._progress_bar.set_postfix_str(what)

    def close_bar(self) -> None:
        """Closes the progress bar."""
        self._progress_bar.close()

    def close(self) -> None:
        """Closes the progress bar and the loggers."""
        self._progress_bar.close()
        if self._writes:
            self._loggers.close()


class Backend(Protocol):
    """Protocol of a logging backend."""

    def log_metrics(self, metrics: dict[str, float], step: int) -> Any:
        """Logs the metrics of a step."""

    def log_settings(self, settings: dict[str, Any]) -> Any:
        """Logs the settings of the run by dotted name, as numbers and texts."""

    def log_summary(self, numbers: dict[str, float], texts: dict[str, str], step: int) -> Any:
        """Logs the summary of the run at its end."""

    def log_picture(self, name: str, path: Path, step: int) -> Any:
        """Logs an animation, a GIF file."""

    def shutdown(self) -> Any:
        """Flushes and closes the backend."""


def check_logging(config: LoggingConfig) -> None:
    """If Weights & Biases is a logger, checks before training that there is a login for it.

    Args:
        config (LoggingConfig): settings with the backends.

    Raises:
        ConfigError: there is no login; the message says how to fix this.
    """
    if "wandb" not in config.backends or importlib.util.find_spec("wandb") is None:
        return
    import wandb

    if wandb.setup().settings.mode in ("offline", "dryrun", "disabled"):
        return
    try:
        logged_in = wandb.login(verify=False)
    except wandb.errors.UsageError:
        logged_in = False
    if not logged_in:
        raise ConfigError(
            "logging.backends holds 'wandb', but there is no login to Weights & Biases here; "
            "run `wandb login`, or set WANDB_API_KEY, or WANDB_MODE=offline to log into the run "
            "folder."
        )


def open_backend(name: str, config: LoggingConfig, folder: Path) -> Backend:
    """Opens a backend; continues the existing log of the run in this folder, if any.

    Args:
        name (str): one of ``BACKENDS``.
        config (LoggingConfig): settings with the project's name.
        folder (Path): folder of the run.

    Raises:
        MissingExtraError: the backend is not installed.
        ConfigError: the backend fails, or cannot be reached.
        CheckpointError: the file with the run's ids in the backends is damaged.
        WriteError: the file with the ids cannot be written.
    """
    if importlib.util.find_spec(name) is None:
        raise MissingExtraError(name, "log")
    path = folder / "loggers.json"
    known = _read_run_ids(path)
    try:
        backend, run_id = BACKENDS[name](config, folder, known.get(name))
    except Exception as error:
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0].rstrip(".")
        raise ConfigError(
            f"logging.backends holds {name!r}, which cannot be opened ({reason}); fix this, or "
            f"leave {name} out."
        ) from error
    if run_id is not None and run_id != known.get(name):
        with open_atomically(path) as file:
            file.write(json.dumps({**known, name: run_id}, indent=2) + "\n")
    return backend


def _current_name(column: str) -> str:
    """Returns the current name of a column; versions before 0.2 wrote other names."""
    return "diverged" if column == "sick" else re.sub("^door/", "server/", column)


def _read_run_ids(path: Path) -> dict[str, str]:
    """Returns the run's id in each backend."""
    if not path.is_file():
        return {}
    try:
        known = json.loads(path.read_text(encoding="utf-8"))
    except ValueError:  # the file is not JSON, or not text
        known = None
    if not isinstance(known, dict) or not all(isinstance(name, str) for name in known.values()):
        raise CheckpointError(
            f"{str(path)!r} is broken, expected the run ids of the loggers; delete it to continue "
            "with new runs in the loggers."
        )
    return known


Opened = tuple[Backend, str | None]
"""A backend, and the run's id in this backend."""


def _open_tensorboard(config: LoggingConfig, folder: Path, run_id: str | None) -> Opened:
    return _TensorboardRun(folder), None


class _TensorboardRun:
    """Logger for the event files in a run folder, with TorchRL's logger for metrics."""

    def __init__(self, folder: Path) -> None:
        from torchrl.record.loggers import get_logger

        logger: Any = get_logger("tensorboard", str(folder), "tensorboard")
        self.log_metrics, self.shutdown = logger.log_metrics, logger.shutdown
        self._writer = logger.experiment

    def log_settings(self, settings: Mapping[str, Any]) -> None:
        from torch.utils.tensorboard.summary import hparams

        # The writer's `add_hparams` would begin another run in a folder of its own.
        for part in hparams(dict(settings), {"summary/return_after": 0.0}):
            self._writer.file_writer.add_summary(part)

    def log_summary(
        self, numbers: Mapping[str, float], texts: Mapping[str, str], step: int
    ) -> None:
        for name, number in numbers.items():
            self._writer.add_scalar(f"summary/{name}", number, step)
        for name, text in texts.items():
            self._writer.add_text(f"summary/{name}", text, step)

    def log_picture(self, name: str, path: Path, step: int) -> None:
        from tensorboard.compat.proto.summary_pb2 import Summary

        content = path.read_bytes()
        width, height = (int.from_bytes(content[i : i + 2], "little") for i in (6, 8))
        image = {"height": height, "width": width, "colorspace": 3}
        value = {"tag": name, "image": {**image, "encoded_image_string": content}}
        self._writer.file_writer.add_summary(Summary(value=[value]), step)


def _open_wandb(config: LoggingConfig, folder: Path, run_id: str | None) -> Opened:
    run_id = run_id or uuid.uuid4().hex[:8]
    return _WandbRun(config, folder, run_id), run_id


class _WandbRun:
    """Logger for a W&B run with a given id, which it resumes; TorchRL's logger logs metrics."""

    def __init__(self, config: LoggingConfig, folder: Path, run_id: str) -> None:
        from torchrl.record.loggers import get_logger

        # Two runs in one process must stay apart.
        own = {"project": config.project, "id": run_id, "reinit": "create_new", "resume": "allow"}
        self._logger: Any = get_logger(
            "wandb", str(folder), folder.resolve().name, wandb_kwargs=own
        )
        self.log_metrics, self.shutdown = self._logger.log_metrics, self._logger.shutdown

    def log_settings(self, settings: Mapping[str, Any]) -> None:
        self._logger.log_hparams(dict(settings))

    def log_summary(
        self, numbers: Mapping[str, float], texts: Mapping[str, str], step: int
    ) -> None:
        for name, value in {**numbers, **texts}.items():
            self._logger.experiment.summary[f"summary/{name}"] = value

    def log_picture(self, name: str, path: Path, step: int) -> None:
        import wandb

        self._logger.log_scalar(name, wandb.Video(str(path), format="gif"), step=step)


def _open_mlflow(config: LoggingConfig, folder: Path, run_id: str | None) -> Opened:
    logger = _MlflowRun(config, folder.resolve(), run_id)
    return logger, logger.run_id


class _MlflowRun:
    """Logger for an MLflow run with a given id.

    TorchRL's logger is not used: it writes to MLflow's active run of the process, and neither ends
    nor resumes it.
    """

    def __init__(self, config: LoggingConfig, folder: Path, run_id: str | None) -> None:
        import mlflow

        uri = os.environ.get("MLFLOW_TRACKING_URI")
        artifacts = None if uri else (folder / "mlflow").as_uri()
        self._client = mlflow.MlflowClient(uri or f"sqlite:///{folder / 'mlflow.db'}")
        if run_id is not None:
            self._client.update_run(run_id, status="RUNNING")
        else:
            known = self._client.get_experiment_by_name(config.project)
            if known is None:
                experiment = self._client.create_experiment(config.project, artifacts)
            else:
                experiment = known.experiment_id
            run_id = self._client.create_run(experiment, run_name=folder.name).info.run_id
        self.run_id: str = run_id

    def log_metrics(self, metrics: Mapping[str, float], step: int) -> None:
        from mlflow.entities import Metric

        now = int(time.time() * 1000)
        allowed = {re.sub(r"[^\w\-. :/]", "_", name): value for name, value in metrics.items()}
        values = [Metric(name, float(value), now, step) for name, value in allowed.items()]
        self._client.log_batch(self.run_id, metrics=values)

    def log_settings(self, settings: Mapping[str, Any]) -> None:
        from mlflow.entities import Param

        known = self._client.get_run(self.run_id).data.params
        texts = {name: str(value)[:_MAX_TEXT] for name, value in settings.items()}
        new = [Param(name, value) for name, value in texts.items() if name not in known]
        for i in range(0, len(new), _MAX_BATCH):
            self._client.log_batch(self.run_id, params=new[i : i + _MAX_BATCH])
        # MLflow does not let a parameter change, as `total_frames` does when a run is resumed.
        for name, value in texts.items():
            if known.get(name, value) != value:
                self._client.set_tag(self.run_id, f"resumed.{name}", value)

    def log_summary(
        self, numbers: Mapping[str, float], texts: Mapping[str, str], step: int
    ) -> None:
        self.log_metrics({f"summary/{name}": number for name, number in numbers.items()}, step)
        for name, text in texts.items():
            self._client.set_tag(self.run_id, f"summary.{name.replace('/', '.')}", text[:_MAX_TEXT])

    def log_picture(self, name: str, path: Path, step: int) -> None:
        self._client.log_artifact(self.run_id, str(path), name)

    def shutdown(self) -> None:
        self._client.set_terminated(self.run_id)


_MAX_BATCH, _MAX_TEXT = 100, 500
"""Largest number of parameters in a request to MLflow, and length of their values."""


BACKENDS = {"tensorboard": _open_tensorboard, "wandb": _open_wandb, "mlflow": _open_mlflow}
"""Name of a backend -> function that opens it."""


class Loggers:
    """All logging backends of a run.

    A backend that fails during the run is dropped, with a warning; ``metrics.csv`` stays complete.

    Args:
        config (LoggingConfig): settings with the backends.
        folder (Path): folder of the run; its earlier logs are continued.

    Raises:
        MissingExtraError: a backend is not installed.
        ConfigError: a backend fails.
    """

    def __init__(self, config: LoggingConfig, folder: Path) -> None:
        self.backends: dict[str, Backend] = {}
        try:
            for name in dict.fromkeys(config.backends):
                self.backends[name] = open_backend(name, config, folder)
        except BaseException:
            self.close()
            raise

    def log(self, metrics: Mapping[str, Any], frames: int) -> None:
        """Logs all metrics with finite values."""
        finite = _finite_numbers(metrics)
        self._call_each(lambda backend: backend.log_metrics(finite, step=frames))

    def log_settings(self, settings: Mapping[str, Any]) -> None:
        """Logs the settings of a run, as numbers and texts."""
        found = {
            name: value if isinstance(value, (int, float, str)) else shown(value)
            for name, value in settings.items()
        }
        self._call_each(lambda backend: backend.log_settings(found))

    def log_summary(self, summary: Mapping[str, Any], frames: int) -> None:
        """Logs the numbers and the texts of a summary."""
        numbers = _finite_numbers(summary)
        texts = {name: value for name, value in summary.items() if isinstance(value, str)}
        self._call_each(lambda backend: backend.log_summary(numbers, texts, frames))

    def log_picture(self, path: Path, frames: int) -> None:
        """Logs an animation."""
        name = "animation" if path.parent.name == "animations" else path.stem
        self._call_each(lambda backend: backend.log_picture(name, path, frames))

    def _call_each(self, call: Callable[[Backend], Any]) -> None:
        """Calls a function of each backend; those that fail are dropped."""
        for name, backend in list(self.backends.items()):
            try:
                call(backend)
            except Exception as error:
                del self.backends[name]
                warnings.warn(_failure_message(name, error), stacklevel=3)

    def close(self) -> None:
        """Flushes and closes all backends."""
        while self.backends:
            name, backend = self.backends.popitem()
            try:
                backend.shutdown()
            except Exception as error:
                warnings.warn(_failure_message(name, error), stacklevel=2)


def _finite_numbers(values: Mapping[str, Any]) -> dict[str, float]:
    return {
        name: value
        for name, value in values.items()
        if isinstance(value, (int, float)) and math.isfinite(value)
    }


def _failure_message(name: str, error: Exception) -> str:
    return (
        f"logging backend {name!r} failed ({type(error).__name__}: {error}) and is not used any "
        "more; metrics.csv is complete."
    )
