"""Training of many runs: in sequence in this process, in parallel processes, or as Ray tasks."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import shlex
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Collection, Generator, Iterator, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from torchrl_marl.errors import UserError
from torchrl_marl.runtime.naming import file_name
from torchrl_marl.runtime.trust import is_trusting
from torchrl_marl.training.config import TrainConfig, seed_folders
from torchrl_marl.training.files import open_to_append
from torchrl_marl.training.interruption import Interruption

if TYPE_CHECKING:
    from torchrl_marl.apps.jobs.slurm import SlurmJob
    from torchrl_marl.collectors.ray_connection import Connection
    from torchrl_marl.training.run import Run

    _Outcomes = Generator[tuple[int, Run | Path | Exception], None, None]

__all__ = ["Jobs", "Stopped", "train_all", "train_each", "train_or_resume"]

_POLL_SECONDS = 0.5  # between two checks of the processes
_CANCEL_TIMEOUT = 120.0  # seconds for a task that was asked to stop to save its run
_SIGNALS = [getattr(signal, name, None) for name in ("SIGINT", "SIGTERM", "SIGHUP")]
_STOP_EXIT_CODES = tuple(code for n in _SIGNALS if n for code in (-n, 128 + n))


def _do_nothing(_: Any) -> None:
    """Does nothing."""


class Stopped(Exception):
    """Raised if Ctrl-C, SIGTERM or SIGHUP has stopped a run; the run can be resumed."""


class Jobs:
    """Several runs, and how to train them.

    Args:
        configs (sequence of TrainConfig): settings of each run; they must name the run's folder,
            unless runs are trained in this process.
        backend (str): ``here``: in this process, in sequence; ``processes``: one process for each
            run; ``ray``: one Ray task for each run, as for ``distributed.backend: ray``;
            ``slurm``: one Slurm job for each run.

    Keyword Args:
        at_once (int): number of parallel processes or Slurm jobs.
        slurm (mapping): options for Slurm (:func:`~torchrl_marl.apps.jobs.slurm.make_executor`).
        folder (Path): folder for all runs and the logs of the processes.
        on_begin (callable): called with a run's number when the run begins.
        on_poll (callable): called every half second with the numbers of the runs in progress.
        resume (bool): whether interrupted runs are resumed with ``here`` and ``ray``; with
            ``processes`` and ``slurm`` they always are.
        **overrides: further settings of all runs; ignored with ``ray``.
    """

    def __init__(
        self,
        configs: Sequence[TrainConfig],
        backend: str = "here",
        *,
        at_once: int = 1,
        slurm: Mapping[str, Any] = MappingProxyType({}),
        folder: Path = Path(),
        on_begin: Callable[[int], object] = _do_nothing,
        on_poll: Callable[[Collection[int]], object] = _do_nothing,
        resume: bool = True,
        **overrides: Any,
    ) -> None:
        self.configs, self.backend, self.at_once, self.folder = configs, backend, at_once, folder
        self.executor: Any = None
        if backend == "slurm":
            from torchrl_marl.apps.jobs.slurm import make_executor

            self.executor = make_executor(folder / "logs", slurm)
        self.on_begin, self.on_poll, self.resume, self.overrides = (
            on_begin,
            on_poll,
            resume,
            overrides,
        )

    def ended(self) -> _Outcomes:
        """Trains all runs.

        Yields:
            tuple: in the order in which runs end: the index of a run, and its result. The result
                is the run, its folder if another process trained it, or its exception.
        """
        places = {"here": self._run_in_this_process, "ray": self._run_on_ray}
        return places.get(self.backend, self._run_in_child_processes)()

    def _run_in_this_process(self) -> _Outcomes:
        from torchrl_marl.training.messages import messages_of

        for number, config in enumerate(self.configs):
            self.on_begin(number)
            try:
                folder = config.folder if self.resume else None
                with messages_of(self._message_prefix(config)):
                    found: Run | Exception = train_or_resume(config, folder, **self.overrides)
            except Exception as error:
                found = error
            except BaseException:
                yield number, Stopped()
                raise
            yield number, found

    def _message_prefix(self, config: TrainConfig) -> str:
        """Returns the name of a run in messages; empty for a single run."""
        if len(self.configs) == 1 and self.folder == Path():
            return ""
        folder = None if config.folder is None else Path(config.folder)
        if folder is None:
            return f"seed {config.seed}"
        inside = folder.is_relative_to(self.folder)
        return (folder.relative_to(self.folder) if inside else folder).as_posix()

    def _run_in_child_processes(self) -> _Outcomes:
        waiting = deque(range(len(self.configs)))
        working: dict[int, _ChildProcess | SlurmJob] = {}
        interruption = Interruption()
        try:
            with interruption:
                while working or (waiting and not interruption.stop_requested):
                    while (
                        waiting and len(working) < self.at_once and not interruption.stop_requested
                    ):
                        self._start_job(waiting.popleft(), working)
                    if interruption.stop_requested:
                        for process in working.values():
                            process.stop()
                    for number in [n for n, one in working.items() if one.has_ended]:
                        working[number].close()
                        yield number, working.pop(number).outcome()
                    self.on_poll(working.keys())
                    time.sleep(_POLL_SECONDS if working else 0)
        finally:
            for process in working.values():
                process.close()
        interruption.handle_signal(self.folder)

    def _start_job(self, number: int, working: dict[int, _ChildProcess | SlurmJob]) -> None:
        self.on_begin(number)
        config = self.configs[number]
        if self.executor is not None:
            from torchrl_marl.apps.jobs.slurm import SlurmJob

            path = str(Path(str(config.folder)).absolute())
            request = _make_request(dataclasses.replace(config, folder=path), self.overrides)
            working[number] = SlurmJob(self.executor, _train_job, request, Path(path), Stopped())
            return
        parts = Path(str(config.folder)).relative_to(self.folder).parts
        log = self.folder / "logs" / f"{'_'.join(parts)}.log"
        working[number] = _ChildProcess(config, self.overrides, log, one_thread=self.at_once > 1)

    def _run_on_ray(self) -> _Outcomes:
        from torchrl_marl.collectors.ray_connection import connect
        from torchrl_marl.training.folder import check_folder

        placed = [_config_for_ray(config, number) for number, config in enumerate(self.configs)]
        for config in placed if not self.resume else ():
            check_folder(config)
        settings = self.configs[0].distributed
        connection = connect(settings.address, settings.cpus_per_actor)
        connection.report_death(
            "the Ray node (raylet) started for these runs has died, and this process with it; "
            "resume each run with `torchrl-marl train --resume FOLDER`, such as "
            f"FOLDER={shlex.quote(str(placed[0].folder))}."
        )
        for number in range(len(placed)):
            self.on_begin(number)
        try:
            tasks = _outcomes_of_tasks(connection, self.configs[0], placed)
            with contextlib.closing(tasks):
                yield from _with_stopped(tasks, len(placed))
        finally:
            connection.close()


def train_or_resume(
    settings: TrainConfig | Mapping[str, Any],
    folder: str | Path | None,
    *,
    trust: bool = False,
    **overrides: Any,
) -> Run:
    """Trains a run, or resumes it if its folder holds one already.

    Args:
        settings (TrainConfig or mapping): settings of the run.
        folder (str or Path, optional): folder of the run; None: a new run, in the folder that
            its settings name.

    Keyword Args:
        trust (bool): whether to resume a run of another user.
        **overrides: further settings.

    Raises:
        UserError: invalid settings, or a folder that cannot be used; the message names the fix.
    """
    from torchrl_marl.runs import resume, train

    if folder is None:
        return train(settings, **overrides)
    if (Path(folder) / "config.yaml").is_file():
        return resume(folder, trust=trust, **overrides)
    return train(settings, folder=str(folder), **overrides)


# -------------------------------------------------------------------------------------- processes


class _ChildProcess:
    """A run trained in a child process."""

    def __init__(
        self, config: TrainConfig, overrides: Mapping[str, Any], log: Path, one_thread: bool
    ) -> None:
        self.folder, self.log = Path(str(config.folder)), log
        log.parent.mkdir(exist_ok=True)
        request = _make_request(config, overrides)
        with open_to_append(log) as file:
            self.process = subprocess.Popen(
                [sys.executable, "-P", "-m", "torchrl_marl.apps.jobs.jobs"],
                stdin=subprocess.PIPE,
                stdout=file,
                stderr=file,
                env=_child_environment(one_thread),
                start_new_session=True,  # Ctrl-C reaches this process, which stops the children
            )
        assert self.process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # the log says why the process ended
            self.process.stdin.write((json.dumps(request) + "\n").encode())
            self.process.stdin.flush()

    @property
    def has_ended(self) -> bool:
        return self.process.poll() is not None

    def stop(self) -> None:
        if not self.has_ended:
            self.process.terminate()

    def close(self) -> None:
        """Kills the process if it still runs, and waits until it has ended."""
        if not self.has_ended:
            self.process.kill()
        self.process.wait()
        assert self.process.stdin is not None
        with contextlib.suppress(OSError):
            self.process.stdin.close()

    def outcome(self) -> Path | Exception:
        """Returns the run's folder or, if the run failed, an exception with the log's last line."""
        code = self.process.returncode
        if code == 0:
            return self.folder
        if code in _STOP_EXIT_CODES:
            return Stopped()
        if code < 0:
            return UserError(f"ended by signal {-code}")
        try:
            lines = self.log.read_text(encoding="utf-8", errors="replace").split("\n")
        except OSError:
            lines = []
        last = next((line.strip() for line in reversed(lines) if line.strip()), "")
        return UserError(last.removeprefix("torchrl-marl: error: ") or "its log is empty")


def _make_request(config: TrainConfig, overrides: Mapping[str, Any]) -> dict[str, Any]:
    """Returns what another process needs to train a run."""
    settings = dataclasses.asdict(config)
    return {"settings": settings, "overrides": dict(overrides), "trust": is_trusting()}


def _train_request(request: Mapping[str, Any]) -> None:
    settings, trust = request["settings"], request["trust"]
    train_or_resume(settings, settings["folder"], trust=trust, **request["overrides"])


def _train_job(request: Mapping[str, Any]) -> str | None:
    """Trains a run on a node, and returns the message of an error that the user can fix."""
    from torchrl_marl.apps.console import silence_libraries

    silence_libraries()
    try:
        _train_request(request)
    except UserError as error:
        return " ".join(str(error).split())
    return None


def _child_environment(one_thread: bool) -> dict[str, str]:
    """Returns the environment variables of a child process.

    They contain this package's path and, with ``one_thread``, limit libraries to one thread.
    """
    one = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "TORCHINDUCTOR_COMPILE_THREADS")
    given = os.environ.get("PYTHONPATH", "").split(os.pathsep)  # empty: the current folder
    paths = [str(Path(__file__).parents[3]), *filter(None, given)]
    own = {"PYTHONPATH": os.pathsep.join(paths)}
    return {**(dict.fromkeys(one, "1") if one_thread else {}), **os.environ, **own}


def _main() -> int:
    """Trains the run described on standard input; runs in a child process."""
    request = json.loads(sys.stdin.readline())
    threading.Thread(target=_terminate_when_input_ends, daemon=True).start()
    from torchrl_marl.apps.console import print_error, silence_libraries

    silence_libraries()
    try:
        _train_request(request)
    except UserError as error:
        print_error(error)
        return 2
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    except Exception:  # the parent reports the last line; other runs continue
        traceback.print_exc()
        return 1
    return 0


def _terminate_when_input_ends() -> None:
    while os.read(sys.stdin.fileno(), 1024):  # not sys.stdin.read: Python's exit needs its lock
        pass
    os.kill(os.getpid(), signal.SIGTERM)


# --------------------------------------------------------------------------------------- Ray tasks


def _config_for_ray(config: TrainConfig, number: int) -> TrainConfig:
    """Returns a run's settings for a Ray task; the folder is fixed, and the run not distributed."""
    folder = config.folder
    if folder is None:
        stamp = datetime.now().strftime("%Y%m%d-%H%M%S")
        folder = f"runs/{file_name(config.recipe)}_seed{config.seed}_{stamp}_{number}"
    plain = dataclasses.replace(config.distributed, backend="none", address=None)
    quiet = dataclasses.replace(config.logging, progress=False)
    path = str(Path(folder).absolute())
    return dataclasses.replace(config, folder=path, distributed=plain, logging=quiet)


