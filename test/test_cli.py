"""The command line: what it prints, where to, and with which exit code."""

import json
import subprocess
import sys
import types
import warnings
from pathlib import Path

import pytest
import yaml

import torchrl_marl
from torchrl_marl import cli, console
from torchrl_marl.errors import NonFiniteError
from torchrl_marl.recipes import load_config, save_config
from torchrl_marl.training.interruption import Terminated

TOY = "toy_arena_mappo"


def call(*arguments, code):
    """Runs the command line in a process of its own, and tells whether it imported torch."""
    program = (
        "import sys; from torchrl_marl.cli import main\n"
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


@pytest.fixture
def run_folder(tmp_path):
    folder = tmp_path / "run"
    folder.mkdir()
    save_config(load_config(TOY), folder / "config.yaml")
    return folder


@pytest.fixture
def training(monkeypatch, tmp_path):
    """Stands in for the training package's doors, and notes what they are asked for."""
    seen = types.SimpleNamespace(
        configs=[], resumed=[], loaded=[], trusted=[], evaluated=[], fail=None
    )

    def run_of(folder, seed):
        summary = {
            "return_before": -9.0,
            "return_after": 40.0 + seed,
            "return_random": -9.25,
            "return_heuristic": None,
            "frames": 640,
            "seconds": 2.0,
            "frames_per_second": 320.0,
        }

        def evaluate(episodes=None, deterministic=None, gif=False, seed=None, record=False):
            assert record
            seen.evaluated.append((episodes, deterministic, gif, seed))
            return {"return_mean": 41.23456, "episodes": 200}

        return types.SimpleNamespace(folder=Path(folder), summary=summary, evaluate=evaluate)

    def train(config, env=None):
        seen.configs.append(config)
        if seen.fail is not None and len(seen.configs) == seen.fail[0]:
            raise seen.fail[1]
        return run_of(config.folder or tmp_path / f"run{config.seed}", config.seed)

    def resume(folder, env=None, config=None, trust=False):
        seen.resumed.append(folder)
        seen.trusted.append(trust)
        seen.configs.append(config)
        return run_of(folder, 0)

    def load(folder, device=None, trust=False):
        seen.loaded.append((folder, device))
        seen.trusted.append(trust)
        return run_of(folder, 0)

    def silence():
        monkeypatch.setenv("RL_LOGGING_LEVEL", "WARNING")

    trainer = types.SimpleNamespace(train=train, resume=resume)
    run = types.SimpleNamespace(Run=types.SimpleNamespace(load=load))
    monkeypatch.setitem(sys.modules, "torchrl_marl.training.trainer", trainer)
    monkeypatch.setattr("torchrl_marl.training.trainer", trainer, raising=False)
    monkeypatch.setitem(sys.modules, "torchrl_marl.training.run", run)
    monkeypatch.setattr("torchrl_marl.runs.draw", lambda folder: None)
    monkeypatch.setattr(cli, "silence_others", silence)
    return seen


class TestHelp:
    @pytest.mark.parametrize("command", [[], ["train"], ["evaluate"], ["plot"], ["list"]])
    def test_help_needs_no_torch(self, command):
        out, errors, torch = call(*command, "--help", code=0)
        assert out.startswith("usage: torchrl-marl")
        assert errors == []
        assert not torch

    def test_help_of_train_shows_every_setting_and_examples(self):
        out, _, _ = call("train", "--help", code=0)
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
            (["train", "toy_arena"], "unknown recipe 'toy_arena'; did you mean 'toy_arena_mappo'?"),
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
            (["train", TOY, "--seeds", "1,1"], "argument --seeds: found '1,1', expected each seed"),
            (["train", TOY, "seed=1", "--seeds", "1,2"], "seed=... and --seeds are both given"),
            (["train", "--resume", "no_run"], "'no_run' is no run folder: it is not there"),
            (["train", TOY, "--resume", "x"], "--resume x goes on by the run's own settings"),
            (["evaluate"], "the following arguments are required: RUN"),
            (["plot", __file__], f"{__file__!r} is no run folder: it is a file"),
            (["evaluate", "no_run"], "'no_run' is no run folder: it is not there"),
            (["evaluate", "a", "b"], "unknown argument 'b'; `torchrl-marl evaluate --help`"),
            (["evaluate", "a", "--episodes", "0"], "argument --episodes: found '0', expected"),
            (["plot", "no_run"], "'no_run' is no run folder: it is not there"),
            (["list", "recipies"], "argument WHAT: found 'recipies'; did you mean 'recipes'?"),
            (["list", "recipes", TOY], f"found '{TOY}' after 'recipes', expected nothing"),
        ],
    )
    def test_one_line_and_code_2(self, arguments, message, capsys):
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
    def test_bad_input_needs_no_torch(self, arguments):
        out, errors, torch = call(*arguments, code=2)
        assert len(errors) == 1
        assert out == ""
        assert not torch

    def test_a_leftover_scenario_argument_needs_no_torch(self):
        pytest.importorskip("vmas")
        _, errors, torch = call("train", "env.kwargs.n_agent=9", code=2)
        assert "has no argument 'n_agent'; did you mean 'n_agents'?" in errors[0]
        assert not torch

    def test_module_is_the_command(self):
        done = subprocess.run(
            [sys.executable, "-m", "torchrl_marl", "trian"], capture_output=True, text=True
        )
        assert done.returncode == 2
        assert done.stderr.startswith("torchrl-marl: error: unknown command 'trian'")


