"""The command line: its output, error messages and exit status."""

import json
import re
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import yaml

import torchrl_marl
import torchrl_marl.recipes
from torchrl_marl.apps import console
from torchrl_marl.apps.cli import main as cli
from torchrl_marl.apps.cli.arguments import COMMANDS
from torchrl_marl.errors import ConfigError
from torchrl_marl.learners.algorithms import ALGORITHMS
from torchrl_marl.learners.capabilities import check_members
from torchrl_marl.modules.config import AnyMixerConfig
from torchrl_marl.training.config import TrainConfig
from torchrl_marl.training.origin import check_unchanged

TOY = "toy_arena_mappo"


def call(*arguments, code):
    """Runs the command line in a subprocess; also returns whether it imported torch."""
    program = (
        "import sys; from torchrl_marl.apps.cli.main import main\n"
        "try: code = main(sys.argv[1:])\n"
        "except SystemExit as stop: code = stop.code or 0\n"
        "print('torch' in sys.modules, file=sys.stderr)\n"
        "sys.exit(code)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, *arguments], capture_output=True, text=True, timeout=60
    )
    *errors, torch = done.stderr.splitlines()
    assert done.returncode == code, done.stderr
    return done.stdout, errors, torch == "True"


class TestHelp:
    @pytest.mark.parametrize("command", ["", *COMMANDS])
    def test_help_does_not_import_torch(self, command):
        out, errors, torch = call(*command.split(), "--help", code=0)
        assert out.startswith("usage: torchrl-marl")
        assert errors == [] and "%%" not in out
        assert not torch

    def test_help_of_train_names_algorithms_that_support_together(self):
        text = " ".join(call("train", "--help", code=0)[0].split())
        (without,) = re.findall(r"--together train .*?\(all algorithms but (.*?)\)", text)
        alone = []
        for name in ALGORITHMS.words().keys() - {"random"}:
            try:
                check_members(ALGORITHMS.schema(name)(algorithm=name))
            except ConfigError:
                alone.append(name)
        check_members(ALGORITHMS.schema("maddpg")("maddpg", mixer=AnyMixerConfig("sum")))  # FACMAC
        assert (
            set(re.split(r", | and ", without.lower()))
            == {*alone}
            == {"happo", "haddpg", "hatd3", "hasac"}
        )
        page = Path(__file__).parents[2] / "docs" / "supported.md"
        assert f"their evolution: all algorithms but {without}." in page.read_text(encoding="utf-8")

    def test_help_of_train_names_settings_that_resume_may_change(self):
        """The list equals the one in the error for other settings."""
        text = " ".join(call("train", "--help", code=0)[0].split())
        (free,) = re.findall(r"new values are allowed for: (.*?) --trust", text)
        path = Path("config.yaml")
        with pytest.raises(ConfigError, match="a resumed run keeps") as refused:
            check_unchanged(TrainConfig(), TrainConfig(seed=1), TrainConfig(seed=1), path)
        (named,) = re.findall(r"keeps its settings, except (.*?); start", str(refused.value))
        assert free == named

    def test_help_of_train_shows_every_setting_and_examples(self):
        out, _, _ = call("train", "--help-all", code=0)
        for setting in torchrl_marl.recipes.explain():
            assert f"  {setting.key} " in out
            assert setting.help in out
        assert "torchrl-marl train --resume" in out

    def test_version(self):
        out, errors, torch = call("--version", code=0)
        assert out.startswith(f"torchrl-marl {torchrl_marl.__version__} (torchrl 0.14")
        assert errors == []
        assert not torch

    def test_no_command_shows_help_and_fails(self, capsys):
        assert cli.main([]) == 2
        assert capsys.readouterr().err.startswith("usage: torchrl-marl")


