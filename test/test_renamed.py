"""Old names of settings are understood, and told."""

import warnings

import pytest

from torchrl_marl import cli
from torchrl_marl.envs import make_env
from torchrl_marl.errors import ConfigError
from torchrl_marl.recipes import load_config
from torchrl_marl.training.config import read_run_config

TOY = "toy_arena_mappo"
TOLD = r"env\.n_envs is called env\.num_envs now"


@pytest.mark.parametrize("override", [["env.n_envs=32"], {"env": {"n_envs": 32}}])
def test_num_envs_was_n_envs(override):
    with pytest.warns(FutureWarning, match=TOLD):
        config = load_config(TOY, override)
    assert config.env.num_envs == 32
    assert config == load_config(TOY, {"env.num_envs": 32})


def test_a_recipe_of_the_version_before(tmp_path):
    path = tmp_path / "mine.yaml"
    path.write_text("env:\n  library: toy\n  name: arena\n  n_envs: 16\n  state: null\n")
    with pytest.warns(FutureWarning, match=TOLD):
        assert (
            load_config(
                path, {"frames_per_batch": 160, "total_frames": 160, "learner.minibatch_size": 80}
            ).env.num_envs
            == 16
        )


def test_what_a_program_wrote_is_taken_without_a_word(tmp_path):
    (tmp_path / "config.yaml").write_text("env: {library: toy, name: arena, n_envs: 16}\n")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert read_run_config(tmp_path).env.num_envs == 16


def test_both_names_are_refused():
    with pytest.raises(ConfigError, match=r"env\.n_envs and env\.num_envs are both given"):
        load_config(TOY, ["env.n_envs=32", "env.num_envs=16"])


def test_make_env_takes_the_old_word():
    with pytest.warns(FutureWarning, match="n_envs is called num_envs now"):
        assert make_env("toy/two_step_game", n_envs=3, seed=0).batch_size == (3,)
    with pytest.raises(ConfigError, match="n_envs and num_envs are both given"):
        make_env("toy/two_step_game", n_envs=3, num_envs=3)


def test_the_command_line_says_it_in_a_line(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert cli.main(["train", TOY, "env.n_envs=32", "env.num_envs=16"]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert "use env.num_envs alone" in error


def test_the_former_place_of_recipes_and_runs():
    from torchrl_marl import config, recipes, runs

    with pytest.warns(FutureWarning, match=r"config\.load_config is torchrl_marl\.recipes\.load"):
        assert config.load_config is recipes.load_config
    with pytest.warns(FutureWarning, match=r"config\.train is torchrl_marl\.runs\.train now"):
        assert config.train is runs.train
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        config.nothing  # noqa: B018
