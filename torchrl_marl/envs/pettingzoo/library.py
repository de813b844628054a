"""Names of PettingZoo environments, in PettingZoo's registry and in other packages."""

from __future__ import annotations

import contextlib
import functools
import importlib
import importlib.util
import inspect
import pkgutil
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Annotated, Any, Literal

from torchrl_marl.envs.config import EnvConfig, own_environment_hint
from torchrl_marl.envs.libraries import Library
from torchrl_marl.errors import ConfigError, MissingExtraError, nearest
from torchrl_marl.runtime.import_path import check_not_in_current_folder, current_folder
from torchrl_marl.settings import OneOf

__all__ = [
    "LIBRARY",
    "Backend",
    "PettingZooArguments",
    "by_name",
    "continuous_argument",
    "external_module",
    "known_names",
    "of_module",
]

Backend = Literal["auto", "parallel", "aec"]

# Package -> module of its environments, and the extra of this project that installs it.
_MODULES = {
    "mpe2": ("mpe2", "pettingzoo"),
    "magent2": ("magent2.environments", None),
    "gymnasium_robotics": ("gymnasium_robotics.envs.multiagent_mujoco", "mujoco"),
}
_MUJOCO_ROBOTS = (
    "Ant",
    "CoupledHalfCheetah",
    "HalfCheetah",
    "Hopper",
    "Humanoid",
    "HumanoidStandup",
    "InvertedDoublePendulum",
    "InvertedPendulum",
    "ManySegmentAnt",
    "ManySegmentSwimmer",
    "Pusher",
    "Reacher",
    "Swimmer",
    "Walker2d",
)
_ENVIRONMENT = re.compile(r"[A-Za-z]\w*_v\d+")


@dataclass(frozen=True)
class _Registered:
    """Factory of an environment in PettingZoo's registry."""

    form: Literal["parallel", "aec"]
    id: str

    def __call__(self, **kwargs: Any) -> Any:
        import pettingzoo

        return pettingzoo.make(self.form, self.id, **kwargs)


def by_name(name: str, backend: Backend) -> tuple[Callable[..., Any], dict[str, Any]]:
    """Returns the factory of a named environment, and the arguments that its name implies."""
    registered = _find_registered(name, backend)
    if registered is not None:
        return registered, {}
    from torchrl_marl.envs.pettingzoo.tuple_env import named, newest

    team = named(name)
    if team is not None:
        return team, {}
    package, env = _split_name(name)
    arguments: dict[str, Any] = {}
    if package == "gymnasium_robotics" and env in _MUJOCO_ROBOTS:
        arguments, env = {"scenario": env}, "mamujoco_v1"
    package_path, extra = _MODULES.get(package, (package, None))
    env = newest(env, _env_module_names(package))
    with contextlib.nullcontext() if package in _MODULES else current_folder(package):
        module = _import_env_module(name, package, f"{package_path}.{env}" if env else "", extra)
    return of_module(module, backend), arguments


def _import_env_module(name: str, package: str, path: str, extra: str | None) -> ModuleType:
    """Imports the module of an environment."""
    if not path or not _importable(package):
        if package not in _MODULES or _importable(package):
            raise _unknown_name_error(name)
        if extra is not None:
            raise MissingExtraError(package, extra)
        raise ConfigError(f"{package} is not installed; run: pip install {package}")
    if package in _MODULES:
        check_not_in_current_folder(package)
    try:
        return importlib.import_module(path.replace("/", "."))
    except ModuleNotFoundError as error:
        if error.name is not None and path.startswith(error.name):
            raise _unknown_name_error(name) from error
        raise ConfigError(
            f"{name} needs {error.name}, which is not installed; run: pip install {error.name}"
        ) from error


