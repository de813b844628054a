"""Recipes: reading, overrides, checks, explanation and saving."""

from __future__ import annotations

import dataclasses
import os
import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from torchrl_marl.envs.config import EnvConfig
from torchrl_marl.envs.external_code import check_own
from torchrl_marl.envs.libraries import DEFAULT_LIBRARY, LIBRARIES, find_library
from torchrl_marl.envs.make import check_environment_name, split_name
from torchrl_marl.envs.vmas.library import scenario_arguments, scenario_names
from torchrl_marl.errors import ConfigError, MissingExtraError, nearest, quoted
from torchrl_marl.learners.algorithms import ALGORITHMS
from torchrl_marl.learners.capabilities import STAGES
from torchrl_marl.learners.config import OnPolicyConfig
from torchrl_marl.settings import (
    Reader,
    Setting,
    check,
    flatten,
    merged,
    normalized,
    parse_overrides,
    read_yaml,
    settings_of,
    unfold,
    unread,
)
from torchrl_marl.training.config import TrainConfig
from torchrl_marl.training.files import open_atomically
from torchrl_marl.training.origin import check_origin, external_references, signed_yaml

__all__ = [
    "DEFAULT_RECIPE",
    "environment_settings",
    "explain",
    "load_config",
    "read_config",
    "recipe_names",
    "recipe_rows",
    "save_config",
    "stages_of",
    "validate",
]

Recipe = str | Path | TrainConfig | Mapping[str, Any]
"""Name of a recipe, path of a YAML file, or settings."""
GivenSettings = Iterable[str] | Mapping[str, Any]
"""``["learner.lr=1e-3"]``, ``{"learner.lr": 1e-3}`` or ``{"learner": {"lr": 1e-3}}``."""

DEFAULT_RECIPE = "vmas_balance_mappo"
"""Default recipe of ``torchrl-marl train``."""

_CONFIG_FOLDER = Path(__file__).parent / "configs"
_RUN_WIDE_SETTINGS = ("stages", "folder", "init_from", "recipe")
_RESERVED_NAMES = ("checkpoints", "players", "export", "animations")  # folders within a run's
# The settings file of a run has all of these; a recipe written by hand does not.
_RUN_FILE_KEYS = {"recipe", "seed", "folder", "device", "env", "learner", "checkpoint", "logging"}


def recipe_names() -> list[str]:
    """Returns the sorted names of the recipes in the package.

    Examples:
        >>> "vmas_balance_mappo" in recipe_names()
        True
    """
    return sorted(path.stem for path in _CONFIG_FOLDER.glob("*.yaml"))


def load_config(
    recipe: Recipe, overrides: GivenSettings = (), *, own_env: bool = False
) -> TrainConfig:
    """Returns a recipe with overrides as a checked config.

    Args:
        recipe (str, Path, TrainConfig or dict): name of a recipe, path of a YAML file, or
            settings.
        overrides (list of str, or dict): ``"learner.lr=1e-3"``, ``{"learner.lr": 1e-3}`` or
            ``{"learner": {"lr": 1e-3}}``.
        own_env (bool): whether the caller passes an environment; ``env`` is then not checked.

    Raises:
        ConfigError: a recipe, setting or value is unknown.
        MissingExtraError: the environment or a logging backend is not installed.
        TrustError: the recipe is the ``config.yaml`` of another user's run, or a copy of it, and
            names a module to import, a cluster, an address or a service.

    Examples:
        >>> load_config("toy_matrix_game_mappo", ["learner.lr=1e-3"]).learner.lr
        0.001
    """
    config, *idle = _read_recipe(recipe, overrides)
    if isinstance(recipe, (str, Path)) and _is_complete(recipe):
        # The settings file of a run, possibly of another user's run.
        given = flatten(_normalize(overrides))
        check_origin(Path(recipe), config, overridden=given, own_env=own_env)
    try:
        validate(config, own_env=own_env)
    except ConfigError:
        # The message then suggests the recipe's values.
        validate(config, own_env=own_env, like=_read_recipe(recipe, {}).config)
        raise
    for key, text in (pair for found in idle for pair in found.items()):
        if not (own_env and key.startswith("env.")):
            raise ConfigError(f"{text}; leave {key} out.")
    stages_of(config)
    return config


