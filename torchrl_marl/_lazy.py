"""Lazy imports of public names, and imports of modules by their former names."""

from __future__ import annotations

import importlib
import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any, cast

__all__ = ["MOVED", "attach", "find_moved_modules"]


def attach(
    package: str,
    modules: dict[str, list[str]] | None = None,
    moved: Mapping[str, str] | None = None,
) -> tuple[Callable[[str], Any], Callable[[], list[str]], list[str]]:
    """Returns ``__getattr__``, ``__dir__`` and ``__all__`` of a package with lazy imports.

    Args:
        package (str): the package's ``__name__``.
        modules (dict, optional): name of a module of the package -> the public names that it
            defines; by default the package's imports for type checkers.
        moved (mapping, optional): former name in the package -> its current module.
    """
    if modules is None:
        module_of = _imported_for_type_checkers(package)
    else:
        module_of = {n: f"{package}.{module}" for module, names in modules.items() for n in names}
    moved = moved or {}

    def __getattr__(name: str) -> Any:
        if name in moved:
            new = moved[name]
            warnings.warn(
                f"{package}.{name} moved to {new}.{name}; the old name works in two more versions.",
                FutureWarning,
                stacklevel=2,
            )
            return getattr(importlib.import_module(new), name)
        if name not in module_of:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        return getattr(importlib.import_module(module_of[name]), name)

    def __dir__() -> list[str]:
        return sorted(module_of)

    return __getattr__, __dir__, sorted(module_of)


def _imported_for_type_checkers(package: str) -> dict[str, str]:
    """Returns the names that a package imports under ``if TYPE_CHECKING``, with their modules."""
    import ast  # late: `python -m torchrl_marl` first removes the current folder from the path

    loader: Any = sys.modules[package].__spec__.loader  # type: ignore[union-attr]
    tree = ast.parse(loader.get_source(package))
    blocks = [node for node in tree.body if isinstance(node, ast.If)]
    blocks = [node for node in blocks if ast.unparse(node.test) == "TYPE_CHECKING"]
    imports = [line for node in blocks for line in node.body if isinstance(line, ast.ImportFrom)]
    return {alias.name: str(line.module) for line in imports for alias in line.names}


# Folder -> modules and packages that moved into it without a change of name.
_MOVED_INTO = {
    "apps": "choosing console export players plotting reports serving suites",
    "apps.cli": "arguments evaluating",
    "apps.jobs": "tuning",
    "apps.reports": "curves",
    "functional": "kernels sum_tree",
    "runtime": "import_path memory naming random_state ranks torchrun trust",
    "specs": "joining stacking",
    "training": "evolution statistics",
}
# Former name of a module or package -> its current name, both within torchrl_marl.
MOVED = {
    **{n: f"{folder}.{n}" for folder, names in _MOVED_INTO.items() for n in names.split()},
    "cli": "apps.cli.main",
    "collectors.external": "apps.external.collector",
    "collectors.splitting": "contrib.splitting",
    "distributed": "apps.jobs",
    "envs.external": "apps.external",
    "experiments": "apps.reports.curves",
    "games.matchmaking": "games.ratings",
    "games.ranking": "contrib.ranking",
    "games.sequence_form": "games.equilibrium",
    "learners.member_rows": "learners.rows",
    "learners.population": "learners.members",
    "learners.replay.tree_sampler": "contrib.tree_sampler",
    "learners.replay_population": "learners.members",
    "links": "runtime.trust",
    "listing": "apps.cli.main",
    "modules.routed": "contrib.routed",
    "per_group": "functional.statistics",
    "population": "specs.joining",
    "pruning": "apps.jobs.halving",
    "registry": "settings.registry",
    "seeds": "apps.jobs.jobs",
}


class _MovedModuleFinder:
    """Finder and loader of modules by their former names.

    It comes first in ``sys.meta_path``; otherwise a moved package would load its modules twice.
    It does not extend ``importlib.abc``, which imports ``tempfile`` and ``random``. In
    ``python -m torchrl_marl`` these two modules could still come from the current folder.
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
                return ModuleSpec(name, cast(Any, self), loader_state=now)
        return None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        warnings.warn(
            f"{spec.name} moved to {spec.loader_state}; the old name works in two more versions.",
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
    """Enables imports of modules by their former names."""
    if not any(isinstance(finder, _MovedModuleFinder) for finder in sys.meta_path):
        sys.meta_path.insert(0, cast(Any, _MovedModuleFinder()))
