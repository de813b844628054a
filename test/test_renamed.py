"""Old names of settings and modules are accepted with a warning."""

import importlib.util
import subprocess
import sys
import warnings

import pytest

from torchrl_marl._lazy import MOVED
from torchrl_marl.apps.cli import main as cli
from torchrl_marl.envs import make_env
from torchrl_marl.errors import ConfigError
from torchrl_marl.recipes import load_config
from torchrl_marl.training.config import read_run_config

TOY = "toy_arena_mappo"
TOLD = r"env\.n_envs was renamed to env\.num_envs"


@pytest.mark.parametrize("override", [["env.n_envs=32"], {"env": {"n_envs": 32}}])
def test_n_envs_override_warns_and_sets_num_envs(override):
    with pytest.warns(FutureWarning, match=TOLD):
        config = load_config(TOY, override)
    assert config.env.num_envs == 32
    assert config == load_config(TOY, {"env.num_envs": 32})


def test_old_recipe_file_with_n_envs_warns(tmp_path):
    path = tmp_path / "mine.yaml"
    path.write_text("env:\n  library: toy\n  name: arena\n  n_envs: 16\n  state: null\n")
    with pytest.warns(FutureWarning, match=TOLD):
        assert (
            load_config(
                path, {"frames_per_batch": 160, "total_frames": 160, "learner.minibatch_size": 80}
            ).env.num_envs
            == 16
        )


def test_saved_config_with_n_envs_does_not_warn(tmp_path):
    (tmp_path / "config.yaml").write_text("env: {library: toy, name: arena, n_envs: 16}\n")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert read_run_config(tmp_path).env.num_envs == 16


def test_old_and_new_name_together_raise():
    with pytest.raises(ConfigError, match=r"env\.n_envs and env\.num_envs are both given"):
        load_config(TOY, ["env.n_envs=32", "env.num_envs=16"])


def test_make_env_accepts_n_envs_with_a_warning():
    with pytest.warns(FutureWarning, match="n_envs was renamed to num_envs"):
        assert make_env("toy/two_step_game", n_envs=3, seed=0).batch_size == (3,)
    with pytest.raises(ConfigError, match="n_envs and num_envs are the same setting"):
        make_env("toy/two_step_game", n_envs=3, num_envs=3)


def test_command_line_reports_both_names_in_one_line(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert cli.main(["train", TOY, "env.n_envs=32", "env.num_envs=16"]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert "use only env.num_envs" in error


@pytest.mark.parametrize("former", sorted(MOVED))
def test_moved_modules_exist(former):
    assert importlib.util.find_spec(f"torchrl_marl.{MOVED[former]}") is not None


def test_old_module_name_imports_the_same_module():
    code = """
import warnings
with warnings.catch_warnings(record=True) as said:
    warnings.simplefilter("always")
    from torchrl_marl.export.player import Player
    import torchrl_marl.plotting as plotting
from torchrl_marl.apps.export import Player as now
from torchrl_marl.apps import plotting as same
assert Player is now and plotting is same and plotting.__name__ == "torchrl_marl.apps.plotting"
print({str(one.message) for one in said if one.category is FutureWarning})
"""
    command = [sys.executable, "-c", code]
    shown = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert "torchrl_marl.plotting moved to torchrl_marl.apps.plotting" in shown
    assert "torchrl_marl.export moved to torchrl_marl.apps.export" in shown


@pytest.mark.parametrize(
    "package, name",
    [
        ("collectors", "ExternalCollector"),
        ("collectors", "SplitPolicy"),
        ("envs", "ExternalEnv"),
        ("learners", "TreeSampler"),
        ("modules", "RoutedSequential"),
    ],
)
def test_moved_name_is_importable_with_a_warning(package, name):
    found = importlib.import_module(f"torchrl_marl.{package}")
    with pytest.warns(
        FutureWarning, match=rf"{package}\.{name} moved to torchrl_marl\.(apps|contrib)\."
    ):
        assert getattr(found, name).__name__ == name
