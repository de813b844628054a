"""Progress and results of a suite."""

from __future__ import annotations

import csv
import json
import math
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from tqdm import tqdm

from torchrl_marl.apps.console import align_columns, number
from torchrl_marl.apps.suites.plan import Pace, Pair, SuiteRun, format_duration, seconds_left
from torchrl_marl.training.files import frames_of, open_atomically

__all__ = [
    "Board",
    "Result",
    "known_values",
    "read_elapsed",
    "read_result",
    "read_rows",
    "results_table",
    "write_results",
]


class Board:
    """Progress of all runs of a suite.

    Args:
        results (dict): folder of a run -> current result; the caller keeps the dict up to date.
        jobs (int): number of concurrent runs.
        log (callable): called with a line for each run that has ended.
        bar (bool): True to show a progress bar on a terminal.
    """

    def __init__(
        self,
        results: Mapping[Path, Result],
        jobs: int,
        log: Callable[[str], None] = print,
        *,
        bar: bool = True,
    ) -> None:
        self._results, self._jobs, self._log = results, jobs, log
        # Start time, frames at the start, and number of runs of the same program.
        self._running: dict[Path, tuple[float, int, int]] = {}
        self._frames = {place: self._current_frames(place) for place in results}
        self._bar = tqdm(
            desc=f"{len(results)} runs",
            total=sum(self._total_frames(place) for place in results),
            initial=sum(self._frames.values()),
            unit=" frames",
            unit_scale=True,
            dynamic_ncols=True,
            file=sys.stderr,
            disable=None if bar else True,  # None: no bar without a terminal
        )

    def _total_frames(self, place: Path) -> int:
        return self._results[place].run.config.total_frames

    def _current_frames(self, place: Path) -> int:
        result = self._results[place]
        total = self._total_frames(place)
        return total if result.finished else min(total, frames_of(result.folder))

    def began(self, *places: Path) -> None:
        """Records the start of a run, or of runs that are one program."""
        for place in places:
            self._running[place] = time.monotonic(), self._frames[place], len(places)

    def show(self, working: Iterable[Path]) -> None:
        """Updates the bar with the progress of the runs that are training."""
        for place in working:
            self._frames[place] = self._current_frames(place)
        self._bar.update(sum(self._frames.values()) - self._bar.n)
        self._bar.set_postfix_str(self._forecast())

    def ended(self, place: Path) -> None:
        """Records the end of a run and logs a line about it."""
        self._running.pop(place, None)
        self._frames[place] = self._current_frames(place)
        result = self._results[place]
        name = f"{result.run.task} {result.run.algorithm} seed {result.run.seed}"
        if result.finished:
            reached = number(result.summary.get("return_after"))
            frames = number(int(result.summary["frames"]))
            text = f"return {reached}, {frames} frames in {format_duration(result.elapsed)}"
        else:
            text = result.state + (f": {result.error}" if result.error else "")
        with tqdm.external_write_mode(file=sys.stderr):
            self._log(f"{name}: {text} ({self._forecast()})")

    def close(self) -> None:
        """Closes the bar."""
        self._bar.close()

    def _forecast(self) -> str:
        ended = sum(one.state in ("finished", "failed") for one in self._results.values())
        left = self.seconds_left()
        soon = "" if not left else f", {format_duration(left)} to go"
        return f"{ended} of {len(self._results)} runs{soon}"

    def seconds_left(self) -> float | None:
        """Returns the estimated seconds until all runs have ended, or None without any data."""
        paces: dict[Pair, Pace] = {}
        now = time.monotonic()
        for place, result in self._results.items():
            pace = Pace()
            if result.finished:
                seconds = result.elapsed or float(result.summary.get("seconds") or 0)
                pace = Pace(self._total_frames(place), seconds)
            elif place in self._running:
                began, frames, together = self._running[place]
                pace = Pace(self._frames[place] - frames, (now - began) / together)
            if pace.frames > 0:
                paces[result.run.pair] = paces.get(result.run.pair, Pace()) + pace
        states = ("failed", "finished")
        waiting = [p for p, one in self._results.items() if one.state not in states]
        waiting.sort(key=lambda place: place not in self._running)
        left = [
            (self._results[p].run.pair, self._total_frames(p) - self._frames[p]) for p in waiting
        ]
        return seconds_left(left, paces, self._jobs)


_SUMMARY_KEYS = ["return_before", "return_random", "return_after", "frames", "seconds"]
_COLUMNS = ["task", "algorithm", "seed", "state", *_SUMMARY_KEYS, "elapsed", "folder"]


@dataclass(frozen=True)
class Result:
    """State and result of one run of a suite.

    Attributes:
        run (SuiteRun): the run.
        folder (Path): folder of the run.
        state (str): ``finished``, ``failed``, ``stopped``, ``begun`` or ``waiting``.
        summary (dict): content of ``summary.json``; empty unless the run has finished.
        elapsed (float): total duration of the run in seconds, not only of training.
        error (str): error message of a failed run.
    """

    run: SuiteRun
    folder: Path
    state: str
    summary: dict[str, Any]
    elapsed: float = 0.0
    error: str = ""

    @property
    def finished(self) -> bool:
        """True if the run has finished."""
        return self.state == "finished"


