"""Recipes: read, merged with overrides, checked, explained and run."""

from __future__ import annotations

import dataclasses
import importlib.util
import os
import warnings
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torchrl_marl.config_rules import check_device, group_config, validate
from torchrl_marl.envs.config import EnvConfig
from torchrl_marl.envs.make import OWN_LIMITS, split_name
from torchrl_marl.envs.objects import as_environment, library_of
from torchrl_marl.envs.vmas.library import scenario_arguments, scenario_names
from torchrl_marl.errors import ConfigError, MissingExtraError, WriteError, nearest, quoted
from torchrl_marl.renamed import with_new_names
from torchrl_marl.schema import (
    Setting,
    flatten,
    merge,
    parse_overrides,
    read_yaml,
    settings_of,
    shown,
    to_yaml,
    unfold,
)
from torchrl_marl.training.config import TrainConfig, read_run_config
from torchrl_marl.training.files import whole_file
from torchrl_marl.training.folder import check_folder
from torchrl_marl.training.loggers import check_logging
from torchrl_marl.training.origin import check_world
from torchrl_marl.unread import refuse_unread, unread

if TYPE_CHECKING:
    from torchrl.envs import EnvBase

    from torchrl_marl.training.run import Run

__all__ = [
    "DEFAULT_RECIPE",
    "check_device",
    "check_logging",
    "explain",
    "iterate",
    "load_config",
    "read_config",
    "recipe_names",
    "resume",
    "save_config",
    "train",
    "validate",
]

DEFAULT_RECIPE = "vmas_balance_mappo"
"""What ``torchrl-marl train`` runs."""

# What may change when a run is resumed: nothing of this has a part in what is learned from.
_NOT_FIXED = ("total_frames", "stop_at_return", "evaluation.", "checkpoint.", "logging.")

_FOLDER = Path(__file__).parent / "configs"


def recipe_names() -> list[str]:
    """Names of the recipes that come with the package, sorted.

    Examples:
        >>> "vmas_balance_mappo" in recipe_names()
        True
    """
    return sorted(path.stem for path in _FOLDER.glob("*.yaml"))


def load_config(
    recipe: str | Path | TrainConfig | Mapping[str, Any],
    overrides: Iterable[str] | Mapping[str, Any] = (),
    *,
    own_env: bool = False,
) -> TrainConfig:
    """A checked config: a recipe with overrides.

    Args:
        recipe (str, Path, TrainConfig or dict): a recipe's name, the path of a YAML file, or
            the settings themselves.
        overrides (list of str, or dict): ``"learner.lr=1e-3"``, ``{"learner.lr": 1e-3}`` or
            ``{"learner": {"lr": 1e-3}}``.
        own_env (bool): the caller brings an environment, so ``env`` is not checked.

    Raises:
        ConfigError: an unknown recipe, key or value.
        MissingExtraError: the world or a logging backend is not installed.
        TrustError: the ``config.yaml`` of a stranger's run names a module to be imported.

    Examples:
        >>> load_config("toy_matrix_game_mappo", ["learner.lr=1e-3"]).learner.lr
        0.001
    """
    config = read_config(recipe, overrides)
    if isinstance(recipe, (str, Path)) and Path(recipe).name == "config.yaml" and not own_env:
        check_world(Path(recipe).parent, config.env)  # a run's, which may be somebody else's
    validate(config, own_env=own_env)
    refuse_unread(config, own_env=own_env)
    return config


def read_config(
    recipe: str | Path | TrainConfig | Mapping[str, Any],
    overrides: Iterable[str] | Mapping[str, Any] = (),
) -> TrainConfig:
    """As :func:`load_config`: keys and types are checked, values are not."""
    base = with_new_names(_settings(recipe))
    if isinstance(overrides, str):
        overrides = [overrides]
    own = dict(overrides) if isinstance(overrides, Mapping) else parse_overrides(overrides)
    own = with_new_names(own)
    base = _without_foreign_arguments(base, own)
    config = _merged(base, own)
    idle = unread(config).keys() - flatten(unfold(own)).keys()
    if idle and own:
        # What the recipe's algorithm or world reads and the chosen one does not.
        config = _merged(_without(base, idle - unread(_merged(base, {})).keys()), own)
    return config


def _merged(base: dict[str, Any], own: dict[str, Any]) -> TrainConfig:
    config = merge(TrainConfig, base, own, hints=_scenario_hints(base, own))
    return dataclasses.replace(
        config, groups=_typed_groups(config), env=_found_from_anywhere(config.env)
    )


def _without(settings: dict[str, Any], keys: Iterable[str]) -> dict[str, Any]:
    """Settings without those of dotted keys."""
    nested = unfold(settings)
    for key in keys:
        *path, leaf = key.split(".")
        inner = nested
        for part in path:
            inner = inner.get(part, {})
        inner.pop(leaf, None)
    return nested


