"""Budgets for the amount of code that runs execute and load; budgets may only fall.

``python test/test_walk.py`` prints the numbers, and the files that an iteration enters.
"""

import ast
import functools
import io
import json
import os
import subprocess
import sys
import tokenize
from pathlib import Path

import pytest
from test_layers import MODULES, NAMES, PACKAGE, name_of, run_time_imports_of

pytestmark = pytest.mark.wheel

BUDGETS = {  # the current numbers; comments have the requested ones
    "files that an iteration of MAPPO enters": 30,  # 34
    "files that an iteration of QMIX enters": 35,  # 36
    "files that an iteration of QMIX that learns enters": 41,
    "files that an iteration of a league enters": 46,  # 46
    "files that MAPPO's learn enters": 15,
    "lines of code in the files that MAPPO's learn enters": 3177,  # 2,900; KL, names, TeamGAE: 161
    "modules that an eager run loads": 187,  # 200
    "files of Python": 405,  # 330; MuJoCo took eight, mjlab nine, domain randomization four
    "lines of code": 60099,  # 41,500; mjlab: 615, smaller graphs: 1,000, longer names: 1,100
    "files at the root of the package": 8,  # 8; py.typed is one
    "folders at the root of the package": 16,  # 16
    "circles of imports": 0,
    "circles through the names in a registry": 3,  # 0
}
SLACK = {"lines of code": 200, "lines of code in the files that MAPPO's learn enters": 50}
FEW = 2  # other numbers may lie below their budget by this many
SMALL = {
    "execution": "eager",
    "threads": 1,
    "total_frames": 120,
    "frames_per_batch": 40,
    "env.num_envs": 4,
    "learner.minibatch_size": 20,
    "evaluation.episodes": 4,
    "logging.progress": False,
}
RUNS = {
    "MAPPO": {"recipe": "vmas_balance_mappo", "learner.num_epochs": 2},
    "QMIX": {"recipe": "toy_arena_qmix", "learner.learning_starts": 100},  # does not learn yet
    "QMIX that learns": {"recipe": "toy_arena_qmix", "learner.learning_starts": 20},
    "a league": {"recipe": "toy_kuhn_ippo", "league.opponents": "pfsp"},
}
NO_CODE = {
    *(tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT),
    *(tokenize.ENCODING, tokenize.ENDMARKER),
}


@functools.cache
def walked(run, whole=False):
    """The output of ``walked.py`` for a run, in a separate process."""
    given = json.dumps({**SMALL, **RUNS[run], "whole": whole})
    script = Path(__file__).parent / "support" / "walked.py"
    done = subprocess.run(
        [sys.executable, "-P", str(script), given],
        env={**os.environ, "PYTHONPATH": str(PACKAGE.parent), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def lines_of_code(text):
    """Lines that hold code: no blank lines, comments or docstrings."""
    tokens = tokenize.generate_tokens(io.StringIO(text).readline)
    lines = {
        line
        for token in tokens
        if token.type not in NO_CODE
        for line in range(token.start[0], token.end[0] + 1)
    }
    return len(lines - docstring_lines(text))


def docstring_lines(text):
    """The lines of the docstrings of a file, its classes and its functions."""
    kinds = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
    nodes = [node for node in ast.walk(ast.parse(text)) if isinstance(node, kinds)]
    found = [node.body[0] for node in nodes if ast.get_docstring(node) is not None]
    return {line for node in found for line in range(node.lineno, node.end_lineno + 1)}


def code_in(files):
    return sum(lines_of_code((PACKAGE / file).read_text(encoding="utf-8")) for file in files)


def named_in(path):
    """Modules named in a file's strings, such as ``"torchrl_marl.envs.toy.library:LIBRARY"``."""
    for node in ast.walk(ast.parse((PACKAGE / path).read_text(encoding="utf-8"))):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            package, _, inner = node.value.partition(":")[0].partition(".")
            if package == "torchrl_marl":
                yield from (name for name in (inner, inner.rpartition(".")[0]) if name in NAMES)


@functools.cache
def circles(names):
    """Sets of files with circular imports, also inside functions and optionally by name."""
    edges = {
        name_of(path): {*run_time_imports_of(path), *(named_in(path) if names else ())} - {""}
        for path in MODULES
    }
    reached = {name: reached_from(name, edges) for name in edges}
    rings = {
        frozenset(other for other in reached[name] if name in reached[other])
        for name in edges
        if name in reached[name]
    }
    return sorted(sorted(ring) for ring in rings if len(ring) > 1)


def reached_from(name, edges):
    """All modules that a file imports directly or indirectly."""
    found, new = set(), {name}
    while new:
        new = set().union(*(edges.get(one, set()) for one in new)) - found
        found |= new
    return found


def at_root(is_wanted):
    found = [path for path in PACKAGE.iterdir() if path.name != "__pycache__"]
    return sum(is_wanted(path) for path in found)


MEASURES = {
    **{
        f"files that an iteration of {run} enters": lambda run=run: len(walked(run)["files"])
        for run in RUNS
    },
    "files that MAPPO's learn enters": lambda: len(walked("MAPPO")["learning"]),
    "lines of code in the files that MAPPO's learn enters": lambda: code_in(
        walked("MAPPO")["learning"]
    ),
    "modules that an eager run loads": lambda: len(walked("MAPPO", whole=True)),
    "files of Python": lambda: len(MODULES),
    "lines of code": lambda: code_in(MODULES),
    "files at the root of the package": lambda: at_root(Path.is_file),
    "folders at the root of the package": lambda: at_root(Path.is_dir),
    "circles of imports": lambda: len(circles(names=False)),
    "circles through the names in a registry": lambda: len(circles(names=True)),
}


@pytest.mark.parametrize("name", BUDGETS)
def test_measure_is_within_its_budget(name):
    number, budget = MEASURES[name](), BUDGETS[name]
    assert number <= budget, f"{name}: {number}, budget {budget}; python test/test_walk.py lists"
    least = budget - SLACK.get(name, FEW)
    assert number >= least, f"{name}: {number}, budget {budget}; lower the budget to {number}"


def test_lines_of_code_exclude_docstrings_and_comments():
    text = '"""One.\n\nTwo."""\n\n# three\nx = [\n    1,  # four\n]\ny = """\n\n"""\n'
    assert lines_of_code(text) == 6


def test_reached_from_follows_indirect_imports():
    edges = {"a": {"b"}, "b": {"c"}, "c": {"b"}}
    assert reached_from("a", edges) == reached_from("b", edges) == {"b", "c"}


if __name__ == "__main__":
    for key in MEASURES:
        print(f"{MEASURES[key]():>7,}  {key} (budget {BUDGETS[key]:,})")
    for run in RUNS:
        print(f"\nan iteration of {run} enters:", *walked(run)["files"], sep="\n  ")
    print("\nMAPPO's learn enters:", *walked("MAPPO")["learning"], sep="\n  ")
    rings = (" <-> ".join(ring) for ring in circles(names=True))
    print("\ncircles through the names in a registry:", *rings, sep="\n  ")
