"""Layers of the package: a lower layer never imports a higher one, siblings are independent."""

import ast
import importlib
from pathlib import Path

import pytest

import torchrl_marl

PACKAGE = Path(torchrl_marl.__file__).parent
MODULES = sorted(path.relative_to(PACKAGE) for path in PACKAGE.rglob("*.py"))

# Parts in one set of a layer may import each other; parts in different sets may not.
LAYERS = [
    [{"_lazy"}, {"errors"}, {"version"}],
    [{"runtime"}, {"settings"}],
    [{"specs"}, {"functional"}, {"games"}, {"capture"}],
    [{"simulator"}],
    [{"envs"}, {"modules"}],
    [{"objectives"}],
    [{"collectors"}, {"learners"}],
    [{"training"}],
    [{"recipes"}],
    [{"runs"}],
    [{"apps"}, {"contrib"}],
    [{"__main__"}],
]
PLACE = {part: (i, j) for i, layer in enumerate(LAYERS) for j, s in enumerate(layer) for part in s}
# Settings lie beside their component, and are imported without it.
SETTINGS = {
    "envs.config",
    "envs.libraries",
    "modules.config",
    "learners.config",
    "learners.memory_config",
    "learners.happo_config",
    "learners.harl_config",
    "learners.off_policy_config",
    "learners.offline_config",
    "learners.capabilities",
    "learners.algorithms",
    "training.config",
    "training.sections",
}
# Other modules that they may import: these do not import torch.
WITHOUT_TORCH = {
    "runtime.import_path",
    "runtime.trust",
    "envs.ranges",
    "errors",
    "settings.registry",
    "settings",
    "settings.formatting",
    "capture.execution",
    "modules.registry",
}


def name_of(path):
    parts = path.with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imports_of(path):
    """Modules of the package that a file imports anywhere, relative to the package.

    Type-checking imports of ``torchrl_marl.apps`` are not counted.
    """
    tree = ast.parse((PACKAGE / path).read_text(encoding="utf-8"))
    unseen = {inner for node in filter(is_for_type_checkers, tree.body) for inner in ast.walk(node)}
    for node in ast.walk(tree):
        if node in unseen and "torchrl_marl.apps" in ast.unparse(node):
            continue
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: imports are absolute"
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        else:
            continue
        for name in names:
            package, _, inner = name.partition(".")
            if package == "torchrl_marl":
                yield inner


def is_for_type_checkers(node):
    return isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"


def run_time_imports_of(path):
    """Modules of the package that a file imports at run time, also inside functions.

    A name that an ``__init__`` imports lazily counts as an import of the module that defines it.
    """
    tree = ast.parse((PACKAGE / path).read_text(encoding="utf-8"))
    unseen = {inner for node in filter(is_for_type_checkers, tree.body) for inner in ast.walk(node)}
    for node in ast.walk(tree):
        if node in unseen:
            continue
        if isinstance(node, ast.Import):
            yield from (alias.name.partition(".")[2] for alias in node.names if is_own(alias.name))
        elif isinstance(node, ast.ImportFrom) and is_own(node.module):
            module = node.module.partition(".")[2]
            for alias in node.names:
                inner = f"{module}.{alias.name}" if module else alias.name
                yield inner if inner in NAMES else LATE.get((module, alias.name), module)


def is_own(module):
    return module.partition(".")[0] == "torchrl_marl"


def late_names(path):
    """Name -> defining module, for the names that an ``__init__`` imports lazily."""
    tree = ast.parse((PACKAGE / path).read_text(encoding="utf-8"))
    for block in filter(is_for_type_checkers, tree.body):
        for node in block.body:
            for alias in node.names:
                yield (name_of(path), alias.name), node.module.partition(".")[2]


NAMES = {name_of(path) for path in MODULES}
LATE = dict(pair for path in MODULES if path.name == "__init__.py" for pair in late_names(path))


def units_of(importer, imported):
    """The two siblings of the lowest common folder that an import connects, or None."""
    one, other = importer.split("."), imported.split(".")
    shared = next((i for i, (a, b) in enumerate(zip(one, other)) if a != b), None)
    if shared is None:
        return None
    return ".".join(one[: shared + 1]), ".".join(other[: shared + 1])


def circle_of(edges):
    """One cycle of a graph ``{node: set of nodes}``, or None."""
    left = {node: set(following) for node, following in edges.items()}
    while ends := {node for node, following in left.items() if not following & left.keys()}:
        left = {node: following for node, following in left.items() if node not in ends}
    if not left:
        return None
    walk = [next(iter(sorted(left)))]
    while walk.count(walk[-1]) == 1:
        walk.append(min(left[walk[-1]] & left.keys()))
    return walk[walk.index(walk[-1]) :]


def may_import(importer, imported):
    own, other = importer.partition(".")[0], imported.partition(".")[0]
    if own == other or own == "":
        return True
    (i, j), (k, m) = PLACE[own], PLACE[other]
    return k < i or (k, m) == (i, j)


