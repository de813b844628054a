"""Callbacks: your code that a run calls after its batches, updates, evaluations and checkpoints.

Shapes: P members of a population, E envs of a member, T steps.
"""

from __future__ import annotations

import contextlib
import shlex
import traceback
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from tensordict import TensorDictBase
from torch import Tensor

from torchrl_marl.envs.external_code import import_own
from torchrl_marl.errors import CallbackError, ConfigError, UserError, nearest, quoted
from torchrl_marl.runtime.random_state import RandomState, offset_seed
from torchrl_marl.runtime.ranks import SINGLE_PROCESS, SingleProcess
from torchrl_marl.training.changes import change, changeable_settings
from torchrl_marl.training.checkpoint import all_checkpoints
from torchrl_marl.training.config import TrainConfig
from torchrl_marl.training.messages import print_message
from torchrl_marl.training.part import Part
from torchrl_marl.training.progress import summary_entries

if TYPE_CHECKING:
    from torchrl_marl.training.training import Training

__all__ = ["Callback", "Callbacks", "Control", "callbacks_of", "names_of"]

Found = Mapping[str, float | Tensor] | None
"""Metrics that a callback returns: name -> number, or in a population a tensor ``[P]``."""
_OBJECT_PREFIX = "<object>:"
_RESERVED_METRICS = ("iteration", "frames", "agent_frames", "seconds", "frames_per_second")


class Callback:
    """Base class of callbacks; every method does nothing, and a subclass overrides some.

    The metrics that a method returns go to the tables and loggers of the run. Those of ``on_batch``
    and ``on_update`` go to ``metrics.csv``, those of ``on_evaluation`` to ``evaluation.csv``, and
    those of ``on_end`` to ``summary.json``. In a population, a metric is one number for all
    members, or a tensor ``[P]``.

    Examples:
        >>> class Patience(Callback):
        ...     best, failures = float("-inf"), 0
        ...     def on_evaluation(self, control, result):
        ...         better = result["return_mean"] > self.best
        ...         self.failures = 0 if better else self.failures + 1
        ...         self.best = max(self.best, result["return_mean"])
        ...         if self.failures == 3:
        ...             control.stop("three evaluations without a better return")
        ...     def state_dict(self):
        ...         return {"best": self.best, "failures": self.failures}
        ...     def load_state_dict(self, state):
        ...         self.best, self.failures = state["best"], state["failures"]
    """

    def on_batch(self, control: Control, batch: TensorDictBase) -> Found:
        """Called after a batch is collected, before the update.

        Args:
            control (Control): the run.
            batch (TensorDictBase): the batch, ``[E, T]``; ``[P * E, T]`` in a population.
        """
        return None

    def on_update(self, control: Control, batch: TensorDictBase, metrics: dict[str, Any]) -> Found:
        """Called after the update, before the row of ``metrics.csv`` is written.

        Args:
            control (Control): the run.
            batch (TensorDictBase): the batch, with what the learners have added.
            metrics (dict): metrics of the iteration so far, such as ``agents/episode_reward``;
                numbers, in a population tensors ``[P]``.
        """
        return None

    def on_evaluation(self, control: Control, result: Any) -> Found:
        """Called after each evaluation, including those before and after training.

        Args:
            control (Control): the run.
            result (dict): the evaluation, such as ``return_mean``; in a population a list of them,
                one for each member.
        """
        return None

    def on_checkpoint(self, control: Control, path: Path) -> None:
        """Called after a checkpoint is written; must not change the callback's own state.

        Args:
            control (Control): the run.
            path (Path): file of the checkpoint.
        """

    def on_end(self, control: Control) -> Found:
        """Called once at the end of the run, after its last evaluation.

        The summary and the last checkpoint are written afterwards.

        Args:
            control (Control): the run.
        """
        return None

    def state_dict(self) -> dict[str, Any]:
        """Returns the state for checkpoints: tensors, numbers, strings, and containers of them."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restores a saved state, when a run is resumed."""


