"""Results of other libraries, or of an earlier report: tables of evaluations instead of runs."""

from __future__ import annotations

import csv
import dataclasses
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np

from torchrl_marl.curves import Curves
from torchrl_marl.errors import CheckpointError, ConfigError, quoted
from torchrl_marl.reports.grouping import World
from torchrl_marl.reports.records import Record, record_of

__all__ = ["join", "read_table"]

_NEEDED = ("world", "algorithm", "seed", "frames", "return")
_COUNTERS = ("agent_frames", "seconds")
Foreign = Mapping[tuple[str, str], Sequence[Record]]
_Key = tuple[str, str, int, str]  # world, algorithm, seed, run


def read_table(path: Path) -> tuple[dict[tuple[str, str], list[Record]], list[str]]:
    """Reads a table of evaluations, in the form of a report's ``evaluations.csv``.

    Its columns are ``world, algorithm, seed, frames, return`` and, where they are known,
    ``agent_frames``, ``seconds`` and ``run``, which tells two runs of a seed apart; others are
    not read.

    Args:
        path (Path): the file.

    Returns:
        tuple: world and algorithm -> its runs, by seed; and a sentence for each run without a
        return that is a number.

    Raises:
        CheckpointError: a file without these columns, with a row that is not numbers or of
            negative frames, or with two rows of a run at the same frames.
    """
    runs: dict[_Key, dict[float, list[float]]] = {}
    lines: dict[tuple[_Key, float], int] = {}
    for line, row in _rows(path):
        key, frames, numbers = _numbers(path, line, row)
        first = lines.setdefault((key, frames), line)
        if first != line:
            raise CheckpointError(
                f"{str(path)!r} has two rows of {_who(key)} at frame {frames:,.0f}, in lines "
                f"{first} and {line}, expected one; delete one of them."
            )
        runs.setdefault(key, {})[frames] = [frames, *numbers]
    found: dict[tuple[str, str], list[Record]] = {}
    left_out = []
    for key, values in sorted(runs.items()):
        record = _record(path, key, np.array([values[frames] for frames in sorted(values)]))
        if isinstance(record, Record):
            found.setdefault(key[:2], []).append(record)
        else:
            left_out.append(f"{str(path)!r} has no finite return at the start of {_who(key)}.")
    return found, left_out


def _rows(path: Path) -> Iterator[tuple[int, dict[str, str]]]:
    """Yields the number of a row's line, and the row."""
    try:
        with path.open(newline="", encoding="utf-8") as file:  # cells may hold ends of lines
            reader = csv.DictReader(file)
            rows = [(reader.line_num, row) for row in reader]
    except (OSError, UnicodeError, csv.Error) as error:
        raise CheckpointError(f"{str(path)!r} cannot be read: {error}.") from None
    missing = [name for name in _NEEDED if not rows or name not in rows[0][1]]
    if missing:
        raise CheckpointError(
            f"{str(path)!r} is no table of evaluations: it has no "
            f"{f'column {missing[0]!r}' if rows else 'rows'}, expected "
            f"{', '.join(_NEEDED)}; see docs/reports.md."
        )
    yield from rows


def _numbers(path: Path, line: int, row: Mapping[str, str]) -> tuple[_Key, float, list[float]]:
    """Returns whose a row is, its frames, and its return and counters."""
    try:
        key = row["world"], row["algorithm"], int(row["seed"]), row.get("run") or ""
        frames = float(row["frames"])
        numbers = [float(row["return"])]
        numbers += [float(row.get(name) or math.nan) for name in _COUNTERS]
    except (TypeError, ValueError):
        raise CheckpointError(
            f"{str(path)!r} is broken in line {line}, expected numbers for seed, frames and "
            "return; delete the line."
        ) from None
    if not (math.isfinite(frames) and frames >= 0):
        raise CheckpointError(
            f"{str(path)!r} has frames={row['frames']} in line {line}, expected a number of 0 or "
            "more; delete the line."
        )
    return key, frames, numbers


def _who(key: _Key) -> str:
    return f"{quoted(key[1])} in {quoted(key[0])}, seed {key[2]}"


def _record(path: Path, key: _Key, values: np.ndarray) -> Record | str:
    frames, returns, agent_frames, seconds = values.T
    table = {
        "frames": frames,
        "return_mean": returns,
        "agent_frames": agent_frames,
        "seconds": seconds,
    }
    summary = {"frames": float(frames[-1])}
    found = record_of(Curves(path, "", {}, {}, table, summary, key[2]))
    if isinstance(found, str):
        return found
    whose = tuple(f"(of {_who(key)}) {note}" for note in found.notes)
    return dataclasses.replace(found, notes=whose)


def join(worlds: Sequence[World], tables: Iterable[Foreign]) -> list[World]:
    """Adds the algorithms of tables to the worlds of the same names.

    Args:
        worlds (list of World): of runs.
        tables (list): the runs of :func:`read_table`, of each.

    Raises:
        ConfigError: an algorithm that the world has already.
    """
    joined = {
        world.name: World(world.name, world.settings, {**world.algorithms}) for world in worlds
    }
    for table in tables:
        for (name, algorithm), records in table.items():
            settings = {"env.library": "", "env.name": name}
            world = joined.setdefault(name, World(name, settings, {}))
            if algorithm in world.algorithms:
                raise ConfigError(
                    f"{str(records[0].run.folder)!r} has {quoted(algorithm)} in {quoted(name)}, "
                    "which other runs have, too; give it a name of its own, such as "
                    f"{quoted(f'other {algorithm}')}."
                )
            world.algorithms[algorithm] = list(records)
    return sorted(joined.values(), key=lambda world: world.name)
