"""Shell completion, and the help of ``train``."""

import os
import subprocess
import sys

import pytest

from torchrl_marl.apps.cli.main import main
from torchrl_marl.apps.cli.train_help import _COMMON_SETTINGS
from torchrl_marl.recipes import explain

CLI = "from torchrl_marl.apps.cli.main import main; main()"


def completed(line, tmp_path, **environment):
    """Returns the exit code and the completions of a line."""
    answer = tmp_path / "answer"
    own = {"_ARGCOMPLETE": "1", "_ARGCOMPLETE_IFS": "\n", "COMP_TYPE": "9"}
    own |= {"COMP_LINE": line, "COMP_POINT": str(len(line))}
    own |= {"_ARGCOMPLETE_STDOUT_FILENAME": str(answer)}
    done = subprocess.run([sys.executable, "-c", CLI], env=os.environ | own | environment)
    text = answer.read_text(encoding="utf-8") if answer.exists() else ""
    return done.returncode, {word.strip() for word in text.split("\n") if word.strip()}


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("torchrl-marl sw", {"sweep"}),
        ("torchrl-marl train toy_matrix_game_m", {"toy_matrix_game_mappo"}),
        ("torchrl-marl train learner.lr_m", {"learner.lr_min=", "learner.lr_max="}),
        ("torchrl-marl sweep learner.lr_schedule=k", {"learner.lr_schedule=kl"}),
        ("torchrl-marl evaluate run env.num", {"env.num_envs="}),
        ("torchrl-marl evaluate run toy_matrix_game_m", set()),
        ("torchrl-marl suite toy alg", {"algorithms="}),
    ],
)
def test_completions_of_a_line(line, expected, tmp_path):
    pytest.importorskip("argcomplete")
    code, words = completed(line, tmp_path)
    assert code == 0 and words == expected


def test_no_completions_without_argcomplete(tmp_path):
    (tmp_path / "argcomplete.py").write_text("raise ImportError", encoding="utf-8")
    code, words = completed("torchrl-marl sw", tmp_path, PYTHONPATH=str(tmp_path))
    assert code == 1 and not words


def test_help_of_train_summarizes_rare_settings(capsys):
    texts = []
    for option in ("--help", "--help-all"):
        with pytest.raises(SystemExit):
            main(["train", option])
        texts.append(capsys.readouterr().out)
    keys = [setting.key for setting in explain()]
    assert set(_COMMON_SETTINGS) <= set(keys)
    assert len(texts[0].splitlines()) < 80
    assert "league.* (11)" in texts[0] and "league.slots" not in texts[0]
    for key in keys:
        assert f"  {key} " in texts[1]
    assert "More settings" not in texts[1]
