"""Runs the first tier of the tests on mutants: copies of the package with one wrong expression.

``python test/mutants/run.py`` prints which mutants the tests detect. ``--only NAME ...`` runs
some of them; ``--write`` writes the outcome to ``test/mutants/table.md``. The mutants are listed
in ``mutants.yaml``. The checkout stays as it is: every change is made in a temporary copy.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import yaml

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
COPIED = ("torchrl_marl", "test", "clients", "pyproject.toml")
LONGEST = 900  # seconds of a run of pytest
# A test that fails by one of these found broken code, not a wrong number.
BROKEN = re.compile(r" - (Import|ModuleNotFound|Name|Syntax|Attribute|Type|Index)Error\b")
TITLE = """# Mutants

Each row is a copy of the package with one wrong expression. The first tier of the tests detects
all of them. Written by `python test/mutants/run.py --write`.
"""


class OutOfDateError(Exception):
    """The old text of a mutant is not found exactly once."""


@dataclass(frozen=True)
class Mutant:
    """One wrong expression, and the tests that are expected to detect it."""

    name: str
    area: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]

    def applied(self, text: str) -> str:
        """Returns the text of the file with the wrong expression.

        Raises:
            OutOfDateError: the old text is not found exactly once.
        """
        found = text.count(self.old)
        if found != 1:
            raise OutOfDateError(
                f"mutant {self.name} is out of date: {self.old!r} is found {found} times in "
                f"{self.file}, expected once; update {HERE.name}/mutants.yaml."
            )
        return text.replace(self.old, self.new)


class Outcome(NamedTuple):
    """The outcome of the tests of one mutant."""

    state: str
    test: str
    seconds: float = 0.0


def load() -> list[Mutant]:
    """Reads the list of mutants."""
    areas = yaml.safe_load((HERE / "mutants.yaml").read_text(encoding="utf-8"))
    return [
        Mutant(area=area, **{**one, "tests": tuple(one["tests"])})
        for area, mutants in areas.items()
        for one in mutants
    ]


@contextmanager
def copied() -> Iterator[Path]:
    """Yields a temporary copy of the checkout's package and tests."""
    with tempfile.TemporaryDirectory(prefix="mutants_") as name:
        folder = Path(name).resolve()
        for part in COPIED:
            source = ROOT / part
            if source.is_file():
                shutil.copy(source, folder)
                continue
            shutil.copytree(source, folder / part, ignore=shutil.ignore_patterns("__pycache__"))
        yield folder


def write(path: Path, text: str) -> None:
    """Writes a module, and removes its bytecode, which may look as new as the module."""
    path.write_text(text, encoding="utf-8")
    Path(importlib.util.cache_from_source(str(path))).unlink(missing_ok=True)


def run(folder: Path, *arguments: str) -> tuple[int, str]:
    """Runs Python in a copy; returns its exit code, -1 if it took too long, and its output."""
    environment = os.environ | {"PYTHONPATH": str(folder), "COLUMNS": "400"}
    options = {"cwd": folder, "env": environment, "capture_output": True, "text": True}
    try:
        done = subprocess.run([sys.executable, *arguments], timeout=LONGEST, **options)
    except subprocess.TimeoutExpired:
        return -1, ""
    return done.returncode, done.stdout + done.stderr


def pytest(folder: Path, tests: Sequence[str], *options: str) -> tuple[int, list[str]]:
    """Runs tests of the first tier; returns the exit code, and the failures."""
    code, output = run(folder, "-m", "pytest", "-q", "-p", "no:cacheprovider", *options, *tests)
    return code, re.findall(r"^(?:FAILED|ERROR) .*$", output, re.MULTILINE)


def failing_unmutated(folder: Path, mutants: Sequence[Mutant]) -> list[str]:
    """Returns the tests that fail without a mutant: they detect nothing, and are left out."""
    where, _ = run(folder, "-c", f"import torchrl_marl as x; assert {str(folder)!r} in x.__file__")
    code, failures = pytest(folder, sorted({test for one in mutants for test in one.tests}))
    if where or code not in (0, 1) or not all(x.startswith("FAILED ") for x in failures):
        sys.exit(f"The tests cannot be run in the copy: {failures or code}")
    return [failure.removeprefix("FAILED ").partition(" - ")[0] for failure in failures]


def outcome(folder: Path, mutant: Mutant, left_out: Sequence[str] = ()) -> Outcome:
    """Runs the tests of a mutant, which counts as killed only if a test fails on a value."""
    path = folder / mutant.file
    before = path.read_text(encoding="utf-8")
    began = time.perf_counter()
    try:
        write(path, mutant.applied(before))
        options = [f"--deselect={test}" for test in left_out]
        code, failures = pytest(folder, mutant.tests, "-x", *options)
    except OutOfDateError as error:
        return Outcome("out of date", str(error))
    finally:
        write(path, before)
    seconds = time.perf_counter() - began
    first = failures[0] if failures else f"pytest ends with {code}"
    if code == 0:
        return Outcome("survived", "", seconds)
    if code != 1 or not first.startswith("FAILED") or BROKEN.search(first):
        return Outcome("error", first, seconds)
    return Outcome("killed", first.removeprefix("FAILED "), seconds)


def row(mutant: Mutant, found: Outcome) -> str:
    """Returns the row of a mutant in the table."""
    old, new = (f"`` {text} ``".replace("|", "\\|") for text in (mutant.old, mutant.new))
    file = mutant.file.removeprefix("torchrl_marl/")
    test = re.split(r"\[| - ", found.test)[0].removeprefix("test/")
    cells = mutant.name, mutant.area, file, old, new, found.state, test, f"{found.seconds:.0f}"
    return f"| {' | '.join(cells)} |"


def table(rows: Iterable[str]) -> str:
    """Returns the table of all mutants."""
    head = "| mutant | area | file | right | wrong | outcome | test | seconds |"
    return "\n".join([TITLE, head, "|---" * 8 + "|", *rows, ""])


def main() -> int:
    """Runs the mutants; returns 0 if all are killed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", nargs="+", metavar="NAME", help="names of mutants, or areas")
    parser.add_argument("--write", action="store_true", help="write test/mutants/table.md")
    given = parser.parse_args()
    mutants = load()
    if given.only:
        mutants = [one for one in mutants if {one.name, one.area} & set(given.only)]
    if not mutants or (given.only and given.write):
        parser.error("there is no such mutant, or --write is given with --only")
    found: dict[Mutant, Outcome] = {}
    with copied() as folder:
        left_out = failing_unmutated(folder, mutants)
        for test in left_out:
            print(f"Left out, since it fails without a mutant: {test}")
        for mutant in mutants:
            one = found[mutant] = outcome(folder, mutant, left_out)
            text = f"{mutant.name:28} {one.state:12} {one.seconds:4.0f} s  {one.test[:160]}"
            print(text, flush=True)
    killed = sum(one.state == "killed" for one in found.values())
    print(f"{killed} of {len(mutants)} mutants are killed.")
    if given.write:
        (HERE / "table.md").write_text(table(map(row, found, found.values())), encoding="utf-8")
    return int(killed < len(mutants))


if __name__ == "__main__":
    sys.exit(main())
