"""Runs parts of the second tier of the tests in the seconds that are left; ``.ci/run`` calls it.

Parts that the change touches come first, then those that ran longest ago. Every run writes its day
and commit count into ``second_tier.csv``, which is committed with the change.

``python .ci/second_tier.py --seconds 1500 --checkout PATH`` runs what fits; ``--all`` runs all
parts; ``--list`` only prints the choice.
"""

from __future__ import annotations

import argparse
import csv
import datetime
import subprocess
import sys
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
RECORD = Path(".ci/second_tier.csv")
DURATIONS = ROOT / "test" / "durations.csv"
PROCESSES = 2
MARGIN = 1.3  # machines differ
COLLECTION = 40.0  # seconds to find the tests

# Where a change touches a part; changes of a part's own test files do so as well.
TOUCHED_BY = {
    "browser": ("torchrl_marl/apps/reports", "docs/hooks"),
    "clients": ("clients", "torchrl_marl/apps/external", "torchrl_marl/apps/serving"),
    "compiled": ("torchrl_marl/capture", "torchrl_marl/simulator", "torchrl_marl/learners"),
    "environments": ("torchrl_marl/envs", "torchrl_marl/specs"),
    "learning": ("torchrl_marl/objectives", "torchrl_marl/functional", "torchrl_marl/learners"),
    "loggers": ("torchrl_marl/training",),
    "pages": ("docs", "README.md", "mkdocs.yml", "CHANGELOG.md"),
    "pictures": ("torchrl_marl/apps/pictures", "torchrl_marl/apps/reports"),
    "processes": ("torchrl_marl/runtime", "torchrl_marl/training"),
    "ray": ("torchrl_marl/collectors", "torchrl_marl/training"),
    "recipes": ("torchrl_marl/configs", "torchrl_marl/settings", "torchrl_marl/recipes.py"),
    "runs": ("torchrl_marl/training", "torchrl_marl/apps"),
    "tutorials": ("tutorials",),
    "wheel": ("setup.py", "pyproject.toml", "MANIFEST.in"),
}


def files_of_parts() -> dict[str, set[str]]:
    """Returns the test files of each part."""
    files: dict[str, set[str]] = {part: set() for part in TOUCHED_BY}
    for row in durations():
        for part in files.keys() & row["part"].split("+"):
            files[part].add(row["test"].partition("::")[0])
    return files


def seconds_of_parts() -> Counter[str]:
    """Returns how long each part takes, by the durations of the tests."""
    seconds: Counter[str] = Counter(dict.fromkeys(TOUCHED_BY, 0.0))
    for row in durations():
        for part in seconds.keys() & row["part"].split("+"):
            seconds[part] += float(row["seconds"]) / PROCESSES
    return seconds


def durations() -> list[dict[str, str]]:
    """Returns the rows of the durations of the tests."""
    with DURATIONS.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def read_record(path: Path) -> dict[str, int]:
    """Returns the number of commits at which each part ran last; 0 for never."""
    with path.open(newline="", encoding="utf-8") as file:
        commits_of_parts = {row["part"]: int(row["commits"]) for row in csv.DictReader(file)}
    return {part: commits_of_parts.get(part, 0) for part in TOUCHED_BY}


def write_record(path: Path, parts: list[str], commits: int) -> None:
    """Notes that parts ran today, at a number of commits."""
    with path.open(newline="", encoding="utf-8") as file:
        rows = {row["part"]: row for row in csv.DictReader(file)}
    today = datetime.date.today().isoformat()
    rows |= {part: {"part": part, "commits": commits, "day": today} for part in parts}
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, ["part", "commits", "day"], lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows[part] for part in TOUCHED_BY if part in rows)


def git(checkout: Path, *arguments: str) -> list[str]:
    """Returns the lines of a git command; none outside a repository."""
    command = ["git", "-C", str(checkout), *arguments]
    return subprocess.run(command, capture_output=True, text=True).stdout.splitlines()


def changed_files(checkout: Path) -> list[str]:
    """Returns the files that changed since the record was committed last."""
    since = git(checkout, "log", "-1", "--format=%H", "--", str(RECORD))
    return git(checkout, "diff", "--name-only", since[0]) if since else []


def choose_parts(record: dict[str, int], changed: list[str], seconds: float) -> list[str]:
    """Returns the parts that fit: first those that a change touches, then the oldest."""
    files, cost = files_of_parts(), seconds_of_parts()
    touched = {
        part
        for part, places in TOUCHED_BY.items()
        if any(name.startswith(place) for name in changed for place in places)
        or files[part].intersection(changed)
    }
    chosen, seconds = [], seconds - COLLECTION
    for part in sorted(record, key=lambda part: (part not in touched, record[part], part)):
        if MARGIN * cost[part] <= seconds:
            chosen.append(part)
            seconds -= MARGIN * cost[part]
    return chosen


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=1500.0)
    parser.add_argument("--checkout", type=Path, default=ROOT)
    parser.add_argument("--all", action="store_true")
    parser.add_argument("--list", action="store_true")
    args = parser.parse_args()
    record = read_record(args.checkout / RECORD)
    if args.all:
        parts = list(record)
    else:
        parts = choose_parts(record, changed_files(args.checkout), args.seconds)
    skipped = [part for part in record if part not in parts]
    print(
        f"second tier: {', '.join(parts) or 'nothing'}; left out: {', '.join(skipped) or 'nothing'}"
    )
    if args.list or not parts:
        return 0
    status = subprocess.run(
        [sys.executable, "-m", "pytest", "-m", " or ".join(parts)], cwd=ROOT
    ).returncode
    if status == 0:
        commits = git(args.checkout, "rev-list", "--count", "HEAD") or ["0"]
        write_record(args.checkout / RECORD, parts, int(commits[0]))
    return status


if __name__ == "__main__":
    sys.exit(main())
