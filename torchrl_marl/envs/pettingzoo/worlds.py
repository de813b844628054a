"""From a name, an object or a factory to a PettingZoo world."""

from __future__ import annotations

import contextlib
import copy
import importlib
import importlib.util
import inspect
import os
import pkgutil
import re
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any, Literal

from torchrl_marl.errors import ConfigError, MissingExtraError, nearest

__all__ = ["Backend", "WorldMaker", "has_turns", "maker_of"]

Backend = Literal["auto", "parallel", "aec"]

# Package -> where its worlds are, and the extra that installs it.
_MODULES = {
    "mpe2": ("mpe2", "pettingzoo"),
    "magent2": ("magent2.environments", None),
    "gymnasium_robotics": ("gymnasium_robotics.envs.multiagent_mujoco", "mujoco"),
}
_MUJOCO = "gymnasium_robotics.envs.multiagent_mujoco.mamujoco_v1"
_MUJOCO_ROBOTS = (
    "Ant CoupledHalfCheetah HalfCheetah Hopper Humanoid HumanoidStandup InvertedDoublePendulum "
    "InvertedPendulum ManySegmentAnt ManySegmentSwimmer Pusher Reacher Swimmer Walker2d"
).split()
_WORLD = re.compile(r"[A-Za-z]\w*_v\d+")


@dataclass(frozen=True)
class WorldMaker:
    """Makes one copy of a world each time it is called; goes to other processes.

    Args:
        name (str): of the world, in messages.
        create (callable): gives the world.
        kwargs (dict): its arguments.
    """

    name: str
    create: Callable[..., Any]
    kwargs: dict[str, Any] = field(default_factory=dict)

    def __call__(self) -> Any:
        with _quiet():
            try:
                return self.create(**self.kwargs)
            except TypeError as error:
                if "argument" not in str(error):
                    raise
                raise ConfigError(
                    f"{self.name} cannot be built with {self.kwargs} ({error}); "
                    "check the arguments of the world."
                ) from error


def maker_of(
    world: Any, backend: Backend, kwargs: dict[str, Any], continuous: bool | None, n_copies: int
) -> WorldMaker:
    """What makes the copies of a world.

    Args:
        world (str, module, callable or world): its name, what makes it, or itself.
        backend ("auto", "parallel" or "aec"): which of a named world's two forms.
        kwargs (dict): arguments of the world.
        continuous (bool, optional): kind of actions, where the world has both.
        n_copies (int): how many are made.

    Raises:
        ConfigError: an unknown name, a package that is not installed, a world that cannot be
            copied.
        MissingExtraError: a package of an extra is not installed.
    """
    if backend not in ("auto", "parallel", "aec"):
        raise ConfigError(f"backend is {backend!r}, expected 'auto', 'parallel' or 'aec'.")
    if isinstance(world, str):
        with _quiet():
            creator, own = _by_name(world, backend)
        kwargs = {**own, **kwargs}
        return WorldMaker(world, creator, {**_continuous(creator, continuous, kwargs), **kwargs})
    if isinstance(world, ModuleType):
        creator = _of_module(world, backend)
        return WorldMaker(world.__name__, creator, kwargs)
    if hasattr(world, "reset") and hasattr(world, "step") and not inspect.isclass(world):
        return _of_object(world, kwargs, n_copies)
    if callable(world):
        return WorldMaker(getattr(world, "__name__", type(world).__name__), world, kwargs)
    raise ConfigError(
        f"the world is a {type(world).__name__}, expected a name such as "
        "'mpe2/simple_spread_v3', a PettingZoo world or a callable that makes one."
    )


def has_turns(world: Any) -> bool:
    """Whether a world is of the AEC kind: its agents move one after another."""
    return hasattr(type(world), "last") or hasattr(type(world), "agent_iter")


def _of_object(world: Any, kwargs: dict[str, Any], n_copies: int) -> WorldMaker:
    name = type(getattr(world, "unwrapped", world)).__name__
    if kwargs:
        raise ConfigError(
            f"PettingZooEnv takes {', '.join(sorted(kwargs))} with a name or a factory only; "
            f"{name} is built already."
        )
    if n_copies == 1:
        return WorldMaker(name, _Given(world))
    try:
        copy.deepcopy(world)
    except Exception as error:
        raise ConfigError(
            f"{name} cannot be copied {n_copies} times ({type(error).__name__}: {error}); "
            "give a callable that makes one instead."
        ) from error
    return WorldMaker(name, _Copied(world))


@dataclass(frozen=True)
class _Given:
    world: Any

    def __call__(self) -> Any:
        return self.world


@dataclass(frozen=True)
class _Copied:
    world: Any

    def __call__(self) -> Any:
        return copy.deepcopy(self.world)


@dataclass(frozen=True)
class _Registered:
    """A world of PettingZoo's registry."""

    form: Literal["parallel", "aec"]
    id: str

    def __call__(self, **kwargs: Any) -> Any:
        import pettingzoo

        return pettingzoo.make(self.form, self.id, **kwargs)


