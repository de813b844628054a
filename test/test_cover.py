"""Pairwise covers: every possible pair occurs, in few rows."""

from cover import cover, pairs_of


def test_every_pair_occurs():
    values = {"a": [0, 1], "b": "xyz", "c": [True, False], "d": range(4)}
    rows = cover(values)
    assert len(rows) == 12  # of 48; b and d need 12
    found = set().union(*map(pairs_of, rows))
    assert len(found) == 2 * 3 + 2 * 2 + 2 * 4 + 3 * 2 + 3 * 4 + 2 * 4


def test_impossible_combinations_are_left_out():
    def exists(a, b, c):
        return a == "x" or b == 0

    rows = cover({"a": "xy", "b": [0, 1], "c": [0, 1]}, exists)
    assert all(exists("xy"[a], b, c) for a, b, c in rows)
    assert {(a, b) for a, b, _ in rows} == {(0, 0), (0, 1), (1, 0)}
    assert {(a, c) for a, _, c in rows} == {(a, c) for a in (0, 1) for c in (0, 1)}


def test_two_axes_give_the_full_product():
    assert cover({"a": "xy", "b": "xyz"}) == [(i, j) for i in range(2) for j in range(3)]
