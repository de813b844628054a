"""The list of mutants still applies to the package, and its table says that all are killed."""

import ast
from collections import Counter

import pytest
from mutants.run import HERE, ROOT, Mutant, OutOfDateError, load, row, table
from mutants.run import Outcome as Found

MUTANTS = load()
LEAST, LEAST_OF_AREA = 44, 4


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_mutant_applies(mutant):
    text = (ROOT / mutant.file).read_text(encoding="utf-8")
    wrong = mutant.applied(text)
    assert ast.dump(ast.parse(wrong)) != ast.dump(ast.parse(text))
    for test in mutant.tests:
        path, _, name = test.partition("::")
        assert f"def {name.rpartition('::')[2]}" in (ROOT / path).read_text(encoding="utf-8")


def test_mutant_requires_exactly_one_match():
    mutant = Mutant("one", "masks", "x.py", old="a + b", new="a - b", tests=())
    assert mutant.applied("c = a + b") == "c = a - b"
    for text in ("c = a - b", "a + b; a + b"):
        with pytest.raises(OutOfDateError, match="mutant one is out of date"):
            mutant.applied(text)


def test_mutants_are_unique_and_enough_per_area():
    assert len({mutant.name for mutant in MUTANTS}) == len(MUTANTS) >= LEAST
    assert min(Counter(mutant.area for mutant in MUTANTS).values()) >= LEAST_OF_AREA


def test_table_lists_all_mutants_as_killed():
    """The columns for test and seconds are not compared."""
    text = (HERE / "table.md").read_text(encoding="utf-8")
    written = [line.rpartition("| killed |")[0] for line in text.splitlines()]
    expected = [row(one, Found("killed", "")).rpartition("| killed |")[0] for one in MUTANTS]
    assert [start for start in written if start] == expected
    assert text.startswith(table([]).rstrip("\n"))