def _by_name(name: str, backend: Backend) -> tuple[Callable[..., Any], dict[str, Any]]:
    """What makes a named world, and the arguments that its name stands for."""
    registered = _registered(name, backend)
    if registered is not None:
        return registered, {}
    package, _, world = name.replace("-v", "_v").partition("/")
    package = package.replace("-", "_")
    package = "gymnasium_robotics" if package == "mamujoco" else package
    own: dict[str, Any] = {}
    if package == "gymnasium_robotics" and world in _MUJOCO_ROBOTS:
        own, world = {"scenario": world}, "mamujoco_v1"
    where, extra = _MODULES.get(package, (package, None))
    if not world or not _importable(package):
        if package in _MODULES:
            raise _not_installed(package, extra)
        raise _unknown(name)
    try:
        module = importlib.import_module(f"{where}.{world}".replace("/", "."))
    except ModuleNotFoundError as error:
        if error.name is not None and f"{where}.{world}".startswith(error.name):
            raise _unknown(name) from error
        raise ConfigError(
            f"{name} needs {error.name}, which is not installed; run: pip install {error.name}"
        ) from error
    return _of_module(module, backend), own


def _registered(name: str, backend: Backend) -> _Registered | None:
    try:
        import pettingzoo
    except ModuleNotFoundError as error:
        raise MissingExtraError("PettingZoo", "pettingzoo") from error
    forms: dict[str, dict[str, Any]] = {
        "parallel": pettingzoo.parallel_registry,
        "aec": pettingzoo.aec_registry,
    }
    wanted = re.sub(r"_v(?=\d+$)", "-v", name)
    for form, registry in forms.items():
        if backend not in ("auto", form):
            continue
        of_name = [known for known in registry if wanted in (known, known.rpartition("-v")[0])]
        if of_name:
            newest = max(of_name, key=lambda known: int(known.rpartition("-v")[2] or 0))
            _check_entry(registry[newest])
            return _Registered(form, newest)  # type: ignore[arg-type]
    other = {"parallel": "aec", "aec": "parallel"}.get(backend)
    if other and wanted in forms[other]:
        raise ConfigError(f"{name} has no {backend} form; set backend={other!r} or 'auto'.")
    return None


def _check_entry(spec: Any) -> None:
    """Refuses a registered world whose packages are not installed."""
    if not isinstance(spec.entry_point, str):
        return
    try:
        importlib.import_module(spec.entry_point.partition(":")[0])
    except ImportError as error:
        raise ConfigError(
            f"{spec.id} needs packages that are not installed ({error}); "
            f"run: pip install 'pettingzoo[{spec.namespace}]'"
        ) from error


def _of_module(module: ModuleType, backend: Backend) -> Callable[..., Any]:
    forms = {"parallel": ["parallel_env", "raw_parallel_env"], "aec": ["env", "raw_env"]}
    names = forms["parallel"] + forms["aec"] if backend == "auto" else forms[backend]
    for name in names:
        if hasattr(module, name):
            return getattr(module, name)
    raise ConfigError(
        f"{module.__name__} has none of {', '.join(names)}, which make a world; "
        "give a callable that makes one."
    )


def _continuous(
    creator: Callable[..., Any], continuous: bool | None, kwargs: dict[str, Any]
) -> dict[str, bool]:
    """The argument for continuous actions, where the world has one."""
    if continuous is None:
        return {}
    if isinstance(creator, _Registered):
        import pettingzoo

        entry = pettingzoo.spec(creator.form, creator.id).entry_point
        owner = entry.partition(":")[0] if isinstance(entry, str) else entry.__module__
    else:
        owner = creator.__module__
    # Makers take any keyword; the world's class tells which there are.
    module = importlib.import_module(owner)
    makers = [creator, getattr(module, "raw_env", None), *_makers_within(creator)]
    for maker in makers:
        taken = inspect.signature(maker).parameters if callable(maker) else {}
        for name in ("continuous_actions", "continuous"):
            if name in taken and name not in kwargs:
                return {name: continuous}
    return {}


def _makers_within(creator: Callable[..., Any]) -> list[Any]:
    """What a maker that only wraps another calls."""
    cells = getattr(creator, "__closure__", None) or ()
    inner = [cell.cell_contents for cell in cells if callable(cell.cell_contents)]
    return inner + [maker for one in inner for maker in _makers_within(one)]


def _importable(package: str) -> bool:
    return bool(package) and importlib.util.find_spec(package) is not None


def _not_installed(package: str, extra: str | None) -> Exception:
    if extra is not None:
        return MissingExtraError(package, extra)
    return ConfigError(f"{package} is not installed; run: pip install {package}")


def _unknown(name: str) -> ConfigError:
    known = known_names()
    return ConfigError(
        f"unknown PettingZoo world {name!r}; {nearest(name, known)}expected 'package/world', "
        "such as 'mpe2/simple_spread_v3' or 'sisl/pursuit-v5', a world or a callable."
    )


def known_names() -> list[str]:
    """Names of the worlds that are installed or registered, sorted."""
    import pettingzoo

    names = {*pettingzoo.parallel_registry, *pettingzoo.aec_registry}
    for package, (where, _) in _MODULES.items():
        spec = importlib.util.find_spec(package)
        if spec is None or spec.origin is None:
            continue
        folder = Path(spec.origin).parent.joinpath(*where.split(".")[1:])
        found = (module.name for module in pkgutil.iter_modules([str(folder)]))
        names |= {f"{package}/{world}" for world in found if _WORLD.fullmatch(world)}
    names |= {f"gymnasium_robotics/{robot}" for robot in _MUJOCO_ROBOTS}
    return sorted(names)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """No greetings, no window and no deprecations while worlds are imported and built."""
    ours = {"PYGAME_HIDE_SUPPORT_PROMPT": "hide", "SDL_VIDEODRIVER": "dummy"}
    added = {key: value for key, value in ours.items() if key not in os.environ}
    os.environ.update(added)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        for key in added:
            os.environ.pop(key, None)
