"""Reads layers of settings, given as plain values, into a typed config."""

from __future__ import annotations

import os
import re
import warnings
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import is_dataclass, replace
from typing import Any, TypeVar, get_origin

from torchrl_marl.errors import ConfigError, closest, quoted
from torchrl_marl.settings.fields import (
    Setting,
    all_settings,
    schemas_by_word,
    schemas_of,
    settings_of,
    settings_within,
)
from torchrl_marl.settings.formatting import expectation, listed, shown, unknown_setting
from torchrl_marl.settings.layers import UNFIT, WORD, converted, flatten, merged, plain, unfold
from torchrl_marl.settings.rules import Arguments, Overrides, Tagged, Variants

__all__ = ["Reader", "normalized", "overridden", "read", "warn_renamed", "with_new_names"]


def with_new_names(
    schema: type, layer: Mapping[str, Any], *, warn: bool = True, path: str = ""
) -> dict[str, Any]:
    """Replaces former names of settings (:class:`Formerly`) by the current ones.

    If a setting has become an entry of a mapping of arguments, its value is moved there, or dropped
    if it is the default.

    Args:
        schema (type): a dataclass.
        layer (mapping): nested settings.
        warn (bool): whether to warn about former names; False for files that a program wrote.
        path (str): prefix of the names in messages.

    Raises:
        ConfigError: a setting is given under both names.
    """
    renamed = dict(layer)
    for name, setting in settings_within(schema).items():
        if setting.is_section and isinstance(renamed.get(name), Mapping):
            inner = type(setting.default)
            renamed[name] = with_new_names(inner, renamed[name], warn=warn, path=f"{path}{name}.")
        for old in setting.former_names():
            if old in renamed:
                _refuse_both(old in renamed and name in renamed, f"{path}{old}", f"{path}{name}")
                if warn:
                    warn_renamed(f"{path}{old}", f"{path}{name}")
                renamed[name] = renamed.pop(old)
        if arguments := setting.note(Arguments):
            _move_to_arguments(arguments, name, renamed, warn, path)
    return renamed


def warn_renamed(old: str, new: str) -> None:
    """Warns that a former name will be removed."""
    warnings.warn(
        f"{old} was renamed to {new}; the old name works in this version only.",
        FutureWarning,
        stacklevel=3,
    )


def _move_to_arguments(
    arguments: Arguments, name: str, renamed: dict[str, Any], warn: bool, path: str
) -> None:
    """Moves settings that have become arguments into their mapping of arguments."""
    for old, setting in _moved_settings(arguments).items():
        if old not in renamed:
            continue
        value, new = renamed.pop(old), f"{path}{name}.{setting.key}"
        if value == setting.default:
            continue
        current = dict(renamed.get(name) or {})
        _refuse_both(setting.key in current, f"{path}{old}", new)
        if warn:
            warn_renamed(f"{path}{old}", new)
        renamed[name] = {**current, setting.key: value}


def _moved_settings(arguments: Arguments) -> dict[str, Setting]:
    return {
        old: setting
        for schema in schemas_by_word(arguments.variants).values()
        for setting in settings_within(schema).values()
        for old in setting.former_names()
    }


def _refuse_both(both: bool, old: str, new: str) -> None:
    if both:
        raise ConfigError(
            f"{old} and {new} are both given, but are the same setting; use only {new}."
        )


def normalized(schema: type, layer: Mapping[str, Any], *, warn: bool = True) -> dict[str, Any]:
    """Returns a layer as nested settings with current names; strings for sections are expanded.

    Args:
        schema (type): a dataclass.
        layer (mapping): nested settings, dotted keys, or both.
        warn (bool): whether to warn about former names.

    Examples:
        >>> from torchrl_marl.training.config import TrainConfig
        >>> normalized(TrainConfig, {"learner": "ippo", "learner.lr": 1e-3})
        {'learner': {'algorithm': 'ippo', 'lr': 0.001}}
    """
    return with_new_names(schema, _expand_words([schema], unfold(layer)), warn=warn)


