"""The command line trains, resumes and evaluates."""

import sys
import types
from pathlib import Path

import pytest
import torch

from torchrl_marl.apps.cli import main as cli
from torchrl_marl.apps.console import report
from torchrl_marl.errors import NonFiniteError
from torchrl_marl.recipes import load_config, save_config
from torchrl_marl.training.evaluation import Episodes
from torchrl_marl.training.interruption import Terminated

TOY = "toy_arena_mappo"


@pytest.fixture
def run_folder(tmp_path):
    folder = tmp_path / "run"
    folder.mkdir()
    save_config(load_config(TOY), folder / "config.yaml")
    return folder


@pytest.fixture
def training(monkeypatch, tmp_path):
    """Replaces ``train``, ``resume`` and ``Run.load``, and records their arguments."""
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

        def play(
            episodes, deterministic, seed, record, gif=False, mp4=False, shown=1, randomize=None
        ):
            assert record and shown == 1 and not mp4 and randomize is None
            seen.evaluated.append((episodes, deterministic, gif, seed))
            returns = torch.tensor(([41.0, 43.0] if deterministic else [21.0, 23.0]) * 3)
            return Episodes({"agents": returns}, torch.tensor([5, 7] * 3), {"agents": 3})

        return types.SimpleNamespace(folder=Path(folder), summary=summary, play=play)

    def train(config, env=None, callbacks=()):
        assert not callbacks
        seen.configs.append(config)
        if seen.fail is not None and len(seen.configs) == seen.fail[0]:
            raise seen.fail[1]
        return run_of(config.folder or tmp_path / f"run{config.seed}", config.seed)

    def resume(folder, env=None, config=None, trust=False, callbacks=()):
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
    run = types.SimpleNamespace(load=load)
    monkeypatch.setitem(sys.modules, "torchrl_marl.training.trainer", trainer)
    monkeypatch.setattr("torchrl_marl.training.trainer", trainer, raising=False)
    monkeypatch.setattr("torchrl_marl.apps.cli.evaluating.Run", run)
    monkeypatch.setattr("torchrl_marl.runs.draw", lambda folder: None)
    monkeypatch.setattr(cli, "silence_libraries", silence)
    return seen


class TestTrain:
    def test_train_prints_a_summary(self, training, capsys):
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

    def test_settings_without_recipe_use_the_default(self, training):
        pytest.importorskip("vmas")
        assert cli.main(["train", "seed=4"]) == 0
        assert (training.configs[0].recipe, training.configs[0].seed) == ("vmas_balance_mappo", 4)

    def test_options_between_settings(self, training):
        assert cli.main(["train", TOY, "--seeds", "3", "learner.lr=1e-3"]) == 0
        assert (training.configs[0].seed, training.configs[0].learner.lr) == (3, 1e-3)

    def test_several_seeds_print_a_row_each_and_the_mean(self, training, capsys):
        assert cli.main(["train", TOY, "--seeds", "0,1,5"]) == 0
        assert [config.seed for config in training.configs] == [0, 1, 5]
        _, head, *rows = capsys.readouterr().out.splitlines()
        assert head.split()[0] == "seed"
        assert [row.split()[0] for row in rows] == ["0", "1", "5", "mean"]
        assert [row.split()[2] for row in rows] == ["40", "41", "45", "42"]

    def test_given_folder_gets_one_subfolder_per_seed(self, training, tmp_path):
        assert cli.main(["train", TOY, f"folder={tmp_path}/x", "--seeds", "0,1"]) == 0
        assert [config.folder for config in training.configs] == [
            f"{tmp_path}/x/seed0",
            f"{tmp_path}/x/seed1",
        ]

    def test_invalid_seed_prevents_all_runs(self, training):
        assert cli.main(["train", TOY, "--seeds", "0,4294967296"]) == 2
        assert training.configs == []

    def test_user_error_of_one_seed_does_not_stop_the_others(self, training, capsys):
        training.fail = (2, NonFiniteError("agents/observation is NaN."))
        assert cli.main(["train", TOY, "--seeds", "0,1,5"]) == 2
        assert [config.seed for config in training.configs] == [0, 1, 5]
        out, err = capsys.readouterr()
        assert [row.split()[0] for row in out.splitlines()[2:]] == ["0", "5", "mean"]
        assert err == (
            "torchrl-marl: error: seed 1 failed: agents/observation is NaN.\n"
            "torchrl-marl: error: 1 of 3 seeds failed: 1.\n"
        )

    def test_unexpected_error_prints_traceback_and_others_continue(self, training, capsys):
        training.fail = (1, RuntimeError("out of memory"))
        assert cli.main(["train", TOY, "--seeds", "0,1"]) == 2
        out, err = capsys.readouterr()
        assert "return, after training" in out
        assert "Traceback" in err and "in train" in err
        assert err.endswith("1 of 2 seeds failed: 0.\n")
        training.configs.clear()
        with pytest.raises(RuntimeError):
            cli.main(["train", TOY])

    def test_ctrl_c_stops_all_seeds(self, training, capsys):
        training.fail = (2, KeyboardInterrupt("runs/mine"))
        assert cli.main(["train", TOY, "--seeds", "0,1,2"]) == 130
        assert len(training.configs) == 2

    def test_existing_folders_are_refused_before_the_first_seed(self, training, tmp_path, capsys):
        precious = tmp_path / "x" / "seed1" / "precious.txt"
        precious.parent.mkdir(parents=True)
        precious.write_text("mine")
        assert cli.main(["train", TOY, f"folder={tmp_path}/x", "--seeds", "0,1"]) == 2
        assert training.configs == []
        assert "seed1' exists; choose another folder=..." in capsys.readouterr().err

    def test_ctrl_c_prints_the_resume_command(self, training, capsys):
        training.fail = (1, KeyboardInterrupt("runs/mine"))
        assert cli.main(["train", TOY]) == 130
        line = capsys.readouterr().err.strip()
        assert line == (
            "torchrl-marl: stopped and saved; resume with: torchrl-marl train --resume runs/mine"
        )

    def test_sigterm_prints_the_resume_command(self, training, capsys):
        training.fail = (1, Terminated(Path("runs/mine")))
        assert cli.main(["train", TOY]) == 143
        assert "stopped and saved; resume with: torchrl-marl train --resume runs/mine" in (
            capsys.readouterr().err
        )

    def test_resume(self, training, run_folder, capsys):
        assert cli.main(["train", "--resume", str(run_folder)]) == 0
        assert training.resumed == [run_folder]
        assert training.configs == [load_config(TOY)]
        assert str(run_folder) in capsys.readouterr().out

    def test_resume_accepts_settings_that_may_change(self, training, run_folder):
        more = ["total_frames=128000", "evaluation.gif=true", "stop_at_return=12"]
        assert cli.main(["train", "--resume", str(run_folder), *more]) == 0
        assert training.configs == [load_config(TOY, more)]

    @pytest.mark.parametrize(
        ("setting", "message"),
        [
            ("learner.lr=1", "learner.lr was 0.0005 when this run was made and 1.0 is asked for: "),
            ("seed=3", "seed was 0 when this run was made and 3 is asked for: a resumed run keeps"),
            ("env.max_steps=3", "env.max_steps was 100 when this run was made and 3 is asked for"),
            ("folder=x", "folder was null when this run was made and 'x' is asked for"),
            ("total_frames=1", "total_frames is 1, expected at least frames_per_batch"),
            ("lr=1", "unknown setting 'lr'; did you mean 'learner.lr'?"),
        ],
    )
    def test_resume_refuses_other_settings(self, training, run_folder, setting, message, capsys):
        assert cli.main(["train", "--resume", str(run_folder), setting]) == 2
        assert capsys.readouterr().err.startswith(f"torchrl-marl: error: {message}")
        assert training.resumed == []


