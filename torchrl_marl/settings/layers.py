"""Layers of settings, such as a recipe and its overrides, and conversion of values."""

from __future__ import annotations

import dataclasses
import math
import sys
from collections.abc import Container, Mapping
from typing import Any, get_args, get_origin

__all__ = ["UNFIT", "WORD", "converted", "flatten", "merged", "plain", "unfold"]

WORD = ""
"""Key for ``ippo`` in ``learner=ippo learner.lr=1``, where a string stands for a section."""


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
    """Merges two nested mappings; values of ``above`` win.

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
    """Returns ``{"a": {"b": 1}}`` as ``{"a.b": 1}``; an empty mapping is left unchanged.

    Args:
        nested (mapping): settings.
        prefix (str): prefix of the keys.
        stop (container of str): dotted keys of mappings that are not flattened.

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


UNFIT: Any = object()
"""Marker of a value that cannot be converted."""

_LARGEST, _LARGEST_FLOAT = 2**63, int(sys.float_info.max)
_BOOLEAN_WORDS = {"true": True, "yes": True, "on": True, "false": False, "no": False, "off": False}


def converted(kind: Any, value: Any) -> Any:
    """Converts a value to a type; returns ``UNFIT`` if that is impossible.

    Whole floats can become integers, numbers can become strings, and strings can become numbers.
    Words separated by commas can become a list of strings.

    Examples:
        >>> converted(int, 1e3), converted(float, 1), converted(list[int], (1, 2.0))
        (1000, 1.0, [1, 2])
        >>> converted(list[str], "wandb, mlflow")
        ['wandb', 'mlflow']
        >>> converted(int, 1.5) is UNFIT
        True
    """
    if kind == list[str] and isinstance(value, str):
        value = _split_words(value)
    if get_origin(kind) is list:
        if not isinstance(value, (list, tuple)):
            return UNFIT
        read = [converted(get_args(kind)[0], element) for element in value]
        return UNFIT if any(element is UNFIT for element in read) else read
    if get_origin(kind) is dict:
        return plain(value) if isinstance(value, Mapping) else UNFIT
    try:
        return _CONVERSIONS[kind](value)
    except (ValueError, KeyError):
        return UNFIT


def _split_words(text: str) -> Any:
    """Splits a text at commas; returns ``UNFIT`` if a part is empty or has brackets."""
    words = [word.strip() for word in text.split(",")]
    return words if all(words) and not set("[]{}") & set(text) else UNFIT


def plain(value: Any) -> Any:
    """Returns a value as plain YAML types; returns ``UNFIT`` if that is impossible."""
    if isinstance(value, Mapping):
        read = {key: plain(x) for key, x in value.items() if key != WORD or len(value) == 1}
        known = all(isinstance(key, (str, int, float)) for key in read)
        return read if known and all(x is not UNFIT for x in read.values()) else UNFIT
    if isinstance(value, (list, tuple)):
        elements = [plain(element) for element in value]
        return UNFIT if any(element is UNFIT for element in elements) else elements
    return value if value is None or isinstance(value, (bool, int, float, str)) else UNFIT


def _int(value: Any) -> int:
    if isinstance(value, str) or (isinstance(value, float) and value.is_integer()):
        value = int(value)
    if type(value) is not int or abs(value) >= _LARGEST:
        raise ValueError
    return value


def _float(value: Any) -> float:
    if type(value) is int and abs(value) >= _LARGEST_FLOAT:
        raise ValueError
    if type(value) not in (int, float, str):
        raise ValueError
    return float(value)


def _bool(value: Any) -> bool:
    if isinstance(value, str):
        return _BOOLEAN_WORDS[value.lower()]
    if value not in (0, 1) or math.isnan(value):
        raise ValueError
    return bool(value)


def _str(value: Any) -> str:
    if not isinstance(value, (str, int, float)):
        raise ValueError
    return str(value).lower() if isinstance(value, bool) else str(value)


_CONVERSIONS = {int: _int, float: _float, bool: _bool, str: _str}
