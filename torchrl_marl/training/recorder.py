"""The tables and loggers of a run, for metrics and evaluations."""

from __future__ import annotations

import csv
import importlib.util
import io
import json
import math
import os
import re
import sys
import time
import uuid
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from torchrl_marl.errors import CheckpointError, ConfigError, MissingExtraError
from torchrl_marl.training.config import LoggingConfig, TrainConfig
from torchrl_marl.training.files import append, whole_file

__all__ = [
    "BACKENDS",
    "Backend",
    "CsvTable",
    "Loggers",
    "Recorder",
    "check_logging",
    "open_backend",
    "print_message",
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
            self._cut_back(keep_iterations)

    def _cut_back(self, iterations: int) -> None:
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
        with whole_file(self.path, newline="") as file:
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
            self._widen(columns)
        text = io.StringIO(newline="")
        writer = csv.DictWriter(text, columns, extrasaction="ignore")
        if not self.columns:
            writer.writeheader()
        writer.writerow({key: _cell(value) for key, value in row.items()})
        append(self.path, text.getvalue())
        self.columns = columns

    def _widen(self, columns: list[str]) -> None:
        """Writes the table again with more columns, which are empty in earlier rows."""
        _, rows = self._read()
        with whole_file(self.path, newline="") as file:
            writer = csv.DictWriter(file, columns)
            writer.writeheader()
            writer.writerows(rows)


def _cell(value: Any) -> Any:
    if isinstance(value, float):
        return "" if math.isnan(value) else f"{value:.6g}"
    return value


with warnings.catch_warnings():  # in a notebook without ipywidgets, the bar is plain text
    warnings.simplefilter("ignore")
    from tqdm.auto import tqdm


class Recorder:
    """Writer of ``metrics.csv`` and ``evaluation.csv``, with the loggers and the progress bar.

    Args:
        config (TrainConfig): config of the run.
        folder (Path): folder of the run; existing tables are continued.
        iterations (int): number of finished iterations; later rows are removed.
        frames (int): environment steps so far.
        done (bool): whether the training is complete.
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
        writes: bool = True,
    ) -> None:
        self._writes = writes
        if writes:
            self._metrics = CsvTable(folder / "metrics.csv", keep_iterations=iterations)
            self._evaluation = CsvTable(folder / "evaluation.csv", keep_iterations=iterations)
            self._loggers = Loggers(config.logging, folder)
        self._bar = tqdm(
            desc=f"seed {config.seed}",
            total=config.total_frames,
            initial=frames,
            unit=" frames",
            unit_scale=True,
            dynamic_ncols=True,
            disable=done or not writes or not config.logging.progress,
        )

    def iteration(self, row: Mapping[str, Any], returns: Sequence[float]) -> None:
        """Writes the row of an iteration, and shows the groups' returns."""
        if not self._writes:
            return
        frames = row["frames"]
        self._metrics.write(row)
        self._loggers.log(row, frames)
        self._bar.update(frames - self._bar.n)
        shown = ("-" if math.isnan(value) else f"{value:.2f}" for value in returns)
        self._bar.set_postfix_str(f"return {', '.join(shown)}")

    def evaluation(self, progress: Mapping[str, Any], result: Mapping[str, float]) -> None:
        """Writes the row of an evaluation, with the progress at that time."""
        if not self._writes:
            return
        self._evaluation.write({**progress, **result})
        self._loggers.log({f"evaluation/{k}": v for k, v in result.items()}, progress["frames"])

    def grow(self) -> None:
        """Lets rows add columns to the tables."""
        if self._writes:
            self._metrics.grows = self._evaluation.grows = True

    def working(self, what: str) -> None:
        """Shows in the progress bar which slow work is being done, such as a compilation."""
        self._bar.set_postfix_str(what)

    def close_bar(self) -> None:
        """Closes the progress bar."""
        self._bar.close()

    def close(self) -> None:
        """Closes the progress bar and the loggers."""
        self._bar.close()
        if self._writes:
            self._loggers.close()


def print_message(text: str, *, warns: bool = True) -> None:
    """Prints a message above the progress bar.

    Args:
        text (str): sentence without the full stop.

    Keyword Args:
        warns (bool): True to print to stderr, which notebooks show in red; False for stdout.
    """
    tqdm.write(f"torchrl_marl: {text}.", file=sys.stderr if warns else sys.stdout)


class Backend(Protocol):
    """Protocol of a logging backend, as TorchRL's loggers implement it."""

    def log_metrics(self, metrics: dict[str, float], step: int) -> Any:
        """Logs the metrics of a step."""

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
    known = _known_names(path)
    try:
        backend, run_id = BACKENDS[name](config, folder, known.get(name))
    except Exception as error:
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0].rstrip(".")
        raise ConfigError(
            f"logging.backends holds {name!r}, which cannot be opened ({reason}); fix this, or "
            f"leave {name} out."
        ) from error
    if run_id is not None and run_id != known.get(name):
        with whole_file(path) as file:
            file.write(json.dumps({**known, name: run_id}, indent=2) + "\n")
    return backend


def _current_name(column: str) -> str:
    """Returns the current name of a column; versions before 0.2 wrote other names."""
    return "diverged" if column == "sick" else re.sub("^door/", "server/", column)


def _known_names(path: Path) -> dict[str, str]:
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
    from torchrl.record.loggers import get_logger

    logger = get_logger("tensorboard", str(folder), "tensorboard")
    assert logger is not None
    return logger, None


def _open_wandb(config: LoggingConfig, folder: Path, run_id: str | None) -> Opened:
    from torchrl.record.loggers import get_logger

    run_id = run_id or uuid.uuid4().hex[:8]
    # Two runs in one process must stay apart.
    settings = {"project": config.project, "id": run_id, "reinit": "create_new"}
    logger = get_logger("wandb", str(folder), folder.resolve().name, wandb_kwargs=settings)
    assert logger is not None
    return logger, run_id


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

    def shutdown(self) -> None:
        self._client.set_terminated(self.run_id)


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
        finite = {
            name: value
            for name, value in metrics.items()
            if isinstance(value, (int, float)) and math.isfinite(value)
        }
        for name, backend in list(self.backends.items()):
            try:
                backend.log_metrics(finite, step=frames)
            except Exception as error:
                del self.backends[name]
                warnings.warn(_left_out(name, error), stacklevel=2)

    def close(self) -> None:
        """Flushes and closes all backends."""
        while self.backends:
            name, backend = self.backends.popitem()
            try:
                backend.shutdown()
            except Exception as error:
                warnings.warn(_left_out(name, error), stacklevel=2)


def _left_out(name: str, error: Exception) -> str:
    return (
        f"logging backend {name!r} failed ({type(error).__name__}: {error}) and is not used any "
        "more; metrics.csv is complete."
    )