def stages_of(config: TrainConfig) -> dict[str, TrainConfig]:
    """Returns the checked settings of each stage by name; each is an ordinary run.

    Args:
        config (TrainConfig): config of the whole run; its ``folder`` holds those of the stages.

    Raises:
        ConfigError: a setting of a stage is unknown or wrong; the message names the stage.

    Examples:
        >>> stages = {"small": {"total_frames": 6400}, "large": {"env.num_envs": 128}}
        >>> found = stages_of(load_config("toy_matrix_game_mappo", {"stages": stages}))
        >>> found["large"].env.num_envs, found["large"].init_from
        (128, 'small')
    """
    found: dict[str, TrainConfig] = {}
    base, folder = dataclasses.replace(config, stages={}), Path(config.folder or "")
    for name, given in config.stages.items():
        own = _stage_settings(name, given)
        placement: dict[str, Any] = {"folder": str(folder / name)}
        if found:  # each later stage starts from the one before
            placement |= {"init_from": str(folder / list(found)[-1]), "init": None}
        try:
            _refuse_new_code(config, read_config(base, merged(placement, own)))  # before its import
            found[name] = load_config(base, merged(placement, own))
            STAGES.check(found[name])
        except ConfigError as error:
            raise ConfigError(f"stages.{name}: {error}") from None
    return found


def _stage_settings(name: str, given: Any) -> dict[str, Any]:
    """Returns the settings of a stage, nested."""
    if (
        not re.fullmatch(r"[A-Za-z]\w*", name)
        or name in _RESERVED_NAMES
        or re.fullmatch(r"seed\d+", name)
    ):
        raise ConfigError(
            f"stages has {quoted(name)}, expected names of folders of letters, digits and _, other "
            f"than {', '.join(_RESERVED_NAMES)} and seed0; rename it."
        )
    if not isinstance(given, Mapping | None):
        raise ConfigError(
            f"stages.{name} is {quoted(given)}, expected settings under it, such as "
            f"stages.{name}.total_frames."
        )
    own = unfold(given or {})
    if held := [key for key in _RUN_WIDE_SETTINGS if key in own]:
        raise ConfigError(
            f"stages.{name}.{held[0]} is given, but {held[0]} is set for the run as a whole; "
            "leave it out."
        )
    return own


def _refuse_new_code(config: TrainConfig, stage: TrainConfig) -> None:
    """Refuses external code and addresses that the run itself does not name."""
    known = {one.parts for one in external_references(config)}
    for one in external_references(stage):
        if one.parts not in known:
            raise ConfigError(
                f"it would {one.effect} ({one.key}), which the settings outside of stages do not "
                "name; name it there."
            )


def read_config(recipe: Recipe, overrides: GivenSettings = ()) -> TrainConfig:
    """Returns a recipe with overrides as a config; only names and types are checked."""
    config, inapplicable, _ = _read_recipe(recipe, overrides)
    for key in inapplicable.keys() & flatten(_normalize(overrides)).keys():
        raise ConfigError(f"{inapplicable[key]}; leave {key} out.")
    return config


def validate(
    config: TrainConfig, *, own_env: bool = False, like: TrainConfig | None = None
) -> None:
    """Refuses values that are unknown, out of range, or contradict each other.

    Args:
        config (TrainConfig): config of a run.
        own_env (bool): whether the caller passes an environment; ``env`` is then not checked.
        like (TrainConfig, optional): config with values that messages suggest; otherwise they
            suggest the defaults.

    Raises:
        ConfigError: a value is wrong; the message names the setting, the value that was found,
            the expected values and the fix.
        MissingExtraError: the environment or a logging backend is not installed.

    Examples:
        >>> validate(TrainConfig(device="gpu"))
        Traceback (most recent call last):
            ...
        torchrl_marl.errors.ConfigError: device is 'gpu', expected 'cpu', 'cuda' or 'cuda:1'; \
use device=cpu.
    """
    check(config, skip=("env",) if own_env else (), like=like)
    if not own_env:
        check_environment_name(config.env)
    for one in config.callbacks:
        if not one.startswith("<object>:"):  # given by the caller
            check_own(one, "callbacks")


class _ReadResult(NamedTuple):
    """A config, and messages about given settings that do not apply or have no effect."""

    config: TrainConfig
    inapplicable: dict[str, str]
    unread: dict[str, str]


def _read_recipe(recipe: Recipe, overrides: GivenSettings) -> _ReadResult:
    settings = _split_env(normalized(TrainConfig, _load_settings(recipe)), EnvConfig.library)
    own = _split_env(
        _normalize(overrides), settings.get("env", {}).get("library", EnvConfig.library)
    )
    base = _without_foreign_arguments(settings, own)
    read = _merge_settings(base, own, complete=_is_complete(recipe))
    idle = (read.inapplicable | read.unread).keys() - flatten(own).keys()
    if idle and own:
        # Settings that only the recipe's algorithm or environment reads.
        before = _merge_settings(base, {})
        read = _merge_settings(
            _remove_settings(base, idle - before.inapplicable.keys() - before.unread.keys()), own
        )
    return read


