"""Formatting of values, types and unknown names for messages."""

from __future__ import annotations

import difflib
from collections.abc import Container, Iterable, Mapping
from typing import Any, get_origin

from torchrl_marl.errors import closest, quoted

__all__ = ["expectation", "listed", "shown", "unknown_setting"]

_TYPES = {
    int: "an integer",
    float: "a number",
    bool: "true or false",
    str: "a text",
    list[int]: "a list of integers",
    list[str]: "a list of texts",
}


def shown(value: Any) -> str:
    """Returns a value in YAML notation: ``null``, ``true``, ``'text'``; long values are cut.

    Examples:
        >>> shown(None), shown(True), shown("a"), shown([1, 2])
        ('null', 'true', "'a'", '[1, 2]')
    """
    if value is None:
        return "null"
    return str(value).lower() if isinstance(value, bool) else quoted(value)


def listed(words: Iterable[str]) -> str:
    """Returns words as a list in a sentence.

    Examples:
        >>> listed(["a", "b", "c"]), listed(["a"])
        ('a, b or c', 'a')
    """
    *most, last = words
    return f"{', '.join(most)} or {last}" if most else last


def expectation(kind: Any, optional: bool = False) -> str:
    """Returns the description of a type: ``"an integer"``, ``"a number or null"``."""
    text = _TYPES.get(kind, "key: value pairs" if get_origin(kind) is dict else str(kind))
    return f"{text} or null" if optional else text


def unknown_setting(
    key: str, known: Mapping[str, Iterable[str]], at: str = "", *, first: Container[str] = ()
) -> str:
    """Returns the error message for an unknown setting, with suggestions.

    Args:
        key (str): name as it was given.
        known (mapping): dotted name of each setting -> its names in other libraries.
        at (str): prefix of the names in messages, such as ``"groups.agents."``.
        first (container of str): settings that the chosen algorithm reads, which are suggested
            first.

    Examples:
        >>> unknown_setting("gama", {"learner.gamma": (), "seed": ()})[:52]
        "unknown setting 'gama'; did you mean 'learner.gamma'"
    """
    names = _similar_names(key, known, first)
    meant = listed([repr(f"{at}{name}") for name in names[:3]]) if names else ""
    suggestion = f"did you mean {meant}? " if meant else ""
    return (
        f"unknown setting {quoted(at + key)}; {suggestion}`torchrl-marl list settings` shows all."
    )


def _similarity(word: str, other: str) -> float:
    return difflib.SequenceMatcher(None, word, other).ratio()


def _similar_names(
    key: str, known: Mapping[str, Iterable[str]], first: Container[str]
) -> list[str]:
    """Returns names with the same last part as the key, or else names with a similar last part."""
    inside, _, leaf = key.rpartition(".")
    if inside in known:
        return [inside]
    leaves = {name: name.rpartition(".")[2] for name in known}
    rather = [name for name in known if name in first]
    equal = [name for name in known if leaf == leaves[name] or leaf in known[name]]
    names = [name for name in equal if name in rather] or equal
    if not names:
        near = [closest(leaf, [leaves[name] for name in among]) for among in (rather, known)]
        # A setting that the algorithm does not read is suggested only for a closer match.
        best = max(filter(None, near), key=lambda x: _similarity(leaf, x), default=None)
        among = rather if best is not None and best == near[0] else list(known)
        names = [name for name in among if leaves[name] == best]
    close = difflib.get_close_matches(key[:100], names, n=1, cutoff=0.85)
    return close or [name for name in names if name.startswith(f"{inside}.")] or names
