"""The settings that a dataclass declares, and their JSON schema."""

from __future__ import annotations

import ast
import dataclasses
import functools
import inspect
import math
import sys
import textwrap
import types
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Annotated, Any, TypeVar, Union, get_args, get_origin, get_type_hints

from torchrl_marl.errors import UserError
from torchrl_marl.settings.rules import (
    AlsoCalled,
    AnyOf,
    Arguments,
    Each,
    Formerly,
    Matches,
    OneOf,
    Overrides,
    Range,
    ReadWhere,
    Tagged,
    Variants,
)

__all__ = [
    "Setting",
    "all_settings",
    "json_schema",
    "schemas_by_word",
    "schemas_of",
    "settings_of",
    "settings_within",
    "with_words",
]

_Note = TypeVar("_Note")


@dataclasses.dataclass(frozen=True)
class Setting:
    """One setting, or one section of settings.

    Args:
        key (str): dotted name.
        kind (type): type of its value, without ``None`` and ``Annotated``; a dataclass for a
            section.
        default: its default, or its value in a given config.
        help (str): its meaning.
        optional (bool): whether it may be ``None``.
        notes (tuple): its annotations, such as rules, conditions and other names.
        markdown (str): its meaning, with Markdown code spans.
    """

    key: str
    kind: Any
    default: Any
    help: str
    optional: bool = False
    notes: tuple[Any, ...] = ()
    markdown: str = ""

    @property
    def is_section(self) -> bool:
        """True for a section."""
        return dataclasses.is_dataclass(self.kind)

    @property
    def words(self) -> Mapping[str, str]:
        """The meaning of each allowed word; empty if the setting is not a choice among words."""
        rule = self.note(OneOf)
        return {} if rule is None else rule.words

    @property
    def explanation(self) -> str:
        """The meaning of the setting, followed by the list of allowed words."""
        if not self.words:
            return self.help
        number = "Any" if self.note(AnyOf) else "One"
        return f"{self.help} {number} of {', '.join(self.words)}."

    def note(self, kind: type[_Note]) -> _Note | None:
        """Returns the setting's annotation of a given class, or None."""
        return next((note for note in self.notes if isinstance(note, kind)), None)

    def read_where(self) -> list[ReadWhere]:
        """Returns the conditions under which the setting is read."""
        return [note for note in self.notes if isinstance(note, ReadWhere)]

    def former_names(self) -> list[str]:
        """Returns the former names of the setting in its section."""
        return [n for note in self.notes if isinstance(note, Formerly) for n in note.names]

    def other_names(self) -> list[str]:
        """Returns the names of the setting in other libraries."""
        return [n for note in self.notes if isinstance(note, AlsoCalled) for n in note.names]


_settings_by_type: dict[type, dict[str, Setting]] = {}


def settings_within(schema: type) -> dict[str, Setting]:
    """Returns the fields of a dataclass by name, without the fields of its sections."""
    if schema not in _settings_by_type:
        _settings_by_type[schema] = _read_fields(schema)
    return _settings_by_type[schema]


def _read_fields(schema: Any) -> dict[str, Setting]:
    hints, helps = get_type_hints(schema, include_extras=True), _field_descriptions(schema)
    found = {}
    for field in dataclasses.fields(schema):
        kind, optional, notes = _split_hint(hints[field.name])
        default = field.default
        if field.default_factory is not dataclasses.MISSING:
            default = field.default_factory()
        text = helps.get(field.name, "")
        plain, markdown = text.replace("``", ""), text.replace("``", "`")
        found[field.name] = Setting(field.name, kind, default, plain, optional, notes, markdown)
    return found


def settings_of(schema: Any) -> dict[str, Setting]:
    """Returns all settings of a dataclass and of its sections, by dotted name.

    For a section with a tag, these are the settings of its default schema or, if a config is given,
    of the schema in the config.

    Args:
        schema (type or config): a dataclass with an explanatory string below each field, or a
            config, whose values then take the place of the defaults.

    Examples:
        >>> from torchrl_marl.training.config import TrainConfig
        >>> settings_of(TrainConfig)["learner.gamma"].help
        'Discount factor.'
    """
    is_type = isinstance(schema, type)
    found: dict[str, Setting] = {}
    for name, setting in settings_within(schema if is_type else type(schema)).items():
        if not is_type:
            setting = replace(setting, default=getattr(schema, name))
        if not setting.is_section:
            found[name] = setting
            continue
        for key, one in with_words(setting, settings_of(setting.default)).items():
            found[f"{name}.{key}"] = replace(one, key=f"{name}.{key}")
    return found


