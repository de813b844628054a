"""Pages of the API reference, with public names grouped by topic.

The names are those in a package's ``__all__``, and chosen names of modules, read without importing
torch. The build fails for a package without a group, or a public name without a docstring.
"""

from __future__ import annotations

import ast
import functools
import importlib
import logging
import pkgutil
import sys
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parents[2]
log = logging.getLogger("mkdocs.hooks.reference")

# Page -> its title, and its packages and modules.
GROUPS = {
    "train": ("Train, evaluate, resume", ["torchrl_marl", "training", "apps.jobs"]),
    "teams": ("Agents, groups, teams", ["specs", "specs.stacking"]),
    "worlds": (
        "Worlds",
        [
            "envs",
            "envs.randomization",
            "envs.remember",
            "envs.scene",
            "envs.symmetries",
            "envs.foraging",
            "envs.toy",
        ],
    ),
    "networks": ("Networks and sharing", ["modules", "modules.communication"]),
    "losses": (
        "Losses, advantages, returns",
        ["objectives", "objectives.off_policy", "functional"],
    ),
    "learners": (
        "Learners, collectors, datasets",
        ["learners", "learners.members", "collectors", "apps.record"],
    ),
    "extending": (
        "Extending",
        [
            "learners.algorithms",
            "learners.config",
            "envs.libraries",
            "modules.bodies",
            "modules.inputs",
            "recipes",
        ],
    ),
    "players": (
        "Games, ratings, evolution",
        ["games", "training.evolution", "apps.players", "contrib"],
    ),
    "suites": ("Suites", ["apps.suites"]),
    "speed": ("One program: graphs and simulators", ["capture", "simulator"]),
    "reports": ("Reports and statistics", ["apps.reports", "training.statistics", "apps.plotting"]),
    "elsewhere": (
        "Agents elsewhere: export, serving",
        ["apps.export", "apps.serving", "apps.external"],
    ),
    "settings": ("Settings", ["settings"]),
    "errors": ("Errors", ["errors"]),
}
# Names to show of modules with other names that are internal, or shown elsewhere.
CHOSEN = {
    "torchrl_marl": ["algorithms_for", "iterate", "resume", "train"],
    "envs.libraries": ["Library", "register_library"],
    "envs.remember": ["with_players"],
    "envs.scene": ["scene", "Shape", "Stage", "text"],
    "learners.algorithms": ["Algorithm", "register_algorithm"],
    "learners.config": ["LearnerConfig", "TrainedConfig"],
    "learners.members": ["learner_of_members", "Members"],
    "modules.bodies": ["Context", "make_mlp"],
    "modules.communication": ["Channel", "listening"],
    "modules.inputs": ["Features", "Picture"],
    "objectives.off_policy": ["OffPolicyLoss"],
    "apps.players": ["evenly", "heat_map", "rating_curve", "Standing", "standing"],
    "apps.plotting": ["learning_curve"],
    "apps.record": ["record"],
    "recipes": ["explain", "load_config", "save_config"],
    "specs.stacking": ["pad_group", "unpad_group"],
}
# Packages with only internal names.
INNER: set[str] = set()


def exported(package: str) -> list[str]:
    """Returns the public names of a package, or the chosen names of a module."""
    names = CHOSEN.get(package) or importlib.import_module(full_name(package)).__all__
    return sorted(names, key=str.lower)


@functools.cache
def places() -> dict[tuple[str, str], str]:
    """Returns place of definition -> package with its entry, for each public name.

    A name in several packages is shown once, in the first of them.
    """
    shown: dict[tuple[str, str], str] = {}
    for package in [package for _, packages in GROUPS.values() for package in packages]:
        for name in exported(package):
            shown.setdefault(origin(package, name), package)
    return shown


def public_names(package: str) -> list[str]:
    """Returns the names with an entry in a package."""
    return [name for name in exported(package) if places()[origin(package, name)] == package]


def full_name(package: str) -> str:
    """Returns the full name of a package."""
    return package if package == "torchrl_marl" else f"torchrl_marl.{package}"


