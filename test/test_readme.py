"""README and docs: Python blocks run, commands parse, messages and links are correct."""

import ast
import contextlib
import csv
import importlib.util
import os
import re
import shlex
import sys
from pathlib import Path
from unittest import mock

import pytest

import torchrl_marl
from torchrl_marl.apps.cli import main as cli
from torchrl_marl.envs.libraries import LIBRARIES
from torchrl_marl.learners.algorithms import ALGORITHMS
from torchrl_marl.modules.registry import BODIES, SHARINGS
from torchrl_marl.recipes import load_config, recipe_names

pytest.importorskip("vmas")
from vmas.scenarios import balance  # noqa: E402

ROOT = Path(__file__).parents[1]
BESIDE = ["README.md", "CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md"]
FILES = [*(ROOT / name for name in BESIDE), *sorted((ROOT / "docs").rglob("*.md"))]
PAGES = {str(file.relative_to(ROOT)): file.read_text(encoding="utf-8") for file in FILES}
README = PAGES["README.md"]


def blocks(language, page):
    return re.findall(rf"^```{language}\n(.*?)^```", PAGES[page], re.M | re.S)


def cases(language):
    """Pages and block numbers; a block that occurs on several pages is one case."""
    once = {}
    for page in PAGES:
        for i, block in enumerate(blocks(language, page)):
            once.setdefault(block, (page, i))
    return list(once.values())


def commands(page):
    lines = [
        line.partition("#")[0].strip()
        for block in blocks("bash", page)
        for line in block.split("\n")
    ]
    return [shlex.split(line)[1:] for line in lines if line.startswith("torchrl-marl ")]


def comments_of_prints(program):
    """The comments behind each ``print(...)``, in order."""
    lines = program.splitlines()
    return [
        lines[node.end_lineno - 1].partition("#")[2].strip()
        for node in ast.parse(program).body
        if isinstance(node, ast.Expr) and ast.unparse(node).startswith("print(")
    ]


def assert_as_said(printed, comment):
    """Checks that shapes such as ``[64, 10]`` in a comment equal the printed ones."""
    said, found = (
        [[int(n) for n in shape.split(",")] for shape in re.findall(r"\[(\d[\d, ]*)\]", text)]
        for text in (comment, printed)
    )
    if not said:
        return
    once = [shape for i, shape in enumerate(found) if shape not in found[:i]]
    if "or shorter" in comment:
        assert len(once) == len(said) == 1 and len(once[0]) == len(said[0])
        assert sum(a != b for a, b in zip(once[0], said[0])) <= 1
        assert all(a <= b for a, b in zip(once[0], said[0]))
    else:
        assert once == said


def test_shapes_in_comments_are_compared():
    assert comments_of_prints("x = 1\nprint(\n    x\n)  # [1, 2]: so\nprint(x)\n") == [
        "[1, 2]: so",
        "",
    ]
    assert_as_said("torch.Size([4, 9])", "[4, 9]: all")
    assert_as_said("torch.Size([4, 7])", "[4, 9], or shorter")
    assert_as_said("[torch.Size([3]), torch.Size([3])]", "twice [3]")
    for printed, comment in (
        ("torch.Size([64, 4])", "[64, 10]"),
        ("torch.Size([4, 10])", "[4, 9], or shorter"),
        ("10", "[64, 10]"),
    ):
        with pytest.raises(AssertionError):
            assert_as_said(printed, comment)


@pytest.fixture
def as_before():
    """Restores the registries, and removes the module of an example, after a test."""
    with contextlib.ExitStack() as stack:
        for register in (ALGORITHMS, LIBRARIES, BODIES, SHARINGS):
            stack.enter_context(mock.patch.dict(register._known))
        yield
    sys.modules.pop("readme", None)


def run_as_module(program, path, printed):
    """Runs a program as a module file, so that its classes can be imported."""
    path.write_text(program, encoding="utf-8")
    spec = importlib.util.spec_from_file_location("readme", path)
    module = sys.modules["readme"] = importlib.util.module_from_spec(spec)
    module.print = lambda *values: printed.append(" ".join(map(str, values)))
    spec.loader.exec_module(module)


SMALL = {
    "total_frames": 400,
    "frames_per_batch": 400,
    "minibatch_size": 400,
    "num_envs": 4,
    "num_epochs": 1,
    "episodes": 2,
}


