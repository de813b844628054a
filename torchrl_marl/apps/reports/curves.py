"""Reads the tables of run folders: what plots are drawn from."""

from __future__ import annotations

import csv
import dataclasses
import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from torchrl_marl.apps.reports.experiments import NOT_READ
from torchrl_marl.errors import CheckpointError
from torchrl_marl.runtime.trust import refuse_link
from torchrl_marl.settings import flatten, unread
from torchrl_marl.training.config import TrainConfig, read_run_config

__all__ = ["Curves", "read_csv", "read_run"]

_OF_A_LEAGUE = ("self_play", "slots", "snapshot_every", "snapshot_at", "exploiters")
# Settings in which runs of one experiment may differ.
_NOT_COMPARED = ("seed", "device", "threads", "folder")
_SECTIONS_NOT_COMPARED = ("checkpoint.", "logging.", "evaluation.")


@dataclass(frozen=True)
class Curves:
    """What a run folder holds: settings, both tables, and the policies it is compared with."""

    folder: Path
    recipe: str
    settings: dict[str, Any]
    training: dict[str, np.ndarray]
    evaluation: dict[str, np.ndarray]
    summary: dict[str, Any]
    seed: int = 0
    cut: tuple[str, ...] = ()
    """Tables of which the last line is half written, and left out."""
    notes: tuple[str, ...] = ()
    """Sentences on what the tables are made of, without their subject."""


def read_run(folder: str | Path) -> Curves:
    """Reads a run folder; a last line that is still being written is left out.

    Raises:
        CheckpointError: a folder that is no run, or has no rows yet.
        TrustError: a table is a link out of the folder.
    """
    folder = Path(folder)
    config = read_run_config(folder)
    for name in ("metrics.csv", "evaluation.csv", "summary.json"):
        refuse_link(folder / name)
    training, evaluation = read_csv(folder / "metrics.csv"), read_csv(folder / "evaluation.csv")
    if not len(training.get("frames", ())) and not len(evaluation.get("frames", ())):
        raise CheckpointError(
            f"{str(folder)!r} has no row in metrics.csv yet, expected one or more; "
            "wait for its first iteration."
        )
    summary = _read_json(folder / "summary.json")
    tables = ("evaluation.csv", "metrics.csv")
    cut = tuple(name for name in tables if _ends_half(folder / name))
    seed = config.seed
    settings = _compared(config)
    return Curves(folder, config.recipe, settings, training, evaluation, summary, seed, cut)


def _compared(config: TrainConfig) -> dict[str, Any]:
    """Settings that runs are compared by; of those that nothing reads it is known that they are."""
    idle = {*unread(config, defaults=True), *_idle_in_league(config)}
    return {
        name: NOT_READ if name in idle else value
        for name, value in flatten(dataclasses.asdict(config)).items()
        if name not in _NOT_COMPARED and not name.startswith(_SECTIONS_NOT_COMPARED)
    }


def _idle_in_league(config: TrainConfig) -> list[str]:
    """Settings of a league that nothing reads: all but who plays where nobody does."""
    league = config.league
    idle = {
        "weighting": league.match != "pfsp",
        "exploited": not league.exploiters,
        **dict.fromkeys(_OF_A_LEAGUE, not league.enabled),
    }
    return [f"league.{name}" for name, without in idle.items() if without]


def read_csv(path: Path) -> dict[str, np.ndarray]:
    """Columns of a table of numbers by name, empty cells as NaN; nothing if there is no file.

    Raises:
        CheckpointError: a line that is not numbers, or no column of frames.
    """
    if not path.is_file():
        return {}
    try:
        with path.open(newline="", encoding="utf-8", errors="replace") as file:
            reader = csv.reader(file)
            rows = [(reader.line_num, row) for row in reader]
    except csv.Error as error:
        raise CheckpointError(
            f"{str(path)!r} is no table of metrics ({error}); move it away."
        ) from None
    if _ends_half(path):
        rows = rows[:-1]  # a number in it may be cut, too
    if not rows:
        return {}
    (_, head), *body = rows
    if "frames" not in head:
        raise CheckpointError(
            f"{str(path)!r} is no table of metrics: it has no column 'frames'; move it away."
        )
    table = np.full((len(body), len(head)), np.nan)
    for i, (line, row) in enumerate(body):
        try:
            if len(row) != len(head):
                raise ValueError
            table[i] = [float(cell) if cell else np.nan for cell in row]
        except ValueError:
            raise CheckpointError(
                f"{str(path)!r} is broken in line {line}, expected {len(head)} numbers; "
                "delete the line."
            ) from None
    return dict(zip(head, table.T))


def _ends_half(path: Path) -> bool:
    """Whether the last line of a table has no end."""
    if not path.is_file() or not path.stat().st_size:
        return False
    with path.open("rb") as file:
        file.seek(-1, os.SEEK_END)
        return file.read() not in b"\r\n"


def _read_json(path: Path) -> dict[str, Any]:
    try:
        return dict(json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError):  # a run that has not ended has none
        return {}