def _expand_words(schemas: Iterable[type], layer: Mapping[str, Any]) -> dict[str, Any]:
    """Replaces a string given for a section by a section with this string as its first setting.

    Args:
        schemas (iterable of type): possible schemas of the layer.
        layer (mapping): nested settings.
    """
    placed = dict(layer)
    sections: dict[str, list[type]] = {}
    for schema in schemas:
        known = settings_within(schema)
        for name, setting in known.items():
            if setting.is_section:
                sections.setdefault(name, []).extend(schemas_of(setting))
            elif (overrides := setting.note(Overrides)) and isinstance(placed.get(name), Mapping):
                of = list(schemas_of(known[overrides.of]))
                placed[name] = {group: _expand_word(of, own) for group, own in placed[name].items()}
    return placed | {
        n: _expand_word(sections[n], placed[n]) for n in placed.keys() & sections.keys()
    }


def _expand_word(schemas: list[type], value: Any) -> Any:
    firsts = [next(iter(settings_within(schema).values())) for schema in schemas]
    first = next((one.key for one in firsts if one.kind is str), firsts[0].key)
    if isinstance(value, str):
        return {first: value}
    if not isinstance(value, Mapping):
        return value
    value = dict(value)
    if WORD in value:
        value = {first: value.pop(WORD), **value}
    return _expand_words(schemas, value)


T = TypeVar("T")


def read(schema: type[T], *layers: Mapping[str, Any], at: str = "", hints: Iterable[str] = ()) -> T:
    """Returns the defaults of a schema, overridden by layers in order.

    Args:
        schema (type): a dataclass.
        layers (mapping): nested settings, dotted keys, or both.
        at (str): prefix of the names in messages, such as ``"groups.agents."``.
        hints (iterable of str): further names to suggest for an unknown setting.

    Raises:
        ConfigError: a setting is unknown or does not apply, or a value has a wrong type.

    Examples:
        >>> from torchrl_marl.training.config import TrainConfig
        >>> read(TrainConfig, {"seed": 1}, {"learner.lr": 1e-3}).learner.lr
        0.001
    """
    reader = Reader(schema, at, hints)
    config = reader.read(*layers)
    for key, text in reader.inapplicable.items():
        raise ConfigError(f"{text}; leave {key} out.")
    return config


def overridden(note: Tagged, base: Any, own: Mapping[str, Any], at: str = "") -> Any:
    """Returns a section with some settings replaced; a new tag changes its schema.

    If the schema changes, settings that both schemas have are kept if they differ from their
    defaults. If the schemas have a common base class, only settings of that class are kept.

    Args:
        note (Tagged): annotation that lists the section's schemas.
        base (config): the section.
        own (mapping): settings that replace those of ``base``.
        at (str): as in :func:`read`.

    Raises:
        ConfigError: a setting is unknown, or a value has a wrong type.
    """
    own = unfold(own)
    schema = _find_schema(note, own.get(note.by, getattr(base, note.by)), f"{at}{note.by}")
    return read(schema, _shared_settings(base, schema), own, at=at)


def _shared_settings(base: Any, schema: type) -> dict[str, Any]:
    """Returns the settings of a section that are kept under another schema, by dotted key."""
    values = {key: one.default for key, one in settings_of(base).items()}
    if type(base) is schema:
        return values
    bases = [kind for kind in type(base).__mro__ if kind in schema.__mro__ and is_dataclass(kind)]
    shared, defaults = settings_of(bases[0] if bases else schema), settings_of(type(base))
    return {k: x for k, x in values.items() if k in shared and x != defaults[k].default}


