"""Settings as text: YAML files, ``key=value``, and YAML with comments."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import yaml

from torchrl_marl.errors import ConfigError, quoted
from torchrl_marl.settings.fields import Setting, settings_within, with_words
from torchrl_marl.settings.layers import UNFIT, merged, plain, unfold

__all__ = ["parse_overrides", "read_yaml", "to_yaml"]

# Errors that broken YAML causes: unknown tags, numbers of 5,000 digits, a thousand brackets.
_YAML_ERRORS = (yaml.YAMLError, ValueError, TypeError, AttributeError, RecursionError)
_MAX_VALUES = 100_000
_FLOAT = re.compile(
    r"""^(?:[-+]?[0-9][0-9_]*\.[0-9_]*(?:[eE][-+]?[0-9]+)?
        |[-+]?[0-9][0-9_]*[eE][-+]?[0-9]+
        |[-+]?\.[0-9][0-9_]*(?:[eE][-+]?[0-9]+)?
        |[-+]?\.(?:inf|Inf|INF)
        |\.(?:nan|NaN|NAN))$""",
    re.X,
)
_INT = re.compile(r"^(?:[-+]?[0-9][0-9_]*|[-+]?0(?:b[01_]+|x[0-9a-fA-F_]+))$")


class _Loader(yaml.SafeLoader):
    """YAML loader with the numbers of YAML 1.2; refuses duplicate keys.

    ``1e-3`` is a number and ``010`` ten. Dates and ``12:30`` are strings.
    """

    def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
        keys = [key.value for key, _ in node.value if key.tag != "tag:yaml.org,2002:merge"]
        twice = next((key for key in keys if keys.count(key) > 1), None)
        if twice is not None:
            raise yaml.constructor.ConstructorError(
                None, None, f"found duplicate key {twice}", node.start_mark
            )
        return super().construct_mapping(node, deep)

    def construct_int(self, node: Any) -> int:
        text = self.construct_scalar(node).replace("_", "")
        return int(text, 0 if text.lstrip("-+")[:2] in ("0b", "0x") else 10)


class _Dumper(yaml.SafeDumper):
    """Writer of YAML that :class:`_Loader` can read; quotes texts that others take for integers."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


_NOT_YAML_1_2 = (":float", ":timestamp", ":int")
for _kind, _dropped in ((_Loader, _NOT_YAML_1_2), (_Dumper, _NOT_YAML_1_2[:2])):
    _kind.yaml_implicit_resolvers = {
        first: [(tag, pattern) for tag, pattern in rules if not tag.endswith(_dropped)]
        for first, rules in _kind.yaml_implicit_resolvers.items()
    }
    _kind.add_implicit_resolver("tag:yaml.org,2002:float", _FLOAT, list("-+0123456789."))
    _kind.add_implicit_resolver("tag:yaml.org,2002:int", _INT, list("-+0123456789"))
_Loader.add_constructor("tag:yaml.org,2002:int", _Loader.construct_int)


def parse_overrides(texts: Iterable[str]) -> dict[str, Any]:
    """Parses ``["learner.lr=1e-3"]``, with values in YAML, to ``{"learner": {"lr": 0.001}}``.

    Raises:
        ConfigError: a text is not ``key=value``.
    """
    nested: dict[str, Any] = {}
    for text in texts:
        key, equals, value = text.partition("=")
        if not equals or not all(key.split(".")):
            raise ConfigError(
                f"{quoted(text)} is not a setting, expected key=value, such as seed=1."
            )
        try:
            nested = merged(nested, unfold({key: _parse_yaml(value)}))
        except _YAML_ERRORS:
            raise ConfigError(
                f"{key[:100]} is {quoted(value)}, expected a YAML value, such as 3, "
                "true, null or [64,64]; check brackets and quotes."
            ) from None
    return nested


def read_yaml(path: Path) -> dict[str, Any]:
    """Returns the mapping in a YAML file.

    Raises:
        ConfigError: the file is missing or broken, or does not hold a mapping.
    """
    if not path.is_file():
        what = "a folder" if path.is_dir() else "missing"
        raise ConfigError(f"{str(path)!r} is {what}, expected a YAML file; check the path.")
    try:
        read = _parse_yaml(path.read_text(encoding="utf-8"))
    except (*_YAML_ERRORS, OSError) as error:
        reason = " ".join(str(getattr(error, "problem", None) or error).split())
        mark = getattr(error, "problem_mark", None)
        line = f" in line {mark.line + 1}" if mark else ""
        raise ConfigError(
            f"{str(path)!r} cannot be read as YAML{line}: {reason}; fix the file."
        ) from None
    if not isinstance(read, dict) or not read:
        what = "no settings" if read is None or read == {} else "a list"
        what = "a text" if isinstance(read, str) else what
        raise ConfigError(f"{str(path)!r} holds {what}, expected settings such as 'seed: 0'.")
    return {str(key): value for key, value in read.items()}


def to_yaml(config: Any) -> str:
    """Returns a config as complete YAML, with a comment for each setting."""
    return "\n".join(_yaml_lines(config, settings_within(type(config)), "")) + "\n"


def _parse_yaml(text: str) -> Any:
    """Parses YAML text; raises a ValueError if it has unsupported types or too many values."""
    value = yaml.load(text, _Loader)
    waiting, n = [value], 0
    while waiting:
        one, n = waiting.pop(), n + 1
        if n > _MAX_VALUES:
            raise ValueError(f"more than {_MAX_VALUES:,} values")
        if isinstance(one, dict):
            waiting += [*one.keys(), *one.values()]
            if None in one:
                raise ValueError("a key is missing")
        elif isinstance(one, list):
            waiting += one
        elif plain(one) is UNFIT:
            raise ValueError(f"{quoted(one)} is not a number, a text, true, false or null")
    return value


def _yaml_lines(config: Any, known: dict[str, Setting], indent: str) -> Iterator[str]:
    for name, setting in known.items():
        value, comment = getattr(config, name), setting.explanation
        if setting.is_section:
            yield f"{indent}{name}:  # {comment}"
            inner = with_words(setting, settings_within(type(value)))
            yield from _yaml_lines(value, inner, f"{indent}  ")
        elif isinstance(value, dict) and value:
            yield f"{indent}{name}:  # {comment}"
            block = yaml.dump(value, Dumper=_Dumper, sort_keys=False, width=sys.maxsize)
            yield from (f"{indent}  {line}" for line in block.splitlines())
        else:
            yield f"{indent}{name}: {_inline_yaml(value)}  # {comment}"


def _inline_yaml(value: Any) -> str:
    """Returns a value as one line of YAML."""
    if isinstance(value, str) and not value.isprintable():
        return json.dumps(value)
    text = yaml.dump(
        value, Dumper=_Dumper, default_flow_style=True, width=sys.maxsize, allow_unicode=True
    )
    return text.removesuffix("...\n").strip()