def _outcomes_of_tasks(
    connection: Connection, first: TrainConfig, configs: Sequence[TrainConfig]
) -> _Outcomes:
    ray, settings = connection.ray, first.distributed
    task = ray.remote(_train_task).options(
        num_cpus=settings.cpus_per_actor,
        num_gpus=settings.gpus_per_actor,
        max_retries=settings.max_restarts,
    )
    numbers = {task.remote(one, _is_own(one)): number for number, one in enumerate(configs)}
    left = list(numbers)
    try:
        while left:
            (ended, *_), left = connection.wait(left, 1)
            yield numbers[ended], _task_outcome(ray, ended, configs[numbers[ended]])
    finally:
        for result in left:
            ray.cancel(result)
        if left:
            ray.wait(left, num_returns=len(left), timeout=_CANCEL_TIMEOUT)


def _with_stopped(outcomes: _Outcomes, count: int) -> _Outcomes:
    """Yields the outcomes of runs; after an interruption, also of the runs that it has stopped."""
    running = set(range(count))
    while running:
        try:
            number, outcome = next(outcomes)
        except (KeyboardInterrupt, SystemExit):
            for number in sorted(running):
                yield number, Stopped()
            raise
        running.remove(number)
        yield number, outcome


def _task_outcome(ray: Any, result: Any, config: TrainConfig) -> Path | Exception:
    from torchrl_marl.collectors.ray import ActorFailure, get_answer

    try:
        answer = get_answer(ray, result, ready=True, timeout=0.0)
    except Exception as error:
        return error
    if isinstance(answer, ActorFailure):
        resume = f"; resume it with torchrl-marl train --resume {config.folder}."
        return answer.error("its task", resume)
    return Path(str(config.folder))


