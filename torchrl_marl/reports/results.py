"""A whole report, before it is written: every figure, and every sentence on it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from torchrl_marl.errors import CheckpointError
from torchrl_marl.reports.aggregates import Aggregate, aggregates_of
from torchrl_marl.reports.finding import find_runs
from torchrl_marl.reports.grouping import group
from torchrl_marl.reports.records import Record, record_of
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
        runs (list of paths): run folders, or folders that hold some, however deep.
        references (path, optional): a file of what returns are normalized by, in the form of
            ``references.yaml`` beside this module, in its place.

    Raises:
        CheckpointError: no runs, or none that can be used.
        ConfigError: references that cannot be read.
    """
    entries = read_references(None if references is None else Path(references))
    found, left_out = find_runs(runs)
    records = [record_of(run) for run in found]
    usable = [record for record in records if isinstance(record, Record)]
    left_out += [record for record in records if isinstance(record, str)]
    if not usable:
        raise CheckpointError(left_out[0])
    worlds = [result_of(world, entries) for world in group(usable)]
    return Report(worlds, aggregates_of(worlds), left_out)