class TestBadInput:
    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            (["trian"], "unknown command 'trian'; did you mean 'train'?"),
            (["--foo"], "unknown argument '--foo'; `torchrl-marl --help`"),
            (
                ["train", "toy_arena_mapo"],
                "unknown recipe 'toy_arena_mapo'; did you mean 'toy_arena_mappo'?",
            ),
            (["train", TOY, "lr=1"], "unknown setting 'lr'; did you mean 'learner.lr'?"),
            (["train", TOY, "learner.lr=x"], "learner.lr is 'x', expected a number"),
            (["train", TOY, "learner.gamma=2"], "learner.gamma is 2.0, expected from 0 to 1"),
            (
                ["train", TOY, "--episodes", "3"],
                "unknown argument '--episodes'; `torchrl-marl train",
            ),
            (["train", TOY, "--seed", "1"], "unknown argument '--seed'; did you mean 'seed=1'? "),
            (["train", "--seed=1"], "unknown argument '--seed=1'; did you mean 'seed=1'? "),
            (["train", TOY, "--seeds", "0,x"], "argument --seeds: found '0,x', expected numbers"),
            (["tune", TOY, "--out", ""], "argument --out: found an empty path, expected a name"),
            (["train", TOY, "--seeds", "1,1"], "argument --seeds: found '1,1', expected each seed"),
            (["train", TOY, "seed=1", "--seeds", "1,2"], "seed=... and --seeds are both given"),
            (["train", "--resume", "no_run"], "'no_run' is not a run folder: it does not exist"),
            (["train", TOY, "--resume", "x"], f"{TOY} is given with --resume x, which uses"),
            (["evaluate"], "the following arguments are required: RUN"),
            (["plot", __file__], f"{__file__!r} is not a run folder: it is a file"),
            (["evaluate", "no_run"], "'no_run' is not a run folder: it does not exist"),
            (["evaluate", "a", "b"], "unknown argument 'b'; `torchrl-marl evaluate --help`"),
            (["evaluate", "a", "--episodes", "0"], "argument --episodes: found '0', expected"),
            (["plot", "no_run"], "'no_run' is not a run folder: it does not exist"),
            (["list", "recipies"], "argument WHAT: found 'recipies'; did you mean 'recipes'?"),
            (["list", "recipes", TOY], f"found '{TOY}' after 'recipes', expected nothing"),
        ],
    )
    def test_invalid_input_prints_one_line_and_exits_with_2(self, arguments, message, capsys):
        assert cli.main(arguments) == 2
        out, err = capsys.readouterr()
        assert out == ""
        assert err.startswith(f"torchrl-marl: error: {message}")
        assert err.count("\n") == 1

    @pytest.mark.parametrize(
        "arguments",
        [
            ["trian"],
            ["train", "blance"],
            ["train", TOY, "learner.lrr=1"],
            ["evaluate", "no_run"],
        ],
    )
    def test_invalid_input_does_not_import_torch(self, arguments):
        out, errors, torch = call(*arguments, code=2)
        assert len(errors) == 1
        assert out == ""
        assert not torch

    def test_unknown_scenario_argument_does_not_import_torch(self):
        pytest.importorskip("vmas")
        _, errors, torch = call("train", "env.kwargs.n_agent=9", code=2)
        assert "has no argument 'n_agent'; did you mean 'n_agents'?" in errors[0]
        assert not torch

    def test_python_m_runs_the_command_line(self):
        done = subprocess.run(
            [sys.executable, "-m", "torchrl_marl", "trian"], capture_output=True, text=True
        )
        assert done.returncode == 2
        assert done.stderr.startswith("torchrl-marl: error: unknown command 'trian'")


