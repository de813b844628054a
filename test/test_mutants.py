"""The list of mutants still applies to the package, and its table says that all are killed."""

import ast
from collections import Counter

import pytest
from mutants.run import HERE, ROOT, Mutant, OutOfDateError, load, row, table
from mutants.run import Outcome as Found

MUTANTS = load()
LEAST, LEAST_OF_AREA = 44, 4


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_a_mutant_applies(mutant):
    text = (ROOT / mutant.file).read_text(encoding="utf-8")
    wrong = mutant.applied(text)
    assert ast.dump(ast.parse(wrong)) != ast.dump(ast.parse(text))
    for test in mutant.tests:
        path, _, name = test.partition("::")
        assert f"def {name.rpartition('::')[2]}" in (ROOT / path).read_text(encoding="utf-8")


def test_an_old_text_is_found_once():
    mutant = Mutant("one", "masks", "x.py", old="a + b", new="a - b", tests=())
    assert mutant.applied("c = a + b") == "c = a - b"
    for text in ("c = a - b", "a + b; a + b"):
        with pytest.raises(OutOfDateError, match="mutant one is out of date"):
            mutant.applied(text)


def test_names_and_numbers():
    assert len({mutant.name for mutant in MUTANTS}) == len(MUTANTS) >= LEAST
    assert min(Counter(mutant.area for mutant in MUTANTS).values()) >= LEAST_OF_AREA


def test_the_table_says_that_all_are_killed():
    """Test and seconds of a row are those of the run that wrote it."""
    text = (HERE / "table.md").read_text(encoding="utf-8")
    written = [line.rpartition("| killed |")[0] for line in text.splitlines()]
    expected = [row(one, Found("killed", "")).rpartition("| killed |")[0] for one in MUTANTS]
    assert [start for start in written if start] == expected
    assert text.startswith(table([]).rstrip("\n"))
