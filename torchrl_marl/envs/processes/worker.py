"""Worker process that runs copies of an environment, and its handle in the parent process.

The module does not import torch, so workers start fast.

The worker is a fresh interpreter. It is not forked, because threads and CUDA would break. It is
not spawned by ``multiprocessing``, which would run the user's script again. The messages "play" and
"done" are one byte each; any other message is a pickle, preceded by its length.
"""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import mmap
import os
import pickle
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from torchrl_marl.envs.processes.copies import Copies, EnvInstance, Failure, RowLayout
from torchrl_marl.runtime.import_path import child_path

__all__ = ["Worker", "WorkerLost", "serve"]

PLAY = DONE = None  # messages that are sent as a single byte
START = (
    "import sys; sys.path[:] = eval(sys.argv[1]); "
    "from torchrl_marl.envs.processes.worker import serve; serve(*eval(sys.argv[2]))"
)
THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMEXPR_NUM_THREADS")
MIN_START_TIMEOUT = 120.0  # seconds: many workers may import a large package at once
END_TIMEOUT = 5.0  # seconds that a worker has to end after it is asked to


class WorkerLost(Exception):
    """Error that a worker died or does not answer."""


class Worker:
    """Handle of a worker process that runs some copies of an environment.

    Args:
        make (bytes): pickled function that makes a copy.
        layout (RowLayout): layout of the arrays in the shared memory.
        block (int): descriptor of the shared memory. It holds the arrays of all copies, followed by
            the index of the running copy of each worker.
        n_copies (int): number of copies of all workers.
        n_workers (int): number of workers.
        number (int): index of this worker.
        timeout (float): seconds to wait for an answer.

    Attributes:
        copies (range): indices of the worker's copies.
        traceback (str): traceback that the process wrote when it crashed or did not answer.
    """

    def __init__(
        self,
        make: bytes,
        layout: RowLayout,
        block: int,
        n_copies: int,
        n_workers: int,
        number: int,
        timeout: float,
    ) -> None:
        self.number = number
        self.copies = copies_of(number, n_workers, n_copies)
        self._start_message = (make, layout, n_copies, n_workers, number)
        self._block = block
        self._timeout = timeout
        self._awaits_answer = False
        self.traceback = ""

    def start(self) -> None:
        """Starts the process, which makes its copies only when a request asks for them."""
        ours, theirs = socket.socketpair()
        self._socket, self._trace_file = ours, tempfile.TemporaryFile()  # noqa: SIM115
        handles = (theirs.fileno(), self._block, self._trace_file.fileno())
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-c", START, repr(child_path()), repr(handles)],
            stdin=subprocess.DEVNULL,
            pass_fds=handles,
            env={**os.environ, **dict.fromkeys(THREADS, "1")},
            start_new_session=True,  # so Ctrl-C interrupts only the parent
        )
        theirs.close()
        self._awaits_answer = False
        self._socket.settimeout(max(self._timeout, MIN_START_TIMEOUT))
        with contextlib.suppress(OSError):
            send(self._socket, self._start_message)

    def send(self, message: Any) -> None:
        """Sends a request; first discards an old answer that was not read because of Ctrl-C."""
        if self._awaits_answer:
            self.receive()
        self._awaits_answer = True
        with contextlib.suppress(OSError):  # the following receive raises the error
            send(self._socket, message)

    def receive(self) -> tuple[dict[int, Any], list[Failure]]:
        """Returns the answer to a request.

        Raises:
            WorkerLost: the process died or did not answer; it is then killed.
        """
        try:
            answer = receive(self._socket)
        except TimeoutError:
            limit = self._socket.gettimeout()
            self._ask_for_traceback()
            self.kill()
            raise WorkerLost(
                f"did not answer within {limit:g} s (worker_timeout) and was ended"
            ) from None
        except (OSError, EOFError):
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(END_TIMEOUT)
            self.kill()
            raise WorkerLost(_exit_reason(self._process.returncode)) from None
        self._awaits_answer = False
        if answer is DONE:
            return {}, []
        self._socket.settimeout(self._timeout)
        return answer

    def ask_to_end(self) -> None:
        """Asks the process to close its copies and end."""
        with contextlib.suppress(OSError):
            self._socket.settimeout(END_TIMEOUT)
            self._socket.shutdown(socket.SHUT_WR)

    def end(self, timeout: float) -> None:
        """Waits for the process to end, and kills it after a timeout."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout)
        self.kill()

    def kill(self) -> None:
        """Kills the process; keeps the traceback that it wrote in a crash or while it hung."""
        self._process.kill()
        self._process.wait()
        self._socket.close()
        if not self._trace_file.closed:
            self.traceback = self._read_trace()
            self._trace_file.close()

    def _ask_for_traceback(self) -> None:
        self._process.send_signal(signal.SIGUSR1)
        deadline = time.monotonic() + 1.0
        while (
            not self._read_trace() and time.monotonic() < deadline and self._process.poll() is None
        ):
            time.sleep(0.01)

    def _read_trace(self) -> str:
        text = os.pread(self._trace_file.fileno(), 1 << 16, 0)
        return text.decode(errors="replace").strip()


def copies_of(worker: int, n_workers: int, n_copies: int) -> range:
    """Returns the indices of the copies that a worker runs."""
    return range(worker * n_copies // n_workers, (worker + 1) * n_copies // n_workers)


def _exit_reason(code: int) -> str:
    if code >= 0:
        return f"died with exit code {code}"
    return f"was killed by {signal.Signals(-code).name}"


def serve(connection: int, block: int, trace: int) -> None:
    """Main loop of a worker process: answers requests until the parent closes the connection.

    Args:
        connection (int): descriptor of the socket to the parent.
        block (int): descriptor of the shared memory.
        trace (int): descriptor of the file for the traceback of a crash.
    """
    for stop in (signal.SIGINT, signal.SIGTERM):  # the parent ends this process, after saving
        signal.signal(stop, signal.SIG_IGN)
    faulthandler.enable(file=trace, all_threads=False)
    faulthandler.register(signal.SIGUSR1, file=trace, all_threads=False)
    for descriptor in (connection, block, trace):
        os.set_inheritable(descriptor, False)
    parent = socket.socket(fileno=connection)
    threading.Thread(target=_end_with_parent, args=(connection,), daemon=True).start()
    pickled, layout, n_copies, n_workers, number = receive(parent)
    buffer = mmap.mmap(block, 0)
    size = layout.n_bytes(n_copies)
    current = np.ndarray((n_workers,), np.int64, buffer, size)[number : number + 1]
    copy_indices = copies_of(number, n_workers, n_copies)
    rows = layout.views(buffer, n_copies)
    copies = Copies(_unpickle_maker(pickled), rows, copy_indices, current, number)
    with contextlib.suppress(EOFError, OSError):
        _answer_requests(parent, copies)
    copies.close()


def _unpickle_maker(make: bytes) -> Callable[[], EnvInstance]:
    """Returns the pickled function; if it cannot be loaded, one that raises that error."""
    try:
        return pickle.loads(make)
    except Exception as error:
        raised = error

    def fail() -> EnvInstance:
        raise raised

    return fail


def _answer_requests(parent: socket.socket, copies: Copies) -> None:
    """Answers requests until the connection is closed."""
    while True:
        message = receive(parent)
        if message is PLAY:
            failures = copies.play()
            send(parent, ({}, failures) if failures else DONE)
        else:
            send(parent, copies.call(*message))
            if message[0] in ("make", "renew"):
                gc.collect()
                gc.freeze()  # the packages and environments need not be collected again


def _end_with_parent(connection: int) -> None:
    """Ends this process when its parent has ended, even if this process is busy or hangs."""
    poller = select.poll()
    poller.register(connection, 0)  # poll then reports only that the other end is closed
    poller.poll()
    time.sleep(END_TIMEOUT)
    os._exit(1)


def send(connection: socket.socket, message: Any) -> None:
    """Sends a message; the message None is sent as one byte."""
    if message is None:
        connection.sendall(b".")
        return
    data = pickle.dumps(message, pickle.HIGHEST_PROTOCOL)
    connection.sendall(b"+" + len(data).to_bytes(8, "little") + data)


def receive(connection: socket.socket) -> Any:
    """Waits for a message.

    Raises:
        EOFError: the other end is closed.
    """
    kind = connection.recv(1)
    if kind == b".":
        return None
    if not kind:
        raise EOFError
    length = int.from_bytes(_receive_bytes(connection, 8), "little")
    return pickle.loads(_receive_bytes(connection, length))


def _receive_bytes(connection: socket.socket, length: int) -> bytearray:
    data = bytearray(length)
    unfilled = memoryview(data)
    while unfilled:
        n = connection.recv_into(unfilled)
        if not n:
            raise EOFError
        unfilled = unfilled[n:]
    return data
