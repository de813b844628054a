"""State that an environment keeps beyond a reset: attributes that a reset leaves unchanged."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torchrl.envs import EnvBase

from torchrl_marl.envs.check.layout import base_of

__all__ = ["Attributes", "attributes", "left_over", "name_of", "put_back"]

Path = tuple[Any, ...]
Attributes = dict[Path, Any]
"""Name, and what follows in lists and dicts -> a copy of a tensor, array, number or text."""

_DEEPEST = 3


def attributes(env: EnvBase) -> Attributes:
    """Returns the values of an environment's own attributes, also in lists and dicts."""
    return {path: _copy(x) for key, own in vars(base_of(env)).items() for path, x in _in(own, key)}


def left_over(
    first: tuple[Attributes, Attributes], second: tuple[Attributes, Attributes]
) -> list[Path]:
    """Returns attributes that differ after two resets, each of which left them unchanged.

    Args:
        first, second (tuple of Attributes): before a reset, and after it.

    Examples:
        >>> was, now = {("level",): 0, ("x",): 3}, {("level",): 0, ("x",): 1}
        >>> left_over((was, now), ({("level",): 5}, {("level",): 5}))
        [('level',)]
    """
    (before, after), (before_second, after_second) = first, second
    kept = after.keys() & before.keys() & after_second.keys() & before_second.keys()
    left = (
        path
        for path in kept
        if not _equal(after[path], after_second[path])
        and _equal(before[path], after[path])
        and _equal(before_second[path], after_second[path])
    )
    return sorted(left, key=str)


def put_back(env: EnvBase, paths: list[Path], values: Attributes) -> None:
    """Restores the former values of attributes."""
    for path in paths:
        holder, *keys = base_of(env), *path
        if len(path) == 1:
            setattr(holder, path[0], _copy(values[path]))
            continue
        holder = getattr(holder, keys[0])
        for key in keys[1:-1]:
            holder = holder[key]
        holder[keys[-1]] = _copy(values[path])


def name_of(path: Path) -> str:
    """Returns an attribute's path in Python's syntax."""
    return repr(path[0] + "".join(f"[{key!r}]" for key in path[1:]))


def _in(value: Any, *path: Any) -> Iterator[tuple[Path, Any]]:
    if isinstance(value, (torch.Tensor, np.ndarray, int, float, str)):
        yield path, value
    elif type(value) in (list, dict) and len(path) < _DEEPEST:
        for key, own in value.items() if isinstance(value, dict) else enumerate(value):
            yield from _in(own, *path, key)


def _copy(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.detach().clone()
    return value.copy() if isinstance(value, np.ndarray) else value


def _equal(first: Any, second: Any) -> bool:
    if isinstance(first, (torch.Tensor, np.ndarray)):
        if type(first) is not type(second) or first.shape != second.shape:
            return False
        return bool(torch.as_tensor(first == second).all())
    return bool(first == second)
