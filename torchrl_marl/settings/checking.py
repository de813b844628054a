"""Checks of a config that was read: rules, what must fit together, and what nothing reads."""

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
    """Refuses values that a rule forbids, and settings that do not fit together.

    The latter is what the ``check(at)`` of a dataclass says, where it has one; that of ``config``
    itself is also given ``skip``, if there is something to skip.

    Args:
        config (dataclass): what was read.
        at (str): what stands before the names in messages.
        skip (collection of str): fields that are not looked at.
        like (dataclass, optional): whose values are advised in place of wrong ones, where they
            are others; otherwise the defaults.

    Raises:
        ConfigError: naming the setting, what was found, what was expected and the fix.
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
    """Returns the section of ``config`` that ``field`` overrides, as it is for ``name``.

    Args:
        config (dataclass): what was read.
        field (str): a mapping of overrides, such as ``groups``.
        name (str): one of its names; another has the section itself.
    """
    known = settings_within(type(config))
    note = known[field].note(Overrides)
    tagged = None if note is None else known[note.of].note(Tagged)
    assert note is not None and tagged is not None
    own = getattr(config, field).get(name) or {}
    return overridden(tagged, getattr(config, note.of), own, f"{field}.{name}.")


def unread(config: Any, at: str = "", *, defaults: bool = False) -> dict[str, str]:
    """Returns settings that differ from their defaults although nothing reads them.

    What stands in a section that a mapping overrides may be read by any of those; what one of
    them takes over from there is no setting of its own.

    Args:
        config (dataclass): what was read.
        at (str): what stands before the names in messages.

    Keyword Args:
        defaults (bool): also those that have their defaults.

    Returns:
        dict: dotted key -> the setting in words, and where it would be read.
    """
    found: dict[str, str] = {}
    for name, setting in settings_within(type(config)).items():
        value = getattr(config, name)
        if overrides := setting.note(Overrides):
            found = _unread_by_any(config, name, overrides.of, found, at, defaults)
        elif setting.is_section:
            found |= unread(value, f"{at}{name}.", defaults=defaults)
            found |= _idle_within(config, setting, at, defaults)
        elif (defaults or value != setting.default) and not _is_read(config, setting):
            found[f"{at}{name}"] = _sentence(f"{at}{name}", value, setting.read_where(), at)
        if arguments := _typed_arguments(setting, config):
            section, typed = arguments
            found |= {
                f"{at}{name}.{key}": _sentence(
                    f"{at}{name}.{key}", value[key], one.read_where(), f"{at}{name}."
                )
                for key, one in typed.items()
                if key in value
                and (defaults or value[key] != one.default)
                and not _is_read(section, one)
            }
    return found


def read_by_others(config: Any) -> set[str]:
    """Returns settings and sections that only other words of their section's tag read.

    Args:
        config (dataclass): with sections whose schema is chosen by a tag.

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
                if where.key == tagged.by and not _holds(where, section):
                    found |= {f"{name}.{key}.{inner}" for inner in where.of} or {f"{name}.{key}"}
    return found


def _unread_by_any(
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


def _idle_within(
    config: Any, setting: Setting, at: str, defaults: bool
) -> Iterator[tuple[str, str]]:
    """What conditions on a section say of its settings."""
    for where in setting.read_where():
        section = getattr(config, setting.key)
        for key in where.of:
            default, value = getattr(setting.default, key), getattr(section, key)
            if (defaults or value != default) and not _holds(where, config):
                path = f"{at}{setting.key}.{key}"
                yield path, _sentence(path, value, [where], at)


def _is_read(config: Any, setting: Setting) -> bool:
    return all(_holds(where, config) for where in setting.read_where())


def _holds(where: ReadWhere, config: Any) -> bool:
    config_of = config
    *sections, name = where.key.split(".")
    for section in sections:
        config_of = getattr(config_of, section)
    rule = settings_within(type(config_of))[name].note(OneOf)
    return where.holds(config, rule.word_of) if rule else where.holds(config)


def _sentence(key: str, value: Any, conditions: Collection[ReadWhere], at: str) -> str:
    where = " and ".join(where.in_words(at) for where in conditions)
    return f"{key} is {shown(value)}, which is read only where {where}"


def _check_value(setting: Setting, key: str, value: Any, before: Any = None) -> None:
    """Refuses a value; one that was another before is advised to be that again."""
    advised = setting.default if before in (None, value) else before
    for note in setting.notes:
        misfit = getattr(note, "misfit", None)
        text = None if misfit is None else misfit(key, value, advised)
        if text is not None:
            raise ConfigError(text)


def _typed_arguments(setting: Setting, config: Any) -> tuple[Any, dict[str, Setting]] | None:
    """The arguments that are typed, as a section and as settings."""
    note = setting.note(Arguments)
    schema = None if note is None else note.variants.schema(getattr(config, note.by))
    if schema is None:
        return None
    known = settings_within(schema)
    given = getattr(config, setting.key)
    return schema(**{key: given[key] for key in known if key in given}), known
