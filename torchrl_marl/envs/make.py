"""Builds environments from settings."""

from __future__ import annotations

from dataclasses import fields
from functools import partial
from typing import TYPE_CHECKING, Any

from torchrl_marl.envs.config import EnvConfig, is_module
from torchrl_marl.envs.external_code import adapted, build_own, check_own
from torchrl_marl.envs.libraries import LIBRARIES, find_library, library_of
from torchrl_marl.errors import ConfigError, UserError, quoted
from torchrl_marl.runtime.memory import is_out_of_memory, refuse_too_large
from torchrl_marl.settings import unread, warn_renamed

if TYPE_CHECKING:
    import torch
    from torchrl.envs import EnvBase

__all__ = ["check_environment_name", "make_env", "named_config", "split_name"]


def make_env(
    env: Any,
    *,
    seed: int | None = None,
    device: torch.device | str = "cpu",
    num_envs: int | None = None,
    drawn: bool = False,
    **settings: Any,
) -> EnvBase:
    """Builds an environment, or adapts an existing one to the layout of this package.

    Args:
        env (str, EnvConfig, EnvBase or environment): one of:

            - a name: ``"library/environment"``, such as ``"vmas/balance"``, or ``"module:Class"``;
            - a config;
            - a TorchRL environment; its masks and done flags are corrected where necessary;
            - a PettingZoo or JaxMARL environment, or a function that makes one; it is copied
              ``num_envs`` times.

    Keyword Args:
        seed (int, optional): random seed of the environment; random if None.
        device (torch.device): device of the simulation. If the simulation can run only on CPU, it
            is the device of the returned tensors.
        num_envs (int, optional): number E of envs; by default the number in the config.
        drawn (bool): True to build a PettingZoo environment with its own renderer.
        **settings: with a name, other fields of :class:`EnvConfig` and arguments of the
            environment; with an environment object, arguments of its adapter.

    Returns:
        EnvBase: environment of batch size ``[E]``.

    Raises:
        ConfigError: unknown library, environment or argument.
        MissingExtraError: the library is not installed.

    Examples:
        >>> make_env("toy/two_step_game", num_envs=3, seed=0).batch_size
        torch.Size([3])
        >>> make_env(EnvConfig(library="toy", name="two_step_game", num_envs=3)).batch_size
        torch.Size([3])
    """
    if "n_envs" in settings:
        num_envs = _read_old_name(num_envs, settings)
    if isinstance(env, str):
        env = named_config(env, **settings)
    elif (library := library_of(env)) is not None:
        if "num_envs" in find_library(library).of_objects:
            settings["num_envs"] = num_envs or 1
        return adapted(env, library, seed=seed, device=device, **settings)
    elif settings:
        raise ConfigError(
            f"make_env takes {', '.join(sorted(settings))} only with a name such as "
            "'vmas/balance'; set it in the config or in the environment."
        )
    if not isinstance(env, EnvConfig):
        return _adapt_object(env, seed, device, num_envs)
    num_envs = env.num_envs if num_envs is None else num_envs
    if not isinstance(num_envs, int) or num_envs < 1:
        raise ConfigError(f"num_envs is {num_envs!r}, expected a number, 1 or more.")
    _check_bools(env)
    built = _build(env, num_envs, seed, device, drawn)
    _check_actions(env, built)
    if env.other_play:
        from torchrl_marl.envs.symmetries import with_other_play

        built = with_other_play(built)
    if env.randomize:
        from torchrl_marl.envs.randomization import randomized

        built = randomized(built, env.randomize)
    if env.reward_scale != 1.0:
        from torchrl_marl.envs.reward_scale import scaled

        built = scaled(built, env.reward_scale)
    return built


def _read_old_name(num_envs: int | None, settings: dict[str, Any]) -> int:
    """Returns the number of envs that is given under its former name, ``n_envs``."""
    if num_envs is not None:
        raise ConfigError(
            "n_envs and num_envs are the same setting and both given; use num_envs alone."
        )
    warn_renamed("n_envs", "num_envs")
    return settings.pop("n_envs")


def _build(
    env: EnvConfig, num_envs: int, seed: int | None, device: torch.device | str, drawn: bool
) -> EnvBase:
    own = ":" in env.library
    make = build_own if own else partial(_build_from_library, drawn=drawn)
    _check_settings(env)
    try:
        _check_memory(env, num_envs, make)
        return make(env, num_envs, seed, device)
    except UserError:
        raise
    except Exception as error:
        if is_out_of_memory(error):
            raise ConfigError(
                f"env.num_envs is {quoted(num_envs)}, which needs more memory than available "
                f"({quoted(str(error))}); use fewer."
            ) from error
        raise _build_error(env, error) from error


def _build_error(env: EnvConfig, error: Exception) -> ConfigError:
    reason = " ".join(f"{type(error).__name__} {error}".split())[:500]
    texts = [name for name, value in env.kwargs.items() if isinstance(value, str)]
    given, check = f"env.kwargs={quoted(dict(env.kwargs))}", "check these values"
    if len(texts) == 1:  # the text is more likely wrong than the numbers
        given = f"env.kwargs.{texts[0]}={quoted(env.kwargs[texts[0]])}"
        check = "check it; a number may be needed"
    return ConfigError(
        f"{env.library} {quoted(env.name)} cannot be built with {given} ({reason}); {check}."
    )


