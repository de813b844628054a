"""What the README promises: its Python runs, its commands are known, its messages are true."""

import re
import shlex
from pathlib import Path

import pytest

from torchrl_marl import cli
from torchrl_marl.config import load_config, recipe_names

pytest.importorskip("vmas")

README = (Path(__file__).parents[1] / "README.md").read_text(encoding="utf-8")


def blocks(language):
    return re.findall(rf"^```{language}\n(.*?)^```", README, re.M | re.S)


def commands():
    lines = [
        line.partition("#")[0].strip() for block in blocks("bash") for line in block.split("\n")
    ]
    return [shlex.split(line)[1:] for line in lines if line.startswith("torchrl-marl ")]


@pytest.mark.parametrize("i", range(len(blocks("python"))))
def test_python_runs(i, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    program = re.sub(r"total_frames=\d+_000", "total_frames=9_600", blocks("python")[i])
    assert len(blocks("python")[0].splitlines()) < 15
    exec(compile(program, f"README.md, example {i}", "exec"), {"__name__": "readme"})
    assert capsys.readouterr().out
    if "torchrl_marl.train(" in program:
        (run,) = (tmp_path / "runs").iterdir()
        assert (run / "summary.json").is_file()


def test_commands_are_known():
    assert len(commands()) >= 8
    for command, *rest in commands():
        parsed, more = cli._parser().parse_known_args([command, *rest])
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