def _merge_settings(
    base: dict[str, Any], own: dict[str, Any], *, complete: bool = False
) -> _ReadResult:
    """Reads a recipe with overrides; a complete recipe's default values count as not given."""
    reader = Reader(TrainConfig, hints=_scenario_hints(base, own))
    config = reader.read(base, own)
    callbacks = [_absolute_class_path(one) for one in config.callbacks]
    found = {"env": _with_absolute_paths(config.env), "callbacks": callbacks}
    for key in ("folder", "init_from"):  # a shell expands ~ only at the start of a word
        found[key] = os.path.expanduser(path) if (path := getattr(config, key)) else path
    config = dataclasses.replace(config, **found)  # type: ignore[arg-type]
    ignored = reader.by_default - flatten(own).keys() if complete else ()
    inapplicable = {k: text for k, text in reader.inapplicable.items() if k not in ignored}
    return _ReadResult(config, inapplicable, unread(config))


def _is_complete(recipe: Any) -> bool:
    """Returns whether a recipe has every setting, like a run's settings file or a copy of it."""
    if not isinstance(recipe, (str, Path)) or recipe in recipe_names():
        return False
    return Path(recipe).name == "config.yaml" or read_yaml(Path(recipe)).keys() >= _RUN_FILE_KEYS


def _normalize(overrides: GivenSettings) -> dict[str, Any]:
    if isinstance(overrides, str):
        overrides = [overrides]
    own = overrides if isinstance(overrides, Mapping) else parse_overrides(overrides)
    return normalized(TrainConfig, own)


def _split_env(settings: dict[str, Any], before: str) -> dict[str, Any]:
    """Returns settings in which ``env=vmas/wheel`` is split into library and name."""
    env = settings.get("env", {})
    text = env.get("library") if isinstance(env, Mapping) else None
    if not isinstance(text, str) or "/" not in text or ":" in text or text.endswith(".py"):
        return settings
    library, name = split_name(text)
    if env.get("name", name) != name:
        raise ConfigError(
            f"env is {quoted(text)} and env.name {quoted(env['name'])}, which are two "
            "environments; leave one out."
        )
    return {
        **settings,
        "env": {**environment_settings(library, name, before), **env, "library": library},
    }


def environment_settings(library: str, name: str, before: str) -> dict[str, Any]:
    """Returns the ``env`` settings of an environment, with its own time limit if it has one.

    Args:
        library, name (str): library and name of the environment.
        before (str): library of the recipe; its environments keep the recipe's time limit.

    Examples:
        >>> environment_settings("vmas", "wheel", "vmas")
        {'library': 'vmas', 'name': 'wheel'}
    """
    new = library != before and library in LIBRARIES.names()
    own_limit = {"max_steps": None} if new and find_library(library).own_limit else {}
    return {"library": library, "name": name, **own_limit}


def _remove_settings(settings: dict[str, Any], keys: Iterable[str]) -> dict[str, Any]:
    """Returns settings without the given dotted keys, and without sections that become empty."""
    left_out = frozenset(keys)
    flat = flatten(unfold(settings), stop=left_out)
    return unfold({key: value for key, value in flat.items() if key not in left_out})


def save_config(config: TrainConfig, path: str | Path) -> None:
    """Writes every setting to a YAML file with comments, for :func:`load_config`."""
    with open_atomically(Path(path)) as file:
        file.write(signed_yaml(config))


def explain(config: TrainConfig | None = None) -> list[Setting]:
    """Returns every setting, with its dotted key, type, value and meaning.

    Args:
        config (TrainConfig, optional): config with the values; by default, the defaults are listed.

    Examples:
        >>> explain()[1].key, explain()[1].default
        ('seed', 0)
    """
    return list(settings_of(TrainConfig if config is None else config).values())


def recipe_rows() -> list[tuple[str, str]]:
    """Returns the rows of ``torchrl-marl list recipes``: name, and algorithm with environment."""
    rows = []
    for name in recipe_names():
        recipe = read_config(name)
        note = "  (default)" if name == DEFAULT_RECIPE else ""
        frames = f"{recipe.total_frames:,} frames"
        rows.append((name, f"{recipe.learner.algorithm} on {recipe.env.name}, {frames}{note}"))
    return rows


def _load_settings(recipe: Recipe) -> dict[str, Any]:
    if isinstance(recipe, TrainConfig):
        return dataclasses.asdict(recipe)
    if isinstance(recipe, Mapping):
        return unfold(recipe)
    if not isinstance(recipe, (str, os.PathLike)):
        raise ConfigError(
            f"recipe is {quoted(recipe)}, expected a recipe's name, the path of a YAML file, a "
            "TrainConfig or a dict; `torchrl-marl list recipes` shows the names."
        )
    path = Path(recipe)
    if isinstance(recipe, str) and recipe in recipe_names():
        path = _CONFIG_FOLDER / f"{recipe}.yaml"
    elif path.suffix not in (".yaml", ".yml") and not os.path.exists(path):
        raise _unknown_recipe_error(str(recipe))
    return {"recipe": path.stem, **read_yaml(path)}


