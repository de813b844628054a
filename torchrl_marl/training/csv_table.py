"""A table of a run as a CSV file, readable after every row."""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torchrl_marl.errors import CheckpointError
from torchrl_marl.training.files import append, whole_file

__all__ = ["CsvTable"]


class CsvTable:
    """A CSV file that is readable after every row.

    Args:
        path (Path): the file.
        keep_iterations (int, optional): go on with an earlier file, cut back to so many.
    """

    def __init__(self, path: Path, keep_iterations: int | None = None) -> None:
        self.path = path
        self.columns: list[str] = []
        if keep_iterations is not None and path.exists():
            self._cut_back(keep_iterations)

    def _cut_back(self, iterations: int) -> None:
        columns, rows = self._read()
        if rows and "iteration" not in columns:
            raise CheckpointError(
                f"{str(self.path)!r} is no table of metrics: it has no column 'iteration'; "
                "move it away to go on."
            )
        # A row cut short by a crash of the machine lacks columns.
        whole = [row for row in rows if None not in row and None not in row.values()]
        kept = [
            r for r in whole if r["iteration"].isdecimal() and int(r["iteration"]) <= iterations
        ]
        # Without rows, the head may be incomplete, too.
        self.columns = columns if rows else []
        with whole_file(self.path, newline="") as file:
            writer = csv.DictWriter(file, self.columns)
            if rows:
                writer.writeheader()
            writer.writerows(kept)

    def _read(self) -> tuple[list[str], list[dict[str, str]]]:
        try:
            with self.path.open(newline="", encoding="utf-8", errors="replace") as file:
                reader = csv.DictReader(file)
                rows = list(reader)
                return list(reader.fieldnames or ()), rows
        except (OSError, csv.Error) as error:
            raise CheckpointError(
                f"{str(self.path)!r} cannot be read ({error}); move it away to go on."
            ) from None

    def write(self, row: Mapping[str, Any]) -> None:
        """Appends a row, all of it or nothing; the first row sets the columns.

        Raises:
            WriteError: a full disk.
        """
        columns = self.columns or list(row)
        text = io.StringIO(newline="")
        writer = csv.DictWriter(text, columns, extrasaction="ignore")
        if not self.columns:
            writer.writeheader()
        writer.writerow({key: _cell(value) for key, value in row.items()})
        append(self.path, text.getvalue())
        self.columns = columns


def _cell(value: Any) -> Any:
    if isinstance(value, float):
        return "" if math.isnan(value) else f"{value:.6g}"
    return value
