"""Recipes and overrides: reading, saving, and the entry points ``train`` and ``iterate``."""

import dataclasses
import sys
from pathlib import Path

import pytest

from torchrl_marl import recipes, runs
from torchrl_marl.envs.toy.library import TOY_ENVIRONMENTS
from torchrl_marl.errors import CheckpointError, ConfigError, MissingExtraError
from torchrl_marl.recipes import explain, load_config, read_config, recipe_names, save_config
from torchrl_marl.settings import override
from torchrl_marl.training.config import TrainConfig, read_run_config

TOY = "toy_arena_mappo"


class TestReading:
    def test_recipe_by_name_path_and_value_are_equal(self, tmp_path):
        by_name = load_config(TOY)
        save_config(by_name, tmp_path / "own.yaml")
        assert load_config(tmp_path / "own.yaml") == by_name
        assert load_config(str(tmp_path / "own.yaml")) == by_name
        assert load_config(by_name) == by_name
        assert load_config(dataclasses.asdict(by_name)) == by_name

    def test_text_dotted_and_nested_overrides_are_equal(self):
        texts = load_config(TOY, ["seed=3", "learner.lr=1e-3", "learner.actor.num_cells=[8,16]"])
        dotted = load_config(
            TOY, {"seed": 3, "learner.lr": 1e-3, "learner.actor.num_cells": (8, 16)}
        )
        nested = load_config(
            TOY, {"seed": 3, "learner": {"lr": 1e-3, "actor": {"num_cells": [8, 16]}}}
        )
        assert texts == dotted == nested
        assert texts.seed == 3
        assert texts.learner.lr == 1e-3
        assert texts.learner.actor.num_cells == [8, 16]
        assert texts.learner.critic == load_config(TOY).learner.critic

    def test_types_follow_the_schema(self):
        config = load_config(
            TOY, ["total_frames=1e5", "learner.lr=1", "env.max_steps=null", "threads=2"]
        )
        assert config.total_frames == 100_000
        assert isinstance(config.total_frames, int)
        assert config.learner.lr == 1.0
        assert isinstance(config.learner.lr, float)
        assert config.env.max_steps is None
        assert config.threads == 2

    def test_config_is_frozen(self):
        with pytest.raises(dataclasses.FrozenInstanceError):
            load_config(TOY).seed = 1

    def test_numpy_numbers_are_accepted(self):
        np = pytest.importorskip("numpy")
        overrides = {"learner.lr": np.float64(1e-3), "seed": np.int64(2)}
        config = load_config(TOY, overrides)
        assert (config.learner.lr, config.seed) == (1e-3, 2)

    def test_interpolation_of_another_setting(self):
        assert load_config(TOY, ["logging.project=run_${seed}"]).logging.project == "run_0"

    def test_arguments_of_the_scenario_are_merged(self):
        pytest.importorskip("vmas")
        config = load_config("vmas_balance_mappo", ["env.kwargs.package_mass=4"])
        assert config.env.kwargs == {"n_agents": 3, "package_mass": 4}

    @pytest.mark.parametrize(
        ("overrides", "kwargs"),
        [
            (["env.name=simple_tag"], {}),
            (["env.name=balance"], {"n_agents": 3}),
            (["env.name=wheel", "env.kwargs.n_agents=2"], {"n_agents": 2}),
            (["env.library=toy", "env.name=arena"], {}),
        ],
    )
    def test_other_scenario_does_not_inherit_kwargs_of_the_recipe(self, overrides, kwargs):
        pytest.importorskip("vmas")
        assert load_config("vmas_balance_mappo", overrides).env.kwargs == kwargs

    def test_recipe_file_is_named_after_its_file(self, tmp_path):
        (tmp_path / "mine.yaml").write_text("env: {library: toy, name: arena}\nseed: 4\n")
        config = load_config(tmp_path / "mine.yaml")
        assert (config.recipe, config.seed, config.env.name) == ("mine", 4, "arena")

    def test_tilde_in_folders_is_expanded(self, monkeypatch):
        monkeypatch.setenv("HOME", "/home/me")
        config = load_config("toy_arena_mappo", ["folder=~/run", "init_from=~/before"])
        assert (config.folder, config.init_from) == ("/home/me/run", "/home/me/before")

    def test_custom_environment_does_not_need_the_library(self, monkeypatch):
        def not_installed(*_):
            raise MissingExtraError("VMAS", "vmas")

        monkeypatch.setattr("torchrl_marl.envs.vmas.library.check_scenario", not_installed)
        with pytest.raises(MissingExtraError, match=r"pip install '\.\[vmas\]'"):
            load_config("vmas_balance_mappo")
        assert load_config("vmas_balance_mappo", own_env=True).env.name == "balance"


