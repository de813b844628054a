"""A whole report, before it is written: every figure, and every sentence on it."""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from torchrl_marl.errors import CheckpointError
from torchrl_marl.reports.aggregates import Aggregate, aggregates_of
from torchrl_marl.reports.finding import find_runs
from torchrl_marl.reports.foreign import join, read_table
from torchrl_marl.reports.grouping import each_seed_once, group
from torchrl_marl.reports.records import Record, record_of, without_copies
from torchrl_marl.reports.references import read_references
from torchrl_marl.reports.scores import Scored, WorldResult, result_of

__all__ = ["Report", "make_report"]


@dataclass(frozen=True)
class Report:
    """What runs say together."""

    worlds: list[WorldResult]
    aggregates: list[Aggregate]
    left_out: list[str]
    """A sentence for each run that could not be used."""

    @property
    def runs(self) -> list[Scored]:
        """All runs, by world, algorithm and seed."""
        return [run for world in self.worlds for team in world.teams.values() for run in team.runs]

    @property
    def algorithms(self) -> list[str]:
        """The names of all algorithms, those of the most worlds first."""
        worlds: dict[str, int] = {}
        for world in self.worlds:
            for name in world.teams:
                worlds[name] = worlds.get(name, 0) + 1
        return sorted(worlds, key=lambda name: (-worlds[name], name))


def make_report(
    runs: Iterable[str | Path] | str | Path, references: str | Path | None = None
) -> Report:
    """Reads runs and works out every figure of a report.

    Args:
        runs (list of paths): run folders, or folders that hold some, however deep; a ``.csv`` is a
            table of evaluations, such as an earlier report's, or of another library.
        references (path, optional): a file of what returns are normalized by, in the form of
            ``references.yaml`` beside this module, in its place.

    Raises:
        CheckpointError: no runs, or none that can be used; a table that is broken.
        ConfigError: references that cannot be read, or a table's algorithm that runs have, too.
    """
    entries = read_references(None if references is None else Path(references))
    given = [runs] if isinstance(runs, (str, os.PathLike)) else list(runs)
    tables = [Path(path) for path in given if str(path).endswith(".csv") and Path(path).is_file()]
    folders = [path for path in given if Path(path) not in tables]
    found, left_out = find_runs(folders) if folders or not tables else ([], [])
    records = [record_of(run) for run in found]
    usable, copies = without_copies([x for x in records if isinstance(x, Record)])
    usable, repeats = each_seed_once(usable)
    left_out += [record for record in records if isinstance(record, str)] + copies + repeats
    foreign = [read_table(path) for path in tables]
    left_out += [sentence for _, without in foreign for sentence in without]
    worlds = join(group(usable), (runs for runs, _ in foreign))
    if not worlds:
        raise CheckpointError(left_out[0])
    results = [result_of(world, entries) for world in worlds]
    return Report(results, aggregates_of(results), left_out)
