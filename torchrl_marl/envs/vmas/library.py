"""VMAS scenarios and their arguments, read from source files without importing VMAS."""

from __future__ import annotations

import ast
import importlib.util
import inspect
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torchrl_marl.envs.config import own_environment_hint
from torchrl_marl.envs.external_code import import_file
from torchrl_marl.envs.libraries import Library, check_kinds
from torchrl_marl.errors import ConfigError, MissingExtraError, nearest, quoted

if TYPE_CHECKING:
    from vmas.simulator.scenario import BaseScenario

__all__ = ["LIBRARY", "check_scenario", "out_of_file", "scenario_arguments", "scenario_names"]

# Arguments of vmas.make_env that TorchRL's VmasEnv passes on, so VmasEnv must accept them, too.
_SIMULATOR_ARGUMENTS = frozenset({"multidiscrete_actions", "clamp_actions", "grad_enabled"})


def scenario_names() -> list[str]:
    """Returns the sorted names of all installed VMAS scenarios.

    Raises:
        MissingExtraError: if VMAS is not installed.
    """
    return sorted(_scenario_files())


def scenario_arguments(scenario: str) -> frozenset[str] | None:
    """Returns the names of a scenario's arguments; None if they cannot be determined.

    Args:
        scenario (str): name of a scenario, or path of a Python file that defines one.
    """
    return _read_arguments(_read_source(scenario)).known


def _read_source(scenario: str) -> str:
    """Returns the source code of a scenario; raises an error if it cannot be found or parsed."""
    if not scenario.endswith(".py"):
        return _scenario_files()[scenario].read_text()
    try:
        source = Path(scenario).read_text(encoding="utf-8")
        ast.parse(source)
    except (SyntaxError, ValueError, OSError) as error:
        raise ConfigError(f"scenario file {quoted(scenario)} cannot be read ({error}).") from None
    return source


def out_of_file(scenario: str | BaseScenario) -> str | BaseScenario:
    """Loads a scenario from the path of a Python file; returns other scenarios unchanged.

    Raises:
        ConfigError: if the file raises an error, or has no class ``Scenario``.
    """
    if not (isinstance(scenario, str) and scenario.endswith(".py")):
        return scenario
    kind = getattr(import_file(Path(scenario)), "Scenario", None)
    if not callable(kind):
        raise ConfigError(
            f"scenario file {quoted(scenario)} has no class Scenario; name the scenario's class "
            "Scenario, as in VMAS's files."
        )
    return kind()


def _read_arguments(source: str) -> _ArgumentReader:
    """Finds the arguments that a scenario's source code reads from the parameter ``kwargs``."""
    reader = _ArgumentReader()
    reader.visit(ast.parse(source))
    return reader


def check_scenario(scenario: str | BaseScenario, arguments: dict[str, Any]) -> None:
    """Raises an error for an unknown scenario, or for arguments that a scenario does not read.

    Args:
        scenario (str or BaseScenario): name, path of a Python file, or scenario object.
        arguments (dict): arguments of the scenario.

    Raises:
        ConfigError: if the scenario or an argument is unknown; the message names the nearest
            known one.
        MissingExtraError: if VMAS is not installed.
    """
    if not isinstance(scenario, str):
        known = _class_arguments(type(scenario))
        if known is not None:
            check_arguments(type(scenario).__name__, arguments, known)
        return
    if scenario.endswith(".py"):
        if not os.path.isfile(scenario):
            raise ConfigError(f"there is no scenario file {quoted(scenario)}; check its path.")
    elif scenario not in (names := scenario_names()):
        raise ConfigError(
            f"unknown VMAS scenario {quoted(scenario)}; "
            f"{nearest(scenario, names) or own_environment_hint(scenario)}"
            "`torchrl-marl list scenarios` shows all."
        )
    reader = _read_arguments(_read_source(scenario))
    if reader.known is not None:
        check_arguments(scenario, arguments, reader.known)
    check_kinds(arguments, reader.defaults)


def check_arguments(scenario: str, arguments: dict[str, Any], known: frozenset[str]) -> None:
    """Raises an error for an argument that is not in ``known``.

    Raises:
        ConfigError: if an argument is unknown; the message names it and the nearest known one.
    """
    for name in arguments:
        if name not in known and name not in _SIMULATOR_ARGUMENTS:
            raise ConfigError(
                f"VMAS scenario {quoted(scenario)} has no argument {quoted(name)}; "
                f"{nearest(name, known)}it takes {', '.join(sorted(known)) or 'none'}."
            )