def read_result(out: Path, run: SuiteRun, elapsed: float = 0.0) -> Result:
    """Reads a run's result from its folder; the run must not be in training."""
    folder = out / run.place
    try:
        summary = json.loads((folder / "summary.json").read_text(encoding="utf-8"))
        finished = isinstance(summary, dict) and _is_complete(summary)
    except (OSError, ValueError):
        finished = False
    if finished:
        return Result(run, folder, "finished", summary, elapsed)
    begun = (folder / "config.yaml").is_file()
    return Result(run, folder, "begun" if begun else "waiting", {}, elapsed)


def _is_complete(summary: Mapping[str, Any]) -> bool:
    """Returns whether a summary has the frames, and numbers (NaN as null) where it has results."""
    numbers = [summary.get(key) for key in _SUMMARY_KEYS]
    return "frames" in summary and all(x is None or isinstance(x, (int, float)) for x in numbers)


def write_results(
    out: Path,
    results: Iterable[Result],
    before: Mapping[str, Mapping[str, Any]] = MappingProxyType({}),
) -> None:
    """Writes ``results.csv``, with a row for each run.

    Args:
        out (Path): output folder.
        results (iterable of Result): results of the runs.
        before (mapping): run folder -> row of an earlier call, kept where there is no new one.

    Raises:
        WriteError: the disk is full, or the folder is read-only.
    """
    rows = {**before, **{one.run.place.as_posix(): _result_row(one) for one in results}}
    with open_atomically(out / "results.csv", newline="") as file:
        writer = csv.DictWriter(file, _COLUMNS, extrasaction="ignore")
        writer.writeheader()
        writer.writerows(rows.values())


def _result_row(one: Result) -> dict[str, Any]:
    run = one.run
    own = {key: one.summary.get(key) for key in _SUMMARY_KEYS}
    own |= {"task": run.task, "algorithm": run.algorithm, "seed": run.seed}
    own |= {"state": one.state, "elapsed": round(one.elapsed, 2)}
    return {**own, "folder": run.place.as_posix()}


def read_rows(out: Path) -> dict[str, dict[str, str]]:
    """Reads the rows of ``results.csv`` by run folder, without ended runs whose folder is gone."""
    try:
        with (out / "results.csv").open(newline="", encoding="utf-8") as file:
            rows = {row["folder"]: row for row in csv.DictReader(file)}
            return {
                folder: row
                for folder, row in rows.items()
                if row["state"] in ("waiting", "begun") or (out / folder).is_dir()
            }
    except (OSError, ValueError, KeyError, TypeError, csv.Error):
        return {}


def read_elapsed(out: Path) -> dict[str, float]:
    """Reads from ``results.csv`` how many seconds each run has taken so far, by run folder."""
    try:
        return {folder: float(row["elapsed"] or 0) for folder, row in read_rows(out).items()}
    except (ValueError, KeyError):
        return {}


def results_table(results: Sequence[Result], names: tuple[str, str] = ("task", "algorithm")) -> str:
    """Formats a table of results: for each task and algorithm, mean and range over the seeds.

    Args:
        results (sequence of Result): results of the runs.
        names (tuple of str): heads of the first two columns.
    """
    heads = [*names, "seeds", "return", "least to most", "random", "frames", "seconds"]
    rows = [heads]
    for pair in dict.fromkeys(one.run.pair for one in results):
        own = [one for one in results if one.run.pair == pair]
        done = [one.summary for one in own if one.finished]
        ends = [end for end in known_values(done, "return_after") if math.isfinite(end)]
        spread = f"{number(min(ends))} to {number(max(ends))}" if ends else "-"
        cells = [_mean_text(done, key) for key in ("return_random", "frames", "seconds")]
        seeds = f"{len(done)} of {len(own)}"
        rows.append([*pair, seeds, _mean_text(done, "return_after"), spread, *cells])
    return align_columns(rows, slice(2, None), indent="")


def known_values(summaries: Iterable[Mapping[str, Any]], key: str) -> list[float]:
    """Returns an entry of the runs' summaries; empty if no run has it.

    ``summary.json`` has null for NaN. Beside runs with a number, such a run has diverged.

    Examples:
        >>> known_values([{"return_after": 1.0}, {"return_after": None}], "return_after")
        [1.0, nan]
        >>> known_values([{"return_after": None}], "return_after")
        []
    """
    found = [one[key] for one in summaries if key in one]
    if not any(isinstance(value, (int, float)) for value in found):
        return []
    return [math.nan if value is None else value for value in found]


def _mean_text(summaries: Iterable[dict[str, Any]], key: str) -> str:
    values = known_values(summaries, key)
    if not values:
        return "-"
    mean = statistics.fmean(values)
    return number(round(mean)) if key == "frames" else number(mean)
