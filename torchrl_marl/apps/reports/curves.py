"""Reads the tables of run folders, and groups runs that differ only in their seed."""

from __future__ import annotations

import csv
import dataclasses
import json
import os
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from torchrl_marl.errors import CheckpointError
from torchrl_marl.recipes import read_config, recipe_names
from torchrl_marl.runtime.trust import refuse_link
from torchrl_marl.settings import flatten, unread
from torchrl_marl.training.config import TrainConfig, last_stage, read_run_config

__all__ = ["Curves", "environment_name", "group_by_experiment", "read_csv", "read_run"]

REWARD = "/episode_reward"
"""Suffix of the columns that hold a group's returns."""
NOT_READ = "not read"
"""Placeholder for a setting that a run does not read; names leave it out."""
_LEAGUE_SETTINGS = ("self_play", "slots", "snapshot_every", "snapshot_at", "exploiters")
# Settings in which runs of one experiment may differ.
_NOT_COMPARED = ("seed", "device", "threads", "folder")
_SECTIONS_NOT_COMPARED = ("checkpoint.", "logging.", "evaluation.")


@dataclass(frozen=True)
class Curves:
    """Content of a run folder: the settings, both tables, and the summary."""

    folder: Path
    recipe: str
    settings: dict[str, Any]
    training: dict[str, np.ndarray]
    evaluation: dict[str, np.ndarray]
    summary: dict[str, Any]
    seed: int = 0
    cut: tuple[str, ...] = ()
    """Names of the tables in which an incomplete last line was skipped."""
    notes: tuple[str, ...] = ()
    """Notes on the source of the tables, each a sentence without its subject."""
    evaluated_with: Mapping[str, str] = field(default_factory=dict)
    """Settings of ``evaluation`` that decide what a return means, as texts; empty if unknown."""


def read_run(folder: str | Path) -> Curves:
    """Reads a run folder; skips the last line of a table if it is incomplete.

    Returns of training episodes are divided by ``env.reward_scale``, as evaluations are not scaled.

    Raises:
        CheckpointError: the folder is not a run folder, or has no rows yet.
        TrustError: a table is a link that leads out of the folder.
    """
    whole, folder = Path(folder), last_stage(folder)
    config = read_run_config(folder)
    if folder != whole:  # runs of the same stages are equal, wherever these lie
        stages = read_run_config(whole).stages
        config = dataclasses.replace(config, stages=stages, init_from=None)
    for name in ("metrics.csv", "evaluation.csv", "summary.json"):
        refuse_link(folder / name)
    training, evaluation = read_csv(folder / "metrics.csv"), read_csv(folder / "evaluation.csv")
    for name in (column for column in training if column.endswith(REWARD)):
        training[name] = training[name] / config.env.reward_scale
    if not len(training.get("frames", ())) and not len(evaluation.get("frames", ())):
        raise CheckpointError(
            f"{str(folder)!r} has no row in metrics.csv yet, expected at least one; "
            "wait for its first iteration."
        )
    summary = _read_json(folder / "summary.json")
    tables = ("evaluation.csv", "metrics.csv")
    cut = tuple(name for name in tables if last_line_is_incomplete(folder / name))
    seed = config.seed
    settings = _compared_settings(config)
    found = Curves(folder, config.recipe, settings, training, evaluation, summary, seed, cut)
    return dataclasses.replace(found, evaluated_with=_evaluated_with(config))


def _evaluated_with(config: TrainConfig) -> dict[str, str]:
    settings = config.evaluation
    ranges = config.env.randomize if settings.randomize else None
    return {
        "deterministic": json.dumps(settings.deterministic),
        "randomize": json.dumps(ranges or False),
    }


def _compared_settings(config: TrainConfig) -> dict[str, Any]:
    """Returns the settings by which runs are compared; unread settings are :data:`NOT_READ`."""
    idle = {*unread(config, defaults=True), *_unread_league_settings(config)}
    return {
        name: NOT_READ if name in idle else value
        for name, value in flatten(dataclasses.asdict(config)).items()
        if name not in _NOT_COMPARED and not name.startswith(_SECTIONS_NOT_COMPARED)
    }


def _unread_league_settings(config: TrainConfig) -> list[str]:
    """Returns the league's settings that this run does not read."""
    league = config.league
    idle = {
        "weighting": league.match != "pfsp",
        "exploited": not league.exploiters,
        **dict.fromkeys(_LEAGUE_SETTINGS, not league.enabled),
    }
    return [f"league.{name}" for name, without in idle.items() if without]


def read_csv(path: Path) -> dict[str, np.ndarray]:
    """Reads the columns of a table of numbers; empty cells are NaN. A missing file has no columns.

    Raises:
        CheckpointError: a line holds something else than numbers, or the column ``frames`` is
            missing.
    """
    if not path.is_file():
        return {}
    try:
        with path.open(newline="", encoding="utf-8", errors="replace") as file:
            reader = csv.reader(file)
            rows = [(reader.line_num, row) for row in reader]
    except csv.Error as error:
        raise CheckpointError(
            f"{str(path)!r} is not a table of metrics ({error}); move it away."
        ) from None
    if last_line_is_incomplete(path):
        rows = rows[:-1]  # a number in it may be cut, too
    if not rows:
        return {}
    (_, head), *body = rows
    if "frames" not in head:
        raise CheckpointError(
            f"{str(path)!r} is not a table of metrics: it has no column 'frames'; move it away."
        )
    table = np.full((len(body), len(head)), np.nan)
    for i, (line, row) in enumerate(body):
        try:
            if len(row) != len(head):
                raise ValueError
            table[i] = [float(cell) if cell else np.nan for cell in row]
        except ValueError:
            raise CheckpointError(
                f"{str(path)!r} is broken in line {line}, expected {len(head)} numbers; "
                "delete the line."
            ) from None
    return dict(zip(head, table.T))