def _class_arguments(scenario: type) -> frozenset[str] | None:
    """Returns the arguments that a scenario's class and base classes read; None if unknown."""
    known: frozenset[str] = frozenset()
    for cls in scenario.__mro__:
        if cls is object or cls.__module__.startswith("vmas.simulator"):
            continue
        module = inspect.getmodule(cls)
        try:
            names = None if module is None else _read_arguments(inspect.getsource(module)).known
        except (OSError, TypeError):
            return None
        if names is None:
            return None
        known |= names
    return known


def _scenario_files() -> dict[str, Path]:
    package = importlib.util.find_spec("vmas")
    if package is None or not package.submodule_search_locations:
        raise MissingExtraError("VMAS", "vmas")
    folder = Path(list(package.submodule_search_locations)[0]) / "scenarios"
    return {path.stem: path for path in folder.rglob("*.py") if path.stem != "__init__"}


class _ArgumentReader(ast.NodeVisitor):
    """Finds ``x`` in ``kwargs.pop("x")``, ``kwargs.get("x")``, ``kwargs["x"]`` and signatures."""

    def __init__(self) -> None:
        self.names: set[str] = set()
        self.defaults: dict[str, Any] = {}
        self.open = False
        self._kwargs: list[str] = []
        self._scenario_class = False

    @property
    def known(self) -> frozenset[str] | None:
        """Names of all arguments; None if any name is accepted."""
        return None if self.open else frozenset(self.names)

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        outer = self._scenario_class
        self._scenario_class = any("Scenario" in ast.unparse(base) for base in node.bases)
        if self._scenario_class:
            self.generic_visit(node)
        self._scenario_class = outer

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        if node.args.kwarg is None:
            return
        if node.name == "make_world":
            named = [*node.args.args[3:], *node.args.kwonlyargs]
            self.names.update(argument.arg for argument in named)
        self._kwargs.append(node.args.kwarg.arg)
        self.generic_visit(node)
        self._kwargs.pop()

    def visit_Call(self, node: ast.Call) -> None:
        function = node.func
        reads = isinstance(function, ast.Attribute) and self._is_kwargs(function.value)
        name = _string_value(node.args[0]) if node.args else None
        if reads and ast.unparse(function).endswith((".pop", ".get")) and name is not None:
            self.names.add(name)
            rest = node.args[1:]
            if rest and isinstance(rest[0], ast.Constant):
                self.defaults[name] = rest[0].value
        elif ast.unparse(function).endswith("check_kwargs_consumed"):
            rest = []
        else:
            if not reads:
                self.visit(function)
            else:
                self.open = True
            rest = node.args
        for argument in rest:
            self.visit(argument)
        for keyword in node.keywords:
            passes_on = ast.unparse(function).startswith(("self.", "super()"))
            if not (keyword.arg is None and self._is_kwargs(keyword.value) and passes_on):
                self.visit(keyword.value)

    def visit_Subscript(self, node: ast.Subscript) -> None:
        name = _string_value(node.slice)
        if self._is_kwargs(node.value) and name is not None:
            self.names.add(name)
        else:
            self.generic_visit(node)

    def visit_Name(self, node: ast.Name) -> None:
        if self._is_kwargs(node):
            self.open = True

    def _is_kwargs(self, node: ast.AST) -> bool:
        return isinstance(node, ast.Name) and bool(self._kwargs) and node.id == self._kwargs[-1]


def _string_value(node: ast.expr) -> str | None:
    """Returns the text of a string literal; None for other expressions."""
    return node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else None


LIBRARY = Library(
    "VMAS scenarios, simulated as tensors",
    "torchrl_marl.envs.vmas:VmasEnv",
    settings=("num_envs", "max_steps", "continuous_actions", "state", "info", "group_map"),
    states=("observations",),
    environments=scenario_names,
    own_limit=False,
    captured=True,
    files=True,
    check=lambda config: check_scenario(config.name, config.kwargs),
    foreign=lambda config: config.name if config.name.endswith(".py") else None,
    kwargs_name="scenario_kwargs",
    packages=("vmas",),
)