def external_module(config: EnvConfig) -> str | None:
    """Returns the module of an environment in an unknown package; None for known packages.

    Imports only PettingZoo.
    """
    from torchrl_marl.envs.pettingzoo.tuple_env import PACKAGES

    package, env = _split_name(config.name)
    requested = config.kwargs.get("backend")
    backend: Any = requested if requested in ("parallel", "aec") else "auto"
    if (
        package in (*_MODULES, *PACKAGES, "pettingzoo")
        or _find_registered(config.name, backend) is not None
    ):
        return None
    return f"{package}.{env}".replace("/", ".")


def _split_name(name: str) -> tuple[str, str]:
    package, _, env = name.replace("-v", "_v").partition("/")
    package = package.replace("-", "_")
    return "gymnasium_robotics" if package == "mamujoco" else package, env


def _find_registered(name: str, backend: Backend) -> _Registered | None:
    from torchrl_marl.envs.pettingzoo.tuple_env import newest

    pettingzoo = _import_pettingzoo()
    forms: dict[str, dict[str, Any]] = {
        "parallel": pettingzoo.parallel_registry,
        "aec": pettingzoo.aec_registry,
    }
    registry_name = re.sub(r"_v(?=\d+$)", "-v", name)
    for form, registry in forms.items():
        if backend not in ("auto", form):
            continue
        newest_name = newest(registry_name, registry)
        if newest_name in registry:
            _check_entry(registry[newest_name])
            return _Registered(form, newest_name)  # type: ignore[arg-type]
    other_form = {"parallel": "aec", "aec": "parallel"}.get(backend)
    if other_form and registry_name in forms[other_form]:
        raise ConfigError(f"{name} has no {backend} form; set backend={other_form!r} or 'auto'.")
    return None


def _check_entry(spec: Any) -> None:
    """Raises an error if the packages of a registered environment are not installed."""
    if not isinstance(spec.entry_point, str):
        return
    try:
        importlib.import_module(spec.entry_point.partition(":")[0])
    except ImportError as error:
        raise ConfigError(
            f"{spec.id} needs packages that are not installed ({error}); "
            f"run: pip install 'pettingzoo[{spec.namespace}]'"
        ) from error


def of_module(module: ModuleType, backend: Backend) -> Callable[..., Any]:
    """Returns the factory of a module's environment."""
    forms = {"parallel": ["parallel_env", "raw_parallel_env"], "aec": ["env", "raw_env"]}
    names = forms["parallel"] + forms["aec"] if backend == "auto" else forms[backend]
    for name in names:
        if hasattr(module, name):
            return getattr(module, name)
    raise ConfigError(
        f"{module.__name__} has none of the factories {', '.join(names)}; "
        "pass a function that returns an environment."
    )


def continuous_argument(
    creator: Callable[..., Any], continuous: bool | None, kwargs: dict[str, Any]
) -> dict[str, bool]:
    """Returns the argument for continuous actions in a dict; empty if there is no such argument."""
    if continuous is None:
        return {}
    if isinstance(creator, _Registered):
        import pettingzoo

        entry = pettingzoo.spec(creator.form, creator.id).entry_point
        module_name = entry.partition(":")[0] if isinstance(entry, str) else entry.__module__
    else:
        module_name = creator.__module__
    # Factories accept any keyword; only the environment's class lists its arguments.
    module = importlib.import_module(module_name)
    makers = [creator, getattr(module, "raw_env", None), *_wrapped_makers(creator)]
    for maker in makers:
        parameters = inspect.signature(maker).parameters if callable(maker) else {}
        for name in ("continuous_actions", "continuous"):
            if name in parameters and name not in kwargs:
                return {name: continuous}
    return {}


def _wrapped_makers(creator: Callable[..., Any]) -> list[Any]:
    """Returns the inner factories that a factory calls before it wraps their environments."""
    cells = getattr(creator, "__closure__", None) or ()
    inner = [cell.cell_contents for cell in cells if callable(cell.cell_contents)]
    return inner + [maker for one in inner for maker in _wrapped_makers(one)]


def _import_pettingzoo() -> Any:
    if not _importable("pettingzoo"):
        raise MissingExtraError("PettingZoo", "pettingzoo")
    check_not_in_current_folder("pettingzoo")
    return importlib.import_module("pettingzoo")


