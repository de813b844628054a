"""Typed settings: dataclasses merged with YAML, dicts and ``key=value`` texts, and explained."""

from __future__ import annotations

import ast
import dataclasses
import difflib
import os
import sys
import types
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any, TypeVar, Union, get_args, get_origin, get_type_hints

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from torchrl_marl.errors import ConfigError, closest, quoted

__all__ = [
    "Setting",
    "expectation",
    "flatten",
    "merge",
    "parse_overrides",
    "read_yaml",
    "settings_of",
    "shown",
    "to_yaml",
    "unfold",
]

T = TypeVar("T")

# What a text of YAML may raise: tags and dates that are none, numbers of 5,000 digits, a thousand
# brackets.
_UNREADABLE = (YAMLError, OmegaConfBaseException, ValueError, AttributeError, RecursionError)
_LARGEST, _LARGEST_FLOAT = 2**63, int(sys.float_info.max)


@dataclasses.dataclass(frozen=True)
class Setting:
    """One key of a schema: its dotted name, type, default and meaning."""

    key: str
    kind: Any
    default: Any
    help: str


def settings_of(schema: type) -> dict[str, Setting]:
    """All keys of a dataclass and of the dataclasses in it, by their dotted names.

    Args:
        schema (type): a dataclass whose attributes are explained by the string below each.

    Examples:
        >>> from torchrl_marl.training.config import TrainConfig
        >>> settings_of(TrainConfig)["learner.gamma"].help
        'Discount.'
    """
    found: dict[str, Setting] = {}
    helps, kinds = _attribute_docs(schema), get_type_hints(schema)
    for field in dataclasses.fields(schema):
        kind = kinds[field.name]
        if dataclasses.is_dataclass(kind):
            inner = settings_of(kind)  # type: ignore[arg-type]
            found |= {
                f"{field.name}.{key}": dataclasses.replace(setting, key=f"{field.name}.{key}")
                for key, setting in inner.items()
            }
        else:
            default = field.default
            if field.default_factory is not dataclasses.MISSING:
                default = field.default_factory()
            found[field.name] = Setting(field.name, kind, default, helps.get(field.name, ""))
    return found


def merge(
    schema: type[T], *layers: Mapping[str, Any], prefix: str = "", hints: Iterable[str] = ()
) -> T:
    """A schema's defaults, overridden by one layer after the other.

    Args:
        schema (type): a dataclass.
        layers (mapping): nested, or with dotted keys, or both.
        prefix (str): what comes before the keys in messages, such as ``"groups.agents."``.
        hints (iterable of str): further names to suggest instead of an unknown key.

    Raises:
        ConfigError: an unknown key or a value of a wrong type.

    Examples:
        >>> from torchrl_marl.training.config import TrainConfig
        >>> merge(TrainConfig, {"seed": 1}, {"learner.lr": 1e-3}).learner.lr
        0.001
    """
    reader = _Reader(schema, prefix, list(hints))
    node = OmegaConf.structured(schema)
    flat: dict[str, Any] = {}
    try:
        for layer in layers:
            layer = reader.section(schema, unfold(layer), "")
            flat |= flatten(layer)
            node = OmegaConf.merge(node, layer)
        return OmegaConf.to_object(node)  # type: ignore[return-value]
    except OmegaConfBaseException as error:
        raise reader.explain(error, flat) from None
    except RecursionError:
        raise ConfigError("settings are nested too deeply; check their brackets.") from None


def unfold(layer: Mapping[str, Any]) -> dict[str, Any]:
    """``{"a.b": 1, "a": {"c": 2}}`` becomes ``{"a": {"b": 1, "c": 2}}``.

    Examples:
        >>> unfold({"a.b": 1, "a": {"c": 2}})
        {'a': {'b': 1, 'c': 2}}
    """
    nested: dict[str, Any] = {}
    for key, value in layer.items():
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            value = dataclasses.asdict(value)
        value = unfold(value) if isinstance(value, Mapping) else value
        *path, leaf = str(key).split(".")
        inner = nested
        for part in path:
            if not isinstance(inner.get(part), dict):
                inner[part] = {}
            inner = inner[part]
        if isinstance(value, dict) and isinstance(inner.get(leaf), dict):
            inner[leaf] |= value
        else:
            inner[leaf] = value
    return nested