def last_line_is_incomplete(path: Path) -> bool:
    """Returns whether the last line of a table lacks its newline.

    Args:
        path (Path): the table; a missing or empty file lacks nothing.
    """
    if not path.is_file() or not path.stat().st_size:
        return False
    with path.open("rb") as file:
        file.seek(-1, os.SEEK_END)
        return file.read() not in b"\r\n"


def _read_json(path: Path) -> dict[str, Any]:
    try:
        return dict(json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError):  # a run that has not ended has none
        return {}


_MAX_SETTINGS = 4
_MAX_VALUE_LENGTH = 24
_MISSING = "no such setting"


def group_by_experiment(runs: Sequence[Curves]) -> list[tuple[str, list[Curves]]]:
    """Groups runs that differ only in their seed, and names each group.

    The name is the recipe, or the task if the run changed the recipe's task. If all groups would
    get the same name, names are made from the settings in which the groups differ.

    Args:
        runs (list of Curves): results of :func:`read_run`.
    """
    groups = group_by_settings(runs)
    names = _experiment_names([seeds[0] for seeds in groups])
    # Folders distinguish runs if names are cut, or if settings that names leave out differ.
    count = Counter(names)
    names = [
        name if count[name] == 1 else f"{name}, {seeds[0].folder.name}"
        for name, seeds in zip(names, groups)
    ]
    return list(zip(names, groups))


def group_by_settings(runs: Iterable[Curves]) -> list[list[Curves]]:
    """Groups runs with equal settings, in order of first appearance.

    Args:
        runs (list of Curves): results of :func:`read_run`.
    """
    together: dict[str, list[Curves]] = {}
    for run in runs:
        together.setdefault(json.dumps(run.settings, sort_keys=True), []).append(run)
    return list(together.values())


def environment_name(run: Curves) -> str:
    """Returns the task's name without its path; for a user's environment, the class name.

    Args:
        run (Curves): a run of the task.
    """
    library, name = str(run.settings["env.library"]), str(run.settings["env.name"])
    return library.rpartition(":")[2] if ":" in library else name.rpartition("/")[2]


def short_names(settings: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    """Shortens each dotted key to as few of its last parts as distinguish it from the others.

    Keys with the same last part and equal values in every experiment are merged.

    Args:
        settings (list of dict): for each experiment, the settings that differ between experiments.

    Returns:
        dict: key -> short name, for the keys to show.

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


def _experiment_names(firsts: Sequence[Curves]) -> list[str]:
    kinds = [(_recipe_or_task(run), run.recipe) for run in firsts]
    named = []
    for run, (kind, recipe) in zip(firsts, kinds):
        parts = [kind] if len({kind for kind, _ in kinds}) > 1 else []
        if recipe != kind and len({other for same, other in kinds if same == kind}) > 1:
            parts.append(recipe)
        alike = [one for one, other in zip(firsts, kinds) if other == (kind, recipe)]
        parts += differences(run.settings, [other.settings for other in alike])
        named.append(", ".join(parts) or kind)
    return named


def _recipe_or_task(run: Curves) -> str:
    """Returns the recipe, or the task if the run changed the recipe's task."""
    task = run.settings["env.library"], run.settings["env.name"]
    if run.recipe in recipe_names():
        own = read_config(run.recipe).env
        return run.recipe if task == (own.library, own.name) else environment_name(run)
    by_user = task[0] == "own" or ":" in task[0]
    return environment_name(run) if by_user else run.recipe


def differences(
    settings: Mapping[str, Any], others: Sequence[Mapping[str, Any]], most: int = _MAX_SETTINGS
) -> list[str]:
    """Returns the settings in which one experiment differs from others, as ``lr=0.001``.

    Args:
        settings (mapping): settings of the experiment.
        others (list of mappings): settings of all experiments, including this one.
        most (int): maximum number of texts; if more settings differ, the last text counts the rest.

    Examples:
        >>> one, other = {"learner.lr": 0.001, "seed": 0}, {"learner.lr": 0.01, "seed": 0}
        >>> differences(one, [one, other])
        ['lr=0.001']
    """
    keys = {key: None for other in others for key in other}
    differs = [key for key in keys if len(_distinct_values(key, others)) > 1]
    short = short_names([{key: other.get(key) for key in differs} for other in others])
    shown = [key for key in short if settings.get(key, NOT_READ) != NOT_READ]
    texts = [f"{short[key]}={_value_text(settings[key])}" for key in shown]
    if len(texts) > most:
        texts = [*texts[: most - 1], f"{len(texts) - most + 1} more"]
    return texts


def _distinct_values(key: str, settings: Sequence[Mapping[str, Any]]) -> set[str]:
    found = {json.dumps(own.get(key, _MISSING)) for own in settings}
    return found - {json.dumps(NOT_READ)}


def _value_text(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:g}"
    if isinstance(value, list):
        text = f"[{','.join(map(_value_text, value))}]"
    else:
        text = value if isinstance(value, str) else json.dumps(value)
    return text if len(text) <= _MAX_VALUE_LENGTH else f"{text[: _MAX_VALUE_LENGTH - 3]}..."
