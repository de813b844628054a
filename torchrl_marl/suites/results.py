"""What the runs of a suite have come to: a row for each, a table of all."""

from __future__ import annotations

import csv
import json
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torchrl_marl.console import number
from torchrl_marl.suites.table import SuiteRun
from torchrl_marl.training.files import whole_file

__all__ = ["Result", "found_result", "read_elapsed", "results_table", "write_results"]

_COLUMNS = [
    "task",
    "algorithm",
    "seed",
    "state",
    "return_before",
    "return_random",
    "return_after",
] + ["frames", "seconds", "elapsed", "folder"]


@dataclass(frozen=True)
class Result:
    """A run of a suite, and how far it is.

    Attributes:
        run (SuiteRun): which one.
        folder (Path): where it is.
        state (str): ``finished``, ``failed``, ``stopped``, ``begun`` or ``waiting``.
        summary (dict): as in its ``summary.json``; empty unless it is finished.
        elapsed (float): seconds that it took, with all that is not training.
        error (str): why it failed.
    """

    run: SuiteRun
    folder: Path
    state: str
    summary: dict[str, Any]
    elapsed: float = 0.0
    error: str = ""

    @property
    def finished(self) -> bool:
        """Whether the run came to its end."""
        return self.state == "finished"


def found_result(out: Path, run: SuiteRun, elapsed: float = 0.0) -> Result:
    """Returns how far a run is that is trained by nobody now."""
    folder = out / run.place
    try:
        summary = json.loads((folder / "summary.json").read_text(encoding="utf-8"))
        finished = isinstance(summary, dict) and "frames" in summary
    except (OSError, ValueError):
        finished = False
    if finished:
        return Result(run, folder, "finished", summary, elapsed)
    begun = (folder / "config.yaml").is_file()
    return Result(run, folder, "begun" if begun else "waiting", {}, elapsed)


def write_results(out: Path, results: Iterable[Result]) -> None:
    """Writes ``results.csv``, a row for each run.

    Raises:
        WriteError: a full disk or a read-only folder.
    """
    with whole_file(out / "results.csv", newline="") as file:
        writer = csv.DictWriter(file, _COLUMNS)
        writer.writeheader()
        for one in results:
            run = one.run
            own = {key: one.summary.get(key) for key in _COLUMNS[4:9]}
            own |= {"task": run.task, "algorithm": run.algorithm, "seed": run.seed}
            own |= {"state": one.state, "elapsed": round(one.elapsed, 2)}
            writer.writerow({**own, "folder": run.place.as_posix()})


def read_elapsed(out: Path) -> dict[str, float]:
    """Returns the seconds that each run took so far, by its place, as ``results.csv`` says."""
    try:
        with (out / "results.csv").open(newline="", encoding="utf-8") as file:
            return {row["folder"]: float(row["elapsed"] or 0) for row in csv.DictReader(file)}
    except (OSError, ValueError, KeyError, TypeError, csv.Error):
        return {}


def results_table(results: Sequence[Result]) -> str:
    """Formats a row for each task and algorithm: the mean over seeds, from least to most."""
    heads = ["task", "algorithm", "seeds", "return", "least to most", "random", "frames", "seconds"]
    rows = [heads]
    for pair in dict.fromkeys(one.run.pair for one in results):
        own = [one for one in results if one.run.pair == pair]
        done = [one.summary for one in own if one.finished]
        ends = _known(done, "return_after")
        spread = f"{number(min(ends))} to {number(max(ends))}" if ends else "-"
        cells = [_mean(done, key) for key in ("return_random", "frames", "seconds")]
        seeds = f"{len(done)} of {len(own)}"
        rows.append([*pair, seeds, _mean(done, "return_after"), spread, *cells])
    widths = [max(map(len, column)) for column in zip(*rows)]
    return "\n".join(
        "  ".join(
            cell.ljust(width) if i < 2 else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(row, widths))
        ).rstrip()
        for row in rows
    )


def _known(summaries: Iterable[dict[str, Any]], key: str) -> list[float]:
    return [one[key] for one in summaries if isinstance(one.get(key), (int, float))]


def _mean(summaries: Iterable[dict[str, Any]], key: str) -> str:
    values = _known(summaries, key)
    if not values:
        return "-"
    mean = statistics.fmean(values)
    return number(round(mean)) if key == "frames" else number(mean)