@pytest.mark.pages
@pytest.mark.usefixtures("as_before")
@pytest.mark.parametrize(("page", "i"), cases("python"))
def test_python_blocks_run(page, i, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    program = blocks("python", page)[i]
    small = '"toy_arena' in program and "frames_per_batch" not in program  # batches of 640
    frames = "2_560" if small else "9_600"
    program = re.sub(r"total_frames=\d+_000", f"total_frames={frames}", program)
    if page.startswith("docs/coming_from/"):  # one small batch
        for setting, small in SMALL.items():
            program = re.sub(rf"\b{setting}(\"?[:=] ?)[\d_]+", rf"{setting}\g<1>{small}", program)
    printed = []
    run_as_module(program, tmp_path / "readme.py", printed)
    comments = comments_of_prints(program)
    assert len(printed) >= len(comments) > 0
    for text, comment in zip(printed, comments):
        assert_as_said(text, comment)
    capsys.readouterr()
    if "torchrl_marl.train(" in program:
        (run,) = (tmp_path / "runs").iterdir()
        assert (run / "summary.json").is_file()


def test_first_example_of_the_readme_is_short():
    assert len(blocks("python", "README.md")[0].splitlines()) < 15


@pytest.mark.pages
@pytest.mark.parametrize("page", [page for page in PAGES if commands(page)])
def test_documented_commands_parse(page, tmp_path, monkeypatch):
    scenario = tmp_path / "path" / "to" / "scenario.py"
    scenario.parent.mkdir(parents=True)
    scenario.write_text(Path(balance.__file__).read_text())
    (reach,) = (block for block in blocks("python", "README.md") if "class Reach" in block)
    (tmp_path / "reach.py").write_text(reach.partition("\nenv = ")[0])
    for own in ("my_callbacks.py", "other.py", "path/to/my_callbacks.py"):
        (tmp_path / own).touch()  # must exist, is not imported
    monkeypatch.chdir(tmp_path)
    for command, *rest in commands(page):
        parsed, more = cli.make_parser().parse_known_args([command, *rest])
        assert parsed.command == command
        settings = [text for text in [*getattr(parsed, "settings", []), *more] if "=" in text]
        recipes = [text for text in getattr(parsed, "settings", []) if "=" not in text]
        if command == "train":
            load_config(recipes[0] if recipes else "vmas_balance_mappo", settings)


def test_pages_have_commands():
    assert len(commands("README.md")) >= 5 and len(commands("docs/runs.md")) >= 15


def test_command_of_the_picture_is_valid():
    (command,) = re.findall(r"^`torchrl-marl train (.*)`$", README, re.M)
    recipe, *settings = shlex.split(command)
    assert load_config(recipe, settings).evaluation.gif
    (picture,) = re.findall(r'<img src="([^"]+)"', README)
    assert (ROOT / picture).stat().st_size < 1_000_000


@pytest.mark.parametrize("page", [page for page in PAGES if blocks("console", page)])
def test_documented_messages_equal_actual_ones(page, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    pairs = re.findall(r"^\$ torchrl-marl (.*)\n(.*)\n", "".join(blocks("console", page)), re.M)
    assert pairs
    for command, message in pairs:
        assert cli.main(shlex.split(command)) == 2
        assert capsys.readouterr().err.strip() == message


def test_errors_page_has_messages():
    assert len(re.findall(r"^\$ ", "".join(blocks("console", "docs/errors.md")), re.M)) >= 5


def anchors(text):
    """Headings as GitHub links to them."""
    text = re.sub(r"^```.*?^```", "", text, flags=re.M | re.S)
    headings = re.findall(r"^#+ (.*)$", text, re.M)
    return {re.sub(r"[^\w\- ]", "", heading).lower().replace(" ", "-") for heading in headings}


def links(page):
    text = re.sub(r"^```.*?^```", "", PAGES[page], flags=re.M | re.S)
    found = re.findall(r"\]\(([^)\s]+)\)", text) + re.findall(r'src="([^"]+)"', text)
    return [link for link in found if not link.startswith("https://")]


@pytest.mark.parametrize("page", PAGES)
def test_links_and_anchors_exist(page):
    for link in links(page):
        name, _, anchor = link.partition("#")
        target = (ROOT / page).parent / name if name else ROOT / page
        assert target.exists(), link
        if anchor:
            assert anchor in anchors(target.read_text(encoding="utf-8")), link


def linked_from(page):
    """The pages that a page links to."""
    for link in links(page):
        path = os.path.normpath((ROOT / page).parent / link.partition("#")[0])
        yield os.path.relpath(path, ROOT)


def test_readme_is_short_and_reaches_all_pages():
    assert README.count("\n") <= 110
    reached, left = set(), ["README.md"]
    while left:
        page = left.pop()
        if page in PAGES and page not in reached:
            reached.add(page)
            left += linked_from(page)
    assert set(PAGES) == reached


@pytest.mark.pages
def test_generated_pages_are_up_to_date():
    """If this fails, run ``python docs/generate.py``."""
    spec = importlib.util.spec_from_file_location("generate", ROOT / "docs" / "generate.py")
    generate = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(generate)
    for name, page in generate.PAGES.items():
        assert page() == PAGES[f"docs/{name}"], "run: python docs/generate.py"


def test_every_recipe_is_in_the_table():
    library = "vmas|pettingzoo|jaxmarl|isaaclab|mujoco|mjlab|foraging|external|toy"
    names = re.findall(rf"`((?:{library})_\w+)`", PAGES["docs/recipes.md"])
    assert set(names) == set(recipe_names())


def test_every_metric_is_in_the_glossary(tmp_path):
    settings = {"learner.entropy_coeff": 0.01, "learner.clip_value": True, "evaluation.episodes": 2}
    run = torchrl_marl.train(
        "toy_arena_mappo", total_frames=640, folder=str(tmp_path / "run"), **settings
    )
    with open(run.folder / "metrics.csv") as file:
        columns = {name.rpartition("/")[2] for name in next(csv.reader(file))}
    pages = PAGES["docs/algorithms/mappo.md"], PAGES["docs/algorithms/index.md"]
    tables = "".join(re.findall(r"<!-- metrics: .*?<!-- end -->", "".join(pages), re.S))
    assert columns <= set(re.findall(r"^\| `(\w+)` \|", tables, re.M))


def test_readme_has_the_test_command_of_ci():
    command = README.partition("<!-- test -->")[2].partition("\n```\n")[0].splitlines()[-1]
    assert command.startswith("python3 -m venv") and command.endswith("pytest")