def forgotten() -> list[str]:
    """Returns the packages with public names that are on no page."""
    shown = {package for _, packages in GROUPS.values() for package in packages} | INNER
    modules = pkgutil.iter_modules([str(ROOT / "torchrl_marl")])
    folders = [module.name for module in modules if module.ispkg and module.name not in shown]
    return [
        name for name in folders if getattr(importlib.import_module(full_name(name)), "__all__", 0)
    ]


@functools.cache
def parsed(path: Path) -> ast.Module:
    """Parses a Python file."""
    return ast.parse(path.read_text(encoding="utf-8"))


def module_of(package: str) -> ast.Module:
    """Parses the file of a package or module."""
    path = ROOT / Path(*full_name(package).split("."))
    return parsed(path / "__init__.py" if path.is_dir() else path.with_suffix(".py"))


def origin(package: str, name: str) -> tuple[str, str]:
    """Returns the module that defines a name, and the name."""
    for node in ast.walk(module_of(package)):
        if isinstance(node, ast.ImportFrom) and any(alias.name == name for alias in node.names):
            return origin((node.module or "").removeprefix("torchrl_marl."), name)
    return package, name


def definition(package: str, name: str) -> ast.AST | None:
    """Returns the class or function of a public name, or the docstring below a value."""
    body = module_of(origin(package, name)[0]).body
    for i, node in enumerate(body):
        if getattr(node, "name", None) == name:
            return node
        targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
        if any(isinstance(target, ast.Name) and target.id == name for target in targets):
            return ast.Module(body[i + 1 : i + 2], [])
    return None


def undocumented(package: str, name: str) -> list[str]:
    """Returns the public name, or methods of its class, without a docstring."""
    node = definition(package, name)
    full = f"{full_name(package)}.{name}"
    if node is None:
        return [full]
    lacking = [] if ast.get_docstring(node) else [full]
    if isinstance(node, ast.ClassDef) and not node.bases:
        lacking += [
            f"{full}.{method.name}"
            for method in node.body
            if isinstance(method, ast.FunctionDef)
            and not method.name.startswith("_")
            and not ast.get_docstring(method)
            and not any(
                ast.unparse(line).endswith(("overload", ".setter"))
                for line in method.decorator_list
            )
        ]
    return lacking


def faults() -> list[str]:
    """Returns a message for each package on no page, and each name without a docstring."""
    pages = "no group of docs/hooks/reference.py"
    sentences = [f"torchrl_marl.{package} is in {pages}" for package in forgotten()]
    for _, packages in GROUPS.values():
        for package in packages:
            for name in public_names(package):
                sentences += [f"{name} has no docstring" for name in undocumented(package, name)]
    return sentences


def page(title: str, packages: list[str]) -> str:
    """Returns the page of a group."""
    parts = [f"# {title}\n"]
    for package in packages:
        about = ast.get_docstring(module_of(package)) or ""
        parts.append(f"## `{full_name(package)}`\n\n{about}\n")
        parts += [f"::: {full_name(package)}.{name}\n" for name in public_names(package)]
    return "\n".join(parts)


def overview() -> str:
    """Returns the page that lists all public names."""
    parts = ["# API reference\n\nPublic names by topic.\n"]
    for place, (title, packages) in GROUPS.items():
        links: dict[str, str] = {}  # equal names are distinguished by their packages
        for package in packages:
            for name in public_names(package):
                shown = f"{package}.{name}" if name in links else name
                links[shown] = f"[`{shown}`]({place}.md#{full_name(package)}.{name})"
        parts.append(f"## [{title}]({place}.md)\n\n{', '.join(links.values())}\n")
    return "\n".join(parts)


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Puts the pages into the menu."""
    sys.path[:0] = [str(ROOT), str(Path(__file__).parent)]  # the package; what reads docstrings
    pages = ["api/index.md", *(f"api/{place}.md" for place in GROUPS)]
    config.nav = [{"API": pages} if "API" in entry else entry for entry in config.nav]
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Writes the pages, and names what has no place or no docstring."""
    for fault in faults():
        log.warning("%s", fault)
    files.append(File.generated(config, "api/index.md", content=overview()))
    for place, (title, packages) in GROUPS.items():
        content = page(title, packages)
        files.append(File.generated(config, f"api/{place}.md", content=content))
    return files