def _is_own(config: TrainConfig) -> bool:
    """Returns whether a run is new, or the user trusts its folder."""
    return is_trusting() or not (Path(str(config.folder)) / "config.yaml").is_file()


def _train_task(config: TrainConfig, trust: bool) -> None:
    """Trains a run, or resumes it if it was stopped or Ray has restarted the task."""
    from torchrl_marl.training import trainer

    folder = Path(str(config.folder))
    if (folder / "config.yaml").is_file():
        trainer.resume(folder, trust=trust)
    else:
        trainer.train(config)


def train_all(configs: Sequence[TrainConfig]) -> Iterator[tuple[int, Path | Exception]]:
    """Trains each run as a Ray task; as many run in parallel as the CPUs allow.

    Results are the same as without Ray. If a process or machine dies, Ray restarts the task, which
    resumes from its last checkpoint; so all machines must share the run folders. After Ctrl-C all
    runs save and stop.

    Args:
        configs (sequence of TrainConfig): settings with ``distributed.backend: ray``; ``address``,
            ``cpus_per_actor``, ``gpus_per_actor`` and ``max_restarts`` apply to the tasks.

    Yields:
        tuple: in the order in which runs end: the index of a run, and its folder or its exception.

    Raises:
        ConfigError: Ray is not available, or a folder is in use.
    """
    yield from Jobs(configs, "ray", resume=False).ended()  # type: ignore[misc]