def _importable(package: str) -> bool:
    return bool(package) and importlib.util.find_spec(package) is not None


def _unknown_name_error(name: str) -> ConfigError:
    known = known_names()
    if names_in_package := [env for env in known if env.startswith(f"{name.rstrip('/')}/")]:
        raise ConfigError(
            f"{name!r} is not an environment of the package, expected one such as "
            f"{', '.join(map(repr, names_in_package[:3]))}."
        )
    hint = nearest(name, known) or own_environment_hint(name)
    return ConfigError(
        f"unknown PettingZoo environment {name!r}; {hint}expected 'package/environment', "
        "such as 'mpe2/simple_spread_v3' or 'sisl/pursuit-v5', an environment or a factory."
    )


def known_names() -> list[str]:
    """Returns the sorted names of the installed or registered environments.

    Raises:
        MissingExtraError: if PettingZoo is not installed.
    """
    pettingzoo = _import_pettingzoo()
    names = {*pettingzoo.parallel_registry, *pettingzoo.aec_registry}
    names |= {f"{package}/{env}" for package in _MODULES for env in _env_module_names(package)}
    names |= {f"gymnasium_robotics/{robot}" for robot in _MUJOCO_ROBOTS}
    from torchrl_marl.envs.pettingzoo.tuple_env import PACKAGES

    names |= {f"{p}/{env}" for p, envs in PACKAGES.items() if _importable(p) for env in envs}
    return sorted(names)


def _env_module_names(package: str) -> list[str]:
    """Returns the modules of a known package's environments; none if it is not installed."""
    spec = importlib.util.find_spec(package) if package in _MODULES else None
    if spec is None or spec.origin is None:
        return []
    folder = Path(spec.origin).parent.joinpath(*_MODULES[package][0].split(".")[1:])
    found = (module.name for module in pkgutil.iter_modules([str(folder)]))
    return [env for env in found if _ENVIRONMENT.fullmatch(env)]


def _is_pettingzoo(env: Any) -> bool:
    """Returns True for an environment of PettingZoo, its class or factory, or a module with one."""
    cls = env if inspect.isclass(env) else type(env)
    if cls.__module__.startswith("vmas."):  # a batch of envs, with `agents`, `reset` and `step`
        return False
    has_methods = all(callable(getattr(cls, name, None)) for name in ("reset", "step"))
    if has_methods and (cls is env or hasattr(env, "possible_agents") or hasattr(env, "agents")):
        return True
    if has_methods and type(getattr(env, "action_space", None)).__name__ == "Tuple":
        return True
    is_factory = inspect.isroutine(env) or isinstance(env, functools.partial)
    return is_factory or inspect.ismodule(env)


@dataclass(frozen=True)
class PettingZooArguments:
    """Arguments that the adapter itself takes; others are arguments of the environment."""

    backend: Annotated[
        str,
        OneOf(
            {
                "auto": "the parallel form if it exists, else AEC",
                "parallel": "all agents act simultaneously",
                "aec": "agents act in turns",
            }
        ),
    ] = "auto"
    """PettingZoo API of the environment: parallel or AEC."""
    categorical_actions: bool = True
    """Discrete actions as an index; otherwise one-hot."""


_SETTINGS_OF_OBJECTS = (
    *("num_envs", "max_steps", "state", "info", "group_map"),
    *("workers", "worker_timeout", "restart_workers"),
)

LIBRARY = Library(
    "PettingZoo environments, written in Python",
    "torchrl_marl.envs.pettingzoo:PettingZooEnv",
    settings=("continuous_actions", *_SETTINGS_OF_OBJECTS),
    of_objects=_SETTINGS_OF_OBJECTS,
    environments=known_names,
    unlisted=True,
    owns=_is_pettingzoo,
    foreign=external_module,
    arguments="torchrl_marl.envs.pettingzoo.library:PettingZooArguments",
    drawn=True,
    packages=("pettingzoo",),
)
