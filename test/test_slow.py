"""The list of slow tests names tests that exist, so that one that is renamed is not forgotten."""

from pathlib import Path

import pytest
from conftest import SLOW, names_of

ROOT = Path(__file__).parents[1]


@pytest.mark.parametrize("line", sorted(SLOW))
def test_a_slow_test_exists(line):
    path, *names = line.partition("[")[0].split("::")
    text = (ROOT / path).read_text(encoding="utf-8")
    assert all(f"def {name}(" in text or f"class {name}" in text for name in names)


def test_a_case_is_known_by_its_test_and_its_file():
    found = names_of("test/a.py::TestB::test_c[d::e[f]-1]")
    assert found == {
        "test/a.py",
        "test/a.py::TestB::test_c",
        "test/a.py::TestB::test_c[d::e[f]-1]",
    }
