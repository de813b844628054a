"""Settings that had other names in an earlier version; the old ones are still understood."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any

from torchrl_marl.errors import ConfigError
from torchrl_marl.settings.fields import Setting, settings_within
from torchrl_marl.settings.rules import Arguments

__all__ = ["tell_new_name", "with_new_names"]


def with_new_names(
    schema: type, layer: Mapping[str, Any], *, told: bool = True, path: str = ""
) -> dict[str, Any]:
    """Returns settings under today's names, by what :class:`Formerly` says of each.

    A setting that moved into a mapping of arguments goes with it, or is left out where it has its
    default.

    Args:
        schema (type): a dataclass.
        layer (mapping): nested settings.
        told (bool): whether former names are warned of; not where a program wrote them.
        path (str): what stands before the names in messages.

    Raises:
        ConfigError: a setting under both of its names.
    """
    renamed = dict(layer)
    for name, setting in settings_within(schema).items():
        if setting.is_section and isinstance(renamed.get(name), Mapping):
            inner = type(setting.default)
            renamed[name] = with_new_names(inner, renamed[name], told=told, path=f"{path}{name}.")
        for old in setting.former_names():
            if old in renamed:
                _refuse_both(old in renamed and name in renamed, f"{path}{old}", f"{path}{name}")
                if told:
                    tell_new_name(f"{path}{old}", f"{path}{name}")
                renamed[name] = renamed.pop(old)
        if arguments := setting.note(Arguments):
            _move_into(arguments, name, renamed, told, path)
    return renamed


def tell_new_name(old: str, new: str) -> None:
    """Warns that a name is going to be forgotten."""
    warnings.warn(
        f"{old} is called {new} now; the old name works in this version only.",
        FutureWarning,
        stacklevel=3,
    )


def _move_into(
    arguments: Arguments, name: str, renamed: dict[str, Any], told: bool, path: str
) -> None:
    """Moves settings that are arguments of a variant now into their mapping."""
    for old, setting in _moved(arguments).items():
        if old not in renamed:
            continue
        value, new = renamed.pop(old), f"{path}{name}.{setting.key}"
        if value == setting.default:
            continue
        held = dict(renamed.get(name) or {})
        _refuse_both(setting.key in held, f"{path}{old}", new)
        if told:
            tell_new_name(f"{path}{old}", new)
        renamed[name] = {**held, setting.key: value}


def _moved(arguments: Arguments) -> dict[str, Setting]:
    found: dict[str, Setting] = {}
    for word in arguments.variants.words():
        schema = arguments.variants.schema(word)
        for setting in {} if schema is None else settings_within(schema).values():
            found |= dict.fromkeys(setting.former_names(), setting)
    return found


def _refuse_both(both: bool, old: str, new: str) -> None:
    if both:
        raise ConfigError(
            f"{old} and {new} are both given, which are one setting; use {new} alone."
        )
