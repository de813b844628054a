"""Checks of a config for wrong values, contradictions, and settings without effect."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import Any

from torchrl_marl.errors import ConfigError
from torchrl_marl.settings.fields import Setting, settings_of, settings_within
from torchrl_marl.settings.formatting import shown
from torchrl_marl.settings.layers import flatten, unfold
from torchrl_marl.settings.reading import overridden
from torchrl_marl.settings.rules import Arguments, OneOf, Overrides, ReadWhere, Tagged

__all__ = ["check", "override", "read_by_others", "unread"]


def check(config: Any, at: str = "", skip: Collection[str] = (), like: Any = None) -> None:
    """Refuses values that break a rule, and settings that contradict each other.

    Contradictions are found by the ``check(at)`` method of each dataclass that has one. The method
    of ``config`` itself also receives ``skip``, if it is not empty.

    Args:
        config (dataclass): config to check.
        at (str): prefix of the names in messages.
        skip (collection of str): fields to leave out.
        like (dataclass, optional): config with values that messages suggest in place of wrong
            ones. The default is suggested if ``like`` is None or has the same wrong value.

    Raises:
        ConfigError: a value is wrong; the message names the setting, the value that was found,
            the expected values and the fix.
    """
    like = like if type(like) is type(config) else None
    known = {k: s for k, s in settings_within(type(config)).items() if k not in skip}
    for name, setting in known.items():
        value = getattr(config, name)
        if not setting.is_section and value is not None:
            _check_value(setting, f"{at}{name}", value, getattr(like, name, value))
        if arguments := _typed_arguments(setting, config):
            for key in (k for k in arguments[1] if value.get(k) is not None):
                _check_value(arguments[1][key], f"{at}{name}.{key}", value[key])
    for name, setting in known.items():
        if setting.is_section:
            check(getattr(config, name), f"{at}{name}.", like=getattr(like, name, None))
        for group in getattr(config, name) if setting.note(Overrides) else ():
            own = None if like is None else override(like, name, group)
            check(override(config, name, group), f"{at}{name}.{group}.", like=own)
    fits = getattr(config, "check", None)
    if fits is not None:
        fits(at, skip) if skip else fits(at)


def override(config: Any, field: str, name: str) -> Any:
    """Returns the section that ``field`` overrides, with the overrides for ``name`` applied.

    Args:
        config (dataclass): config with the section and the overrides.
        field (str): name of a mapping of overrides, such as ``groups``.
        name (str): key in this mapping; for a missing key the section is returned unchanged.
    """
    known = settings_within(type(config))
    note = known[field].note(Overrides)
    tagged = None if note is None else known[note.of].note(Tagged)
    assert note is not None and tagged is not None
    own = getattr(config, field).get(name) or {}
    return overridden(tagged, getattr(config, note.of), own, f"{field}.{name}.")


def unread(
    config: Any, at: str = "", *, defaults: bool = False, like: Any = None
) -> dict[str, str]:
    """Returns the settings without effect: they differ from their defaults but are not read.

    If a section has overrides (such as ``groups``), one of its settings counts as read if any of
    the overridden sections reads it. A setting that an override inherits is not listed under the
    override's name.

    Args:
        config (dataclass): config to check.
        at (str): prefix of the names in messages.

    Keyword Args:
        defaults (bool): whether to include settings that have their default values.
        like (dataclass, optional): config with the default values; the type's own by default.

    Returns:
        dict: dotted key -> sentence with the value, and the condition for reading the setting.
    """
    found: dict[str, str] = {}
    for name, setting in settings_within(type(config)).items():
        value = getattr(config, name)
        default = getattr(like, name) if type(like) is type(config) else setting.default
        if overrides := setting.note(Overrides):
            found = _unread_in_overrides(config, name, overrides.of, found, at, defaults)
        elif setting.is_section:
            found |= unread(value, f"{at}{name}.", defaults=defaults, like=default)
            found |= _unread_in_section(config, setting, at, defaults)
        elif (defaults or value != default) and not _is_read(config, setting):
            found[f"{at}{name}"] = _unread_message(f"{at}{name}", value, setting.read_where(), at)
        if arguments := _typed_arguments(setting, config):
            section, typed = arguments
            found |= {
                f"{at}{name}.{key}": _unread_message(
                    f"{at}{name}.{key}", value[key], one.read_where(), f"{at}{name}."
                )
                for key, one in typed.items()
                if key in value
                and (defaults or value[key] != one.default)
                and not _is_read(section, one)
            }
    return found


def read_by_others(config: Any) -> set[str]:
    """Returns settings and sections that are read only if their section's tag has another value.

    A setting of which some values are always read is not among them.

    Args:
        config (dataclass): config with sections that have a tag, such as ``learner.algorithm``.

    Examples:
        >>> from torchrl_marl.recipes import read_config
        >>> "learner.alpha_init" in read_by_others(read_config("vmas_balance_matd3"))
        True
    """
    found = set()
    for name, setting in settings_within(type(config)).items():
        tagged, section = setting.note(Tagged), getattr(config, name)
        if tagged is None:
            continue
        for key, one in settings_within(type(section)).items():
            for where in one.read_where():
                if where.key == tagged.by and not (
                    where.always or _condition_holds(where, section)
                ):
                    found |= {f"{name}.{key}.{inner}" for inner in where.of} or {f"{name}.{key}"}
    return found


def _unread_in_overrides(
    config: Any, field: str, of: str, found: dict[str, str], at: str, defaults: bool
) -> dict[str, str]:
    shared = {key: text for key, text in found.items() if key.startswith(f"{at}{of}.")}
    found = {key: text for key, text in found.items() if key not in shared}
    for name, own in getattr(config, field).items():
        section, path = override(config, field, name), f"{at}{field}.{name}."
        idle, known = unread(section, path, defaults=defaults), settings_of(section)
        found |= {path + k: idle[path + k] for k in flatten(unfold(own or {})) if path + k in idle}
        for key in list(shared):
            inner = key.removeprefix(f"{at}{of}.")
            if inner in known and path + inner not in idle:
                del shared[key]
    return found | shared


def _unread_in_section(
    config: Any, setting: Setting, at: str, defaults: bool
) -> Iterator[tuple[str, str]]:
    """Yields settings that are not read because of a condition on their section."""
    for where in setting.read_where():
        section = getattr(config, setting.key)
        for key in where.of:
            default, value = getattr(setting.default, key), getattr(section, key)
            if (defaults or value != default) and not _condition_holds(where, config):
                path = f"{at}{setting.key}.{key}"
                yield path, _unread_message(path, value, [where], at)


def _is_read(config: Any, setting: Setting) -> bool:
    value = getattr(config, setting.key)
    return all(
        value in where.always or _condition_holds(where, config) for where in setting.read_where()
    )


def _condition_holds(where: ReadWhere, config: Any) -> bool:
    config_of = config
    *sections, name = where.key.split(".")
    for section in sections:
        config_of = getattr(config_of, section)
    rule = settings_within(type(config_of))[name].note(OneOf)
    return where.holds(config, rule.word_of) if rule else where.holds(config)


def _unread_message(key: str, value: Any, conditions: Collection[ReadWhere], at: str) -> str:
    where = " and ".join(where.in_words(at) for where in conditions)
    return f"{key} is {shown(value)}, which is read only where {where}"


def _check_value(setting: Setting, key: str, value: Any, before: Any = None) -> None:
    """Refuses a wrong value; the message suggests ``before``, or else the default."""
    advised = setting.default if before in (None, value) else before
    for note in setting.notes:
        misfit = getattr(note, "misfit", None)
        text = None if misfit is None else misfit(key, value, advised)
        if text is not None:
            raise ConfigError(text)


def _typed_arguments(setting: Setting, config: Any) -> tuple[Any, dict[str, Setting]] | None:
    """Returns a setting's arguments as a section, and their settings; None without a schema."""
    note = setting.note(Arguments)
    schema = None if note is None else note.variants.schema(getattr(config, note.by))
    if schema is None:
        return None
    known = settings_within(schema)
    given = getattr(config, setting.key)
    return schema(**{key: given[key] for key in known if key in given}), known
