"""What a report keeps of a run: its returns over frames, agent frames and seconds.

Shapes: K measured points.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from torchrl_marl.curves import Curves

__all__ = ["REWARD", "Progress", "Record", "record_of", "without_copies"]

Numbers = NDArray[np.float64]
REWARD = "/episode_reward"
"""How columns of a group's returns end."""


@dataclass(frozen=True)
class Progress:
    """Returns measured in the course of a training, ``[K]`` each; agent frames may be NaN."""

    frames: Numbers
    agent_frames: Numbers
    seconds: Numbers
    returns: Numbers

    def __len__(self) -> int:
        return len(self.frames)

    @property
    def end(self) -> float:
        """Frames of the last measurement."""
        return float(self.frames[-1])

    def at(self, frames: float) -> int | None:
        """Returns the place of the measurement nearest to some frames; None if not within 10 %."""
        place = int(np.abs(self.frames - frames).argmin())
        return place if abs(self.frames[place] - frames) <= 0.1 * frames else None


@dataclass(frozen=True)
class Record:
    """A run, as a report needs it."""

    run: Curves
    evaluation: Progress
    training: Progress
    finished: bool
    notes: tuple[str, ...]
    """Sentences on what is unlike other runs, without their subject."""

    @property
    def measured(self) -> Progress:
        """Evaluations; the returns of training where there are none."""
        return self.evaluation if len(self.evaluation) else self.training

    @property
    def is_evaluated(self) -> bool:
        """Whether :attr:`measured` is evaluations."""
        return bool(len(self.evaluation))

    @property
    def name(self) -> str:
        """The run folder, as it was given."""
        return str(self.run.folder)

    @property
    def frames(self) -> int:
        """Frames it was trained for."""
        tables = (self.run.training, self.run.evaluation)
        return int(max(table["frames"][-1] for table in tables if len(table.get("frames", ()))))

    @property
    def total_frames(self) -> int:
        """Frames it was meant to be trained for."""
        return int(self.run.settings.get("total_frames", 0))

    def summarized(self, key: str) -> float | None:
        """Returns a finite figure of ``summary.json``, or None."""
        value = self.run.summary.get(key)
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            return None
        return float(value) if np.isfinite(value) else None


def record_of(run: Curves) -> Record | str:
    """Reads the returns out of a run's tables.

    Args:
        run (Curves): of :func:`~torchrl_marl.curves.read_run`.

    Returns:
        Record or str: or a sentence that says why there is nothing to report.
    """
    notes = list(run.notes)
    evaluation, broken = _progress(run, run.evaluation.get("return_mean"), run.evaluation)
    training, diverged = _progress(run, _training_returns(run), run.training)
    if broken is not None and not len(evaluation):
        return (
            f"{str(run.folder)!r} has a return that is no finite number at its first evaluation, "
            f"frame {broken:,}, and so no score; train it anew."
        )
    if broken is not None:
        notes.append(f"has a return that is no finite number at frame {broken:,}; used up to there")
    notes += [f"has a half last line in {name}, which is not used" for name in run.cut]
    if not len(evaluation) and not len(training):
        return (
            f"{str(run.folder)!r} has no finite return yet; "
            "wait until an episode has ended or an evaluation is done."
        )
    if not len(evaluation):
        notes.append("has no evaluations; returns are those of training episodes")
    finished = _is_finished(run)
    found = Record(run, evaluation, training, finished, ())
    if not finished:
        of = f" of {found.total_frames:,}" if found.total_frames > found.frames else ""
        notes.insert(0, f"has not finished; used up to frame {found.frames:,}{of}")
    if run.settings and len(evaluation) and np.isnan(evaluation.agent_frames[-1]):
        known = run.training.get("frames", np.empty(0))
        end = f"ends at frame {known[-1]:,.0f}" if len(known) else "has no row"
        notes.append(f"has a metrics.csv that {end}; agent frames of later evaluations are unknown")
    return Record(run, evaluation, training, finished, tuple(notes))


def without_copies(records: Sequence[Record]) -> tuple[list[Record], list[str]]:
    """Leaves out runs with the settings, the seed and every number of another.

    Args:
        records (list of Record): the runs.

    Returns:
        tuple: the others, and a sentence for each that is left out.
    """
    first: dict[tuple[object, ...], Record] = {}
    left_out = []
    for record in records:
        run = record.run
        settings = tuple(sorted((key, str(value)) for key, value in run.settings.items()))
        tables = _content(run.training), _content(run.evaluation)
        one = first.setdefault((run.seed, settings, tables), record)
        if one is not record:
            left_out.append(
                f"{record.name!r} has the settings, the seed and every number of {one.name!r}; "
                "the two are one run, and count once."
            )
    return list(first.values()), left_out


def _content(table: dict[str, Numbers]) -> tuple[tuple[str, bytes], ...]:
    """A table's numbers, but for the times it took."""
    return tuple((name, x.tobytes()) for name, x in table.items() if "second" not in name)


def _progress(
    run: Curves, returns: Numbers | None, table: dict[str, Numbers]
) -> tuple[Progress, int | None]:
    """Returns what was measured up to the first return of no sense, and that one's frames.

    Rows of training in which no episode ended hold NaN, and are left out.
    """
    nothing = Progress(*(np.empty(0),) * 4)
    if returns is None or not len(returns):
        return nothing, None
    frames, broken = table["frames"], None
    of_evaluation = table is run.evaluation
    bad = ~np.isfinite(returns) if of_evaluation else np.isinf(returns)
    if bad.any():
        first = int(bad.argmax())
        broken = int(np.nan_to_num(frames[first]))
        returns, frames = returns[:first], frames[:first]
    known = np.isfinite(returns) & np.isfinite(frames)
    if not known.any():
        return nothing, broken
    frames, returns = frames[known], returns[known]
    agent_frames, seconds = (
        table[name][: len(known)][known] if name in table else _over_frames(run, name, frames)
        for name in ("agent_frames", "seconds")
    )
    return Progress(frames, agent_frames, seconds, returns), broken


def _over_frames(run: Curves, column: str, frames: Numbers) -> Numbers:
    """Returns a counter of ``metrics.csv`` at some frames; NaN where there is none."""
    table = run.training
    if column not in table or not len(table["frames"]):
        return np.where(frames == 0, 0.0, np.nan)
    x, y = np.append(0.0, table["frames"]), np.append(0.0, table[column])
    return np.interp(frames, x, y, right=np.nan)


def _training_returns(run: Curves) -> Numbers | None:
    """Returns training's returns of a world of one group.

    Of several groups it is not known how many agents each has.
    """
    columns = [name for name in run.training if name.endswith(REWARD)]
    return run.training[columns[0]] if len(columns) == 1 else None


def _is_finished(run: Curves) -> bool:
    """Whether the run has ended; a run that goes on has more frames than its summary."""
    frames = run.summary.get("frames")
    trained = run.training.get("frames", np.empty(0))
    return isinstance(frames, (int, float)) and (not len(trained) or trained[-1] <= frames)