def all_settings(schema: type) -> dict[str, Setting]:
    """Returns all settings of a dataclass and of all schemas of its sections, by dotted name.

    A section with a tag, or a mapping of arguments, can have one of several schemas. The result has
    the settings of all of them, while :func:`settings_of` reads only one schema of each section. If
    several schemas have the same setting, the first is returned.

    Args:
        schema (type): a dataclass, as for :func:`settings_of`.
    """
    found: dict[str, Setting] = {}
    for name, setting in settings_within(schema).items():
        if not setting.is_section:
            found[name] = setting
        for kind in schemas_of(setting):
            for key, one in with_words(setting, all_settings(kind)).items():
                found.setdefault(f"{name}.{key}", replace(one, key=f"{name}.{key}"))
    return found


def schemas_of(setting: Setting) -> Iterator[type]:
    """Yields the possible schemas of a section or mapping of arguments, the default first."""
    if setting.is_section:
        yield type(setting.default)
    note: Tagged | Arguments | None = setting.note(Tagged) or setting.note(Arguments)
    if note is not None:
        yield from schemas_by_word(note.variants).values()


def schemas_by_word(variants: Variants) -> dict[str, type]:
    """Returns the schema of each word that has one, without those that cannot be imported."""
    found = {word: _schema_of(variants, word) for word in variants.words()}
    return {word: schema for word, schema in found.items() if schema is not None}


def _schema_of(variants: Variants, word: str) -> type | None:
    try:
        return variants.schema(word)
    except UserError:
        return None


def with_words(setting: Setting, inner: dict[str, Setting]) -> dict[str, Setting]:
    """Returns the settings of a section, with the allowed words added to its tag."""
    note = setting.note(Tagged)
    if note is None:
        return inner
    tag = inner[note.by]
    return {**inner, note.by: replace(tag, notes=(note.rule,))}


def _split_hint(hint: Any) -> tuple[Any, bool, tuple[Any, ...]]:
    """Takes a type hint apart: ``Annotated[int | None, x]`` gives ``(int, True, (x,))``."""
    optional, notes = False, ()
    while True:
        if get_origin(hint) is Annotated:
            hint, *more = get_args(hint)
            notes = (*notes, *more)
        elif get_origin(hint) in (Union, types.UnionType):
            optional = True
            hint = next(arg for arg in get_args(hint) if arg is not type(None))
        else:
            return hint, optional, notes


def _field_descriptions(schema: type) -> dict[str, str]:
    """Returns the string below each field of a class and its base classes."""
    found: dict[str, str] = {}
    for cls in reversed(schema.__mro__[:-1]):
        body = _class_body(cls)
        for node, below in zip(body, body[1:]):
            if not isinstance(node, ast.AnnAssign) or not isinstance(node.target, ast.Name):
                continue
            if isinstance(below, ast.Expr) and isinstance(below.value, ast.Constant):
                found[node.target.id] = " ".join(str(below.value.value).split())
    return found


def _class_body(cls: type) -> list[ast.stmt]:
    if cls.__qualname__ in (known := _parse_classes(cls.__module__)):
        return known[cls.__qualname__].body
    try:
        source = textwrap.dedent(inspect.getsource(cls))
    except (OSError, TypeError):  # a class that was typed into an interpreter
        return []
    return ast.parse(source).body[0].body  # type: ignore[attr-defined]


@functools.cache
def _parse_classes(module: str) -> dict[str, ast.ClassDef]:
    """Returns the top-level classes of one of this package's modules, which it parses once."""
    if module.partition(".")[0] != __package__.partition(".")[0]:
        return {}  # others' modules may be reloaded
    try:
        source = inspect.getsource(sys.modules[module])
    except (KeyError, OSError, TypeError):
        return {}
    return {x.name: x for x in ast.parse(source).body if isinstance(x, ast.ClassDef)}


_TYPES = {int: "integer", float: "number", bool: "boolean", str: "string"}


