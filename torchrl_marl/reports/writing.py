"""Writes a report's files into a folder."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from torchrl_marl.errors import ConfigError
from torchrl_marl.reports.page import GENERATOR, page
from torchrl_marl.reports.pictures import draw
from torchrl_marl.reports.results import Report, make_report
from torchrl_marl.reports.tables import curves_csv, evaluations_csv, markdown, results_csv
from torchrl_marl.training.files import whole_file, writing

__all__ = ["write_report"]

_PAGE = "report.html"


def write_report(
    runs: Iterable[str | Path] | str | Path,
    folder: str | Path = "report",
    references: str | Path | None = None,
) -> Report:
    """Writes what runs say together: a page to look at, Markdown, and CSV.

    ``report.html`` is one file without anything from elsewhere, ``report.md`` has the same
    tables and, where matplotlib is installed, pictures (``curves.png``, ``together.png``),
    ``results.csv`` a row for each world and algorithm, ``evaluations.csv`` one for each run
    and evaluation, ``curves.csv`` one for each point of a curve, with its interval.

    Args:
        runs (list of paths): of :func:`make_report`.
        folder (str or Path): where to write; a report that is there is replaced.
        references (path, optional): a file of what returns are normalized by.

    Returns:
        Report: every figure.

    Raises:
        CheckpointError: no runs, or none that can be used.
        ConfigError: a folder that holds other files, or references that cannot be read.
        WriteError: a folder that cannot be written to.
    """
    folder = Path(folder)
    _check(folder)
    found = make_report(runs, references)
    with writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
    _write(folder / _PAGE, page(found))  # the first, by which the folder is known
    _write(folder / "report.md", markdown(found, draw(found, folder)))
    _write(folder / "results.csv", results_csv(found))
    _write(folder / "evaluations.csv", evaluations_csv(found))
    _write(folder / "curves.csv", curves_csv(found))
    return found


def _write(path: Path, text: str) -> None:
    with whole_file(path, at_once=True, newline="") as file:
        file.write(text)


def _check(folder: Path) -> None:
    """Refuses a folder of something else.

    Raises:
        ConfigError: naming what is there.
    """
    if folder.exists() and not folder.is_dir():
        raise ConfigError(f"{str(folder)!r} is a file, expected a folder; use --out FOLDER.")
    if not folder.is_dir():
        return
    # What a killed process had half written goes.
    others = sorted(path.name for path in folder.iterdir() if path.suffix != ".part")
    if not others or _is_report(folder / _PAGE):
        return
    raise ConfigError(
        f"{str(folder)!r} holds {others[0]!r} and no report, expected a new folder or that of an "
        "earlier report; use --out FOLDER."
    )


def _is_report(path: Path) -> bool:
    try:
        with path.open(encoding="utf-8", errors="replace") as file:
            return GENERATOR in file.read(2000)
    except OSError:
        return False