class TestList:
    def test_long_values_do_not_widen_the_list_of_settings(self, capsys):
        assert cli.main(["list", "settings", "vmas_navigation_mappo"]) == 0
        (line,) = [x for x in capsys.readouterr().out.splitlines() if x.startswith("  seed ")]
        assert len(line) < 120

    def test_list_without_argument_shows_all_kinds(self):
        out, errors, torch = call("list", code=0)
        assert "recipes:" in out and "scenarios:" in out and "algorithms:" in out
        assert "toy_arena_mappo" in out and "matrix_game" in out and "ippo" in out
        assert errors == []
        assert not torch

    def test_list_scenarios_names_the_missing_extra(self, capsys, monkeypatch):
        monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
        assert cli.main(["list", "scenarios"]) == 0
        out = capsys.readouterr().out
        assert "pip install '.[vmas]'" in out
        assert "arena" in out

    def test_list_settings_of_a_recipe(self, capsys):
        assert cli.main(["list", "settings", TOY]) == 0
        lines = capsys.readouterr().out.splitlines()
        assert lines[0].endswith(f"{TOY}:")
        assert ["env.name", "arena"] in [line.split()[:2] for line in lines]

    def test_list_settings_explains_choices(self, capsys):
        assert cli.main(["list", "settings", TOY]) == 0
        assert "    trunk: shared hidden layers, a last layer for each agent" in (
            capsys.readouterr().out
        )

    def test_list_settings_as_markdown(self, capsys):
        assert cli.main(["list", "settings", "--markdown"]) == 0
        lines = capsys.readouterr().out.splitlines()
        assert lines[:2] == ["| setting | default | meaning |", "|---|---|---|"]
        assert "| `learner.gamma` | `0.99` | Discount factor. |" in lines
        assert len(lines) == 2 + len(torchrl_marl.recipes.explain())
        assert cli.main(["list", "recipes", "--markdown"]) == 2

    def test_json_schema_accepts_every_recipe(self, capsys):
        validator = pytest.importorskip("jsonschema").Draft202012Validator
        assert cli.main(["list", "schema"]) == 0
        valid = validator(json.loads(capsys.readouterr().out)).is_valid
        for name in torchrl_marl.recipes.recipe_names():
            path = Path(torchrl_marl.__file__).parent / "configs" / f"{name}.yaml"
            assert valid(yaml.safe_load(path.read_text())), name
        assert valid({"learner": {"lr": 0.1}})
        assert not valid({"learner": {"algorithm": "random", "lr": 0.1}})
        assert not valid({"learner": {"actor": {"sharing": "trunc"}}})


@pytest.mark.runs
class TestNoise:
    def test_only_warnings_of_the_package_are_shown_in_one_line(self, capsys, monkeypatch):
        monkeypatch.setattr(sys, "warnoptions", [])
        monkeypatch.delitem(sys.modules, "tqdm", raising=False)
        monkeypatch.setenv("RL_LOGGING_LEVEL", "WARNING")
        monkeypatch.setenv("TORCH_CPP_LOG_LEVEL", "ERROR")
        source = "import warnings\ndef warn(level): warnings.warn('two\\nlines', stacklevel=level)"
        ours, theirs = {}, {}
        path = Path(torchrl_marl.__file__).parent / "envs" / "x.py"
        exec(compile(source, str(path), "exec"), ours)
        exec(compile(source, "elsewhere.py", "exec"), theirs)
        with warnings.catch_warnings():
            shown = warnings.showwarning
            try:
                console.silence_libraries()
                theirs["warn"](1)
                theirs["warn"](2)
                ours["warn"](1)
                ours["warn"](2)  # attributed to this file, but raised by the package
            finally:
                warnings.showwarning = shown
        assert capsys.readouterr().err == "torchrl-marl: warning: two lines\n" * 2

    def test_torchrl_output_is_silenced(self):
        program = (
            "from torchrl_marl.apps.console import silence_libraries; silence_libraries()\n"
            "from torchrl.envs.utils import check_env_specs\n"
            "from torchrl.envs.custom import PendulumEnv as Env\n"
            "check_env_specs(Env())"
        )
        done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
        assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_unwritable_inductor_cache_is_refused(monkeypatch, tmp_path):
    (tmp_path / "file").write_text("no folder")
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "file" / "cache"))
    command = ("train", TOY, f"folder={tmp_path / 'run'}")
    _, (error,), imported = call(*command, code=2)
    assert "TORCHINDUCTOR_CACHE_DIR is" in error and "set it to a writable folder" in error
    assert not imported and not (tmp_path / "run").exists()
