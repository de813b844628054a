"""What an environment remembers beyond a reset: attributes that it leaves as they were."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torchrl.envs import EnvBase

from torchrl_marl.envs.check.layout import base_of

__all__ = ["Attributes", "attributes", "left_over"]

Attributes = dict[str, Any]
"""Name -> a copy of an attribute's value: a tensor, an array, a number or a text."""


def attributes(env: EnvBase) -> Attributes:
    """The values that an environment keeps in attributes of its own, also in lists and dicts."""
    return {name: _copy(x) for key, own in vars(base_of(env)).items() for name, x in _in(key, own)}


def left_over(first: tuple[Attributes, Attributes], second: tuple[Attributes, Attributes]) -> str:
    """Names of attributes that differ after two resets, where each left them as they were.

    Args:
        first, second (tuple of Attributes): before a reset, and after it.

    Examples:
        >>> left_over(({"level": 0, "x": 3}, {"level": 0, "x": 1}), ({"level": 5}, {"level": 5}))
        "'level'"
    """
    (before, after), (before_second, after_second) = first, second
    names = [
        name
        for name in after.keys() & before.keys() & after_second.keys() & before_second.keys()
        if not _equal(after[name], after_second[name])
        and _equal(before[name], after[name])
        and _equal(before_second[name], after_second[name])
    ]
    return ", ".join(map(repr, sorted(names)))


def _in(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, (torch.Tensor, np.ndarray, int, float, str)):
        yield name, value
    elif type(value) in (list, tuple, dict):
        pairs = value.items() if isinstance(value, dict) else enumerate(value)
        for key, own in pairs:
            yield from _in(f"{name}[{key!r}]", own)


def _copy(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.detach().clone()
    return value.copy() if isinstance(value, np.ndarray) else value


def _equal(first: Any, second: Any) -> bool:
    if isinstance(first, (torch.Tensor, np.ndarray)):
        if type(first) is not type(second) or first.shape != second.shape:
            return False
        return bool((first == second).all())
    return bool(first == second)
