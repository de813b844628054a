"""Finds the run folders that a report is about, and says what is left out and why."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from pathlib import Path

from torchrl_marl.curves import Curves, read_run
from torchrl_marl.errors import CheckpointError, ConfigError, UserError
from torchrl_marl.reports.populations import is_evolved, read_population
from torchrl_marl.training.config import read_run_config, seed_folders

__all__ = ["find_runs"]

_DEEPEST = 6  # folders between what is given and a run


def find_runs(paths: Iterable[str | Path] | str | Path) -> tuple[list[Curves], list[str]]:
    """Reads all runs in the given folders, however deep they lie.

    A folder may be a run, hold the runs of several seeds, be a population's or a suite's. A
    population whose members replace each other is two runs: its best member and its mean.

    Args:
        paths (list of paths): the folders.

    Returns:
        tuple: the runs, and a sentence for each that cannot be read.

    Raises:
        CheckpointError: a folder without runs, or no run at all that can be read.
        ConfigError: no folder is given.
    """
    given = [paths] if isinstance(paths, (str, os.PathLike)) else list(paths)
    if not given:
        raise ConfigError("no run folder is given, expected one or more; name them.")
    folders: dict[Path, Path] = {}
    for path in given:
        inside = list(_run_folders(Path(path)))
        if not inside:
            read_run_config(path)  # which says what is missing
        folders |= {folder.resolve(): folder for folder in inside}
    runs, left_out = [], []
    for folder in folders.values():
        try:
            runs += read_population(folder) if is_evolved(folder) else [read_run(folder)]
        except UserError as error:
            left_out.append(str(error))
        except (OSError, UnicodeError) as error:
            left_out.append(f"{str(folder)!r} cannot be read: {error}.")
    if not runs:
        more = f" None of the other {len(left_out) - 1} can be read, either." * (len(left_out) > 1)
        raise CheckpointError(f"{left_out[0]}{more}")
    return runs, left_out


def _run_folders(folder: Path, depth: int = 0) -> Iterator[Path]:
    """Yields a run's folder itself, a population's members, or the runs below, by name.

    Of members that replace each other none is a run by itself: theirs is the population's folder.
    """
    if (folder / "config.yaml").is_file():
        evolved = next((path for path in (folder, folder.parent) if is_evolved(path)), None)
        yield from [evolved] if evolved else seed_folders(folder) or [folder]
        return
    if depth == _DEEPEST or not folder.is_dir():
        return
    try:
        inner = sorted(path for path in folder.iterdir() if path.is_dir())
    except OSError:
        return
    for path in inner:
        if not path.name.startswith("."):
            yield from _run_folders(path, depth + 1)