def check_environment_name(env: EnvConfig) -> None:
    """Raises an error for an unknown environment, or for arguments that it does not read.

    Imports neither torch nor the environment.

    Args:
        env (EnvConfig): settings of a custom environment, or of one in a registered library.

    Raises:
        ConfigError: unknown name or argument; the message names the nearest known one.
        MissingExtraError: the library is not installed.
    """
    if ":" in env.library:
        return check_own(env.library)
    return find_library(env.library).check_environment(env)


def _check_settings(env: EnvConfig) -> None:
    """Raises an error for settings that the adapter does not take, and for unknown arguments."""
    own = ":" in env.library
    if not own:
        check_environment_name(env)
        for key, text in unread(env, "env.").items():
            raise ConfigError(f"{text}; leave {key} out.")
        env.check("env.")
    repeated = {field.name for field in fields(EnvConfig)}.intersection(env.kwargs)
    if repeated and (own or find_library(env.library).kwargs_name is None):
        name = min(repeated)
        raise ConfigError(f"env.kwargs has {name!r}, which is a setting; set env.{name} instead.")


def split_name(name: str) -> tuple[str, str]:
    """Splits an environment's full name into its library and its name in that library.

    The library of ``"mine:Reach"`` is the whole name, ``"mine:Reach"``.

    Raises:
        ConfigError: the name is neither ``"library/environment"`` nor ``"module:Class"``.
    """
    if ":" in name:
        return name, name.rpartition(":")[2]
    library, _, env = name.partition("/")
    if not env:
        own = f", or '{name}:MyEnv' for a class in that module" if is_module(name) else ""
        raise ConfigError(
            f"the environment's name is {quoted(name)}, expected 'library/environment', such as "
            f"'vmas/balance' or 'pettingzoo/mpe2/simple_spread_v3'{own}."
        )
    return library, env


def named_config(name: str, **settings: Any) -> EnvConfig:
    """Returns the settings of a named environment.

    No time limit is set by default if the library's environments have their own.

    Args:
        name (str): ``"library/environment"`` or ``"module:Class"``.
        **settings: fields of :class:`EnvConfig`, and arguments of the environment.

    Raises:
        ConfigError: the name is neither ``"library/environment"`` nor ``"module:Class"``.

    Examples:
        >>> named_config("toy/arena", num_envs=3, n_agents=2).kwargs
        {'n_agents': 2}
    """
    library, env = split_name(name)
    known = {field.name for field in fields(EnvConfig)} - {"library", "name", "kwargs"}
    own = {key: settings[key] for key in settings if key in known}
    if library in LIBRARIES.names() and find_library(library).own_limit:
        own.setdefault("max_steps", None)
    kwargs = {**settings.get("kwargs", {})}
    kwargs.update({key: settings[key] for key in settings if key not in {*known, "kwargs"}})
    return EnvConfig(library=library, name=env, kwargs=kwargs, **own)


def _check_bools(env: EnvConfig) -> None:
    """Raises an error if a bool setting is text, because Python treats text as True."""
    for name in ("continuous_actions", "restart_workers", "other_play"):
        value = getattr(env, name)
        if not isinstance(value, bool):
            raise ConfigError(f"{name} is {quoted(value)}, expected True or False.")


def _check_memory(env: EnvConfig, num_envs: int, make: Any) -> None:
    """Raises an error if one step of all envs does not fit into memory."""
    if num_envs < 100_000 or (env.record is not None and env.record.one_per_process):
        return
    single_env = make(env, 1, 0, "cpu")
    step_bytes = single_env.fake_tensordict().bytes()
    single_env.close()
    refuse_too_large(
        step_bytes * num_envs,
        "cpu",
        f"env.num_envs is {quoted(num_envs)}, a step of which",
        "use fewer",
    )


def _check_actions(env: EnvConfig, built: EnvBase) -> None:
    """Raises an error if discrete actions are requested from a continuous environment."""
    from torchrl_marl.specs import TeamSpec

    if env.continuous_actions:
        return
    groups = TeamSpec.from_env(built).groups.values()
    floats = (group.padded_spec["action"].dtype.is_floating_point for group in groups)
    if all(floats) and not any(group.hybrid for group in groups):
        raise ConfigError(
            f"env.continuous_actions is false, but {quoted(env.name)} has continuous actions only; "
            "use env.continuous_actions=true."
        )


def _adapt_object(
    env: Any, seed: int | None, device: torch.device | str, num_envs: int | None
) -> EnvBase:
    from torchrl_marl.envs.torchrl.env import adapt, check_environment

    check_environment(env)
    if num_envs is not None and env.batch_size.numel() != num_envs:
        raise ConfigError(
            f"num_envs is {num_envs}, but the environment given has {env.batch_size.numel()}."
        )
    env = adapt(env).to(device)
    if seed is not None:
        env.set_seed(seed)
    return env


def _build_from_library(
    config: EnvConfig,
    num_envs: int,
    seed: int | None,
    device: torch.device | str,
    drawn: bool = False,
) -> EnvBase:
    library = find_library(config.library)
    settings = {**library.read(config), "num_envs": num_envs, "seed": seed, "device": device}
    settings |= {"drawn": True} if drawn and library.drawn else {}
    return library.make(config.name, settings, config.kwargs)