def json_schema(schema: type, title: str = "") -> dict[str, Any]:
    """Returns the JSON schema (draft 2020-12) of a file that holds settings.

    Args:
        schema (type): a dataclass, as for :func:`~torchrl_marl.settings.settings_of`.
        title (str): title of the schema.

    Examples:
        >>> from torchrl_marl.training.config import TrainConfig
        >>> json_schema(TrainConfig)["properties"]["seed"]["minimum"]
        0
    """
    head = {"$schema": "https://json-schema.org/draft/2020-12/schema", "title": title}
    return {**head, **_section_schema(schema)}


def _section_schema(schema: Any) -> dict[str, Any]:
    """Returns the JSON schema of a section; a given config provides the defaults."""
    known = settings_within(schema if isinstance(schema, type) else type(schema))
    if not isinstance(schema, type):
        known = {name: replace(one, default=getattr(schema, name)) for name, one in known.items()}
    properties = {name: _property_schema(setting, known) for name, setting in known.items()}
    return {"type": "object", "properties": properties, "additionalProperties": False}


def _property_schema(setting: Setting, known: dict[str, Setting]) -> dict[str, Any]:
    about = {"description": _describe_setting(setting)}
    if note := setting.note(Tagged):
        return {**about, **_tagged_schema(note, type(setting.default))}
    if setting.is_section:
        first = next(iter(settings_within(setting.kind).values()))
        section = _section_schema(setting.default)
        if first.kind is str:  # a string in place of the section sets it
            section = {"anyOf": [_value_schema(first), section]}
        return {**about, **section}
    if overrides := setting.note(Overrides):
        of = known[overrides.of]
        tagged = of.note(Tagged)
        assert tagged is not None
        any_of = [_section_schema(schema) for schema in schemas_by_word(tagged.variants).values()]
        words = {"enum": list(tagged.variants.words())}
        inner = {"anyOf": [words, *any_of, {"type": "null"}]}
        return {**about, "type": "object", "additionalProperties": inner}
    if setting.note(Arguments):
        return {**about, "type": "object"}
    return {**about, "default": setting.default, **_value_schema(setting)}


def _tagged_schema(note: Tagged, default: type) -> dict[str, Any]:
    """Returns a tagged section's JSON schema: a condition per tag, then the default schema."""
    chosen = _section_schema(default)
    for word, schema in schemas_by_word(note.variants).items():
        if schema is not default:
            found = {"properties": {note.by: {"const": word}}, "required": [note.by]}
            chosen = {"if": found, "then": _section_schema(schema), "else": chosen}
    return {"anyOf": [{"enum": list(note.variants.words())}, {"type": "object", **chosen}]}


def _value_schema(setting: Setting) -> dict[str, Any]:
    if get_origin(setting.kind) is dict:
        return {"type": "object"}
    if get_origin(setting.kind) is list:
        element = get_args(setting.kind)[0]
        inner: dict[str, Any] = {"type": _TYPES[element]}
        if words := setting.note(AnyOf):
            inner["enum"] = list(words.words)
        if each := setting.note(Each):
            inner |= _range_schema(each.range)
        return _allow_null(setting, {"type": "array", "items": inner})
    found: dict[str, Any] = {"type": _TYPES[setting.kind]}
    if limit := setting.note(Range):
        found |= _range_schema(limit)
    if matches := setting.note(Matches):
        found["pattern"] = f"^({matches.pattern})$"
    if one := setting.note(OneOf):
        found = {"enum": list(one.words)}
        if one.form is not None:
            found = {"anyOf": [found, {"type": "string", "pattern": ":"}]}
    return _allow_null(setting, found)


def _allow_null(setting: Setting, found: dict[str, Any]) -> dict[str, Any]:
    return {"anyOf": [found, {"type": "null"}]} if setting.optional else found


def _range_schema(limit: Range) -> dict[str, Any]:
    found = {}
    if not math.isinf(limit.low):
        found["exclusiveMinimum" if limit.above else "minimum"] = limit.low
    if not math.isinf(limit.high):
        found["exclusiveMaximum" if limit.below else "maximum"] = limit.high
    return found


def _describe_setting(setting: Setting) -> str:
    return "\n".join([setting.help, *(f"{word}: {text}" for word, text in setting.words.items())])