class TestTrain:
    def test_one_run(self, training, capsys):
        assert cli.main(["train", TOY, "seed=2", "learner.lr=1e-3"]) == 0
        (config,) = training.configs
        assert (config.recipe, config.seed, config.learner.lr) == (TOY, 2, 1e-3)
        out = capsys.readouterr().out
        lines = dict(line.strip().split("  ", 1) for line in out.splitlines())
        lines = {name: text.strip() for name, text in lines.items()}
        assert lines["return, before training"] == "-9"
        assert lines["return, after training"] == "42"
        assert lines["return, random policy"] == "-9.25"
        assert "return, VMAS heuristic" not in lines
        assert lines["frames"] == "640 in 2 s (320 frames/s)"
        assert lines["run folder"].endswith("run2")

    def test_settings_need_no_recipe(self, training):
        pytest.importorskip("vmas")
        assert cli.main(["train", "seed=4"]) == 0
        assert (training.configs[0].recipe, training.configs[0].seed) == ("vmas_balance_mappo", 4)

    def test_options_may_stand_between_settings(self, training):
        assert cli.main(["train", TOY, "--seeds", "3", "learner.lr=1e-3"]) == 0
        assert (training.configs[0].seed, training.configs[0].learner.lr) == (3, 1e-3)

    def test_several_seeds_are_a_row_each_and_a_mean(self, training, capsys):
        assert cli.main(["train", TOY, "--seeds", "0,1,5"]) == 0
        assert [config.seed for config in training.configs] == [0, 1, 5]
        _, head, *rows = capsys.readouterr().out.splitlines()
        assert head.split()[0] == "seed"
        assert [row.split()[0] for row in rows] == ["0", "1", "5", "mean"]
        assert [row.split()[2] for row in rows] == ["40", "41", "45", "42"]

    def test_a_named_folder_holds_a_folder_a_seed(self, training, tmp_path):
        assert cli.main(["train", TOY, f"folder={tmp_path}/x", "--seeds", "0,1"]) == 0
        assert [config.folder for config in training.configs] == [
            f"{tmp_path}/x/seed0",
            f"{tmp_path}/x/seed1",
        ]

    def test_nothing_runs_if_one_setting_is_wrong(self, training):
        assert cli.main(["train", TOY, "--seeds", "0,4294967296"]) == 2
        assert training.configs == []

    def test_after_a_failure_the_other_seeds_go_on(self, training, capsys):
        training.fail = (2, NonFiniteError("agents/observation is NaN."))
        assert cli.main(["train", TOY, "--seeds", "0,1,5"]) == 2
        assert [config.seed for config in training.configs] == [0, 1, 5]
        out, err = capsys.readouterr()
        assert [row.split()[0] for row in out.splitlines()[2:]] == ["0", "5", "mean"]
        assert err == (
            "torchrl-marl: error: seed 1 failed: agents/observation is NaN.\n"
            "torchrl-marl: error: 1 of 3 seeds failed: 1.\n"
        )

    def test_an_error_of_the_program_shows_where_and_the_others_go_on(self, training, capsys):
        training.fail = (1, RuntimeError("out of memory"))
        assert cli.main(["train", TOY, "--seeds", "0,1"]) == 2
        out, err = capsys.readouterr()
        assert "return, after training" in out
        assert "Traceback" in err and "in train" in err
        assert err.endswith("1 of 2 seeds failed: 0.\n")
        training.configs.clear()
        with pytest.raises(RuntimeError):
            cli.main(["train", TOY])

    def test_ctrl_c_ends_all_seeds(self, training, capsys):
        training.fail = (2, KeyboardInterrupt("runs/mine"))
        assert cli.main(["train", TOY, "--seeds", "0,1,2"]) == 130
        assert len(training.configs) == 2

    def test_all_folders_are_looked_at_before_the_first_seed_trains(
        self, training, tmp_path, capsys
    ):
        precious = tmp_path / "x" / "seed1" / "precious.txt"
        precious.parent.mkdir(parents=True)
        precious.write_text("mine")
        assert cli.main(["train", TOY, f"folder={tmp_path}/x", "--seeds", "0,1"]) == 2
        assert training.configs == []
        assert "seed1' exists; choose another folder=..." in capsys.readouterr().err

    def test_ctrl_c_says_how_to_go_on(self, training, capsys):
        training.fail = (1, KeyboardInterrupt("runs/mine"))
        assert cli.main(["train", TOY]) == 130
        line = capsys.readouterr().err.strip()
        assert line == (
            "torchrl-marl: stopped and saved; go on with: torchrl-marl train --resume runs/mine"
        )

    def test_sigterm_says_how_to_go_on(self, training, capsys):
        training.fail = (1, Terminated(Path("runs/mine")))
        assert cli.main(["train", TOY]) == 143
        assert "stopped and saved; go on with: torchrl-marl train --resume runs/mine" in (
            capsys.readouterr().err
        )

    def test_resume(self, training, run_folder, capsys):
        assert cli.main(["train", "--resume", str(run_folder)]) == 0
        assert training.resumed == [run_folder]
        assert training.configs == [load_config(TOY)]
        assert str(run_folder) in capsys.readouterr().out

    def test_resume_takes_what_may_change(self, training, run_folder):
        more = ["total_frames=128000", "evaluation.gif=true", "stop_at_return=12"]
        assert cli.main(["train", "--resume", str(run_folder), *more]) == 0
        assert training.configs == [load_config(TOY, more)]

    @pytest.mark.parametrize(
        ("setting", "message"),
        [
            ("learner.lr=1", "learner.lr is 1.0, but the run has 0.0005, which stays; resuming"),
            ("seed=3", "seed is 3, but the run has 0, which stays"),
            ("env.max_steps=3", "env.max_steps is 3, but the run has"),
            ("folder=x", "folder is 'x', but the run has null"),
            ("total_frames=1", "total_frames is 1, expected at least frames_per_batch"),
            ("lr=1", "unknown setting 'lr'; did you mean 'learner.lr'?"),
        ],
    )
    def test_resume_refuses_the_rest(self, training, run_folder, setting, message, capsys):
        assert cli.main(["train", "--resume", str(run_folder), setting]) == 2
        assert capsys.readouterr().err.startswith(f"torchrl-marl: error: {message}")
        assert training.resumed == []


