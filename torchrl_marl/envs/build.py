"""From a config to an environment."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torchrl_marl.envs.config import EnvConfig
from torchrl_marl.errors import ConfigError, UserError, nearest

if TYPE_CHECKING:
    import torch
    from torchrl.envs import EnvBase

__all__ = ["make_env"]

LIBRARIES = ("toy", "vmas")


def make_env(
    config: EnvConfig,
    *,
    seed: int | None = None,
    device: torch.device | str = "cpu",
    n_envs: int | None = None,
) -> EnvBase:
    """Builds the environment that a config describes.

    Args:
        config (EnvConfig): which world, and how.

    Keyword Args:
        seed (int, optional): start of the environment's own random state; drawn if None.
        device (torch.device): where the simulation runs.
        n_envs (int, optional): number E of envs, where it is not the config's.

    Returns:
        EnvBase: with batch size ``[E]``.

    Raises:
        ConfigError: an unknown library, world or argument of it.
        MissingExtraError: the library is not installed.

    Examples:
        >>> make_env(EnvConfig(library="toy", name="two_step_game", n_envs=3), seed=0).batch_size
        torch.Size([3])
    """
    n_envs = config.n_envs if n_envs is None else n_envs
    make = {"vmas": _make_vmas, "toy": _make_toy}.get(config.library)
    if make is not None:
        try:
            return make(config, n_envs, seed, device)
        except UserError:
            raise
        except Exception as error:
            why = " ".join(f"{type(error).__name__} {error}".split())
            raise ConfigError(
                f"{config.library} {config.name!r} cannot be built with env.kwargs="
                f"{dict(config.kwargs)} ({why}); check these values."
            ) from error
    raise ConfigError(
        f"unknown library of environments {config.library!r}; "
        f"{nearest(config.library, LIBRARIES)}expected of {', '.join(LIBRARIES)}."
    )


def _make_vmas(
    config: EnvConfig, n_envs: int, seed: int | None, device: torch.device | str
) -> EnvBase:
    from torchrl_marl.envs.vmas import VmasEnv

    return VmasEnv(
        config.name,
        num_envs=n_envs,
        continuous_actions=config.continuous_actions,
        max_steps=config.max_steps,
        seed=seed,
        device=device,
        state=config.state,  # type: ignore[arg-type]
        info=config.info,
        group_map=dict(config.group_map) or None,
        scenario_kwargs=dict(config.kwargs),
    )


def _make_toy(
    config: EnvConfig, n_envs: int, seed: int | None, device: torch.device | str
) -> EnvBase:
    from torchrl_marl.envs.toy import TOY_ENVS

    if config.name not in TOY_ENVS:
        raise ConfigError(
            f"unknown toy environment {config.name!r}; {nearest(config.name, TOY_ENVS)}"
            f"expected of {', '.join(TOY_ENVS)}."
        )
    kwargs: dict[str, Any] = dict(config.kwargs)
    for name in ("num_envs", "max_steps", "seed", "device"):
        if name in kwargs:
            raise ConfigError(
                f"env.kwargs has {name!r}, which is no argument of the world; "
                f"set env.{'n_envs' if name == 'num_envs' else name} or the run's own."
            )
    if config.name == "arena":
        kwargs.setdefault("continuous_actions", config.continuous_actions)
    return TOY_ENVS[config.name](
        n_envs, max_steps=config.max_steps, seed=seed, device=device, **kwargs
    )