class Reader:
    """Reader of layers of settings.

    After :meth:`read`, ``inapplicable`` lists the given settings that the chosen algorithm or
    library does not have: dotted key -> beginning of a sentence about it. They are left out of the
    config. ``by_default`` holds the keys of the inapplicable settings that have the default value
    of another algorithm or library.

    Args:
        schema, at, hints: as in :func:`read`.
    """

    def __init__(self, schema: type[T], at: str = "", hints: Iterable[str] = ()) -> None:
        self.schema, self.at, self.hints = schema, at, hints
        self.inapplicable: dict[str, str] = {}
        self.by_default: set[str] = set()
        self._layer: dict[str, Any] = {}
        self._foreign: dict[str, dict[str, Any]] = {}  # section -> settings of other variants

    def read(self, *layers: Mapping[str, Any], warn: bool = True) -> Any:
        """Returns the config.

        Args:
            layers (mapping): nested settings, dotted keys, or both.
            warn (bool): whether to warn about former names.
        """
        try:
            for layer in layers:
                self._layer = merged(self._layer, normalized(self.schema, layer, warn=warn))
            return self._read_section(self.schema, self._layer, "")
        except RecursionError:
            raise ConfigError("settings are nested too deeply; check their brackets.") from None

    def _read_section(self, schema: Any, layer: Mapping[str, Any], path: str) -> Any:
        """Returns a dataclass's defaults, or a config, with the settings of a layer in place."""
        kind = schema if isinstance(schema, type) else type(schema)
        known = settings_within(kind)
        values = {}
        for name in layer:
            if name not in known:
                raise self._unknown_error(next(iter(flatten({f"{path}{name}": layer[name]}))))
        for name, setting in known.items():
            if name not in layer:
                continue
            value, key = layer[name], f"{path}{name}"
            if setting.is_section:
                values[name] = self._read_subsection(setting, value, key)
            elif overrides := setting.note(Overrides):
                base = values.get(overrides.of, known[overrides.of].default)
                values[name] = self._read_overrides(setting, value, key, base, known[overrides.of])
            else:
                values[name] = self._read_value(setting, value, key)
        for name, setting in known.items():
            if arguments := setting.note(Arguments):
                word = values.get(arguments.by, known[arguments.by].default)
                given = values.get(name, setting.default)
                values[name] = self._read_arguments(arguments, word, given, f"{path}{name}.")
        return schema(**values) if schema is kind else replace(schema, **values)

    def _read_subsection(self, setting: Setting, layer: Any, key: str) -> Any:
        if not isinstance(layer, Mapping):
            example = next(iter(settings_within(type(setting.default))))
            raise ConfigError(
                f"{self.at}{key} is {shown(layer)}, expected settings under it; "
                f"set one of them, such as {self.at}{key}.{example}."
            )
        note = setting.note(Tagged)
        if note is None:
            return self._read_section(setting.default, layer, f"{key}.")
        schema, own, self._foreign[key] = self._select_schema(
            note, setting.default, layer, f"{key}."
        )
        return self._read_section(schema, own, f"{key}.")

    def _select_schema(
        self, note: Tagged, base: Any, layer: Mapping[str, Any], path: str
    ) -> tuple[type, dict[str, Any], dict[str, Any]]:
        """Returns the schema that a layer selects, and the result of :func:`_applicable`."""
        word = self._plain_value(layer.get(note.by, getattr(base, note.by)), f"{path}{note.by}")
        schema = _find_schema(note, word, f"{self.at}{path}{note.by}")
        own, foreign = _applicable(note.variants, schema, layer)
        self._refuse_foreign(note, foreign, path)
        return schema, own, foreign

    def _read_overrides(
        self, setting: Setting, layer: Any, key: str, base: Any, of: Setting
    ) -> Any:
        if not isinstance(layer, Mapping):
            raise self._type_error(setting, layer, key)
        note, read = of.note(Tagged), {}
        overrides = setting.note(Overrides)
        assert note is not None and overrides is not None
        for name, own in layer.items():
            own = {} if own is None else own
            at = f"{key}.{name}."
            if not isinstance(own, Mapping):
                raise ConfigError(
                    f"{self.at}{key}.{name} is {quoted(own)}, expected settings under it; "
                    f"set one of them, such as {self.at}{at}{overrides.example}."
                )
            own = self._plain_value(own, f"{key}.{name}")
            schema, own, foreign = self._select_schema(note, base, own, at)
            self._add_similar_name_hints(note, key, name, foreign, layer)
            own = merged(self._only_in_group(overrides.of, settings_of(schema)), own)
            config = Reader(schema, f"{self.at}{at}")._read_section(schema, own, "")
            typed = settings_of(config)
            read[name] = unfold({key: typed[key].default for key in flatten(own, stop=typed)})
        return read

    def _only_in_group(self, section: str, known: Mapping[str, Setting]) -> dict[str, Any]:
        """Returns settings given for a section that only a group's algorithm (``known``) has."""
        found = {}
        for key, value in self._foreign.get(section, {}).items():
            if key in known:
                self.inapplicable.pop(f"{self.at}{section}.{key}", None)
                if not _is_default(known[key], value):
                    found[key] = value
        return unfold(found)

    def _read_arguments(self, note: Arguments, word: Any, given: Any, path: str) -> dict[str, Any]:
        schema = note.variants.schema(word)
        known = {} if schema is None else settings_within(schema)
        return {
            name: self._read_value(known[name], value, f"{path}{name}") if name in known else value
            for name, value in given.items()
        }

    def _refuse_foreign(self, note: Tagged, foreign: Mapping[str, Any], path: str) -> None:
        """Records given settings that a section has only for other values of its tag."""
        schemas = schemas_by_word(note.variants)
        known = {word: settings_of(schema) for word, schema in schemas.items()} if foreign else {}
        for key, value in foreign.items():
            having = {word: one[key] for word, one in known.items() if key in one}
            words = [word for word, one in having.items() if _is_read_by(one, note.by, word)]
            if any(_is_default(setting, value) for setting in having.values()):
                self.by_default.add(f"{self.at}{path}{key}")
            self.inapplicable[f"{self.at}{path}{key}"] = (
                f"{self.at}{path}{key} is {shown(value)}, which is read only where "
                f"{self.at}{path}{note.by} is {listed(words)}"
            )

    def _add_similar_name_hints(
        self, note: Tagged, field: str, name: str, foreign: Iterable[str], layer: Mapping[str, Any]
    ) -> None:
        """Adds a hint to settings that do not apply to a name, but apply to a similar name."""
        near = closest(name, [other for other in layer if other != name])
        own = layer.get(near or "")
        word = own.get(note.by) if isinstance(own, Mapping) else None
        schema = note.variants.schema(word) if isinstance(word, str) else None
        known = {} if schema is None else settings_of(schema)
        for key in known.keys() & set(foreign):
            self.inapplicable[f"{self.at}{field}.{name}.{key}"] += (
                f", as {self.at}{field}.{near}.{note.by} is: one of the two names may be misspelt"
            )

    def _read_value(self, setting: Setting, value: Any, key: str) -> Any:
        value = self._plain_value(value, key)
        if value is None and setting.optional:
            return None
        fit = converted(setting.kind, value)
        if fit is not UNFIT:
            return fit
        if isinstance(value, Mapping):
            if get_origin(setting.kind) is dict:
                raise self._yaml_error(value, key)
            inside = next((name for name in value if name != WORD), "")
            raise self._unknown_error(f"{key}.{inside}")
        raise self._type_error(setting, value, key)

    def _plain_value(self, value: Any, key: str) -> Any:
        """Returns a value as plain Python types, with references ``${...}`` replaced."""
        if isinstance(value, os.PathLike):
            value = os.fspath(value)
        if type(value).__module__ == "numpy" and hasattr(value, "tolist"):
            value = value.tolist()
        if isinstance(value, str) and "${" in value:
            return self._interpolate(value, key, ())
        if isinstance(value, Mapping):
            return {name: self._plain_value(x, f"{key}.{name}") for name, x in value.items()}
        if isinstance(value, (list, tuple)):
            return [self._plain_value(x, key) for x in value]
        return value

    def _interpolate(self, text: str, key: str, seen: tuple[str, ...]) -> Any:
        """Replaces references such as ``${seed}`` in a text by the values of settings."""

        def value_of(name: str) -> Any:
            value: Any = self._layer
            for part in name.split("."):
                value = value.get(part, UNFIT) if isinstance(value, Mapping) else UNFIT
            known = all_settings(self.schema)
            if value is UNFIT and name in known:
                value = known[name].default
            if value is UNFIT or isinstance(value, (Mapping, list)) or name in seen:
                raise ConfigError(
                    f"{self.at}{key}: Interpolation key {quoted(name)} not found; "
                    "name a setting, as in ${seed}."
                )
            if isinstance(value, str) and "${" in value:
                return self._interpolate(value, key, (*seen, name))
            return value

        if whole := re.fullmatch(r"\$\{([^{}$]+)\}", text):
            return value_of(whole[1])
        put = re.sub(r"\$\{([^{}$]+)\}", lambda match: str(value_of(match[1])), text)
        if "${" in put:
            raise ConfigError(
                f"{self.at}{key} is {quoted(text)}, expected the name of a setting in braces, "
                "as in ${seed}."
            )
        return put

    def _unknown_error(self, key: str) -> ConfigError:
        hints, known = list(self.hints), all_settings(self.schema)
        names = {n: s.other_names() for n, s in known.items()} | {n: [] for n in hints}
        first = {*self._applicable(), *hints}
        return ConfigError(unknown_setting(key, names, self.at, first=first))

    def _applicable(self) -> Iterator[str]:
        """Yields the settings of the schemas that the given tags select."""
        for name, setting in settings_within(self.schema).items():
            if not setting.is_section:
                yield name
                continue
            chosen, note, layer = setting.default, setting.note(Tagged), self._layer.get(name)
            if note is not None:
                word = layer.get(note.by) if isinstance(layer, Mapping) else None
                chosen = isinstance(word, str) and note.variants.schema(word) or chosen
            yield from (f"{name}.{key}" for key in settings_of(chosen))

    def _type_error(self, setting: Setting, value: Any, key: str) -> ConfigError:
        default = setting.default
        example = "" if default in (None, {}, []) else f", such as {shown(default)}"
        expected = expectation(setting.kind, setting.optional)
        return ConfigError(f"{self.at}{key} is {shown(value)}, expected {expected}{example}.")

    def _yaml_error(self, value: Mapping[str, Any], key: str) -> ConfigError:
        """Returns the error for the first value in a mapping that YAML cannot hold."""
        inside, wrong = next(
            ((k, x) for k, x in flatten(value).items() if plain(x) is UNFIT), (key, value)
        )
        return ConfigError(
            f"{self.at}{key}.{inside} cannot be read ({quoted(wrong)}); "
            "expected numbers, texts, true, false, null, and lists or dicts of them."
        )


def _find_schema(note: Tagged, word: Any, key: str) -> type:
    """Returns the schema of the settings that a value of the tag selects.

    Raises:
        ConfigError: the value is unknown.
    """
    schema = note.variants.schema(word) if isinstance(word, str) else None
    if schema is None:
        raise ConfigError(note.rule.misfit(key, word, None))
    return schema


def _applicable(
    variants: Variants, schema: type, layer: Mapping[str, Any]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Splits a layer; returns the settings to read, then those that only other schemas have."""
    known = settings_of(schema)
    flat = flatten(layer, stop=known)
    others = {key for other in schemas_by_word(variants).values() for key in settings_of(other)}
    foreign = {key: flat.pop(key) for key in list(flat) if key in others and key not in known}
    return (unfold(flat) if foreign else dict(layer)), foreign


def _is_read_by(setting: Setting, tag: str, word: str) -> bool:
    """Returns whether a setting is read if the tag has the given value."""
    conditions = (where for where in setting.read_where() if where.key == tag)
    return all((word in where.values) is not where.but for where in conditions)


def _is_default(setting: Setting, value: Any) -> bool:
    return value == setting.default or converted(setting.kind, value) == setting.default
