"""Settings as a JSON schema, by which editors complete and check recipes."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any, get_args, get_origin

from torchrl_marl.settings.fields import Setting, settings_within
from torchrl_marl.settings.rules import (
    AnyOf,
    Arguments,
    Each,
    Matches,
    OneOf,
    Overrides,
    Range,
    Tagged,
)

__all__ = ["json_schema"]

_TYPES = {int: "integer", float: "number", bool: "boolean", str: "string"}


def json_schema(schema: type, title: str = "") -> dict[str, Any]:
    """Returns the JSON schema (draft 2020-12) of a file that holds settings.

    Args:
        schema (type): a dataclass, as :func:`~torchrl_marl.settings.settings_of` takes it.
        title (str): name of what is described.

    Examples:
        >>> from torchrl_marl.training.config import TrainConfig
        >>> json_schema(TrainConfig)["properties"]["seed"]["minimum"]
        0
    """
    head = {"$schema": "https://json-schema.org/draft/2020-12/schema", "title": title}
    return {**head, **_section(schema)}


def _section(schema: Any) -> dict[str, Any]:
    """A section by its dataclass, or by a config, whose values are then the defaults."""
    known = settings_within(schema if isinstance(schema, type) else type(schema))
    if not isinstance(schema, type):
        known = {name: replace(one, default=getattr(schema, name)) for name, one in known.items()}
    properties = {name: _property(setting, known) for name, setting in known.items()}
    return {"type": "object", "properties": properties, "additionalProperties": False}


def _property(setting: Setting, known: dict[str, Setting]) -> dict[str, Any]:
    about = {"description": _description(setting)}
    if note := setting.note(Tagged):
        return {**about, **_tagged(note, type(setting.default))}
    if setting.is_section:
        first = next(iter(settings_within(setting.kind).values()))
        section = _section(setting.default)
        if first.kind is str:  # a plain word sets it
            section = {"anyOf": [_value(first), section]}
        return {**about, **section}
    if overrides := setting.note(Overrides):
        of = known[overrides.of]
        tagged = of.note(Tagged)
        assert tagged is not None
        any_of = [_section(schema) for schema in _schemas(tagged).values()]
        words = {"enum": list(tagged.variants.words())}
        inner = {"anyOf": [words, *any_of, {"type": "null"}]}
        return {**about, "type": "object", "additionalProperties": inner}
    if setting.note(Arguments):
        return {**about, "type": "object"}
    return {**about, "default": setting.default, **_value(setting)}


def _tagged(note: Tagged, default: type) -> dict[str, Any]:
    """A section by its tag: a chain of conditions, the last being the default's schema."""
    chosen = _section(default)
    for word, schema in _schemas(note).items():
        if schema is not default:
            found = {"properties": {note.by: {"const": word}}, "required": [note.by]}
            chosen = {"if": found, "then": _section(schema), "else": chosen}
    return {"anyOf": [{"enum": list(note.variants.words())}, {"type": "object", **chosen}]}


def _schemas(note: Tagged) -> dict[str, type]:
    found = {word: note.variants.schema(word) for word in note.variants.words()}
    return {word: schema for word, schema in found.items() if schema is not None}


def _value(setting: Setting) -> dict[str, Any]:
    if get_origin(setting.kind) is dict:
        return {"type": "object"}
    if get_origin(setting.kind) is list:
        element = get_args(setting.kind)[0]
        inner: dict[str, Any] = {"type": _TYPES[element]}
        if words := setting.note(AnyOf):
            inner["enum"] = list(words.words)
        if each := setting.note(Each):
            inner |= _bounds(each.range)
        return _or_null(setting, {"type": "array", "items": inner})
    found: dict[str, Any] = {"type": _TYPES[setting.kind]}
    if limit := setting.note(Range):
        found |= _bounds(limit)
    if matches := setting.note(Matches):
        found["pattern"] = f"^({matches.pattern})$"
    if one := setting.note(OneOf):
        found = {"enum": list(one.words)}
        if one.form is not None:
            found = {"anyOf": [found, {"type": "string", "pattern": ":"}]}
    return _or_null(setting, found)


def _or_null(setting: Setting, found: dict[str, Any]) -> dict[str, Any]:
    return {"anyOf": [found, {"type": "null"}]} if setting.optional else found


def _bounds(limit: Range) -> dict[str, Any]:
    found = {}
    if not math.isinf(limit.low):
        found["exclusiveMinimum" if limit.above else "minimum"] = limit.low
    if not math.isinf(limit.high):
        found["exclusiveMaximum" if limit.below else "maximum"] = limit.high
    return found


def _description(setting: Setting) -> str:
    return "\n".join([setting.help, *(f"{word}: {text}" for word, text in setting.words.items())])