class TestEvaluate:
    def test_evaluate_passes_its_arguments(self, training, run_folder, capsys):
        options = ["--episodes", "7", "--stochastic", "--gif", "--device", "cpu", "--seed", "5"]
        assert cli.main(["evaluate", str(run_folder), *options]) == 0
        assert training.loaded == [(run_folder, "cpu")]
        assert training.evaluated == [(7, False, True, 5)]
        head, *lines = capsys.readouterr().out.splitlines()
        assert head.split() == ["sampled", "actions"]
        rows = dict(line.strip().split("  ", 1) for line in lines)
        assert rows["return"].strip() == "22 (21.33 to 22.67)"
        assert rows["least and greatest"].strip() == "21 to 23"
        assert rows["length"].strip() == "6 (5 to 7)"
        assert rows["animation"].strip() == str(run_folder / "episode.gif")

    def test_evaluate_compares_most_likely_and_sampled_actions(self, training, run_folder, capsys):
        assert cli.main(["evaluate", str(run_folder)]) == 0
        assert training.loaded == [(run_folder, None)]
        assert training.evaluated == [(200, True, False, 0), (200, False, False, 0)]
        out = capsys.readouterr().out
        assert out.splitlines()[0].split() == ["most", "likely", "actions", "sampled", "actions"]
        assert out.splitlines()[-1] == (
            "  the most likely actions earn 42 and sampled ones 22 from the same starts, a "
            "significant difference (95 % interval 20 to 20, 20 standard deviations of returns)."
        )
        assert cli.main(["evaluate", str(run_folder), "--deterministic"]) == 0
        assert "sampled" not in capsys.readouterr().out

    def test_trust_requires_the_option(self, training, run_folder):
        for command in (["evaluate"], ["train", "--resume"]):
            assert cli.main([*command, str(run_folder)]) == 0
            assert cli.main([*command, str(run_folder), "--trust"]) == 0
        assert training.trusted == [False, True] * 2

    def test_unknown_device_is_refused(self, training, run_folder, capsys):
        assert cli.main(["evaluate", str(run_folder), "--device", "gpu"]) == 2
        assert "device is 'gpu', expected 'cpu'" in capsys.readouterr().err


def test_mean_over_seeds_does_not_leave_out_a_diverged_one():
    """The mean of 40 and NaN (null in summary.json) is not 40; no run has a heuristic."""
    returns = ({"return_after": 40.0}, {"return_after": None})
    runs = [types.SimpleNamespace(summary=own, folder=Path("run")) for own in returns]
    *_, mean = report(runs, [0, 1]).splitlines()
    assert mean.split() == ["mean", "nan"] and "heuristic" not in report(runs, [0, 1])