class Control:
    """Handle of a run, which callbacks receive."""

    def __init__(self, part: Callbacks, training: Training) -> None:
        self._part, self._training = part, training
        self.found: dict[str, Any] = {}

    @property
    def run(self) -> Any:
        """The run, with ``run.evaluate()``, ``run.folder`` and ``run.summary``."""
        return self._training.run

    @property
    def config(self) -> TrainConfig:
        """Settings of the run."""
        return self._training.config

    @property
    def iteration(self) -> int:
        """Number of finished iterations; in ``on_batch`` without the current one."""
        return self._training.iteration

    @property
    def frames(self) -> int:
        """Number of environment steps so far."""
        return self._training.frames

    @property
    def settings(self) -> dict[str, Any]:
        """Settings that :meth:`change` accepts, with their values in the first group."""
        return self._part.settings

    def log(self, name: str, value: float | Tensor) -> None:
        """Adds a metric, as if the method had returned it."""
        self.found[name] = value

    def stop(self, reason: str) -> None:
        """Ends the run after this iteration; the summary gets the reason as ``stopped``."""
        self._part.stopped = self._part.stopped or f"{self._part.calling}: {reason}"

    def change(self, name: str, value: float | Tensor) -> None:
        """Changes a setting of the learners of all groups that have it, from the next update on.

        Args:
            name (str): one of the names in ``settings``, such as ``"lr"``.
            value (float or Tensor): new value; in a population also a tensor ``[P]``.

        Raises:
            ConfigError: the setting cannot change within a run, or the value is out of range.
        """
        self._part.change({name: value})


def names_of(callbacks: Any) -> list[str]:
    """Returns callbacks as the setting ``callbacks`` names them: objects as ``<object>:Class``.

    Args:
        callbacks (sequence of Callback or str): the callbacks.

    Raises:
        ConfigError: an element is neither an object nor a name.

    Examples:
        >>> names_of(["mine:Patience", Callback()])
        ['mine:Patience', '<object>:Callback']
    """
    if isinstance(callbacks, (str, Callback)):
        callbacks = [callbacks]
    for one in callbacks:
        if not isinstance(one, (str, Callback)):
            raise ConfigError(
                f"callbacks holds {quoted(one)}, expected objects of a subclass of "
                "torchrl_marl.Callback, or their names as module:Class."
            )
    return [x if isinstance(x, str) else f"{_OBJECT_PREFIX}{type(x).__name__}" for x in callbacks]


def callbacks_of(config: TrainConfig, given: Sequence[Any]) -> list[Callback]:
    """Returns the callbacks that the settings name; imports and makes those that are not given.

    Args:
        config (TrainConfig): config of the run.
        given (sequence of Callback or str): the callbacks from the caller; strings are ignored.

    Raises:
        ConfigError: an object is not given, or a class does not make a callback.
    """
    given = [given] if isinstance(given, (str, Callback)) else given
    objects = [one for one in given if isinstance(one, Callback)]
    missing = [one for one in config.callbacks if one.startswith(_OBJECT_PREFIX)][len(objects) :]
    if missing:
        raise ConfigError(
            f"callbacks holds {quoted(missing[0])}, an object that was given from Python; pass it "
            "again: torchrl_marl.resume(folder, callbacks=[...])."
        )
    own = iter(objects)
    return [
        next(own) if x.startswith(_OBJECT_PREFIX) else _make_callback(x) for x in config.callbacks
    ]


def _make_callback(name: str) -> Callback:
    make = import_own(name, "callbacks")
    try:
        found = make()
    except Exception as error:
        why = " ".join(f"{type(error).__name__}: {error}".split())
        raise ConfigError(
            f"callbacks holds {quoted(name)}, which cannot be made without arguments ({why}); give "
            "its arguments defaults, or pass an object: train(..., callbacks=[...])."
        ) from error
    if not isinstance(found, Callback):
        raise ConfigError(
            f"callbacks holds {quoted(name)}, which makes a {type(found).__name__}, expected a "
            "subclass of torchrl_marl.Callback."
        )
    return found


