"""Results of other libraries, or of an earlier report: tables of evaluations instead of runs."""

from __future__ import annotations

import csv
import math
from collections.abc import Iterable, Mapping, Sequence
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


def read_table(path: Path) -> dict[tuple[str, str], list[Record]]:
    """Reads a table of evaluations, in the form of a report's ``evaluations.csv``.

    Its columns are ``world, algorithm, seed, frames, return`` and, where they are known,
    ``agent_frames`` and ``seconds``; others are not read.

    Args:
        path (Path): the file.

    Returns:
        dict: world and algorithm -> its runs, by seed.

    Raises:
        CheckpointError: a file without these columns, or with a row that is not numbers.
    """
    try:
        rows = list(csv.DictReader(path.read_text(encoding="utf-8").splitlines()))
    except (OSError, UnicodeError, csv.Error) as error:
        raise CheckpointError(f"{str(path)!r} cannot be read: {error}.") from None
    missing = [name for name in _NEEDED if not rows or name not in rows[0]]
    if missing:
        raise CheckpointError(
            f"{str(path)!r} is no table of evaluations: it has no "
            f"{f'column {missing[0]!r}' if rows else 'rows'}, expected "
            f"{', '.join(_NEEDED)}; see docs/reports.md."
        )
    runs: dict[tuple[str, str, int], list[list[float]]] = {}
    for i, row in enumerate(rows):
        try:
            key = row["world"], row["algorithm"], int(row["seed"])
            numbers = [float(row[name]) for name in ("frames", "return")]
            numbers += [float(row.get(name) or math.nan) for name in _COUNTERS]
        except (TypeError, ValueError):
            raise CheckpointError(
                f"{str(path)!r} is broken in line {i + 2}, expected numbers for seed, frames and "
                "return; delete the line."
            ) from None
        runs.setdefault(key, []).append(numbers)
    found: dict[tuple[str, str], list[Record]] = {}
    for (world, algorithm, seed), values in sorted(runs.items()):
        record = _record(path, seed, np.array(sorted(values)))
        if record is not None:
            found.setdefault((world, algorithm), []).append(record)
    return found


def _record(path: Path, seed: int, values: np.ndarray) -> Record | None:
    frames, returns, agent_frames, seconds = values.T
    table = {
        "frames": frames,
        "return_mean": returns,
        "agent_frames": agent_frames,
        "seconds": seconds,
    }
    summary = {"frames": float(frames[-1])}
    found = record_of(Curves(path, "", {}, {}, table, summary, seed))
    return found if isinstance(found, Record) else None


def join(worlds: Sequence[World], tables: Iterable[Foreign]) -> list[World]:
    """Adds the algorithms of tables to the worlds of the same names.

    Args:
        worlds (list of World): of runs.
        tables (list): of :func:`read_table`.

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
