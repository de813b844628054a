"""Worlds that are built already, or what makes one: from an object to an environment."""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any

from torchrl_marl.envs.config import EnvConfig
from torchrl_marl.envs.libraries import find_library, library_of
from torchrl_marl.errors import ConfigError

if TYPE_CHECKING:
    import torch
    from torchrl.envs import EnvBase

__all__ = ["adapted", "as_environment", "check_environment"]


def adapted(world: Any, library: str, **settings: Any) -> EnvBase:
    """Returns the adapter of a library around a world of it.

    Args:
        world (world, class, callable or module): of which
            :func:`~torchrl_marl.envs.libraries.library_of` knows the library.
        library (str): that library.
        settings: arguments of the adapter.
    """
    return find_library(library).make(world, settings, {})


def as_environment(env: Any, config: EnvConfig, device: torch.device | str) -> EnvBase:
    """An environment as it is, or the adapter around somebody's world, as a run's settings say.

    Raises:
        ConfigError: neither an environment nor a world.
    """
    library = library_of(env)
    if library is None:
        check_environment(env)
        return env
    settings = find_library(library).read(config, of_object=True)
    return adapted(env, library, **settings, seed=None, device=device)


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
