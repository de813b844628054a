"""Adapters around existing worlds, and around functions that make them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torchrl_marl.envs.config import EnvConfig
from torchrl_marl.envs.libraries import find_library, library_of

if TYPE_CHECKING:
    import torch
    from torchrl.envs import EnvBase

__all__ = ["adapted", "as_environment"]


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
    """Returns an environment as it is, or the adapter around a world, by a run's settings.

    Raises:
        ConfigError: neither an environment nor a world.
    """
    library = library_of(env)
    if library is None:
        from torchrl_marl.envs.torchrl.env import check_environment

        check_environment(env)
        return env
    settings = find_library(library).read(config, of_object=True)
    return adapted(env, library, **settings, seed=None, device=device)