class TestEvaluate:
    def test_arguments_are_handed_on(self, training, run_folder, capsys):
        options = ["--episodes", "7", "--stochastic", "--gif", "--device", "cpu", "--seed", "5"]
        assert cli.main(["evaluate", str(run_folder), *options]) == 0
        assert training.loaded == [(run_folder, "cpu")]
        assert training.evaluated == [(7, False, True, 5)]
        lines = [line.split() for line in capsys.readouterr().out.splitlines()]
        gif = str(run_folder / "episode.gif")
        assert lines == [["return_mean", "41.23"], ["episodes", "200"], ["animation", gif]]

    def test_trust_is_given_by_word_only(self, training, run_folder):
        for command in (["evaluate"], ["train", "--resume"]):
            assert cli.main([*command, str(run_folder)]) == 0
            assert cli.main([*command, str(run_folder), "--trust"]) == 0
        assert training.trusted == [False, True] * 2

    def test_defaults_are_the_runs(self, training, run_folder):
        assert cli.main(["evaluate", str(run_folder)]) == 0
        assert training.loaded == [(run_folder, None)]
        assert training.evaluated == [(None, None, False, None)]

    def test_a_device_that_is_none(self, training, run_folder, capsys):
        assert cli.main(["evaluate", str(run_folder), "--device", "gpu"]) == 2
        assert "device is 'gpu', expected 'cpu'" in capsys.readouterr().err


