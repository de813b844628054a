"""Isaac Lab without Isaac Sim: the original package on stand-ins for the simulator's modules.

Its licence forbids shipping it; see :func:`source_of_isaac_lab`.
"""

import builtins
import contextlib
import importlib
import importlib.abc
import importlib.machinery
import importlib.metadata
import os
import sys
import tomllib
import types
from collections.abc import Iterator
from pathlib import Path

HOW = (
    "needs Isaac Lab's Python package, which Isaac Sim is not needed for here: "
    "pip install --no-deps --target FOLDER isaaclab==2.3.2.post1 (Python 3.11), and set "
    "ISAACLAB_SOURCE=FOLDER"
)
SIMULATOR = frozenset({"omni", "pxr", "isaacsim", "carb", "usdrt", "warp"})
# Other imports of Isaac Lab that no test calls: replaced only if they are not installed.
THIRD_PARTIES = frozenset(
    {"PIL", "cv2", "dex_retargeting", "einops", "flatdict", "h5py", "hid", "matplotlib", "pink"}
    | {"pinocchio", "prettytable", "scipy", "toml", "transformers", "trimesh", "websockets", "yaml"}
)
PARTS = ("isaaclab", "isaaclab_assets", "isaaclab_contrib", "isaaclab_tasks")


def source_of_isaac_lab() -> Path | None:
    """The folder with Isaac Lab's packages: in ``ISAACLAB_SOURCE``, or installed; else None."""
    folders = []
    if os.environ.get("ISAACLAB_SOURCE"):
        given = Path(os.environ["ISAACLAB_SOURCE"])
        folders += [given, given / "source", given / "isaaclab" / "source"]
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        installed = importlib.metadata.distribution("isaaclab")
        folders.append(Path(str(installed.locate_file("isaaclab/source"))))
    for folder in folders:
        # Isaac Lab 3.0 needs no stand-ins, and has its modules elsewhere.
        if all((folder / part / part).is_dir() for part in PARTS):
            return folder
    return None


class _AnyType(type):
    def __getattr__(cls, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return Anything

    def __or__(cls, other):
        return cls

    __ror__ = __or__

    def __iter__(cls):
        return iter(())


class Anything(metaclass=_AnyType):
    """Replaces any class or function of a simulator's module, and does nothing."""

    def __init__(self, *args, **kwargs):
        pass

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return Anything()

    def __call__(self, *args, **kwargs):
        decorates = len(args) == 1 and callable(args[0]) and not isinstance(args[0], Anything)
        return args[0] if decorates else Anything()

    def __iter__(self):
        return iter(())

    def __getitem__(self, index):
        return Anything()

    def __setitem__(self, index, value):
        pass

    def __class_getitem__(cls, index):
        return cls

    def __radd__(self, other):
        return other

    def __bool__(self):
        return False


class _Module(types.ModuleType):
    __path__: list = []

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return Anything


def _load_toml(path):
    return tomllib.loads(Path(path).read_text(encoding="utf-8"))


class StandIns(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Resolves imports of the simulator and of ``others`` that have no other finder."""

    def __init__(self) -> None:
        self.others = THIRD_PARTIES

    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in SIMULATOR | self.others:
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec):
        module = _Module(spec.name)
        if spec.name == "toml":
            module.load = _load_toml
        return module

    def exec_module(self, module):
        pass


@contextlib.contextmanager
def isaac_lab(source: Path) -> Iterator[types.ModuleType]:
    """Imports Isaac Lab's modules on the stand-ins; removes all of them afterwards.

    Yields the module ``simulator`` of this folder.
    """
    gymnasium = importlib.import_module("gymnasium")
    simulator = importlib.import_module("isaac.simulator")
    registered, path = set(gymnasium.registry), list(sys.path)
    # Last, so that it does not shadow installed packages.
    finder = StandIns()
    sys.meta_path.append(finder)
    sys.path[:0] = [str(source / part) for part in PARTS]
    builtins.ISAAC_LAUNCHED_FROM_TERMINAL = False
    try:
        importlib.import_module("isaaclab_tasks")
        simulator.put_below()
        # Later imports of these find that they are not installed.
        finder.others = frozenset()
        _forget(THIRD_PARTIES)
        yield simulator
    finally:
        sys.meta_path.remove(finder)
        sys.path[:] = path
        del builtins.ISAAC_LAUNCHED_FROM_TERMINAL
        _forget(SIMULATOR | THIRD_PARTIES)
        for name in [name for name in sys.modules if name.partition(".")[0] in PARTS]:
            del sys.modules[name]
        for name in set(gymnasium.registry) - registered:
            del gymnasium.registry[name]


def _forget(roots: frozenset[str]) -> None:
    for name, module in list(sys.modules.items()):
        if isinstance(module, _Module) and name.partition(".")[0] in roots:
            del sys.modules[name]
