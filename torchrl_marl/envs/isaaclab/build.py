"""Builds Isaac Lab simulations from the names of tasks."""

from __future__ import annotations

import importlib
import importlib.metadata
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from torchrl_marl.errors import ConfigError, nearest

__all__ = ["build_task", "check_task"]

_REQUIRED_MEMBERS = (
    "possible_agents",
    "observation_spaces",
    "action_spaces",
    "reset_buf",
    "_reset_idx",
)

# Isaac Lab 3.0 renamed its multi-agent tasks.
_RENAMED_TASKS = {
    "Isaac-Cart-Double-Pendulum-Direct-v0": "Isaac-Pendulum-MARL-Direct",
    "Isaac-Shadow-Hand-Over-Direct-v0": "Isaac-Shadow-Handover-Direct",
}

_INSTALL_ADVICE = (
    "install Isaac Lab 3.0, which needs no Isaac Sim (pip install isaaclab, or on other versions "
    "of Python as docs/environments/isaaclab.md says)"
)
_LAUNCH_ADVICE = (
    "this Isaac Lab is older than 3.0, so start Isaac Sim before the environment is built, as "
    "Isaac Lab's scripts do: from isaaclab.app import AppLauncher; "
    "app = AppLauncher(headless=True).app"
)


class MissingSimulatorError(ConfigError, ImportError):
    """Raised if Isaac Lab cannot be imported, such as 2.3 without a running Isaac Sim."""


def build_task(
    name: str,
    *,
    num_envs: int | None,
    seed: int,
    device: torch.device | str | None,
    settings: Mapping[str, Any],
    usd_path: str | Mapping[str, str] | None = None,
) -> Any:
    """Builds the simulation of a registered task, of Isaac Lab 3.0 or 2.3.

    Where a task's config has alternatives (presets of 3.0, such as physics engines), the defaults
    are taken.

    Args:
        name (str): registered name, such as ``"Isaac-Pendulum-MARL-Direct"``.

    Keyword Args:
        num_envs (int, optional): number E of envs; if None, the task's default.
        seed (int): random seed of the task.
        device (torch.device, optional): device of the simulation; if None, the task's default.
        settings (mapping): name -> value of settings in the task's config; a nested mapping
            sets the settings of a nested config.
        usd_path (str or mapping, optional): file of the robot's model on this machine, or asset
            of the scene -> file.

    Raises:
        ConfigError: if the task, a setting, an asset or a file is unknown, or the task is not
            multi-agent.
        MissingSimulatorError: if Isaac Lab cannot be imported.
    """
    gymnasium = _import("gymnasium", name)
    if name not in gymnasium.registry:
        _import("isaaclab_tasks", name)  # importing it registers Isaac Lab's tasks
    if name not in gymnasium.registry:
        _raise_unknown_task(
            name, [key for key, spec in gymnasium.registry.items() if _config_entry(spec)]
        )
    config = _without_presets(_make_config(name, _config_entry(gymnasium.spec(name))))
    config.seed = seed
    if num_envs is not None:
        config.scene.num_envs = num_envs
    if device is not None:
        config.sim.device = str(device)
    _apply_settings(name, config, settings)
    _set_asset_files(
        name, config, {"robot": usd_path} if isinstance(usd_path, str) else usd_path or {}
    )
    return check_task(gymnasium.make(name, cfg=config))


def check_task(env: Any) -> Any:
    """Returns the ``DirectMARLEnv`` inside Gymnasium's wrappers.

    Raises:
        ConfigError: if the environment inside is not a ``DirectMARLEnv``.
    """
    task = getattr(env, "unwrapped", env)
    if not all(hasattr(task, member) for member in _REQUIRED_MEMBERS):
        raise ConfigError(
            f"the environment is a {type(task).__name__}, expected an Isaac Lab "
            "DirectMARLEnv or a task's name; use torchrl.envs.IsaacLabWrapper for single-agent "
            "tasks."
        )
    return task