def _unknown_recipe_error(text: str) -> ConfigError:
    """Returns the error for an unknown recipe.

    If the text is the name of an environment or algorithm, the message says how to use it.
    """
    names = recipe_names()
    library, slash, environment = (text if "/" in text else f"{DEFAULT_LIBRARY}/{text}").partition(
        "/"
    )
    if library in LIBRARIES.names() and (slash in text or environment in _scenario_names()):
        check_environment_name(EnvConfig(library=library, name=environment))
        own = _recipes_with("env", (library, environment))
        setting = f"env={library}/{environment}"
        return _suggest_recipe(text, "an environment", own, "for it", setting)
    word = text.lower()
    if word in ALGORITHMS.names():
        own = _recipes_with("learner", (word,))
        return _suggest_recipe(text, "an algorithm", own, "with it", f"learner.algorithm={word}")
    if (advice := ALGORITHMS.advice(word)) is not None:
        return ConfigError(
            f"{quoted(text)} is an algorithm, expected a recipe, such as {DEFAULT_RECIPE}; "
            f"{advice.format(at='learner')} with it."
        )
    return ConfigError(
        f"unknown recipe {quoted(text)}; {nearest(text, names)}"
        "`torchrl-marl list recipes` shows all, and the path of a YAML file is also accepted."
    )


def _suggest_recipe(
    text: str, what: str, recipes: list[str], which: str, setting: str
) -> ConfigError:
    """Returns the error for an environment or algorithm given as a recipe; suggests a recipe."""
    if recipes:
        use = f"use a recipe {which}, such as {recipes[0]}, or add {setting} to another recipe."
    else:
        use = f"add {setting} to a recipe, such as {DEFAULT_RECIPE}."
    return ConfigError(f"{quoted(text)} is {what}, expected a recipe; {use}")


def _scenario_names() -> Collection[str]:
    """Returns the names of VMAS's scenarios, or none if VMAS is not installed."""
    try:
        return scenario_names()
    except MissingExtraError:
        return ()


def _recipes_with(section: str, values: tuple[str, ...]) -> list[str]:
    """Returns the recipes with these values of a section's first settings, DEFAULT_RECIPE first."""
    fields = dataclasses.fields({"env": EnvConfig, "learner": OnPolicyConfig}[section])
    found = []
    for name in recipe_names():
        own = normalized(TrainConfig, read_yaml(_CONFIG_FOLDER / f"{name}.yaml")).get(section, {})
        if tuple(own.get(one.name, one.default) for one, _ in zip(fields, values)) == values:
            found.append(name)
    # Shorter names come next, since they belong to simpler recipes.
    return sorted(found, key=lambda name: (name != DEFAULT_RECIPE, len(name)))


def _without_foreign_arguments(base: dict[str, Any], own: dict[str, Any]) -> dict[str, Any]:
    """Drops the recipe's arguments and agent names if another environment is chosen."""
    before = {"env.library": EnvConfig.library, "env.name": EnvConfig.name}
    before |= flatten(base)
    after = before | flatten(own)
    foreign: dict[str, Any] = {}
    if after["env.library"] != before["env.library"]:
        foreign["state"] = None
    if foreign and ":" in str(after["env.library"]):
        # An environment class reads only the arguments of its constructor.
        shared = ("library", "name", "num_envs", "max_steps")
        defaults = dataclasses.asdict(EnvConfig()).items()
        foreign = {key: value for key, value in defaults if key not in shared} | foreign
    if foreign or after["env.name"] != before["env.name"]:
        foreign |= {"kwargs": {}, "group_map": {}}
    return {**base, "env": {**base.get("env", {}), **foreign}} if foreign else base


def _with_absolute_paths(env: EnvConfig) -> EnvConfig:
    """Returns the settings with absolute paths, which allows resuming a run from any folder."""
    if ":" in env.library:
        kind = env.library.partition(":")[2]
        return dataclasses.replace(env, library=_absolute_class_path(env.library), name=kind)
    if env.record is not None and env.record.files and env.name.endswith(".py"):
        return dataclasses.replace(env, name=os.path.abspath(env.name))
    return env


def _absolute_class_path(own: str) -> str:
    """Returns a ``file.py:Class`` with an absolute path; a ``module:Class`` is not changed."""
    place, colon, kind = own.partition(":")
    return f"{os.path.abspath(place)}{colon}{kind}" if place.endswith(".py") else own


def _scenario_hints(base: dict[str, Any], own: dict[str, Any]) -> Iterator[str]:
    """Yields names such as ``env.kwargs.n_agents``, to suggest in place of ``n_agents=4``."""
    settings = flatten(base) | flatten(own)
    name = str(settings.get("env.name", EnvConfig.name))
    if name in _scenario_names():
        for argument in sorted(scenario_arguments(name) or ()):
            yield f"env.kwargs.{argument}"
