"""Custom environments, given as ``module:Class``, as ``file.py:Class`` or as an existing object."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import os
import sys
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import fields
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from torchrl_marl.envs.config import EnvConfig
from torchrl_marl.envs.libraries import MAKERS_LIBRARY, find_library, library_of
from torchrl_marl.errors import ConfigError, UserError, nearest, quoted
from torchrl_marl.runtime.import_path import current_folder, place_of

if TYPE_CHECKING:
    import torch
    from torchrl.envs import EnvBase


__all__ = [
    "adapted",
    "as_environment",
    "build_own",
    "check_own",
    "code_at",
    "external_code",
    "import_file",
    "import_own",
]

# Settings that custom environments take in any case, or that `make_env` applies.
_COMMON_FIELDS = (
    *("library", "name", "num_envs", "kwargs", "randomize", "reward_scale", "other_play"),
)


def external_code(env: EnvConfig) -> str | None:
    """Returns the external module or file that an environment runs; None if it runs none.

    Imports nothing.

    Args:
        env (EnvConfig): settings of the environment.

    Examples:
        >>> external_code(EnvConfig(library="pettingzoo", name="mpe2/simple_spread_v3"))
        >>> external_code(EnvConfig(library="pettingzoo", name="json/decoder"))
        "module 'json.decoder' (in ...)"
    """
    own, colon, _ = env.library.partition(":")
    if colon:
        return code_at(own)
    library = env.record
    module = None if library is None or library.foreign is None else library.foreign(env)
    if module is None or module.endswith(".py"):
        return None if module is None else _describe_file(module)
    package = module.partition(".")[0]
    folder = place_of(package) or place_of(package, [os.getcwd()])
    return None if folder is None else f"module {module!r} (in {folder!r})"


def code_at(place: str) -> str:
    """Returns a description of the module or file of a ``module:Class``; imports nothing.

    Args:
        place (str): the part before the colon.
    """
    if place.endswith(".py"):
        return _describe_file(place)
    found = place_of(place.partition(".")[0], [os.getcwd(), *sys.path]) or os.getcwd()
    return f"module {place!r} (in {found!r})"


def _describe_file(path: str) -> str:
    return f"file {str(Path(path).resolve())!r}"


def check_own(library: str, key: str = "env.library") -> None:
    """Raises an error if the module or file of a ``module:Class`` does not exist.

    Imports nothing.

    Args:
        library (str): ``module:Class`` or ``path/to/file.py:Class``.
        key (str): name of the setting, for messages.

    Raises:
        ConfigError: the module or file does not exist, or the name is malformed.
    """
    place, _, name = library.partition(":")
    if not name.isidentifier():
        raise ConfigError(
            f"{key} is {quoted(library)}, expected module:Class or path/to/file.py:Class."
        )
    if place.endswith(".py"):
        if not os.path.isfile(place):
            raise ConfigError(
                f"{key} is {quoted(library)}, but there is no file {quoted(place)}; check its path."
            )
        return
    top = place.partition(".")[0]
    with current_folder(top, first=True):
        if not (place.replace(".", "").isidentifier() and importlib.util.find_spec(top)):
            raise ConfigError(
                f"{key} is {quoted(library)}, but no module {quoted(place)} is installed or "
                "in the current folder; check its name, or use path/to/file.py:Class."
            )


def import_own(library: str, key: str = "env.library") -> Any:
    """Imports the class or function of ``module:Class`` or ``file.py:Class``.

    Args:
        library (str): ``module:Class`` or ``path/to/file.py:Class``.
        key (str): name of the setting, for messages.

    Raises:
        ConfigError: the class or function does not exist, or the import raises an error.

    Examples:
        >>> import_own("torchrl_marl.envs.toy:MatrixGame").__name__
        'MatrixGame'
    """
    check_own(library, key)
    place, _, name = library.partition(":")
    if place.endswith(".py"):
        module = import_file(Path(place))
    else:
        with current_folder(place, first=True), _report_import_errors(place):
            module = importlib.import_module(place)
    if not callable(found := getattr(module, name, None)):
        known = [key for key, value in vars(module).items() if inspect.isclass(value)]
        raise ConfigError(
            f"{key} is {quoted(library)}, but {quoted(place)} has no class or function "
            f"{quoted(name)}; {nearest(name, known)}check the name."
        )
    return found


def import_file(path: Path) -> ModuleType:
    """Imports a Python file as a new module; every call runs the file again.

    Raises:
        ConfigError: the file raises an error.
    """
    path = path.resolve()
    # inspect and pickle find a module only if it is registered.
    name = f"{path.stem}_{zlib.crc32(str(path).encode()):08x}"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    with _report_import_errors(str(path)):
        spec.loader.exec_module(module)
    if importlib.util.find_spec("cloudpickle") is not None:
        import cloudpickle

        cloudpickle.register_pickle_by_value(module)
    return module


def build_own(
    config: EnvConfig, num_envs: int, seed: int | None, device: torch.device | str
) -> EnvBase:
    """Builds a custom TorchRL environment, or copies of a PettingZoo environment.

    A TorchRL environment class, or a function with an argument ``num_envs``, is called with the
    settings that its signature names. Any other function or class must make one PettingZoo
    environment.

    Args:
        config (EnvConfig): settings with ``library="module:Class"``.
        num_envs (int): number E of envs.
        seed (int, optional): random seed.
        device (torch.device): device of the environment.

    Raises:
        ConfigError: the class does not take one of the settings, or does not make an environment.
    """
    from torchrl.envs import EnvBase

    from torchrl_marl.envs.torchrl.env import adapt

    maker = import_own(config.library)
    accepted = _arguments_of(maker)
    if not (inspect.isclass(maker) and issubclass(maker, EnvBase)) and "num_envs" not in accepted:
        read = find_library(MAKERS_LIBRARY).read(config, of_object=True) | {"num_envs": num_envs}
        return adapted(maker, MAKERS_LIBRARY, seed=seed, device=device, **read, **config.kwargs)
    offered: dict[str, Any] = {"num_envs": num_envs, "seed": seed, "device": device}
    defaults = EnvConfig()
    for field in fields(EnvConfig):
        value = getattr(config, field.name)
        if field.name in _COMMON_FIELDS:
            continue
        offered[field.name] = value
        default = None if field.name == "max_steps" else getattr(defaults, field.name)
        # Only the built environment shows whether its actions are continuous.
        if field.name not in {*accepted, "continuous_actions"} and value != default:
            raise ConfigError(
                f"env.{field.name} is {quoted(value)}, but {maker.__name__} takes no "
                f"{field.name!r}; use env.{field.name}={'null' if default is None else default}."
            )
    offered["group_map"] = dict(config.group_map) or None
    env = maker(**{key: offered[key] for key in offered if key in accepted}, **config.kwargs)
    if not isinstance(env, EnvBase) or env.batch_size.numel() != num_envs:
        found = f"batch size {list(env.batch_size)}" if isinstance(env, EnvBase) else "no EnvBase"
        raise ConfigError(
            f"{config.library} returns {found}, expected a TorchRL environment of batch size "
            f"[{num_envs}] for num_envs={num_envs}."
        )
    env = adapt(env).to(device)
    if seed is not None and "seed" not in accepted:
        env.set_seed(seed)
    return env


def _arguments_of(maker: Any) -> set[str]:
    """Returns the argument names of a class or function, and those that a class's parents take."""
    names: set[str] = set()
    inits = [vars(c).get("__init__") for c in maker.__mro__] if inspect.isclass(maker) else [maker]
    for init in filter(None, inits):
        try:
            parameters = inspect.signature(init).parameters.values()
        except (TypeError, ValueError):
            break
        names |= {parameter.name for parameter in parameters}
        if not any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
            break
    return names


@contextmanager
def _report_import_errors(place: str) -> Iterator[None]:
    """Context in which an exception of a user's module becomes a one-sentence error."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        raise ConfigError(f"{quoted(place)} cannot be imported ({reason}); fix it.") from error


def adapted(env: Any, library: str, **settings: Any) -> EnvBase:
    """Wraps an environment in the adapter of its library.

    Args:
        env (environment, class, callable or module): the environment, or a function that makes it.
        library (str): name of the environment's library, as returned by
            :func:`~torchrl_marl.envs.libraries.library_of`.
        **settings: arguments of the adapter.
    """
    return find_library(library).make(env, settings, {})


def as_environment(env: Any, config: EnvConfig, device: torch.device | str) -> EnvBase:
    """Wraps an environment in its library's adapter; a TorchRL environment is not changed.

    Raises:
        ConfigError: the object is not an environment.
    """
    library = library_of(env)
    if library is None:
        from torchrl_marl.envs.torchrl.env import check_environment

        check_environment(env)
        return env
    settings = find_library(library).read(config, of_object=True)
    return adapted(env, library, **settings, seed=None, device=device)