def _import(module: str, name: str) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise MissingSimulatorError(
            f"the task {name!r} needs Isaac Lab, but {module} cannot be imported "
            f"({type(error).__name__}: {error}); {_installation_advice()}."
        ) from error


def _installation_advice() -> str:
    try:
        generation = int(importlib.metadata.version("isaaclab").partition(".")[0])
    except (importlib.metadata.PackageNotFoundError, ValueError):
        return _INSTALL_ADVICE
    return _INSTALL_ADVICE if generation >= 3 else _LAUNCH_ADVICE


def _raise_unknown_task(name: str, known: list[str]) -> None:
    """Raises an error for an unknown task; it names the task if only its name has changed."""
    other_names = {**_RENAMED_TASKS, **{new: old for old, new in _RENAMED_TASKS.items()}}
    if other_names.get(name) in known:
        raise ConfigError(
            f"the task {name!r} is {other_names[name]!r} in the Isaac Lab that is installed; "
            f"set env.name={other_names[name]}."
        )
    raise ConfigError(
        f"unknown Isaac Lab task {name!r}; {nearest(name, known)}import the package of a "
        "custom task first, which registers it."
    )


def _config_entry(spec: Any) -> Any:
    return (spec.kwargs or {}).get("env_cfg_entry_point")


def _make_config(name: str, entry: Any) -> Any:
    if isinstance(entry, str) and ":" in entry and not entry.endswith(".yaml"):
        module, _, attribute = entry.partition(":")
        entry = getattr(_import(module, name), attribute)
    if not callable(entry):
        raise ConfigError(
            f"the task {name!r} is registered with env_cfg_entry_point={entry!r}, expected a "
            "config class; build the task yourself and pass the environment."
        )
    return entry()


def _without_presets(config: Any) -> Any:
    """Replaces the presets in a config of Isaac Lab 3.0 by their defaults; 2.3 has none."""
    try:
        tools = importlib.import_module("isaaclab_tasks.utils.hydra")
    except ImportError:  # hydra is optional in 2.3
        return config
    return tools.resolve_presets(config) if hasattr(tools, "resolve_presets") else config


def _set_asset_files(name: str, config: Any, files: Mapping[str, str]) -> None:
    """Sets the files of a scene's assets."""
    assets = _assets_with_files(config)
    for asset, file in files.items():
        if asset not in assets:
            raise ConfigError(
                f"usd_path: the task {name!r} has no asset {asset!r} with a file; "
                f"{nearest(asset, assets)}expected one of {sorted(assets)}."
            )
        path = Path(file).expanduser()
        if not path.is_file():
            raise ConfigError(f"usd_path: there is no file {file!r} for {asset!r}; check the path.")
        assets[asset].usd_path = str(path.resolve())


def _assets_with_files(config: Any) -> dict[str, Any]:
    """Returns a dict: asset -> its spawn config, which has the file; 2.3 appends ``_cfg``."""
    attributes = {**vars(config), **vars(config.scene)}
    # A string may name a class, which reading an attribute would import.
    attributes = {key: x for key, x in attributes.items() if not isinstance(x, str)}
    spawners = {
        key.removesuffix("_cfg"): getattr(x, "spawn", None) for key, x in attributes.items()
    }
    return {key: spawn for key, spawn in spawners.items() if hasattr(spawn, "usd_path")}


def _apply_settings(name: str, config: Any, settings: Mapping[str, Any]) -> None:
    known = [key for key in vars(config) if not key.startswith("_")]
    for key, value in settings.items():
        if key not in known:
            raise ConfigError(
                f"the task {name!r} has no setting {key!r}; {nearest(key, known)}"
                f"its config has {', '.join(sorted(known))}."
            )
        if isinstance(getattr(config, key), float) and isinstance(value, int):
            value = float(value)
        try:
            config.from_dict({key: value})
        except (KeyError, ValueError, TypeError) as error:
            why = " ".join(str(error).split())
            raise ConfigError(
                f"the task {name!r} does not take {key}={value!r} ({why}); check this value."
            ) from error
