"""Which runs are of one world, and which are seeds of one algorithm."""

from __future__ import annotations

import dataclasses
import json
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from torchrl_marl.curves import Curves
from torchrl_marl.experiments import NOT_READ, by_settings, differences, world_name
from torchrl_marl.reports.populations import population_name
from torchrl_marl.reports.records import Progress, Record

__all__ = ["World", "by_world", "each_seed_once", "group", "is_of_world"]

# Of `env`, what changes what a return means.
_OF_WORLD = ("env.library", "env.name", "env.max_steps", "env.group_map")
# What changes how fast a run is, or how far it has come, but not what is learned in so many frames.
_NOT_LEARNED = ("execution", "total_frames", "stop_at_return")
_NOT_LEARNED_SECTIONS = ("distributed.", "env.worker", "env.restart_workers")
# Of `distributed`, what says with which random states, and how late, a policy learns.
_LEARNED = tuple(
    f"distributed.{name}" for name in ("collectors", "overlap", "asynchronous", "max_lag")
)
_WAITS_NOT = "distributed.asynchronous"


@dataclass(frozen=True)
class World:
    """A world with its arguments, and the seeds of each algorithm."""

    name: str
    settings: dict[str, Any]
    algorithms: dict[str, list[Record]]

    @property
    def records(self) -> list[Record]:
        """All runs."""
        return [record for seeds in self.algorithms.values() for record in seeds]


def is_of_world(setting: str) -> bool:
    """Whether runs that differ in a setting are of different worlds."""
    return setting in _OF_WORLD or setting.startswith("env.kwargs.")


def group(records: Sequence[Record]) -> list[World]:
    """Groups runs by world, and within it by what is learned; seeds of one algorithm together.

    Names are as short as tells them apart: of a world its own, of an algorithm ``MAPPO``, then
    the recipe's, then the settings that differ.

    Args:
        records (list of Record): the runs.
    """
    together: dict[str, list[Record]] = {}
    for record in records:
        world = {key: x for key, x in record.run.settings.items() if is_of_world(key)}
        together.setdefault(json.dumps(world, sort_keys=True), []).append(record)
    groups = list(together.values())
    all_settings = [
        {key: x for key, x in own[0].run.settings.items() if is_of_world(key)} for own in groups
    ]
    names = _world_names([own[0].run for own in groups], all_settings)
    return sorted(
        (World(*row) for row in zip(names, all_settings, map(_algorithms, groups))),
        key=lambda world: world.name,
    )


def by_world(runs: Sequence[Curves]) -> dict[str, dict[str, list[Curves]]]:
    """Groups runs as :func:`group` does, by the names of worlds and algorithms.

    Args:
        runs (list of Curves): as :func:`~torchrl_marl.curves.read_run` gives them.
    """
    nothing = Progress(*(np.empty(0),) * 4)
    records = [Record(run, nothing, nothing, False, ()) for run in runs]
    return {
        world.name: {name: [own.run for own in seeds] for name, seeds in world.algorithms.items()}
        for world in group(records)
    }


def each_seed_once(records: Sequence[Record]) -> tuple[list[Record], list[str]]:
    """Leaves out runs with the seed of another that learns the same, such as a population's.

    The run that stays has finished, or come farther; of equals it is the first.

    Args:
        records (list of Record): the runs.

    Returns:
        tuple: the others, and a sentence for each that is left out.
    """
    best: dict[str, Record] = {}
    for record in records:
        one = best.setdefault(_key(record), record)
        if (record.finished, record.frames) > (one.finished, one.frames):
            best[_key(record)] = record
    left_out = [
        f"{record.name!r} has the seed {record.run.seed} and what is learned of "
        f"{best[_key(record)].name!r}; a seed counts once."
        for record in records
        if best[_key(record)] is not record
    ]
    return list(best.values()), left_out


def _key(record: Record) -> str:
    """What makes runs one seed of one algorithm."""
    return json.dumps([record.run.seed, _learned(record.run)], sort_keys=True)


def _world_names(runs: Sequence[Curves], settings: Sequence[dict[str, Any]]) -> list[str]:
    plain = [world_name(run) for run in runs]
    names = []
    for name, own in zip(plain, settings):
        alike = [other for other, of in zip(settings, plain) if of == name]
        names.append(", ".join([name, *differences(own, alike)]))
    return _told_apart(names)


def _algorithms(records: Sequence[Record]) -> dict[str, list[Record]]:
    """Returns the algorithms of a world by name, each with its runs by seed."""
    learned = [dataclasses.replace(record.run, settings=_learned(record.run)) for record in records]
    of_run = {id(run): record for run, record in zip(learned, records)}
    groups = by_settings(learned)
    names = _algorithm_names([seeds[0] for seeds in groups])
    found = {
        name: sorted((of_run[id(run)] for run in seeds), key=lambda record: record.run.seed)
        for name, seeds in zip(names, groups)
    }
    return dict(sorted(found.items()))


def _learned(run: Curves) -> dict[str, Any]:
    """The settings that say what is learned in so many frames."""
    found = {name: value for name, value in run.settings.items() if _is_learned(name)}
    if found.get(_WAITS_NOT) == NOT_READ:  # without actors everything waits
        found[_WAITS_NOT] = False
    return found


def _is_learned(setting: str) -> bool:
    if setting in _LEARNED:
        return True
    of_speed = setting in _NOT_LEARNED or setting.startswith(_NOT_LEARNED_SECTIONS)
    return not of_speed and setting != "recipe"


def _algorithm_names(firsts: Sequence[Curves]) -> list[str]:
    """``MAPPO``, or ``MAPPO (rmappo, lr=0.01)`` with what tells several of one name apart."""
    plain = [_algorithm(run) for run in firsts]
    kinds = [(name, _recipe(run)) for run, name in zip(firsts, plain)]
    names = []
    for run, (name, recipe) in zip(firsts, kinds):
        recipes = {other for of, other in kinds if of == name}
        more = [recipe] if len(recipes) > 1 and recipe.upper() != name else []
        alike = [other.settings for other, kind in zip(firsts, kinds) if kind == (name, recipe)]
        more += differences(run.settings, alike, most=3)
        names.append(f"{name} ({', '.join(more)})" if more else name)
    return _told_apart(names)


def _algorithm(run: Curves) -> str:
    """``MAPPO``, ``MAPPO + IQL`` of two groups, or ``MAPPO, best of PBT of 4``."""
    keys = [key for key in run.settings if key.startswith("groups.") and key.endswith(".algorithm")]
    words = [run.settings.get("learner.algorithm"), *(run.settings[key] for key in keys)]
    name = " + ".join(dict.fromkeys(str(word).upper() for word in words))
    population = population_name(run.settings)
    return name if population is None else f"{name}, {population}"


def _recipe(run: Curves) -> str:
    """Returns a recipe's name without the world's, of ``<library>_<world>_<algorithm>``."""
    return run.recipe.removeprefix(f"{run.settings.get('env.library')}_{world_name(run)}_")


def _told_apart(names: Iterable[str]) -> list[str]:
    """Numbers names that are the same, where settings that are not shown differ."""
    names, seen = list(names), Counter[str]()
    count = Counter(names)
    result = []
    for name in names:
        seen[name] += 1
        result.append(name if count[name] == 1 else f"{name} #{seen[name]}")
    return result
