"""Pairwise covers of products of parameters."""

from collections.abc import Callable, Iterable
from itertools import combinations, product
from typing import Any

import pytest


def pairwise(where: Callable[..., bool] | None = None, **axes: Iterable[Any]):
    """Parametrizes a test with few rows in which every pair of values occurs.

    ``where`` takes a row by names, and returns whether the combination exists.
    """
    values = {name: list(choices) for name, choices in axes.items()}
    rows = cover(values, where)
    ids = [
        "-".join(_label(name, values[name][i], i) for name, i in zip(values, row)) for row in rows
    ]
    chosen = [tuple(values[name][i] for name, i in zip(values, row)) for row in rows]
    return pytest.mark.parametrize(tuple(values), chosen, ids=ids)


def cover(values: dict[str, list], where: Callable[..., bool] | None = None) -> list[tuple]:
    """Rows of indices, chosen greedily: the next has the most uncovered pairs."""
    allowed = [
        row
        for row in product(*(range(len(choices)) for choices in values.values()))
        if where is None or where(**{name: values[name][i] for name, i in zip(values, row)})
    ]
    missing = set().union(*map(pairs_of, allowed))
    rows = []
    while missing:
        rows.append(max(allowed, key=lambda row: len(pairs_of(row) & missing)))
        missing -= pairs_of(rows[-1])
    return sorted(rows)


def pairs_of(row: tuple) -> set:
    """``{((axis, index), (axis, index))}``"""
    return set(combinations(enumerate(row), 2))


def _label(name: str, value: Any, i: int) -> str:
    return str(value) if isinstance(value, (str, int, float, tuple, list)) else f"{name}{i}"
