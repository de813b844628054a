"""Measures how long each test takes: ``python test/durations.py`` on a quiet machine.

Runs both tiers once and writes ``durations.csv``: seconds of a test with all its cases, and the
parts of the second tier that it belongs to. Tests below 0.1 s are summed per file. The order of
the tests and the selection of ``.ci/run`` use this file.
"""

import csv
import sys
from collections import Counter
from pathlib import Path

import pytest

HERE = Path(__file__).parent
LEAST = 0.1


class Durations:
    """A pytest plugin that sums the durations of each test."""

    def __init__(self):
        self.seconds, self.parts = Counter(), {}

    def pytest_runtest_logreport(self, report):
        test = report.nodeid.partition("[")[0]
        self.seconds[test] += report.duration
        parts = [part for part in self.known if part in report.keywords]
        self.parts.setdefault(test, set()).update(parts or ["first"])

    def pytest_configure(self, config):
        lines = config.getini("markers")
        self.known = [x.partition(":")[0] for x in lines if ": part" in x]

    def rows(self):
        """Returns rows of parts, seconds and test, the longest first."""
        sums = Counter()
        for test, seconds in self.seconds.items():
            name = test if seconds >= LEAST else test.partition("::")[0]
            sums["+".join(sorted(self.parts[test])), name] += seconds
        return [(part, f"{seconds:.2f}", name) for (part, name), seconds in sums.most_common()]


def main():
    found = Durations()
    status = pytest.main(["-m", "", "-n", "2", *sys.argv[1:]], plugins=[found])
    with (HERE / "durations.csv").open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(["part", "seconds", "test"])
        writer.writerows(found.rows())
    return status


if __name__ == "__main__":
    sys.exit(main())
