"""Process group of a run: the ranks that ``torchrun`` started, or a single process."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import shlex
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NoReturn, TypeVar

import torch.distributed as dist

from torchrl_marl.errors import ConfigError, RankError, UserError
from torchrl_marl.runtime.ranks import SINGLE_PROCESS, Ranks, SingleProcess
from torchrl_marl.runtime.torchrun import place
from torchrl_marl.training.config import TrainConfig
from torchrl_marl.training.folder import RunFolder
from torchrl_marl.training.interruption import terminable

__all__ = ["joined", "on_rank_zero", "open_run_folder", "resolve_config"]

Found = TypeVar("Found")
_LEAVE_TIMEOUT, _LEAVE_TIMEOUT_AFTER_LOSS = 10.0, 2.0
"""Seconds that the first rank waits for the others at the end."""


@contextlib.contextmanager
def joined(config: TrainConfig) -> Iterator[SingleProcess]:
    """Context that joins the ranks of ``torchrun``, if any; only the first uses the terminal.

    An error on one rank ends all ranks: that rank reports it, and the others end silently. If a
    rank has vanished, the first rank that notices reports it. The SIGTERM that ``torchrun`` then
    sends does not interrupt the report.

    Args:
        config (TrainConfig): config of the run.

    Raises:
        RankError: a rank has failed; the message names it.
        SystemExit: another rank has failed.
    """
    if place() is None:
        yield SINGLE_PROCESS
        return
    ranks, patience = Ranks.start(_rank_device(config.device)), _LEAVE_TIMEOUT
    with terminable():
        try:
            with _silence_other_ranks(ranks):
                yield ranks
        except Exception as error:
            if _is_lost_connection(error):
                _ignore_sigterm()
                patience = _LEAVE_TIMEOUT_AFTER_LOSS
            _end_this_rank(ranks, error)
        finally:
            ranks.leave(patience)


def resolve_config(
    config: TrainConfig, ranks: SingleProcess, *, own_env: bool = False, resumed: bool = False
) -> TrainConfig:
    """Returns the settings for this rank, after checking that all ranks agree.

    Args:
        config (TrainConfig): config of the run.
        ranks (SingleProcess): the ranks of the run.
        own_env (bool): whether the caller passes an environment.
        resumed (bool): whether the run is resumed; its shards then must not change.

    Raises:
        ConfigError: the ranks disagree, or the settings do not work with several ranks.
    """
    if ranks.size == 1:
        return config
    from torchrl_marl.learners.capabilities import RANKS
    from torchrl_marl.training.ddp import check_ranks, refuse_disagreement, with_shards

    refuse_disagreement(ranks, config)
    if resumed and not config.distributed.enabled:
        raise ConfigError(
            "distributed.collectors is null, so that the run has no shards, but torchrun has "
            f"started {ranks.size} processes; resume it with one: torchrl-marl train --resume."
        )
    if not own_env:  # before with_shards changes distributed.collectors
        RANKS.check(config)
    config = with_shards(config, ranks.size)
    check_ranks(config, ranks.size, own_env=own_env)
    return dataclasses.replace(config, device=_rank_device(config.device))


def open_run_folder(ranks: SingleProcess, make: Callable[[], RunFolder]) -> RunFolder:
    """Returns the run folder, which only the first rank creates and writes."""
    if ranks.rank == 0:
        folder = make()
        ranks.folder = Path(ranks.broadcast(str(folder.path)))
        return folder
    ranks.folder = Path(ranks.broadcast(None))
    return RunFolder(ranks.folder, writes=False)


def on_rank_zero(ranks: SingleProcess, work: Callable[[], Found]) -> Found:
    """Runs ``work`` on the first rank, and returns its result on all ranks."""
    return ranks.broadcast(work() if ranks.rank == 0 else None)


def _rank_device(device: str) -> str:
    rank_place = place()
    return (
        f"cuda:{rank_place.local_rank}"
        if rank_place is not None and device.startswith("cuda")
        else device
    )


@contextlib.contextmanager
def _silence_other_ranks(ranks: Ranks) -> Iterator[None]:
    """Silences the terminal on all ranks but the first."""
    if ranks.rank == 0:
        yield
        return
    with (
        open(os.devnull, "w") as nowhere,
        contextlib.redirect_stdout(nowhere),
        contextlib.redirect_stderr(nowhere),
    ):
        yield


def _end_this_rank(ranks: Ranks, error: Exception) -> NoReturn:
    """Ends this rank, with a message if it is the first to fail."""
    name, code = f"rank {ranks.rank} of {ranks.size}", 2 if isinstance(error, UserError) else 1
    lost = _is_lost_connection(error)
    try:
        first = ranks.report_failure(f"{name}\n{2 if lost else code}")
    except dist.DistError:  # the rank that holds the store has ended
        first = f"{name}\n2"
    if not first.startswith(f"{name}\n"):
        raise SystemExit(int(first.partition("\n")[2]))
    if lost:
        raise RankError(
            f"{name}: another rank has ended, or has not answered for 5 minutes; "
            f"{_resume_hint(ranks.folder)}"
        ) from error
    if isinstance(error, UserError):
        raise RankError(f"{name}: {error}") from error
    error.add_note(f"This was {name}; the others have ended with it.")
    raise error


def _is_lost_connection(error: Exception) -> bool:
    """Returns whether the error is a lost connection to another rank."""
    return isinstance(error, dist.DistError) or "gloo" in str(error).lower()


def _resume_hint(folder: Path | None) -> str:
    if folder is None:
        return "start again once all ranks can be reached."
    saved = sorted((folder / "checkpoints").glob("iteration_*.pt"))
    where = (
        f"resumes it from {saved[-1].name}" if saved else "starts it over, without a checkpoint yet"
    )
    command = f"torchrl-marl train --resume {shlex.quote(str(folder))}"
    return f"`{command}` {where}, also by torchrun (-m torchrl_marl), once all can be reached."


def _ignore_sigterm() -> None:
    """Ignores SIGTERM from ``torchrun``, since this process is about to end by itself."""
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
