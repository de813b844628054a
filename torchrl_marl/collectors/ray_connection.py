"""The connection to Ray, which all runs of a process share; the last run closes it."""

from __future__ import annotations

import atexit
import contextlib
import math
import os
import secrets
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from torchrl_marl.errors import ConfigError, MissingExtraError, WorkerError, quoted
from torchrl_marl.runtime.random_state import RandomState

__all__ = ["Connection", "connect"]

_CLUSTER_VARIABLE = "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"
"""Environment variable of Ray; if it is enabled, Ray replaces 127.0.0.1 by another address."""
_POLL_SECONDS = 2.0
"""Seconds between two checks that Ray is alive."""
_n_connections = 0
_started_here = False


class Connection:
    """A connection to Ray, which keeps Ray in use until it is closed.

    Attributes:
        cpus (float): number of free CPUs.
    """

    def __init__(self, ray: Any) -> None:
        self.ray, self._is_open = ray, True
        self._death_notice: subprocess.Popen[bytes] | None = None

    @property
    def cpus(self) -> float:
        return self.ray.available_resources().get("CPU", 0.0)

    @property
    def gpus(self) -> float:
        """Number of free GPUs."""
        return self.ray.available_resources().get("GPU", 0.0)

    def wait(self, calls: Sequence[Any], n: int, timeout: float = math.inf) -> tuple[list, list]:
        """Returns the calls that have ended and the others, as ``ray.wait`` does.

        Args:
            calls (sequence of ObjectRef): the calls.
            n (int): number of calls to wait for.
            timeout (float): maximum number of seconds.

        Raises:
            WorkerError: the Ray that this process started has died, which ``ray.wait`` does not
                notice.
        """
        deadline = time.monotonic() + timeout
        while True:
            remaining = deadline - time.monotonic()
            ended, others = self.ray.wait(
                list(calls), num_returns=n, timeout=max(0.0, min(remaining, _POLL_SECONDS))
            )
            if len(ended) >= n or remaining <= _POLL_SECONDS:
                return ended, others
            if self._death_notice is not None and self._death_notice.poll():
                raise WorkerError("the Ray that was started here has died; resume with --resume.")

    def report_death(self, text: str) -> None:
        """Prints a text if the Ray that this process started dies while it is in use.

        In this case Ray ends this process from C++, without an exception.

        Args:
            text (str): one sentence.
        """
        pid = _raylet_pid(self.ray) if _started_here else None
        if pid is not None and hasattr(os, "pidfd_open"):
            script = Path(__file__).with_name("death_notice.py")
            self._death_notice = subprocess.Popen(
                [sys.executable, "-I", str(script), str(pid), f"torchrl_marl: {text}"],
                stdin=subprocess.PIPE,
                start_new_session=True,  # Ctrl-C is not for it
            )
            # It runs before Ray's exit handler, which ends Ray's processes.
            atexit.register(self._announce_shutdown)

    def _announce_shutdown(self) -> None:
        """Announces that Ray's processes will end as planned."""
        if self._death_notice is not None:
            self._death_notice.communicate(b"x")
            self._death_notice = None
            atexit.unregister(self._announce_shutdown)

    def close(self) -> None:
        """Shuts Ray down if this process started it and this was its last connection."""
        global _n_connections, _started_here
        if not self._is_open:
            return
        self._is_open = False
        self._announce_shutdown()
        _n_connections -= 1
        if _n_connections == 0 and _started_here:
            _started_here = False
            self.ray.shutdown()


def connect(address: str | None, cpus: float = 0.0) -> Connection:
    """Returns a connection to this process's Ray, to a cluster, or to a Ray started here.

    Args:
        address (str, optional): address of a cluster; by default ``RAY_ADDRESS``, or a local Ray
            that other machines cannot reach.
        cpus (float): number of CPUs needed; a local Ray is started with at least this number.

    Raises:
        MissingExtraError: Ray is not installed.
        ConfigError: the cluster does not answer, or Ray does not start.
    """
    global _n_connections, _started_here
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    try:
        import ray
    except ImportError:
        raise MissingExtraError("ray", "ray") from None
    if not ray.is_initialized():
        given = address or os.environ.get("RAY_ADDRESS")
        _start_ray(ray, given, cpus)
        _started_here = True
    _n_connections += 1
    return Connection(ray)


