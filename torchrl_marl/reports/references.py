"""What the returns of a world are normalized by: the random policy's, and the best known."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from torchrl_marl.errors import ConfigError
from torchrl_marl.reports.grouping import World

__all__ = ["Reference", "find_reference", "read_references"]

_FILE = Path(__file__).with_name("references.yaml")
_KEYS = {"world", "settings", "random", "best", "source"}


@dataclass(frozen=True)
class Reference:
    """Two returns of a world, each with where it is from; None where it is not known."""

    random: float | None
    random_source: str
    best: float | None
    best_source: str

    @property
    def why_none(self) -> str:
        """Why returns cannot be normalized; empty if they can."""
        if self.random is None:
            return "no run has measured the random policy"
        if self.best is None or self.best <= self.random:
            return f"nothing is known that is better than the random policy's {self.random:.4g}"
        return ""

    def normalize(self, returns: Any) -> Any:
        """Returns 0 for the random policy's return and 1 for the best known; keeps the shape."""
        assert self.random is not None and self.best is not None
        return (returns - self.random) / (self.best - self.random)


def read_references(path: Path | None = None) -> list[Mapping[str, Any]]:
    """Reads the entries of a file such as ``references.yaml``.

    Args:
        path (Path, optional): another file than the package's own.

    Raises:
        ConfigError: a file that does not hold such entries.
    """
    path = _FILE if path is None else path
    try:
        entries = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, yaml.YAMLError) as error:
        raise ConfigError(
            f"the references {str(path)!r} cannot be read: {str(error).splitlines()[0]}."
        ) from None
    for entry in entries if isinstance(entries, list) else [None]:
        keys = set(entry) if isinstance(entry, dict) else set()
        if not {"world", "source"} <= keys <= _KEYS:
            raise ConfigError(
                f"the references {str(path)!r} hold {str(entry)[:80]!r}, expected entries with "
                f"world and source, and of {', '.join(sorted(_KEYS - {'world', 'source'}))} some; "
                "see torchrl_marl/reports/references.yaml."
            )
    return list(entries)


def find_reference(
    world: World, ends: Mapping[str, Sequence[float]], entries: Sequence[Mapping[str, Any]]
) -> Reference:
    """Finds what the returns of a world are normalized by.

    A figure of the entries comes first. Otherwise random is the mean of what the runs measured, and
    the best known is the better of the heuristic's mean and the best run.

    Args:
        world (World): with its runs.
        ends (mapping): the scores of each algorithm's runs.
        entries (list of mappings): of :func:`read_references`.
    """
    entry = _entry(world, entries)
    random, random_source = entry.get("random"), entry.get("source", "")
    if random is None:
        random, random_source = _measured(world, "return_random", "random actions")
    best, best_source = entry.get("best"), entry.get("source", "")
    if best is None:
        best, best_source = _measured(world, "return_heuristic", "the library's heuristic")
        name = max(ends, key=lambda name: max(ends[name]), default=None)
        if name is not None and (best is None or max(ends[name]) > best):
            best, best_source = max(ends[name]), f"the best run of this report, of {name}"
    return Reference(random, random_source, best, best_source)


def _entry(world: World, entries: Sequence[Mapping[str, Any]]) -> Mapping[str, Any]:
    name = f"{world.settings.get('env.library')}/{world.settings.get('env.name')}"
    for entry in entries:
        wanted = entry.get("settings") or {}
        if entry["world"] == name and all(world.settings.get(k) == x for k, x in wanted.items()):
            return entry
    return {}


def _measured(world: World, key: str, what: str) -> tuple[float | None, str]:
    found = [x for x in (record.summarized(key) for record in world.records) if x is not None]
    runs = f"{len(found)} run{'s' * (len(found) != 1)}"
    return (float(np.mean(found)), f"{what}, measured by {runs}") if found else (None, "")
