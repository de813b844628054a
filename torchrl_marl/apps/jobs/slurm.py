"""Runs as Slurm jobs, submitted by submitit."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from torchrl_marl.errors import ConfigError, MissingExtraError, UserError
from torchrl_marl.settings import flatten, parse_overrides

__all__ = ["SlurmJob", "make_executor", "parse_slurm"]

_LOG_LEVEL = "SUBMITIT_LOG_LEVEL"


def make_executor(folder: Path, options: Mapping[str, Any]) -> Any:
    """Returns submitit's executor, which writes its scripts and logs to a folder.

    Args:
        folder (Path): folder that all nodes see.
        options (mapping): arguments of submitit's ``update_parameters``, such as ``timeout_min``
            and ``slurm_partition``, and ``cluster``: ``slurm`` (default), or ``local`` for
            processes of this machine.

    Raises:
        MissingExtraError: submitit is not installed.
        ConfigError: an unknown option, a wrong value, or no Slurm on this machine.
    """
    submitit = _import_submitit()
    own = {"name": "torchrl_marl", "timeout_min": 1440, **options}
    cluster = own.pop("cluster", "slurm")
    try:
        executor = submitit.AutoExecutor(folder=str(folder.absolute()), cluster=cluster)
        executor.update_parameters(**own)
    except (AssertionError, NameError, TypeError, ValueError, RuntimeError) as error:
        raise ConfigError(
            f"Slurm cannot be used with these options: {error}; mend them, use --launcher "
            "processes, or try it on this machine by --slurm cluster=local."
        ) from None
    return executor


def _import_submitit() -> Any:
    """Imports submitit without its configuration of logging.

    That configuration closes all handlers of the process. Handlers of absl, which JAX uses, then
    close the stream that they write to.
    """
    level = os.environ.get(_LOG_LEVEL)
    os.environ[_LOG_LEVEL] = "NOCONFIG"
    try:
        import submitit
    except ImportError:
        raise MissingExtraError("submitit", "slurm") from None
    finally:
        if level is None:
            del os.environ[_LOG_LEVEL]
        else:
            os.environ[_LOG_LEVEL] = level
    return submitit


def parse_slurm(texts: Sequence[str]) -> dict[str, Any]:
    """Parses options for Slurm, given as ``key=value``.

    Examples:
        >>> parse_slurm(["timeout_min=60", "slurm_partition=gpu"])
        {'timeout_min': 60, 'slurm_partition': 'gpu'}
    """
    return flatten(parse_overrides(texts))


class SlurmJob:
    """A run trained in a Slurm job; it looks like a process of :class:`Jobs`.

    Args:
        executor: submitit's executor.
        train (callable): function that trains the run, called on the node with ``request``.
        request (mapping): settings of the run, picklable.
        folder (Path): folder of the run.
        if_stopped (Exception): outcome of a run that was stopped.
    """

    def __init__(
        self,
        executor: Any,
        train: Callable[[Mapping[str, Any]], str | None],
        request: Mapping[str, Any],
        folder: Path,
        if_stopped: Exception,
    ) -> None:
        self.folder, self.stopped, self.if_stopped = folder, False, if_stopped
        self.job = executor.submit(train, dict(request))

    @property
    def has_ended(self) -> bool:
        """True if the job has ended."""
        return self.job.done()

    def stop(self) -> None:
        """Cancels the job. Slurm sends SIGTERM, at which the run is saved."""
        if not self.stopped and not self.has_ended:
            self.stopped = True
            self.job.cancel(check=False)

    def close(self) -> None:
        """Cancels the job if it still runs."""
        self.stop()

    def outcome(self) -> Path | Exception:
        """Returns the run's folder or, if the run failed, an exception."""
        if self.stopped:
            return self.if_stopped
        error = self.job.exception()
        if error is not None:
            last = str(error).strip().splitlines() or ["its log is empty"]
            return UserError(f"{last[-1]} (job {self.job.job_id})")
        message = self.job.result()
        return self.folder if message is None else UserError(message)