class TestList:
    def test_one_long_value_does_not_push_all_meanings_away(self, capsys):
        assert cli.main(["list", "settings", "vmas_navigation_mappo"]) == 0
        (line,) = [x for x in capsys.readouterr().out.splitlines() if x.startswith("  seed ")]
        assert len(line) < 120

    def test_everything(self):
        out, errors, torch = call("list", code=0)
        assert "recipes:" in out and "scenarios:" in out and "algorithms:" in out
        assert "toy_arena_mappo" in out and "matrix_game" in out and "ippo" in out
        assert errors == []
        assert not torch

    def test_scenarios_name_the_extra_that_is_missing(self, capsys, monkeypatch):
        monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
        assert cli.main(["list", "scenarios"]) == 0
        out = capsys.readouterr().out
        assert "pip install 'torchrl_marl[vmas]'" in out
        assert "arena" in out

    def test_settings_of_a_recipe(self, capsys):
        assert cli.main(["list", "settings", TOY]) == 0
        lines = capsys.readouterr().out.splitlines()
        assert lines[0].endswith(f"{TOY}:")
        assert ["env.name", "arena"] in [line.split()[:2] for line in lines]

    def test_settings_say_what_each_word_means(self, capsys):
        assert cli.main(["list", "settings", TOY]) == 0
        assert "    trunk: hidden layers for all agents, a last layer for each" in (
            capsys.readouterr().out
        )

    def test_settings_as_markdown(self, capsys):
        assert cli.main(["list", "settings", "--markdown"]) == 0
        lines = capsys.readouterr().out.splitlines()
        assert lines[:2] == ["| setting | default | meaning |", "|---|---|---|"]
        assert "| `learner.gamma` | `0.99` | Discount. |" in lines
        assert len(lines) == 2 + len(torchrl_marl.recipes.explain())
        assert cli.main(["list", "recipes", "--markdown"]) == 2

    def test_the_schema_of_recipes_takes_every_recipe(self, capsys):
        validator = pytest.importorskip("jsonschema").Draft202012Validator
        assert cli.main(["list", "schema"]) == 0
        valid = validator(json.loads(capsys.readouterr().out)).is_valid
        for name in torchrl_marl.recipes.recipe_names():
            path = Path(torchrl_marl.__file__).parent / "configs" / f"{name}.yaml"
            assert valid(yaml.safe_load(path.read_text())), name
        assert valid({"learner": {"lr": 0.1}})
        assert not valid({"learner": {"algorithm": "random", "lr": 0.1}})
        assert not valid({"learner": {"actor": {"sharing": "trunc"}}})


class TestNoise:
    def test_only_own_warnings_are_shown_in_one_line(self, capsys, monkeypatch):
        monkeypatch.setattr(sys, "warnoptions", [])
        monkeypatch.delitem(sys.modules, "tqdm", raising=False)
        monkeypatch.setenv("RL_LOGGING_LEVEL", "WARNING")
        monkeypatch.setenv("TORCH_CPP_LOG_LEVEL", "ERROR")
        source = "import warnings\ndef warn(level): warnings.warn('two\\nlines', stacklevel=level)"
        ours, theirs = {}, {}
        exec(compile(source, str(Path(cli.__file__).parent / "envs" / "x.py"), "exec"), ours)
        exec(compile(source, "elsewhere.py", "exec"), theirs)
        with warnings.catch_warnings():
            shown = warnings.showwarning
            try:
                console.silence_others()
                theirs["warn"](1)
                theirs["warn"](2)
                ours["warn"](1)
                ours["warn"](2)  # names this file, and is ours all the same
            finally:
                warnings.showwarning = shown
        assert capsys.readouterr().err == "torchrl-marl: warning: two lines\n" * 2

    def test_torchrl_says_nothing(self):
        program = (
            "from torchrl_marl.console import silence_others; silence_others()\n"
            "from torchrl.envs.utils import check_env_specs\n"
            "from torchrl.envs.custom import PendulumEnv as Env\n"
            "check_env_specs(Env())"
        )
        done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
        assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_a_cache_of_compiled_code_that_cannot_be_written_is_named(monkeypatch, tmp_path):
    (tmp_path / "file").write_text("no folder")
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "file" / "cache"))
    command = ("train", TOY, f"folder={tmp_path / 'run'}")
    _, (error,), imported = call(*command, code=2)
    assert "TORCHINDUCTOR_CACHE_DIR is" in error and "set it to a folder that can" in error
    assert not imported and not (tmp_path / "run").exists()
