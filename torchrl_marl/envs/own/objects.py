"""Worlds that are built already, or what makes one: from an object to an environment."""

from __future__ import annotations

import functools
import inspect
from typing import TYPE_CHECKING, Any

from torchrl_marl.envs.config import EnvConfig
from torchrl_marl.errors import ConfigError

if TYPE_CHECKING:
    import torch
    from torchrl.envs import EnvBase

__all__ = ["adapted", "as_environment", "check_environment", "library_of", "settings_read"]

_READ = {
    "pettingzoo": ("max_steps", "info", "workers", "worker_timeout", "restart_workers"),
    "jaxmarl": ("max_steps", "info"),
    "isaaclab": (),
}


def library_of(world: Any) -> str | None:
    """Whose world an object is, or what makes worlds of it; None of all else.

    Examples:
        >>> library_of(3), library_of(lambda: "a world")
        (None, 'pettingzoo')
    """
    kind = world if inspect.isclass(world) else type(world)
    modules = {cls.__module__.partition(".")[0] for cls in kind.__mro__}
    if {"torchrl", "torchrl_marl"} & modules:
        return None
    if "isaaclab" in modules:
        return "isaaclab"
    if callable(getattr(world, "step_env", None)):
        return "jaxmarl"
    played = all(callable(getattr(kind, name, None)) for name in ("reset", "step"))
    if played and (kind is world or hasattr(world, "possible_agents") or hasattr(world, "agents")):
        return "pettingzoo"
    makes = inspect.isroutine(world) or isinstance(world, functools.partial)
    return "pettingzoo" if makes or inspect.ismodule(world) else None


def adapted(world: Any, **settings: Any) -> EnvBase:
    """The adapter of its library around a world.

    Args:
        world (world, class, callable or module): of which :func:`library_of` knows the library.
        settings: arguments of the adapter.
    """
    library = library_of(world)
    if library == "isaaclab":
        from torchrl_marl.envs.isaaclab import IsaacLabEnv

        settings.pop("num_envs", None)  # it has as many as it was built with
        return IsaacLabEnv(world, **settings)
    if library == "jaxmarl":
        from torchrl_marl.envs.jaxmarl import JaxMarlEnv

        return JaxMarlEnv(world, **settings)
    from torchrl_marl.envs.pettingzoo import PettingZooEnv

    return PettingZooEnv(world, **settings)


def settings_read(
    library: str, config: EnvConfig, num_envs: int, seed: int | None, device: torch.device | str
) -> dict[str, Any]:
    """Arguments of a library's adapter, by the settings of a run."""
    read = {name: getattr(config, name) for name in ("state", *_READ[library])}
    group_map = dict(config.group_map) or None
    return {**read, "group_map": group_map, "num_envs": num_envs, "seed": seed, "device": device}


def as_environment(env: Any, config: EnvConfig, device: torch.device | str) -> EnvBase:
    """An environment as it is, or the adapter around somebody's world, as a run's settings say.

    Raises:
        ConfigError: neither an environment nor a world.
    """
    library = library_of(env)
    if library is None:
        check_environment(env)
        return env
    return adapted(env, **settings_read(library, config, config.num_envs, None, device))


def check_environment(env: Any) -> None:
    """Refuses what is no environment of TorchRL.

    Raises:
        ConfigError: naming what it is.
    """
    from torchrl.envs import EnvBase

    if not isinstance(env, EnvBase):
        what = f"the class {env.__name__}" if inspect.isclass(env) else f"a {type(env).__name__}"
        raise ConfigError(
            f"the environment is {what}, expected a name such as 'vmas/balance', an EnvConfig, an "
            "environment of TorchRL, such as YourEnv(num_envs=64), or a world of PettingZoo or "
            "JaxMARL."
        )
