"""Names that are imported when they are first used, and modules under their former names."""

from __future__ import annotations

import importlib
import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

__all__ = ["MOVED", "attach", "find_moved_modules"]


def attach(
    package: str, modules: dict[str, list[str]], moved: Mapping[str, str] | None = None
) -> tuple[Callable[[str], Any], Callable[[], list[str]], list[str]]:
    """Gives a package's ``__getattr__``, ``__dir__`` and ``__all__``.

    Args:
        package (str): the package's ``__name__``.
        modules (dict): name of a module of the package -> the public names that it defines.
        moved (mapping, optional): name that the package had -> the module that has it now.
    """
    module_of = {name: module for module, names in modules.items() for name in names}
    moved = moved or {}

    def __getattr__(name: str) -> Any:
        if name in moved:
            new = moved[name]
            warnings.warn(
                f"{package}.{name} is {new}.{name} now; the old name works in two more versions.",
                FutureWarning,
                stacklevel=2,
            )
            return getattr(importlib.import_module(new), name)
        if name not in module_of:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        return getattr(importlib.import_module(f"{package}.{module_of[name]}"), name)

    def __dir__() -> list[str]:
        return sorted(module_of)

    return __getattr__, __dir__, sorted(module_of)


# Former name of a module or package -> its name now, both within torchrl_marl.
MOVED = {
    "arguments": "apps.cli.arguments",
    "choosing": "apps.choosing",
    "cli": "apps.cli.main",
    "collectors.external": "apps.external.collector",
    "collectors.splitting": "contrib.splitting",
    "console": "apps.console",
    "curves": "apps.reports.curves",
    "distributed": "apps.jobs",
    "envs.external": "apps.external",
    "evaluating": "apps.cli.evaluating",
    "evolution": "training.evolution",
    "experiments": "apps.reports.curves",
    "export": "apps.export",
    "games.ranking": "contrib.ranking",
    "import_path": "runtime.import_path",
    "joining": "specs.joining",
    "kernels": "functional.kernels",
    "learners.member_rows": "learners.rows",
    "learners.population": "learners.members",
    "learners.replay_population": "learners.members",
    "learners.replay.tree_sampler": "contrib.tree_sampler",
    "links": "runtime.trust",
    "listing": "apps.cli.main",
    "memory": "runtime.memory",
    "modules.routed": "contrib.routed",
    "naming": "runtime.naming",
    "per_group": "functional.statistics",
    "players": "apps.players",
    "plotting": "apps.plotting",
    "population": "specs.joining",
    "pruning": "apps.jobs.tuning",
    "random_state": "runtime.random_state",
    "ranks": "runtime.ranks",
    "registry": "settings.registry",
    "reports": "apps.reports",
    "seeds": "apps.jobs.jobs",
    "serving": "apps.serving",
    "stacking": "specs.stacking",
    "statistics": "training.statistics",
    "suites": "apps.suites",
    "sum_tree": "functional.sum_tree",
    "torchrun": "runtime.torchrun",
    "trust": "runtime.trust",
    "tuning": "apps.jobs.tuning",
}


class _Former(MetaPathFinder, Loader):
    """Finds modules under their former names.

    It is asked first: a package that has moved would find its modules a second time in its folder.
    """

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if not name.startswith("torchrl_marl."):
            return None
        parts = name.split(".")[1:]
        for n in range(len(parts), 0, -1):
            new = MOVED.get(".".join(parts[:n]))
            if new is not None:
                now = ".".join(["torchrl_marl", new, *parts[n:]])
                return ModuleSpec(name, self, loader_state=now)
        return None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        warnings.warn(
            f"{spec.name} is {spec.loader_state} now; the old name works in two more versions.",
            FutureWarning,
            stacklevel=2,
        )
        module = importlib.import_module(spec.loader_state)
        spec.loader_state = module.__spec__  # the import replaces it
        return module

    def exec_module(self, module: ModuleType) -> None:
        assert module.__spec__ is not None
        module.__spec__ = module.__spec__.loader_state


def find_moved_modules() -> None:
    """Lets the former names be imported."""
    if not any(isinstance(finder, _Former) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Former())