def _start_ray(ray: Any, address: str | None, cpus: float) -> None:
    options: dict[str, Any] = {"log_to_driver": False, "logging_level": "ERROR"}
    if address is None:
        n_cpus = (
            len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
        )
        options |= {"address": "local", "num_cpus": max(n_cpus or 1, int(cpus + 0.999))}
        options |= {"include_dashboard": False, "_node_ip_address": "127.0.0.1"}
    else:
        options["address"] = address
    if not (address or "").startswith("ray://"):
        options["job_config"] = _make_job_config(ray)
    # Ray would end the process at once on SIGTERM, but a run must be saved first.
    in_main_thread = threading.current_thread() is threading.main_thread()
    previous_handler = signal.getsignal(signal.SIGTERM) if in_main_thread else None
    try:
        # Ray draws ports from Python's random generator, but must not change the run's numbers.
        with RandomState(secrets.randbits(32)).active():
            _check_reachable(address)
            with _listen_on_loopback() if address is None else contextlib.nullcontext():
                _init_with_retries(ray, options, tries=2 if address is None else 1)
    except Exception as error:
        reason = quoted(" ".join(str(error).split())[:300])
        if address is None:
            raise ConfigError(
                f"Ray does not start on this machine ({reason}); it needs 30 s of a CPU and room "
                "for its temporary files: free them, or use distributed.backend=none."
            ) from error
        raise ConfigError(
            f"no cluster of Ray answers at {quoted(address)} ({reason}); start one there with `ray "
            "start --head`, or omit distributed.address (and RAY_ADDRESS) to start a local Ray."
        ) from error
    finally:
        if in_main_thread:
            signal.signal(signal.SIGTERM, previous_handler)


def _raylet_pid(ray: Any) -> int | None:
    """Returns the process ID of Ray's raylet on this machine; None if unknown."""
    node = getattr(ray._private.worker, "_global_node", None)
    processes = getattr(node, "all_processes", {}).get("raylet")
    return processes[0].process.pid if processes else None


@contextlib.contextmanager
def _listen_on_loopback() -> Iterator[None]:
    """Makes Ray listen at 127.0.0.1 only, if it is started within the context.

    The option ``_node_ip_address="127.0.0.1"`` is not enough, because Ray replaces this address by
    the machine's network address.
    """
    from ray._private import ray_constants

    previous, was_enabled = os.environ.get(_CLUSTER_VARIABLE), ray_constants.ENABLE_RAY_CLUSTER
    os.environ[_CLUSTER_VARIABLE], ray_constants.ENABLE_RAY_CLUSTER = "0", False
    try:
        yield
    finally:
        ray_constants.ENABLE_RAY_CLUSTER = was_enabled
        os.environ.pop(_CLUSTER_VARIABLE)
        if previous is not None:
            os.environ[_CLUSTER_VARIABLE] = previous


def _make_job_config(ray: Any) -> Any:
    """Returns a job config that gives workers the import path of this process.

    By default Ray puts the current folder first, even if it is not on this process's path.
    """

    class Job(ray.job_config.JobConfig):  # Ray keeps paths if the job has a working folder
        def _runtime_env_has_working_dir(self) -> bool:
            return True

    script = os.path.dirname(os.path.realpath(sys.argv[0]))
    paths = [script] if hasattr(sys.modules["__main__"], "__file__") and script in sys.path else []
    here = os.getcwd()
    if here not in paths and not {"", here}.isdisjoint(sys.path):
        paths.append(here)
    return Job(_py_driver_sys_path=paths)


def _check_reachable(address: str | None, seconds: float = 10.0) -> None:
    """Checks quickly that a cluster listens at the address; Ray itself would wait for minutes.

    Raises:
        OSError: no process listens there.
    """
    host, _, port = (address or "").removeprefix("ray://").rpartition(":")
    if host and port.isdecimal():
        socket.create_connection((host, int(port)), seconds).close()


def _init_with_retries(ray: Any, options: dict[str, Any], tries: int) -> None:
    """Starts Ray; tries again if its processes start too slowly, for example on a busy machine."""
    for tries_left in reversed(range(tries)):
        try:
            ray.init(**options)
            return
        except Exception:
            ray.shutdown()
            if not tries_left:
                raise
