"""Experiments: runs that differ only in their seed, under a short name of their differences."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from torchrl_marl.recipes import read_config, recipe_names

if TYPE_CHECKING:
    from torchrl_marl.apps.reports.curves import Curves

__all__ = ["NOT_READ", "by_settings", "differences", "experiments", "short_names", "world_name"]

_MOST_SETTINGS = 4
_LONGEST_VALUE = 24
_MISSING = "no such setting"
NOT_READ = "not read"
"""What stands for a setting that nothing reads in a run, whatever its value; in no name."""


def experiments(runs: Sequence[Curves]) -> list[tuple[str, list[Curves]]]:
    """Groups runs that differ only in their seed, under a name of what differs from the others.

    The name is the recipe's, or the world's where it is not the recipe's own; where all have the
    same, it is the settings in which they differ.

    Args:
        runs (list of Curves): as :func:`~torchrl_marl.apps.reports.curves.read_run` gives them.
    """
    groups = by_settings(runs)
    names = _names([seeds[0] for seeds in groups])
    # Where names are cut, or hidden settings differ, folders tell runs apart.
    count = Counter(names)
    names = [
        name if count[name] == 1 else f"{name}, {seeds[0].folder.name}"
        for name, seeds in zip(names, groups)
    ]
    return list(zip(names, groups))


def by_settings(runs: Iterable[Curves]) -> list[list[Curves]]:
    """Groups runs whose settings are the same, in the order of their first.

    Args:
        runs (list of Curves): as :func:`~torchrl_marl.apps.reports.curves.read_run` gives them.
    """
    together: dict[str, list[Curves]] = {}
    for run in runs:
        together.setdefault(json.dumps(run.settings, sort_keys=True), []).append(run)
    return list(together.values())


def world_name(run: Curves) -> str:
    """Returns the world's name without its library's folders; the class for one's own.

    Args:
        run (Curves): whose.
    """
    library, name = str(run.settings["env.library"]), str(run.settings["env.name"])
    return library.rpartition(":")[2] if ":" in library else name.rpartition("/")[2]


def short_names(settings: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    """Shortens dotted keys to as many last parts as tell them apart.

    Keys of one last part that have the same value in every experiment are one.

    Args:
        settings (list of dict): of each experiment, those that differ.

    Returns:
        dict: keys to show, and their short names.

    Examples:
        >>> short_names([{"learner.lr": 1, "actor.sharing": "full", "critic.sharing": "none"}])
        {'learner.lr': 'lr', 'actor.sharing': 'actor.sharing', 'critic.sharing': 'critic.sharing'}
        >>> short_names([{"learner.lr": 1, "actor.sharing": "full", "critic.sharing": "full"}])
        {'learner.lr': 'lr', 'actor.sharing': 'sharing'}
    """
    columns = {key: [json.dumps(own.get(key)) for own in settings] for key in settings[0]}
    ends: dict[str, list[str]] = {}
    for key in columns:
        ends.setdefault(key.rpartition(".")[2], []).append(key)
    short = {}
    for end, keys in ends.items():
        if all(columns[key] == columns[keys[0]] for key in keys):
            short[keys[0]] = end
        else:
            short |= {key: _unique_end(key, keys) for key in keys}
    return {key: short[key] for key in columns if key in short}


def _unique_end(key: str, keys: Iterable[str]) -> str:
    parts = key.split(".")
    ends = [".".join(parts[-n:]) for n in range(1, len(parts) + 1)]
    others = [f".{other}" for other in keys if other != key]
    return next((end for end in ends if not any(o.endswith(f".{end}") for o in others)), key)


def _names(firsts: Sequence[Curves]) -> list[str]:
    kinds = [(_kind(run), run.recipe) for run in firsts]
    named = []
    for run, (kind, recipe) in zip(firsts, kinds):
        parts = [kind] if len({kind for kind, _ in kinds}) > 1 else []
        if recipe != kind and len({other for same, other in kinds if same == kind}) > 1:
            parts.append(recipe)
        alike = [one for one, other in zip(firsts, kinds) if other == (kind, recipe)]
        parts += differences(run.settings, [other.settings for other in alike])
        named.append(", ".join(parts) or kind)
    return named


def _kind(run: Curves) -> str:
    """Returns the recipe, or the world where it is not the recipe's own."""
    world = run.settings["env.library"], run.settings["env.name"]
    if run.recipe in recipe_names():
        own = read_config(run.recipe).env
        return run.recipe if world == (own.library, own.name) else world_name(run)
    of_ones_own = world[0] == "own" or ":" in world[0]
    return world_name(run) if of_ones_own else run.recipe


def differences(
    settings: Mapping[str, Any], others: Sequence[Mapping[str, Any]], most: int = _MOST_SETTINGS
) -> list[str]:
    """Names what differs among settings, as ``lr=0.001``, and its values in one of them.

    Args:
        settings (mapping): whose values are given.
        others (list of mappings): all that are compared, this one among them.
        most (int): texts that are given; what is left is counted by the last.

    Examples:
        >>> one, other = {"learner.lr": 0.001, "seed": 0}, {"learner.lr": 0.01, "seed": 0}
        >>> differences(one, [one, other])
        ['lr=0.001']
    """
    keys = {key: None for other in others for key in other}
    differs = [key for key in keys if len(_values(key, others)) > 1]
    short = short_names([{key: other.get(key) for key in differs} for other in others])
    shown = [key for key in short if settings.get(key, NOT_READ) != NOT_READ]
    texts = [f"{short[key]}={_text(settings[key])}" for key in shown]
    if len(texts) > most:
        texts = [*texts[: most - 1], f"{len(texts) - most + 1} more"]
    return texts


def _values(key: str, settings: Sequence[Mapping[str, Any]]) -> set[str]:
    found = {json.dumps(own.get(key, _MISSING)) for own in settings}
    return found - {json.dumps(NOT_READ)}


def _text(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:g}"
    if isinstance(value, list):
        text = f"[{','.join(map(_text, value))}]"
    else:
        text = value if isinstance(value, str) else json.dumps(value)
    return text if len(text) <= _LONGEST_VALUE else f"{text[: _LONGEST_VALUE - 3]}..."