def save_config(config: TrainConfig, path: str | Path) -> None:
    """Writes every setting as YAML, explained by comments; :func:`load_config` reads it back."""
    with whole_file(Path(path)) as file:
        file.write(to_yaml(config))


def explain(config: TrainConfig | None = None) -> list[Setting]:
    """Every setting: its dotted key, type, value and meaning.

    Args:
        config (TrainConfig, optional): whose values are given; otherwise the defaults.

    Examples:
        >>> explain()[1].key, explain()[1].default
        ('seed', 0)
    """
    settings = settings_of(TrainConfig)
    if config is not None:
        values = _values(config, settings)
        settings = {
            key: dataclasses.replace(setting, default=values[key])
            for key, setting in settings.items()
        }
    return list(settings.values())


def train(
    recipe: str | Path | TrainConfig | Mapping[str, Any] = DEFAULT_RECIPE,
    *,
    env: Any = None,
    **overrides: Any,
) -> Run:
    """Trains a team and returns the run: its policy, its folder, its figures.

    Args:
        recipe (str, Path, TrainConfig or dict): a recipe's name, the path of a YAML file, or
            the settings themselves.
        env (EnvBase, world, str or dict, optional): what is played instead of the recipe's: an
            environment; a world of PettingZoo or JaxMARL or what makes one, of which there are
            then ``env.num_envs`` copies; a name, such as ``"vmas/wheel"``; or a dict that
            overrides the recipe's ``env`` settings.
        overrides: settings, such as ``seed=1``, ``learner={"lr": 1e-3}`` or
            ``**{"learner.lr": 1e-3}``.

    Raises:
        UserError: what is asked for cannot be done; the message names the fix.

    Examples:
        >>> import torchrl_marl
        >>> run = torchrl_marl.train("vmas_balance_mappo", seed=1)  # doctest: +SKIP
        >>> run.summary["return_after"]  # doctest: +SKIP
        41.2
    """
    config, env = _prepared(recipe, env, overrides)
    from torchrl_marl.training import trainer

    run = trainer.train(config, env=env)
    draw(run.folder)
    return run


def iterate(
    recipe: str | Path | TrainConfig | Mapping[str, Any] = DEFAULT_RECIPE,
    *,
    env: Any = None,
    **overrides: Any,
) -> Iterator[Any]:
    """As :func:`train`, as a generator: yields after every iteration.

    Settings are checked at the call, before the first iteration.
    """
    config, env = _prepared(recipe, env, overrides)
    from torchrl_marl.training import trainer

    return trainer.iterate(config, env=env)


def resume(
    folder: str | Path,
    /,
    *,
    env: EnvBase | Mapping[str, Any] | None = None,
    trust: bool = False,
    **overrides: Any,
) -> Run:
    """Goes on with a run from its last checkpoint; one without a checkpoint begins anew.

    Args:
        folder (str or Path): the run's.
        env (EnvBase, optional): for a run on an environment of one's own.
        trust (bool): run the code that a run of somebody else's brings: its world's module, and
            the pickled worlds of a PettingZoo run, whose episodes begin anew otherwise.
        overrides: settings that change from now on, as ``config.yaml`` then says:
            ``total_frames``, ``stop_at_return``, and those of ``evaluation``, ``checkpoint`` and
            ``logging``. Linear schedules and ``unshare_at`` are those of a run of the new
            ``total_frames``.

    Raises:
        UserError: what is asked for cannot be done; the message names the fix.
    """
    if isinstance(env, Mapping):
        overrides, env = {**overrides, "env": env}, None
    before = read_run_config(folder)
    if env is None:
        check_world(Path(folder), before.env, trust)
    config = read_config(before, overrides)
    old, new = flatten(dataclasses.asdict(before)), flatten(dataclasses.asdict(config))
    fixed = [key for key in new if new[key] != old.get(key) and not key.startswith(_NOT_FIXED)]
    if fixed:
        raise ConfigError(
            f"{fixed[0]} is {shown(new[fixed[0]])}, but the run has {shown(old.get(fixed[0]))}, "
            "which stays; resuming may change total_frames, stop_at_return, evaluation.*, "
            "checkpoint.* and logging.*. For anything else start another run."
        )
    if config != before:
        validate(config, own_env=env is not None or config.env.library == "own")
    check_device(config)
    check_logging(config.logging)
    from torchrl_marl.training import trainer

    run = trainer.resume(Path(folder), env=env, config=config, trust=trust)
    draw(run.folder)
    return run


def draw(folder: Path) -> None:
    """Draws a run's learning curve into its folder, where matplotlib is installed."""
    if importlib.util.find_spec("matplotlib") is not None:
        from torchrl_marl.plotting import learning_curve

        try:
            learning_curve([folder], path=folder / "learning_curve.png")
        except WriteError as error:  # the run is whole without its picture
            warnings.warn(str(error), stacklevel=2)