class TestSaving:
    def test_saved_config_round_trips_with_comments(self, tmp_path):
        config = load_config(
            TOY,
            {
                "logging.project": "1e-3 # no number",
                "folder": tmp_path / ("with space " * 12),
                "learner.target_kl": 0.02,
                "groups": {"agents": {"lr": 1e-4, "actor": {"num_cells": []}}},
            },
        )
        path = tmp_path / "config.yaml"
        save_config(config, path)
        assert load_config(path) == config
        text = path.read_text()
        assert "gamma: 0.99  # Discount factor." in text
        for setting in explain():
            assert f"{setting.key.rpartition('.')[2]}:" in text

    def test_folder_without_valid_config_is_no_run(self, tmp_path):
        with pytest.raises(CheckpointError, match="is not a run folder: it has no config.yaml"):
            read_run_config(tmp_path)
        with pytest.raises(CheckpointError, match="does not exist"):
            read_run_config(tmp_path / "none")
        (tmp_path / "config.yaml").write_text("sed: 1\n")
        with pytest.raises(CheckpointError, match="unknown setting 'sed'; did you mean 'seed'"):
            read_run_config(tmp_path)


class TestGroups:
    def test_group_overrides_change_only_given_settings(self):
        config = load_config(TOY, ["groups.agents.lr=2", "groups.agents.actor.num_cells=[8]"])
        assert config.groups == {"agents": {"lr": 2.0, "actor": {"num_cells": [8]}}}
        learner = override(config, "groups", "agents")
        assert learner.lr == 2.0
        assert learner.actor.num_cells == [8]
        assert learner.actor.activation == config.learner.actor.activation
        assert (
            dataclasses.replace(learner, lr=config.learner.lr, actor=config.learner.actor)
            == config.learner
        )
        assert override(config, "groups", "another") == config.learner


class TestHelp:
    def test_every_setting_has_help(self):
        for setting in explain():
            assert len(setting.help) > 5, setting.key

    def test_explain_shows_values_of_a_recipe(self):
        values = {s.key: s.default for s in explain(read_config(TOY, ["seed=7"]))}
        assert values["seed"] == 7
        assert values["env.name"] == "arena"
        assert "env.kwargs" in values

    def test_listed_toy_environments_exist(self):
        toy = pytest.importorskip("torchrl_marl.envs.toy")
        assert sorted(toy.TOY_ENVS) == sorted(TOY_ENVIRONMENTS)

    def test_listed_activations_are_accepted(self):
        bodies = pytest.importorskip("torchrl_marl.modules.bodies")
        for name in bodies.ACTIVATIONS:
            load_config(TOY, [f"learner.actor.activation={name}"])


class TestDoors:
    @pytest.fixture
    def trainer(self, monkeypatch, tmp_path):
        import types

        calls = []
        run = types.SimpleNamespace(folder=tmp_path, summary={})

        def train(config, env=None, callbacks=()):
            calls.append((config, env))
            return run

        fake = types.SimpleNamespace(train=train, iterate=train)
        monkeypatch.setitem(sys.modules, "torchrl_marl.training.trainer", fake)
        monkeypatch.setattr("torchrl_marl.training.trainer", fake, raising=False)
        monkeypatch.setattr(runs, "draw", lambda folder: None)
        return calls

    def test_train_passes_config_and_env(self, trainer, tmp_path):
        import torchrl_marl
        from torchrl_marl.envs import toy

        env = toy.Arena(2)
        run = torchrl_marl.train(TOY, env=env, seed=5, learner={"lr": 1e-3})
        assert run.folder == tmp_path
        config, handed = trainer[0]
        assert handed is env
        assert (config.seed, config.learner.lr) == (5, 1e-3)

    def test_train_accepts_env_settings_as_dict(self, trainer):
        runs.train(TOY, env={"num_envs": 4})
        config, handed = trainer[0]
        assert handed is None
        assert config.env.num_envs == 4

    def test_iterate_raises_at_the_call(self, trainer):
        with pytest.raises(ConfigError, match="unknown setting 'sed'"):
            runs.iterate(TOY, sed=1)
        assert trainer == []

    def test_default_recipe_exists(self):
        assert recipes.DEFAULT_RECIPE in recipe_names()
        assert isinstance(read_config(recipes.DEFAULT_RECIPE), TrainConfig)
        assert Path(recipes.__file__).with_name("configs").is_dir()
