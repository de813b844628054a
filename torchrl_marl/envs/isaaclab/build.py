"""Builds Isaac Lab simulations from the names of tasks."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import Any

import torch

from torchrl_marl.errors import ConfigError, nearest

__all__ = ["build_task", "check_task"]

_MEMBERS = ("possible_agents", "observation_spaces", "action_spaces", "reset_buf", "_reset_idx")

_HOW = (
    "install Isaac Lab (https://isaac-sim.github.io/IsaacLab) and start Isaac Sim before the "
    "environment is built, as Isaac Lab's scripts do: from isaaclab.app import AppLauncher; "
    "app = AppLauncher(headless=True).app"
)


class MissingSimulatorError(ConfigError, ImportError):
    """Raised if Isaac Lab is not installed, or if its simulator is not running."""


def build_task(
    name: str,
    *,
    num_envs: int | None,
    seed: int,
    device: torch.device | str | None,
    settings: Mapping[str, Any],
) -> Any:
    """Builds the simulation of a registered task.

    Args:
        name (str): registered name, such as ``"Isaac-Cart-Double-Pendulum-Direct-v0"``.

    Keyword Args:
        num_envs (int, optional): number E of envs; if None, the task's default.
        seed (int): random seed of the task.
        device (torch.device, optional): device of the simulation; if None, the task's default.
        settings (mapping): name -> value of settings in the task's config; a nested mapping
            sets the settings of a nested config.

    Raises:
        ConfigError: if the task or a setting is unknown, or the task is not multi-agent.
        MissingSimulatorError: if Isaac Lab cannot be imported.
    """
    gymnasium = _import("gymnasium", name)
    if name not in gymnasium.registry:
        _import("isaaclab_tasks", name)  # importing it registers Isaac Lab's tasks
    if name not in gymnasium.registry:
        known = [key for key, spec in gymnasium.registry.items() if _config_entry(spec)]
        raise ConfigError(
            f"unknown Isaac Lab task {name!r}; {nearest(name, known)}import the package of a "
            "custom task first, which registers it."
        )
    config = _config(name, _config_entry(gymnasium.spec(name)))
    config.seed = seed
    if num_envs is not None:
        config.scene.num_envs = num_envs
    if device is not None:
        config.sim.device = str(device)
    _apply(name, config, settings)
    return check_task(gymnasium.make(name, cfg=config))


def check_task(env: Any) -> Any:
    """Returns the ``DirectMARLEnv`` inside Gymnasium's wrappers.

    Raises:
        ConfigError: if the environment inside is not a ``DirectMARLEnv``.
    """
    task = getattr(env, "unwrapped", env)
    if not all(hasattr(task, member) for member in _MEMBERS):
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
            f"({type(error).__name__}: {error}); {_HOW}."
        ) from error


def _config_entry(spec: Any) -> Any:
    return (spec.kwargs or {}).get("env_cfg_entry_point")


def _config(name: str, entry: Any) -> Any:
    if isinstance(entry, str) and ":" in entry and not entry.endswith(".yaml"):
        module, _, attribute = entry.partition(":")
        entry = getattr(_import(module, name), attribute)
    if not callable(entry):
        raise ConfigError(
            f"the task {name!r} is registered with env_cfg_entry_point={entry!r}, expected a "
            "config class; build the task yourself and pass the environment."
        )
    return entry()


def _apply(name: str, config: Any, settings: Mapping[str, Any]) -> None:
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