def flatten(nested: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """``{"a": {"b": 1}}`` becomes ``{"a.b": 1}``; an empty dict stays as it is."""
    flat: dict[str, Any] = {}
    for key, value in nested.items():
        if isinstance(value, Mapping) and value:
            flat |= flatten(value, f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = value
    return flat


def parse_overrides(texts: Iterable[str]) -> dict[str, Any]:
    """``["learner.lr=1e-3"]`` becomes ``{"learner": {"lr": 0.001}}``; values are read as YAML.

    Raises:
        ConfigError: a text that is not ``key=value``.
    """
    nested: dict[str, Any] = {}
    for text in texts:
        key, equals, value = text.partition("=")
        if not equals or not all(key.split(".")):
            raise ConfigError(f"{quoted(text)} is no setting, expected key=value, such as seed=1.")
        try:
            read: Any = OmegaConf.to_container(OmegaConf.from_dotlist([f"value={value}"]))
            nested = _merge_plain(nested, unfold({key: read["value"]}))
        except _UNREADABLE:
            raise ConfigError(
                f"{key[:100]} is {quoted(value)}, expected a value as YAML writes it, such as 3, "
                "true, null or [64,64]; check brackets and quotes."
            ) from None
    return nested


def read_yaml(path: Path) -> dict[str, Any]:
    """The mapping that a YAML file holds.

    Raises:
        ConfigError: a file that is missing, broken or holds something else.
    """
    if not path.is_file():
        what = "a folder" if path.is_dir() else "not there"
        raise ConfigError(f"{str(path)!r} is {what}, expected a YAML file; check the path.")
    try:
        read = OmegaConf.to_container(OmegaConf.load(path))
    except (*_UNREADABLE, OSError) as error:
        reason = " ".join(str(getattr(error, "problem", None) or error).split())
        mark = getattr(error, "problem_mark", None)
        line = f" in line {mark.line + 1}" if mark else ""
        raise ConfigError(
            f"{str(path)!r} cannot be read as YAML{line}: {reason}; mend the file."
        ) from None
    if not isinstance(read, dict) or not read:
        what = "no settings" if isinstance(read, dict) else "a list"
        raise ConfigError(f"{str(path)!r} holds {what}, expected settings such as 'seed: 0'.")
    return {str(key): value for key, value in read.items()}


def to_yaml(config: Any) -> str:
    """A config dataclass as complete YAML, each key explained by a comment."""
    return "\n".join(_lines(config, "")) + "\n"


def expectation(kind: Any) -> str:
    """A type in words: ``"an integer"``, ``"a number or null"``."""
    plain, optional = _unwrap(kind)
    words = {
        int: "an integer",
        float: "a number",
        bool: "true or false",
        str: "a text",
        list[int]: "a list of integers",
        list[str]: "a list of texts",
    }
    text = words.get(plain, "key: value pairs" if get_origin(plain) is dict else str(plain))
    return f"{text} or null" if optional else text


class _Reader:
    """Checks a layer's keys against a schema, and puts errors into words."""

    def __init__(self, schema: type, prefix: str, hints: list[str]) -> None:
        self.known = settings_of(schema)
        self.prefix = prefix
        self.hints = hints

    def section(self, schema: type, layer: Mapping[str, Any], path: str) -> dict[str, Any]:
        kinds = get_type_hints(schema)
        names = [field.name for field in dataclasses.fields(schema)]  # type: ignore[arg-type]
        read = {}
        for name, value in layer.items():
            key = f"{path}{name}"
            if name not in names:
                raise self.unknown(next(iter(flatten({key: value}))))
            if dataclasses.is_dataclass(kinds[name]):
                if not isinstance(value, Mapping):
                    example = next(k for k in self.known if k.startswith(f"{key}."))
                    raise ConfigError(
                        f"{self.prefix}{key} is {shown(value)}, expected settings under it; "
                        f"set one of them, such as {self.prefix}{example}."
                    )
                read[name] = self.section(kinds[name], value, f"{key}.")
            else:
                read[name] = self.leaf(key, kinds[name], value)
        return read

    def leaf(self, key: str, kind: Any, value: Any) -> Any:
        plain, _ = _unwrap(kind)
        if isinstance(value, Mapping) and get_origin(plain) is not dict:
            raise self.unknown(f"{key}.{next(iter(value), '')}")
        if isinstance(value, os.PathLike):
            return os.fspath(value)
        if type(value).__module__ == "numpy" and hasattr(value, "tolist"):
            value = value.tolist()
        if plain is int and isinstance(value, float) and value.is_integer():
            value = int(value)
        # OmegaConf's word for a missing value, and what it does not take as a mistake.
        if value == "???" or not _may_be(plain, value):
            raise self.wrong(key, value)
        return value

    def unknown(self, key: str) -> ConfigError:
        known = [*self.known, *self.hints]
        inside, _, leaf = key.rpartition(".")
        if inside in known:
            names = [inside]
        else:
            leaves = {name: name.rpartition(".")[2] for name in known}
            near = leaf if leaf in leaves.values() else closest(leaf, leaves.values())
            names = [name for name in known if leaves[name] == near]
            names = difflib.get_close_matches(key[:100], names, n=1, cutoff=0.85) or names
        meant = " or ".join(repr(f"{self.prefix}{name}") for name in names[:3])
        suggestion = f"did you mean {meant}? " if meant else ""
        return ConfigError(
            f"unknown setting {quoted(self.prefix + key)}; {suggestion}"
            "`torchrl-marl list settings` shows all."
        )

    def wrong(self, key: str, value: Any) -> ConfigError:
        setting = self.known[key]
        example = "" if setting.default in (None, {}, []) else f", such as {shown(setting.default)}"
        return ConfigError(
            f"{self.prefix}{key} is {shown(value)}, expected {expectation(setting.kind)}{example}."
        )

    def explain(self, error: OmegaConfBaseException, flat: dict[str, Any]) -> ConfigError:
        full = str(error.full_key or "")
        key = full.partition("[")[0]
        reason = str(error).splitlines()[0]
        if "Interpolation" in type(error).__name__:
            return ConfigError(
                f"{self.prefix}{full}: {reason[:200]}; name a setting as ${{seed}} does."
            )
        if key in self.known and key in flat:
            return self.wrong(key, flat[key])
        return ConfigError(
            f"{self.prefix}{full} cannot be read ({reason[:200]}); "
            "expected numbers, texts, true, false, null, and lists or dicts of such."
        )


@cache
def _attribute_docs(schema: type) -> dict[str, str]:
    """The string below each attribute of a class and those it extends."""
    docs: dict[str, str] = {}
    for cls in reversed(schema.__mro__[:-1]):
        docs |= _own_attribute_docs(cls)
    return docs


def _own_attribute_docs(schema: type) -> dict[str, str]:
    """The string below each attribute of a class, read from its source file."""
    source = Path(str(sys.modules[schema.__module__].__file__)).read_text(encoding="utf-8")
    classes = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.ClassDef)]
    body = next(node.body for node in classes if node.name == schema.__name__)
    docs = {}
    for node, below in zip(body, body[1:]):
        if not isinstance(node, ast.AnnAssign) or not isinstance(node.target, ast.Name):
            continue
        if isinstance(below, ast.Expr) and isinstance(below.value, ast.Constant):
            docs[node.target.id] = " ".join(str(below.value.value).replace("``", "").split())
    return docs