def _prepared(
    recipe: str | Path | TrainConfig | Mapping[str, Any], env: Any, overrides: dict[str, Any]
) -> tuple[TrainConfig, EnvBase | None]:
    given, kind = None, None
    if isinstance(env, Mapping):
        overrides = {**overrides, "env": env}
    elif isinstance(env, str):
        overrides = {**_world_of(recipe, *split_name(env)), **overrides}
    elif env is not None:
        given, kind = env, library_of(env)
        if kind is not None:
            name = getattr(env, "__name__", type(env).__name__)
            overrides = {**_world_of(recipe, kind, name), **overrides}
        elif idle := [key for key in flatten(unfold(overrides)) if key.startswith("env.")]:
            raise ConfigError(
                f"{idle[0]} is given beside an environment that is built already; build it so, "
                f"or leave {idle[0]} out."
            )
    built = given is not None and kind in (None, "isaaclab")
    config = load_config(recipe, overrides, own_env=built)
    check_device(config)
    check_logging(config.logging)
    check_folder(config)
    return config, given if given is None else as_environment(given, config.env, config.device)


def _world_of(
    recipe: str | Path | TrainConfig | Mapping[str, Any], library: str, name: str
) -> dict[str, Any]:
    """Overrides for a world of a library, with its own time limit where it may have one."""
    before = read_config(recipe).env.library
    own_limit = {"env.max_steps": None} if library in OWN_LIMITS and library != before else {}
    return {"env.library": library, "env.name": name, **own_limit}


def _settings(recipe: str | Path | TrainConfig | Mapping[str, Any]) -> dict[str, Any]:
    if isinstance(recipe, TrainConfig):
        return dataclasses.asdict(recipe)
    if isinstance(recipe, Mapping):
        return unfold(recipe)
    path = Path(recipe)
    if isinstance(recipe, str) and recipe in recipe_names():
        path = _FOLDER / f"{recipe}.yaml"
    elif path.suffix not in (".yaml", ".yml") and not os.path.exists(path):
        names = recipe_names()
        raise ConfigError(
            f"unknown recipe {quoted(str(recipe))}; {nearest(str(recipe), names)}"
            "`torchrl-marl list recipes` shows all, and the path of a YAML file will do, too."
        )
    return {"recipe": path.stem, **read_yaml(path)}


def _without_foreign_arguments(base: dict[str, Any], own: dict[str, Any]) -> dict[str, Any]:
    """Another world than the recipe's takes neither its arguments nor its agents' names."""
    before = {"env.library": EnvConfig.library, "env.name": EnvConfig.name}
    before |= flatten(unfold(base))
    after = before | flatten(unfold(own))
    foreign: dict[str, Any] = {}
    if after["env.library"] != before["env.library"]:
        foreign["state"] = None
    if foreign and ":" in str(after["env.library"]):
        # It reads what its constructor names, and has no use for what the recipe's world needs.
        kept = ("library", "name", "num_envs", "max_steps")
        defaults = dataclasses.asdict(EnvConfig()).items()
        foreign = {key: value for key, value in defaults if key not in kept} | foreign
    if foreign or after["env.name"] != before["env.name"]:
        foreign |= {"kwargs": {}, "group_map": {}}
    base = unfold(base)
    return {**base, "env": {**base.get("env", {}), **foreign}} if foreign else base


def _found_from_anywhere(env: EnvConfig) -> EnvConfig:
    """With the whole paths of files, so that a run goes on from another folder, too."""
    place, colon, kind = env.library.partition(":")
    if colon:
        place = os.path.abspath(place) if place.endswith(".py") else place
        return dataclasses.replace(env, library=f"{place}:{kind}", name=kind)
    if env.library == "vmas" and env.name.endswith(".py"):
        return dataclasses.replace(env, name=os.path.abspath(env.name))
    return env


def _scenario_hints(base: dict[str, Any], own: dict[str, Any]) -> list[str]:
    """``env.kwargs.n_agents`` and the like, for whoever writes ``n_agents=4``."""
    settings = flatten(unfold(base)) | flatten(unfold(own))
    name = str(settings.get("env.name", ""))
    try:
        if name not in scenario_names():
            return []
    except MissingExtraError:
        return []
    return [f"env.kwargs.{argument}" for argument in sorted(scenario_arguments(name) or ())]


def _typed_groups(config: TrainConfig) -> dict[str, Any]:
    """``groups`` with each value as the schema types it."""
    typed = {}
    for group, own in config.groups.items():
        effective = flatten(dataclasses.asdict(group_config(config, group)))
        keys = [key for key in flatten(unfold(own or {})) if key in effective]
        typed[group] = unfold({key: effective[key] for key in keys})
    return typed


def _values(config: Any, settings: Iterable[str]) -> dict[str, Any]:
    values = {}
    for key in settings:
        value = config
        for part in key.split("."):
            value = getattr(value, part)
        values[key] = value
    return values
