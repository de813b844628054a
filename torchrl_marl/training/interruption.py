"""Delays Ctrl-C, SIGTERM and SIGHUP to the end of an iteration, so that runs resume exactly."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, NoReturn

if TYPE_CHECKING:
    from torchrl_marl.runtime.ranks import SingleProcess

__all__ = ["Interruption", "Terminated", "named", "terminable"]

_STOP_MESSAGE = "\nstopping after this iteration{}{}"
_HANGUP = getattr(signal, "SIGHUP", None)  # Windows has none
_TERMINATION_SIGNALS = (signal.SIGTERM,) if _HANGUP is None else (signal.SIGTERM, _HANGUP)
"""Signals after which a run is saved and the process ends. SIGHUP means a closed terminal."""
_active_interruptions: list[Interruption] = []
"""The interruptions whose contexts are entered; the last one receives the signals."""
_replaced_handlers: dict[int, Any] = {}
"""The handlers that were replaced when the first context was entered."""


class Terminated(SystemExit):
    """Exit after SIGTERM or SIGHUP, with the usual status 143 or 129.

    Args:
        folder (Path, optional): folder of the run that was stopped.
        number (int): the signal.

    Attributes:
        saved (bool): whether the run was saved.
    """

    def __init__(self, folder: Path | None = None, number: int = signal.SIGTERM) -> None:
        super().__init__(128 + number)
        self.folder, self.number, self.saved = folder, number, True


@contextlib.contextmanager
def named(folder: Path) -> Iterator[None]:
    """Adds a run's folder to exceptions that stop it at once, such as after a second Ctrl-C.

    Args:
        folder (Path): folder of the run.

    Raises:
        KeyboardInterrupt: after Ctrl-C; its arguments are the folder and ``False``, since nothing
            was saved.
        Terminated: after SIGTERM or SIGHUP; its ``folder`` is the folder, and its ``saved`` is
            False.
    """
    try:
        yield
    except KeyboardInterrupt as stop:
        if not stop.args:
            stop.args = folder, False
        raise
    except Terminated as stop:
        if stop.folder is None:
            stop.folder, stop.saved = folder, False
        raise


class Interruption:
    """Context that only records Ctrl-C, SIGTERM and SIGHUP, so that an iteration is finished first.

    The context can be entered repeatedly, even nested. Outside of it, signals have their usual
    effect. A second Ctrl-C raises at once, except within :meth:`unbroken`. A handler that the user
    has set for SIGTERM or SIGHUP is kept, and ``nohup``'s too. Several ranks stop after the same
    iteration.

    Args:
        ranks (SingleProcess, optional): the ranks of the run.

    Attributes:
        stop_requested (bool): whether a signal has arrived. With several ranks: whether one had
            arrived at any rank by the last call of :meth:`agree`.

    Examples:
        >>> with Interruption() as interruption:
        ...     interruption.stop_requested
        False
    """

    def __init__(self, ranks: SingleProcess | None = None) -> None:
        self._ranks = None if ranks is None or ranks.size == 1 else ranks
        self._signal_number: int | None = None
        self._agreed_signal: int | None = None
        self._depth = self._unbroken_depth = 0

    @property
    def stop_requested(self) -> bool:
        return (self._signal_number if self._ranks is None else self._agreed_signal) is not None

    @property
    def entered(self) -> bool:
        """Returns whether the program is now inside this context."""
        return self._depth > 0

    def __enter__(self) -> Interruption:
        self._depth += 1
        if self._depth == 1 and _in_main_thread():
            _active_interruptions.append(self)
            _catch_signals()
        return self

    def __exit__(self, *exception: object) -> None:
        self._depth -= 1
        if self._depth == 0:
            with contextlib.suppress(ValueError):  # entered by another thread
                _active_interruptions.remove(self)
            if not _active_interruptions and _in_main_thread():
                _release_signals()

    @contextlib.contextmanager
    def unbroken(self) -> Iterator[None]:
        """Enters the context, and also delays a second Ctrl-C."""
        with self:
            self._unbroken_depth += 1
            try:
                yield
            finally:
                self._unbroken_depth -= 1

    def agree(self) -> None:
        """Decides with the other ranks whether to stop."""
        if self._ranks is not None:
            self._agreed_signal = max(self._ranks.all_gather(self._signal_number or 0)) or None

    def handle_signal(self, folder: Path) -> None:
        """Raises and clears the recorded interruption; all ranks raise the same one.

        Args:
            folder (Path): folder of the run, which can be resumed.

        Raises:
            KeyboardInterrupt: after Ctrl-C.
            Terminated: after SIGTERM or SIGHUP.
        """
        number = self._signal_number if self._ranks is None else self._agreed_signal
        self._signal_number = self._agreed_signal = None
        if number == signal.SIGINT:
            raise KeyboardInterrupt(folder)
        if number is not None:
            raise Terminated(folder, number)

    def _record_signal(self, number: int) -> None:
        if number == _HANGUP:
            _discard_output_if_closed()
        if self._signal_number is None:
            self._signal_number = number
            # ``torchrun`` forwards the terminal's Ctrl-C, so ranks receive it twice.
            hint = "; press Ctrl-C again to stop at once" if self._ranks is None else ""
            said = (
                (f" ({signal.Signals(number).name})", "")
                if number in _TERMINATION_SIGNALS
                else ("", hint)
            )
            print(_STOP_MESSAGE.format(*said), file=sys.stderr)
        elif number == signal.SIGINT and not self._unbroken_depth and self._ranks is None:
            # A second SIGTERM does not raise, since process managers send it to whole groups.
            raise KeyboardInterrupt


@contextlib.contextmanager
def terminable() -> Iterator[None]:
    """Context in which SIGTERM and SIGHUP raise :class:`Terminated`."""
    before = {}
    for number in _TERMINATION_SIGNALS if _in_main_thread() else ():
        handler = signal.getsignal(number)
        if handler is not _raise_terminated and _may_replace(handler):
            before[number] = signal.signal(number, _raise_terminated)
    try:
        yield
    finally:
        for number, handler in before.items() if _in_main_thread() else ():
            if signal.getsignal(number) is _raise_terminated:
                signal.signal(number, handler)


def _may_replace(handler: Any) -> bool:
    """Returns whether a handler of SIGTERM or SIGHUP is not the user's own, nor ``nohup``'s.

    TorchRL sets a handler of SIGTERM when a memory-mapped storage is made. The handler deletes
    temporary files and ends the process; at Python's exit these files are deleted as well.
    """
    module = getattr(handler, "__module__", None) or ""
    return handler in (signal.SIG_DFL, _raise_terminated) or module.partition(".")[0] == "torchrl"


def _raise_terminated(number: int, frame: FrameType | None) -> NoReturn:
    if number == _HANGUP:
        _discard_output_if_closed()
    raise Terminated(number=number)


def _discard_output_if_closed() -> None:
    """Discards all further output if the terminal is closed, where writing raises an error."""
    for stream in (1, 2):  # stdout and stderr
        try:
            os.write(stream, b"")
        except OSError:
            with contextlib.suppress(OSError):
                os.dup2(os.open(os.devnull, os.O_WRONLY), stream)


def _catch_signals() -> None:
    for number in (signal.SIGINT, *_TERMINATION_SIGNALS):
        handler = signal.getsignal(number)
        if handler is _on_signal:
            continue
        if number == signal.SIGINT or _may_replace(handler):
            _replaced_handlers[number] = signal.signal(number, _on_signal)


def _release_signals() -> None:
    while _replaced_handlers:
        number, handler = _replaced_handlers.popitem()
        if signal.getsignal(number) is _on_signal:
            signal.signal(number, handler)


def _on_signal(number: int, frame: FrameType | None) -> None:
    if _active_interruptions:
        _active_interruptions[-1]._record_signal(number)
    else:  # left by another thread, which cannot set handlers, or set again by other code
        _release_signals()
        if signal.getsignal(number) is _on_signal:
            ends = signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL
            signal.signal(number, ends)
        signal.raise_signal(number)


def _in_main_thread() -> bool:
    return threading.current_thread() is threading.main_thread()