def test_every_part_has_a_layer():
    parts = {name_of(path).partition(".")[0] for path in MODULES} - {""}
    assert parts <= set(PLACE)


@pytest.mark.parametrize("part", sorted({name_of(path).partition(".")[0] for path in MODULES}))
def test_parts_import_only_lower_layers(part):
    for path in MODULES:
        if name_of(path).partition(".")[0] != part:
            continue
        for imported in imports_of(path):
            if imported in ("", "__version__"):
                is_top = PLACE[part][0] == len(LAYERS) - 1
                assert is_top, f"{path} imports the package's door"
            else:
                assert may_import(name_of(path), imported), f"{path} imports {imported}"


def test_modules_have_no_circular_imports():
    edges = {name_of(path): set(run_time_imports_of(path)) - {""} for path in MODULES}
    assert circle_of(edges) is None


def test_folders_have_no_circular_imports():
    """The files and subfolders of each folder import each other in one direction only."""
    edges = {}
    for path in MODULES:
        for imported in run_time_imports_of(path):
            pair = units_of(name_of(path), imported)
            if pair is not None:
                edges.setdefault(pair[0], set()).add(pair[1])
    assert circle_of(edges) is None


def test_circle_of_finds_cycles():
    assert circle_of({"a": {"b"}, "b": {"c"}, "c": set()}) is None
    assert circle_of({"a": {"b"}, "b": {"c"}, "c": {"b"}}) == ["b", "c", "b"]
    assert units_of("modules.stacks.matmul", "modules.stacks.storage") == (
        "modules.stacks.matmul",
        "modules.stacks.storage",
    )
    assert units_of("modules.actors", "modules.stacks.matmul") == (
        "modules.actors",
        "modules.stacks",
    )
    assert units_of("specs.groups", "specs") is None


@pytest.mark.parametrize("name", sorted(SETTINGS))
def test_settings_import_settings_only(name):
    for imported in imports_of(Path(*name.split(".")).with_suffix(".py")):
        assert imported.rpartition(".")[0] in SETTINGS | WITHOUT_TORCH, f"{name} imports {imported}"


def test_may_import():
    assert may_import("learners.build", "objectives.ppo")
    assert may_import("training.run", "settings.read")
    assert may_import("apps.plotting", "runs")
    assert not may_import("objectives.ppo", "learners.build")
    assert not may_import("envs.vmas.env", "modules.actors")
    assert not may_import("modules.actors", "envs.vmas.env")
    assert not may_import("collectors.team", "learners.build")
    assert not may_import("learners.build", "collectors.team")
    assert not may_import("training.trainer", "apps.plotting")
    assert not may_import("runs", "apps.plotting")
    assert not may_import("apps.cli.main", "contrib.routed")
    assert not may_import("errors", "specs")
    assert not may_import("specs", "functional")


@pytest.mark.parametrize("path", [path for path in MODULES if path.name == "__init__.py"], ids=str)
def test_type_checking_imports_equal_lazy_imports(path):
    """The names under ``TYPE_CHECKING`` equal those that ``attach`` resolves."""
    tree = ast.parse((PACKAGE / path).read_text(encoding="utf-8"))
    seen = {
        (node.module.removeprefix("torchrl_marl."), alias.name)
        for block in tree.body
        if isinstance(block, ast.If) and ast.unparse(block.test) == "TYPE_CHECKING"
        for node in block.body
        for alias in node.names
    }
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
    if not seen and not calls:
        return  # a folder without public names
    (attach,) = [call for call in calls if ast.unparse(call.func) == "attach"]
    prefix = f"{name_of(path)}." if name_of(path) else ""
    if len(attach.args) == 1:  # attach reads the TYPE_CHECKING block
        package = importlib.import_module(f"torchrl_marl.{name_of(path)}")
        assert package.__all__ == sorted(name for _, name in seen)
        assert all(module.startswith(prefix) for module, _ in seen)
        return
    late = {
        (prefix + module, name)
        for module, names in ast.literal_eval(attach.args[1]).items()
        for name in names
    }
    assert seen == late


def named_places():
    """Places that strings name as ``module:name``, which are imported on first use."""
    for path in MODULES:
        for node in ast.walk(ast.parse((PACKAGE / path).read_text(encoding="utf-8"))):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                module, colon, name = node.value.partition(":")
                if colon and name.isidentifier() and is_own(module):
                    yield path, module, name


def test_places_named_in_strings_exist():
    """A renamed function or class is renamed in the tables that name it, too."""
    places = list(named_places())
    assert len(places) > 20
    files = {f"torchrl_marl.{name_of(path)}": path for path in MODULES}
    for path, module, name in places:
        assert module in files, f"{path} names {module}:{name}"
        tree = ast.parse((PACKAGE / files[module]).read_text(encoding="utf-8"))
        assert name in names_in(tree), f"{path} names {module}:{name}"


def names_in(tree):
    """Names that a module defines, imports or assigns."""
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            yield node.name
        elif isinstance(node, ast.alias):
            yield node.asname or node.name
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