# ------------------------------------------------------------------------------------------ seeds


def train_each(
    configs: Sequence[TrainConfig], *, seeds: bool = False
) -> Iterator[tuple[TrainConfig, list[Run] | Exception]]:
    """Trains runs, and yields each run when it ends; a population is yielded with its members.

    Args:
        configs (sequence of TrainConfig): settings that differ only in the seed.
        seeds (bool): whether these are runs of several seeds. If they are, and the settings have
            ``distributed.backend: ray`` and no shards, each run is a Ray task.

    Raises:
        Exception: the only run failed. With several runs, exceptions are yielded instead.
    """
    from torchrl_marl.training.messages import print_message

    settings, count = configs[0].distributed, len(configs)
    on_ray = seeds and settings.backend == "ray" and not settings.enabled
    if on_ray:
        print_message(f"{count} runs are Ray tasks, one per CPU in parallel")
    ended = Jobs(configs, "ray" if on_ray else "here", resume=False).ended()
    with contextlib.closing(ended):
        for done, (number, found) in enumerate(ended, 1):
            if isinstance(found, Stopped):  # the interruption itself is raised next
                continue
            if isinstance(found, Path):
                seed, left = configs[number].seed, count - done
                print_message(f"seed {seed} has ended, {left} to go: {str(found)!r}")
                yield configs[number], _load_runs(found)
            elif not isinstance(found, Exception):
                yield configs[number], getattr(found, "members", [found])
            elif count == 1 and not on_ray:
                raise found
            else:
                yield configs[number], found


def _load_runs(folder: Path) -> list[Run]:
    """Plots the curves of a run that another process trained, and loads the run.

    Returns a list with the run or, for a population, with its members.
    """
    from torchrl_marl.runs import draw
    from torchrl_marl.training.run import Run

    draw(folder)
    return [Run.load(one) for one in seed_folders(folder) or [folder]]


if __name__ == "__main__":
    sys.exit(_main())
