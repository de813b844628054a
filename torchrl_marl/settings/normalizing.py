"""Layers of settings in one form: nested, today's names, plain words in their places."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from torchrl_marl.settings.fields import schemas_of, settings_within
from torchrl_marl.settings.layers import WORD, unfold
from torchrl_marl.settings.renaming import with_new_names
from torchrl_marl.settings.rules import Overrides

__all__ = ["normalized"]


def normalized(schema: type, layer: Mapping[str, Any], *, told: bool = True) -> dict[str, Any]:
    """Returns a layer nested, under today's names, each section's plain word in its place.

    Args:
        schema (type): a dataclass.
        layer (mapping): nested, or with dotted keys, or both.
        told (bool): whether former names are warned of.

    Examples:
        >>> from torchrl_marl.training.config import TrainConfig
        >>> normalized(TrainConfig, {"learner": "ippo", "learner.lr": 1e-3})
        {'learner': {'algorithm': 'ippo', 'lr': 0.001}}
    """
    return with_new_names(schema, _words_in_place([schema], unfold(layer)), told=told)


def _words_in_place(schemas: Iterable[type], layer: Mapping[str, Any]) -> dict[str, Any]:
    """A layer in which the plain word of a section is the value of the section's first setting.

    Args:
        schemas (iterable of type): those that the layer may be of.
        layer (mapping): nested.
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
                placed[name] = {group: _worded(of, own) for group, own in placed[name].items()}
    return placed | {n: _worded(sections[n], placed[n]) for n in placed.keys() & sections.keys()}


def _worded(schemas: list[type], value: Any) -> Any:
    firsts = [next(iter(settings_within(schema).values())) for schema in schemas]
    first = next((one.key for one in firsts if one.kind is str), firsts[0].key)
    if isinstance(value, str):
        return {first: value}
    if not isinstance(value, Mapping):
        return value
    value = dict(value)
    if WORD in value:
        value = {first: value.pop(WORD), **value}
    return _words_in_place(schemas, value)