class Callbacks(Part):
    """The callbacks of a run.

    They run in the main process, with several ranks on the first one. Their random numbers are
    separate from those of the training.

    Args:
        config (TrainConfig): config of the run.
        results (RunResults or Population): writer of tables, evaluations and summaries.
        learners (sequence of Learner): learners of all groups.
        ranks (SingleProcess): the ranks of the run.
        callbacks (sequence of Callback): the callbacks, in the order of the calls; ranks other than
            the first ignore them.

    Attributes:
        stopped (str, optional): why a callback has ended the run.
        calling (str): name of the callback that is called.
    """

    def __init__(
        self,
        config: TrainConfig,
        results: Any,
        learners: Sequence[Any],
        ranks: SingleProcess,
        callbacks: Sequence[Callback],
    ) -> None:
        self.results, self.learners, self.ranks = results, learners, ranks
        self.callbacks = list(callbacks) if ranks.rank == 0 else []
        self.n_members = config.population.size
        self.stopped: str | None = None
        self.calling = ""
        self._changed: dict[str, Any] = {}
        self._logged: dict[str, Any] = {}  # by on_batch, for the row of the iteration
        self._in_summary: list[str] = []  # entries that on_end has added
        self._random = RandomState(offset_seed(config.seed), config.device)

    @property
    def done(self) -> bool:
        """True if a callback has ended the run."""
        return self.stopped is not None

    @property
    def settings(self) -> dict[str, Any]:
        """Settings that may change within the run, with their values."""
        found: dict[str, Any] = {}
        for learner in reversed(self.learners):
            found |= changeable_settings(learner)
        return found

    def open(self, iteration: int) -> None:
        """Lets later rows add columns to the tables."""
        self.results.allow_new_columns()

    def extend(self) -> None:
        """Continues a run that a callback has ended."""
        self.stopped = None
        self.results.run.summary.pop("stopped", None)

    # ----------------------------------------------------------------------------------- calls

    def collect(self, training: Training, batch: TensorDictBase) -> None:
        """Calls ``on_batch``."""
        self._logged = self._call_all(training, "on_batch", batch)

    def measure(
        self, training: Training, batch: TensorDictBase, values: Sequence[dict[str, Any]]
    ) -> None:
        """Calls ``on_update``, and adds metrics to those of each member."""
        metrics = dict(values[0])
        if self.n_members > 1:
            metrics = {name: torch.tensor([own[name] for own in values]) for name in metrics}
        found = self._logged | self._call_all(training, "on_update", batch, metrics)
        self.results.own_metrics = list(found)
        self._add_metrics(found, values, _RESERVED_METRICS)

    def evaluated(self, training: Training, results: Sequence[dict[str, Any]]) -> None:
        """Calls ``on_evaluation``, and adds metrics to the results of each member."""
        given = [dict(own) for own in results]
        found = self._call_all(training, "on_evaluation", given if self.n_members > 1 else given[0])
        self._add_metrics(found, results, _RESERVED_METRICS)

    def saved(self, training: Training) -> None:
        """Calls ``on_checkpoint``."""
        found = self._call_all(training, "on_checkpoint", *all_checkpoints(training.folder)[-1:])
        for name in found:
            raise ConfigError(
                f"a callback logs {quoted(name)} in on_checkpoint, which writes no row; log it in "
                "on_update."
            )

    def end(self, training: Training) -> None:
        """Calls ``on_end``, and adds metrics and the reason of an early end to the summary."""
        summary = self.results.run.summary
        entries: list[dict[str, Any]] = [{} for _ in range(self.n_members)]
        found = self._call_all(training, "on_end")
        of_run = {*summary, *summary_entries(training.config, 0, 0), "stopped"}
        self._add_metrics(found, entries, of_run - {*self._in_summary})
        self.results.add_to_summary(entries)
        self._in_summary = list(found)
        if self.stopped is not None:
            summary["stopped"] = self.stopped
            print_message(f"ends after {training.frames:,} frames: {self.stopped}")

    def _call_all(self, training: Training, method: str, *given: Any) -> dict[str, Any]:
        """Calls a method of all callbacks, on the first rank; returns the logged metrics."""
        found: dict[str, Any] = {}
        with self.ranks.rank_zero_first(), SINGLE_PROCESS.active(), self._random.active():
            for callback in self.callbacks:
                control = Control(self, training)
                with self._report_errors(callback, method, training):
                    returned = getattr(callback, method)(control, *given)
                    control.found |= {} if returned is None else returned
                    found |= {k: self._values_per_member(k, x) for k, x in control.found.items()}
        if self.ranks.size > 1:
            self._take_decisions_from_rank_zero()
        return found

    def _take_decisions_from_rank_zero(self) -> None:
        """Takes over the first rank's decisions."""
        self.stopped, changed = self.ranks.broadcast((self.stopped, self._changed))
        if self.ranks.rank and changed != self._changed:
            self.change(changed)

    @contextlib.contextmanager
    def _report_errors(
        self, callback: Callback, method: str, training: Training | None = None
    ) -> Iterator[None]:
        """Context in which an error of a callback becomes a message of one sentence."""
        self.calling = type(callback).__name__
        try:
            yield
        except Exception as error:
            self._raise_callback_error(error, method, training)

    def _raise_callback_error(
        self, error: Exception, method: str, training: Training | None
    ) -> NoReturn:
        frame = traceback.extract_tb(error.__traceback__)[-1]
        where = f" ({Path(frame.filename).name}, line {frame.lineno})"
        if isinstance(error, UserError):
            why, where = str(error).rstrip("."), ""
        else:
            why = " ".join(f"{type(error).__name__}: {error}".split())
        when = "" if training is None else f" after {training.frames:,} frames"
        raise CallbackError(
            f"callback {self.calling} failed in {method}{when}: {why}{where}; fix it, "
            f"and {self._resume_hint()}."
        ) from error

    def _resume_hint(self) -> str:
        folder = self.results.run.folder
        saved = all_checkpoints(folder)
        if not saved:
            return "start the run again"
        resume = f"torchrl-marl train --resume {shlex.quote(str(folder))}"
        return f"resume the run from {saved[-1].name}: {resume}"

    # --------------------------------------------------------------------------------- metrics

    def _values_per_member(self, name: str, value: Any) -> list[float]:
        """Returns a metric's value for each member."""
        try:
            values = torch.as_tensor(value, dtype=torch.float64).detach().cpu()
            return values.reshape(-1).expand(self.n_members).tolist()
        except (TypeError, ValueError, RuntimeError):
            pass
        several = f", or a tensor [{self.n_members}]" if self.n_members > 1 else ""
        raise ConfigError(f"metric {quoted(name)} is {quoted(value)}, expected a number{several}.")

    def _add_metrics(
        self, found: Mapping[str, list[float]], rows: Sequence[dict[str, Any]], known: Iterable[str]
    ) -> None:
        """Adds metrics to the rows of the members.

        Raises:
            ConfigError: a metric has the name of one of the run's.
        """
        taken = {*known, *rows[0]}
        for name, values in found.items():
            if name in taken:
                raise ConfigError(
                    f"a callback logs {quoted(name)}, which is the name of a metric of the run; "
                    f"choose another name, such as 'callback/{name}'."
                )
            for row, value in zip(rows, values):
                row[name] = value

    # -------------------------------------------------------------------------------- settings

    def change(self, settings: Mapping[str, Any]) -> None:
        """Changes settings of the learners of all groups that have them.

        Args:
            settings (mapping): name -> number; in a population also a tensor ``[P]``.

        Raises:
            ConfigError: a setting cannot change within a run, or a value is out of range.
        """
        for name, value in settings.items():
            known = self.settings
            if name not in known:
                raise ConfigError(
                    f"learner.{name} cannot change within a run; "
                    f"{nearest(name, known)}expected one of {', '.join(known) or 'none'}."
                )
            for learner in self.learners:
                if name in changeable_settings(learner):
                    change(learner, name, value)
            self._changed[name] = _detached(value)
        if self.n_members > 1:
            self.results.record_changed_settings({name: self.settings[name] for name in settings})

    # ----------------------------------------------------------------------------------- state

    def state_dict(self) -> dict[str, Any]:
        """Returns the state for a checkpoint."""
        own = []
        with self._random.active():
            for callback in self.callbacks:
                with self._report_errors(callback, "state_dict"):
                    state = callback.state_dict()
                    _check_state(state)
                    own.append(state)
        return {
            "own": own,
            "stopped": self.stopped,
            "changed": self._changed,
            "in_summary": self._in_summary,
            "random": self._random.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores a saved state."""
        self.stopped, self._in_summary = state["stopped"], list(state["in_summary"])
        self._random.load_state_dict(state["random"])
        self.change(state["changed"])
        with self._random.active():
            for callback, own in zip(self.callbacks, state["own"]):
                with self._report_errors(callback, "load_state_dict"):
                    callback.load_state_dict(own)


def _detached(value: Any) -> Any:
    return value.detach().cpu().clone() if isinstance(value, Tensor) else float(value)


def _check_state(state: Any, at: str = "") -> None:
    """Refuses a state that checkpoints cannot hold.

    Raises:
        ConfigError: an entry is neither a tensor, a number, a string nor a container of them.
    """
    items: Iterable[tuple[Any, Any]] = ()
    if isinstance(state, Mapping):
        items = state.items()
    elif isinstance(state, (list, tuple, set)):
        items = enumerate(state)
    elif type(state) not in (int, float, bool, str, bytes, type(None)) and not isinstance(
        state, Tensor
    ):
        raise ConfigError(
            f"the state holds a {type(state).__name__}{f' at {at}' if at else ''}, expected "
            "tensors, numbers, strings, and lists and dicts of them"
        )
    for key, value in items:
        _check_state(value, f"{at}.{key}".lstrip("."))