def _unwrap(kind: Any) -> tuple[Any, bool]:
    """``int | None`` -> ``(int, True)``; any other type -> ``(type, False)``."""
    if get_origin(kind) in (Union, types.UnionType):
        inner = [arg for arg in get_args(kind) if arg is not type(None)]
        return inner[0], True
    return kind, False


def _may_be(kind: Any, value: Any) -> bool:
    """Whether a value is a list, a dict or a number where the kind is, and no too large one."""
    if value is None or (isinstance(value, str) and "${" in value):
        return True
    if get_origin(kind) is dict:
        return isinstance(value, Mapping)
    if get_origin(kind) is list:
        listed = isinstance(value, (list, tuple))
        return listed and all(_may_be(get_args(kind)[0], element) for element in value)
    if kind is int and isinstance(value, (int, float)):
        return abs(value) < _LARGEST
    if kind is float and isinstance(value, int):
        return abs(value) < _LARGEST_FLOAT
    return not isinstance(value, (list, tuple, Mapping))


def _merge_plain(left: dict[str, Any], right: dict[str, Any]) -> dict[str, Any]:
    merged = dict(left)
    for key, value in right.items():
        both = isinstance(value, dict) and isinstance(merged.get(key), dict)
        merged[key] = _merge_plain(merged[key], value) if both else value
    return merged


def shown(value: Any) -> str:
    """A value as YAML names it: ``null``, ``true``, ``'text'``; cut where it is long.

    Examples:
        >>> shown(None), shown(True), shown("a"), shown([1, 2])
        ('null', 'true', "'a'", '[1, 2]')
    """
    if value is None:
        return "null"
    return str(value).lower() if isinstance(value, bool) else quoted(value)


def _lines(config: Any, indent: str) -> Iterator[str]:
    schema: Any = type(config)
    docs = _attribute_docs(schema)
    for field in dataclasses.fields(config):
        value, comment = getattr(config, field.name), docs.get(field.name, "")
        if dataclasses.is_dataclass(value):
            yield f"{indent}{field.name}:  # {comment}"
            yield from _lines(value, f"{indent}  ")
        elif isinstance(value, dict) and value:
            yield f"{indent}{field.name}:  # {comment}"
            for line in OmegaConf.to_yaml(value).splitlines():
                yield f"{indent}  {line}"
        else:
            values = value if isinstance(value, list) else [value]
            text = ", ".join(OmegaConf.to_yaml({"x": x})[3:].strip() for x in values)
            text = f"[{text}]" if isinstance(value, list) else text
            if "\n" in text:  # a text so long that YAML folds it
                yield f"{indent}{field.name}: {text}"
            else:
                yield f"{indent}{field.name}: {text}  # {comment}"
