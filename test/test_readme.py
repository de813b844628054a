"""What the README promises: its Python runs, its commands are known, its messages are true."""

import ast
import re
import shlex
from pathlib import Path

import pytest

from torchrl_marl import cli
from torchrl_marl.recipes import load_config, recipe_names

pytest.importorskip("vmas")
from vmas.scenarios import balance  # noqa: E402

README = (Path(__file__).parents[1] / "README.md").read_text(encoding="utf-8")


def blocks(language):
    return re.findall(rf"^```{language}\n(.*?)^```", README, re.M | re.S)


def commands():
    lines = [
        line.partition("#")[0].strip() for block in blocks("bash") for line in block.split("\n")
    ]
    return [shlex.split(line)[1:] for line in lines if line.startswith("torchrl-marl ")]


def comments_of_prints(program):
    """What stands behind each ``print(...)``, in their order."""
    lines = program.splitlines()
    return [
        lines[node.end_lineno - 1].partition("#")[2].strip()
        for node in ast.parse(program).body
        if isinstance(node, ast.Expr) and ast.unparse(node).startswith("print(")
    ]


def assert_as_said(printed, comment):
    """Shapes such as ``[64, 10]`` in a comment are those that are printed."""
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


def test_shapes_in_comments_are_read():
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


@pytest.mark.parametrize("i", range(len(blocks("python"))))
def test_python_runs(i, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    program = re.sub(r"total_frames=\d+_000", "total_frames=9_600", blocks("python")[i])
    assert len(blocks("python")[0].splitlines()) < 15
    printed = []

    def record(*values):
        printed.append(" ".join(map(str, values)))

    names = {"__name__": "readme", "print": record}
    exec(compile(program, f"README.md, example {i}", "exec"), names)
    comments = comments_of_prints(program)
    assert len(printed) == len(comments) > 0
    for text, comment in zip(printed, comments):
        assert_as_said(text, comment)
    capsys.readouterr()
    if "torchrl_marl.train(" in program:
        (run,) = (tmp_path / "runs").iterdir()
        assert (run / "summary.json").is_file()


def test_commands_are_known(tmp_path, monkeypatch):
    scenario = tmp_path / "path" / "to" / "scenario.py"
    scenario.parent.mkdir(parents=True)
    scenario.write_text(Path(balance.__file__).read_text())
    (reach,) = (block for block in blocks("python") if "class Reach" in block)
    (tmp_path / "reach.py").write_text(reach.partition("\nenv = ")[0])
    monkeypatch.chdir(tmp_path)
    assert len(commands()) >= 8
    for command, *rest in commands():
        parsed, more = cli.make_parser().parse_known_args([command, *rest])
        assert parsed.command == command
        settings = [text for text in [*getattr(parsed, "settings", []), *more] if "=" in text]
        recipes = [text for text in getattr(parsed, "settings", []) if "=" not in text]
        if command == "train":
            load_config(recipes[0] if recipes else "vmas_balance_mappo", settings)


def test_every_recipe_is_in_the_table():
    table = README.partition("## Recipes")[2].partition("\n## ")[0]
    library = "vmas|pettingzoo|jaxmarl|isaaclab|toy"
    assert set(re.findall(rf"`((?:{library})_\w+)`", table)) == set(recipe_names())


def test_messages_are_those_that_are_given(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (block,) = blocks("console")
    pairs = re.findall(r"^\$ torchrl-marl (.*)\n(.*)\n", block, re.M)
    assert len(pairs) >= 5
    for command, message in pairs:
        assert cli.main(shlex.split(command)) == 2
        assert capsys.readouterr().err.strip() == message


def test_ci_finds_its_command():
    command = README.partition("<!-- test -->")[2].partition("\n```\n")[0].splitlines()[-1]
    assert command.startswith("python3 -m venv") and command.endswith("pytest")
