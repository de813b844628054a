"""Settings as plain mappings: nested, or with dotted keys, or both."""

from __future__ import annotations

import dataclasses
from collections.abc import Container, Mapping
from typing import Any

__all__ = ["WORD", "flatten", "merged", "unfold"]

WORD = ""
"""Where the plain word of a section stands beside settings of it: ``learner=ippo learner.lr=1``."""


def unfold(layer: Mapping[str, Any]) -> dict[str, Any]:
    """Returns ``{"a.b": 1, "a": {"c": 2}}`` as ``{"a": {"b": 1, "c": 2}}``.

    Examples:
        >>> unfold({"a.b": 1, "a": {"c": 2}})
        {'a': {'b': 1, 'c': 2}}
    """
    nested: dict[str, Any] = {}
    for key, value in layer.items():
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            value = dataclasses.asdict(value)
        if isinstance(value, Mapping):
            value = unfold(value)
        for part in reversed(str(key).split(".")):
            value = {part: value}
        nested = merged(nested, value)
    return nested


def merged(below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    """Returns two nested mappings as one; what stands above wins.

    Examples:
        >>> merged({"a": {"b": 1, "c": 2}}, {"a": {"c": 3}})
        {'a': {'b': 1, 'c': 3}}
    """
    both = dict(below)
    for key, value in above.items():
        old = both.get(key)
        if isinstance(old, Mapping) and isinstance(value, Mapping):
            both[key] = merged(old, value)
        elif isinstance(old, str) and isinstance(value, Mapping):
            both[key] = {WORD: old, **value}
        elif isinstance(old, Mapping) and isinstance(value, str):
            both[key] = {**old, WORD: value}
        else:
            both[key] = value
    return both


def flatten(
    nested: Mapping[str, Any], prefix: str = "", stop: Container[str] = ()
) -> dict[str, Any]:
    """Returns ``{"a": {"b": 1}}`` as ``{"a.b": 1}``; an empty mapping stays as it is.

    Args:
        nested (mapping): settings.
        prefix (str): what the keys begin with.
        stop (container of str): keys whose values stay as they are.

    Examples:
        >>> flatten({"a": {"b": 1}, "c": {}})
        {'a.b': 1, 'c': {}}
    """
    flat: dict[str, Any] = {}
    for key, value in nested.items():
        name = f"{prefix}{key}"
        if isinstance(value, Mapping) and value and name not in stop:
            flat |= flatten(value, f"{name}.", stop)
        else:
            flat[name] = value
    return flat
